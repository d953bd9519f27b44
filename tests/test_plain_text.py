"""Text of others: what is taken out of it and where it is cut, before it is written, shown or logged."""

import logging
import os

import pytest

from lightning_forge_profiling.plain_text import LONGEST_FILE, all_plain, encodable, name_of, once, plain, plain_logger


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Köln 日本 \U0001f600", "Köln 日本 \U0001f600"),
        ("a\u202eb\u2066c\u200bd\ufeffe\x00f\ud800g\x7fh", "abcdefgh"),
        ("a\tb\nc\rd\u2028e\x85f", "a b c d e f"),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07\x9b2Jx\x1bcy", "red xy"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys_or_that_cannot_be_seen(text, shown):
    assert plain(text) == name_of(text) == shown


def test_an_ordinary_text_is_the_same_object():
    text = "y" * 255
    assert plain(text) is text


@pytest.mark.parametrize(("length", "shown"), [(2048, "y" * 2048), (2049, "y" * 199 + "…")])
def test_a_word_is_cut_if_it_is_longer_than_a_kernel_s_name(length, shown):
    assert plain(f"a {'y' * length}/b") == f"a {shown}/b"


@pytest.mark.parametrize(("length", "shown"), [(255, "y" * 255), (256, "y" * 199 + "…")])
def test_in_a_record_a_word_is_cut_if_it_is_longer_than_a_file_s_name(length, shown):
    given = {"y" * length: [f"{'y' * length}/{'y' * length} b", 1.5, None, True]}
    assert all_plain(given, LONGEST_FILE) == {shown: [f"{shown}/{shown} b", 1.5, None, True]}


def test_a_text_is_cut_if_it_is_longer_than_a_path():
    assert plain("ab " * 1365 + "c") == "ab " * 1365 + "c"
    assert plain("ab " * 1365 + "cd") == "ab " * 1365 + "…"


@pytest.mark.parametrize(("length", "shown"), [(200, "y" * 200), (201, "y" * 199 + "…"), (10**6, "y" * 199 + "…")])
def test_a_name_has_200_characters(length, shown):
    assert name_of("y" * length) == shown
    assert name_of(type("y" * length, (), {})()) == shown


def test_bytes_that_are_no_text_are_shown_as_such():
    assert encodable(os.fsdecode(b"a\xffb")) == "a\ufffdb"


def test_a_message_is_one_plain_line_whatever_its_arguments_are(caplog):
    class Fails:
        def __str__(self):
            raise ValueError

    log = plain_logger("a.log")
    with caplog.at_level(logging.INFO, "a.log"):
        log.info("%d %.1f %s %s", 3, 1.25, "\x1b[2Ja\nb", Fails())
        log.info("nothing %s to replace" % "else")  # noqa: G002, UP031
    assert [each.getMessage() for each in caplog.records] == ["3 1.2 a b <Fails>", "nothing else to replace"]


def test_of_another_package_s_messages_those_with_the_phrase_come_once(caplog):
    log = logging.getLogger("another.package")
    once("another.package", "Adding 2 callbacks")
    for message in (
        "Adding 2 callbacks: a, b",
        "GPU available: False",
        "Adding 2 callbacks: a, b",
        "GPU available: False",
    ):
        log.warning(message)
    assert caplog.messages == ["Adding 2 callbacks: a, b", "GPU available: False", "GPU available: False"]

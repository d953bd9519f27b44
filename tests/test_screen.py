"""What reaches a terminal, a pipe and a file: reports printed by processes of their own."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios

import pytest

from lightning_forge_profiling.report.screen import Row, Screen, Table, Text, columns_of, width_of
from tests.test_cli import COMMAND, ENVIRONMENT, INPUT_BOUND, TRACES, forge
from tests.test_crossover_command import read_from

STYLE = re.compile(r"\x1b\[[\d;]*m")


def on_terminal(columns, *arguments, **environment):
    """The lines that a command writes to a terminal so wide."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "", **environment}
    del environment["COLUMNS"]
    line = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(line, stdout=end, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(end)
        written = b""
        while part := read_from(terminal):
            written += part
        assert process.wait(timeout=60) == 0
    os.close(terminal)
    return written.decode().replace("\r\n", "\n").splitlines()


def all_but_what_is_copied(lines):
    return [line for line in lines if not line.startswith("try ")]


def unwrapped(lines):
    return " ".join(" ".join(lines).split())


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_on_a_terminal_nothing_is_wider_than_it_and_no_sentence_loses_a_word(columns):
    lines = on_terminal(columns, "show", INPUT_BOUND)
    read = [STYLE.sub("", line) for line in lines]
    wrapped = all_but_what_is_copied(read)
    assert max(map(width_of, wrapped)) <= columns
    verdict, tried, *_ = forge("show", INPUT_BOUND).stdout.splitlines()
    assert unwrapped(read).startswith(unwrapped([verdict])), "the verdict, in a file in one line"
    assert tried in read, "what is to be copied is never cut"
    assert max(map(len, wrapped)) > columns - 12, "what there is of the width is used"


def test_the_verdict_and_the_totals_stand_out_on_a_terminal():
    lines = on_terminal(80, "show", INPUT_BOUND)
    assert lines[0].startswith("\x1b[1mverdict\x1b[0m     \x1b[1;33minput-bound\x1b[0m: the GPU waits")
    assert [line for line in lines if re.match(r"\x1b\[1mbusy\x1b\[0m +\x1b\[1m\d", line)]


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_wants_no_colours_gets_none(environment):
    lines = on_terminal(60, "show", INPUT_BOUND, **environment)
    assert "\x1b" not in "".join(lines)
    assert max(map(len, all_but_what_is_copied(lines))) <= 60


@pytest.mark.slow
def test_sentences_stand_beside_their_names_and_paths_stay_whole():
    path = TRACES / "ddp"
    lines = on_terminal(40, "compare", path, TRACES / "launch_bound", "--verbose", NO_COLOR="1")
    assert f"        {path}" in lines, "paths are never broken"
    [first] = [number for number, line in enumerate(lines) if line.startswith("note ")]
    assert lines[first + 1].startswith("     ")


def test_a_crossover_fits_a_narrow_terminal(tmp_path):
    h200 = TRACES.parent / "crossover_h200.json"
    lines = on_terminal(40, "crossover", "--from", h200, NO_COLOR="1")
    assert max(map(width_of, lines)) <= 40
    for time in re.findall(r"[\d.]+ [mµ]s", forge("crossover", "--from", h200).stdout.split("add:")[0]):
        assert time in "\n".join(lines)


def test_a_stream_that_is_little_more_than_a_function_will_do():
    class Written:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

    stream = Written()
    Screen(stream).line(Text("step", "bold"), name="name", column=6)
    assert stream.text == "name   step\n"


def test_an_encoding_without_the_characters_gets_others_of_the_same_width():
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    table = Table(columns_of("kernel", "time"), (Row(("elementwise_kernel…", "2 µs")),))
    Screen(stream, width=24).table(table)
    Screen(stream).line("歩")
    stream.flush()
    assert written.getvalue().decode().splitlines() == [
        "kernel              time",
        "------------------------",
        "elementwise_kernel~ 2 us",
        "?",
    ]


def test_a_process_without_a_console_prints_nowhere(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    Screen().line("step")

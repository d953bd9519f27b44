"""Text and tables laid out for a width."""

import re

import pytest

from lightning_forge_profiling.report.screen import (
    Row,
    Table,
    Text,
    clean,
    columns_of,
    padded,
    painted,
    table_lines,
    width_of,
    wrap,
)

STYLE = re.compile(r"\x1b\[[\d;]*m")


def shown(table, width):
    """The lines as they are read, and none wider than the terminal."""
    lines = [STYLE.sub("", line) for line in table_lines(table, width)]
    assert max(map(width_of, lines)) <= width
    return lines


def kernels(*names, **options):
    rows = (Row((name, "matmul", str(number), f"{number}.125")) for number, name in enumerate(names))
    return Table(columns_of("kernel", "kind", "calls", "total ms", align="<<"), tuple(rows), **options)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("", 0),
        ("step", 4),
        ("ü", 1),
        ("u\u0308", 1),
        ("모델", 4),
        ("ﾃｽﾄ", 3),
        ("テスト", 6),
        ("🔥 run", 6),
        ("µs…─", 4),
    ],
)
def test_width_is_what_a_terminal_gives_it(text, columns):
    assert width_of(text) == columns
    assert width_of(padded(text, 10)) == width_of(padded(text, 10, ">")) == 10


@pytest.mark.parametrize("width", range(1, 30))
@pytest.mark.parametrize(
    "text",
    ["the GPU waits 8.5 ms of each step", "unrolled_elementwise_kernel<direct_copy>", "a  b   " * 5, "e\u0301" * 40],
)
def test_lines_hold_all_of_the_text_and_fit(text, width):
    lines = wrap(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert max(map(width_of, lines)) <= width


def test_words_are_broken_only_where_one_is_longer_than_a_line():
    assert wrap("give the DataLoader workers", 15) == ["give the", "DataLoader", "workers"]
    assert wrap("a pneumonoultramicroscopic word", 10) == ["a", "pneumonoul", "tramicrosc", "opic word"]
    assert wrap("学習のステップ", 5) == ["学習", "のス", "テッ", "プ"]
    assert wrap("学", 1) == ["学"], "what fits nowhere is shown all the same"


def test_columns_are_as_wide_as_their_text_where_there_is_room():
    assert shown(kernels("gemm", "歩幅"), 80) == [
        "kernel   kind     calls   total ms",
        "──────────────────────────────────",
        "gemm     matmul       0      0.125",
        "歩幅     matmul       1      1.125",
    ]


def test_the_widest_text_wraps_and_numbers_stay_in_its_first_line():
    assert shown(kernels("elementwise_kernel of a long name"), 52)[2:] == [
        "elementwise_kernel of a    matmul       0      0.125",
        "long name",
    ]
    assert shown(kernels("elementwise_kernel of a long name"), 45)[2:] == [
        "elementwise_kernel    matmul      0     0.125",
        "of a long name",
    ], "before a name gets too narrow to be read, columns come nearer"


def test_a_row_of_a_tree_keeps_its_indentation():
    table = Table(columns_of("", "ms"), (Row(("in Python between launches", "8.484"), depth=2),))
    assert shown(table, 28) == [
        "                          ms",
        "────────────────────────────",
        "  in Python between    8.484",
        "  launches",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 60])
def test_on_a_narrow_terminal_columns_without_room_follow_below_and_no_number_is_lost(width):
    rows = (Row(("0", *(f"{number}.125" for number in range(8)))),)
    table = Table(columns_of("rank", *(f"column {number}" for number in range(8))), rows)
    lines = shown(table, width)
    assert re.findall(r"\d\.125", "\n".join(lines)) == [f"{number}.125" for number in range(8)]
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) > 1
    assert all(block.startswith("rank ") and "\n0 " in block for block in blocks)


def test_headings_may_be_missing_and_a_row_may_be_empty():
    rows = Row(("forward", "1.0", "10 %")), Row(()), Row(("step", "10.0", "100 %"))
    assert shown(Table(columns_of("", "", ""), rows), 40) == ["forward    1.0    10 %", "", "step      10.0   100 %"]
    assert shown(Table(columns_of("a", "b"), ()), 40) == ["a   b", "─────"]
    assert table_lines(Table(columns_of("", ""), ()), 40) == []


def test_style_is_put_around_text_and_not_around_the_space_beside_it():
    table = Table(columns_of("name", "ms"), (Row(("a", Text("1", "green")), style="bold"),))
    assert table_lines(table, 40) == [
        "\x1b[1mname\x1b[0m   \x1b[1mms\x1b[0m",
        "─────────",
        "\x1b[1ma\x1b[0m       \x1b[32m1\x1b[0m",
    ]
    assert painted(Text("sync-bound: wait", "bold yellow", marked="sync-bound"), "sync-bound: wait") == (
        "\x1b[1;33msync-bound\x1b[0m: wait"
    )


def test_names_lose_what_could_steer_the_terminal_before_they_are_measured():
    assert clean(Text("a\x1b[31mb\u202e", "bold")) == Text("ab", "bold")
    table = Table(columns_of("\x1b]0;title\x07name", "ms"), (Row(("x\x1b[2J\ny", "1")),))
    assert shown(table, 40) == ["name   ms", "─────────", "x y     1"]
    assert "\x1b]" not in "".join(table_lines(table, 40))

"""All ranks of a run as a user sees them: in `watch`, `summary`, its JSON, the page and the metrics."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
from lightning.pytorch.loggers import CSVLogger
from msgspec.structs import replace

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.names import RANKS_JSON, pulse_name
from lightning_forge_profiling.record.files import HeardFiles, encode_line, write_heard, write_pulse
from lightning_forge_profiling.record.reader import Follower, read_run
from lightning_forge_profiling.report import ranks as report_ranks
from lightning_forge_profiling.report.live_view import print_frame
from lightning_forge_profiling.report.page import record_of
from lightning_forge_profiling.report.run_page import run_page
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.run.fit_log import rank_metrics
from lightning_forge_profiling.run.rank_watch import RankWatch
from lightning_forge_profiling.schema import (
    End,
    EventLine,
    Hang,
    LastPulse,
    LateRank,
    RanksStatus,
    RankStatus,
    SilentRank,
    Stall,
)
from tests.browser import wait_until
from tests.models import Classifier, loader, quiet_trainer
from tests.outcomes import HANGS_S, SCRIPTS, logged, unwrapped
from tests.ports import free_port
from tests.record_builder import MadeRun, made_pulse, write_ranks
from tests.report_page import Page
from tests.test_watch import append

WIDTHS = (40, 80, 120)
WHERE = (
    "rank 1 has been stalled in step 4711 for 63 s: `collate` at data.py:31; ranks 0, 2, 3 wait for it in all_reduce"
)
HANG = Hang(rank=1, where=WHERE, seconds=63.0)


@pytest.fixture(autouse=True)
def lines_are_whole(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets


def made(folder, ranks=4, **fields):
    """The record of a run whose ranks' own work is 10.0, 10.5, 11.0, ... ms, by pulses of a second ago."""
    run = MadeRun(**{"rows": 12, "ranks": ranks, **fields})
    record, at = run.write(folder), time.time() - 1
    write_ranks(record, [made_pulse(rank, ranks, at, own_ms=10 + rank / 2) for rank in range(ranks)])
    return record


def frame(record, width=80, now=None):
    """A frame of `watch`, which is nowhere wider than the terminal."""
    page = StringIO()
    print_frame(read_run(record), "run", now or time.time(), Screen(page, width=width, wrap=True, colours=False))
    assert max(map(len, page.getvalue().splitlines())) <= width
    return page.getvalue()


def rows(text):
    """Cells of the table of ranks, by row, and the lines between its title and its head."""
    lines = text[text.index("\nRanks") + 1 :].split("\n\n")[0].splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("rank "))
    return [re.split(r" {2,}|(?<=s) (?=\w{4})", line) for line in lines[head + 2 :]], lines[:head]


def printed(command, record, capsys):
    assert main([*command, str(record)]) == 0
    return capsys.readouterr().out


def summary_json(record, capsys):
    return json.loads(printed(["show", "--json"], record, capsys))


@pytest.fixture
def found(monkeypatch):
    """What is made out of all pulses together, a hang and a straggler, is given."""

    def give(**fields):
        known = report_ranks.ranks_status
        monkeypatch.setattr(report_ranks, "ranks_status", lambda *pulses: replace(known(*pulses), **fields))

    return give


# --- the table -------------------------------------------------------------------------------------------------------


def test_watch_and_summary_have_a_line_per_rank_those_with_most_work_of_their_own_first(tmp_path, capsys):
    record = made(tmp_path)
    for command in (["watch", "--once"], ["show"]):
        table, above = rows(printed(command, record, capsys))
        assert re.fullmatch(r"Ranks, heard \d s ago", above[0])
        assert above[1:] == ["per step    own work differs by 1.50 ms, exposed communication and waits 3.45 ms"]
        assert [row[:4] for row in table] == [
            ["3", "1,200", "11.50", "2.70"],
            ["2", "1,200", "11.00", "3.20"],
            ["1", "1,200", "10.50", "3.70"],
            ["0", "1,200", "10.00", "4.20"],
        ]
        assert all(re.fullmatch(r"\d s", row[4]) for row in table)


def test_json_has_the_ranks_as_they_are_now(tmp_path, capsys):
    content = summary_json(made(tmp_path), capsys)
    assert content["outcome"] == "running"
    ranks = content["ranks"]
    assert (ranks["straggler"], ranks["hang"], ranks["spread_ms"]) == (None, None, pytest.approx(1.5))
    assert ranks["exposed_comm_ms"] == pytest.approx(3.45)
    assert [(rank["rank"], rank["state"], rank["own_ms"]) for rank in ranks["ranks"]] == [
        (0, "live", 10.0), (1, "live", 10.5), (2, "live", 11.0), (3, "live", 11.5),
    ]  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_the_straggler_is_named_with_its_cause(tmp_path, found, width):
    found(straggler=LateRank(rank=2, cause="forward", ms=4.6))
    text = frame(made(tmp_path), width)
    table, above = rows(text)
    assert "straggler the others wait 4.60 ms a step for rank 2: forward" in unwrapped("\n".join(above))
    if width > min(WIDTHS):
        assert [row[-1] for row in table if row[0] == "2"] == ["straggler: forward"]
    else:
        assert "straggler:" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hang_is_at_the_top_and_its_rank_first(tmp_path, found, capsys, width):
    record, at = made(tmp_path), time.time() - 1
    stall = Stall(seconds=63.0, call="all_reduce", waits=True)
    pulses = [made_pulse(rank, 4, at, own_ms=10 + rank / 2, stall=stall) for rank in range(4)]
    pulses[1] = made_pulse(1, 4, at, own_ms=10.5, stall=Stall(seconds=63.0, place="collate at data.py:31"))
    write_ranks(record, pulses)
    found(hang=HANG)
    text = frame(record, width)
    first, second, rest = text.split("\n", 2)
    assert (first, second) == ("run", "running: step 600")
    assert unwrapped(rest).startswith(f"hang {WHERE} NVIDIA H200 on node0")
    table, _ = rows(text)
    assert [row[0] for row in table if row[0]] == ["1", "3", "2", "0"]
    assert re.search(r"(?m)^1 .* stalled$", text)
    assert re.search(r"(?m)^3 .* waiting$", text)
    assert f"hang {WHERE}" in unwrapped(printed(["show"], record, capsys))
    hang = summary_json(record, capsys)["ranks"]["hang"]
    assert (hang["rank"], hang["where"]) == (1, WHERE)


def test_a_rank_that_is_gone_stopped_or_was_never_heard_is_above_those_that_work(tmp_path, capsys):
    record, at = made(tmp_path), time.time() - 1
    silent = (
        SilentRank(rank=1, pid=1001, process="gone", seconds=42),
        SilentRank(rank=2, pid=1002, process="stopped", seconds=42),
    )
    pulses = [made_pulse(rank, 6, at - 50 * (rank in {1, 2, 3}), own_ms=10 + rank / 2) for rank in range(5)]
    pulses[0] = made_pulse(0, 6, at, own_ms=10.0, silent=silent)
    for rank in range(4):  # of a run of six, of which two write to another machine's disk
        path = record / f"rank{rank}.jsonl"
        path.write_text(path.read_text().replace('"world_size":4', '"world_size":6'))
    write_ranks(record, pulses)
    table, _ = rows(printed(["watch", "--once"], record, capsys))
    assert [(row[0], row[-1]) for row in table][:2] == [("1", "gone"), ("2", "stopped")]
    states = {row[0]: row[-1] for row in table}
    assert states["5"] == "never heard"
    assert re.fullmatch(r"\d s", states["3"]), "its record goes on, so it is live"


def test_a_rank_that_neither_writes_nor_is_heard_is_silent(tmp_path):
    record, at = made(tmp_path), time.time() - 1
    lines = MadeRun(rows=12, ranks=4, began=at - 600).lines(3)
    (record / "rank3.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    pulses = [made_pulse(rank, 4, at - (50 if rank == 3 else 0), own_ms=10 + rank / 2) for rank in range(4)]
    write_ranks(record, pulses)
    text = frame(record, now=at + 1)
    table, _ = rows(text)
    assert (table[0][0], table[0][-2:]) == ("3", ["51 s", "silent"])
    assert "; rank 3 silent for 51 s" in unwrapped(text)


def test_a_rank_that_began_anew_says_so(tmp_path):
    record, at = made(tmp_path), time.time() - 1
    write_ranks(record, [made_pulse(rank, 4, at, own_ms=10.0) for rank in range(4)], {1: 1, 2: 3})
    table, _ = rows(frame(record, 120))
    assert {row[0]: row[-1] for row in table if "restarted" in row[-1]} == {
        "1": "restarted once",
        "2": "restarted 3 times",
    }


def test_before_any_work_is_known_there_are_no_columns_of_it(tmp_path):
    record, at = MadeRun(ranks=2, rows=2, states=False).write(tmp_path), time.time() - 1
    write_ranks(record, [made_pulse(rank, 2, at) for rank in range(2)])
    text = frame(record, now=at + 1)
    assert "own ms" not in text
    assert rows(text)[0] == [["0", "1,200", "1 s"], ["1", "1,200", "1 s"]]


def test_the_work_over_the_run_stands_in_where_none_is_known_live(tmp_path, capsys):
    record, at = MadeRun(ranks=3, late=2).write(tmp_path), time.time() - 1
    write_ranks(record, [made_pulse(rank, 3, at) for rank in range(3)])
    ranks = summary_json(record, capsys)["ranks"]
    assert ranks["straggler"] == {"rank": 2, "cause": "data", "ms": pytest.approx(6.0, abs=0.5)}
    assert ranks["spread_ms"] == pytest.approx(6.0, abs=0.5)
    assert [rank["waits_ms"] for rank in ranks["ranks"]] == [pytest.approx(ms, abs=0.5) for ms in (6.0, 6.0, 0.0)]


@pytest.mark.slow
def test_of_a_thousand_ranks_the_worst_eight_are_shown_in_time(tmp_path):
    run, at = MadeRun(ranks=1000, rows=2), time.time() - 1
    record = run.write(tmp_path)
    own_ms = {700: 16.0, 3: 15.0, **{rank: 13.0 + rank / 1000 for rank in range(100, 106)}}
    pulses = [made_pulse(rank, 1000, at, own_ms=own_ms.get(rank, 10.1 + rank % 22 / 10)) for rank in range(1000)]
    write_ranks(record, pulses)
    look, spent = Follower(record), []
    for _ in range(3):
        began = time.process_time()
        page = StringIO()
        print_frame(look.look(), "run", time.time(), Screen(page, width=80, wrap=True, colours=False))
        spent.append(time.process_time() - began)
        write_heard(record, [])  # each frame has new ones
        write_ranks(record, pulses)
    assert max(spent[1:]) < 2
    table, _ = rows(page.getvalue())
    assert [row[0] for row in table[:-1]] == ["700", "3", "105", "104", "103", "102", "101", "100"]
    assert table[-1] == ["992 more: own work 10.1 to 12.2 ms"]
    pulses[44:94] = [made_pulse(rank, 1000, at, stall=Stall(seconds=50.0)) for rank in range(44, 94)]
    write_ranks(record, pulses)
    assert rows(frame(record))[0][-1] == ["992 more: 42 stalled, own work 10.1 to 16.0 ms"]


def test_hosts_are_named_and_their_gpus_compared_if_they_differ(tmp_path):
    record, at = made(tmp_path, ranks=16), time.time() - 1
    pulses = [
        made_pulse(rank, 16, at, own_ms=10 + rank / 2, sensors={"sm_mhz": mhz, "temperature_c": 60.0})
        for rank, mhz in enumerate([1755.0] * 9 + [1255.0] + [1755.0] * 6)
    ]
    write_ranks(record, pulses)
    wide = frame(record, 120)
    assert re.search(r"(?m)^rank   host +step +own ms +wait ms +age +MHz$", wide)
    assert {row[0]: (row[1], row[-1]) for row in rows(wide)[0][:-1]}["9"] == ("node1", "1255")
    assert "°C" not in wide.split("\nRanks")[1], "equal temperatures need no column"
    assert "MHz" not in frame(record, 80).split("\nRanks")[1]
    assert "node1" not in frame(record, 40).split("\nRanks")[1]


def test_a_host_whose_clock_is_an_hour_off_is_as_live_as_the_others(tmp_path):
    record, now = made(tmp_path), time.time()
    pulses = [made_pulse(rank, 4, now - 1 - 3600 * (rank == 2), own_ms=10.0) for rank in range(4)]
    write_heard(record, [LastPulse(pulse=pulse, at=now - 1) for pulse in pulses])
    table, _ = rows(frame(record, now=now))
    assert {row[4] for row in table} == {"1 s"}


# --- what is old, and what is over -----------------------------------------------------------------------------------


def frozen(folder):
    """Rank 0 was stopped ten minutes ago; of three others two stand, as their files say, and one is gone."""
    now = time.time()
    record = MadeRun(rows=12, ranks=4, began=now - 1200).write(folder)
    write_ranks(record, [made_pulse(rank, 4, now - 600, own_ms=10 + rank / 2) for rank in range(4)])
    silent = (SilentRank(rank=0, pid=1000, process="stopped", seconds=42),)
    stall = Stall(seconds=598.0, call="all_reduce", waits=True)
    for rank in (1, 2):
        write_pulse(record, made_pulse(rank, 4, now - 2, own_ms=10.5, number=700, stall=stall, silent=silent))
    return record


def test_of_a_run_whose_rank_0_is_frozen_the_age_is_said_and_what_the_others_wrote(tmp_path, capsys):
    record = frozen(tmp_path)
    for command in (["watch", "--once"], ["show"]):
        text = printed(command, record, capsys)
        assert "; rank 0 silent for 10 min" in text
        table, above = rows(text)
        assert above[0] == "Ranks, last heard by rank 0 10 min ago; 2 of 4 wrote since"
        assert [(row[0], row[-1]) for row in table] == [
            ("0", "stopped"), ("3", "silent"), ("1", "waiting"), ("2", "waiting"),
        ]  # fmt: skip
        ages = {row[0]: row[4] for row in table}
        assert (ages["0"], ages["3"]) == ("10 min", "10 min")
        assert all(re.fullmatch(r"\d+ s", ages[rank]) for rank in "12"), "seconds, many of them on a busy machine"
    ranks = summary_json(record, capsys)["ranks"]["ranks"]
    assert [(rank["state"], round(rank["age_s"] / 600)) for rank in ranks] == [
        ("stopped", 1), ("waits", 0), ("waits", 0), ("silent", 1),
    ]  # fmt: skip


def test_a_killed_run_says_how_old_all_is(tmp_path, capsys):
    now = time.time()
    record = MadeRun(rows=12, ranks=2, began=now - 4000).write(tmp_path)
    write_ranks(record, [made_pulse(rank, 2, now - 3600, own_ms=10.0) for rank in range(2)])
    text = printed(["show"], record, capsys)
    assert "silent for 1 h 0 min" in text
    assert "Ranks, last heard by rank 0 1 h 0 min ago; none of 2 wrote since" in text
    assert text.count("silent") >= 3


def test_a_run_in_a_long_validation_is_not_silent_while_its_ranks_are_heard(tmp_path, capsys):
    now = time.time()
    record = MadeRun(rows=12, ranks=2, began=now - 500).write(tmp_path)
    assert summary_json(record, capsys)["outcome"] == "silent"
    write_ranks(record, [made_pulse(rank, 2, now - 1, part="validation") for rank in range(2)])
    assert summary_json(record, capsys)["outcome"] == "running"


def test_after_the_run_the_straggler_is_that_of_its_analysis_and_no_rank_grows_old(tmp_path, capsys):
    began = time.time() - 4000
    run = MadeRun(ranks=3, late=1, began=began, outcome="finished")
    record = run.write(tmp_path)
    end = next(line for line in run.lines() if isinstance(line, End))
    write_ranks(record, [made_pulse(rank, 3, end.at, own_ms=8.2) for rank in range(3)])  # so each waits 6 ms
    (record / "rank2.jsonl").unlink()  # on another machine's disk: what was heard of it counts, which was not its end
    content = summary_json(record, capsys)
    assert content["ranks"]["straggler"] == {"rank": 1, "cause": "data", "ms": pytest.approx(6.0, abs=0.5)}
    assert [rank["state"] for rank in content["ranks"]["ranks"]] == ["finished", "finished", "live"]
    [found] = [finding for finding in content["analysis"]["findings"] if finding["code"] == "straggler"]
    assert content["ranks"]["straggler"]["ms"] == found["evidence"]["others_wait_ms_per_step"]
    text = printed(["show"], record, capsys)
    assert "Ranks over the run\nstraggler   the others wait" in text
    assert "silent" not in text


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_damaged_or_of_another_run_is_left_out(tmp_path):
    record, at = MadeRun(rows=2, ranks=2).write(tmp_path), time.time()
    for content in (b"", b"[", b'[{"pulse": 1}]', b"[" * 10**6, b'[{"at": 1e300}]'):
        (record / RANKS_JSON).write_bytes(content)
        assert "Ranks by their records" in frame(record)
    write_ranks(record, [made_pulse(rank, 2, at, run="another") for rank in range(2)])
    assert "Ranks by their records" in frame(record)
    (record / pulse_name(1)).symlink_to("/dev/zero")
    (record / RANKS_JSON).unlink()
    (record / RANKS_JSON).mkdir()
    assert "Ranks by their records" in frame(record)


def test_names_of_hosts_and_causes_write_no_codes_to_a_terminal(tmp_path, found):
    found(hang=Hang(rank=1, where="\x1b[2Jevil", seconds=1.0))
    record, at = made(tmp_path), time.time() - 1
    write_ranks(record, [made_pulse(rank, 4, at, own_ms=10.0, host=f"\x1b[2J{rank}") for rank in range(4)])
    assert "\x1b" not in frame(record)


def test_a_world_of_a_billion_ranks_costs_nothing(tmp_path, capsys):
    record, at = MadeRun(rows=2, ranks=2).write(tmp_path), time.time()
    for rank in range(2):
        path = record / f"rank{rank}.jsonl"
        path.write_text(path.read_text().replace('"world_size":2', '"world_size":1000000000'))
    write_ranks(record, [made_pulse(rank, 10**9, at) for rank in range(2)])
    began = time.process_time()
    assert len(summary_json(record, capsys)["ranks"]["ranks"]) < 10**5
    assert time.process_time() - began < 10


def test_files_are_opened_again_only_if_one_was_replaced(tmp_path):
    record = made(tmp_path)
    files = HeardFiles(record)
    first = files.read("made-up")
    assert (files.read("made-up") is first, [*first]) == (True, [0, 1, 2, 3])
    write_pulse(record, made_pulse(2, 4, time.time() + 5, step=1300, number=20))
    assert files.read("made-up")[2].pulse.step == 1300
    write_ranks(record, [made_pulse(0, 4, time.time(), step=1400)])
    assert files.read("made-up")[0].pulse.step == 1400
    assert files.read("another") == {}


def test_a_host_that_does_not_hear_rank_0_has_its_own_ranks_hang(tmp_path, capsys):
    record, at = made(tmp_path), time.time() - 1
    for name in ("rank0.jsonl", "rank1.jsonl", RANKS_JSON):
        (record / name).unlink()
    for rank in (2, 3):
        write_pulse(record, made_pulse(rank, 4, at, stall=Stall(seconds=75.0, call="all_reduce", waits=True)))
    where = "ranks 2, 3 have waited in all_reduce for 75 s; ranks 0, 1 not heard"
    for command in (["watch", "--once"], ["show"]):
        assert f"hang {where}" in unwrapped(printed(command, record, capsys))
    assert summary_json(record, capsys)["ranks"]["hang"] == {"rank": None, "where": where, "seconds": 75.0}


# --- events ----------------------------------------------------------------------------------------------------------


def test_events_of_the_ranks_are_sentences(tmp_path, capsys):
    record, at = made(tmp_path), time.time()
    append(record, EventLine(at=at - 0.3, step=600, kind="straggler", text="the others wait 4.60 ms a step for rank 2"))
    append(record, EventLine(at=at - 0.3, step=600, kind="hang", text=WHERE.partition(";")[0]))
    append(record, EventLine(at=at - 0.2, step=600, kind="hang", text=WHERE))
    append(record, EventLine(at=at - 0.1, step=600, kind="hang", text="over", seconds=63))
    for command in (["watch", "--once"], ["show"]):
        lines = [
            line.partition("ago, ")[2] for line in printed(command, record, capsys).splitlines() if "ago, " in line
        ]
        assert [line for line in lines if line.startswith("step     600: ")] == [
            "step     600: hang, 63.0 s: over",
            "step     600: straggler: the others wait 4.60 ms a step for rank 2",
        ]
    shown = record_of(run_page(read_run(record), at))
    assert [event["kind"] for event in shown["events"][-2:]] == ["straggler", "hang"]
    assert {"straggler", "hang"} <= {*shown["problems"]}
    append(record, EventLine(at=at, step=700, kind="hang", text=WHERE))
    last = record_of(run_page(read_run(record), at))["events"][-2:]
    assert [event["text"] for event in last] == ["over", WHERE], "one that is not over is shown, too"


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_says_hang_and_straggler_first_and_has_the_ranks(tmp_path, found, browser, width, scheme):
    found(hang=HANG, straggler=LateRank(rank=2, cause="forward", ms=4.6))
    record, at = made(tmp_path, ranks=20), time.time() - 1
    append(record, EventLine(at=at, step=600, kind="hang", text=WHERE))
    file = tmp_path / "run.html"
    file.write_text(run_page(read_run(record), time.time()), encoding="utf-8")
    page = Page.of_file(browser, file, width=width, scheme=scheme)
    assert page.texts("#verdict > :first-child") == [f"Hang: {WHERE}"]
    assert page.texts("#straggler") == ["Straggler: the others wait 4.60 ms a step for rank 2: forward"]
    assert re.match(r"Ranks, heard \d s ago", page.texts("#ranks h2")[0])
    assert page.column("ranks", 1) == ["1", *map(str, range(19, 4, -1))][:16]
    page.run("[...document.querySelectorAll('#ranks button')].at(-1).click()")
    assert page.texts("#ranks tbody tr:nth-child(19) > :nth-child(2)") == ["straggler: forward"]
    assert page.cut_texts() == []
    assert page.faint_texts() == []
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    for table in page.tables().values():
        assert not table["cut"] or (table["fades"] and table["noted"])
    assert page.complaints() == []


def test_a_single_rank_has_no_table_but_its_hang(tmp_path, found):
    record = MadeRun(rows=2).write(tmp_path)
    assert "Ranks" not in frame(record)
    assert record_of(run_page(read_run(record), time.time()))["ranks"] is None
    found(hang=Hang(rank=0, where="rank 0 has been stalled in step 100 for 63 s: `input` at train.py:3", seconds=63.0))
    assert "hang        rank 0 has been stalled in step 100" in frame(record)
    assert "Ranks" not in frame(record)
    assert record_of(run_page(read_run(record), time.time()))["ranks"]["hang"].startswith("rank 0 has been stalled")


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_the_metrics_leave_out_what_is_not_known():
    known = tuple(RankStatus(rank=rank, own_ms=own_ms, state="live") for rank, own_ms in enumerate((10.0, 12.0, 11.0)))
    status = RanksStatus(ranks=known, spread_ms=2.0, exposed_comm_ms=0.5)
    assert rank_metrics(status) == {"ranks/slowest": 1.0, "ranks/spread_ms": 2.0, "ranks/exposed_comm_ms": 0.5}
    one_unknown = replace(status, ranks=(*known, RankStatus(rank=3)))
    assert "ranks/slowest" not in rank_metrics(one_unknown)
    assert rank_metrics(RanksStatus(ranks=known[:1])) == rank_metrics(None) == {}


def test_a_fit_logs_them_with_each_entry(tmp_path, monkeypatch):
    ranks = tuple(RankStatus(rank=rank, own_ms=10.0 + rank) for rank in range(2))
    status = RanksStatus(ranks=ranks, spread_ms=1.0, exposed_comm_ms=0.25)
    monkeypatch.setattr(RankWatch, "start", lambda watch: setattr(watch, "status", status))
    logger = CSVLogger(tmp_path, name="csv")
    quiet_trainer(ThroughputCallback(), logger=logger, default_root_dir=tmp_path, log_every_n_steps=10).fit(
        Classifier(), loader(160)
    )
    [*_, last] = logged(tmp_path, "ranks/slowest")
    assert [last[f"ranks/{name}"] for name in ("slowest", "spread_ms", "exposed_comm_ms")] == [1.0, 1.0, 0.25]


# --- a real run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_real_ranks_are_watched_live(tmp_path, capsys):
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    command = [sys.executable, SCRIPTS / "slow_rank.py", tmp_path, "forward", "long"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **quiet) as run:
        try:

            def both_train():
                assert run.poll() is None
                for path in tmp_path.rglob(RANKS_JSON):
                    heard = HeardFiles(path.parent).read(read_run(path.parent).ranks[0].begin.run)
                    if len(heard) == 2 and all(one.pulse.step for one in heard.values()):
                        return path.parent
                return None

            record = wait_until(both_train, "both ranks are heard", HANGS_S)
            table, above = rows(printed(["watch", "--once"], record, capsys))
            content = summary_json(record, capsys)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    assert above[0].startswith("Ranks, ")
    assert {row[0] for row in table} == {"0", "1"}
    assert content["outcome"] == "running"
    assert content["ranks"]["hang"] is None
    assert [rank["pid"] > 0 and rank["step"] > 0 for rank in content["ranks"]["ranks"]] == [True, True]
    if content["ranks"]["straggler"] is not None:
        assert content["ranks"]["straggler"]["rank"] == 1

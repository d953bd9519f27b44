"""`forge-profiling watch`: a run live on a real terminal, which is as before however it ends."""

import os
import re
import signal
import subprocess
import time

import msgspec
import pytest

from lightning_forge_profiling.record.histogram import histogram
from lightning_forge_profiling.record.lines import Begin, End, IntervalLine, encode_line
from lightning_forge_profiling.record.reader import Follower, RecordError, read_run
from lightning_forge_profiling.report.live_view import print_frame
from lightning_forge_profiling.report.screen import Screen
from tests.outcomes import HANGS_S
from tests.record_builder import MadeRun
from tests.terminals import frames, terminal
from tests.test_cli import COMMAND, ENVIRONMENT, fails, forge

ENTERS, LEAVES = "\x1b[?1049h", "\x1b[?1049l"
SHOWS_CURSOR, HIDES_CURSOR = "\x1b[?25h", "\x1b[?25l"
LONG_AGO = 1.7e9


def append(record, *lines, rank=0):
    with (record / f"rank{rank}.jsonl").open("ab") as file:
        file.write(b"".join(map(encode_line, lines)))


@pytest.fixture
def growing(tmp_path):
    """The record of a run whose first half is written, and the lines of its second half."""
    run = MadeRun(rows=24, outcome="finished", began=time.time() - 35)
    record, lines = run.write(tmp_path), run.lines()
    (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines[: len(lines) // 2])))
    return record, lines[len(lines) // 2 :]


def watched(record, *options, **kwargs):
    return terminal("watch", record, "--every", "0.1", *options, **{"environment": ENVIRONMENT, **kwargs})


def left_as_it_was(shown):
    """The last switch of screens, cursor and line wrapping is back, and the attributes are the same."""
    text = shown.output
    assert text.rfind(LEAVES) > text.rfind(ENTERS) >= 0
    assert text.rfind(SHOWS_CURSOR) > text.rfind(HIDES_CURSOR) >= 0
    assert text.rfind("\x1b[?7h") > text.rfind("\x1b[?7l") >= 0
    assert shown.is_as_before()
    return True


# --- one frame -------------------------------------------------------------------------------------------------------


def test_a_frame_has_pace_causes_ranks_and_events(tmp_path):
    run = MadeRun(ranks=3, late=2)
    done = forge("watch", run.write(tmp_path), "--once")
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert "\x1b" not in text
    assert ": running: step 1,200, last written " in text
    assert "NVIDIA H200 on node0, 3 ranks, precision bf16-mixed" in text
    for part in (
        "step        42.", "50 steps to 1,200", "backward ", "throughput  ", "% utilized, 61.2 GiB used",
        "whole fit   steps ", "verdict     input-bound, ", "rank    step ", "validation, 4.0 s",
    ):  # fmt: skip
        assert part in text, part
    first, *_ = [line for line in text.splitlines() if re.match(r"\d+ +1,200 ", line)]
    assert re.match(r"2 +1,200 +42\.\d\d +42\.\d\d +0\.00 ", first), "the late rank, which waits for none"
    assert text.count(": validation, 4.0 s\n") == 2, "each event once for all ranks"
    assert text.count(", validation 7 %, ") == 1, "of the whole fit"
    assert text.count("also        validation-bound, 8 % of the fit: ") == 1


def test_the_sparkline_shows_the_interval_that_took_long(tmp_path):
    run = MadeRun(rows=10)
    record, lines = run.write(tmp_path), run.lines()
    slow = lines.index(next(line for line in lines if isinstance(line, IntervalLine) and line.step == 400))
    lines[slow] = msgspec.structs.replace(lines[slow], steps_us=histogram([72.0] * 50))
    (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    text = forge("watch", record, "--once").stdout
    assert "p95 36.7 ms ▁▁▁▁▁▁▁█▁▁\n" in text


def test_a_frame_fits_into_40_columns(tmp_path):
    record = read_run(MadeRun(ranks=4, late=1).write(tmp_path))
    page = Capture()
    print_frame(record, "run", time.time(), Screen(page, width=40, wrap=True, colours=False))
    assert "backward" in page.text
    assert [line for line in page.text.splitlines() if len(line) > 40] == []


def test_an_interval_without_regions_leaves_those_of_the_interval_before(tmp_path):
    run = MadeRun(rows=10)
    record, lines = run.write(tmp_path), run.lines()
    last = [line for line in lines if isinstance(line, IntervalLine)][-1]
    append(record, msgspec.structs.replace(last, step=510, counted=10, device_ms={"step": 360.0}, host_ms={}))
    text = forge("watch", record, "--once").stdout
    assert "running: step 510, " in text
    [forward] = [line.split() for line in text.splitlines() if line.startswith("forward ")]
    assert [float(ms) for ms in forward[-2:]] == pytest.approx([8.1, 8.1], abs=0.1), "means of steps with known regions"
    assert "50 steps to 500" in text


class Capture:
    """A stream that keeps what is written to it."""

    text = ""

    def write(self, text):
        self.text += text


def test_a_terminal_without_unicode_gets_other_bars(tmp_path):
    record = MadeRun().write(tmp_path)
    done = forge("watch", record, "--once", environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "####" in done.stdout
    assert [line for line in done.stdout.splitlines() if "?" in line and "?C" not in line] == []


# --- live ------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_it_shows_what_is_written_and_ends_with_the_run_and_its_table(growing):
    record, later = growing
    with watched(record) as shown:
        shown.wait_for(lambda text: "step 600" in text or "step 550" in text)
        append(record, *(line for line in later if not isinstance(line, End)))
        shown.wait_for(lambda text: "step 1,200" in text)
        append(record, later[-1])
        assert shown.ended() == 0
        assert left_as_it_was(shown)
    after = shown.output.rpartition(LEAVES)[2]
    assert "finished after 1 min, 1,200 steps" in after
    assert "Where a step goes: 36." in after
    assert shown.process.stderr.closed


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda shown: shown.type("\x03"), 130),
        (lambda shown: shown.process.send_signal(signal.SIGTERM), 143),
        (lambda shown: shown.process.send_signal(signal.SIGHUP), 129),
    ],
    ids=["ctrl-c", "sigterm", "sighup"],
)
def test_the_terminal_is_as_before_however_it_is_ended(growing, end, code):
    with watched(growing[0]) as shown:
        shown.wait_for(frames)
        assert HIDES_CURSOR in shown.output
        end(shown)
        assert shown.ended() == code
        assert left_as_it_was(shown)
        assert shown.process.stderr.read() == b""


def test_while_it_is_stopped_the_shell_has_its_screen_and_then_it_goes_on(growing):
    with watched(growing[0]) as shown:
        shown.wait_for(frames)
        shown.type("\x1a")
        shown.wait_for(lambda text: LEAVES in text)
        os.waitpid(shown.process.pid, os.WUNTRACED)
        assert left_as_it_was(shown)
        place = len(shown.output)
        shown.process.send_signal(signal.SIGCONT)
        shown.wait_for(lambda text: ENTERS in text and frames(text), since=place)
        shown.type("\x03")
        assert shown.ended() == 130
        assert left_as_it_was(shown)


def test_it_ends_when_its_terminal_is_closed(growing):
    with watched(growing[0]) as shown:
        shown.wait_for(frames)
        shown.hang_up()
        assert shown.process.wait(timeout=HANGS_S) in {129, 2}


def test_a_frame_is_as_large_as_the_terminal_and_follows_its_size(growing):
    with watched(growing[0], "--every", "50", columns=100, lines=40) as shown:
        shown.wait_for(frames)
        place = len(shown.output)
        shown.resize(40, 12)
        shown.wait_for(lambda text: "more lines" in text, since=place)
        lines = frames(shown.output)[-1]
        assert len(lines) == 12
        assert max(map(len, lines)) <= 40


def test_without_colours_nothing_is_styled(growing):
    def whole_frame(text):
        return "\x1b[J" in text.partition("\x1b[H")[2]

    with watched(growing[0], environment={**ENVIRONMENT, "NO_COLOR": "1"}) as shown:
        assert "\x1b[1m" not in shown.wait_for(whole_frame)
    with watched(growing[0]) as shown:
        assert "\x1b[1m" in shown.wait_for(whole_frame)


def test_a_pipe_gets_a_frame_for_what_is_new_and_ends_it_when_it_is_closed(growing):
    record, later = growing
    command = [*COMMAND, "watch", str(record), "--every", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert ": running: step " in process.stdout.readline()
        process.stdout.close()
        append(record, *later[:-1])
        assert process.wait(timeout=HANGS_S) == 141
        assert process.stderr.read() == ""


# --- which run -------------------------------------------------------------------------------------------------------


def test_without_a_record_it_is_an_error_unless_told_to_wait(tmp_path):
    assert fails(forge("watch", tmp_path, "--once"), "no record of a run in ")
    assert fails(forge("watch", tmp_path / "nothing"), "nothing does not exist")
    with watched(tmp_path, "--wait") as shown:
        shown.wait_for(lambda text: f"waiting for a run in {tmp_path}" in text.replace("\r\n", ""))
        MadeRun(rows=4, outcome="finished", began=LONG_AGO).write(tmp_path / "old")
        run = MadeRun(rows=4).write(tmp_path / "new")
        shown.wait_for(lambda text: "step 200" in text)
        append(run, End(at=time.time(), step=200, outcome="finished"))
        assert shown.ended() == 0
        assert "old" not in shown.output


def test_a_run_that_has_ended_is_shown_as_its_table_at_once(tmp_path):
    with watched(MadeRun(outcome="failed", began=LONG_AGO).write(tmp_path)) as shown:
        assert shown.ended() == 0
    assert "failed after 1 min, step 1,200: ValueError: the loss is nan" in shown.output.replace("\r\n", " ")
    assert ENTERS not in shown.output


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_period_that_is_none_is_refused(tmp_path, seconds):
    done = forge("watch", tmp_path, "--every", seconds)
    assert done.returncode == 2
    assert "is not a number of seconds of at least 0.1" in done.stderr


# --- following a record ----------------------------------------------------------------------------------------------


def test_what_was_read_is_not_read_again(tmp_path):
    record = MadeRun(rows=10).write(tmp_path)
    follower = Follower(record)
    before = follower.look()
    path = record / "rank0.jsonl"
    with path.open("r+b") as file:
        file.write(b"x" * 5000)
    append(record, End(at=time.time(), step=500, outcome="finished"))
    after = follower.look()
    assert after.problems == ()
    assert after.ranks[0].intervals == before.ranks[0].intervals
    assert after.ranks[0].end is not None


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path):
    run = MadeRun(rows=6)
    record, lines = run.write(tmp_path), run.lines()
    path, content = record / "rank0.jsonl", b"".join(map(encode_line, lines))
    path.write_bytes(b"")
    follower, written = Follower(record), 0
    with pytest.raises(RecordError):
        follower.look()
    for end in range(997, len(content) + 997, 997):
        with path.open("ab") as file:
            file.write(content[written:end])
        written = end
        if content[:end].count(b"\n"):
            found = follower.look()
            assert found.problems == ()
            whole = lines[1 : content[:end].count(b"\n")]
            assert found.ranks[0].intervals == tuple(line for line in whole if line in found.ranks[0].intervals)
    assert len(follower.look().ranks[0].intervals) == 6


def test_a_rotated_record_is_followed_into_its_next_segment(tmp_path):
    run = MadeRun(rows=10)
    record, (begin, *lines) = run.write(tmp_path), run.lines()
    assert isinstance(begin, Begin)
    path = record / "rank0.jsonl"
    path.write_bytes(b"".join(map(encode_line, (begin, *lines[:5]))))
    follower = Follower(record)
    follower.look()
    append(record, *lines[5:8])
    path.rename(record / "rank0.1.jsonl")
    path.write_bytes(b"".join(map(encode_line, (begin, *lines[8:]))))
    assert follower.look().ranks[0].intervals == read_run(record).ranks[0].intervals
    assert len(follower.look().ranks[0].intervals) == 10

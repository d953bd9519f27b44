"""`forge-profiling watch`: a run live on a real terminal, which is as before however it ends."""

import re
import signal
import subprocess
import time

import msgspec
import pytest

from lightning_forge_profiling.record.files import encode_line
from lightning_forge_profiling.record.reader import Follower, RecordError, read_run
from lightning_forge_profiling.report.live_view import print_frame
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.schema import Begin, End, IntervalLine
from tests.outcomes import HANGS_S, unwrapped
from tests.record_builder import MadeRun, made_pulse, times_of, with_times, write_ranks
from tests.terminals import frames, terminal
from tests.test_cli import COMMAND, ENVIRONMENT, fails, forge

CLEARS = "\x1b[H\x1b[J"
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
    return terminal("watch", record, *options, **{"environment": ENVIRONMENT, **kwargs})


# --- one frame -------------------------------------------------------------------------------------------------------


def test_a_frame_has_pace_causes_ranks_and_events(tmp_path):
    run = MadeRun(ranks=3, late=2)
    record = run.write(tmp_path)
    done = forge("watch", record, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    where, status, setting, *_ = done.stdout.splitlines()
    assert where == str(record)
    assert status == "running: step 1,200"
    assert setting.startswith("NVIDIA H200 on node0, 3 ranks, precision bf16-mixed")
    text = unwrapped(done.stdout)
    for part in (
        "Steps 1,050 to 1,199 of rank 0, written ", "backward ", "throughput  ", "% utilized,  61.2 GiB used",
        "whole fit   steps ", "verdict     input-bound, ", "\ntry         Measure the DataLoader",
        "Ranks by their records\n", "validation, 4.0 s",
        "Totals of the run: the first 1,000 steps, written ",
    ):  # fmt: skip
        assert part in done.stdout, part
    first, *_ = [line for line in done.stdout.splitlines() if re.match(r"\d+ +1,200 ", line)]
    assert re.match(r"2 +1,200 +42\.\d\d +0\.\d\d +\d+ s +straggler: data$", first), "it waits for none"
    assert re.search(r"straggler +the others wait [56]\.\d\d ms a step for rank 2: data", text)
    assert done.stdout.count(": validation, 4.0 s\n") == 2, "each event once for all ranks"
    assert text.count(", validation 7 %, ") == 1, "of the whole fit"
    assert text.count("also validation-bound, 8 % of the fit: ") == 1


def test_all_step_times_of_a_frame_s_present_are_of_the_same_steps(tmp_path):
    """Although the steps became three times as long in the middle of the run."""
    run = MadeRun(rows=10)
    record, lines = run.write(tmp_path), run.lines()
    for place, line in enumerate(lines):
        if isinstance(line, IntervalLine) and line.step <= 300:
            lines[place] = with_times(line, {name: 3 * ms for name, ms in times_of(line).items()})
    (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    now, _, whole = forge("watch", record, "--once").stdout.partition("Totals of the run")
    assert "Steps 350 to 499, written " in now
    [mean_ms] = re.findall(r"([\d.]+) ms mean", now)
    [step_row] = re.findall(r"(?m)^step +([\d.]+)$", now)
    [steps_per_s] = re.findall(r"([\d.]+) steps/s", now)
    assert mean_ms == step_row
    assert float(steps_per_s) == pytest.approx(1e3 / float(mean_ms), rel=0.01)
    regions = re.findall(r"(?m)^(?:data|transfer|forward|backward|optimizer|other) .* ([\d.]+)$", now)
    assert sum(map(float, regions)) == pytest.approx(float(mean_ms), abs=0.05)
    assert 35 < float(mean_ms) < 39
    assert "36.0 to 110 ms, medians of the latest 10 log entries" in whole


@pytest.mark.slow
def test_columns_stay_where_they_are_as_numbers_grow(tmp_path):
    def columns(longer):
        run = MadeRun(rows=4, ranks=2, run=f"x{longer}")
        lines = run.lines()
        for place, line in enumerate(lines):
            if isinstance(line, IntervalLine):
                times = {name: longer * ms for name, ms in times_of(line).items()}
                times["data"] *= longer
                lines[place] = with_times(line, times)
        record = run.write(tmp_path / f"x{longer}")
        (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines)))
        work = {"own_ms": 12.2 * longer}
        write_ranks(record, [made_pulse(rank, 2, time.time() - 1, step=int(50 * longer), **work) for rank in (0, 1)])
        frame = forge("watch", record, "--once").stdout.splitlines()
        table = [line for line in frame if re.match(r"(?:data|forward|step|other) ", line)]
        ranks = [line for line in frame if re.match(r"[01]  ", line)]
        return [len(line) for line in table], [re.search(r" s( |$)", line).start() for line in ranks]

    assert columns(0.2) == columns(1) == columns(20)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (MadeRun(batches=5000), "running: step 1,200 of 5,000 (24 %), epoch 2 of 5, about 2 min left"),
        (MadeRun(rows=100, batches=5000), "running: step 5,000 of 5,000 (100 %), epoch 5 of 5, about 0 s left"),
        (MadeRun(rows=1, batches=5000), "running: step 50 of 5,000 (1 %), epoch 1 of 5"),
        (MadeRun(), "running: step 1,200"),
    ],
    ids=["known", "last", "pace-unknown", "endless"],
)
def test_progress_and_time_left_are_shown_where_they_are_known(tmp_path, run, says):
    record = run.write(tmp_path)
    assert forge("watch", record, "--once").stdout.splitlines()[1] == says
    done = forge("show", record)
    assert (says.removeprefix("running: ") in done.stdout.splitlines()) == (run.batches is not None)


def test_of_a_run_that_resumed_in_an_epoch_the_epochs_are_those_of_the_training(tmp_path):
    run = MadeRun(rows=10, batches=5000)
    lines = run.lines()
    record = run.write(tmp_path)
    begin = msgspec.structs.replace(lines[0], first_epoch=2, first_batch=600, batches=2400)
    (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, (begin, *lines[1:]))))
    assert "running: step 500 of 2,400 (20 %), epoch 4 of 5, about " in forge("watch", record, "--once").stdout


def test_a_silent_run_says_for_how_long_and_what_was_usual(tmp_path):
    record = MadeRun(began=time.time() - 500, rows=12, batches=5000).write(tmp_path)
    text = unwrapped(forge("watch", record, "--once").stdout)
    assert re.search(
        r"silent for 7 min, step 600: so far the longest step took 5\d ms, the longest pause between two lines was "
        r"13\.\d s; killed, stalled, or in a long validation, checkpoint or step",
        text,
    )
    assert "left" not in text


@pytest.mark.slow
def test_piped_sentences_obey_columns_if_it_is_set(tmp_path):
    record = MadeRun(ranks=3, late=2).write(tmp_path / ("long" * 20))
    for command in (["watch", record, "--once"], ["show", record]):
        lines = forge(*command, environment={"COLUMNS": "50"}).stdout.splitlines()
        assert lines[0] == str(record), "a path is whole"
        assert max(map(len, lines[1:])) <= 50
    for columns in ("", "0", "wide"):
        lines = forge("watch", record, "--once", environment={"COLUMNS": columns}).stdout.splitlines()
        assert max(map(len, lines[1:])) > 100


def test_the_sparkline_shows_the_interval_that_took_long(tmp_path):
    run = MadeRun(rows=10)
    record, lines = run.write(tmp_path), run.lines()
    slow = lines.index(next(line for line in lines if isinstance(line, IntervalLine) and line.step == 400))
    lines[slow] = with_times(lines[slow], {name: 2 * ms for name, ms in times_of(lines[slow]).items()})
    (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    text = forge("watch", record, "--once").stdout
    assert "step times  ▁▁▁▁▁▁▁█▁▁\n" in text


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
    append(record, with_times(last, {"step": 360.0}, counted=10, step=510))
    text = forge("watch", record, "--once").stdout
    assert "running: step 510\n" in text
    [forward] = [line.split() for line in text.splitlines() if line.startswith("forward ")]
    assert float(forward[-1]) == pytest.approx(8.1, abs=0.1), "the mean of steps with known regions"
    assert "Steps 350 to 509, written " in text


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
        assert shown.is_as_before()
    after = shown.output.rpartition(CLEARS)[2]
    assert after.startswith(str(record)), "the last frame has gone"
    assert "finished 1,200 steps in 1 min" in after
    assert "Where a step goes: 36." in after
    assert shown.process.stderr.closed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda shown: shown.type("\x03"), 130),
        (lambda shown: shown.process.send_signal(signal.SIGTERM), -signal.SIGTERM),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_the_terminal_is_as_before_however_it_is_ended(growing, end, code):
    with watched(growing[0]) as shown:
        shown.wait_for(frames)
        end(shown)
        assert shown.ended() == code
        assert shown.is_as_before()
        assert "\x1b[?" not in shown.output, "no switch of the terminal is left on"
        assert shown.process.stderr.read() == b""


def test_it_ends_when_its_terminal_is_closed(growing):
    with watched(growing[0]) as shown:
        shown.wait_for(frames)
        shown.hang_up()
        assert shown.process.wait(timeout=HANGS_S) in {-signal.SIGHUP, 2}


def test_a_frame_is_as_large_as_the_terminal_and_follows_its_size(growing):
    with watched(growing[0], columns=100, lines=40) as shown:
        shown.wait_for(frames)
        place = len(shown.output)
        shown.resize(40, 12)
        shown.wait_for(lambda text: "more lines" in text, since=place)
        lines = next(frame for frame in frames(shown.output) if "more lines" in frame[-1])
        assert lines[0] == str(growing[0]), "whole, on as many rows as it takes"
        assert len(lines[0]) > 40
        assert sum(-(-len(line) // 40) or 1 for line in lines) == 12
        assert max(map(len, lines[1:])) <= 40


def test_without_colours_nothing_is_styled(growing):
    def whole_frame(text):
        return len(frames(text)) > 1

    with watched(growing[0], environment={**ENVIRONMENT, "NO_COLOR": "1"}) as shown:
        assert "\x1b[1m" not in shown.wait_for(whole_frame)
    with watched(growing[0]) as shown:
        assert "\x1b[1m" in shown.wait_for(whole_frame)


def test_a_pipe_gets_a_frame_for_what_is_new_and_ends_it_when_it_is_closed(growing):
    record, later = growing
    command = [*COMMAND, "watch", str(record)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout.readline() == f"{record}\n"
        assert process.stdout.readline().startswith("running: step ")
        process.stdout.close()
        append(record, *later[:-1])
        assert process.wait(timeout=HANGS_S) == 141
        assert process.stderr.read() == ""


# --- which run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    assert CLEARS not in shown.output


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

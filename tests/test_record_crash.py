"""What a record holds after the worst: kills at random instants, torn writes, full disks, a rank that dies."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from lightning_forge_profiling.record.files import decode_line
from lightning_forge_profiling.record.reader import read_rank, read_run
from tests.outcomes import HANGS_S, SCRIPTS, script, two_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes, and looks for them in /proc")

KILLS = 50
FEW_LINES = 8192
"""Room for a few lines of a record, in bytes."""


def contents(folder, rank=0):
    """The content of each segment, by its number."""
    found = {}
    for path in sorted(folder.glob(f"rank{rank}*.jsonl")):
        with suppress(FileNotFoundError, ValueError):  # rotated or begun meanwhile
            content = path.read_bytes()
            found[decode_line(content.partition(b"\n")[0]).segment] = content
    return found


def whole_lines(content):
    """The lines of a segment that were written to their end; a large write is seen in parts by another process."""
    return content.rpartition(b"\n")[0].split(b"\n")


def last_step(found):
    """The step of the last whole line of the newest segment; -1 without one."""
    lines = whole_lines(found[max(found)]) if found else []
    return decode_line(lines[-1]).step if len(lines) > 1 else -1


def reached(folder, step, rank=0):
    """Wait until the newest segment has a line of this step; returns what was there then."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        found = contents(folder, rank)
        time.sleep(0.001)
        if last_step(found) >= step:
            return found
    raise AssertionError(f"{folder} has no line of step {step}")


@pytest.fixture
def writers():
    """A process that starts another, on request, which writes a record until it is killed."""
    command = [sys.executable, SCRIPTS / "write_records.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()
        process.wait(timeout=HANGS_S)


def test_whenever_a_process_is_killed_its_record_is_whole_up_to_then(tmp_path, writers):
    chance = random.Random(14)  # noqa: S311
    rotated = 0
    for number in range(KILLS):
        folder = tmp_path / str(number) / "forge_record"
        writers.stdin.write(f"{folder}\n")
        writers.stdin.flush()
        pid = int(writers.stdout.readline())
        before = reached(folder, chance.randrange(1, 800))
        os.kill(pid, signal.SIGKILL)
        assert writers.stdout.readline() == "ended\n"
        after = contents(folder)
        for segment in before.keys() & after.keys():
            whole = before[segment][: before[segment].rindex(b"\n") + 1]
            assert after[segment].startswith(whole), "a line that was there has changed"
        [record] = read_run(folder).ranks
        steps = [interval.step for interval in record.intervals]
        assert steps == [step for step in range(steps[0], steps[-1] + 1) if step % 40], "a line is missing"
        # a new segment begins with the latest state, which is older than the last lines of the one before
        assert max(line.step for line in record.lines if hasattr(line, "step")) >= last_step(before)
        assert len(record.problems) <= 1
        assert all("incomplete" in problem for problem in record.problems)
        assert record.end is None
        rotated += len(after) > 1
        assert len(after) <= 4
    assert rotated > KILLS // 10, "kills should also hit records of several segments"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 40])
def test_a_killed_training_leaves_its_totals(tmp_path, steps):
    command = [sys.executable, SCRIPTS / "recorded.py", tmp_path]
    folder = tmp_path / "forge_record"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + HANGS_S
            before = reached(folder, steps)
            while not any(b'"line":"state"' in line for line in whole_lines(before[0])):
                assert time.monotonic() < deadline
                before = reached(folder, steps)
        finally:
            process.kill()
            process.communicate()
    assert contents(folder)[0].startswith(before[0][: before[0].rindex(b"\n") + 1])
    [record] = read_run(folder).ranks
    counted = record.state.report.run.timing.steps
    assert counted == sum(record.state.counters.steps_us.values()) > 0
    assert record.state.metrics["throughput/steps_per_sec"] > 0
    assert sum(interval.counted for interval in record.intervals) >= counted
    assert record.end is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a short run that ended, and its path."""
    folder = tmp_path_factory.mktemp("whole")
    done = script("recorded.py", folder, "steps=30", cwd=folder)
    assert done.returncode == 0, done.stderr
    path = folder / "forge_record" / "rank0.jsonl"
    return path, path.read_bytes()


@pytest.mark.slow
def test_a_record_cut_at_any_byte_is_read_up_to_its_last_whole_line(tmp_path, whole):
    _, content = whole
    lines = [decode_line(line) for line in content.splitlines()]
    ends = [place for place, byte in enumerate(content, 1) if byte == ord("\n")]
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(content)
    assert len(content) > 4096 + ends[0]
    with path.open("r+b") as file:
        for size in range(len(content), len(content) - 4096, -1):
            file.truncate(size)
            read = read_rank(path)
            complete = sum(end <= size + 1 for end in ends)  # also without its line break
            assert list(read.lines) == lines[1:complete]
            assert bool(read.problems) is (size not in ends and size + 1 not in ends)


def warnings(done):
    return [line for line in done.stderr.splitlines() if "record" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the same run without a record."""
    folder = tmp_path_factory.mktemp("plain")
    done = script("recorded.py", folder, "steps=30", "plain", cwd=folder)
    assert list(folder.iterdir()) == []
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_weights_are_those_of_a_run_without_a_record(tmp_path, undisturbed):
    done = script("recorded.py", tmp_path, "steps=30", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == undisturbed
    assert warnings(done) == []


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 500, 4000])
def test_a_full_disk_costs_one_warning_and_the_rest_of_the_record(tmp_path, undisturbed, room):
    done = script("recorded.py", tmp_path, "steps=30", f"largest={room}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == undisturbed
    [warning] = warnings(done)
    assert "record ends here (" in warning
    path = tmp_path / "forge_record" / "rank0.jsonl"
    assert path.stat().st_size == room
    if room == 4000:
        assert read_rank(path).problems == ("rank0.jsonl: the last line is incomplete, as after a crash",)


@pytest.mark.slow
def test_a_disk_without_space_costs_one_warning_and_the_rest_of_the_record(tmp_path, small_disk, undisturbed):
    disk = small_disk(FEW_LINES)
    done = script("recorded.py", disk, "steps=30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == undisturbed
    [warning] = warnings(done)
    assert "No space left on device" in warning
    assert read_rank(disk / "forge_record" / "rank0.jsonl").begin.rank == 0


@pytest.mark.slow
def test_a_disk_that_is_read_only_costs_one_warning_and_the_record(tmp_path, small_disk, undisturbed):
    disk = small_disk(FEW_LINES)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    done = script("recorded.py", disk, "steps=30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == undisturbed
    [warning] = warnings(done)
    assert "This run will have no record" in warning
    assert "Read-only file system" in warning


@pytest.mark.slow
def test_when_one_of_two_ranks_is_killed_the_records_of_both_are_read(tmp_path):
    with two_ranks("recorded.py", tmp_path, "ranks=2") as (first, second):
        for rank in range(2):
            reached(tmp_path / "forge_record", 20, rank)
        step = 20
        while read_rank(tmp_path / "forge_record" / "rank1.jsonl").state is None:  # the first comes after a second
            step += 1
            reached(tmp_path / "forge_record", step, 1)
        second.kill()
        second.communicate()
        _, err = first.communicate(timeout=HANGS_S)
        assert first.returncode != 0
    record = read_run(tmp_path / "forge_record")
    survivor, killed = record.ranks
    assert survivor.begin.run == killed.begin.run
    assert [rank.begin.rank for rank in record.ranks] == [0, 1]
    assert [rank.begin.world_size for rank in record.ranks] == [2, 2]
    assert killed.end is None
    assert killed.intervals
    assert read_rank(killed.path).state is not None
    assert survivor.end is not None, err
    assert survivor.end.outcome == "failed"
    assert survivor.end.exception
    assert [event.kind for event in survivor.events] == ["exception"]
    assert survivor.state.report.run.timing.all_steps == survivor.end.step

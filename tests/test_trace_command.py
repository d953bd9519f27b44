"""A live run records steps when it is asked to, on all ranks the same ones: real runs, asked from another process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import WINDOW_PLAN, WINDOW_REQUEST
from lightning_forge_profiling.record.files import read_plan, take_request, write_request
from lightning_forge_profiling.record.reader import read_run, records_at
from lightning_forge_profiling.run import rank_watch
from lightning_forge_profiling.schema import WindowRequest
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S, SCRIPTS, read_trace, recorded_steps, summary_of, traces
from tests.ports import free_port

QUICK = {"analyze": False, "tensorboard": False}


def wait_until(condition, process):
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def training(folder, *, ranks=1, profiler=QUICK, throughput=None, slow_from=0):
    """A run that trains meanwhile, at least one second of it over."""
    given = ["none" if profiler is None else json.dumps(profiler), json.dumps(throughput or {}), str(slow_from)]
    process = subprocess.Popen(
        [sys.executable, SCRIPTS / "on_demand.py", folder, str(ranks), *given],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_until(lambda: [*folder.rglob("ranks.json")] if ranks > 1 else [*folder.rglob("rank0.jsonl")], process)
        yield process
        (folder / "stop").touch()
        _, errors = process.communicate(timeout=HANGS_S)
        assert process.returncode == 0, errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ask(folder, *options):
    command = [sys.executable, "-m", "lightning_forge_profiling", "trace", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)


def steps_of(folder, rank=0):
    return [recorded_steps(read_trace(path)) for path in traces(folder, rank)]


@pytest.mark.slow
def test_with_ddp_the_window_that_comes_by_default_is_after_the_steps_that_ddp_times_itself(tmp_path):
    """In its first ten iterations it waits for events, so that light steps among them would not be like later ones."""
    with training(tmp_path, ranks=2, throughput={"warmup_steps": 2}):
        pass
    assert steps_of(tmp_path)[0][0] == 11


@pytest.mark.slow
def test_a_live_run_is_asked_and_says_where_the_report_is(tmp_path):
    with training(tmp_path, profiler=None, throughput={"window": "on-demand"}):
        done = ask(tmp_path, "--wait", "--steps", "2")
        assert done.returncode == 0, done.stderr
        asked, report = done.stdout.splitlines()
        [trace] = traces(tmp_path)
        assert steps_of(tmp_path) == [[int(number) for number in (asked.split()[4], asked.split()[6].rstrip(":"))]]
        assert asked.endswith(str(trace.parent))
        assert report == f"report: {trace.parent / 'report.html'}"
        assert (trace.parent / "report.html").stat().st_size > 10_000
    assert trace.parent.name in summary_of(tmp_path)
    done = ask(tmp_path)
    assert done.returncode == 2
    assert "the run has ended, and only a live one can record steps" in done.stderr
    assert not [*tmp_path.rglob(WINDOW_REQUEST)]


@pytest.mark.slow
def test_requests_that_come_together_are_met_one_after_the_other(tmp_path):
    with training(tmp_path, profiler=None, throughput={"window": "on-demand"}):
        command = [sys.executable, "-m", "lightning_forge_profiling", "trace", str(tmp_path), "--wait"]
        asked = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        answers = [each.communicate(timeout=HANGS_S) for each in asked]
        assert [each.returncode for each in asked] == [0, 0, 0], answers
        reports = {out.splitlines()[1].removeprefix("report: ") for out, _ in answers}
        assert len(reports) == 3
        for report in map(Path, reports):  # as the run goes on
            assert json.loads((report.parent / "summary.json").read_bytes())["run"]["timing"]["steps"] > 0
    assert len(steps_of(tmp_path)) == 3
    assert not [*tmp_path.rglob(f"*{WINDOW_REQUEST}*")]


@pytest.mark.slow
def test_two_ranks_record_the_same_steps_each_time(tmp_path):
    with training(tmp_path, ranks=2):
        for number in (1, 2, 3):
            done = ask(tmp_path, "--wait", "--steps", str(number))
            assert done.returncode == 0, done.stderr
        slow = ask(tmp_path, "--ranks", "slow")
        assert slow.returncode == 0, slow.stderr
        assert re.match(r"(ranks 0, 1 record|rank 0 records) steps ", slow.stdout)
    first, second = steps_of(tmp_path, 0), steps_of(tmp_path, 1)
    assert {1, 2, 3, 6} <= {len(steps) for steps in second}
    assert all(steps in first for steps in second)
    assert len(first) - len(second) == slow.stdout.startswith("rank 0 records")


@pytest.mark.slow
def test_a_run_that_records_nothing_on_demand_is_said_to(tmp_path):
    with training(tmp_path, profiler=None):
        done = ask(tmp_path)
        assert done.returncode == 2
        assert "did not answer within 10 s. It is running: step " in done.stderr
        assert not [*tmp_path.rglob(WINDOW_REQUEST)]


@pytest.mark.slow
def test_requests_that_are_damaged_or_anothers_are_not_followed(tmp_path):
    with training(tmp_path) as process:
        [record] = [path.parent for path in tmp_path.rglob("rank0.jsonl")]
        for content in (b"{", b'{"id": "a", "steps": 1000000}', b"\xff" * 1000):
            (record / WINDOW_REQUEST).write_bytes(content)
            wait_until(lambda: not (record / WINDOW_REQUEST).exists(), process)
        (tmp_path / "elsewhere").write_text('{"id": "a"}')
        (record / WINDOW_REQUEST).symlink_to(tmp_path / "elsewhere")
        if os.getuid() == 0:
            other = record / "other"
            other.write_text('{"id": "b"}')
            os.chown(other, 12345, 12345)
            assert ask(tmp_path).returncode == 0
            (record / WINDOW_REQUEST).unlink(missing_ok=True)
            other.rename(record / WINDOW_REQUEST)
        before = read_plan(record)
        assert before is None or before.request not in {"a", "b"}
    assert (record / WINDOW_REQUEST).exists()
    after = read_plan(record)
    assert after is None or after.request not in {"a", "b"}


def test_a_request_is_taken_once(tmp_path):
    write_request(tmp_path, WindowRequest(id="a", steps=5, ranks="slow"))
    assert take_request(tmp_path) == WindowRequest(id="a", steps=5, ranks="slow")
    assert take_request(tmp_path) is None
    assert read_plan(tmp_path) is None
    (tmp_path / WINDOW_PLAN).write_text('{"run": "r", "number": 1, "request": "a", "state": "odd"}')
    assert read_plan(tmp_path) is None


@pytest.mark.parametrize("steps", ["0", "101", "x"])
def test_a_number_of_steps_that_cannot_be_is_refused(tmp_path, steps):
    done = ask(tmp_path, "--steps", steps)
    assert done.returncode == 2
    assert f"'{steps}' is not a number of steps from 1 to 100" in done.stderr


@pytest.mark.slow
def test_nothing_is_recorded_where_the_disk_is_nearly_full(tmp_path, make_trainer, monkeypatch):
    monkeypatch.setattr(rank_watch, "_LEAST_FREE", 2**62)
    answers = []

    class Asks(Classifier):
        def training_step(self, batch):
            if self.global_step == 20:
                write_request(tmp_path / "csv" / "version_0" / "forge_record", WindowRequest(id="a"))
            time.sleep(0.05)  # planted, so that the thread has some looks
            return super().training_step(batch)

        def on_train_batch_end(self, *_):
            if plan := read_plan(tmp_path / "csv" / "version_0" / "forge_record"):
                answers.append(plan)
                self.trainer.should_stop = plan.state == "refused"

    make_trainer(ForgeProfilerCallback(**QUICK), ThroughputCallback(), max_epochs=-1).fit(Asks(), loader(4000))
    assert answers[-1].state == "refused"
    assert "GiB left" in answers[-1].text


# -- every so many steps, and what becomes slow -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_window_that_is_asked_for_before_that_of_the_settings_takes_nothing_from_it(tmp_path, make_trainer):
    record = tmp_path / "csv" / "version_0" / "forge_record"

    class Asks(Classifier):
        def training_step(self, batch):
            if self.global_step == 20:
                write_request(record, WindowRequest(id="a", steps=2))
            time.sleep(0.02)  # planted, so that the thread has some looks
            return super().training_step(batch)

    callback = ForgeProfilerCallback(600, 602, **QUICK)
    make_trainer(callback, ThroughputCallback(), max_epochs=-1, max_steps=620).fit(Asks(), loader(4000))
    plan = read_plan(record)
    assert plan.start < 590
    assert sorted(steps_of(tmp_path)) == [[plan.start, plan.start + 1], [600, 601]]


@pytest.mark.slow
def test_a_window_each_so_many_steps(tmp_path, make_trainer):
    callback = ForgeProfilerCallback(10, 12, every=20, **QUICK)
    make_trainer(callback, ThroughputCallback(), max_epochs=1).fit(Classifier(), loader(4 * 75))
    assert steps_of(tmp_path) == [[10, 11], [30, 31], [50, 51], [70, 71]]
    assert callback.trace_report().steps == (10, 11)


@pytest.mark.slow
def test_what_becomes_slow_is_recorded_and_named(tmp_path):
    def drift():
        """The first and last step that are recorded because steps stay longer, and how long they and others took."""
        texts = [event.text for event in read_run(records_at(tmp_path)[0]).ranks[0].events if event.kind == "window"]
        said = r"will record steps (\d+) to (\d+) \(steps before \d+ took (\S+) ms, earlier ones (\S+) ms\)"
        return next((found.groups() for text in texts if (found := re.search(said, text))), None)

    def reports():
        start, end, _, _ = drift() or ("", "", "", "")
        return [*tmp_path.rglob(f"*_steps_{start}-{end}/summary.md")]

    with training(tmp_path, profiler={"when": "slow", "tensorboard": False}, slow_from=3000) as process:
        wait_until(reports, process)
    assert traces(tmp_path)[0].parent.name.endswith("_steady")
    start, _, longer, usual = map(float, drift())
    assert start > 3000
    assert longer > 2 * usual
    [share] = re.findall(r"^\| forward \| .* \| (\S+) % \| \S+ \|$", reports()[0].read_text(), re.MULTILINE)
    assert float(share) > 60, "the part of the step that has become longer"


@pytest.mark.parametrize("wrong", [{"every": 3}, {"every": 10.0}, {"when": "never"}])
def test_what_cannot_be_is_refused_at_once(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        ForgeProfilerCallback(**wrong)
    with pytest.raises(ConfigurationError, match="window"):
        ThroughputCallback(window="always")

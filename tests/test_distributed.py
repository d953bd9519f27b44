"""Two processes with gloo on the CPU: one folder for the traces of both, one table, rates of the whole job."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from lightning_forge_profiling.finish import OTHERS_WAIT_S
from tests.outcomes import (
    HANGS_S,
    PARTITION,
    REPORTS,
    hosts_can_be_made,
    logged,
    read_trace,
    recorded_steps,
    script,
    spans,
    summary_of,
    tables,
    traces,
    two_hosts,
    two_ranks,
    unwrapped,
    wait_for_processes_of,
    working_on,
)
from tests.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes that find each other with gloo")


def run(folder, strategy, *options):
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    return script("distributed.py", strategy, folder, *options, cwd=folder, env=environment)


def exit_code(done):
    """What the process ended with; 1 where PyTorch or Lightning ended it on its way out, after Python's traceback.

    PyTorch aborts it in a race between gloo's threads and the end of the process once its peer has died, rare, and seen
    in a run without our callbacks. Lightning looks every 5 s whether another rank has died, and then kills it if it has
    not ended by itself, which on a busy machine it may not have. Neither says anything of how the fit ended.
    """
    aborted = done.returncode == -signal.SIGABRT and "terminate called without an active exception" in done.stderr
    killed = done.returncode == -signal.SIGKILL and "Forcefully terminating all other processes" in done.stderr
    return 1 if (aborted or killed) and "Traceback (most recent call last)" in done.stderr else done.returncode


def waited(trace):
    """How long after a rank's files were whole those that are over all ranks were there, in seconds.

    A folder changes last when the copies in it get their names, which they do together; the reports come at the end.
    """
    copy = trace.parent / "tensorboard" / trace.name.replace(".trace", ".pt.trace")
    spans = ((copy, copy.parent), (trace, trace.parent / "summary.json"))
    return max(last.stat().st_mtime - whole.stat().st_mtime for whole, last in spans if last.exists())


@pytest.fixture(scope="module", params=["ddp", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def finished(request, tmp_path_factory):
    """One run of ten steps on both ranks, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    done = run(folder, request.param)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_both_ranks_write_into_one_folder(finished):
    folder, _ = finished
    [first], [second] = traces(folder, 0), traces(folder, 1)
    assert first.parent == second.parent
    assert first.parents[1] == folder / "csv" / "version_0" / "profiler_traces"
    names = {str(path.relative_to(first.parent)) for path in first.parent.rglob("*") if path.is_file()}
    ranks = range(2)
    assert names == {
        *(f"rank{rank}.trace.json.gz" for rank in ranks),
        *(f"rank{rank}.summary.json" for rank in ranks),
        *(f"tensorboard/rank{rank}.pt.trace.json.gz" for rank in ranks),
        *REPORTS,
    }


def test_one_report_tells_of_both_ranks_and_of_the_whole_run(finished):
    folder, done = finished
    [path] = folder.rglob("summary.json")
    summary = json.loads(path.read_text())
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert [len(rank["per_step"]) for rank in summary["ranks"]] == [4, 4]
    assert [rank["steps"] for rank in summary["ranks"]] == [3, 3]  # without the first
    assert summary["run"]["ranks"]["world_size"] == 2
    assert done.stdout.count("\nverdict ") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_each_trace_says_which_rank_it_is(finished, rank):
    folder, _ = finished
    trace = read_trace(traces(folder, rank)[0])
    assert recorded_steps(trace) == [2, 3, 4, 5]
    assert trace["forge_profiling"]["rank"] == trace["distributedInfo"]["rank"] == rank
    assert trace["forge_profiling"]["world_size"] == trace["distributedInfo"]["world_size"] == 2
    assert trace["forge_profiling"]["loader"]["ranks_on_host"] == 2
    assert trace["distributedInfo"]["backend"] == "gloo"
    assert spans(trace).count("forge.forward") == 4


def test_the_table_is_printed_once(finished):
    folder, done = finished
    assert tables(done.stdout) == 1
    assert "over 2 replicas" in done.stdout
    assert "beside it: 4 steps" in summary_of(folder)


def test_rates_are_logged_for_the_job_and_for_one_device(finished):
    folder, _ = finished
    rows = logged(folder)
    assert rows
    for row in rows:
        assert row["throughput/samples_per_sec"] == pytest.approx(2 * row["throughput/device/samples_per_sec"])
        assert row["throughput/device/samples_per_sec"] * row["time/step_ms"] / 1e3 == pytest.approx(4)
        assert sum(row[f"time/{region}_ms"] for region in PARTITION) == pytest.approx(row["time/step_ms"])


def test_the_work_of_both_ranks_comes_to_rank_0(finished):
    folder, _ = finished
    [path] = folder.rglob("summary.json")
    works = json.loads(path.read_text())["run"]["ranks"]["works"]
    assert [work["rank"] for work in works] == [0, 1]
    for work in works:
        in_step = sum(ms for leaf, ms in work["leaves_ms"].items() if leaf not in work["outside"])
        assert in_step == pytest.approx(work["step_ms"], rel=0.05)


@pytest.mark.slow
def test_a_rank_that_spends_more_outside_of_its_steps_is_named(tmp_path):
    done = run(tmp_path, "ddp", "validates")
    assert done.returncode == 0, done.stderr
    said = re.search(r"rank 1 spends 0\.[78] s more in validation than the others", summary_of(tmp_path))
    assert said
    assert said[0] in (traces(tmp_path, 0)[0].parent / "summary.md").read_text()


@pytest.mark.slow
def test_one_rank_alone_may_record(tmp_path):
    done = run(tmp_path, "ddp", "rank0")
    assert done.returncode == 0, done.stderr
    assert recorded_steps(read_trace(traces(tmp_path, 0)[0])) == [2, 3, 4, 5]
    assert traces(tmp_path, 1) == []
    assert len(list(tmp_path.rglob("*.pt.trace.json.gz"))) == 1
    assert tables(done.stdout) == 1


@pytest.mark.slow
def test_a_rank_that_another_profiler_records_takes_part_in_what_the_ranks_agree_on(tmp_path):
    done = run(tmp_path, "ddp", "profiled")
    assert done.returncode == 0, done.stderr
    assert len(traces(tmp_path, 0)) == 1
    assert traces(tmp_path, 1) == []


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp", 1), ("ddp_spawn", 0), ("ddp_fork", 1)])
def test_an_exception_on_one_rank_ends_the_job_as_without_the_callbacks(tmp_path, strategy, rank):
    (tmp_path / "plain").mkdir()
    (tmp_path / "ours").mkdir()
    plain = run(tmp_path / "plain", strategy, f"fails={rank}", "plain")
    ours = run(tmp_path / "ours", strategy, f"fails={rank}")
    assert exit_code(ours) == exit_code(plain) != 0
    assert "RuntimeError: mine" in ours.stderr
    assert "done" not in ours.stdout
    wait_for_processes_of(tmp_path)  # where a rank was killed, the one that finishes its trace goes on
    # the rank that failed wrote what it had
    assert recorded_steps(read_trace(traces(tmp_path / "ours", rank)[0])) == [2, 3, 4]
    if rank == 0:
        assert tables(ours.stdout) == 1
    for trace in traces(tmp_path / "ours", 0):
        assert waited(trace) < OTHERS_WAIT_S, "it waited for the trace of a rank that cannot come"


@pytest.mark.slow
def test_no_rank_of_a_job_that_comes_down_waits_for_its_trace(tmp_path):
    with two_ranks("distributed.py", "ddp", tmp_path, "fails=1", "stopped") as (first, second):
        try:
            (out, err), _ = first.communicate(timeout=HANGS_S), second.communicate(timeout=HANGS_S)
            assert exit_code(subprocess.CompletedProcess(first.args, first.returncode, out, err)) == 1, err
            assert tables(out) == 1
            assert "being written" in out
            assert traces(tmp_path) == []
        finally:
            for pid in working_on(tmp_path):
                os.kill(int(pid), signal.SIGCONT)
    wait_for_processes_of(tmp_path)
    for rank in range(2):
        assert recorded_steps(read_trace(traces(tmp_path, rank)[0])) == [2, 3]


needs_hosts = pytest.mark.skipif(not hosts_can_be_made(), reason="needs namespaces: root, or a system that grants them")


@pytest.mark.slow
@needs_hosts
def test_no_host_waits_for_files_of_another_one_which_publishes_its_own(tmp_path):
    codes, out, err = two_hosts("two_hosts.py", tmp_path)
    assert codes == [0] * 4, err
    for host, ranks in enumerate([(0, 1), (2, 3)]):
        names = [path.name for path in (tmp_path / f"host{host}").rglob("*.pt.trace.json.gz*")]
        assert sorted(names) == sorted(f"rank{rank}.pt.trace.json.gz" for rank in ranks for _ in range(2)), "no .part"
        assert [path.name for path in (tmp_path / f"host{host}").rglob(".*")] == []
    windows = traces(tmp_path / "host0")
    assert len(windows) == 2
    assert max(map(waited, windows)) < OTHERS_WAIT_S, "it waited for files that cannot come"
    assert list((tmp_path / "host1").rglob("report.html")) == [], "it could replace that of all ranks"
    # what rank 0 heard live of the other host counts
    summary = json.loads((windows[0].parent / "summary.json").read_text())
    assert [work["rank"] for work in summary["run"]["ranks"]["works"]] == [0, 1, 2, 3]
    [late] = [found for found in summary["findings"] if found["code"] == "straggler"]
    assert (late["rank"], late["evidence"]["leaf"], late["evidence"]["host"]) == (2, "forward", "host1")
    assert max((found["share_pct"] for found in summary["findings"] if found["code"] == "python-bound"), default=0) < 30
    assert summary["missing"] == [2, 3]
    assert not summary["verdict_text"].startswith("Without"), "the verdict is of all ranks"
    if not re.search(r"^verdict +cpu-", out, re.MULTILINE):
        assert "rank 2 on host1: its forward takes" in unwrapped(out)


@pytest.mark.slow
@needs_hosts
def test_a_verdict_without_the_ranks_of_another_host_begins_with_that(tmp_path):
    codes, out, err = two_hosts("two_hosts.py", tmp_path, "unheard")
    assert codes == [0] * 4, err
    missing = "Without ranks 2, 3 of 4, which are missing and may be the cause: "
    assert f" verdict {missing}" in unwrapped(out)
    summary = json.loads((traces(tmp_path / "host0")[0].parent / "summary.json").read_text())
    assert summary["verdict_text"].startswith(missing)
    python = [found["share_pct"] for found in summary["findings"] if found["code"] == "python-bound"]
    assert max(python, default=0) < 30, "waiting in backward is not Python"


@pytest.mark.slow
@needs_hosts
def test_after_a_kill_no_process_waits_for_files_of_another_host(tmp_path):
    codes, _, err = two_hosts("two_hosts.py", tmp_path, "killed")
    assert set(codes) <= {-signal.SIGKILL, -signal.SIGABRT, 1}, err
    wait_for_processes_of(tmp_path)
    windows = traces(tmp_path / "host0")
    assert len(windows) == 2
    assert max(map(waited, windows)) < OTHERS_WAIT_S


@pytest.mark.slow
def test_all_ranks_refuse_a_folder_that_rank_0_cannot_write(tmp_path):
    done = run(tmp_path, "ddp", "file")
    assert done.returncode != 0
    assert "'/dev/null' is a file" in done.stderr
    assert "done" not in done.stdout
    assert traces(tmp_path) == []

"""What one rank's analysis leaves, and that all of them together say what the traces say."""

import functools
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import msgspec
import pytest
from msgspec.structs import replace

from lightning_forge_profiling import pipeline
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.finish import analyze as finish_ranks
from lightning_forge_profiling.json_layout import PACKAGE, read_rank_result, write_rank_result
from lightning_forge_profiling.pipeline import analyze, compare_ranks, merge, write_rank_results
from tests.outcomes import HANGS_S
from tests.record_builder import MadeRun

TRACES = Path(__file__).parent / "data" / "traces"
CASES = sorted(folder for folder in TRACES.iterdir() if folder.is_dir())


def json_of(analysis):
    return json.loads(msgspec.json.encode(analysis, enc_hook=dict))


def copied(case, folder):
    return Path(shutil.copytree(TRACES / case, folder / case))


def results_in(folder):
    written, problems = write_rank_results(folder)
    assert not problems
    return [read_rank_result(path) for path in written]


def quick(case):
    """Those of several ranks, and one of one."""
    return case.name == "cpu_mlp" or len([*case.glob("*.gz")]) > 1


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if quick(case) else pytest.mark.slow) for case in CASES],
)
def test_the_results_of_the_ranks_together_are_the_analysis_of_the_traces(case, tmp_path):
    whole = analyze(case).analysis
    folder = copied(case.name, tmp_path)
    results = results_in(folder)
    assert json_of(compare_ranks(merge(results), source=str(case)).analysis) == json_of(whole)
    for trace in folder.glob("*.trace.json*"):
        trace.unlink()
    for reduce in (True, False):
        assert json_of(replace(analyze(folder, reduce=reduce).analysis, source=str(case))) == json_of(whole)


def many(folder, number, case="slow_rank_gpu"):
    """Results of many ranks: those of the case, numbered on; each later one's GPU a little faster."""
    first, second = results_in(copied(case, folder))
    for rank in range(number):
        one = second if rank == 1 else first
        made = replace(
            one,
            rank=rank,
            world_size=number,
            summary=replace(one.summary, rank=rank, file=f"rank{rank}.trace.json.gz"),
            traces=(replace(one.traces[0], name=f"rank{rank}.trace.json.gz"),),
            timeline=replace(one.timeline, rank=rank),
        )
        write_rank_result(made, folder / f"rank{rank}.summary.json")
    return [read_rank_result(folder / f"rank{rank}.summary.json") for rank in range(number)]


def test_in_whatever_order_results_are_merged_they_say_the_same(tmp_path):
    a, b, c, d = (merge([one]) for one in many(tmp_path, 4))
    whole = merge(a, b, c, d)
    for order in itertools.permutations((a, b, c, d)):
        assert functools.reduce(merge, order) == whole
        assert merge(merge(order[0], order[1]), merge(order[2], order[3])) == whole
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(whole[:3], b)


def test_of_many_ranks_those_that_stand_out_are_shown_and_all_are_counted(tmp_path):
    many(tmp_path, 40)
    shutil.rmtree(tmp_path / "slow_rank_gpu")
    result = analyze(tmp_path, reduce=True)
    analysis = result.analysis
    assert (analysis.verdict, analysis.findings[0].rank) == ("straggler", 1)
    assert (analysis.all_ranks, len(analysis.ranks)) == (40, 16)
    shown = [rank.rank for rank in analysis.ranks]
    assert shown == sorted(shown) == [timeline.rank for timeline in result.timelines]
    assert {0, 1} <= set(shown)
    assert set(shown) == {wait.rank for wait in analysis.rank_waits}
    assert analysis.spread["waits"].min == min(wait.wait_ms_per_step for wait in analysis.rank_waits)
    two = analyze(TRACES / "slow_rank_gpu").analysis
    late, other = sorted(rank.gpu.busy_ms_per_step for rank in two.ranks)
    assert analysis.spread["busy"].max == other
    assert analysis.spread["busy"].min == late


def test_as_many_ranks_are_shown_where_the_waits_of_few_are_known(tmp_path):
    results = many(tmp_path, 40)
    none = replace(results[0].collectives, calls=(), call=(), sequence=(), start_ns=(), end_ns=(), step=())
    alone = [one if one.rank < 2 else replace(one, collectives=none) for one in results]
    analysis = compare_ranks(alone, source="traces").analysis
    assert [wait.rank for wait in analysis.rank_waits] == [0, 1]
    assert len(analysis.ranks) == 16


def run(*arguments):
    command = [sys.executable, "-m", "lightning_forge_profiling", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)


@pytest.mark.slow
def test_what_ranks_left_is_shown_without_their_traces(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    traces = run("show", folder, "--json")
    results_in(folder)
    of_rank = json.loads((folder / "rank1.summary.json").read_bytes())
    assert (of_rank["rank"], of_rank["world_size"]) == (1, 2)
    columns = of_rank["collectives"]
    assert len({len(columns[name]) for name in ("call", "sequence", "start_ns", "end_ns", "step")}) == 1
    assert all(start < end for start, end in zip(columns["start_ns"], columns["end_ns"], strict=True))
    for trace in folder.glob("*.trace.json*"):
        trace.unlink()
    assert run("view", folder, "--save", tmp_path / "report.html").returncode == 0
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert "straggler" in run("show", folder).stdout
    assert json.loads(run("show", folder, "--json").stdout) == json.loads(traces.stdout)
    done = run("show", folder, "--steps", "1:2")
    assert (done.returncode, "its trace is needed for these options" in done.stderr) == (2, True)
    (folder / "rank1.summary.json").unlink()
    said = " ".join(run("show", folder).stdout.split())
    assert said.startswith("verdict Without rank 1 of 2, which is missing and may be the cause: ")
    assert "Without rank" not in run("show", folder / "rank0.summary.json").stdout


def test_no_result_is_written_of_a_result(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    results_in(folder)
    with pytest.raises(TraceError, match="what the analysis of a rank left, not its trace"):
        write_rank_results(folder / "rank0.summary.json")


def test_a_result_is_taken_only_of_the_same_trace_and_version(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    results_in(folder)
    path = folder / "rank1.summary.json"
    kept = read_rank_result(path)

    def device_of_rank_1():
        return analyze(folder).analysis.ranks[1].device

    write_rank_result(replace(kept, summary=replace(kept.summary, device="as kept")), path)
    assert device_of_rank_1() == "as kept"
    assert analyze(folder, steps=(0, 1000)).analysis.ranks[1].device == kept.summary.device, "other steps"
    write_rank_result(replace(kept, summary=replace(kept.summary, device="as kept"), package="0.0.1"), path)
    assert device_of_rank_1() == kept.summary.device
    with pytest.raises(TraceError, match=rf"rank1\.summary\.json: by version 0\.0\.1 of .*, and this is {PACKAGE}"):
        analyze(path)
    [trace] = kept.traces
    other = replace(trace, blake2b="0" * 32)
    write_rank_result(replace(kept, summary=replace(kept.summary, device="as kept"), traces=(other,)), path)
    assert device_of_rank_1() == kept.summary.device
    path.write_text("{")
    assert device_of_rank_1() == kept.summary.device


def test_a_result_that_is_there_twice_counts_once(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    whole = analyze(folder).analysis
    results_in(folder)
    shutil.copy(folder / "rank0.summary.json", folder / "rank5.summary.json")
    analysis = analyze(folder, reduce=True).analysis
    assert analysis.all_ranks == 2
    assert analysis.verdict_text == whole.verdict_text
    assert any("1 of 3 files say what another one says: left out" in warning for warning in analysis.warnings)


def test_the_record_of_a_run_is_not_taken_for_its_window(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path / "logs")
    record = tmp_path / "logs" / "forge_record"
    record.mkdir()
    (record / "ranks.json").write_text("{}")
    (record / "window_plan.json").write_text("{}")
    assert [rank.rank for rank in analyze(tmp_path / "logs").analysis.ranks] == [0, 1]
    write_rank_results(tmp_path / "logs")
    assert (folder / "rank0.summary.json").is_file()


def test_ranks_whose_trace_is_elsewhere_are_taken_by_what_they_left(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    whole = analyze(folder).analysis
    results_in(folder)
    next(folder.glob("rank1.trace.json*")).unlink()
    assert json_of(analyze(folder).analysis) == json_of(whole)


@pytest.fixture
def bucket():
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


@pytest.mark.slow
def test_traces_in_a_remote_place_are_read_and_what_ranks_left_there_in_place_of_their_traces(tmp_path, bucket, capsys):
    folder, place = copied("slow_rank_gpu", tmp_path), "memory://bucket/window"
    bucket.put(str(folder), "/bucket/window", recursive=True)

    def shown(*options):
        assert main(["show", place, "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    whole = shown()
    assert (whole["verdict"], whole["source"]) == ("straggler", place)
    results_in(folder)
    path = folder / "rank1.summary.json"
    kept = read_rank_result(path)
    write_rank_result(replace(kept, summary=replace(kept.summary, device="as kept")), path)
    bucket.put(str(path), "/bucket/window/rank1.summary.json")
    assert [rank["device"] == "as kept" for rank in shown()["ranks"]] == [False, True]
    assert [rank["device"] == "as kept" for rank in shown("--steps", "0:1000")["ranks"]] == [False, False]
    write_rank_result(replace(kept, package="0.0.1"), path)
    bucket.put(str(path), "/bucket/window/rank1.summary.json")
    assert shown() == whole
    assert main(["view", place, "--save", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}: {place}\n"
    assert main(["show", "memory://bucket/nothing"]) == 2
    assert "memory://bucket/nothing: cannot be read: FileNotFoundError" in capsys.readouterr().err


def test_the_first_rank_reports_those_that_come_in_time_and_names_the_others(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    ranks = [0, 1, 2]
    finish_ranks(folder / "rank1.trace.json.gz", ranks, wait_s=0.0)
    assert {path.name for path in folder.glob("*summary.json")} == {"rank1.summary.json"}
    finish_ranks(folder / "rank0.trace.json.gz", ranks, wait_s=0.0)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert (summary["verdict"], summary["all_ranks"]) == ("straggler", 2)
    assert summary["verdict_text"].startswith("Without rank 2 of 3, which is missing and may be the cause: straggler")
    assert "Without rank 2 of 3, which is missing and may be the cause" in summary["warnings"]
    assert json.loads((folder / "rank0.summary.json").read_bytes())["rank"] == 0


def test_a_window_of_a_run_that_goes_on_knows_what_all_ranks_have_measured(tmp_path):
    folder, record = copied("ddp", tmp_path), MadeRun(ranks=2, late=1).write(tmp_path / "run")
    for rank in (1, 0):
        finish_ranks(folder / f"rank{rank}.trace.json.gz", [0, 1], wait_s=0.0, record=record)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert [work["rank"] for work in summary["run"]["ranks"]["works"]] == [0, 1]
    late = next(finding for finding in summary["findings"] if finding["code"] == "straggler")
    assert (late["rank"], late["source"], late["evidence"]["leaf"]) == (1, "run", "data")


def test_a_result_that_is_damaged_is_named(tmp_path):
    many(tmp_path, 3)
    shutil.rmtree(tmp_path / "slow_rank_gpu")
    (tmp_path / "rank2.summary.json").write_text('{"schema_version": 9}')
    analysis = analyze(tmp_path, reduce=True).analysis
    assert analysis.all_ranks == 2
    assert any("written by a newer version" in warning for warning in analysis.warnings)
    assert pipeline.spans_for(1000) == pipeline.spans_for(16) == pipeline.spans_for(1) // 16


# -- a thousand -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dask_analyses_each_trace_and_all_of_them_are_compared(tmp_path):
    folder = copied("slow_rank_gpu", tmp_path)
    example = Path(__file__).parents[1] / "examples" / "many_ranks" / "with_dask.py"
    command = [sys.executable, str(example), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks are analysed" in done.stdout
    assert "straggler" in done.stdout
    assert {path.name for path in folder.glob("*.summary.json")} == {"rank0.summary.json", "rank1.summary.json"}

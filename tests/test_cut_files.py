"""Files that end too early: what is said of them, and which of their steps are judged."""

import gzip
from pathlib import Path

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.markdown import markdown
from tests.synthetic import Synthetic

TRACES = Path(__file__).parent / "data" / "traces"


def test_a_file_that_is_cut_off_says_in_which_step_and_where_its_threads_end(tmp_path, capsys):
    whole = gzip.decompress((TRACES / "input_bound" / "rank0.trace.json.gz").read_bytes())
    path = tmp_path / "rank0.trace.json"
    path.write_bytes(whole[: len(whole) // 2])
    code, out = main(["show", str(path)]), capsys.readouterr().out
    numbers = [step.number for step in analyze(path).analysis.ranks[0].per_step]
    first_line = " ".join(out.split())
    assert code == 65
    assert first_line.startswith(f"verdict No verdict: {path.name} is cut off in step {numbers[-1]}: it ends in the ")
    assert f"which are whole up to step {numbers[-2]}" in first_line
    assert "no GPU work before the cut" in first_line
    assert "without a GPU" not in first_line
    page = tmp_path / "page.html"
    assert main(["view", str(path), "--save", str(page)]) == 65, "and what is there is on the page"
    assert capsys.readouterr().err.startswith(f"forge-profiling: {path.name} is cut off in step {numbers[-1]}: ")
    assert "is cut off in step" in page.read_text()


def three_steps():
    """Each of 10 ms, half of it computing, and the whole of it waited for."""
    trace = Synthetic()
    for number in (4, 5, 6, 7):
        begin = 10 * number
        trace.step(number, begin, begin + 10)
        trace.kernel(begin + 1, begin + 6, launched=begin + 0.5)
        trace.call("cudaDeviceSynchronize", begin + 1, begin + 9)
    return trace


def cut_in_step_7(folder, trace):
    """The file without what stands behind the launch of its last kernel."""
    path = trace.write(folder)
    text = path.read_text()
    path.write_text(text[: text.rindex('"cat": "kernel"')])
    return path


def test_steps_before_the_cut_are_judged_where_events_stand_in_order_of_time(tmp_path):
    trace = three_steps()
    trace.events.sort(key=lambda event: event["ts"])
    path = cut_in_step_7(tmp_path, trace)
    found = analyze(path).analysis
    assert [step.number for step in found.ranks[0].per_step if step.whole] == [4, 5, 6]
    assert found.verdict == "sync-bound"
    assert found.verdict_text.startswith(f"{path.name} is cut off in step 7: ")
    assert "the steps before are whole: 4, 5, 6. sync-bound: " in found.verdict_text
    assert main(["show", str(path)]) == 65


def test_a_step_whose_kernel_lies_behind_the_cut_is_not_whole(tmp_path):
    trace = three_steps()
    trace.kernel(75, 76, launched=61)
    trace.events.sort(key=lambda event: event["ts"])
    found = analyze(cut_in_step_7(tmp_path, trace)).analysis
    assert [step.number for step in found.ranks[0].per_step if step.whole] == [4, 5]


def test_no_step_is_judged_where_a_threads_events_stand_behind_those_of_another(tmp_path):
    trace = three_steps()
    trace.events.sort(key=lambda event: -event["tid"])  # the host's, then the GPU's
    found = analyze(cut_in_step_7(tmp_path, trace)).analysis
    assert found.verdict == "no verdict"


def test_of_windows_of_a_rank_the_whole_one_is_judged(tmp_path):
    cut_in_step_7(tmp_path, three_steps()).rename(tmp_path / "rank0.2.trace.json")
    three_steps().write(tmp_path, "rank0.1.trace.json")
    found = analyze(tmp_path).analysis
    assert found.verdict == "sync-bound"
    assert len(found.cut_off) == 1


def test_there_is_nothing_to_compare_with_a_file_that_has_no_whole_step(tmp_path, capsys):
    trace = three_steps()
    whole = trace.write(tmp_path / "whole")
    trace.events.sort(key=lambda event: -event["tid"])
    cut = cut_in_step_7(tmp_path / "cut", trace)
    assert main(["compare", str(whole), str(cut), "--fail-over", "5"]) == 2
    said = capsys.readouterr().err
    assert f"{cut}: no whole step to compare. {cut.name} is cut off" in said


def test_a_trace_without_a_verdict_is_not_compared_and_its_reason_is_said(tmp_path, capsys):
    whole = three_steps().write(tmp_path)
    unseen = Path(__file__).parent / "golden/faults/launches_without_kernels.json.gz"
    assert main(["compare", str(whole), str(unseen)]) == 2
    said = capsys.readouterr().err
    assert f"{unseen}: No verdict: " in said
    assert "what the GPU did was not recorded" in said


def test_the_figures_of_a_cut_rank_are_marked_beside_those_of_a_whole_one(tmp_path, capsys):
    trace = three_steps()
    trace.events.sort(key=lambda event: -event["tid"])
    cut_in_step_7(tmp_path, trace).rename(tmp_path / "rank1.trace.json")
    three_steps().write(tmp_path, "rank0.trace.json")
    analysis = analyze(tmp_path).analysis
    assert [rank.cut_off for rank in analysis.ranks] == [False, True]
    assert analysis.verdict == "sync-bound", "that of the whole one"
    assert main(["show", str(tmp_path)]) == 65
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("1 (cut off)  ")]) == 2, "in both tables of ranks"
    assert not [line for line in lines if line.startswith("0 (cut")]
    written = markdown(analysis)
    assert "| 1 (cut off) |" in written
    assert "Rank 0, the slowest by its median," in written, "details are of a whole one"


def test_a_cut_rank_alone_says_so_with_each_of_its_figures(tmp_path, capsys):
    trace = three_steps()
    trace.events.sort(key=lambda event: -event["tid"])
    assert main(["show", str(cut_in_step_7(tmp_path, trace))]) == 65
    text = " ".join(capsys.readouterr().out.split())
    assert "; its file is cut off" in text
    assert text.count("(of a file that is cut off)") >= 1, "the compute line"

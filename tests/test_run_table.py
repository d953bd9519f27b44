"""The table at the end of a run, from a run's books to the text."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_forge_profiling.callbacks.run_analysis import run_compute
from lightning_forge_profiling.report.run_table import RunReport, print_run
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.results.analysis import Hint
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.rates import StepWork
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes
from lightning_forge_profiling.timing.utilization import Compute, Peak
from tests.samples import sample_analysis


def books(*left_out, samples=8.0):
    """A run whose step k took k + 1 ms in forward and as much in `mine`, with 5 s of validation in step 1."""
    totals = RunTotals()
    for step, reason in enumerate(left_out):
        times = {"forward": step + 1.0, "mine": step + 1.0} | ({"validation": 5000.0} if step == 1 else {})
        totals.add(StepTimes(step, times, times), StepWork(samples, None, optimizer_steps=step % 2), reason)
    return totals.summary(steps=len(left_out), before_first_s=0.5, wall_s=2.0)


def printed(run, trace=None, log_folder=None, *, terminal=False, **options):
    text = io.StringIO()
    report = RunReport(
        run, trace, **{"device": "cpu", "on_device": False, "replicas": 1, **options}, log_folder=log_folder
    )
    print_run(report, Screen(text, width=100, terminal=terminal, colours=False))
    return text.getvalue()


def test_rates_are_over_the_steps_that_count_and_end_to_end_over_all():
    run = books("warm-up", "warm-up", "recorded", None, None)
    assert run.steady.total_ms == pytest.approx(4 + 5)
    text = printed(run)
    assert "mean of 2 of 5 steps on cpu" in text
    assert "1,778 samples/s, 222 steps/s" in text, "16 samples and 2 steps in 9 ms"
    assert "20.0 samples/s, 2.50 steps/s over 2.00 s from the start of fit; first step finished after 0.50 s" in text
    assert "2 warm-up steps, 1 steps with the profiler on, 5.00 s validation" in text
    assert "your mine" in text


def test_on_a_terminal_sentences_wrap_between_words_and_paths_stay_whole(tmp_path):
    path = tmp_path / ("long_name_" * 8) / "rank0.trace.json.gz"
    trace = TraceReport("written", path=path, plugin_path=path, steps=(5, 6))
    report = RunReport(
        books("warm-up", "recorded", None),
        trace,
        device="cpu",
        on_device=False,
        replicas=1,
        log_folder=tmp_path,
        gpu="[red]no[/] driver " + "word " * 30,
    )
    text = io.StringIO()
    print_run(report, Screen(text, width=60, terminal=True, colours=False))
    lines = text.getvalue().splitlines()
    assert any(str(path) in line for line in lines)
    [first] = [line for line in lines if line.startswith("gpu ")]
    assert "[red]no[/] driver word" in first
    assert len(first) <= 60
    assert set(lines[lines.index(first) + 1].split()) == {"word"}


def test_replicas_multiply_samples_and_not_steps():
    text = printed(books(None, None), replicas=4)
    assert "21,333 samples/s, 667 steps/s" in text
    assert "over 4 replicas" in text


def test_without_a_batch_size_the_other_rates_stay():
    text = printed(books(None, None, samples=None))
    assert "samples/s" not in text
    assert "667 steps/s" in text


def test_a_run_of_warm_up_steps_only_shows_them_without_the_first_and_says_so():
    run = books("warm-up", "warm-up", "warm-up")
    assert run.steady.mean_ms("step") == pytest.approx(2.5)
    assert "all 3 steps were warm-up" in printed(run)


def test_a_run_of_one_step_shows_that():
    run = books("warm-up")
    assert run.steady.mean_ms("step") == pytest.approx(1)
    assert "the run had one step" in printed(run)


def test_a_run_without_steps_prints_no_rate():
    text = printed(RunTotals().summary(steps=0, before_first_s=0.1, wall_s=0.2))
    assert "unknown: no step was timed" in text


def test_the_trace_line_has_a_command_that_can_be_copied(tmp_path):
    log_folder = tmp_path / "my logs"
    path = log_folder / "profiler_traces" / ("long" * 30) / "rank0.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 1_500_000)
    trace = TraceReport("written", "", (5, 6, 7), path, path.parent / "tensorboard" / "rank0.pt.trace.json.gz", 12.3)
    text = printed(books(None), trace, log_folder)
    assert f"{path} (3 steps, 1.5 MB; training was held up 12 ms)\n" in text, "in one line, however long"
    assert f"tensorboard --logdir '{log_folder}'" in text


@pytest.mark.parametrize("status", ["not reached", "stood aside", "failed"])
def test_a_missing_trace_is_named_with_its_reason(status):
    text = printed(books(None), TraceReport(status, "because of [brackets]"), Path("logs"))
    assert f"no trace    {status}: because of [brackets]" in text
    assert "tensorboard" not in text


def test_windows_of_rates_add_up_to_the_whole():
    totals = RunTotals()
    for step in range(5):
        if step == 3:
            first = totals.take()
        regions = {"forward": 3.0, **({"late": 2.0} if step == 4 else {})}
        totals.add(StepTimes(step, regions, regions), StepWork(8.0, None, optimizer_steps=step % 2), None)
    window = totals.take()
    assert (first.steps, first.optimizer_steps, first.samples) == (3, 1, 24.0)
    assert (window.steps, window.optimizer_steps, window.samples) == (2, 1, 16.0)
    assert window.device_ms == {"forward": 6.0, "late": 2.0}
    assert window.metrics()["throughput/samples_per_sec"] == pytest.approx(16 / 6e-3)
    assert "throughput/tokens_per_sec" not in window.metrics()
    assert totals.steady().device_ms == {"forward": 15.0, "late": 2.0}


def test_hints_stand_before_the_verdict():
    hint = Hint(code="gpu-throttled", rank=0, text="The GPU's clock was held down 40 % of the time.")
    text = " ".join(printed(books(None), analysis=replace(sample_analysis(), hints=(hint,))).split())
    assert "hint The GPU's clock was held down 40 % of the time. verdict input-bound" in text.replace(
        "hint rank 0: ", "hint "
    )


def test_the_table_ends_in_the_verdict_and_what_else_there_is():
    analysis = replace(sample_analysis(), hints=(), differences=("recorded steps took 53.27 ms, live ones 40.00 ms",))
    lines = printed(books(None), analysis=analysis, terminal=True).rstrip().splitlines()
    text = " ".join(" ".join(lines).split())
    assert (
        "difference recorded steps took 53.27 ms, live ones 40.00 ms verdict input-bound: the GPU waits 8.5 ms" in text
    )
    assert lines[-1] == "also        compute-bound 38 %, sync-bound 5 % of the step"
    verdict = lines[next(i for i, line in enumerate(lines) if line.startswith("verdict")) : -1]
    assert len(verdict) > 1, "sentences wrap below themselves"
    assert all(len(line) <= 100 and line.startswith(" " * 12) for line in verdict[1:])


def test_names_from_a_trace_cannot_reach_the_terminal():
    analysis = replace(sample_analysis(), verdict_text="input-bound: \x1b[2Jgone [red]not markup[/red]")
    text = printed(books(None), analysis=analysis)
    assert "\x1b" not in text
    assert "gone [red]not markup[/red]" in text


def test_in_a_file_a_line_is_a_line():
    [verdict] = [line for line in printed(books(None), analysis=sample_analysis()).splitlines() if "verdict" in line]
    assert verdict.endswith("persistent_workers=True.")


def test_the_report_is_named_where_it_is(tmp_path):
    path = tmp_path / "rank0.trace.json.gz"
    path.write_bytes(b"x")
    trace = TraceReport("written", "", (5,), path, report_path=tmp_path / "report.html")
    assert f"report      {tmp_path / 'report.html'}    (beside it summary.md and summary.json)\n" in printed(
        books(None), trace
    )


@pytest.mark.parametrize(("left_out", "steps"), [((None,) * 4, 4), (("warm-up",) * 9, 0)])
def test_too_few_steps_for_a_verdict_are_said(left_out, steps):
    assert f"verdict     none: {steps} steady steps, at least 5 needed" in printed(books(*left_out))


def test_a_peak_is_named_once_and_without_the_address_of_its_source():
    peak = Peak(989.5e12, "bf16", "H200 SXM", "NVIDIA H200 data sheet, halved, https://www.nvidia.com/h200/")
    found = Compute("mfu", 400e12, peak), Compute("hfu", 500e12, peak, "attention counted in full, causal or not")
    compute = tuple(map(run_compute, found))
    text = printed(books(None), compute=compute)
    assert (
        "400 TFLOP/s per device, MFU 40.4 % of 989.5 TFLOP/s (H200 SXM, bf16; NVIDIA H200 data sheet, halved)\n" in text
    )
    assert printed(books(None), compute=compute[:1] * 2).count("TFLOP/s per device") == 1, "nothing more ran"
    assert "500 TFLOP/s per device carried out, HFU 50.5 % of the same, attention counted in full" in text

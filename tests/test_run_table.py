"""The table at the end of a fit, from a run's totals to the text or the notebook."""

import dataclasses
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.report.run_table import run_table
from lightning_forge_profiling.report.run_wording import compute_lines
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import print_run, print_table
from lightning_forge_profiling.run.compute_rate import compute_of, peak_of
from lightning_forge_profiling.schema import (
    Distribution,
    Hint,
    RunEvidence,
    RunLedger,
    RunMachine,
    RunReport,
    TelemetrySummary,
    TraceReport,
)
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepWork
from tests.evidence import made_evidence, with_figures
from tests.outcomes import Tags
from tests.samples import sample_analysis


def made_totals(*left_out, samples=8.0):
    """A run whose step k took k + 1 ms in forward and as much in `mine`, with 5 s of validation in step 1."""
    totals = RunTotals()
    for step, reason in enumerate(left_out):
        times = {"forward": step + 1.0, "mine": step + 1.0} | ({"validation": 5000.0} if step == 1 else {})
        totals.add(StepTimes(step, times, times), StepWork(samples, None, optimizer_steps=step % 2), reason)
    return totals.timing(steps=len(left_out), before_first_s=0.5, wall_s=2.0)


def report_of(run, trace=None, log_folder=None, **options):
    of_machine = {name: options.pop(name) for name in RunMachine.__struct_fields__ if name in options}
    analysis = options.get("analysis")
    measured = (analysis and analysis.run) or RunEvidence(timing=run)
    measured = with_figures(replace(measured, timing=run), **of_machine)
    return RunReport(measured, trace, **{"device": "cpu", "replicas": 1, **options}, log_folder=log_folder)


def printed(run, trace=None, log_folder=None, *, width=100, **options):
    text = io.StringIO()
    print_run(report_of(run, trace, log_folder, **options), Screen(text, width=width, wrap=True, colours=False))
    return text.getvalue()


def sampled(steps, *, chosen_every=4):
    """A run whose step k took k ms, of which regions were timed in each fourth step, half of it in forward."""
    totals = RunTotals(on_device=True)
    for step in range(steps):
        device_ms = {"data": step / 2, "forward": step / 2}
        times = StepTimes(step, device_ms, {"data": 2.0 * step, "forward": step / 2})
        totals.add(times if step % chosen_every == 0 else times.whole(), StepWork(8.0, None, 1), None)
    return totals.timing(steps=steps, before_first_s=0.5, wall_s=2.0)


def test_rates_are_over_the_steps_that_count_and_end_to_end_over_all():
    run = made_totals("warm-up", "warm-up", "recorded", None, None)
    assert run.total_ms == pytest.approx(4 + 5)
    text = printed(run)
    assert "Where a step goes: 4.50 ms, mean of 2 of 5 steps on cpu" in text
    assert "1,778 samples/s, 222 steps/s" in text, "16 samples and 2 steps in 9 ms"
    assert "20.0 samples/s over the 2.00 s of the fit, first step after 0.50 s" in text
    assert "2 warm-up steps, 1 step with the profiler on, 5.00 s validation" in text
    assert "your mine" in text


def test_sentences_wrap_between_words_and_paths_stay_whole(tmp_path):
    path = tmp_path / ("long_name_" * 8) / "rank0.trace.json.gz"
    trace = TraceReport("written", path=path, plugin_path=path, steps=(5, 6))
    run = made_totals("warm-up", "recorded", None)
    lines = printed(run, trace, tmp_path, width=60, no_telemetry="[red]no[/] driver " + "word " * 30).splitlines()
    assert any(str(path) in line for line in lines)
    [first] = [line for line in lines if line.startswith("gpu ")]
    assert "[red]no[/] driver word" in first
    assert len(first) <= 60
    assert set(lines[lines.index(first) + 1].split()) == {"word"}


def test_an_ordinary_table_is_short_and_whole_in_80_columns():
    run = sampled(400)
    text = printed(run, width=80, analysis=replace(sample_analysis(), hints=()))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 20
    assert lines[1].startswith("verdict     input-bound: ")


def test_the_table_of_a_recorded_run_has_some_twenty_lines(tmp_path):
    path = tmp_path / "rank0.trace.json.gz"
    path.write_bytes(b"x" * 400_000)
    trace = TraceReport(
        "written", "", (5, 6, 7), path, tmp_path / "tensorboard" / "x", 311.0, report_path=tmp_path / "report.html"
    )
    gpu = TelemetrySummary(
        device="NVIDIA H200",
        utilization_pct=12.0,
        memory_peak_gib=1.6,
        memory_total_gib=140.4,
        allocated_peak_gib=0.2,
        power_w=123.0,
        power_limit_w=700.0,
        joules_per_sample=0.06,
        temperature_peak_c=35.0,
        sm_mhz=1980.0,
        throttled_pct=0.0,
    )
    peak = peak_of("H200 SXM", "fp32", 67, "NVIDIA H200 data sheet")
    ledger = RunLedger(
        wall_s=3.0,
        parts={"steps": 1.5, "profiler": 0.6, "sanity_check": 0.4, "validation": 0.2, "checkpoint": 0.2},
        unexplained_s=0.1,
        counts={},
    )
    steps = Distribution(mean=15.0, p50=15.0, min=14.0, max=16.0)
    evidence = made_evidence(steps=400, on_device=True, step_ms=steps, regions={}, ledger=ledger)
    totals = RunTotals(on_device=True)
    for step in range(60):
        split = {"data": 0.05, "transfer": 0.1, "forward": 5.0, "backward": 8.0, "optimizer": 1.5, "other": 0.1}
        left_out = "warm-up" if step < 6 else "recorded" if step < 10 else None
        totals.add(StepTimes(step, split, split), StepWork(32.0, 4096.0, 1), left_out)
    text = printed(
        totals.timing(steps=60, before_first_s=0.5, wall_s=2.4),
        trace,
        tmp_path,
        width=80,
        device="cuda:0 (NVIDIA H200)",
        analysis=replace(sample_analysis(), hints=(), run=evidence),
        telemetry=gpu,
        compute=(compute_of("mfu", 1.47, peak),),
    )
    lines = [line for line in text.splitlines() if line]
    assert len(lines) <= 21
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    assert f"report      {tmp_path / 'report.html'}\n" in text
    assert "trace       rank0.trace.json.gz beside it: 3 steps, 0.4 MB, exported in 311 ms\n" in text
    [rest] = [line for line in lines if line.startswith("rest")]
    assert rest.split()[-3:] == ["1.7", "%", "0.25"], "data, transfer and other, so that the shares sum to the step"


def test_the_split_of_the_step_has_shares_of_the_mean_and_percentiles_of_the_timed_steps():
    lines = [line.split() for line in printed(sampled(401), width=80).splitlines()]
    [head] = [line for line in lines if line[:1] == ["sampled"]]
    assert " ".join(head) == "sampled 1 in 4 share mean ms median p95 host"
    rows = {line[0]: line[1:] for line in lines if line[:1] in (["data"], ["forward"], ["step"])}
    assert rows["data"][1:] == ["50.0", "%", "100.0", "100.0", "190.0", "400.0"], (
        "where the host waits for twice the time"
    )
    assert rows["forward"][1:] == ["50.0", "%", "100.0", "100.0", "190.0"]
    assert rows["data"][0] == rows["forward"][0], "bars of equal length"
    assert rows["step"] == ["200.0", "200.0", "380.0"]


def test_bars_show_the_share_of_the_mean():
    run = made_totals(None, None, None)
    lines = printed(run, width=80).splitlines()
    [bar] = {line.split()[1] for line in lines if line.startswith("forward")}
    assert set(bar) == {"█"}
    assert len(bar) == 24


def test_few_steps_have_no_95th_percentile_and_20_have():
    assert "p95" not in printed(made_totals(*[None] * 19))
    assert "p95" in printed(made_totals(*[None] * 20))


def test_what_says_nothing_is_left_out():
    text = printed(made_totals(None, None))
    assert "transfer" not in text, "0.0 % of the step"
    assert "host" not in text
    assert "optimizer steps/s" in text, "each second step changes the weights"
    every = sampled(4, chosen_every=1)
    assert "optimizer" not in printed(every)
    assert "checkpoint" not in text
    assert "gpu" not in text


def test_replicas_multiply_samples_and_not_steps():
    text = printed(made_totals(None, None), replicas=4)
    assert "21,333 samples/s, 667 steps/s" in text
    assert "over 4 replicas" in text


def test_without_a_batch_size_the_other_rates_stay():
    text = printed(made_totals(None, None, samples=None))
    assert "samples/s" not in text
    assert "667 steps/s" in text


def test_a_run_of_warm_up_steps_only_shows_them_without_the_first_and_says_so():
    run = made_totals("warm-up", "warm-up", "warm-up")
    assert run.step_ms.mean == pytest.approx(2.5)
    assert "figures are of the warm-up, of which 3 steps ran" in printed(run)


@pytest.mark.parametrize(("longest_ms", "said"), [(20_000.0, True), (15.0, False)])
def test_a_mean_above_the_95th_percentile_is_said_with_the_step_that_makes_it(longest_ms, said):
    totals = RunTotals()
    for step in range(200):
        times = {"forward": longest_ms if step == 98 else 5.0 + step % 2}
        totals.add(StepTimes(step, times, times), StepWork(8.0, None, 1), None)
    text = printed(totals.timing(steps=200, before_first_s=0.5, wall_s=22.0))
    assert ("the mean is above p95: step 98 took 20.0 s, 95 % of the steps' time" in text) == said
    assert ("above p95" in text) == said


def test_a_run_of_one_step_shows_that():
    run = made_totals("warm-up")
    assert run.step_ms.mean == pytest.approx(1)
    assert "only one step ran" in printed(run)


def test_a_run_without_steps_prints_no_rate():
    text = printed(RunTotals().timing(steps=0, before_first_s=0.1, wall_s=0.2))
    assert "Where a step goes: unknown, no step was timed" in text
    assert "steps/s" not in text


def test_the_trace_line_has_a_command_that_can_be_copied(tmp_path):
    log_folder = tmp_path / "my logs"
    path = log_folder / "profiler_traces" / ("long" * 30) / "rank0.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 1_500_000)
    trace = TraceReport("written", "", (5, 6, 7), path, path.parent / "tensorboard" / "rank0.pt.trace.json.gz", 12.3)
    text = printed(made_totals(None), trace, log_folder)
    assert f"{path} (3 steps, 1.5 MB; its export blocked training for 12 ms)\n" in text, "in one line, however long"
    assert f"tensorboard --logdir '{log_folder}'" in text


@pytest.mark.parametrize("status", ["not reached", "skipped", "failed"])
def test_a_missing_trace_is_named_with_its_reason(status):
    text = printed(made_totals(None), TraceReport(status, "because of [brackets]"), Path("logs"))
    assert f"no trace    {status}: because of [brackets]" in text
    assert "tensorboard" not in text


def means_of(timing, *regions):
    return {name: timing.regions[name].device_ms for name in regions}


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
    assert means_of(window, "forward", "late") == {"forward": 3.0, "late": 1.0}
    assert window.metrics()["throughput/samples_per_sec"] == pytest.approx(16 / 6e-3)
    assert "throughput/tokens_per_sec" not in window.metrics()
    assert means_of(totals.steady(), "forward", "late") == {"forward": 3.0, "late": pytest.approx(0.4)}


def test_the_verdict_comes_first_and_what_goes_with_it_next():
    hint = Hint(code="gpu-throttled", rank=0, text="The GPU's clock was held down 40 % of the time.")
    differences = ("recorded steps took 53.27 ms, live ones 40.00 ms", "another")
    analysis = replace(sample_analysis(), hints=(hint,), differences=differences)
    lines = printed(made_totals(None), analysis=analysis).splitlines()
    assert lines[0] == ""
    assert lines[1].startswith("verdict     input-bound: the GPU waits 8.5 ms")
    first = next(number for number, line in enumerate(lines) if line.startswith("also"))
    assert lines[2].startswith("try         Give the DataLoader num_workers=4"), "on a line of its own"
    assert all(len(line) <= 100 and line.startswith(" " * 12) for line in lines[3:first]), "wrapped below itself"
    assert lines[first : first + 4] == [
        "also        sync-bound 5 %, compute-bound 38 % of the step",
        "hint        The GPU's clock was held down 40 % of the time.",
        "difference  recorded steps took 53.27 ms, live ones 40.00 ms",
        "",
    ]
    assert lines[first + 4].startswith("Where a step goes: ")


@pytest.mark.parametrize(("pct", "said"), [(61.0, True), (38.0, False)])
def test_work_of_most_of_the_step_is_named_after_a_smaller_verdict(pct, said):
    first, sync, work = sample_analysis().findings
    work = replace(work, code="launch-bound", share_pct=pct, fix="torch.compile(model)")
    text = printed(made_totals(None), analysis=replace(sample_analysis(), findings=(first, sync, work)))
    assert (f"\nthen        launch-bound, {pct:.0f} % of the step: torch.compile(model)\n" in text) is said
    work = replace(work, evidence={**work.evidence, "line": "a.py:3 Net.forward", "line_pct": 38.2})
    text = printed(made_totals(None), analysis=replace(sample_analysis(), findings=(first, sync, work)))
    assert (f"\nthen        launch-bound, {pct:.0f} % of the step, 38 % of that at a.py:3: torch" in text) is said


def test_names_from_a_trace_cannot_reach_the_terminal():
    finding = replace(sample_analysis().findings[0], title="\x1b[2Jgone [red]not markup[/red]")
    analysis = replace(sample_analysis(), findings=(finding,))
    text = printed(made_totals(None), analysis=analysis)
    assert "\x1b" not in text
    assert "gone [red]not markup[/red]" in text


def test_the_report_is_named_where_it_is(tmp_path):
    path = tmp_path / "rank0.trace.json.gz"
    path.write_bytes(b"x")
    trace = TraceReport("written", "", (5,), path, report_path=tmp_path / "report.html")
    assert f"report      {tmp_path / 'report.html'}\n" in printed(made_totals(None), trace)


def test_what_was_still_being_written_when_the_run_ended_is_not_any_more(tmp_path):
    trace = TraceReport("written", "it is still being written", (5,), tmp_path / "rank0.trace.json.gz", pending=True)
    assert "it is still being written" in printed(made_totals(None), trace)
    (tmp_path / "report.html").touch()
    assert "it is still being written" not in printed(made_totals(None), trace)


@pytest.mark.parametrize(("left_out", "steps"), [((None,) * 4, 4), (("warm-up",) * 9, 0)])
def test_too_few_steps_for_a_verdict_are_said(left_out, steps):
    assert f"verdict     not enough steps: {steps} after warm-up, at least 5 needed" in printed(made_totals(*left_out))


def test_a_peak_is_named_once_and_its_source_in_the_reports_without_the_address():
    peak = peak_of("H200 SXM", "bf16", 989.5, "NVIDIA H200 data sheet, halved, https://www.nvidia.com/h200/")
    found = compute_of("mfu", 400, peak), compute_of("hfu", 500, peak, "attention counted in full, causal or not")
    compute = found
    text = printed(made_totals(None), compute=compute, width=200)
    assert "400 TFLOP/s per device, MFU 40.4 % of 989.5 TFLOP/s (H200 SXM, bf16)\n" in text
    [named, _] = compute_lines(compute)  # as in the reports
    assert named.endswith("(H200 SXM, bf16; NVIDIA H200 data sheet, halved)")
    twice = printed(made_totals(None), compute=compute[:1] * 2, width=200)
    assert twice.count("TFLOP/s per device") == 1, "nothing more ran"
    assert "500 TFLOP/s per device carried out, HFU 50.5 % of the same, attention counted in full" in text


# -- in a notebook ---------------------------------------------------------------------------------------------------


@pytest.fixture
def outputs(monkeypatch):
    """What the cell of a notebook shows; tests/test_notebook.py runs a real one, in another process."""
    shown = []
    display = SimpleNamespace(display=lambda data, raw: shown.append(data))
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_gets_one_output_with_the_same_content(outputs, capsys):
    finding = replace(sample_analysis().findings[0], title="<script>alert(1)</script>\x1b[2J waits")
    analysis = replace(sample_analysis(), findings=(finding,))
    report = report_of(sampled(400), analysis=analysis)
    print_run(report)
    assert capsys.readouterr().out == ""
    [output] = outputs
    assert output["text/plain"].startswith("verdict     input-bound: ")
    page = Tags(output["text/html"])
    assert page.tags <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "span", "code"}
    assert "".join(page.text.split()) == re.sub(r"[\s█▏▎▍▌▋▊▉]", "", output["text/plain"])
    assert "\x1b" not in output["text/html"]


def test_ipython_on_a_terminal_gets_the_text(outputs, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", SimpleNamespace)
    print_run(report_of(made_totals(None)))
    assert outputs == []
    assert "Where a step goes" in capsys.readouterr().out


def test_the_parts_of_the_fit_are_shown_where_steps_are_not_nearly_all_of_it():
    def ledger(**parts):
        return RunLedger(wall_s=sum(parts.values()), parts=parts, unexplained_s=0.0, counts={})

    def text(ledger):
        steps = Distribution(mean=40.0, p50=40.0, min=40.0, max=40.0)
        run = made_evidence(steps=100, on_device=True, step_ms=steps, regions={}, ledger=ledger)
        return printed(made_totals(None), analysis=replace(sample_analysis(), run=run))

    parts = {"startup/process": 90.0, "steps": 7.0, "checkpoint": 2.0, "validation": 0.95, "teardown": 0.05}
    assert "whole fit   steps 70 %, checkpoint 20 %, validation 10 %\n" in text(ledger(**parts))
    assert "whole fit" not in text(ledger(steps=99.0, teardown=1.0))
    profiled = ledger(**{"startup/process": 100.0, "steps": 6.0, "profiler": 3.0, "validation": 1.0})
    assert "whole fit   steps 60 %, profiler 30 %, validation 10 %\n" in text(profiled), "of the fit, without startup"


def test_findings_of_one_code_are_told_apart_by_their_part_of_the_ledger():
    verdict, *_ = sample_analysis().findings
    parts = {"logger/self.log": 9.0, "logger/CSVLogger": 7.0, "callback/EMA.on_train_batch_end": 6.0}
    others = tuple(
        replace(verdict, code=f"slow-{part.partition('/')[0]}", share_pct=pct, evidence={"part": part})
        for part, pct in parts.items()
    )
    text = printed(made_totals(None), analysis=replace(sample_analysis(), findings=(verdict, *others)), width=120)
    also = "also        slow-logger (self.log) 9 %, slow-logger (CSVLogger) 7 %, slow-callback 6 % of the step"
    assert also in text


def test_findings_of_the_fit_are_not_said_to_be_of_the_step():
    found = sample_analysis().findings
    outside = replace(found[1], code="checkpoint-bound", share_pct=12.0, of="run")
    text = printed(made_totals(None), analysis=replace(sample_analysis(), findings=(*found, outside)))
    assert "also        sync-bound 5 %, compute-bound 38 % of the step; checkpoint-bound 12 % of the fit" in text


def test_a_bar_of_a_long_step_stays_on_its_line():
    """Times of many digits are wider than their headings."""
    times = {"data": 12345.678, "forward": 100.0}
    totals = RunTotals()
    for step in range(60):
        totals.add(StepTimes(step, times, times), StepWork(4.0), None)
    run = totals.timing(steps=60, before_first_s=0.5, wall_s=2.0)
    table = run_table(report_of(run))
    first, *others = table.table.columns
    columns = (dataclasses.replace(first, name="sampled 1 in 3"), *others)
    table = dataclasses.replace(table, table=dataclasses.replace(table.table, columns=columns))
    text = io.StringIO()
    for width in (75, 80, 90):
        screen = Screen(text, width=width, wrap=True, colours=False)
        print_table(table, screen)
    bars = [line for line in text.getvalue().splitlines() if "█" in line]
    assert len([line for line in bars if line.startswith("data")]) == 3
    assert all(line.split()[0] in {"data", "forward"} for line in bars)

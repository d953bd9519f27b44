"""The table at the end of a run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Final

from lightning_forge_profiling.diagnosis.run_rules import MIN_STEPS
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.table import Table, Text
from lightning_forge_profiling.report.telemetry_text import telemetry_words
from lightning_forge_profiling.report.wording import by_text, compute_lines, digits, verdict, window_effect_words
from lightning_forge_profiling.results.analysis import Analysis, RunCompute
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.rates import Rates
from lightning_forge_profiling.timing.run_totals import RunSummary

__all__ = ["RunReport", "print_run"]

_TO_COPY: Final = frozenset({"trace", "no trace", "note", "look at it", "", "report", "memory", "no memory"})
"""Lines of paths and commands, or that may have some, which could not be copied once they are broken."""

_NAMES_WIDTH: Final = 11


@dataclass(frozen=True, slots=True)
class RunReport:
    """What there is to say at the end of a run.

    Attributes:
        run: where its time went on rank 0.
        trace: what became of the recorded window, None without one.
        device: what it trained on, in words.
        on_device: whether times are device times.
        replicas: data-parallel replicas.
        log_folder: where TensorBoard should look, None without a logger.
        analysis: of the steps that count and of the trace, None where there is neither.
        compute: how fast a device computed; empty where nobody can tell.
        gpu: what its sensors said, or why nothing; None where nobody asked.
    """

    run: RunSummary
    trace: TraceReport | None
    device: str
    on_device: bool
    replicas: int
    log_folder: Path | None
    analysis: Analysis | None = None
    compute: tuple[RunCompute, ...] = ()
    gpu: TelemetrySummary | str | None = None


def print_run(report: RunReport, screen: Screen | None = None) -> None:
    """Print the table.

    Args:
        report: what to print.
        screen: where to; standard output by default.
    """
    screen = screen or Screen()
    run = report.run
    screen.line()
    steps = f"{run.steady.steps} of {run.steps} steps"
    screen.line(Text(f"Where a step goes: mean of {steps} on {report.device}", "bold"))
    screen.table(_step_table(report))
    screen.line()
    lines: Iterable[tuple[str, str | Text]] = chain(_lines(report), _verdict(report))
    for name, text in lines:
        screen.line(text, name=Text(name, "bold"), column=_NAMES_WIDTH, whole=name in _TO_COPY)
    screen.line()
    screen.flush()


def _step_table(report: RunReport) -> Table:
    rates = report.run.steady
    times = ("device ms", "host ms") if report.on_device else ("host ms",)
    table = Table("region", *times, "share")

    def row(region: str, name: str, style: str = "") -> None:
        share = 100 * rates.mean_ms(region) / rates.mean_ms("step") if rates.mean_ms("step") else 0.0
        values = [rates.mean_ms(region), *([rates.mean_host_ms(region)] if report.on_device else [])]
        table.row(name, *(f"{value:.3f}" for value in values), f"{share:.1f} %", style=style)

    if rates.split_steps or not rates.steps:
        for region in rates.regions:
            row(region, region)
        table.section()
    row("step", "step", style="bold")
    if rates.user_regions:
        table.section()
        for region in rates.user_regions:
            row(region, f"your {region}")
    return table


def _lines(report: RunReport) -> Iterator[tuple[str, str]]:
    run = report.run
    yield "throughput", _throughput(report)
    for line in compute_lines(report.compute):
        yield "compute", line
    if isinstance(report.gpu, str):
        yield "gpu", f"no telemetry: {report.gpu}"
    elif report.gpu is not None:
        yield "gpu", ", ".join(telemetry_words(report.gpu))
    yield "end to end", _end_to_end(report)
    yield from _timing_lines(run.steady)
    left_out = [
        f"{count} {what}"
        for count, what in (
            (0 if run.only_warmup else run.warmup_steps, "warm-up steps"),
            (run.recorded_steps, "steps with the profiler on"),
            (run.untimed_steps, "steps that could not be timed"),
        )
        if count
    ]
    left_out += [f"{ms / 1e3:.2f} s {name}" for name, ms in run.excluded_ms.items() if ms >= 1]
    if left_out:
        yield "left out", ", ".join(left_out)
    if run.only_warmup and run.steps == 1:
        yield "note", "the run had one step, which is never typical of others"
    elif run.only_warmup and run.steps:
        yield "note", f"all {run.steps} steps were warm-up; the figures above are over those, without the first"
    evidence = report.analysis.run if report.analysis is not None else None
    if evidence is not None and evidence.window_effect is not None:
        yield "window", window_effect_words(evidence.window_effect)
    if report.trace is not None:
        yield from _trace_lines(report.trace, report.log_folder)
        yield from _memory_lines(report.trace)


def _throughput(report: RunReport) -> str:
    rates = report.run.steady
    parts = []
    for amount, unit, factor in (
        (rates.samples, "samples/s", report.replicas),
        (rates.tokens, "tokens/s", report.replicas),
        (float(rates.steps), "steps/s", 1),
        (float(rates.optimizer_steps), "optimizer steps/s", 1),
    ):
        per_second = rates.per_second(amount)
        if per_second:
            parts.append(f"{digits(per_second * factor)} {unit}")
    over = f" over {report.replicas} replicas" if report.replicas > 1 else ""
    return (", ".join(parts) or "unknown: no step was timed") + over


def _end_to_end(report: RunReport) -> str:
    run = report.run
    rate = f"{digits(run.steps / run.wall_s)} steps/s" if run.wall_s > 0 else ""
    if run.samples and run.wall_s > 0:
        rate = f"{digits(run.samples * report.replicas / run.wall_s)} samples/s, {rate}"
    first = "" if run.first_step_s is None else f"; first step finished after {run.first_step_s:.2f} s"
    return f"{rate} over {run.wall_s:.2f} s from the start of fit{first}"


def _timing_lines(rates: Rates) -> Iterator[tuple[str, str]]:
    if rates.split_steps < rates.steps:
        each = rates.steps / rates.split_steps if rates.split_steps else 0
        some = f"1 in {each:.0f}" if each >= 2 else f"{rates.split_steps} of {rates.steps}"  # noqa: PLR2004
        yield "timing", f"regions from {some} steps, {rates.own_us / rates.steps:.0f} µs a step on the host"


def _trace_lines(trace: TraceReport, log_folder: Path | None) -> Iterator[tuple[str, str]]:
    if trace.status != "written" or trace.path is None:
        yield "no trace", f"{trace.status}: {trace.message}" if trace.message else trace.status
        return
    if trace.message:
        yield "note", trace.message
    if trace.attached:
        yield "note", f"CUPTI stays attached after the window, and kernel launches slower: {trace.attached}"
    steps = f"{len(trace.steps)} steps" if len(trace.steps) != 1 else "1 step"
    missing = "being written" if trace.pending else "moved away"
    size = f"{trace.path.stat().st_size / 1e6:.1f} MB" if trace.path.exists() else missing
    yield "trace", f"{trace.path} ({steps}, {size}; training was held up {trace.stall_ms:.0f} ms)"
    if trace.plugin_path is not None:
        folder = log_folder if log_folder is not None and log_folder in trace.path.parents else trace.path.parent
        yield "look at it", f"tensorboard --logdir {quote(str(folder))}    (tab PyTorch Profiler)"
    yield "", f"or open {trace.path.name} at https://ui.perfetto.dev"
    if trace.report_path is not None:
        yield "report", f"{trace.report_path}    (beside it summary.md and summary.json)"


def _memory_lines(trace: TraceReport) -> Iterator[tuple[str, str]]:
    if trace.memory_path is not None:
        yield "memory", f"{trace.memory_path}    (for https://pytorch.org/memory_viz)"
    elif trace.memory_message:
        yield "no memory", f"snapshot: {trace.memory_message}"


def _verdict(report: RunReport) -> Iterator[tuple[str, str | Text]]:
    """What the table ends with."""
    analysis = report.analysis
    if analysis is None:
        if report.run.steps:
            steps = 0 if report.run.only_warmup else report.run.steady.steps
            yield "verdict", f"none: {steps} steady steps, at least {MIN_STEPS} needed"
        return
    hints = ((hint.rank, hint.text) for hint in analysis.hints)
    for where, text in by_text(hints, several=len(analysis.ranks) > 1):
        yield "hint", where + text
    for difference in analysis.differences:
        yield "difference", difference
    yield "verdict", verdict(analysis)
    also = [f"{found.code} {found.share_pct:.0f} %" for found in analysis.findings[1:]]
    if also:
        yield "also", f"{', '.join(also)} of the step"

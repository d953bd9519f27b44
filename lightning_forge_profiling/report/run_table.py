"""What is said of a run, in every report: verdict, split of the step, rates, files."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from pathlib import Path
from shlex import quote
from typing import Final

from lightning_forge_profiling.diagnosis.machine_rules import DISTORTED, MACHINE, UNRELIABLE
from lightning_forge_profiling.diagnosis.rule import MIN_STEPS
from lightning_forge_profiling.diagnosis.verdict import WORK, is_certain
from lightning_forge_profiling.names import REPORT_HTML, STEPS
from lightning_forge_profiling.report import run_wording
from lightning_forge_profiling.report.screen import NAMES_WIDTH, Column, Line, Row, Table, Text
from lightning_forge_profiling.report.wording import between, digits, hints, verdict
from lightning_forge_profiling.schema import (
    Analysis,
    Distribution,
    Finding,
    RunEvidence,
    RunLedger,
    RunReport,
    RunTiming,
    TraceReport,
)

_SHOWN_PCT: Final = 0.05  # what is shorter shows as 0.0 %
_SMALL_PCT: Final = 1.0  # regions that take less share a row
_REST: Final = "rest"
_TIMES: Final = ("mean ms", "median", "p95", "host")
_HOST_DIFFERS_PCT: Final = 1.0  # from this share of the step on, a host time that is not the device time has a column
# elsewhere a host time says where the host waits for room in the GPU's queue
_HOST_WAITS_IN: Final[Sequence[str]] = ("data", "transfer")
_PART_SHOWN_PCT: Final = 2.0
_PARTS_SHOWN: Final = 3
_MOST_PCT: Final = 50.0

_SHORTEST_EXCLUDED_MS: Final = 5.0  # what is shorter shows as 0.00 s


@dataclass(frozen=True, slots=True)
class RunTable:
    """What is said of a run, for a terminal, a file or a notebook."""

    verdict: tuple[Line, ...]  # the verdict, and what goes with it
    title: str  # over the table
    table: Table | None = None  # the built-in regions, the step, the user's regions; None if no step was timed
    lines: tuple[Line, ...] = ()  # rates, then files


def run_table(report: RunReport) -> RunTable:
    """The content of the table."""
    return RunTable(
        verdict=tuple(_verdict(report)),
        title=_title(report),
        table=step_table(report.run.timing),
        lines=(*_rate_lines(report), *_file_lines(report)),
    )


def evidence_table(run: RunEvidence) -> RunTable:
    """The same of a run of which only its evidence is at hand, as beside the analysis of a trace."""
    timing = run.timing
    of = f"{timing.steps} of {timing.all_steps}" if timing.all_steps else f"{timing.steps}"
    return RunTable(
        verdict=(),
        title=f"Where a step goes: {digits(timing.step_ms.mean)} ms, mean of {of} steps, {_longest(timing.step_ms)}",
        table=step_table(timing),
        lines=(
            *_evidence_lines(run, short=False),
            *_fit_lines(run, (), short=False),
        ),
    )


def _verdict(report: RunReport) -> Iterator[Line]:
    analysis = report.analysis
    if analysis is None:
        yield from no_verdict(report.run.timing)
        return
    yield from verdict_lines(analysis)
    yield from also(analysis)
    yield from (Line("hint", Text(where + text)) for where, text in hints(analysis))
    if analysis.differences:  # the report has the others
        yield Line("difference", Text(analysis.differences[0]))


def verdict_lines(analysis: Analysis) -> Iterator[Line]:
    """The verdict, what to try, and what that saves."""
    finding = of_verdict(analysis)
    yield Line("verdict", conclusion(analysis))
    if finding is not None:
        yield from to_try(finding)
        if finding.fix and finding.advice:
            yield Line("", Text(finding.advice))
        yield from saves(finding)
        yield from then(analysis)


def also(analysis: Analysis) -> Iterator[Line]:
    """The findings below the verdict, with their shares; no line without one."""
    shares: dict[str, list[str]] = {}
    codes = Counter(finding.code for finding in analysis.findings)
    for finding in sorted(analysis.findings[1:], key=lambda one: one.of != "step"):
        part = str(finding.evidence.get("part", "")).partition("/")[2] if codes[finding.code] > 1 else ""
        named = f"{finding.code} ({part})" if part else finding.code
        shares.setdefault(finding.whole, []).append(f"{named} {finding.share_pct:.0f} %{between(finding)}")
    if shares:
        unreliable = "unreliable: " if analysis.verdict in UNRELIABLE else ""
        named = "; ".join(f"{', '.join(each)} of {whole}" for whole, each in shares.items())
        yield Line("also", Text(unreliable + named))


def of_verdict(analysis: Analysis) -> Finding | None:
    """The finding that is the verdict; None if it is none of them, as for a healthy run."""
    return next((one for one in analysis.findings if one.code == analysis.verdict), None)


def conclusion(analysis: Analysis) -> Text:
    """The verdict without its advice, which is on lines of its own."""
    finding, said = of_verdict(analysis), verdict(analysis)
    if finding is None:
        return said
    missing = said.text.partition(finding.code)[0]  # such as which ranks are
    return Text(f"{missing}{finding.code}: {finding.title}.", said.style, said.marked)


def saves(finding: Finding) -> Iterator[Line]:
    """What the change is predicted to save; no line if that is unknown."""
    if finding.saves is not None:
        yield Line("saves", Text(finding.saves.text.removeprefix("That saves ").rstrip(".")))


def then(analysis: Analysis) -> Iterator[Line]:
    """What comes after the verdict: a larger cause below the machine's, or work of most of the step below any cause."""
    first = of_verdict(analysis)
    if first is None or first.code in WORK | {DISTORTED}:
        return
    others = [one for one in analysis.findings if one.code not in UNRELIABLE and is_certain(one) and one.of != "memory"]
    if first.code in MACHINE:
        if others and others[0].code not in WORK and others[0].share_pct > first.share_pct:
            yield Line("then", Text(f"{others[0].code}: {others[0].title}: {others[0].fix or others[0].advice}"))
        return
    work = next((one for one in others if one.code in WORK), None)
    if work is not None and work.share_pct > max(first.share_pct, _MOST_PCT):
        line, pct = work.evidence.get("line"), work.evidence.get("line_pct")
        at = f", {pct:.0f} % of that at {str(line).partition(' ')[0]}" if line and pct else ""
        yield Line("then", Text(f"{work.code}, {work.share_pct:.0f} % of {work.whole}{at}: {work.fix or work.advice}"))


def to_try(finding: Finding) -> Iterator[Line]:
    """What to try: a line of code or a command where there is one, and never cut."""
    if finding.fix:
        yield Line("try", Text(finding.fix, "bold"), whole=True)
    elif finding.advice:
        yield Line("try", Text(finding.advice))


def no_verdict(run: RunTiming) -> Iterator[Line]:
    """Why there is no verdict."""
    if run.all_steps:
        steps = 0 if run.only_warmup else run.steps
        yield Line("verdict", Text(f"not enough steps: {steps} after warm-up, at least {MIN_STEPS} needed"))


def step_title(report: RunReport, more: str) -> str:
    """The title of the split of a step: how long one takes, and what else is said of the steps."""
    where = f"Where a step{f' of {report.model}' if report.model else ''} goes"
    if not report.run.timing.steps:
        return f"{where}: unknown, no step was timed"
    return f"{where}: {digits(report.run.timing.step_ms.mean)} ms{more}"


def _title(report: RunReport) -> str:
    timing = report.run.timing
    longest = f", {_longest(timing.step_ms)}" if timing.steps > 1 else ""
    return step_title(report, f", mean of {timing.steps} of {timing.all_steps} steps on {report.device}{longest}")


def _longest(step_ms: Distribution) -> str:
    return f"longest {digits(step_ms.max)} ms"


def _sampled(timing: RunTiming) -> str:
    """In which of the steps the regions were timed; "" for all of them."""
    if timing.split_steps in {0, timing.steps}:
        return ""
    each = timing.steps / timing.split_steps
    return f"sampled {f'1 in {each:.0f}' if each >= 2 else f'{timing.split_steps} of {timing.steps}'}"  # noqa: PLR2004


def step_table(
    timing: RunTiming, *, spread: bool = True, most: int | None = None, named: str = "", steady: bool = False
) -> Table | None:
    """Where a step goes: each region's share of the mean step and its mean time, in every view of a run.

    Args:
        timing: of the steps.
        spread: whether to show medians, percentiles and, where they say something, host times too.
        most: show at most so many regions, and no row for the step, which the title has.
        named: a region that has a row in any case, since a finding names it; "" for none.
        steady: each region has a row, so that rows stay where they are from frame to frame.
    """
    step_ms = timing.step_ms.mean
    if step_ms <= 0:
        return None

    def row(name: str, ms: float, *others_ms: float | None, whole: bool = False) -> Row:
        pct, times = 100 * ms / step_ms, (ms, *(others_ms if spread else ()), None, None, None)[: len(_TIMES)]
        cells = ("" if time is None else of_step_ms(time, step_ms) for time in times)
        return Row((name, "" if whole else f"{pct:.1f} %", *cells), strong=whole, share=None if whole else pct)

    def of_region(region: str, name: str) -> Row:
        times = timing.regions[region]
        return row(name, ms[region], times.p50_ms, times.p95_ms, host.get(region))

    host = _host_ms(timing) if spread and timing.on_device else {}
    ms = {name: region.device_ms for name, region in timing.regions.items()}
    users = [name for name in timing.user_regions if name in ms]
    built_in = [name for name in ms if name not in users]
    if most is not None:
        users = sorted(users, key=lambda name: -ms[name])[: max(most // 3, 1)]
    shown = built_in
    if not steady:
        pct = {name: 100 * ms[name] / step_ms for name in built_in}
        shown = _worth_a_row(pct, [*host], named, None if most is None else most - len(users))
    rest_ms = sum(ms[name] for name in built_in if name not in shown)
    rows = [of_region(name, name) for name in built_in if name in shown]
    together = {_REST: rest_ms, "unknown": timing.unknown_ms}
    rows += [row(name, its_ms) for name, its_ms in together.items() if 100 * its_ms >= _SHOWN_PCT * step_ms]
    if most is None:
        rows.append(row("step", step_ms, timing.step_ms.p50, timing.step_ms.p95, whole=True))
    rows += [of_region(name, f"your {name}") for name in users]
    if not rows:
        return None
    heading = _sampled(timing).ljust(NAMES_WIDTH - 2)
    columns = Column(heading, "text"), Column("share", "share"), *map(Column, _TIMES)
    filled = [place for place in range(len(columns)) if place <= 1 or any(row.cells[place] for row in rows)]
    kept = (replace(row, cells=tuple(row.cells[place] for place in filled)) for row in rows)
    return Table(tuple(columns[place] for place in filled), tuple(kept), ruled=False, steady=steady)


def of_step_ms(ms: float, step_ms: float) -> str:
    """A time in milliseconds beside that of a step, with as many decimals for all of them."""
    decimals = 3 if step_ms <= 0 else max(1, min(3, 3 - floor(log10(step_ms))))
    return f"{ms:,.{decimals}f}"


def _worth_a_row(pct: Mapping[str, float], host: Sequence[str], named: str, most: int | None) -> list[str]:
    """The regions that have a row of their own: not the small ones, if there are several, and at most so many."""
    always = {*host, named}
    small = [name for name in pct if pct[name] < _SMALL_PCT and name not in always]
    several = len([name for name in small if pct[name] >= _SHOWN_PCT]) > 1
    shown = [name for name in pct if name in always or (pct[name] >= _SHOWN_PCT and not (several and name in small))]
    if most is None or len(shown) + several <= most:
        return shown
    return sorted(shown, key=lambda name: (name != named, -pct[name]))[: most - 1]


def _host_ms(timing: RunTiming) -> dict[str, float]:
    """Mean host times that say something beside the device's: of waits, if they differ by 1 % of the step."""
    waits = {name: timing.regions[name] for name in _HOST_WAITS_IN if name in timing.regions}
    least_ms = _HOST_DIFFERS_PCT / 100 * timing.step_ms.mean
    return {name: one.host_ms for name, one in waits.items() if abs(one.host_ms - one.device_ms) >= least_ms}


def _rate_lines(report: RunReport) -> Iterator[Line]:
    run, timing = report.run, report.run.timing
    yield from figure_notes(timing)
    if timing.steps:
        yield Line("throughput", Text(throughput(report)))
    for loop in report.loops:
        rates = ", ".join(f"{digits(rate)} {unit}/s" for unit, rate in loop.per_second().items())
        runs = "1 run" if loop.runs == 1 else f"{loop.runs} runs"
        yield Line(loop.loop, Text(f"{rates} in {runs} (wall time, first batches left out)"))
    yield from _evidence_lines(run, short=True)
    if timing.all_steps and timing.end_to_end.wall_s > 0:
        yield Line("end to end", Text(_end_to_end(timing, report.replicas)))
    with_times = not (timing.is_evidence and _of_fit(run))
    yield from _fit_lines(run, _left_out(timing, with_times=with_times), short=True)


def _evidence_lines(run: RunEvidence, *, short: bool) -> Iterator[Line]:
    """Rates of the devices, then what is special about ranks, steps, memory and compilation."""
    machine = run.machine
    for line in run_wording.compute_lines(machine.compute, sources=not short):
        yield Line("compute", Text(line))
    if machine.telemetry is not None:
        yield Line("gpu", Text(", ".join(run_wording.telemetry_words(machine.telemetry, short=short))))
    elif machine.no_telemetry:
        yield Line("gpu", Text(f"no telemetry: {machine.no_telemetry}"))
    if run.timing.is_evidence:
        slow_and_full = ("slowest", run_wording.slowest_line(run)), ("memory", run_wording.memory_line(run))
        compiled = (("compile", line) for line in run_wording.recompiled_lines(run))
        named = (*run_wording.rank_lines(run), *slow_and_full, *compiled)
        yield from (Line(name, Text(line)) for name, line in named if line)


def _fit_lines(run: RunEvidence, left_out: Sequence[str], *, short: bool) -> Iterator[Line]:
    """Where the wall time of the fit went, and what to know of the steps."""
    named = _of_fit(run) if run.timing.is_evidence else {}
    for name, text in {**named, "left out": ", ".join(left_out)}.items():
        if text:
            yield Line(name, Text(text))
    if run.timing.is_evidence:
        effect = run.timing.window_effect
        if effect is not None and (not short or run_wording.slower_after(effect)):
            yield Line("window", Text(run_wording.window_effect_words(effect)))
        yield from (Line("note", Text(note)) for note in run_wording.run_notes(run))


def _of_fit(run: RunEvidence) -> dict[str, str]:
    ledger = run.ledger
    named = {} if ledger is None else {"whole fit": _parts(ledger), "goodput": run_wording.goodput_words(ledger)}
    return {name: text for name, text in named.items() if text}


def figure_notes(run: RunTiming) -> Iterator[Line]:
    """What to know of the figures: where training stood still, whether few steps make the mean, warm-up steps."""
    yield from (Line("note", Text(text)) for text in run.left_out.stalls)
    if run.slowest and run.step_ms.p95 is not None and run.step_ms.mean > run.step_ms.p95:
        step, s, pct = run.slowest[0].step, run.slowest[0].ms / 1e3, 100 * run.slowest[0].ms / run.total_ms
        yield Line("note", Text(f"the mean is above p95: step {step} took {s:.1f} s, {pct:.0f} % of the steps' time"))
    if run.only_warmup and run.all_steps == 1:
        yield Line("note", Text("only one step ran, and the first step is slower than later ones"))
    elif run.only_warmup and run.all_steps:
        yield Line(
            "note", Text(f"figures are of the warm-up, of which {run.all_steps} steps ran; they leave out the first")
        )


def throughput(report: RunReport) -> str:
    """The rates over the steps that count, in words."""
    over = f" over {report.replicas} replicas" if report.replicas > 1 else ""
    return ", ".join(run_wording.rate_words(report.run.timing, report.replicas)) + over


def _end_to_end(timing: RunTiming, replicas: int) -> str:
    whole = timing.end_to_end
    unit, amount = ("samples", whole.samples * replicas) if whole.samples else ("steps", timing.all_steps or 0)
    first = "" if whole.first_step_s is None else f", first step after {whole.first_step_s:.2f} s"
    return f"{digits(amount / whole.wall_s)} {unit}/s over the {whole.wall_s:.2f} s of the fit{first}"


def _parts(ledger: RunLedger) -> str:
    """The largest parts of the fit; "" if it is all steps."""
    shares = ledger.fit_pct
    if not any(pct >= _PART_SHOWN_PCT for name, pct in shares.items() if name != STEPS):
        return ""
    largest = sorted(shares, key=lambda name: -shares[name])
    shown = [name for name in largest if shares[name] >= _PART_SHOWN_PCT][:_PARTS_SHOWN]
    rest = 100 - sum(shares[name] for name in shown)
    listed = [f"{name} {shares[name]:.0f} %" for name in shown]
    return ", ".join(listed + ([f"others {rest:.0f} %"] if rest >= 1 else []))


def _left_out(run: RunTiming, *, with_times: bool) -> list[str]:
    """What the figures of a step leave out; times that are parts of the fit are named there."""
    steps = run.left_out
    counts = (
        (0 if run.only_warmup else steps.warmup, "warm-up {}"),
        (steps.recorded, "{} with the profiler on"),
        (steps.stalled, "{} in which training stood still"),
        (steps.untimed, "{} not timed"),
    )
    left_out = [f"{count} {what.format('step' if count == 1 else 'steps')}" for count, what in counts if count]
    times = steps.excluded_ms.items() if with_times else ()
    return left_out + [f"{ms / 1e3:.2f} s {name}" for name, ms in times if ms >= _SHORTEST_EXCLUDED_MS]


def _file_lines(report: RunReport) -> Iterator[Line]:
    trace = report.trace
    if trace is None:
        return
    if trace.status == "written" and trace.path is not None:
        yield from _trace_lines(trace, trace.path, report.log_folder)
    if trace.memory_path is not None:
        yield Line("memory", Text(f"{trace.memory_path}    (for https://pytorch.org/memory_viz)"), whole=True)
    yield from missing_files(trace)


def missing_files(trace: TraceReport) -> Iterator[Line]:
    """Which of the files that were asked for are missing, and why."""
    if trace.status != "written" or trace.path is None:
        reason = f"{trace.status}: {trace.message}" if trace.message else trace.status
        yield Line("no trace", Text(reason), whole=True)
    if trace.memory_path is None and trace.memory_message:
        yield Line("no memory", Text(f"snapshot: {trace.memory_message}"), whole=True)


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110  (False for a name that is too long)


def _trace_lines(trace: TraceReport, path: Path, log_folder: Path | None) -> Iterator[Line]:
    if trace.message and not (trace.pending and _exists(path.with_name(REPORT_HTML))):
        yield Line("note", Text(trace.message), whole=True)
    if trace.attached:
        yield Line("note", Text(f"CUPTI stays attached after the window, and launches are slower: {trace.attached}"))
    if trace.report_path is not None:
        yield Line("report", Text(str(trace.report_path)), whole=True)
    steps = f"{len(trace.steps)} steps" if len(trace.steps) != 1 else "1 step"
    size = "being written" if trace.pending else "moved away"
    if _exists(path):
        size_mb = path.stat().st_size / 1e6
        size = f"{size_mb:.1f} MB" if size_mb >= 0.1 else f"{1e3 * size_mb:.0f} kB"  # noqa: PLR2004
    if trace.report_path is not None and trace.report_path.parent == path.parent:
        yield Line("trace", Text(f"{path.name} beside it: {steps}, {size}, exported in {trace.stall_ms:.0f} ms"))
    else:
        about = f"({steps}, {size}; its export blocked training for {trace.stall_ms:.0f} ms)"
        yield Line("trace", Text(f"{path} {about}"), whole=True)
    if trace.url:
        yield Line("copied to", Text(trace.url), whole=True)
    if trace.plugin_path is not None:
        folder = log_folder if log_folder is not None and log_folder in path.parents else path.parent
        command = f"tensorboard --logdir {quote(str(folder))}    (tab PyTorch Profiler)"
        yield Line("open with", Text(command), whole=True)

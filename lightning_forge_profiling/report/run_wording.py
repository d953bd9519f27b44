"""A run in words: how it was timed, its rates, its ledger, its slowest steps, its ranks, its GPU."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil
from operator import itemgetter
from statistics import median
from typing import Final

from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts
from lightning_forge_profiling.diagnosis.ledger_rules import recompiled
from lightning_forge_profiling.diagnosis.machine_rules import (
    ACTIVATIONS,
    CACHE,
    growth_words,
    largest_batch,
    memory_layers,
)
from lightning_forge_profiling.diagnosis.ranks import late_rank, not_measured
from lightning_forge_profiling.diagnosis.rule import MIN_SHARE_PCT, in_ms
from lightning_forge_profiling.names import whole_part
from lightning_forge_profiling.report.screen import Column, Row, Table, table_of
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import (
    RankWork,
    RunCompute,
    RunEvidence,
    RunLedger,
    RunTiming,
    SlowStep,
    StepDrift,
    TelemetrySummary,
    WindowEffect,
)

_SHOWN: Final = 8
_LEAVES: Final = 3
_LEAST_PART_PCT: Final = 0.1
_SAME_WORK: Final = 0.001
# CUPTI left attached made launch-bound steps 14 to 24 % longer, and without any window they drifted by 3 to 6 %,
# beside busy neighbours by up to 30 %.
_SLOWER_PCT: Final = 10.0
_ALL_PCT: Final = 100.0
_GEFORCE_PCT: Final = 115.0  # GeForce cards run at up to this share of the clock that their peak is stated for
_ABOVE_CLOCK: Final = "a GeForce runs above its stated clock"
_TOO_MUCH: Final = "above the device's peak: the FLOP count or the peak is wrong"
# the address of a peak's source, which would double the line; the log has it
_URL: Final = re.compile(r", https?://[^ )]+")


def window_effect_words(effect: WindowEffect) -> str:
    """The pace after a window against that before it."""
    before, after = digits(effect.before_ms), digits(effect.after_ms)
    words = (
        f"the median step takes {after} ms after the window, {before} ms before it: "
        f"{effect.change_pct:+.1f} % (95 %: {effect.low_pct:+.1f} to {effect.high_pct:+.1f} %)"
    )
    return f"{words}; slower since then, by the profiler or by the machine" if slower_after(effect) else words


def run_notes(run: RunEvidence) -> Iterator[str]:
    """What a run's figures do not show: where it began, whether its steps were steady, how other ranks differ."""
    if run.continues_from:
        yield f"training continues from optimizer step {run.continues_from}: the ledger and all figures are of this fit"
    drift = run.timing.drift
    if drift is not None and (drift.until_step is not None or not run.timing.grows):  # of which a finding tells more
        yield _drift_words(drift)
    yield from rank_notes(run)


def _drift_words(drift: StepDrift) -> str:
    first, steady = digits(drift.first_ms), digits(drift.steady_ms)
    moved = f"step time still {'fell' if drift.first_ms > drift.steady_ms else 'rose'} from {first} to {steady} ms"
    if drift.until_step is None:
        return f"{moved} after the warm-up, and was not steady within the steps that were compared"
    return f"{moved} until step {drift.until_step}; warmup_steps={10 * ceil(drift.until_step / 10)} leaves that out"


def rate_words(timing: RunTiming, replicas: float, width: int = 0) -> list[str]:
    """Samples, tokens and steps a second, over all replicas; and optimizer steps, if some take several batches."""
    amounts = {
        "samples": None if timing.samples is None else timing.samples * replicas,
        "tokens": None if timing.tokens is None else timing.tokens * replicas,
        "steps": timing.steps,
        "optimizer steps": timing.optimizer_steps if timing.optimizer_steps != timing.steps else None,
    }
    each = ((unit, timing.per_second(amount)) for unit, amount in amounts.items())
    return [f"{digits(rate):>{width}} {unit}/s" for unit, rate in each if rate]


def goodput_words(ledger: RunLedger) -> str:
    """How much of the fit was training, this package's own time left out; "" if unknown."""
    return "" if ledger.goodput is None else f"{_ALL_PCT * ledger.goodput:.0f} % of the fit was training"


def slower_after(effect: WindowEffect) -> bool:
    """Whether steps are longer after the window by more than they drift anyway."""
    return effect.low_pct > _SLOWER_PCT


def ledger_table(ledger: RunLedger) -> Table:
    """The parts of a run's wall time that are worth a row, the other parts and the rest, then the whole."""
    least_s = _LEAST_PART_PCT / 100 * ledger.wall_s
    wholes = sorted(ledger.wholes.items(), key=lambda item: -item[1])
    parts = {name: s for name, s in wholes if abs(s) >= least_s}
    rest = {"other parts": sum(s for name, s in wholes if name not in parts)}
    rest |= {"unexplained": ledger.unexplained_s, "the run": ledger.wall_s}

    def row(name: str, seconds: float, of: str = "") -> Row:
        pct = 100 * seconds / ledger.wall_s if ledger.wall_s > 0 else None
        whole, times = name == "the run", "" if name in rest else ledger.counts.get(name, "")
        cells = (f"{of}{name}", f"{seconds:.3f}", "" if pct is None else f"{pct:.1f} %", str(times))
        return Row(cells, strong=whole, share=None if whole else pct)

    def rows(whole: str) -> Iterator[Row]:
        yield row(whole, parts[whole])
        inside = ((name, s) for name, s in ledger.parts.items() if whole_part(name) == whole != name)
        yield from (row(name, s, of="of it ") for name, s in inside if s >= least_s)

    columns = Column("part", "code"), Column("seconds"), Column("of the run", "share"), Column("times")
    shown = (*chain.from_iterable(map(rows, parts)), *(row(*part) for part in rest.items()))
    return Table(columns, shown, title="Wall time of the run")


def compute_lines(rates: Sequence[RunCompute], *, sources: bool = True) -> Iterator[str]:
    """A device's FLOP/s and their fraction of a peak. A peak is named once, and no rate twice."""
    named, listed = None, 0.0
    for compute in rates:
        counted = "" if compute.kind == "mfu" else " carried out"
        # without a rate, the peak's source has the reason
        parts = [] if compute.tflops is None else [f"{digits(compute.tflops)} TFLOP/s per device{counted}"]
        name, peak = compute.kind.upper(), (compute.peak_tflops, compute.dtype, compute.device, compute.peak_source)
        if peak == named and compute.tflops is not None and abs(compute.tflops - listed) < _SAME_WORK * listed:
            continue
        source = _URL.sub("", compute.peak_source)
        if compute.peak_tflops is not None and compute.pct_of_peak is not None:
            of = f"{compute.device}, {compute.dtype}{f'; {source}' if sources else ''}"
            whole = f"{compute.peak_tflops:,.4g} TFLOP/s ({of})"
            parts.append(f"{name} {compute.pct_of_peak:.1f} % of {'the same' if peak == named else whole}")
            if compute.pct_of_peak > _ALL_PCT:
                boosted = "GeForce" in compute.device and compute.pct_of_peak < _GEFORCE_PCT
                parts.append(_ABOVE_CLOCK if boosted else _TOO_MUCH)
        else:
            parts.append(f"{name} unknown" if peak == named else f"{name} unknown: {source}")
        named, listed = peak, compute.tflops or 0.0
        yield ", ".join([*parts, *([compute.note] if compute.note else [])])


def rank_lines(run: RunEvidence) -> Iterator[tuple[str, str]]:
    """A name and a line for each rank if their own work differs; of many ranks those with most and with least of it."""
    if any(work.exposed_ms is None for work in run.ranks.works):
        return
    own_ms = {work.rank: sum(work.step_leaves_ms.values()) for work in run.ranks.works}
    ranks = sorted(run.ranks.works, key=lambda work: -own_ms[work.rank])
    if not ranks or max(own_ms.values()) - min(own_ms.values()) < MIN_SHARE_PCT / 100 * run.timing.step_ms.mean:
        return
    several_hosts = len({work.host for work in ranks}) > 1
    left_out = ranks[_SHOWN // 2 : -_SHOWN // 2]  # none of up to _SHOWN
    for work in ranks:
        if work not in left_out:
            yield f"rank {work.rank}", f"{f'on {work.host} ' if several_hosts else ''}{_words(work, own_ms[work.rank])}"
        elif work is left_out[0]:
            yield "ranks", f"{len(left_out)} others in between"
    if several_hosts:
        yield "clocks", _clocks(ranks)


def _words(work: RankWork, own_ms: float) -> str:
    leaves = sorted(work.step_leaves_ms.items(), key=lambda leaf: -leaf[1])[:_LEAVES]
    shown = ", ".join(f"{leaf} {in_ms(ms)}" for leaf, ms in leaves)
    return f"works {in_ms(own_ms)} of its step ({shown}), waits {in_ms(work.waited_ms)} for others"


def rank_notes(run: RunEvidence) -> Iterator[str]:
    """Which ranks are not known, and parts outside of the step that take a rank at least 5 % of the fit longer."""
    missing = run.ranks.world_size - len(run.ranks.works)
    if run.ranks.works and missing:
        yield (
            f"the records of {missing} of {run.ranks.world_size} ranks are not known: rank {run.ranks.rank} may wait "
            "for them"
        )
    if (because := not_measured(run.ranks.works)) and late_rank(run.ranks.works) is None:
        yield f"the ranks differ, and which of them is late is not measured: {because}"
    if run.ledger is None or len(run.ranks.works) < 2:  # noqa: PLR2004
        return
    costs = LedgerCosts(run)
    notes = []
    for part in dict.fromkeys(part for work in run.ranks.works for part in work.outside):
        seconds = {work.rank: work.own_ms(part) * costs.steps / 1e3 for work in run.ranks.works}
        most = max(seconds, key=seconds.__getitem__)
        more_s = seconds[most] - median(s for rank, s in seconds.items() if rank != most)
        if more_s >= MIN_SHARE_PCT / 100 * costs.whole_s > 0:
            notes.append((more_s, f"rank {most} spends {more_s:.1f} s more in {part} than the others"))
    yield from (text for _, text in sorted(notes, reverse=True))


def _clocks(ranks: list[RankWork]) -> str:
    known = [(abs(work.clock_ms), work) for work in ranks if work.clock_ms is not None]
    if not known:
        return "the offset of the machines' clocks is unknown; the times of a rank are by its own"
    work = max(known, key=itemgetter(0))[1]
    ahead, error = in_ms(work.clock_ms or 0.0), in_ms(work.clock_error_ms or 0.0)
    return f"that of {work.host} is {ahead} ahead of rank 0's, give or take {error}; the times of a rank are by its own"


_SLOW: Final = 2.0  # from so many medians on, a step is worth a line in the table
_NAMED: Final = 3
_CAUSES: Final = 2
_LEAST_SHARE: Final = 0.1


def slowest_line(run: RunEvidence) -> str:
    """The slowest steps in one line; "" where none takes twice the median."""
    median = run.timing.step_ms.p50
    slow = [(one, cause(one, run)) for one in run.timing.slowest if one.ms >= _SLOW * median > 0][:_NAMED]
    named = [f"step {one.step}: {digits(one.ms)} ms{why and f', {why}'}" for one, why in slow]
    return f"{'; '.join(named)} (median {digits(median)} ms)" if named else ""


def memory_line(run: RunEvidence) -> str:
    """What fills the GPU's memory, and how much larger a batch may be; "" if that is unknown, or next to nothing."""
    memory = run.memory
    if memory is None or not memory.curve.peak_gib:
        return ""
    peak, growth = memory.curve.peak_gib[-1], memory.growth
    if growth is None and 100 * peak < _LEAST_PCT * memory.limit_gib:
        return ""
    parts = {name: gib[-1] for name, gib in memory_layers(memory).items()}
    cached, activations = parts.pop(CACHE, 0.0), parts.get(ACTIVATIONS, 0.0)
    named = ", ".join(f"{name} {digits(gib)}" for name, gib in parts.items())
    line = f"{'peak' if memory.peak_known else 'at least'} {digits(peak)} of {digits(memory.limit_gib)} GiB: {named}"
    each = []
    if memory.samples_per_step and activations:
        each.append(f"{digits(activations * 1024 / memory.samples_per_step)} MiB a sample")
    if memory.tokens_per_step and activations:
        each.append(f"{digits(activations * 1024**2 / memory.tokens_per_step)} KiB a token")
    line += f" ({', '.join(each)})" if each else ""
    line += f"; {digits(cached)} more {CACHE}" if cached else ""
    line += "" if memory.peak_known else "; the process had a higher peak before, which hides that of the steps"
    if growth is not None:
        words = growth_words(growth)
        return f"{line}. {words[0].upper()}{words[1:]}"
    times = largest_batch(memory)
    if times is None:
        return line
    return f"{line}. A batch {times:.1f} times as large fills it, if all of those grow with it"


_OFTEN: Final = 3
_LEAST_PCT: Final = 1.0


def recompiled_lines(run: RunEvidence, *, graph_breaks: bool = True) -> Iterator[str]:
    """What `torch.compile` compiled again often, or for long; not what it does once for a second shape."""
    wall_s = run.ledger.wall_s if run.ledger is not None else 0.0
    for one in run.recompilations[:_NAMED]:
        if (
            one.given_up
            or (graph_breaks and one.kind == "graph break")
            or one.times >= _OFTEN
            or 100 * one.seconds >= _LEAST_PCT * wall_s > 0
        ):
            yield recompiled(one)


def slowest_table(run: RunEvidence) -> Table:
    """The slowest steps, with what took long in each."""
    median_ms = run.timing.step_ms.p50
    return table_of(
        run.timing.slowest,
        {
            "step": lambda slow: str(slow.step),
            Column("what took long", "code"): lambda slow: cause(slow, run),
            "ms": "{.ms:.3f}",
            "times the median": lambda slow: f"{slow.ms / median_ms:.1f}" if median_ms else "",
        },
        title="Slowest steps",
    )


def cause(slow: SlowStep, run: RunEvidence) -> str:
    """What took long in a slow step: parts of the ledger, or the region that took longer than it does on average."""
    parts = [(name, ms) for name, ms in slow.parts_ms.items() if ms >= _LEAST_SHARE * slow.ms][:_CAUSES]
    beyond = slow.ms - run.timing.step_ms.p50
    if 2 * sum(ms for _, ms in parts) < beyond:
        # `other` contains the hooks, which are parts of the ledger
        usual = {name: region.device_ms for name, region in run.timing.regions.items()}
        longer = {
            name: ms - usual.get(name, 0.0) for name, ms in slow.regions_ms.items() if name != "other" or not parts
        }
        name = max(longer, key=longer.__getitem__, default="")
        if name and 2 * longer[name] >= beyond > 0:
            parts = [(name, slow.regions_ms[name]), *parts][:_CAUSES]
    # where the GPU had work queued, a hook may have taken longer than the step
    named = [
        f"{digits(ms)} of it {name}" if ms <= slow.ms else f"{digits(ms)} ms of host time {name}" for name, ms in parts
    ]
    return ", ".join(named)


def telemetry_words(gpu: TelemetrySummary, *, short: bool = False) -> Iterator[str]:
    """The figures that fit in a line; what was not measured is left out."""
    if gpu.utilization_pct is not None:
        yield f"{gpu.utilization_pct:.0f} % utilized"
    if gpu.memory_peak_gib is not None and gpu.memory_total_gib is not None:
        tensors = "" if short or gpu.allocated_peak_gib is None else f" ({gpu.allocated_peak_gib:.1f} tensors)"
        yield f"{gpu.memory_peak_gib:.1f} of {gpu.memory_total_gib:.1f} GiB{tensors} at peak"
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        yield f"{gpu.power_w:.0f}{limit} W"
    if gpu.joules_per_sample is not None and not short:
        joules = gpu.joules_per_sample
        yield f"{joules:,.0f} J per sample" if joules >= 1000 else f"{joules:.3g} J per sample"  # noqa: PLR2004
    if gpu.temperature_peak_c is not None and not short:
        yield f"up to {gpu.temperature_peak_c:.0f} °C"
    if gpu.sm_mhz is not None and not short:
        yield f"{gpu.sm_mhz:.0f} MHz"
    if gpu.throttled_pct:
        reasons = sorted(gpu.throttled_by_pct.items(), key=lambda item: -item[1])
        why = ", ".join(f"{reason} {pct:.0f} %" for reason, pct in reasons)
        yield f"throttled {gpu.throttled_pct:.0f} % of the time ({why})"
    elif gpu.throttled_pct is not None:
        yield "not throttled"

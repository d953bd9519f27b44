"""Records of whole runs, made up but consistent: of several ranks, running, finished, failed, killed or torn."""

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.ranks import Waits, rank_work
from lightning_forge_profiling.names import WHOLE, record_name
from lightning_forge_profiling.record.files import encode_line, write_heard
from lightning_forge_profiling.run.run_report import analysis_of
from lightning_forge_profiling.schema import (
    Begin,
    End,
    EventLine,
    IntervalLine,
    LastPulse,
    Line,
    Pulse,
    RankWork,
    RunEvidence,
    RunLedger,
    RunMachine,
    RunRanks,
    RunReport,
    State,
    StepCounters,
    StepGroup,
    TelemetrySummary,
)
from lightning_forge_profiling.timing.counters import bucket
from lightning_forge_profiling.timing.estimate import timing_of
from lightning_forge_profiling.timing.ledger import goodput
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepWork

# milliseconds of a step by region: the loader is slow
REGIONS = {"data": 9.0, "transfer": 0.4, "forward": 8.0, "backward": 15.5, "optimizer": 2.4, "other": 0.5}
BATCH, TOKENS = 16.0, 16 * 1024.0
VALIDATION_S, CHECKPOINT_S, STARTUP_S = 4.0, 1.5, 12.0
LATE_MS = 6.0
PER_ROW = 50


def counters_of(steps: int, device_ms: Mapping[str, float], **fields: Any) -> StepCounters:
    """Counters of equal steps that took so long together, by region or as a whole."""
    host_ms = fields.pop("host_ms", {})
    times = fields.pop("times_ms", [sum(device_ms.values()) / steps] * steps if steps else [])
    groups = {name: {"changing": _group(steps, ms)} if ms else {} for name, ms in (("", device_ms), ("host_", host_ms))}
    known = {f"no_{name}": 0 if fields.get(name) else steps for name in ("samples", "tokens")}
    return StepCounters(
        steps=steps,
        optimizer_steps=steps,
        groups=groups[""],
        host_groups=groups["host_"],
        no_flops=steps,
        steps_us=dict(Counter(map(bucket, times))),
        **{**known, **fields},
    )


def _group(steps: int, ms: Mapping[str, float]) -> StepGroup:
    if WHOLE in ms:
        return StepGroup(unsplit=steps, unsplit_ms=ms[WHOLE])
    whole, each = sum(ms.values()), max(steps, 1)
    regions = {name: [part, part**2 / each, part * whole / each] for name, part in ms.items()}
    return StepGroup(split=steps, ms=whole, squares=whole**2 / each, regions=regions)


def times_of(line: IntervalLine) -> dict[str, float]:
    """Device times of an interval by region."""
    return {name: line.counted * region.device_ms for name, region in timing_of(line.counters).regions.items()}


def with_times(line: IntervalLine, device_ms: Mapping[str, float], **fields: Any) -> IntervalLine:
    """The interval, if its steps had taken so long."""
    counters = line.counters
    made = counters_of(
        fields.pop("counted", counters.steps), device_ms, samples=counters.samples, tokens=counters.tokens
    )
    return msgspec.structs.replace(line, counters=made, **fields)


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """What is made up.

    Attributes:
        ranks: number of ranks.
        rows: number of logged rows, by each rank.
        began: when the fit began, in seconds since 1970; None for as long ago that the last line is new.
        outcome: how it ended; None for a run without an end, as one that is running or was killed.
        late: the rank whose loader is slower than the others'; None for none.
        quiet: the rank that died half way; None for none.
        states: whether totals were written.
        run: its name.
        batches: number of steps that the fit will have, 1,000 an epoch; None for an endless one.
        joules: energy that each rank's GPU uses for a sample of its own; None for a GPU without a meter.
        gpus: UUIDs of the ranks' GPUs; () if unknown.
        continues: record of the run that it continues.
    """

    ranks: int = 1
    rows: int = 24
    began: float | None = None
    outcome: Literal["finished", "failed"] | None = None
    late: int | None = None
    quiet: int | None = None
    states: bool = True
    run: str = "made-up"
    batches: int | None = None
    joules: float | None = None
    gpus: tuple[str, ...] = ()
    continues: str = ""

    def write(self, folder: Path) -> Path:
        """Write the records of all ranks; returns their folder."""
        record = folder / "forge_record"
        record.mkdir(parents=True)
        now = time.time()  # of all ranks: making a rank's lines takes a while
        for rank in range(self.ranks):
            (record / record_name(rank)).write_bytes(b"".join(map(encode_line, _lines(self, rank, now))))
        return record

    def lines(self, rank: int = 0) -> list[Line]:
        """The lines of one rank."""
        return list(_lines(self, rank, time.time()))


def _lines(run: MadeRun, rank: int, now: float) -> Iterator[Line]:
    dice = random.Random(rank)  # noqa: S311
    step_s = (sum(REGIONS.values()) + (LATE_MS if run.late is not None else 0.0)) / 1e3
    took_s = STARTUP_S + 1.02 * run.rows * PER_ROW * step_s + (run.rows - 1) // 10 * (VALIDATION_S + CHECKPOINT_S)
    began = now - took_s if run.began is None else run.began
    yield _begin(run, rank, began)
    clock, totals = began + STARTUP_S, RunTotals(on_device=True)
    spent = dict.fromkeys(("startup/fit", "steps", "validation", "checkpoint"), 0.0)
    fresh, step = {**spent, "startup/fit": STARTUP_S}, 0
    for row in range(run.rows // 2 if rank == run.quiet else run.rows):
        times_ms, sums, hosts = [], dict.fromkeys(REGIONS, 0.0), dict.fromkeys(REGIONS, 0.0)
        for _ in range(PER_ROW):
            times = _step_ms(dice, late=rank == run.late, waits=run.late not in {None, rank})
            host = {**times, "backward": 3.0}
            totals.add(StepTimes(step, times, host), StepWork(BATCH, TOKENS, 1), "warm-up" if step < 5 else None)
            step += 1
            if step > 5:
                times_ms.append(sum(times.values()))
                for name, ms in times.items():
                    sums[name] += ms
                    hosts[name] += host[name]
            clock += sum(times.values()) / 1e3
            fresh["steps"] += sum(times.values()) / 1e3
        if row and row % 10 == 0:
            for kind, seconds in (("validation", VALIDATION_S), ("checkpoint", CHECKPOINT_S)):
                clock += seconds
                fresh[kind] += seconds
                yield EventLine(at=clock, step=step, kind=kind, seconds=seconds)
        counted = len(times_ms)
        counters = counters_of(
            counted, sums, host_ms=hosts, samples=BATCH * counted, tokens=TOKENS * counted, times_ms=times_ms
        )
        timing = timing_of(counters, on_device=True)
        yield IntervalLine(
            at=clock,
            step=step,
            logger_step=step - 1,
            counters=counters,
            ledger_s=fresh,
            metrics={**timing.metrics(replicas=run.ranks), **_gpu(dice)},
        )
        spent = {name: spent[name] + s for name, s in fresh.items()}
        fresh = dict.fromkeys(fresh, 0.0)
        ends = row + 1 == run.rows and run.outcome is not None
        if run.states and ((row + 1) % 5 == 0 or ends):
            yield _state(run, rank, clock, began, step, totals, spent)
    if run.outcome is not None and rank != run.quiet:
        failed = run.outcome == "failed"
        if failed:
            yield EventLine(at=clock, step=step, kind="exception", text="ValueError: the loss is nan")
        exception = "ValueError: the loss is nan" if failed else ""
        yield End(at=clock + 0.5, step=step, outcome=run.outcome, exception=exception)


def _begin(run: MadeRun, rank: int, began: float) -> Begin:
    return Begin(
        run=run.run,
        rank=rank,
        world_size=run.ranks,
        at=began,
        versions={"python": "3.12.3", "torch": "2.11.0", "lightning": "2.6.6", "lightning_forge_profiling": "0.1.0"},
        host=f"node{rank // 8}",
        device="NVIDIA H200",
        gpu=run.gpus[rank] if run.gpus else "",
        settings={
            "precision": "bf16-mixed",
            "strategy": "ddp",
            "devices": run.ranks,
            "max_steps": 100_000,
            **({} if run.batches is None else {"max_epochs": run.batches // 1000, "train_batches": 1000}),
        },
        batches=run.batches,
        continues=run.continues,
        argv=("train.py", "--lr", "3e-4"),
        commit="0123456789abcdef0123456789abcdef01234567",
    )


def _step_ms(dice: random.Random, *, late: bool, waits: bool) -> dict[str, float]:
    times = {name: ms * dice.uniform(0.97, 1.05) for name, ms in REGIONS.items()}
    if dice.random() < 0.02:
        times["data"] += 20.0
    times["data"] += LATE_MS if late else 0.0
    times["backward"] += LATE_MS if waits else 0.0
    return times


def _gpu(dice: random.Random) -> dict[str, float]:
    return {
        "gpu/utilization_pct": dice.uniform(70, 78),
        "gpu/memory_used_gib": 61.2,
        "gpu/power_w": dice.uniform(480, 510),
        "gpu/power_pct_of_limit": 70.0,
        "gpu/temperature_c": dice.uniform(55, 58),
        "gpu/sm_mhz": 1755.0,
        "gpu/throttled_pct": 0.0,
    }


def _state(  # noqa: PLR0917
    run: MadeRun,
    rank: int,
    clock: float,
    began: float,
    step: int,
    totals: RunTotals,
    spent: dict[str, float],
) -> State:
    summary = totals.timing(steps=step, before_first_s=STARTUP_S, wall_s=clock - began)
    gpu = TelemetrySummary(device="NVIDIA H200", samples=100, utilization_pct=74.0, memory_peak_gib=61.2,
        memory_total_gib=139.8, power_w=495.0, power_limit_w=700.0, temperature_peak_c=58.0,
        sm_mhz=1755.0, throttled_pct=0.0, joules_per_sample=run.joules,
        joules=None if run.joules is None else run.joules * BATCH * step)  # fmt: skip
    ledger = RunLedger(
        wall_s=clock - began,
        parts=dict(sorted(spent.items(), key=lambda part: -part[1])),
        unexplained_s=0.0,
        counts={"validation": 1},
    )
    evidence = RunEvidence(
        timing=summary,
        ledger=replace(ledger, goodput=goodput(ledger, summary)),
        machine=RunMachine(telemetry=gpu),
        ranks=RunRanks(world_size=run.ranks, rank=rank if run.ranks > 1 else 0),
    )
    if summary.is_evidence and run.ranks > 1:
        waits = Waits({"backward": LATE_MS if run.late not in {None, rank} else 0.0})
        works = (rank_work(evidence, host=f"node{rank // 8}", waits=waits),)
        evidence = replace(evidence, ranks=replace(evidence.ranks, works=works))
    report = RunReport(
        evidence,
        None,
        device="NVIDIA H200",
        replicas=run.ranks,
        log_folder=None,
        analysis=analysis_of(None, None, evidence),
    )
    metrics = summary.metrics(replicas=run.ranks) if summary.steps else {}
    return State(at=clock, step=step, report=report, metrics=metrics, counters=totals.counters())


def made_pulse(rank: int, ranks: int, at: float, *, own_ms: float | None = None, **fields: Any) -> Pulse:
    """What a rank said; with `own_ms` of work of its own, it waits until a step has 12.2 ms, and 2 ms more."""
    host = fields.setdefault("host", f"node{rank // 8}")
    if own_ms is not None:
        waits_ms = max(12.2 - own_ms, 0.0) + 2.0
        leaves_ms = {"data": 1.0, "forward": own_ms - 4.0, "backward": 3.0 + waits_ms}
        fields["work"] = RankWork(rank=rank, host=host, steps=50, step_ms=own_ms + waits_ms, leaves_ms=leaves_ms,
            exposed_ms={"backward": waits_ms}, error_ms=2.0)  # fmt: skip
    return Pulse(**{"run": "made-up", "pid": 1000 + rank, "number": 9, "step": 1200, "part": "steps", **fields},
        rank=rank, world_size=ranks, at=at)  # fmt: skip


def write_ranks(record: Path, pulses: Iterable[Pulse], restarts: Mapping[int, int] = {}) -> None:
    """Write what rank 0 heard, each pulse as soon as it was sent."""
    write_heard(record, (LastPulse(pulse=one, at=one.at, restarts=restarts.get(one.rank, 0)) for one in pulses))

"""Records for `compare`: one rank, with the step times, ledger and findings that a test gives."""

from collections import Counter
from pathlib import Path

import numpy as np

from lightning_forge_profiling.diagnosis.rule import saving
from lightning_forge_profiling.names import RECORD_FOLDER, record_name
from lightning_forge_profiling.record.files import encode_line
from lightning_forge_profiling.schema import (
    Analysis,
    Begin,
    Distribution,
    End,
    EventLine,
    Finding,
    IntervalLine,
    Line,
    LoaderSettings,
    RunLedger,
    RunReport,
    State,
    StepCounters,
    StepGroup,
)
from lightning_forge_profiling.timing.counters import bucket
from tests.evidence import made_evidence

SHARES = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}
PER_ROW = 50
LASTS = 0.8
"""Correlation of a step with the next one."""


def step_times(mean_ms, *, noise=0.02, steps=1000, seed=0):
    """Step times with noise that lasts for some ten steps."""
    random = np.random.default_rng(seed)
    wandering = random.normal(size=steps)
    for step in range(1, steps):
        wandering[step] = LASTS * wandering[step - 1] + np.sqrt(1 - LASTS**2) * wandering[step]
    return mean_ms * (1 + noise * wandering)


def write_record(
    log_folder,
    times_ms,
    *,
    device="NVIDIA H200",
    world_size=1,
    precision="bf16-mixed",
    batch_size=16,
    shares=SHARES,
    metrics=(),
    ledger=None,
    findings=(),
    end="finished",
    settings=(),
    host="node-1",
    commit="",
    rank=0,
    began=1000.0,
    blocks=0,
    events=(),
):
    """Write a record and return its folder.

    `findings` are codes with their share, and the milliseconds that a fix saves if one does; `ledger` parts in seconds,
    `events` kinds with their seconds, `blocks` the number of blocks in the totals.
    """
    lines: list[Line] = [
        Begin(
            run=str(log_folder),
            rank=rank,
            world_size=world_size,
            at=began,
            versions={"torch": "2.13.0"},
            host=host,
            device=device,
            settings={"precision": precision, **dict(settings)},
            loader=LoaderSettings(batch_size=batch_size),
            commit=commit,
        )
    ]
    lines += [EventLine(at=began, step=0, kind=kind, seconds=seconds) for kind, seconds in events]
    for first in range(0, len(times_ms), PER_ROW):
        times = times_ms[first : first + PER_ROW]
        lines.append(
            IntervalLine(
                at=began + float(times_ms[: first + PER_ROW].sum()) / 1e3,
                step=first + len(times),
                logger_step=first + len(times) - 1,
                metrics=dict(metrics),
                counters=_counters(times, batch_size, shares),
            )
        )
    ended = began + float(times_ms.sum()) / 1e3
    if ledger is not None or blocks or findings:
        report = _report(device, ledger or {"steps": 1.0}, findings, float(times_ms.mean()), len(times_ms))
        parts = tuple(_counters(times, batch_size, shares) for times in np.array_split(times_ms, blocks or 1))
        lines.append(
            State(
                at=ended,
                step=len(times_ms),
                report=report,
                metrics=dict(metrics),
                blocks=parts if blocks else (),
            )
        )
    if end:
        lines.append(End(at=ended, step=len(times_ms), outcome=end))
    folder = Path(log_folder) / RECORD_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / record_name(rank)).write_bytes(b"".join(map(encode_line, lines)))
    return folder


def _counters(times, batch_size, shares):
    """Of steps whose regions all are these shares of the step."""
    ms, squares = float(times.sum()), float((times**2).sum())
    regions = {name: [share * ms, share**2 * squares, share * squares] for name, share in shares.items()}
    return StepCounters(
        steps=len(times),
        optimizer_steps=len(times),
        samples=float(batch_size or 0) * len(times),
        no_samples=0 if batch_size else len(times),
        no_tokens=len(times),
        groups={"changing": StepGroup(split=len(times), ms=ms, squares=squares, regions=regions)},
        steps_us=dict(Counter(map(bucket, map(float, times)))),
    )


def _report(device, ledger, findings, step_ms, steps):
    found = tuple(
        Finding(
            code=code,
            share_pct=share,
            rank=None,
            source="run",
            title="",
            evidence={},
            advice="",
            saves=saving(next(iter(saved), None), step_ms, at_most=code == "sync-bound"),
        )
        for code, share, *saved in findings
    )
    evidence = made_evidence(
        steps=steps,
        on_device=True,
        step_ms=Distribution(mean=step_ms, p50=step_ms, min=step_ms, max=step_ms),
        regions={},
        ledger=RunLedger(wall_s=sum(ledger.values()), parts=ledger, unexplained_s=0.0, counts={}),
    )
    verdict = found[0].code if found else "nothing stands out"
    analysis = Analysis(source="run", verdict=verdict, verdict_text="", findings=found, run=evidence)
    return RunReport(evidence, None, device, replicas=1, log_folder=None, analysis=analysis)

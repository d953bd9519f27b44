"""How often the late rank and its cause are right, and whether healthy ranks are left alone.

Ranks train 50 counted steps over and over in one process each, in turns with one thing planted on one of them: a slow
loader (`data`), Python in forward (`host`), more kernels (`gpu`, on GPUs only), a callback, collections of garbage, or
nothing. Right is the rank and the leaf in what the table says at the end of the fit, and, counted apart, in what is
said live. A rank that is named in a healthy run is a false alarm.

    torchrun --nproc-per-node 2 -m benchmarks.stragglers --runs 60 --healthy 50             # two GPUs
    torchrun --nproc-per-node 4 -m benchmarks.stragglers --runs 60 --healthy 50 --cpu       # four gloo ranks
"""

import argparse
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.workloads import GPT, ddp_trainer, silenced
from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.schema import RanksStatus

WARMUP, COUNTED = 10, 50
CYCLES_PER_MS = 1.98e6  # of an H100 and an H200
# what the cause has to begin with
LEAVES = {
    "data": "data",
    "host": "forward",
    "gpu": "forward",
    "callback": "callback/Late.on_train_batch_end",
    "gc": "gc/generation_2",
}


def busy(ms: float) -> None:
    """Compute for so long, in Python."""
    until = time.perf_counter() + ms / 1e3
    while time.perf_counter() < until:
        pass


class Late(L.Callback):
    """What is planted in this process: a cause, or nothing."""

    def __init__(self, cause: str, ms: float) -> None:
        self.cause, self.ms = cause, ms

    def is_here(self, cause: str) -> bool:
        """Whether the cause is planted."""
        return self.cause == cause

    def on_train_batch_end(self, *_: Any) -> None:
        """Takes long, if that is planted."""
        if self.is_here("callback"):
            time.sleep(self.ms / 1e3)


class Planted(GPT):
    """The GPT with something planted in its step."""

    def __init__(self, late: Late, **sizes: int) -> None:
        super().__init__(**sizes)
        self.late = late

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss, late."""
        if self.late.is_here("host"):
            busy(self.late.ms)
        if self.late.is_here("gpu"):
            torch.cuda._sleep(round(self.late.ms * CYCLES_PER_MS))  # type: ignore[no-untyped-call]  # noqa: SLF001
        if self.late.is_here("gc"):
            gc.collect()
        return super().training_step(batch, batch_idx)


class Calm(L.LightningModule):
    """Computes little and sleeps in its step, as a host does whose accelerator computes: cores are few here."""

    def __init__(self, late: Late) -> None:
        super().__init__()
        self.late = late
        self.layer = nn.Linear(64, 64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """The loss, late."""
        time.sleep(0.02)
        if self.late.is_here("host"):
            busy(self.late.ms)
        if self.late.is_here("gc"):
            gc.collect()
        return self.layer(batch.float()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def batches(late: Late, shape: tuple[int, int]) -> DataLoader[torch.Tensor]:
    """A loader, which is late if that is planted."""
    batch = torch.randint(0, 1000, shape)

    def collate(_: list[int]) -> torch.Tensor:
        if late.is_here("data"):
            time.sleep(late.ms / 1e3)
        return batch

    of_all_ranks = range((WARMUP + COUNTED) * int(os.environ["WORLD_SIZE"]))
    return DataLoader(of_all_ranks, batch_size=1, collate_fn=collate)


def fit(cause: str, ms: float, batch: int, *, cpu: bool) -> tuple[str, str, float]:
    """The rank and the cause by the table and by the last live status, and the step's time."""
    late, throughput, seen = (
        Late(cause, ms),
        ThroughputCallback(warmup_steps=WARMUP, batch_size_fn=len),
        list[RanksStatus](),
    )
    conclude = FitLog.finish

    def finish(log: FitLog) -> None:
        if log.record.status is not None:
            seen.append(log.record.status)
        conclude(log)

    FitLog.finish = finish  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as root:
            precision = "32-true" if cpu else "bf16-mixed"
            trainer = ddp_trainer(root, cpu=cpu, precision=precision, callbacks=[throughput, late])
            model = Calm(late) if cpu else Planted(late, layers=4, vocabulary=1024)
            shape = (4, 64) if cpu else (batch, 1025)
            trainer.fit(model, batches(late, shape))
    finally:
        FitLog.finish = conclude  # type: ignore[method-assign]
    analysis = throughput.analysis()
    if analysis is None or analysis.run is None:
        return "", "", 0.0
    found = next((one for one in analysis.findings if one.code == "straggler"), None)
    named = "" if found is None else f"{found.rank} {found.evidence['cause']}"
    live = seen[-1].straggler if seen else None
    return named, "" if live is None else f"{live.rank} {live.cause}", analysis.run.timing.step_ms.mean


def main() -> None:
    """Run all, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--ms", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=16, help="sequences of the GPT, on GPUs")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    causes = [cause for cause in LEAVES if not (args.cpu and cause == "gpu")]
    right, live, of, steps = Counter[str](), Counter[str](), Counter[str](), list[float]()
    out = silenced()
    fit("", 0.0, args.batch, cpu=args.cpu)  # what is slow once
    for number, run in enumerate(_in_turns(args.runs, args.healthy)):
        planted = "" if run is None else causes[run % len(causes)]
        where = 0 if run is None else (run // len(causes)) % world_size
        named, said, step_ms = fit(planted if where == rank else "", args.ms, args.batch, cpu=args.cpu)
        steps.append(step_ms)
        kind, expected = planted or "healthy", f"{where} {LEAVES[planted]}" if planted else ""
        found = [text.startswith(expected) if planted else not text for text in (named, said)]
        of[kind] += 1
        right[kind] += found[0]
        live[kind] += found[1]
        if rank:
            continue
        if not found[0]:
            print(f"{planted or 'healthy'} on rank {where}: {named or 'nobody'} (live: {said or 'nobody'})", file=out)
        if number + 1 in {
            (args.runs + args.healthy) // 2,
            args.runs + args.healthy,
        }:  # the first half, if it is stopped
            print(
                f"{world_size} ranks, {args.ms} ms planted, steps of {min(steps):.1f} to {max(steps):.1f} ms", file=out
            )
            for kind, runs in of.items():
                print(f"{kind:10} {runs:3} runs  {right[kind]:3} right  {live[kind]:3} right live", file=out)
        out.flush()


def _in_turns(runs: int, healthy: int) -> Iterator[int | None]:
    """Numbers of runs with something planted, and None for healthy ones, spread evenly."""
    for turn in range(runs + healthy):
        before, after = (at * runs // (runs + healthy) for at in (turn, turn + 1))
        yield before if after > before else None


if __name__ == "__main__":
    main()

"""What fixes save, as predicted and as measured: runs with one planted problem each, and the same without it.

    python -m docs.measure_fixes                           # all cases; an H200 takes under 5 minutes
    python -m docs.measure_fixes --cases straggler,sync-bound
    python -m docs.measure_fixes --quick                   # tiny sizes on the CPU, to try the script itself

Each case runs in a process of its own, with a time limit. Before and after come in turns, three each, with
`ThroughputCallback` alone, so that no step is slowed by recording; the figures are medians of the three means. Then a
run with the problem is recorded, and its finding says what the fix saves. A line of the table is printed as soon as a
case is measured, and everything is in the file of `--out`, also where a case or the script comes to an end before.

A page of docs/findings has no case where there is nothing to predict (gpu-idle), where the problem goes away by itself
in later steps (slow-launches), where the fix changes what is computed (python-bound), or where what is left has no name
(between-regions).
"""

# ruff: noqa: INP001, T201  (a script, in no package; its output is the table)

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.results.analysis import Analysis
from tests.scripts import planted

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 75  # for each device that a case needs
RECORDED = 4
REGIONS = ("step", "data", "transfer", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    tiny: bool
    warmup: int = 15
    steps: int = 30
    rounds: int = 3

    @property
    def batches(self) -> int:
        """Of the longest run."""
        return self.warmup + self.steps + 1 + RECORDED + 1


SIZES = {True: Size(tiny=True, warmup=2, steps=6, rounds=1), False: Size(tiny=False)}


@dataclass(frozen=True, slots=True)
class Setup:
    """One run: a module, its loader, options for the Trainer."""

    module: L.LightningModule
    loader: object
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A planted problem and its fix, each made anew for each run."""

    before: Callable[[Size], Setup]
    after: Callable[[Size], Setup]
    devices: int = 1
    on_cpu: bool = False
    code: str = ""
    """The finding, where the case is not called by it."""


# -- the cases -----------------------------------------------------------------------------------------------------


class FusedAdam(planted.MLP):
    """The update of `planted.LoopedAdam` as one kernel."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Fused."""
        return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)


class FusedGELU(planted.MLP):
    """The activation of `planted.HandWrittenGELU` as one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many rows as there."""
        x = x.repeat(64, 1)
        for layer in self.layers:
            x = functional.gelu(layer(x), approximate="tanh")
        return x


def _mlp(kind: type[planted.MLP], layers: int, size: Size) -> Setup:
    rows, layers, width = (8, 2, 16) if size.tiny else (8192, layers, 1024)
    loader = planted.activations(size.batches, rows, width, tiny=size.tiny)
    return Setup(kind(layers, width), loader, planted.bf16(size.tiny))


def _gelu(kind: type[planted.MLP], size: Size) -> Setup:
    rows, layers, width = (2, 2, 16) if size.tiny else (1024, 4, 1024)
    loader = planted.activations(size.batches, rows, width, tiny=size.tiny)
    return Setup(kind(layers, width), loader, planted.bf16(size.tiny))


def _copies(size: Size, *, pin: bool) -> Setup:
    rows, inputs, width = (8, 64, 16) if size.tiny else (2048, 16384, 2048)
    return Setup(planted.MLP(2, width, inputs), planted.held(size.batches, rows, inputs, pin=pin))


def _loader(workers: int, size: Size) -> Setup:
    loader = planted.worker_tokens(size.batches, size.tiny, workers=workers, seconds=0.002)
    return Setup(planted.gpt(size.tiny, layers=3), loader, planted.bf16(size.tiny))


def _start_slowly(_: int) -> None:
    time.sleep(0.06)  # as imports and the opening of files take


def _restarts(size: Size, *, persistent: bool) -> Setup:
    rows = planted.TokenRows(16 * 4, 0.0, tiny=size.tiny)
    loader = DataLoader(
        rows,
        batch_size=16,
        num_workers=2,
        persistent_workers=persistent,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_slowly,
    )
    return Setup(planted.gpt(size.tiny, layers=3), loader, planted.bf16(size.tiny))


def _small(kind: type[L.LightningModule], size: Size) -> Setup:
    return Setup(kind(4 if size.tiny else 48), planted.held(size.batches, 8, 64))


def _gpt(precision: str, size: Size) -> Setup:
    options = {} if size.tiny else {"precision": precision}
    return Setup(planted.gpt(size.tiny), planted.tokens(size.batches, size.tiny), options)


def _big_gradients(size: Size, *, compressed: bool) -> Setup:
    layers, width = (2, 16) if size.tiny else (5, 8192)
    strategy = DDPStrategy(ddp_comm_hook=bf16_compress_hook if compressed and not size.tiny else None)
    return Setup(planted.MLP(layers, width), planted.held(size.batches, 32, width), {"strategy": strategy})


def _ranks(kind: type[planted.GPT], size: Size) -> Setup:
    options = {**planted.bf16(size.tiny), "strategy": "ddp"}
    return Setup(planted.gpt(size.tiny, kind=kind), planted.tokens(size.batches, size.tiny), options)


def _logging(size: Size, *, every: int) -> Setup:
    logger = CSVLogger(tempfile.mkdtemp(), flush_logs_every_n_steps=every)
    options = {"logger": logger, "log_every_n_steps": every, "enable_progress_bar": every == 1}
    callbacks = [L.pytorch.callbacks.LearningRateMonitor("step")]
    return Setup(planted.MLP(2, 32), planted.held(size.batches, 8, 32, pin=False), {**options, "callbacks": callbacks})


class CollectsGarbage(planted.MLP):
    """Collects garbage every few steps, as scripts do that ran out of memory once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """All generations."""
        if batch_idx % 4 == 0:
            gc.collect()


def _garbage(size: Size, *, frozen: bool) -> Setup:
    (gc.freeze if frozen else gc.unfreeze)()
    return Setup(CollectsGarbage(2, 32), planted.held(size.batches, 8, 32, pin=False))


CASES: dict[str, Case] = {
    "input-bound": Case(partial(_loader, 0), partial(_loader, 8)),
    "worker-restarts": Case(partial(_restarts, persistent=False), partial(_restarts, persistent=True)),
    "transfer-bound": Case(partial(_copies, pin=False), partial(_copies, pin=True)),
    "sync-bound": Case(partial(_mlp, planted.LooksAtEverything, 16), partial(_mlp, planted.MLP, 16)),
    "allocator-churn": Case(partial(_mlp, planted.EmptiesCache, 24), partial(_mlp, planted.MLP, 24)),
    "slow-optimizer": Case(partial(_mlp, planted.LoopedAdam, 24), partial(_mlp, FusedAdam, 24)),
    "launch-bound": Case(partial(_small, planted.SmallKernels), partial(_small, planted.Graphed)),
    "compute-bound": Case(partial(_gpt, "32-true"), partial(_gpt, "bf16-mixed")),
    "memory-bandwidth-bound": Case(partial(_gelu, planted.HandWrittenGELU), partial(_gelu, FusedGELU)),
    "outside-the-step": Case(partial(_logging, every=1), partial(_logging, every=50), on_cpu=True, code="slow-logger"),
    "gc-bound": Case(partial(_garbage, frozen=False), partial(_garbage, frozen=True), on_cpu=True),
    "communication-bound": Case(
        partial(_big_gradients, compressed=False), partial(_big_gradients, compressed=True), devices=2
    ),
    "straggler": Case(partial(_ranks, planted.SlowGPU), partial(_ranks, planted.GPT), devices=2),
}


# -- one case, in a process of its own -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a case: milliseconds of a step, by region, and what the finding of the recorded run says."""

    before: dict[str, float]
    after: dict[str, float]
    verdicts_before: tuple[str, ...]
    verdicts_after: tuple[str, ...]
    recorded_verdict: str
    predicted_ms: float | None
    at_most: bool
    title: str

    @property
    def saved_ms(self) -> float:
        """As measured."""
        return self.before["step"] - self.after["step"]

    def judgement(self) -> str:
        """Whether the prediction is right."""
        if self.predicted_ms is None:
            return "no prediction"
        if abs(self.predicted_ms - self.saved_ms) <= max(1.0, 0.2 * self.saved_ms):
            return "yes"
        return "the bound holds" if self.at_most and self.saved_ms <= self.predicted_ms else "no"


def train(setup: Setup, case: Case, size: Size, folder: Path, *, record: bool = False) -> Analysis | None:
    """Run one fit; rank 0 gets its analysis. The folder is one for all ranks."""
    L.seed_everything(0, verbose=False)
    throughput = ThroughputCallback(size.warmup)
    first = size.warmup + size.steps + 1  # behind the steps that count
    forge = [ForgeProfilerCallback(first, first + RECORDED, trace_dir=folder, tensorboard=False)] if record else []
    options: dict[str, Any] = {
        "accelerator": "cpu" if size.tiny or case.on_cpu else "gpu",
        "devices": case.devices,
        "max_steps": size.batches if record else size.warmup + size.steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        **setup.options,
    }
    options["callbacks"] = [*options.get("callbacks", ()), throughput, *forge]
    L.Trainer(**options).fit(setup.module, setup.loader)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return throughput.analysis()


def measure(name: str, size: Size, folder: Path) -> Measured | None:
    """Run a case; None on any rank but the first."""
    case = CASES[name]
    runs: dict[str, list[Analysis | None]] = {"before": [], "after": []}
    for _ in range(size.rounds):
        runs["before"].append(train(case.before(size), case, size, folder))
        runs["after"].append(train(case.after(size), case, size, folder))
    recorded = train(case.before(size), case, size, folder, record=True)
    if recorded is None:
        return None
    found = next((each for each in recorded.findings if each.code == (CASES[name].code or name)), None)
    saves = None if found is None else found.saves
    return Measured(
        before=_medians(runs["before"]),
        after=_medians(runs["after"]),
        verdicts_before=_verdicts(runs["before"]),
        verdicts_after=_verdicts(runs["after"]),
        recorded_verdict=recorded.verdict,
        predicted_ms=None if saves is None else saves.ms_per_step,
        at_most=saves is not None and saves.at_most,
        title="" if found is None else found.title,
    )


def _medians(runs: list[Analysis | None]) -> dict[str, float]:
    regions = [
        {"step": each.run.step_ms.mean, **{name: region.device_ms for name, region in each.run.regions.items()}}
        for each in runs
        if each is not None and each.run is not None
    ]
    return {name: statistics.median(each.get(name, 0.0) for each in regions) for name in REGIONS}


def _verdicts(runs: list[Analysis | None]) -> tuple[str, ...]:
    return tuple(sorted({each.verdict for each in runs if each is not None}))


# -- all cases -----------------------------------------------------------------------------------------------------


def run_apart(name: str, *, quick: bool, limit_s: float) -> Measured | str:
    """Run a case in a process of its own, or what went wrong there."""
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log.txt"
        command = [sys.executable, "-m", "docs.measure_fixes", "--run", name, "--out", str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *(["--quick"] if quick else [])],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": scratch},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be ended with rank 1 and the loader's workers
            )
            try:
                code = process.wait(limit_s * CASES[name].devices)
            except BaseException as exc:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(exc, subprocess.TimeoutExpired):
                    return f"no result within {limit_s * CASES[name].devices:g} s"
                raise
        if code or not result.exists():
            last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
            return f"exit code {code}: {last[:200]}"
        read = json.loads(result.read_text())
        return Measured(**read)


def row(name: str, found: Measured | str) -> str:
    """A line of the table."""
    if isinstance(found, str):
        return f"| `{name}` | {found} | | | | | |"
    much = "at most " if found.at_most else "about "
    predicted = "" if found.predicted_ms is None else f"{much}{found.predicted_ms:.2f}"
    return (
        f"| `{name}` | {found.before['step']:.2f} | {found.after['step']:.2f} | {found.saved_ms:.2f} | {predicted} "
        f"| {found.judgement()} | {found.recorded_verdict} |"
    )


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description="What fixes save, as predicted and as measured.")
    parser.add_argument("--cases", default=",".join(CASES), help="names of findings, by comma; all by default")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes on the CPU: tries the script, measures nothing"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for a case (default: {LIMIT_S})")
    parser.add_argument("--out", type=Path, default=Path("measure_fixes.json"), help="where all figures go, as JSON")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        measured = measure(args.run, SIZES[args.quick], args.out.parent)
        if measured is not None:
            args.out.write_text(json.dumps(asdict(measured)))
        return
    names = args.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"unknown cases {', '.join(unknown)}; there are {', '.join(CASES)}")
    results: dict[str, dict[str, Any] | str] = {}
    print("| Finding | ms before | ms after | saved | predicted | within 20 % or 1 ms | verdict |", flush=True)
    print("|---|---:|---:|---:|---:|---|---|", flush=True)
    for name in names:
        case = CASES[name]
        if not args.quick and not case.on_cpu and torch.cuda.device_count() < case.devices:
            found: Measured | str = (
                f"skipped: it takes {case.devices} CUDA devices, here are {torch.cuda.device_count()}"
            )
        else:
            found = run_apart(name, quick=args.quick, limit_s=args.limit)
        results[name] = found if isinstance(found, str) else asdict(found)
        print(row(name, found), flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

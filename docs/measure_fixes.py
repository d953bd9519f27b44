"""What fixes save, as predicted and as measured: runs with one planted problem each, and the same without it.

    python -m docs.measure_fixes                           # all cases; an H200 takes under 5 minutes
    python -m docs.measure_fixes --cases straggler,sync-bound
    python -m docs.measure_fixes --quick                   # tiny sizes on the CPU, to try the script itself
    python -m docs.measure_fixes --cpu                     # threads, fused optimizers, workers: on a CPU

Each case runs in a process of its own, with a time limit. Before and after come in turns, three each, with
`ThroughputCallback` alone, so that no step is slowed by recording; the figures are medians of the three means. Then a
run with the problem is recorded, and its finding says what the fix saves. A line of the table is printed as soon as a
case is measured, and everything is in the file of `--out`, also where a case or the script comes to an end before.

`--cpu` measures each fix on one and on two threads, on an idle machine and beside a process that keeps a core busy, in
pairs of forked processes in turns. A fix is only advised where no median of such pairs is above 1.

A page of docs/findings has no case where there is nothing to predict (gpu-idle), where the problem goes away by itself
in later steps (slow-launches), where the fix changes what is computed (python-bound), where what is left has no name
(between-regions), or where the fix is the user's to find (blocked).
"""

# ruff: noqa: INP001, T201  (a script, in no package; its output is the table)

import argparse
import gc
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
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
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.results.analysis import Analysis
from tests.scripts import planted

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 75  # for each device that a case needs
RECORDED = 8
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
    forge = [ForgeProfilerCallback(trace_dir=folder, tensorboard=False)] if record else []
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


def run_apart(name: str, *, quick: bool, limit_s: float, keep: Path | None = None) -> Measured | str:
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
        for trace in Path(scratch).rglob("rank*.trace.json.gz") if keep is not None else ():
            (keep / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(trace, keep / name)
        read = json.loads(result.read_text())
        return Measured(**read)


# -- fixes on a CPU, which may lose -----------------------------------------------------------------------------------

PAIRS = 3
CPU_STEPS = 45
CPU_LIMIT_S = 30


class CpuMLP(planted.MLP):
    """Layers of one width, trained with Adam."""

    fused = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As PyTorch does by default, or fused."""
        return torch.optim.Adam(self.parameters(), lr=1e-4, fused=self.fused or None)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002
        """The forward pass alone."""
        self(batch[0])


class FusedMLP(CpuMLP):
    """The same with a fused update."""

    fused = True


class Rows(Dataset[torch.Tensor]):
    """Rows that are waited for, or computed, for 10 ms each."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits

    def __len__(self) -> int:
        return 4 * CPU_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.waits:
            time.sleep(0.01)
        end = time.thread_time() + (0 if self.waits else 0.01)
        while time.thread_time() < end:
            pass
        return torch.ones(64)


@dataclass(frozen=True, slots=True)
class CpuSetup:
    """One run on the CPU; `threads` is set if it is what the fix changes."""

    module: Callable[[], L.LightningModule]
    loader: Callable[[], DataLoader]
    validation: Callable[[], DataLoader] | None = None
    threads: int | None = None
    epochs: int = 1


def _mlp_on_cpu(kind: type[CpuMLP], layers: int, width: int, rows: int, threads: int | None = None) -> CpuSetup:
    loader = partial(planted.held, CPU_STEPS, rows, width, pin=False)
    return CpuSetup(partial(kind, layers, width), loader, threads=threads, epochs=max(256 // width, 1))


def _rows(workers: int, *, waits: bool) -> CpuSetup:
    loader = partial(DataLoader, Rows(waits=waits), 4, num_workers=workers, persistent_workers=workers > 0)
    return CpuSetup(partial(CpuMLP, 4, 64), loader)


def _validated(workers: int, *, persistent: bool) -> CpuSetup:
    rows = TensorDataset(torch.ones(64, 64))
    loader = partial(DataLoader, rows, 16, num_workers=workers, persistent_workers=persistent)
    return CpuSetup(partial(CpuMLP, 4, 64), partial(planted.held, CPU_STEPS, 8, 64, pin=False), loader, epochs=8)


CPU_CASES: dict[str, tuple[CpuSetup, CpuSetup]] = {
    "threads 1 to 2, products of 64": tuple(_mlp_on_cpu(CpuMLP, 14, 64, 8, each) for each in (1, 2)),
    "threads 1 to 2, products of 512": tuple(_mlp_on_cpu(CpuMLP, 4, 512, 256, each) for each in (1, 2)),
    "Adam fused, 28 tensors of up to 4,096": tuple(_mlp_on_cpu(each, 14, 64, 8) for each in (CpuMLP, FusedMLP)),
    "Adam fused, 8 tensors of up to 262,144": tuple(_mlp_on_cpu(each, 4, 512, 8) for each in (CpuMLP, FusedMLP)),
    "workers 0 to 4, dataset waits": (_rows(0, waits=True), _rows(4, waits=True)),
    "workers 2 to 4, dataset waits": (_rows(2, waits=True), _rows(4, waits=True)),
    "workers 0 to 1, dataset computes": (_rows(0, waits=False), _rows(1, waits=False)),
    "workers 2 to 4, dataset computes": (_rows(2, waits=False), _rows(4, waits=False)),
    "validation workers 0 to 2": (_validated(0, persistent=False), _validated(2, persistent=False)),
    "validation workers 2, persistent": (_validated(2, persistent=False), _validated(2, persistent=True)),
}


def _cpu_run(setup: CpuSetup, threads: int, folder: Path, results: Any, *, record: bool = False) -> None:
    """One fit; sends milliseconds of a step, or of a validation, and the advice."""
    torch.set_num_threads(setup.threads or threads)
    validated = setup.validation is not None
    throughput = ThroughputCallback(5, record=False)
    forge = [ForgeProfilerCallback(CPU_STEPS - 5, CPU_STEPS - 2, trace_dir=folder, tensorboard=False)] if record else []
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=setup.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[throughput, *forge],
    )
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        trainer.fit(setup.module(), setup.loader(), [] if setup.validation is None else setup.validation())
    analysis, ledger = throughput.analysis(), throughput.ledger()
    if analysis is None or analysis.run is None or ledger is None:
        raise RuntimeError("the run has no result")
    ms = 1e3 * ledger.parts["validation"] / ledger.counts["validation"] if validated else analysis.run.step_ms.mean
    results.send((ms, [found.advice for found in analysis.findings]))


def _forked(setup: CpuSetup, threads: int, *, record: bool = False) -> tuple[float, list[str]]:
    """A run in a process of its own: this one has imported everything, and has used no threads of PyTorch's yet."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = fork.Process(target=_cpu_run, args=(setup, threads, Path(folder), theirs), kwargs={"record": record})
        process.start()
        found: tuple[float, list[str]] = ours.recv() if ours.poll(CPU_LIMIT_S) else (math.inf, [])
        process.kill()
        process.join()
    return found


@contextmanager
def _burner(*, on: bool) -> Iterator[None]:
    """A process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if on else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _advised(name: str, advice: list[str]) -> str:
    kind = name.split(maxsplit=1)[0]
    sign = {
        "threads": "try OMP_NUM_THREADS=2",
        "Adam": "Use Adam(fused=True)",
        "workers": "try num_workers=",
        "validation": "Set persistent_workers=True in the validation" if "persistent" in name else "Give it workers",
    }[kind]
    return "yes" if any(sign in text for text in advice) else "no"


def measure_on_cpu(names: list[str], pairs: int) -> None:
    """Print a line for each fix, number of threads, and load of the machine."""
    print("| Fix | Threads | Machine | ms before | ms after | after / before: median, least to most | advised |")
    print("|---|---:|---|---:|---:|---:|---|", flush=True)
    for name in names:
        before, after = CPU_CASES[name]
        for threads in (0,) if before.threads else (1, 2):
            for busy in (False, True):
                with _burner(on=busy):
                    found = [(_forked(before, threads)[0], _forked(after, threads)[0]) for _ in range(pairs)]
                    advice = _forked(before, threads, record=not before.validation)[1]
                ratios = sorted(second / first for first, second in found)  # inf: not done in CPU_LIMIT_S
                first, second = (statistics.median(each) for each in zip(*found, strict=True))
                print(
                    f"| {name} | {threads or '1 to 2'} | {'busy' if busy else 'idle'} | {first:.2f} | {second:.2f} "
                    f"| {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f} "
                    f"| {_advised(name, advice)} |",
                    flush=True,
                )


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
    parser.add_argument("--keep", type=Path, help="a folder for the traces of the recorded runs")
    parser.add_argument("--cpu", nargs="?", const="", help="fixes on a CPU instead: those whose name contains this")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of runs with --cpu (default: {PAIRS})")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu is not None:
        measure_on_cpu([name for name in CPU_CASES if args.cpu in name], args.pairs)
        return
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
            found = run_apart(name, quick=args.quick, limit_s=args.limit, keep=args.keep)
        results[name] = found if isinstance(found, str) else asdict(found)
        print(row(name, found), flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

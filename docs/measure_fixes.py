"""What fixes save, as predicted and as measured: runs with one planted problem each, and the same without it.

    python -m docs.measure_fixes                         # all but other people's models; under 5 minutes on an H200
    python -m docs.measure_fixes --cases straggler,sync-bound
    python -m docs.measure_fixes --cases gpt2-eager,llama --limit 300    # with transformers; compiling takes minutes
    python -m docs.measure_fixes --keep FOLDER             # and the traces
    python -m docs.measure_fixes --again FOLDER            # what today's code predicts of them
    python -m docs.measure_fixes --quick                   # tiny sizes on the CPU, to try the script itself
    python -m docs.measure_fixes --cpu                     # threads, fused optimizers, workers: on a CPU

Each case runs in a process of its own, with a time limit. Before and after come in turns, three each, with
`ThroughputCallback` alone, so that no step is slowed by recording; the figures are those of the run whose mean step is
the median. Then a run with the problem is recorded, and its finding says what the fix saves. A line of the table is
printed as soon as a case is measured, and everything is in the file of `--out`, also where a case or the script comes
to an end before.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from msgspec import structs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import AUROC

from benchmarks import other_models
from benchmarks.real_models import Clicks, Pictures, Reading, RealGPT, Recommender, ResNet, loader, pictures
from benchmarks.workloads import random_tokens
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine, without_run
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import Analysis, Distribution, RunEvidence, RunRegion, RunTiming
from tests.scripts import planted

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 75  # for each device that a case needs
RECORDED = 8
FIGURES = "measured.json"
REGIONS = ("step", "data", "transfer", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    tiny: bool
    warmup: int = 15
    steps: int = 30
    rounds: int = 3
    settled: int = 150

    @property
    def batches(self) -> int:
        """Of the recorded run, which goes on after its window, whose analysis in a child process slows some steps."""
        return self.warmup + self.steps + 1 + RECORDED + 1 + self.settled


SIZES = {True: Size(tiny=True, warmup=2, steps=6, rounds=1, settled=0), False: Size(tiny=False)}


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


class LooksLater(planted.MLP):
    """The same figures of each layer as in `planted.LooksAtEverything`, left on the GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many rows as there."""
        self.largest, self.means = [], []
        for layer in self.layers:
            x = layer(x).relu()
            self.largest.append(x.detach().max())
            self.means.append(x.detach().mean())
        return x


class CollectsGarbage(planted.MLP):
    """Collects garbage every few steps, as scripts do that ran out of memory once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """All generations."""
        if batch_idx % 4 == 0:
            gc.collect()


class Scores(planted.MLP):
    """Updates a metric in each step, and computes it there or not."""

    def __init__(self, layers: int, width: int, *, each: bool) -> None:
        super().__init__(layers, width)
        self.score, self._each = AUROC(task="binary"), each

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The first outputs as predictions of the signs of the first inputs."""
        self.score.update(self(batch)[:, 0].detach().sigmoid(), (batch[:, 0] > 0).long())
        if self._each:
            self.score.compute()
        self.score.reset()  # so that steps do not become longer
        return super().training_step(batch, batch_idx)


def _scores(size: Size, *, each: bool) -> Setup:
    return Setup(Scores(2, 32, each=each), planted.held(size.batches, 64, 32, pin=False))


def _garbage(size: Size, *, frozen: bool) -> Setup:
    (gc.freeze if frozen else gc.unfreeze)()
    return Setup(CollectsGarbage(2, 32), planted.held(size.batches, 8, 32, pin=False))


def _resnet(
    norms: Reading,
    size: Size,
    rows: DataLoader[Any] | None = None,
    *,
    pin: bool = True,
    precision: str = "bf16-mixed",
) -> Setup:
    model = ResNet((1, 1), 8, norms=norms) if size.tiny else ResNet(norms=norms)
    batch, side = (2, 32) if size.tiny else (64, 224)
    options = {} if size.tiny else {"precision": precision, "benchmark": True}
    return Setup(model, pictures(size.batches, batch, side, pin=pin) if rows is None else rows, options)


def _resnet_loader(workers: int, size: Size) -> Setup:
    batch, side = (2, 32) if size.tiny else (32, 224)
    return _resnet("never", size, loader(Pictures(batch * size.batches, side), batch, workers))


def _real_gpt(precision: str, size: Size, **options: Any) -> Setup:
    if size.tiny:
        return Setup(RealGPT(1, 64, 16, 32, **options), planted.tokens(size.batches, tiny=True))
    rows = random_tokens(size.batches, batch_size=4)
    return Setup(RealGPT(**options), rows, {"precision": precision})


def _recommender(size: Size, workers: int | None = None, **options: Any) -> Setup:
    batch, rows = (4, 100) if size.tiny else (2048, 10_000)
    kept = loader(Clicks(batch if workers is None else batch * size.batches, rows), batch, workers or 0)
    if workers is None:
        kept = DataLoader(list(kept) * size.batches, batch_size=None)
    return Setup(Recommender(rows=rows, **options), kept)


CASES: dict[str, Case] = {
    "input-bound": Case(partial(_loader, 0), partial(_loader, 8)),
    "worker-restarts": Case(partial(_restarts, persistent=False), partial(_restarts, persistent=True)),
    "transfer-bound": Case(partial(_copies, pin=False), partial(_copies, pin=True)),
    "sync-bound": Case(partial(_mlp, planted.LooksAtEverything, 16), partial(_mlp, LooksLater, 16)),
    "allocator-churn": Case(partial(_mlp, planted.EmptiesCache, 24), partial(_mlp, planted.MLP, 24)),
    "slow-optimizer": Case(partial(_mlp, planted.LoopedAdam, 24), partial(_mlp, FusedAdam, 24)),
    "launch-bound": Case(partial(_small, planted.SmallKernels), partial(_small, planted.Graphed)),
    "compute-bound": Case(partial(_gpt, "32-true"), partial(_gpt, "bf16-mixed")),
    "memory-bandwidth-bound": Case(partial(_gelu, planted.HandWrittenGELU), partial(_gelu, FusedGELU)),
    "outside-the-step": Case(partial(_logging, every=1), partial(_logging, every=50), on_cpu=True, code="slow-logger"),
    "gc-bound": Case(partial(_garbage, frozen=False), partial(_garbage, frozen=True), on_cpu=True),
    "slow-call": Case(partial(_scores, each=True), partial(_scores, each=False), on_cpu=True),
    "communication-bound": Case(
        partial(_big_gradients, compressed=False), partial(_big_gradients, compressed=True), devices=2
    ),
    "straggler": Case(partial(_ranks, planted.SlowGPU), partial(_ranks, planted.GPT), devices=2),
}

# mistakes in real models
REAL: dict[str, Case] = {
    "resnet-loader": Case(partial(_resnet_loader, 0), partial(_resnet_loader, 8), code="input-bound"),
    "resnet-copies": Case(partial(_resnet, "never", pin=False), partial(_resnet, "never"), code="transfer-bound"),
    "resnet-float32": Case(
        partial(_resnet, "never", precision="32-true"), partial(_resnet, "never"), code="compute-bound"
    ),
    "resnet-norms": Case(partial(_resnet, "each"), partial(_resnet, "on the GPU"), code="slow-hook"),
    "gpt-float32": Case(partial(_real_gpt, "32-true"), partial(_real_gpt, "bf16-mixed"), code="compute-bound"),
    "gpt-optimizer": Case(
        partial(_real_gpt, "bf16-mixed", optimizer=partial(torch.optim.AdamW, lr=1e-4, foreach=False)),
        partial(_real_gpt, "bf16-mixed"),
        code="slow-optimizer",
    ),
    "gpt-launches": Case(
        partial(_real_gpt, "bf16-true"), partial(_real_gpt, "bf16-true", graphed=4), code="launch-bound"
    ),
    "gpt-checks": Case(
        partial(_real_gpt, "bf16-mixed", checks="each"),
        partial(_real_gpt, "bf16-mixed", checks="on the GPU"),
        code="sync-bound",
    ),
    "dlrm-loader": Case(partial(_recommender, workers=0), partial(_recommender, workers=12), code="input-bound"),
    "dlrm-checks": Case(
        partial(_recommender, checks="each"), partial(_recommender, checks="on the GPU"), code="sync-bound"
    ),
    "dlrm-launches": Case(partial(_recommender), partial(_recommender, graphed=2048), code="launch-bound"),
}


def _other(name: str, size: Size, *, changed: bool) -> Setup:
    module, batch, options = other_models.make(name, changed=changed)
    return Setup(module, DataLoader([batch] * size.batches, batch_size=None), options)


OTHERS: dict[str, Case] = {
    name: Case(partial(_other, name, changed=False), partial(_other, name, changed=True), code=code)
    for name, (_, _, code) in other_models.CHANGES.items()
}
ALL = CASES | REAL | OTHERS


# -- one case, in a process of its own -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a case: milliseconds of a step, by region, and what the finding of the recorded run says."""

    before: dict[str, float]
    after: dict[str, float]
    verdicts_before: tuple[str, ...]
    verdicts_after: tuple[str, ...]
    live: dict[str, float]
    """The step of the recorded run, its window left out, and its regions."""
    recorded_verdict: str = ""
    saves_ms: float | None = None
    """What the finding says, if there is one; its bound, if the steps could not be played again."""
    at_most: bool = False
    bound_ms: float | None = None
    """What it would say without playing the steps again."""
    title: str = ""

    def left(self, saves_ms: float | None) -> tuple[float, float] | None:
        """What such a saving would leave of the step, and by how many percent that is off."""
        if saves_ms is None:
            return None
        left_ms = self.live["step"] - saves_ms
        return left_ms, 100 * (left_ms / self.after["step"] - 1)


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
    case = ALL[name]
    runs: dict[str, list[Analysis | None]] = {"before": [], "after": []}
    for _ in range(size.rounds):
        runs["before"].append(train(case.before(size), case, size, folder))
        runs["after"].append(train(case.after(size), case, size, folder))
    recorded = train(case.before(size), case, size, folder, record=True)
    if recorded is None:
        return None
    return with_predictions(
        Measured(
            before=_median_run(runs["before"]),
            after=_median_run(runs["after"]),
            verdicts_before=_verdicts(runs["before"]),
            verdicts_after=_verdicts(runs["after"]),
            live=_median_run([recorded]),
        ),
        recorded,
        case.code or name,
    )


def with_predictions(measured: Measured, recorded: Analysis, code: str) -> Measured:
    """The figures of a case with what the finding of its recorded run says."""
    unplayed = structs.replace(recorded, ranks=tuple(structs.replace(rank, replay=None) for rank in recorded.ranks))
    found, bounded = (
        next((each for each in analysis.findings if each.code == code), None)
        for analysis in (recorded, combine(without_run(unplayed), recorded.run))
    )
    saves, bound = (None if each is None else each.saves for each in (found, bounded))
    return replace(
        measured,
        recorded_verdict=recorded.verdict,
        saves_ms=None if saves is None else saves.ms_per_step,
        at_most=saves is not None and saves.at_most,
        bound_ms=None if bound is None else bound.ms_per_step,
        title="" if found is None else found.title,
    )


def predict_again(folder: Path, name: str) -> Measured:
    """Today's predictions for a case whose trace and figures were kept, by the step of its runs without a window."""
    measured = Measured(**json.loads((folder / FIGURES).read_text()))
    measured = replace(measured, live=measured.before)
    step_ms = measured.live["step"]
    timing = RunTiming(
        steps=SIZES[False].steps,
        on_device=True,
        step_ms=Distribution(mean=step_ms, p50=step_ms, min=step_ms, max=step_ms),
        regions={region: RunRegion(device_ms=measured.live[region], host_ms=0.0) for region in REGIONS[1:]},
    )
    run = RunEvidence(timing=timing)
    return with_predictions(measured, combine(analyze(folder).analysis, run), ALL[name].code or name)


def _median_run(runs: list[Analysis | None]) -> dict[str, float]:
    """Step and regions of the run whose step is the median, so that they belong together."""
    evidence = sorted((run for each in runs if each and (run := each.run)), key=lambda run: run.timing.step_ms.mean)
    run = evidence[len(evidence) // 2]
    return {"step": run.timing.step_ms.mean} | {
        name: run.timing.regions[name].device_ms if name in run.timing.regions else 0.0 for name in REGIONS[1:]
    }


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
                code = process.wait(limit_s * ALL[name].devices)
            except BaseException as exc:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(exc, subprocess.TimeoutExpired):
                    return f"no result within {limit_s * ALL[name].devices:g} s"
                raise
        if code or not result.exists():
            last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
            return f"exit code {code}: {last[:200]}"
        for trace in Path(scratch).rglob("rank*.trace.json.gz") if keep is not None else ():
            (keep / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(trace, keep / name)
        if keep is not None:
            shutil.copy(result, keep / name / FIGURES)
        return Measured(**json.loads(result.read_text()))


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
    ms = (
        1e3 * ledger.wholes["validation"] / ledger.counts["validation"]
        if validated
        else analysis.run.timing.step_ms.mean
    )
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
        return f"| `{name}` | {found} | | | | |"
    cells = []
    for left, at_least in ((found.left(found.saves_ms), found.at_most), (found.left(found.bound_ms), False)):
        off = "" if left is None else f"{'at least ' * at_least}{left[0]:.2f} ({_signed(left[1])} %)"
        cells.append(off or "no finding")
    times = f"{found.before['step']:.2f} | {found.after['step']:.2f}"
    return f"| `{name}` | {times} | {cells[0]} | {cells[1]} | {found.recorded_verdict} |"


def _signed(value: float) -> str:
    return f"{value:+.0f}".replace("-", "\u2212")


def summary(results: Iterable[Measured | str]) -> str:
    """The median and the largest error of what was predicted, and of the bounds."""
    measured = [each for each in results if isinstance(each, Measured) and each.saves_ms is not None]
    if not measured:
        return "Nothing was predicted."
    lines = []
    for what, off in (
        ("played again", [each.left(each.saves_ms) for each in measured]),
        ("by bounds", [each.left(each.bound_ms) for each in measured]),
    ):
        errors = sorted(abs(left[1]) for left in off if left is not None)
        lines.append(f"{what} {statistics.median(errors):.0f} %, at most {errors[-1]:.0f} %")
    return f"Error of the step after {len(measured)} fixes, median: {'; '.join(lines)}."


def _measured_or_why_not(name: str, args: argparse.Namespace) -> Measured | str:
    case = ALL[name]
    if args.again is not None:
        return predict_again(args.again / name, name)
    if args.quick and name in OTHERS:
        return "skipped: it has one size, which takes a GPU"
    if not args.quick and not case.on_cpu and torch.cuda.device_count() < case.devices:
        return f"skipped: it takes {case.devices} CUDA devices, here are {torch.cuda.device_count()}"
    return run_apart(name, quick=args.quick, limit_s=args.limit, keep=args.keep)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description="What fixes save, as predicted and as measured.")
    parser.add_argument(
        "--cases",
        default=",".join(CASES | REAL),
        help="names, by comma (default: all but other models)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes on the CPU: tries the script, measures nothing"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for a case (default: {LIMIT_S})")
    parser.add_argument("--out", type=Path, default=Path("measure_fixes.json"), help="where all figures go, as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the traces of the recorded runs, with all figures")
    parser.add_argument("--again", type=Path, help="trains nothing: today's predictions for what --keep has kept")
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
    if args.again is not None:
        names = [name for name in names if (args.again / name / FIGURES).is_file()]
        if not names:
            raise SystemExit(f"{args.again} has none of these cases with its {FIGURES}, as --keep writes it")
    if unknown := [name for name in names if name not in ALL]:
        raise SystemExit(f"unknown cases {', '.join(unknown)}; there are {', '.join(ALL)}")
    results: dict[str, Measured | str] = {}
    print("| Case | ms before | ms after | predicted after | by bounds | verdict |", flush=True)
    print("|---|---:|---:|---:|---:|---|", flush=True)
    for name in names:
        results[name] = found = _measured_or_why_not(name, args)
        print(row(name, found), flush=True)
        figures = {name: each if isinstance(each, str) else asdict(each) for name, each in results.items()}
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\n{summary(results.values())}", flush=True)


if __name__ == "__main__":
    main()

"""Real runs, each with one planted cause, whose records are kept: `python -m tests.golden.planted`.

    python -m tests.golden.planted                  # records all of the CPU again (25 minutes on two idle cores)
    python -m tests.golden.planted killed resumed   # records some
    python -m tests.golden.planted --gpu            # records those of GPUs (six minutes on two H200s)
    python -m tests.golden.planted --boundaries     # keeps the raw boundaries of some

A run of the same code takes other times each time, so recording a case again means making its outputs anew, too.
"""

import argparse
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_forge_profiling as forge
from benchmarks.workloads import GPT, SmallKernels, random_tokens
from lightning_forge_profiling.ranks import stalls
from tests.golden import boundaries
from tests.golden.mistakes import MISTAKES
from tests.ports import free_port

CHECKOUT = Path(__file__).parents[2]
RUNS = CHECKOUT / "tests" / "golden" / "runs"
STEPS, LONG_S = 200, 0.004
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


def busy(seconds: float) -> None:
    """Use a core for so long, of this thread's own time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Points(Dataset[torch.Tensor]):
    """Points, each of which may take time to load."""

    def __init__(self, count: int, load: Callable[[int], object] = bool) -> None:
        self.x, self.load = torch.randn(count, 16, generator=torch.Generator().manual_seed(0)), load

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        self.load(i)
        return self.x[i]


class Waits(torch.autograd.Function):
    """Takes time in backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """Nothing."""
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        time.sleep(LONG_S)
        return gradients[0]


class SlowSGD(torch.optim.SGD):
    """Sleeps in each update."""

    def step(self, closure: Any = None) -> Any:
        """Sleep after the update."""
        loss = super().step(closure)
        time.sleep(LONG_S)
        return loss


class Model(L.LightningModule):
    """A small model with one planted cause; `at` maps a place of the run to what happens there, given the step."""

    def __init__(self, **at: Callable[[int], object]) -> None:
        super().__init__()
        self.net, self.at = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), at
        self.optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
        self.in_backward = False

    def come_to(self, place: str) -> None:
        """Do what is planted there."""
        if place in self.at:
            self.at[place](self.trainer.global_step)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean of the squares."""
        self.come_to("forward")
        y = self.net(batch)
        return (Waits.apply(y) if self.in_backward else y).square().mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        """Nothing else."""
        self.come_to("validation")
        self.net(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        """A hook."""
        self.come_to("hook")

    def setup(self, stage: str) -> None:
        """Before training."""
        self.come_to("setup")

    def on_save_checkpoint(self, _: Any) -> None:
        """In a checkpoint."""
        self.come_to("save")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Without momentum."""
        return self.optimizer(self.parameters(), lr=1e-3)  # type: ignore[call-arg]


class SlowCallback(Callback):
    """Sleeps after each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Sleep."""
        time.sleep(LONG_S)


class SlowLogger(CSVLogger):
    """Sleeps for each entry."""

    def log_metrics(self, *arguments: Any, **options: Any) -> None:
        """Sleep."""
        time.sleep(0.05)
        super().log_metrics(*arguments, **options)


def fit(
    folder: Path, model: L.LightningModule | None = None, *, load: Callable[[int], object] = bool, **options: Any
) -> L.Trainer:
    """Train on one core with our callback and no window."""
    workers, steps = options.pop("workers", 0), options.pop("steps", STEPS)
    callback = forge.ThroughputCallback(overhead=options.pop("overhead", 0.005), window="on-demand")
    given: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False, "limit_val_batches": 0,
        "enable_progress_bar": False, "enable_model_summary": False, "logger": CSVLogger(folder),
        "log_every_n_steps": 10,
    }  # fmt: skip
    ckpt_path = options.pop("ckpt_path", None)
    loader = options.pop("loader", None) or DataLoader(Points(4 * steps, load), 4, num_workers=workers)
    trainer = L.Trainer(**{**given, **options, "callbacks": [callback, *options.get("callbacks", [])]})
    trainer.fit(model or Model(), loader, DataLoader(Points(64), 4), ckpt_path=ckpt_path)
    return trainer


def sleeps(seconds: float = LONG_S) -> Callable[[int], object]:
    """Sleep at a place."""
    return lambda _: time.sleep(seconds)


def at_step(step: int, act: Callable[[], object]) -> Callable[[int], object]:
    """Act in one step."""
    return lambda now: act() if now == step else None


def _in_backward(folder: Path) -> None:
    model = Model()
    model.in_backward = True
    fit(folder, model)


def _in_update(folder: Path) -> None:
    model = Model()
    model.optimizer = SlowSGD
    fit(folder, model)


def _beside_threads(folder: Path) -> None:
    ends = threading.Event()

    def spin() -> None:
        while not ends.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, name="spinning")
    thread.start()
    try:
        fit(folder, Model(forward=lambda _: busy(0.02)), steps=300)
    finally:
        ends.set()
        thread.join()


def _on_a_busy_machine(folder: Path) -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        fit(folder, Model(forward=lambda _: busy(0.01)), steps=400)
    finally:
        for other in others:
            other.kill()


def _recompiles(folder: Path) -> None:
    model = Model()
    compiled = torch.compile(lambda x, n: model.net(x) * n, backend="eager", dynamic=False)
    model.at["forward"] = lambda step: compiled(torch.ones(2, 16), float(step) if step < 30 else 1.0)
    fit(folder, model, steps=60)


def _compiles_slowly(folder: Path) -> None:
    def backend(graph: Any, _: Any) -> Any:
        time.sleep(0.1)
        return graph.forward

    model = Model()
    compiled = torch.compile(lambda x, n: model.net(x) * n, backend=backend, dynamic=False)
    model.at["forward"] = lambda step: compiled(torch.ones(2, 16), float(min(step // 8, 6)))
    fit(folder, model, steps=60)


def _throttled(folder: Path) -> None:
    """Needs the right to make a control group of version 1 with a quota."""
    group = CPU_GROUPS / f"golden-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("50000")
        (group / "cpu.cfs_quota_us").write_text("15000")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        fit(folder, Model(forward=lambda _: busy(0.01)), steps=400)
    finally:
        (CPU_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _logs(folder: Path) -> None:
    model = Model()
    model.at["forward"] = lambda step: model.log("step", float(step))
    fit(folder, model, logger=SlowLogger(folder), log_every_n_steps=1)


class SlowIO(TorchCheckpointIO):
    """Takes time to write a checkpoint."""

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Sleep."""
        time.sleep(0.2)
        super().save_checkpoint(*arguments, **options)


class SlowToBegin(DataLoader[torch.Tensor]):
    """Takes time to make an iterator."""

    def __iter__(self) -> Any:
        """Sleep."""
        time.sleep(0.3)
        return super().__iter__()


def _resumed(folder: Path) -> None:
    saved = folder.parent / "model.ckpt"
    fit(folder.parent / "first", max_steps=100).save_checkpoint(saved)
    fit(folder, ckpt_path=saved, max_epochs=2)


def _many(folder: Path) -> None:
    for number in range(3):
        fit(folder / str(number), steps=60)


def _plain(folder: Path) -> None:
    os.chdir(folder)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in DataLoader(Points(4 * STEPS, lambda _: time.sleep(0.001)), 4):
        with forge.step():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _fabric(folder: Path) -> None:
    from lightning.fabric import Fabric  # noqa: PLC0415

    os.chdir(folder)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(16, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for batch in fabric.setup_dataloaders(DataLoader(Points(4 * STEPS), 4)):
        with forge.step():
            fabric.backward(model(batch).square().mean())
            time.sleep(LONG_S)
            optimizer.step()
            optimizer.zero_grad()


def ranks(folder: Path, late: int | None, world_size: int = 2) -> None:
    """Train with gloo; the forward of one rank takes longer."""
    rank = int(os.environ["LOCAL_RANK"])
    slow = Model(forward=(lambda _: busy(3 * LONG_S)) if rank == late else bool)
    fit(folder, slow, strategy="ddp", devices=world_size, load=lambda _: time.sleep(0.001))


def _hangs(folder: Path) -> None:
    stalls.LEAST_S = 3.0
    fit(folder, Model(forward=at_step(100, lambda: time.sleep(8))))


def _split(folder: Path) -> None:
    fit(folder, Model(forward=lambda _: busy(LONG_S)), load=lambda _: time.sleep(0.002), overhead=None)


def _unsplit(folder: Path) -> None:
    fit(folder, Model(forward=lambda _: busy(LONG_S)), load=lambda _: time.sleep(0.002))


class ByHand(Model):
    """Optimizes by itself, every second batch with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """The mean of the squares."""
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.net(batch).square().mean()
            self.manual_backward(loss)
            return loss

        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


def _with_regions(folder: Path) -> None:
    def nested(_: int) -> None:
        with forge.region("outer"), forge.region("inner"):
            time.sleep(0.001)

    fit(folder, Model(forward=nested))


CASES: dict[str, Callable[[Path], object]] = {
    "healthy": lambda folder: fit(folder, Model(forward=lambda _: busy(LONG_S))),
    "slow_loader": lambda folder: fit(folder, load=lambda _: time.sleep(0.002)),
    "waits_in_forward": lambda folder: fit(folder, Model(forward=sleeps())),
    "waits_in_backward": _in_backward,
    "waits_in_update": _in_update,
    "slow_callback": lambda folder: fit(folder, callbacks=[SlowCallback()]),
    "slow_hook": lambda folder: fit(folder, Model(hook=sleeps())),
    "slow_logger": _logs,
    "slow_checkpoints": lambda folder: fit(
        folder, plugins=[SlowIO()], enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=20, save_top_k=-1)],
    ),
    "slow_to_begin": lambda folder: fit(
        folder, Model(forward=lambda _: busy(LONG_S)), loader=SlowToBegin(Points(80), 4), max_epochs=10,
    ),
    "validates": lambda folder: fit(folder, Model(validation=sleeps()), limit_val_batches=16, val_check_interval=20),
    "saves": lambda folder: fit(
        folder, Model(save=sleeps(0.2)), enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=20, save_top_k=-1)],
    ),
    "sets_up": lambda folder: fit(folder, Model(setup=sleeps(3.0))),
    "sets_up_for_long": lambda folder: fit(folder, Model(setup=sleeps(600.0))),
    "restarts_workers": lambda folder: fit(folder, workers=2, steps=8, max_epochs=20),
    "collects": lambda folder: fit(folder, Model(forward=lambda _: gc.collect()), steps=100),
    "beside_threads": _beside_threads,
    "busy_machine": _on_a_busy_machine,
    "throttled": _throttled,
    "recompiles": _recompiles,
    "compiles_slowly": _compiles_slowly,
    "failed": lambda folder: fit(folder, Model(forward=at_step(150, lambda: 1 / 0))),
    "interrupted": lambda folder: fit(folder, Model(forward=at_step(150, lambda: signal.raise_signal(signal.SIGINT)))),
    "killed": lambda folder: fit(
        folder, Model(forward=lambda step: time.sleep(LONG_S) if step < 900 else os.kill(os.getpid(), 9)), steps=1000,
    ),
    "resumed": _resumed,
    "many_fits": _many,
    "short": lambda folder: fit(folder, steps=8),
    "uneven": lambda folder: fit(
        folder, Model(forward=lambda step: time.sleep(0.15 if step % 37 == 5 else 0.006 if step % 5 == 0 else 0)),
        steps=600,
    ),
    "plain_loop": _plain,
    "fabric": _fabric,
    "two_ranks": lambda folder: ranks(folder, None),
    "late_rank": lambda folder: ranks(folder, 1),
    "four_ranks": lambda folder: ranks(folder, 2, 4),
    "hang": _hangs,
    "accumulates": lambda folder: fit(folder, Model(forward=sleeps(0.001)), accumulate_grad_batches=4),
    "by_hand": lambda folder: fit(folder, ByHand()),
    "with_regions": _with_regions,
    "every_step_split": _split,
    "few_steps_split": _unsplit,
    **{name: lambda folder, make=make: fit(folder, **make()) for name, make in MISTAKES.items()},  # type: ignore[misc]
}  # fmt: skip


def on_gpu(folder: Path, model: L.LightningModule, loader: DataLoader[Any], **options: Any) -> None:
    """Train on a GPU."""
    fit(folder, model, loader=loader, **{"accelerator": "gpu", **options})


def tokens(batches: int = 150, seconds: float = 0.0) -> DataLoader[torch.Tensor]:
    """Batches for a small GPT, each of which may take time to load."""
    return random_tokens(batches, vocabulary=8192, seconds=seconds)


def small_gpt() -> GPT:
    """A step of some 10 ms in bf16 on an H100."""
    return GPT(layers=4, vocabulary=8192)


def rows(batches: int = 300, *shape: int) -> DataLoader[Any]:
    """Batches of float32 in pageable memory, all the same one."""
    batch = torch.randn(shape or (64, 64))
    return DataLoader([batch] * batches, None)  # type: ignore[arg-type]  # a list is a map-style dataset


class Keeps(SmallKernels):
    """Keeps 16 MiB of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Keep a tensor."""
        self.kept.append(torch.empty(2**24, dtype=torch.uint8, device=batch.device))
        return super().training_step(batch, batch_idx)


class ReadsValues(SmallKernels):
    """Reads a value after each layer."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Wait for the GPU in each layer."""
        for layer in self.layers:
            batch = layer(batch)
            batch.sum().item()
        return batch.square().mean()


class OneTensorAtATime(SmallKernels):
    """Updates each parameter by itself."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A loop over the parameters."""
        return torch.optim.Adam(self.parameters(), foreach=False)


class Late(SmallKernels):
    """The host of rank 1 is late in each step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Be late."""
        if self.global_rank == 1:
            busy(3 * LONG_S)
        return super().training_step(batch, batch_idx)


class Recompiles(SmallKernels):
    """Compiles a function anew for each of its first 30 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(lambda x, n: x.square() * n, backend="eager", dynamic=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Call it with another number each time."""
        self.compiled(batch, float(batch_idx) if batch_idx < 30 else 1.0)
        return super().training_step(batch, batch_idx)


def _memory_full(folder: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.mem_get_info()[1])
    on_gpu(folder, Keeps(), rows(5000))


GPU_CASES: dict[str, Callable[[Path], object]] = {
    "gpu_bound": lambda folder: on_gpu(folder, small_gpt(), tokens(), precision="bf16-mixed"),
    "gpu_bound_float32": lambda folder: on_gpu(folder, small_gpt(), tokens(80)),
    "gpu_launch_bound": lambda folder: on_gpu(folder, SmallKernels(), rows()),
    "gpu_loader": lambda folder: on_gpu(folder, small_gpt(), tokens(100, 0.03), precision="bf16-mixed"),
    "gpu_sync": lambda folder: on_gpu(folder, ReadsValues(), rows()),
    "gpu_transfer": lambda folder: on_gpu(folder, SmallKernels(), rows(100, 2**18, 64)),
    "gpu_update": lambda folder: on_gpu(folder, OneTensorAtATime(), rows()),
    "gpu_recompiles": lambda folder: on_gpu(folder, Recompiles(), rows(120)),
    "gpu_memory_full": _memory_full,
    "gpu_two_ranks": lambda folder: on_gpu(
        folder, small_gpt(), tokens(), precision="bf16-mixed", strategy="ddp", devices=2,
    ),
    "gpu_late_rank": lambda folder: on_gpu(folder, Late(), rows(), strategy="ddp", devices=2),
}  # fmt: skip
BOUNDARIES = (
    *("healthy", "slow_loader", "validates", "saves", "restarts_workers", "uneven", "failed", "plain_loop"),
    *("late_rank", "every_step_split", "accumulates", "by_hand", "with_regions"),
)
RANKS = {"two_ranks": 2, "late_rank": 2, "four_ranks": 4, "gpu_two_ranks": 2, "gpu_late_rank": 2}


def record(case: str, *, of_boundaries: bool) -> None:
    """Run a case in processes of its own, and keep its record, or its boundaries on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, case)
        target.mkdir()
        world = RANKS.get(case, 1)
        kept = str(boundaries.FOLDER / f"{case}.jsonl.gz") if of_boundaries else ""
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.golden.planted", "--child", case, str(target), "" if rank else kept],
                env={**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), **_world(world, rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        errors = [process.communicate(timeout=900)[1] for process in started]
        if of_boundaries:
            if not Path(kept).is_file():
                raise SystemExit(f"{case} left no boundaries:\n{errors[0][-2000:]}")
            return
        shutil.rmtree(RUNS / case, ignore_errors=True)
        found = sorted(target.rglob("forge_record"))
        if not found:
            raise SystemExit(f"{case} left no record:\n{errors[0][-2000:]}")
        for number, path in enumerate(found):
            copy = RUNS / case / (str(number) if len(found) > 1 else "") / "forge_record"
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.stacks.txt"))
            for file in copy.iterdir():
                file.write_text(file.read_text().replace(str(CHECKOUT), "/checkout"))


_PORT = free_port()


def _world(size: int, rank: int) -> dict[str, str]:
    if size == 1:
        return {}
    return {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_PORT),
    }


def main() -> None:
    """Record the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--gpu", action="store_true", help="the cases that need a GPU, or two")
    parser.add_argument("--boundaries", action="store_true", help="keep the raw boundaries instead of the record")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "FOLDER", "BOUNDARIES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        case, folder, path = arguments.child
        with boundaries.kept(Path(path), time.perf_counter_ns) if path else nullcontext():
            (CASES | GPU_CASES)[case](Path(folder))
        return
    for case in arguments.cases or (BOUNDARIES if arguments.boundaries else GPU_CASES if arguments.gpu else CASES):
        sys.stdout.write(f"{case}\n")
        record(case, of_boundaries=arguments.boundaries)


if __name__ == "__main__":
    main()

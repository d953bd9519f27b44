"""Record small training runs with one planted problem each, as traces for the tests of the analysis.

    python -m tests.scripts.planted OUT                       # every case that this machine's GPUs allow
    python -m tests.scripts.planted OUT --cases two           # `one`, `two` (devices), `all`, or names: a,b,c
    python -m tests.scripts.planted OUT --device cpu          # the same code in tiny sizes, to try the script itself

Each case runs in a process of its own, so that its live steps come before the process has ever loaded the profiler's
hooks: first a run with `ThroughputCallback` alone (`live.json`), then the same again with `ForgeProfilerCallback`
(`rankN.trace.json.gz`). One line per case says what was seen; a case that fails leaves `log.txt`.
"""

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from benchmarks.workloads import GPT, Block, SmallKernels, random_tokens
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import REGIONS

ROOT = Path(__file__).parents[2]
START_STEP = 12  # by then the batches that a loader with workers had ready at the start are used up
LIVE_WARMUP, LIVE_STEPS = 12, 25
CASE_TIMEOUT_S = 150
LARGE_KB = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """What one fit of a case takes: module and loaders for `Trainer.fit`, options for the Trainer and the callback."""

    module: L.LightningModule
    loader: DataLoader
    val_loader: DataLoader | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    recorded_steps: int = 3
    with_stack: bool = False


Build = Callable[[int, bool], Plan]  # (batches, tiny)
CASES: dict[str, tuple[int, Build]] = {}  # name: devices, what to run


def case(devices: int = 1) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        CASES[build.__name__] = devices, build
        return build

    return register


def bf16(tiny: bool) -> dict[str, Any]:
    return {} if tiny else {"precision": "bf16-true"}


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def held(batches: int, *shape: int, pin: bool = True, dtype: torch.dtype = torch.float32) -> DataLoader:
    """A loader of batches that are in memory already: two tensors, taken in turn."""
    tensors = [torch.ones(*shape, dtype=dtype) for _ in range(2)]
    if pin:
        tensors = [pinned(tensor) for tensor in tensors]
    return DataLoader([tensors[i % 2] for i in range(batches)], batch_size=None)


def activations(batches: int, rows: int, width: int, *, tiny: bool) -> DataLoader:
    """Held batches for an `MLP`, in the precision it trains in: Lightning would convert others on the host."""
    return held(batches, rows, width, dtype=torch.float32 if tiny else torch.bfloat16)


def gpt(tiny: bool, layers: int = 4, width: int = 768, length: int = 1024, kind: type[GPT] = GPT) -> GPT:
    return kind(1, 64, 16, 32) if tiny else kind(layers, width, length, 8192)


def tokens(batches: int, tiny: bool, batch_size: int = 16, length: int = 1024, seconds: float = 0.0) -> DataLoader:
    if tiny:
        batch_size, length = 2, 16
    vocabulary = 32 if tiny else 8192
    return random_tokens(batches, batch_size=batch_size, length=length, vocabulary=vocabulary, seconds=seconds)


class MLP(L.LightningModule):
    """Equal layers, fused AdamW: the healthy base of the cases below."""

    def __init__(self, layers: int, width: int, inputs: int | None = None) -> None:
        super().__init__()
        sizes = [inputs or width] + [width] * layers
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.device.type == "cuda")


# -- one GPU -------------------------------------------------------------------------------------------------------


class LoopedAdam(MLP):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, foreach=False, fused=False)


@case()
def slow_optimizer(batches: int, tiny: bool) -> Plan:
    """Some ten launches for each of 48 parameters."""
    rows, layers, width = (8, 4, 16) if tiny else (8192, 24, 1024)
    return Plan(LoopedAdam(layers, width), activations(batches, rows, width, tiny=tiny), trainer=bf16(tiny))


class EmptiesCache(MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.cuda.empty_cache()
        return super().training_step(batch, batch_idx)


@case()
def allocator_churn(batches: int, tiny: bool) -> Plan:
    """Every activation is a cudaMalloc and a cudaFree again in each step."""
    rows, layers, width = (8, 2, 16) if tiny else (8192, 24, 1024)
    return Plan(EmptiesCache(layers, width), activations(batches, rows, width, tiny=tiny), trainer=bf16(tiny))


@case()
def pageable_copies(batches: int, tiny: bool) -> Plan:
    """134 MB a step from memory that is not pinned: the host waits for each copy."""
    rows, inputs, width = (8, 64, 16) if tiny else (2048, 16384, 2048)
    return Plan(MLP(2, width, inputs), held(batches, rows, inputs, pin=False))


@case()
def pinned_copies(batches: int, tiny: bool) -> Plan:
    """537 MB a step from pinned memory: the host goes on, the GPU still waits for the data."""
    rows, inputs, width = (8, 64, 16) if tiny else (4096, 32768, 768)
    return Plan(MLP(2, width, inputs), held(batches, rows, inputs))


class HandWrittenGELU(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(64, 1)  # big here, small on the way to the GPU
        for layer in self.layers:
            x = layer(x)
            x = 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        return x


@case()
def elementwise(batches: int, tiny: bool) -> Plan:
    """Eight passes over 134 MB where one fused kernel would do."""
    rows, layers, width = (2, 2, 16) if tiny else (1024, 4, 1024)
    return Plan(HandWrittenGELU(layers, width), activations(batches, rows, width, tiny=tiny), trainer=bf16(tiny))


class LooksAtEverything(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.largest, self.means, self.found = [], [], []
        for layer in self.layers:
            x = layer(x).relu()
            self.largest.append(x.detach().max().item())
            self.means.append(x.detach().mean().cpu())
            self.found.append(x.detach()[0].nonzero())
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses = [loss.item() for _ in range(5)]
        return loss


@case()
def sync_item(batches: int, tiny: bool) -> Plan:
    """Three synchronizations a layer, by `.item()`, `.cpu()` and `nonzero()`."""
    rows, layers, width = (8, 2, 16) if tiny else (8192, 16, 1024)
    return Plan(LooksAtEverything(layers, width), activations(batches, rows, width, tiny=tiny), trainer=bf16(tiny))


@case()
def sync_stack(batches: int, tiny: bool) -> Plan:
    """The same with Python stacks, which name the lines."""
    rows, layers, width = (8, 2, 16) if tiny else (8192, 4, 1024)
    module = LooksAtEverything(layers, width)
    loader = activations(batches, rows, width, tiny=tiny)
    return Plan(module, loader, trainer=bf16(tiny), recorded_steps=2, with_stack=True)


class TokenRows(Dataset[Tensor]):
    """Rows of tokens, `seconds` each."""

    def __init__(self, rows: int, seconds: float, *, tiny: bool) -> None:
        self.tokens = torch.randint(0, 32 if tiny else 8192, (rows, 17 if tiny else 1025))
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.tokens[row]


def worker_tokens(batches: int, tiny: bool, *, workers: int, seconds: float = 0.0) -> DataLoader:
    rows = TokenRows(16 * batches, seconds, tiny=tiny)
    return DataLoader(rows, batch_size=16, num_workers=workers, pin_memory=torch.cuda.is_available())


@case()
def input_workers(batches: int, tiny: bool) -> Plan:
    """Two workers that make a batch every 24 ms for a step of about 8."""
    loader = worker_tokens(batches, tiny, workers=2, seconds=0.0005 if tiny else 0.003)
    return Plan(gpt(tiny, layers=3), loader, trainer=bf16(tiny))


@case()
def input_hidden(batches: int, tiny: bool) -> Plan:
    """A trap: the host waits 15 ms a step for the loader, behind some 45 ms of queued GPU work. Compute-bound."""
    loader = tokens(batches, tiny, batch_size=32, seconds=0.001 if tiny else 0.015)
    return Plan(gpt(tiny, layers=6, width=1024), loader, trainer=bf16(tiny))


@case()
def launch_tiny(batches: int, tiny: bool) -> Plan:
    """Kernels of two microseconds."""
    return Plan(SmallKernels(4 if tiny else 48), held(batches, 8, 64))


class Graphed(SmallKernels):
    def on_train_start(self) -> None:
        if self.device.type == "cuda":
            sample = torch.ones(8, 64, device=self.device)
            self.layers = torch.cuda.make_graphed_callables(self.layers, (sample,))


@case()
def cuda_graph(batches: int, tiny: bool) -> Plan:
    """The tiny kernels again, deeper, forward and backward a CUDA graph each."""
    return Plan(Graphed(4 if tiny else 128), held(batches, 8, 64))


class FlashGPT(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.device.type != "cuda":
            return super().training_step(batch, batch_idx)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().training_step(batch, batch_idx)


@case()
def attention_long(batches: int, tiny: bool) -> Plan:
    """One sequence of 16384 tokens: attention is most of it."""
    module = gpt(tiny, layers=2, width=1024, length=16384, kind=FlashGPT)
    return Plan(module, tokens(batches, tiny, batch_size=1, length=16384), trainer=bf16(tiny))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(inner))).relu()


class ResNet(MLP):
    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__(1, channels)
        stem = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.trunk = nn.Sequential(stem, *(Residual(channels) for _ in range(blocks)))
        self.trunk.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x.contiguous(memory_format=torch.channels_last))
        return super().forward(x.mean((2, 3)))


@case()
def conv_net(batches: int, tiny: bool) -> Plan:
    """Residual blocks of convolutions and batch norms."""
    shape = (2, 3, 16, 16) if tiny else (64, 3, 128, 128)
    loader = held(batches, *shape, dtype=torch.float32 if tiny else torch.bfloat16)
    return Plan(ResNet(*((1, 8) if tiny else (5, 128))), loader, trainer={**bf16(tiny), "benchmark": True})


class Validated(GPT):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


@case()
def validation_inside(batches: int, tiny: bool) -> Plan:
    """Validation and a checkpoint after every other step, which are no part of a step."""
    often = {
        "val_check_interval": 2,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(every_n_train_steps=2)],
    }
    module = gpt(tiny, layers=2, kind=Validated)
    return Plan(module, tokens(batches, tiny), tokens(4, tiny), trainer={**bf16(tiny), **often}, recorded_steps=4)


@case()
def accumulation(batches: int, tiny: bool) -> Plan:
    """Two batches to an optimizer step."""
    options = {**bf16(tiny), "accumulate_grad_batches": 2}
    return Plan(gpt(tiny), tokens(batches, tiny), trainer=options, recorded_steps=4)


@case()
def healthy_small_gaps(batches: int, tiny: bool) -> Plan:
    """As it should be: bf16, fused AdamW, workers that keep up, pinned memory."""
    return Plan(gpt(tiny, layers=6, width=1024), worker_tokens(batches, tiny, workers=4), trainer=bf16(tiny))


@case()
def compiled(batches: int, tiny: bool) -> Plan:
    """The same with compiled blocks: Triton kernels."""
    module = gpt(tiny, layers=3, width=1024)
    module.blocks.compile(backend="eager" if tiny else "inductor")
    return Plan(module, tokens(batches, tiny), trainer=bf16(tiny))


# -- two GPUs ------------------------------------------------------------------------------------------------------


class SlowGPU(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            size = 8192 if self.device.type == "cuda" else 64
            extra = torch.ones(size, size, device=self.device, dtype=torch.bfloat16)
            for _ in range(8):
                extra @ extra
        return super().training_step(batch, batch_idx)


@case(devices=2)
def slow_rank_gpu(batches: int, tiny: bool) -> Plan:
    """Rank 1 has some 11 ms more to compute."""
    return Plan(gpt(tiny, kind=SlowGPU), tokens(batches, tiny), trainer={**bf16(tiny), "strategy": "ddp"})


class SlowHost(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            end = time.perf_counter() + 0.015
            while time.perf_counter() < end:
                pass
        return super().training_step(batch, batch_idx)


@case(devices=2)
def slow_rank_host(batches: int, tiny: bool) -> Plan:
    """Rank 1 is busy in Python for 15 ms a step."""
    return Plan(gpt(tiny, kind=SlowHost), tokens(batches, tiny), trainer={**bf16(tiny), "strategy": "ddp"})


@case(devices=2)
def ddp_big_grads(batches: int, tiny: bool) -> Plan:
    """1.3 GB of gradients to exchange for a batch of 32."""
    layers, width = (2, 16) if tiny else (5, 8192)
    return Plan(MLP(layers, width), held(batches, 32, width), trainer={"strategy": "ddp"})


@case(devices=2)
def fsdp(batches: int, tiny: bool) -> Plan:
    """A healthy sharded GPT; Lightning has FSDP for GPUs alone, so that a dry run takes DDP."""
    strategy = "ddp" if tiny else FSDPStrategy(auto_wrap_policy={Block})
    module = gpt(tiny, layers=6, width=1024)
    return Plan(module, tokens(batches, tiny), trainer={**bf16(tiny), "strategy": strategy})


# -- one case, in its own process ----------------------------------------------------------------------------------


def fit(name: str, device: str, scratch: str, steps: int, measure: Callable[[Plan], L.Callback]) -> L.Callback:
    """Train `steps` steps of a case with the callback that `measure` makes for it."""
    devices, build = CASES[name]
    L.seed_everything(0, verbose=False)
    plan = build(steps, device == "cpu")
    callback = measure(plan)
    options = {
        "accelerator": "cpu" if device == "cpu" else "gpu",
        "devices": devices,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": scratch,
        **plan.trainer,
    }
    options["callbacks"] = [*options.get("callbacks", []), callback]
    L.Trainer(**options).fit(plan.module, plan.loader, plan.val_loader)
    return callback


def run_case(name: str, device: str, folder: Path, scratch: str) -> None:
    """Live first, then recorded; every rank comes through here and puts its own trace into the folder."""
    live = fit(name, device, scratch, LIVE_WARMUP + LIVE_STEPS, lambda _: ThroughputCallback(LIVE_WARMUP))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        (folder / "live.json").write_text(json.dumps(live.summary(), indent=1) + "\n")
    forge = fit(
        name,
        device,
        scratch,
        START_STEP + 6,
        lambda plan: ForgeProfilerCallback(
            START_STEP, START_STEP + plan.recorded_steps, with_stack=plan.with_stack, tensorboard=False
        ),
    )
    report = forge.trace_report()
    if report is None or report.path is None:
        raise RuntimeError(f"no trace: {report}")
    shutil.copyfile(report.path, folder / report.path.name)


# -- all cases -----------------------------------------------------------------------------------------------------


def rough_times(path: Path) -> str:
    """Per recorded step, from the first step's start to the end of everything; not the analysis, only to compare."""
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if "dur" in event]
    steps = [e for e in events if e["name"].startswith("ProfilerStep#") and e.get("cat") == "user_annotation"]
    gpu = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}
    )
    busy, reached = 0.0, 0.0
    for start, end in gpu:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    last = max(reached, *(step["ts"] + step["dur"] for step in steps))
    step_ms = (last - min(step["ts"] for step in steps)) / len(steps) / 1e3
    return f"{step_ms:.2f} (GPU busy {busy / len(steps) / 1e3:.2f}, {len(gpu) / len(steps):.0f} GPU events)"


def seen(folder: Path, devices: int) -> str:
    """What a case left in its folder, on one line."""
    live = json.loads((folder / "live.json").read_text())
    parts = " ".join(f"{name} {live[f'time/{name}_ms']:.2f}" for name in REGIONS)
    line = f"live {live['time/step_ms']:.2f} ms [{parts}]"
    for rank in range(devices):
        path = folder / f"rank{rank}.trace.json.gz"
        kilobytes = path.stat().st_size / 1e3
        line += f" | recorded {rough_times(path)} {kilobytes:.0f} KB{' LARGE' * (kilobytes > LARGE_KB)}"
    return line


def run_apart(name: str, device: str, out: Path) -> str:
    """Run a case in a process of its own."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.scripts.planted", out, "--cases", name, "--device", device, "--in", scratch],
            cwd=ROOT,
            env={**os.environ, "TQDM_DISABLE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that it can be ended with rank 1 and the loader's workers
        )
        try:
            output, _ = process.communicate(timeout=CASE_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
    problem = f"exit code {process.returncode}" if process.returncode else ""
    if not problem and not all((folder / f"rank{rank}.trace.json.gz").exists() for rank in range(CASES[name][0])):
        problem = "a rank has no trace"
    if problem:
        (folder / "log.txt").write_text(output)
        last = (output.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{problem}: {last[:300]}")
    return seen(folder, CASES[name][0])


def chosen(cases: str, device: str) -> list[str]:
    """The names that `--cases` stands for."""
    available = 2 if device == "cpu" else torch.cuda.device_count()
    groups = {
        "one": [name for name, (devices, _) in CASES.items() if devices == 1],
        "two": [name for name, (devices, _) in CASES.items() if devices == 2],
        "all": [name for name, (devices, _) in CASES.items() if devices <= available],
    }
    names = groups.get(cases) or cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"unknown cases {unknown}; there are {', '.join(CASES)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description="Record training runs with one planted problem each.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", default="all", help="names, or one, two, all (default)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--in", dest="scratch", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    out = args.out.resolve()
    if args.scratch:
        run_case(args.cases, args.device, out / args.cases, args.scratch)
        return
    for name in chosen(args.cases, args.device):
        began = time.perf_counter()
        try:
            line = run_apart(name, args.device, out)
        except Exception as exc:
            line = f"FAILED {type(exc).__name__}: {exc}"
        print(f"{name}: {line} ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

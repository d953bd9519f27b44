"""Whether a run is as fast after a recorded window as before it.

Each contender trains in a fresh process, in turns: without a callback, with a three-step window, with
TEARDOWN_CUPTI=0, which leaves CUPTI attached, and with TEARDOWN_CUPTI=1. Compared are the medians of the settled steps
before the window and of those after it, but for the first ten. The window is analysed by a child process while these
steps run, as users have it; nothing is left out for that. A second, short fit in the same process records a second
window: it has to hold kernels, too. `graph` replays a CUDA graph in each step and checks its result; `ddp` needs two
GPUs. Checkpoints are off.

    python -m benchmarks.after_window
    python -m benchmarks.after_window --pairs 3 --workloads small,graph --contenders none,window
    python -m benchmarks.after_window --quick    # small models and few steps, for a machine without a GPU
"""

import argparse
import gzip
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks import fresh
from benchmarks.workloads import GPT, SmallKernels, random_tokens, trainer
from lightning_forge_profiling import ForgeProfilerCallback

WINDOW, SKIPPED = 3, 10
RANKS = 2
CONTENDERS: dict[str, tuple[str, str | None]] = {
    "none": ("no window", None),
    "window": ("window", None),
    "attached": ("CUPTI left attached", "0"),
    "teardown": ("TEARDOWN_CUPTI=1", "1"),
}
"""By key, the name in the table and the value of TEARDOWN_CUPTI."""


class Replaying(SmallKernels):
    """Captures a CUDA graph of small matmuls in its first step, and replays it in each."""

    MATMULS = 32

    def __init__(self) -> None:
        super().__init__()
        self.graph: torch.cuda.CUDAGraph | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Replay, then train as usual."""
        with torch.no_grad():
            if self.graph is None:
                self.graph = self._captured()
            self.static.copy_(batch)  # (1, width) to (width, width)
            self.graph.replay()
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        """The last replay came to what the same calls come to."""
        with torch.no_grad():
            torch.testing.assert_close(self.replayed, self._chain(), rtol=1e-3, atol=1e-4)

    def _chain(self) -> torch.Tensor:
        product = self.static
        for _ in range(self.MATMULS):
            product = product @ self.matrix
        return product

    def _captured(self) -> torch.cuda.CUDAGraph:
        matrix = torch.linalg.qr(torch.randn(64, 64)).Q  # orthogonal: products keep their size
        self.matrix, self.static = matrix.to(self.device), torch.randn(64, 64, device=self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._chain()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.replayed = self._chain()
        return graph


def compiled() -> L.LightningModule:
    """The launch-bound loop, its layers compiled into CUDA graphs."""
    model = SmallKernels()
    # not .compile(): dynamo passes over the frames of torch.nn that would call the layers
    model.layers = torch.compile(model.layers, mode="reduce-overhead")
    return model


@dataclass(frozen=True, slots=True)
class Workload:
    """What to train: so many steps before the window, of which the last but the first `cold` count, and after it."""

    model: Callable[[], L.LightningModule]
    before: int = 400
    after: int = 500
    cold: int = 100
    gpus: int = 0
    options: dict[str, Any] = field(default_factory=dict)


WORKLOADS = {
    "small": Workload(SmallKernels),
    "gpt": Workload(GPT, 30, 40, 10, options={"precision": "bf16-true"}),
    "compiled": Workload(compiled),
    "graph": Workload(Replaying, gpus=1),
    "ddp": Workload(SmallKernels, gpus=RANKS, options={"devices": RANKS, "strategy": "ddp"}),
}


def sized(name: str, *, quick: bool) -> Workload:
    """The workload, few steps of it with `quick`."""
    workload = WORKLOADS[name]
    if not quick:
        return workload
    model = partial(GPT, layers=2, width=128, length=64, vocabulary=256) if name == "gpt" else workload.model
    return Workload(model, 32, 32, 10, options={**workload.options, "precision": "32-true"})


def batches(name: str, steps: int, *, quick: bool) -> DataLoader[Any]:
    """More batches than steps, so that no epoch ends."""
    if name != "gpt":
        return DataLoader(torch.randn(steps + 10, 1, 64), batch_size=None)
    return random_tokens(steps + 10, **({"batch_size": 4, "length": 64, "vocabulary": 256} if quick else {}))


def kernels(callback: ForgeProfilerCallback) -> int:
    """Kernel events in the trace of rank 0; -1 without a trace."""
    report = callback.trace_report()
    if report is None or report.path is None:
        return -1
    return gzip.decompress(report.path.read_bytes()).count(b'"cat": "kernel"')


def train(name: str, contender: str, folder: str, *, quick: bool) -> None:
    """Train as this contender, and report."""
    workload = sized(name, quick=quick)
    module = fresh.on_device(workload.model) if name == "gpt" else workload.model()
    first, last = workload.before, workload.before + WINDOW
    steps = last + workload.after
    ends, ours = fresh.StepEnds(), ForgeProfilerCallback(first, last, trace_dir=folder)

    def fit(steps: int, *callbacks: L.Callback) -> L.Trainer:
        options = {"enable_checkpointing": False, "use_distributed_sampler": False, **workload.options}
        made = trainer(folder, steps, callbacks=list(callbacks), **options)
        made.fit(module, batches(name, steps, quick=quick))
        return made

    run = fit(steps, ends, *([] if contender == "none" else [ours]))
    result: dict[str, Any] = {
        "before_ms": ends.median_ms(workload.cold, first - 1),  # the last is the profiler's warm-up
        "after_ms": ends.median_ms(last + SKIPPED, steps),
        "pace": ends.pace_ms(last + SKIPPED, steps) / ends.pace_ms(workload.cold, first - 1),
    }
    if contender != "none":
        again = ForgeProfilerCallback(5, 5 + WINDOW, trace_dir=folder, analyze=False, tensorboard=False)
        fit(12, again)
        analysis = ours.analysis()
        effect = analysis.run.timing.window_effect if analysis is not None and analysis.run is not None else None
        result["change_pct"] = None if effect is None else effect.change_pct
        result["kernels"] = [kernels(ours), kernels(again)]
        reports = [report for callback in (ours, again) if (report := callback.trace_report()) is not None]
        result["notes"] = [note for report in reports for note in (report.attached, report.message) if note]
    if run.is_global_zero:
        fresh.answer(**result)


def row(mine: Sequence[fresh.Outcome], control: Sequence[fresh.Outcome]) -> list[str]:
    """The cells of a contender."""
    found = fresh.results(mine)
    effects = [result["change_pct"] for result in found if result.get("change_pct") is not None]
    counts = [result["kernels"] for result in found if "kernels" in result]
    recorded = [min(count[window] for count in counts) for window in (0, 1)] if counts else []
    lost = torch.cuda.is_available() and min(recorded, default=1) < 1
    return [
        fresh.middle([result["before_ms"] for result in found]),
        fresh.middle([result["after_ms"] for result in found]),
        fresh.spread([slowdown(result) for result in found]),
        fresh.spread([result["pace"] for result in found]),
        fresh.spread([slowdown(result) / result["pace"] for result in found]),
        fresh.spread(fresh.paired(mine, control, lambda m, c: slowdown(m) / slowdown(c))),
        f"{statistics.median(effects):+.1f} %" if effects else "-",
        f"{', '.join(map(str, recorded)) or '-'}{' (missing!)' if lost else ''}",
    ]


def slowdown(result: dict[str, Any]) -> float:
    """A step after the window in steps before it."""
    return result["after_ms"] / result["before_ms"]


def measure(name: str, contenders: Sequence[str], folder: str, args: argparse.Namespace) -> bool:
    """Run the contenders on one workload, print the table and say whether all ended well."""
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m") if name == "ddp" else ()
    children = {}
    for key in contenders:
        contender, teardown = CONTENDERS[key]
        quick = ["--quick"] if args.quick else []
        arguments = ("benchmarks.after_window", "--child", name, key, "--folder", folder, *quick)
        children[contender] = fresh.Child(fresh.module(*launcher, *arguments), {"TEARDOWN_CUPTI": teardown})
    outcomes = fresh.in_turns(children, args.pairs)
    control = outcomes[CONTENDERS["none"][0]]
    fresh.print_table(
        f"{name}: {args.pairs} turns, medians (min to max)",
        (
            name,
            "before ms",
            "after ms",
            "after / before",
            "host's pace",
            "by that",
            "against the control",
            "reported",
            "kernels in both windows",
        ),
        {contender: row(turns, control) for contender, turns in outcomes.items()},
        outcomes,
    )
    for contender, turns in outcomes.items():
        for note in sorted({note for result in fresh.results(turns) for note in result.get("notes", ())}):
            print(f"{contender}: {note}")
    return not fresh.failed(outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each workload; 1 where a child ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="turns (5)")
    parser.add_argument("--workloads", type=fresh.keys(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument(
        "--contenders", type=fresh.keys(CONTENDERS), default=list(CONTENDERS), help=", ".join(CONTENDERS)
    )
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        workload, contender = args.child
        train(workload, contender, args.folder, quick=args.quick)
        return 0
    well = True
    for name in args.workloads:
        needed, found = WORKLOADS[name].gpus, torch.cuda.device_count()
        if found < needed:
            print(f"\n{name}: skipped, it needs {needed} GPU{'s' if needed > 1 else ''} and this machine has {found}")
            continue
        contenders = [key for key in CONTENDERS if key == "none" or key in args.contenders]
        with tempfile.TemporaryDirectory() as folder:
            well &= measure(name, contenders, folder, args)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

"""Train a planted problem and the same without it: the before and after of docs/findings, as a table.

    python -m docs.measure_fixes        # needs one CUDA device

Each run has `ThroughputCallback` alone, so no step is slowed by recording. Runs come in turns, three each; a row has
the median of the three means.
"""

# ruff: noqa: INP001, T201  (a script, in no package; its output is the table)

import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import lightning as L
import torch
from torch.nn import functional

from lightning_forge_profiling import ThroughputCallback
from tests.scripts import planted

WARMUP, STEPS, ROUNDS = 15, 40, 3

Setup = tuple[L.LightningModule, object, dict[str, object]]
"""A module, its loader, options for the Trainer."""

BF16 = {"precision": "bf16-true"}
activations, held, tokens = planted.activations, planted.held, planted.worker_tokens
BATCHES = WARMUP + STEPS


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


def _mlp(kind: type[L.LightningModule], layers: int) -> Setup:
    return kind(layers, 1024), activations(BATCHES, 8192, 1024, tiny=False), BF16


def _gelu(kind: type[L.LightningModule]) -> Setup:
    return kind(4, 1024), activations(BATCHES, 1024, 1024, tiny=False), BF16


def _copies(*, pin: bool) -> Setup:
    return planted.MLP(2, 2048, 16384), held(BATCHES, 2048, 16384, pin=pin), {}


def _loader(workers: int) -> Setup:
    return planted.gpt(tiny=False, layers=3), tokens(BATCHES, tiny=False, workers=workers, seconds=0.002), BF16


def _small(kind: type[L.LightningModule]) -> Setup:
    return kind(48), held(BATCHES, 8, 64), {}


def _gpt(precision: str) -> Setup:
    return planted.gpt(tiny=False), planted.tokens(BATCHES, tiny=False), {"precision": precision}


PAIRS: dict[str, tuple[Callable[[], Setup], Callable[[], Setup]]] = {
    "input-bound": (partial(_loader, 0), partial(_loader, 8)),
    "transfer-bound": (partial(_copies, pin=False), partial(_copies, pin=True)),
    "sync-bound": (partial(_mlp, planted.LooksAtEverything, 16), partial(_mlp, planted.MLP, 16)),
    "allocator-churn": (partial(_mlp, planted.EmptiesCache, 24), partial(_mlp, planted.MLP, 24)),
    "slow-optimizer": (partial(_mlp, planted.LoopedAdam, 24), partial(_mlp, FusedAdam, 24)),
    "launch-bound": (partial(_small, planted.SmallKernels), partial(_small, planted.Graphed)),
    "compute-bound": (partial(_gpt, "32-true"), partial(_gpt, "bf16-mixed")),
    "memory-bandwidth-bound": (partial(_gelu, planted.HandWrittenGELU), partial(_gelu, FusedGELU)),
}


def train(setup: Callable[[], Setup]) -> tuple[dict[str, float], str]:
    """What the callback measured of one run, and its verdict."""
    L.seed_everything(0, verbose=False)
    module, loader, options = setup()
    callback = ThroughputCallback(WARMUP)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = L.Trainer(
            max_steps=BATCHES,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[callback],
            **options,
        )
        trainer.fit(module, loader)
    analysis = callback.analysis()
    verdict = "" if analysis is None else analysis.verdict
    del module, loader, trainer
    torch.cuda.empty_cache()
    return callback.summary(), verdict


def main() -> None:
    """Print a row for each run."""
    print("| code | run | step ms | data | transfer | forward | backward | optimizer | verdict of the run |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    names = ("step", "data", "transfer", "forward", "backward", "optimizer")
    for code, setups in PAIRS.items():
        runs: dict[str, list[tuple[dict[str, float], str]]] = {"before": [], "after": []}
        for _ in range(ROUNDS):
            for when, setup in zip(runs, setups, strict=True):
                runs[when].append(train(setup))
        for when, done in runs.items():
            means = (statistics.median(summary[f"time/{name}_ms"] for summary, _ in done) for name in names)
            verdicts = ", ".join(sorted({verdict for _, verdict in done}))
            print(f"| {code} | {when} | {' | '.join(f'{ms:.2f}' for ms in means)} | {verdicts} |", flush=True)


if __name__ == "__main__":
    main()

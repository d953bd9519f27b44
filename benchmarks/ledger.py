"""The ledger of a GPT run with validation, checkpoints and a logger: whether it closes, and what having it costs.

Contenders train in fresh processes, in turns: without a callback and with `ThroughputCallback`, which keeps the ledger
beside its other work. Compared are the wall time of the fit and the median step; then the parts of the last turn's
ledger on rank 0, and the remainder that no part explains on every rank of every turn.

    python -m benchmarks.ledger
    python -m benchmarks.ledger --devices 2 --turns 1
    python -m benchmarks.ledger --quick    # a small model and few steps, for a machine without a GPU
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from benchmarks import fresh
from benchmarks.workloads import GPT, random_tokens, trainer
from lightning_forge_profiling import ThroughputCallback

CONTENDERS = ("no callback", "ThroughputCallback")
STEPS, QUICK_STEPS = 400, 60
VALIDATION_BATCHES = 10
SMALL = {"length": 64, "vocabulary": 256}


class ValidatedGPT(GPT):
    """Validates as it trains."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


def train(contender: str, folder: str, devices: int, *, quick: bool) -> None:
    """Train as this contender, and report from every rank."""
    steps = QUICK_STEPS if quick else STEPS
    shape = {"batch_size": 4, **SMALL} if quick else {}
    model = ValidatedGPT(layers=2, width=128, **SMALL) if quick else fresh.on_device(ValidatedGPT)
    ends, ours = fresh.StepEnds(), ThroughputCallback()
    run = trainer(
        folder,
        steps,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="32-true" if quick else "bf16-true",
        callbacks=[
            ends,
            ModelCheckpoint(every_n_train_steps=steps // 4),
            *([ours] if contender != "no callback" else []),
        ],
        logger=CSVLogger(folder),
        log_every_n_steps=10,
        val_check_interval=steps // 4,
        limit_val_batches=VALIDATION_BATCHES,
        use_distributed_sampler=False,
    )
    began = time.perf_counter()
    run.fit(model, random_tokens(steps // 2, **shape), random_tokens(VALIDATION_BATCHES, **shape))
    fit_s, ledger = time.perf_counter() - began, ours.ledger()
    if ledger is not None:
        of_rank = {"wall_s": ledger.wall_s, "parts": dict(ledger.parts), "unexplained_s": ledger.unexplained_s}
        Path(folder, f"rank{run.global_rank}.json").write_text(json.dumps(of_rank))
    run.strategy.barrier()
    if run.is_global_zero:
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
        fresh.answer(fit_s=fit_s, step_ms=ends.median_ms(20, steps), ranks=ranks)


def print_ledger(ranks: Sequence[dict[str, Any]]) -> None:
    """Print rank 0's ledger, and each rank's sum."""
    wall_s, parts = ranks[0]["wall_s"], ranks[0]["parts"]
    print("\n| part | s | of the wall time |\n| --- | ---: | ---: |")
    for part, seconds in parts.items():
        print(f"| `{part}` | {seconds:.3f} | {100 * seconds / wall_s:.1f} % |")
    print(f"| sum and remainder | {sum(parts.values()):.3f} {ranks[0]['unexplained_s']:+.3f} | of {wall_s:.3f} s |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; 1 where a child ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="how often each contender trains (5)")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="data-parallel ranks (1)")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        train(args.child, args.folder, args.devices, quick=args.quick)
        return 0
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={args.devices}", "-m")
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for contender in CONTENDERS:
            own = Path(folder, contender.replace(" ", "-"))
            own.mkdir()
            mine = ("--child", contender, "--folder", str(own), "--devices", str(args.devices))
            command = (*(launcher if args.devices > 1 else ()), "benchmarks.ledger", *mine)
            children[contender] = fresh.Child(fresh.module(*command, *(["--quick"] if args.quick else [])))
        outcomes = fresh.in_turns(children, args.turns)
    base = outcomes[CONTENDERS[0]]
    rows = {
        name: [
            fresh.spread([result["fit_s"] for result in fresh.results(turns)], ".2f"),
            fresh.spread(fresh.paired(turns, base, lambda m, b: m["fit_s"] / b["fit_s"])),
            fresh.spread([result["step_ms"] for result in fresh.results(turns)], ".3f"),
            fresh.spread(fresh.paired(turns, base, lambda m, b: m["step_ms"] / b["step_ms"])),
        ]
        for name, turns in outcomes.items()
    }
    title = f"{args.turns} turns on {args.devices} device{'s' if args.devices > 1 else ''}, medians (min to max)"
    fresh.print_table(title, ("callback", "fit s", "to none", "step ms", "to none"), rows, outcomes)
    ledgers = [result["ranks"] for result in fresh.results(outcomes[CONTENDERS[1]])]
    if ledgers:
        print_ledger(ledgers[-1])
        largest = max(abs(rank["unexplained_s"]) / rank["wall_s"] for ranks in ledgers for rank in ranks)
        print(f"\nlargest remainder of any rank and turn: {100 * largest:.3f} % of its wall time")
    return int(fresh.failed(outcomes))


if __name__ == "__main__":
    sys.exit(main())

"""Whether regions timed in some of the steps agree with regions timed in all of them.

One process trains the launch-bound loop with every step split into regions. The same steps are then entered twice: all
of them with their regions, and with the regions of those alone that the timing budget would have chosen. Both are over
one run, so that what differs between processes is not in the ratio. The budget learns from the measured cost of the
split steps, and `--plain-us` for the others.

The second is done several times, as if the fit had begun some steps earlier, so that other steps are chosen: the mean
of the ratios shows whether the estimate is biased, their standard deviation how far that of one run may be off.

    python -m benchmarks.duty_cycle
    python -m benchmarks.duty_cycle --quick    # few steps, for a machine without a GPU
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.workloads import SmallKernels, trainer
from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.timing.completed_steps import DEFAULT_SHARE, TimingBudget
from lightning_forge_profiling.timing.run_totals import LeftOut, RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork

TURNS = 16

Step = tuple[StepTimes, StepWork, LeftOut | None, StepTiming]


class Kept(ThroughputCallback):
    """Keeps each step as it enters the totals."""

    def __init__(self) -> None:
        super().__init__(overhead=None, telemetry_period_s=None)
        self.steps: list[Step] = []

    def on_train_start(self, *begun: Any) -> None:
        """Take every step on its way into the totals."""
        super().on_train_start(*begun)
        if self.run is None:
            sys.exit("the fit is not watched")
        totals = self.run.step_timer.totals
        add = totals.add

        def added(*step: Any) -> None:
            add(*step)
            self.steps.append(step)

        totals.add = added


def entered(
    steps: Sequence[Step], budget: TimingBudget, plain_ns: int, earlier: int = 0
) -> tuple[dict[str, float], int]:
    """The regions' means with the regions of the chosen steps alone, and how many those are."""
    totals, chosen = RunTotals(), 0
    for times, work, left_out, timing in steps:
        splits = left_out is not None or budget.splits(times.step + earlier)
        chosen += splits and left_out is None
        totals.add(times if splits else times.whole(), work, left_out, timing)
        own_ns = int(timing.timing_us * 1e3) if splits else plain_ns
        budget.add(
            step_ns=int(sum(times.host_ms[name] for name in REGIONS if name in times.host_ms) * 1e6),
            own_ns=own_ns,
            split=splits,
        )
    steady = totals.steady()
    return {"step": steady.step_ms.mean} | {name: steady.regions[name].device_ms for name in REGIONS}, chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="how many steps (2000)")
    parser.add_argument("--plain-us", type=float, default=15.0, metavar="US", help="cost of a step that is not split")
    parser.add_argument("--quick", action="store_true", help="few steps")
    args = parser.parse_args(arguments)
    steps = 300 if args.quick else args.steps
    kept = Kept()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(folder, steps, callbacks=[kept], logger=False, enable_checkpointing=False)
        run.fit(SmallKernels(), DataLoader(torch.randn(steps + 10, 1, 64), batch_size=None))
    every, _ = entered(kept.steps, TimingBudget(None), 0)
    plain_ns = int(args.plain_us * 1e3)
    turns = [entered(kept.steps, TimingBudget(DEFAULT_SHARE), plain_ns, 97 * turn) for turn in range(TURNS)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    chosen = statistics.median(count for _, count in turns)
    print(f"{device}: regions of {chosen:.0f} of {len(kept.steps)} steps against those of all, {TURNS} choices")
    print("\n| region | all ms | chosen ms | ratio | of one choice |\n| --- | ---: | ---: | ---: | ---: |")
    for name, ms in every.items():
        ratios = [some[name] / ms for some, _ in turns] if ms else [float("nan")] * TURNS
        mean, scatter = statistics.mean(ratios), statistics.stdev(ratios)
        print(f"| {name} | {ms:.4f} | {mean * ms:.4f} | {mean:.4f} | ± {scatter:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

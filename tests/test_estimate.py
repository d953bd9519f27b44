"""What is estimated of steps that were not split, beside the truth: in summary, watch, compare and the page alike."""

import random

import pytest

from lightning_forge_profiling.comparison.source import record_source
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.record.files import encode_line
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.report.live_view import latest_regions
from lightning_forge_profiling.report.run_page import run_view
from lightning_forge_profiling.run.run_record import kept_counters
from lightning_forge_profiling.run.run_report import analysis_of
from lightning_forge_profiling.schema import Begin, End, IntervalLine, RunEvidence, RunReport, State
from lightning_forge_profiling.timing.completed_steps import DEFAULT_SHARE, TimingBudget
from lightning_forge_profiling.timing.counters import bucket
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork

STEPS, WARMUP = 390, 5


def uneven(dice, step):
    return dice.uniform(5.0, 17.0)


def in_bursts(dice, step):
    """Four workers, each of which brings a batch in turn: one step in four waits for all."""
    return 43.0 + dice.gauss(0, 1) if step % 4 == 0 else 0.2


def slow_after_a_start(dice, step):
    """The loader had batches ready when the run began, while all steps are split."""
    return dice.uniform(0.1, 4.0) if step < 25 else dice.uniform(5.0, 17.0)


def longer_and_longer(dice, step):
    return dice.uniform(0.04, 0.06) * step


def now_and_then(dice, step):
    return dice.expovariate(1 / 10.9)


class Planted:
    """A run whose regions are known of each step, with default settings, where timing is dear."""

    def __init__(self, loader, seed):
        dice, budget = random.Random(seed), TimingBudget(DEFAULT_SHARE)  # noqa: S311
        self.totals, self.truth = RunTotals(bucket=bucket), dict.fromkeys(REGIONS, 0.0)
        self.intervals = []
        for step in range(STEPS):
            ms = {
                "data": loader(dice, step),
                "transfer": 0.05,
                "forward": max(dice.gauss(2.9, 0.3), 1.0),
                "backward": max(dice.gauss(1.6, 0.15), 0.5),
                "optimizer": 0.5,
                "other": 0.3 + dice.uniform(0.0, 0.5),
            }
            split = step < WARMUP or budget.splits(step)
            times = StepTimes(step, ms, ms)
            times = times if split else times.whole()
            work = StepWork(8.0, None, 1)
            self.totals.add(times, work, "warm-up" if step < WARMUP else None, StepTiming())
            budget.add(step_ns=int(times.step_ms * 1e6), own_ns=400_000 if split else 10_000, split=split)
            if step >= WARMUP:
                for name, each in ms.items():
                    self.truth[name] += each / (STEPS - WARMUP)
            if step % 50 == 49:
                self.intervals.append(self.interval(step + 1))
        self.intervals.append(self.interval(STEPS, last=True))

    def interval(self, step, *, last=False):
        self.totals.take()
        counters = kept_counters(self.totals.take_interval(last=last), on_device=False)
        return IntervalLine(at=float(step), step=step, logger_step=step - 1, counters=counters)

    def write(self, folder):
        """The record of the run; returns its folder."""
        totals = self.totals
        run = totals.timing(steps=STEPS, before_first_s=0.1, wall_s=10.0)
        measured = RunEvidence(timing=run)
        report = RunReport(
            measured, None, "cpu", replicas=1, log_folder=None, analysis=analysis_of(None, None, measured)
        )
        begin = Begin(
            run="x", rank=0, world_size=1, at=1.0, versions={}, host="h", device="cpu", settings={}, schema_version=2
        )
        blocks = tuple(kept_counters(block, on_device=False) for _, block in totals.blocks())
        state = State(at=400.0, step=STEPS, report=report, metrics=run.metrics(), blocks=blocks)
        (folder / "forge_record").mkdir()
        lines = [begin, *self.intervals, state, End(at=400.0, step=STEPS, outcome="finished")]
        (folder / "forge_record" / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines)))
        return folder / "forge_record"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loader", [uneven, in_bursts, slow_after_a_start, longer_and_longer, now_and_then])
def test_each_region_is_within_a_tenth_of_the_truth_and_the_same_wherever_it_is_shown(tmp_path, loader, seed):
    planted = Planted(loader, seed)
    record = read_run(planted.write(tmp_path))
    [rank] = record.ranks
    run = rank.state.report.analysis.run.timing
    assert run.split_steps < STEPS / 3
    in_summary = {name: run.regions[name].device_ms for name in REGIONS}
    assert in_summary == pytest.approx(planted.truth, rel=0.1)
    assert sum(in_summary.values()) == pytest.approx(sum(planted.truth.values())), "nothing is unknown"
    assert run.unknown_ms == 0
    compared = {name: estimate.value for name, estimate in record_source(record).metrics.items() if name in REGIONS}
    assert compared == pytest.approx(in_summary, rel=1e-4, abs=1e-4)
    shown = {row.cells[0]: row for row in latest_regions(rank.intervals).rows}
    assert {name: float(shown[name].cells[-1]) for name in REGIONS} == pytest.approx(in_summary, abs=0.006)
    pct = {name: 100 * ms / run.step_ms.mean for name, ms in in_summary.items() if ms > 0.02 * run.step_ms.mean}
    on_page = {row.cells[0]: row.share for row in run_view(record, 500.0).step.table.rows}
    assert {name: on_page[name] for name in pct} == pytest.approx(pct, rel=1e-4)

"""Regions of some steps only, so that timing stays within its budget: which steps, and that the sums stay true."""

from itertools import pairwise
from random import Random

import pytest

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS, WHOLE
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.schema import RunEvidence
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.completed_steps import TimingBudget
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork
from tests.entered_steps import watch
from tests.fakes import FakeDevice
from tests.models import Classifier, loader
from tests.outcomes import logged, summary_of

TIGHT = 1e-5
"""No step of a CPU is so long that this share of it pays for splitting it."""


def fixed(rate):
    """A budget that stays at a rate, whatever timing costs."""
    budget = TimingBudget(None)
    budget.rate = rate
    return budget


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("steps", "every", "long_ms"), [(300, 37, 300.0), (1000, 100, 1000.0)])
def test_rare_long_steps_are_not_taken_for_others_that_are_less_long(steps, every, long_ms, seed):
    chance = Random(seed)  # noqa: S311  (not cryptography)
    budget, totals, loading_ms = TimingBudget(0.005), RunTotals(), 0.0
    first = chance.randrange(every)
    for step in range(steps):
        long_forward = 5.0 if chance.random() < 1 / 5 else 0.0
        ms = {"data": 0.15, "forward": 0.25 + long_forward, "backward": 0.4, "optimizer": 0.25, "other": 0.3}
        ms = {name: took * chance.uniform(0.9, 1.2) for name, took in ms.items()}
        ms["data"] += long_ms if step % every == first else 0.0
        loading_ms += ms["data"] / steps
        took_ms, split = sum(ms.values()), budget.splits(step)
        budget.add(step_ns=int(took_ms * 1e6), own_ns=30_000 if split else 6_000, split=split)
        timed = ms if split else {WHOLE: took_ms}
        totals.add(StepTimes(step, timed, timed), StepWork(optimizer_steps=1), None)
    rates = totals.steady()
    assert rates.regions["data"].device_ms == pytest.approx(loading_ms, rel=0.15)
    assert rates.step_ms.mean == pytest.approx(sum(rates.regions[name].device_ms for name in REGIONS))


def test_a_stall_that_does_not_come_again_is_not_searched_for():
    budget = TimingBudget(0.005)
    for step in range(2000):
        ms = 100_000 if step == 500 else 6 if not step % 50 else 2
        budget.add(step_ns=ms * 10**6, own_ns=30_000, split=budget.splits(step) and step != 500)
    assert budget.rate < 0.5


def train(device, step_timer, steps, *, cycle=1, before=lambda step: None):
    """Steps whose optimizer runs in the last of each `cycle`."""
    step_timer.start()
    for step in range(steps):
        before(step)
        for name, ms in (("data", 1), ("forward", 5), ("backward", 10), ("optimizer", 0 if (step + 1) % cycle else 8)):
            step_timer.regions.enter(name)
            device.pass_host_time(ms=1)
            device.enqueue(ms + 0.01 * (step % 7))
            step_timer.regions.exit(name)
        step_timer.end_step(StepWork(samples=2, optimizer_steps=int((step + 1) % cycle == 0)))
        device.run(ms=30)
    step_timer.finish(wait=True)


def recorder_on(device, rate=1.0, **options):
    timers = CUDATimerCollection((), events=device, clock_ns=device.host_clock_ns)
    return StepTimer(timers, budget=fixed(rate), clock_ns=device.host_clock_ns, **options)


def means(rate, steps, cycle):
    step_timer = recorder_on(device := FakeDevice(), rate)
    train(device, step_timer, steps, cycle=cycle)
    rates = step_timer.totals.steady()
    return rates, {"step": rates.step_ms.mean} | {name: region.device_ms for name, region in rates.regions.items()}


@pytest.mark.parametrize(("rate", "cycle"), [(0.02, 50), (0.1, 10), (0.25, 4), (1 / 3, 3), (0.5, 8), (0.9, 7)])
def test_every_phase_of_a_cycle_is_chosen_alike(rate, cycle):
    budget, steps = fixed(rate), 2000
    chosen = [step for step in range(steps) if budget.splits(step)]
    assert len(chosen) == pytest.approx(rate * steps, abs=4)
    by_phase = [sum(step % cycle == phase for step in chosen) for phase in range(cycle)]
    assert by_phase == pytest.approx([len(chosen) / cycle] * cycle, abs=5)


@pytest.mark.parametrize("rate", [1 / 64, 1 / 30, 0.1, 0.3])
def test_steps_of_the_whole_run_are_chosen(rate):
    budget = fixed(rate)
    chosen = [-1, *(step for step in range(2000) if budget.splits(step)), 2000]
    assert max(later - step for step, later in pairwise(chosen)) <= 2 / rate


@pytest.mark.parametrize("cycle", [1, 4, 8])
def test_regions_of_some_steps_are_those_of_all_within_three_percent(cycle):
    _, expected = means(1.0, 1200, cycle)
    rates, estimated = means(0.1, 1200, cycle)
    assert rates.split_steps == pytest.approx(120, abs=6)
    assert estimated["step"] == pytest.approx(expected["step"]), "the step is over all of them"
    assert sum(estimated[name] for name in REGIONS) == pytest.approx(estimated["step"])
    for name in ("data", "forward", "backward", "optimizer"):
        assert estimated[name] == pytest.approx(expected[name], rel=0.03), name


def test_a_step_that_is_not_split_takes_one_event():
    step_timer = recorder_on(device := FakeDevice(), rate=0.0)
    seen = []
    watch(step_timer, lambda times, *_: seen.append(times))
    train(device, step_timer, 64)
    assert [list(times.device_ms) for times in seen[1:]] == [["step"]] * 63
    assert step_timer.totals.steady().steps == 64
    assert device.calls < 64 * 5, "record one, ask for it, read it"


def test_a_step_after_validation_or_at_an_epochs_start_is_split_and_speaks_for_itself():
    step_timer = recorder_on(device := FakeDevice(), rate=0.05)
    kinds = {}
    watch(step_timer, lambda times, *_: kinds.__setitem__(times.step, times.split))

    def validate(step):
        if step and step % 10 == 0:
            step_timer.regions.enter_validation()
            device.enqueue(100)
            step_timer.regions.exit_validation()
            device.enqueue(50)  # what only these steps have, before their fetch

    train(device, step_timer, 400, before=validate)
    assert all(kinds[step] for step in range(10, 400, 10))
    assert sum(kinds.values()) < 80
    rates = step_timer.totals.steady()
    assert rates.regions["other"].device_ms == pytest.approx(39 * 50 / 400, rel=0.05), (
        "not 50 ms in each of the split ones"
    )
    assert rates.regions["forward"].device_ms == pytest.approx(5.03, rel=0.03)


def ledger_of(*steps):
    """Steps of 10 ms: `unsplit`, `chosen`, or `forced` with half of its time in the fetch."""
    totals = RunTotals()
    times = {"unsplit": {"step": 10.0}, "chosen": {"forward": 10.0}, "forced": {"data": 5.0, "forward": 5.0}}
    for number, kind in enumerate(steps):
        work = StepWork(samples=1, optimizer_steps=1)
        totals.add(StepTimes(number, times[kind], times[kind]), work, None, StepTiming(chosen=kind != "forced"))
    return totals


def test_a_row_without_a_step_like_the_others_has_no_regions():
    metrics = ledger_of("forced", "unsplit", "unsplit").take().metrics()
    assert metrics["time/step_ms"] == 10
    assert "time/forward_ms" not in metrics, "the first step after a validation run says nothing of those after it"
    metrics = ledger_of("forced", "unsplit", "chosen").take().metrics()
    assert (metrics["time/data_ms"], metrics["time/forward_ms"]) == pytest.approx((5 / 3, 25 / 3))
    assert ledger_of("forced").take().metrics()["time/data_ms"] == 5
    assert "time/forward_ms" not in ledger_of("unsplit", "unsplit").take().metrics()


def test_users_regions_and_spans_follow_the_same_rhythm():
    step_timer = recorder_on(FakeDevice(), rate=0.0)
    step_timer.start()
    assert step_timer.user_regions.open_region("block") is not None, "the first step is split: nothing is known yet"
    step_timer.end_step(StepWork())
    assert step_timer.user_regions.open_region("block") is None
    step_timer.regions.split()  # as the profiler's callback does for a step that it records
    assert step_timer.user_regions.open_region("block") is not None


@pytest.mark.slow
@pytest.mark.parametrize("log_every", [1, 5])
def test_on_a_real_run_the_step_is_exact_and_regions_are_left_out_where_none_were_timed(
    tmp_path, make_trainer, capsys, log_every
):
    callback = ThroughputCallback(warmup_steps=4, overhead=TIGHT)
    make_trainer(callback, max_epochs=3, log_every_n_steps=log_every).fit(Classifier(), loader(800))
    rows = logged(tmp_path)
    split = [row for row in rows if "time/forward_ms" in row]
    assert split
    for row in split:
        unknown_ms = row["time/unknown_ms"] if row.get("time/unknown_ms") not in {None, ""} else 0.0
        assert sum(row[f"time/{name}_ms"] for name in REGIONS) + unknown_ms == pytest.approx(row["time/step_ms"])
    assert all(row["time/step_ms"] > 0 and row["profiling/overhead_us"] > 0 for row in rows)
    if log_every == 1:
        assert len(split) < len(rows) / 4
        assert {row["step"] for row in split} >= {200, 400}, "an epoch's first step is split"
    run = callback.analysis().run
    assert run.timing.split_steps < run.timing.steps / 4
    assert run.timing.overhead_us > 0
    assert f"\nsampled 1 in {run.timing.steps / run.timing.split_steps:.0f} " in summary_of(tmp_path)


def test_without_a_budget_every_step_is_split(tmp_path, make_trainer, capsys):
    callback = ThroughputCallback(warmup_steps=4, overhead=None)
    make_trainer(callback).fit(Classifier(), loader(400))
    assert all("time/forward_ms" in row for row in logged(tmp_path))
    run = callback.analysis().run
    assert run.timing.split_steps == run.timing.steps
    assert "\nfrom " not in capsys.readouterr().out


@pytest.mark.parametrize("overhead", [0, 0.0, 1, 1.5, -0.1, True, "half a percent", float("nan")])
def test_an_overhead_that_is_no_share_is_refused(overhead):
    with pytest.raises(ConfigurationError, match=r"overhead must be a share .* 0\.005 .* None .*; got"):
        ThroughputCallback(overhead=overhead)


def test_timing_behind_queued_work_is_free_and_every_step_is_split():
    """The recorder's host time is beyond any budget, but the GPU has work queued at each step's end."""
    device = FakeDevice()

    class Slow(CUDATimerCollection):
        def switch(self, old, new):
            device.pass_host_time(ms=1)
            return super().switch(old, new)

    def split_steps(device_ms):
        timers = Slow((), events=device, clock_ns=device.host_clock_ns)
        step_timer = StepTimer(timers, budget=TimingBudget(TIGHT), clock_ns=device.host_clock_ns)
        step_timer.start()
        for _ in range(200):
            for name in ("forward", "backward", "optimizer"):
                step_timer.regions.enter(name)
                device.pass_host_time(ms=1)
                device.enqueue(device_ms)
                step_timer.regions.exit(name)
            device.run(ms=5)
            step_timer.end_step(StepWork(optimizer_steps=1))
            device.run(ms=5)
        step_timer.finish(wait=True)
        return step_timer.totals.steady().split_steps

    assert split_steps(device_ms=5) == 200, "15 ms of work queued in each 10 ms"
    assert split_steps(device_ms=0.001) < 40, "the GPU waits for the host"


class Shards:
    """Steps of 2 ms, and of 300 ms at each shard's begin; a split step takes 150 us of timing, another one 50."""

    def __init__(self, every=50):
        self.every = every
        self.budget, self.split_long = TimingBudget(0.005), []

    def train(self, steps):
        rates = []
        for step in range(steps):
            split, long = self.budget.splits(step), step % self.every == self.every - 1
            if split and long:
                self.split_long.append(step)
            own_ns = 150_000 if split else 50_000
            self.budget.add(step_ns=300_000_000 if long else 2_000_000, own_ns=own_ns, split=split)
            rates.append(self.budget.rate)
        return rates


def test_long_steps_that_nobody_knows_are_looked_for_until_some_are_found():
    run = Shards()
    rates = run.train(2000)
    assert len(run.split_long) >= 3
    assert rates[run.split_long[2] + 32] < 0.1, "and then timing costs what it did"
    assert max(Shards(every=10**9).train(2000)[64:]) < 0.1, "without long steps nothing is looked for"


def test_what_long_steps_do_is_not_guessed_from_the_others():
    """None of the three was split: their time is no data, forward, backward or optimizer's, and the verdict says so."""
    totals = RunTotals()
    regions = {"data": 0.2, "transfer": 0.1, "forward": 0.5, "backward": 0.5, "optimizer": 0.6, "other": 0.1}
    for step in range(200):
        long = step in {77, 133, 155}
        split = step % 20 == 0
        times = regions if split else {WHOLE: 202.0 if long else 2.0}
        totals.add(StepTimes(step, times, times), StepWork(optimizer_steps=1), None, StepTiming(chosen=split))
    rates = totals.steady()
    assert {name: rates.regions[name].device_ms for name in regions} == pytest.approx(regions)
    assert (rates.unknown_ms * rates.steps, rates.step_ms.mean) == (pytest.approx(600), pytest.approx(5))
    run = RunEvidence(timing=totals.timing(steps=200, before_first_s=0.0, wall_s=1.0))
    analysis = combine(None, run)
    assert analysis.verdict == "no verdict"
    assert "3 long steps, none of which had its regions timed, take 60 % of all the time" in analysis.verdict_text
    assert "between-regions" not in {finding.code for finding in analysis.findings}

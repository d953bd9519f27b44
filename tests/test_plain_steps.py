"""Steps of which nothing but the end is timed: whose time they take, and the rows that they enter."""

import time

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.names import REGIONS, STEP_MS
from lightning_forge_profiling.timing.budget import TimingBudget
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.rates import StepWork
from lightning_forge_profiling.timing.steps import LOADER_START, WHOLE
from tests.entered_steps import watch
from tests.fakes import FakeDevice
from tests.models import Classifier, Manual, loader
from tests.outcomes import excluded_s, logged

TIGHT = 1e-5
"""No step of a CPU is so long that this share of it pays for splitting it."""

ONE = StepWork(samples=2, optimizer_steps=1)


class Loop:
    """A training loop on a GPU of paper, that is always done before the host comes to a step's end."""

    def __init__(self):
        self.device = FakeDevice()
        self.budget = budget = TimingBudget(None)
        timers = CUDATimerCollection((), events=self.device, clock_ns=self.device.host_clock_ns)
        self.step_timer = StepTimer(timers, budget=budget, clock_ns=self.device.host_clock_ns)
        self.seen = {}
        watch(self.step_timer, lambda times, *_: self.seen.__setitem__(times.step, times))
        self.step_timer.start()
        self.step(10)
        budget.rate = 0.0
        self.step(10)
        self.step(10)

    def pass_time(self, ms):
        self.device.pass_host_time(ms)
        self.device.run(ms=ms)

    def step(self, ms, during=lambda: None):
        for name in ("data", "forward", "backward", "optimizer"):
            self.step_timer.enter(name)
            self.pass_time(ms / 4)
            self.step_timer.exit(name)
        during()
        self.step_timer.end_step(ONE)

    def finish(self):
        self.step_timer.finish(wait=True)
        return {step: dict(times.device_ms) for step, times in self.seen.items()}


def test_each_takes_one_event_and_has_its_own_time():
    loop = Loop()
    made = loop.device.calls
    took = [10 + step % 3 for step in range(20)]
    for ms in took:
        loop.step(ms)
    assert loop.device.calls == made + 20

    def made_unlike_others():
        loop.step_timer.split()
        loop.pass_time(30)

    loop.step(10, during=made_unlike_others)
    times = loop.finish()
    assert [times[3 + number] for number in range(20)] == [{WHOLE: pytest.approx(ms)} for ms in took]
    assert sum(times[23][name] for name in REGIONS if name in times[23]) == pytest.approx(40)
    rates = loop.step_timer.totals.steady()
    assert rates.steps == 24
    assert rates.samples == 48
    assert rates.total_ms == pytest.approx(sum(took) + 70)
    assert loop.step_timer.summary().step_ms.max == pytest.approx(40)


def test_a_split_step_behind_them_has_its_regions_and_its_own_time():
    loop = Loop()
    loop.budget.rate = 0.15
    took = [10 + step % 3 for step in range(40)]
    for ms in took:
        loop.step(ms)
    split = [step for step in range(4, 43) if loop.budget.splits(step)]
    assert len(split) > 4
    times = loop.finish()
    for step, ms in enumerate(took, 3):
        parts = dict.fromkeys(("data", "forward", "backward", "optimizer"), ms / 4) if step in split else {WHOLE: ms}
        assert {name: value for name, value in times[step].items() if value} == pytest.approx(parts)
    rates = loop.step_timer.totals.steady()
    assert (rates.steps, rates.split_steps) == (43, 2 + len(split))
    assert rates.total_ms == pytest.approx(sum(took) + 30)


@pytest.mark.parametrize("region", ["checkpoint", "validation", LOADER_START])
def test_what_lies_between_two_of_them_is_not_theirs(region):
    loop = Loop()

    def between():
        if region == "validation":
            loop.step_timer.enter_validation()
        elif region == LOADER_START:
            loop.step_timer.enter_loader_start()
        else:
            loop.step_timer.enter(region)
        loop.pass_time(500)
        if region == "validation":
            loop.step_timer.exit_validation()
        else:
            loop.step_timer.exit(region)

    for ms in range(10, 16):
        loop.step(ms, during=between if ms == 13 else lambda: None)
    times = loop.finish()
    assert [times[step] for step in (3, 4, 5, 7, 8)] == [{WHOLE: pytest.approx(ms)} for ms in (10, 11, 12, 14, 15)]
    own = {**times[6]}
    assert own.pop(region) == pytest.approx(500)
    assert sum(own.values()) == pytest.approx(13)


def test_those_before_the_end_of_the_run_count_and_what_comes_after_them_does_not():
    loop = Loop()
    for ms in (10, 11, 12):
        loop.step(ms)
    loop.pass_time(300)
    times = loop.finish()
    assert [times[step] for step in (3, 4, 5)] == [{WHOLE: pytest.approx(ms)} for ms in (10, 11, 12)]
    assert loop.step_timer.summary().steady.steps == 6


class Before(Callback):
    """The host's time at the end of each batch, before our callbacks."""

    def __init__(self):
        self.ns = []

    def on_train_batch_end(self, *_):
        self.ns.append(time.perf_counter_ns())


class Ends(Callback):
    """The host's time at the end of each batch, behind our callbacks; delays the steps that are planted."""

    def __init__(self):
        self.ns, self.planted, self.before = [], {}, Before()

    def agree(self, since, sum_ms):
        """Whether the steps behind one sum to so much, from some instant of our hook at its end to one at the last."""
        shortest = (self.before.ns[-1] - self.ns[since]) / 1e6
        longest = (self.ns[-1] - self.before.ns[since]) / 1e6
        return 0.99 * shortest <= sum_ms <= 1.01 * longest

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        time.sleep(self.planted.get(len(self.ns), 0))

    def on_train_batch_end(self, *_):
        self.ns.append(time.perf_counter_ns())


def run(make_trainer, steps, *callbacks, model=None, train=None, **options):
    ends, ours = Ends(), ThroughputCallback(overhead=TIGHT, warmup_steps=3)
    options.setdefault("log_every_n_steps", 100)
    trainer = make_trainer(ends.before, ours, *callbacks, ends, max_steps=steps, max_epochs=-1, **options)
    ends.planted = {60: 0.2, 61: 0.1}
    trainer.fit(model or Classifier(), train if train is not None else loader(4 * 200))
    return ours, ends, trainer


def test_a_real_run_has_mostly_such_steps_and_its_sums_are_those_of_the_clock(tmp_path, make_trainer):
    ours, ends, _ = run(make_trainer, 150)
    run_ = ours.analysis().run
    assert run_.split_steps < 50
    assert run_.steps == 147
    took_ms = run_.step_ms.mean * 147
    assert ends.agree(2, took_ms + 1e3 * excluded_s(tmp_path, "profiler"))
    before, behind = ends.before.ns, ends.ns
    shortest_ms = max(before[step] - behind[step - 1] for step in range(3, 150)) / 1e6
    longest_ms = max(behind[step] - before[step - 1] for step in range(3, 150)) / 1e6
    assert longest_ms >= 200, "the planted one, or another on a busy machine"
    assert 0.99 * shortest_ms <= run_.step_ms.max <= 1.01 * longest_ms, "though none of its regions were timed"
    assert ours.summary()["throughput/samples_per_sec"] == pytest.approx(147 * 4 / took_ms * 1e3, rel=0.02)


@pytest.mark.parametrize("model", [Classifier, Manual])
def test_rows_come_when_they_should_and_hold_every_step(make_trainer, tmp_path, model):
    cycles = {"accumulate_grad_batches": 3} if model is Classifier else {}
    ours, ends, _ = run(make_trainer, 40, model=model(), log_every_n_steps=10, **cycles)
    rows = [row for row in logged(tmp_path) if "throughput/steps_per_sec" in row]
    assert [int(row["step"]) for row in rows] == [9, 19, 29, 39]
    each = 3 if cycles else 1
    assert len(ends.ns) == 40 * each
    for row in rows[1:]:
        rate = row["throughput/steps_per_sec"] / row["throughput/optimizer_steps_per_sec"]
        assert rate == pytest.approx(each if model is Classifier else rate)
    steps_ms = ours.analysis().run.step_ms.mean * (len(ends.ns) - 3)
    assert ends.agree(2, steps_ms + 1e3 * excluded_s(tmp_path, "profiler"))


def test_a_window_far_into_the_run_is_where_it_was_asked_for(make_trainer):
    forge = ForgeProfilerCallback(90, 93, analyze=False, tensorboard=False)
    ours, _, _ = run(make_trainer, 120, forge)
    assert ours.analysis().run.split_steps < 60
    report = forge.trace_report()
    assert (report.status, tuple(report.steps)) == ("written", (90, 91, 92))


def test_a_fit_that_ends_before_the_window_says_after_how_many_steps(make_trainer):
    forge = ForgeProfilerCallback(90, 93, analyze=False, tensorboard=False)
    run(make_trainer, 70, forge)
    assert "70" in forge.trace_report().message


class SlowRows(CSVLogger):
    """Takes its time for each row of ours, and knows how long."""

    took_ms = 0.0

    def log_metrics(self, metrics, step=None):
        began = time.perf_counter()
        super().log_metrics(metrics, step)
        if STEP_MS in metrics:
            time.sleep(0.05)
            self.took_ms += 1e3 * (time.perf_counter() - began)


@pytest.mark.parametrize("overhead", [None, TIGHT], ids=["every step split", "most steps plain"])
def test_rows_are_the_profilers_and_no_steps(make_trainer, tmp_path, overhead):
    logger = SlowRows(tmp_path)
    ours = ThroughputCallback(warmup_steps=0, overhead=overhead, log_every_n_steps=7)
    make_trainer(ours, logger=logger, log_every_n_steps=1000).fit(Classifier(), loader(1404))
    run = ours.analysis().run
    assert run.steps == 351, "one after the last row"
    assert 1e3 * excluded_s(tmp_path, "profiler") >= 0.98 * logger.took_ms, "all but the last, which follows the steps"
    assert run.ledger.parts["profiler"] >= logger.took_ms / 1e3
    assert run.ledger.parts.get("logger/SlowRows", 0.0) < 0.05 * logger.took_ms / 1e3, "Lightning has given it none"
    assert ours.summary()["profiling/overhead_us"] >= 1e3 * logger.took_ms / run.steps * 49 / 50
    assert "logger/SlowRows" not in {finding.evidence.get("part") for finding in ours.analysis().findings}
    assert sum(run.regions[name].device_ms for name in REGIONS) == pytest.approx(run.step_ms.mean)

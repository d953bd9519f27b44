"""Steps of which nothing but the end is timed: whose time they take, and the log entries that they enter."""

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import LOADER_START, REGIONS, STEP_MS, WHOLE
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.completed_steps import TimingBudget
from lightning_forge_profiling.timing.steps import StepWork
from tests.entered_steps import watch
from tests.fakes import FakeDevice
from tests.models import Classifier, Manual, loader
from tests.outcomes import excluded_s, logged
from tests.step_clock import StepClock

TIGHT = 1e-5
"""No step of a CPU is so long that this share of it pays for splitting it."""

ONE = StepWork(samples=2, optimizer_steps=1)


class Loop:
    """A training loop on a simulated GPU that is always done before the host comes to a step's end."""

    def __init__(self, *, in_bulk=True):
        self.device, self.in_bulk, self.ended_in_bulk = FakeDevice(), in_bulk, 0
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
            self.step_timer.regions.enter(name)
            self.pass_time(ms / 4)
            self.step_timer.regions.exit(name)
        during()
        if self.in_bulk and self.step_timer.end_plain_step(ONE, self.device.host_clock_ns()):
            self.ended_in_bulk += 1
        else:
            self.step_timer.end_step(ONE)

    def finish(self):
        self.step_timer.finish(wait=True)
        return {step: dict(times.device_ms) for step, times in self.seen.items()}


@pytest.fixture(params=["at once", "in bulk"])
def loop(request):
    return Loop(in_bulk=request.param == "in bulk")


def test_in_bulk_they_come_to_the_same_totals_and_ledger():
    loops = [Loop(in_bulk=False), Loop()]
    for loop in loops:
        loop.budget.rate = 0.05
        for step in range(1000):
            loop.step(
                10 + step % 3, during=lambda loop=loop, step=step: step == 500 and loop.step_timer.regions.split()
            )
        loop.finish()
    assert [loop.ended_in_bulk > 600 for loop in loops] == [False, True]
    one, other = loops
    assert one.seen == other.seen
    assert one.step_timer.timing() == other.step_timer.timing()
    assert one.step_timer.ledger.read() == other.step_timer.ledger.read()


def test_a_step_in_which_training_stood_still_is_left_out_among_those_in_bulk():
    loop = Loop()

    def stands():
        loop.step_timer.standstills.hang(loop.step_timer.step, 40.0, "rank 0 stands")
        loop.pass_time(41_000)
        loop.step_timer.standstills.hang(loop.step_timer.step, 41.0, "rank 1 has failed", others_end=True)  # by Ctrl-C
        loop.step_timer.deliver()  # as a call of summary() does, from where on the next step may be one of a bulk

    for step in range(100):
        loop.step(10, during=stands if step == 81 else lambda: None)
    ledger = loop.step_timer.ledger.read()
    loop.finish()
    summary = loop.step_timer.timing()
    assert (summary.steps, summary.left_out.stalled) == (102, 1)
    assert summary.left_out.stalls == ("step 84 took 41.0 s: rank 0 stands",)
    assert ledger.parts["hang"] == pytest.approx(41, abs=0.1)
    assert loop.ended_in_bulk > 10


def test_each_takes_one_event_and_has_its_own_time(loop):
    made = loop.device.calls
    took = [10 + step % 3 for step in range(20)]
    for ms in took:
        loop.step(ms)
    assert loop.device.calls == made + 20

    def made_unlike_others():
        loop.step_timer.regions.split()
        loop.pass_time(30)

    loop.step(10, during=made_unlike_others)
    times = loop.finish()
    assert [times[3 + number] for number in range(20)] == [{WHOLE: pytest.approx(ms)} for ms in took]
    assert sum(times[23][name] for name in REGIONS if name in times[23]) == pytest.approx(40)
    rates = loop.step_timer.totals.steady()
    assert rates.steps == 24
    assert rates.samples == 48
    assert rates.total_ms == pytest.approx(sum(took) + 70)
    assert loop.step_timer.timing().step_ms.max == pytest.approx(40)


def test_a_split_step_behind_them_has_its_regions_and_its_own_time(loop):
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
def test_what_lies_between_two_of_them_is_not_theirs(loop, region):

    def between():
        if region == "validation":
            loop.step_timer.regions.enter_validation()
        elif region == LOADER_START:
            loop.step_timer.regions.enter_loader_start()
        else:
            loop.step_timer.regions.enter(region)
        loop.pass_time(500)
        if region == "validation":
            loop.step_timer.regions.exit_validation()
        else:
            loop.step_timer.regions.exit(region)

    for ms in range(10, 16):
        loop.step(ms, during=between if ms == 13 else lambda: None)
    times = loop.finish()
    assert [times[step] for step in (3, 4, 5, 7, 8)] == [{WHOLE: pytest.approx(ms)} for ms in (10, 11, 12, 14, 15)]
    own = {**times[6]}
    assert own.pop(region) == pytest.approx(500)
    assert sum(own.values()) == pytest.approx(13)


def test_those_before_the_end_of_the_run_count_and_what_comes_after_them_does_not(loop):
    for ms in (10, 11, 12):
        loop.step(ms)
    loop.pass_time(300)
    times = loop.finish()
    assert [times[step] for step in (3, 4, 5)] == [{WHOLE: pytest.approx(ms)} for ms in (10, 11, 12)]
    assert loop.step_timer.timing().steps == 6


@pytest.fixture
def clock(monkeypatch):
    return StepClock(monkeypatch)


def of(kind, clock, took_ms):
    """A module whose training steps take what is given, by the made-up clock."""

    class Timed(kind):
        def on_train_batch_start(self, batch, batch_idx):
            clock.pass_time(next(times))

    times = iter(took_ms)
    return Timed()


def run(make_trainer, clock, took_ms, *callbacks, kind=Classifier, log_every_n_steps=100, **options):
    """A fit of as many steps, most of which are not split; the first three are its warm-up."""
    ours = ThroughputCallback(overhead=TIGHT, warmup_steps=3, log_every_n_steps=log_every_n_steps)
    trainer = make_trainer(ours, *callbacks, max_epochs=-1, **{"max_steps": len(took_ms), **options})
    trainer.fit(of(kind, clock, took_ms), loader(4 * 200))
    return ours


@pytest.mark.two_clocks
def test_a_real_run_has_mostly_such_steps_and_its_sums_are_those_of_the_clock(make_trainer, clock):
    took_ms = [10 + step % 3 for step in range(150)]
    took_ms[60:62] = 200, 100
    ours = run(make_trainer, clock, took_ms)
    run_ = ours.analysis().run.timing
    assert run_.split_steps < 50
    assert run_.steps == 147
    assert run_.step_ms.mean == pytest.approx(sum(took_ms[3:]) / 147, abs=0.1)
    assert run_.step_ms.max == pytest.approx(200, abs=0.1), "though none of its regions were timed"
    per_second = 147 * 4 / sum(took_ms[3:]) * 1e3
    assert ours.summary()["throughput/samples_per_sec"] == pytest.approx(per_second, rel=0.01)


@pytest.mark.two_clocks
@pytest.mark.parametrize(("kind", "cycle"), [(Classifier, 3), (Manual, 1)])
def test_log_entries_come_when_they_should_and_hold_every_step(make_trainer, tmp_path, clock, kind, cycle):
    took_ms = [10 + step % 7 for step in range(40 * cycle)]
    options = {"accumulate_grad_batches": cycle} if kind is Classifier else {}
    ours = run(make_trainer, clock, took_ms, kind=kind, log_every_n_steps=10, max_steps=40, **options)
    entries = [entry for entry in logged(tmp_path) if "throughput/steps_per_sec" in entry]
    assert [int(entry["step"]) for entry in entries] == [9, 19, 29, 39]
    for number, entry in enumerate(entries):
        steps_ms = took_ms[max(3, 10 * cycle * number) : 10 * cycle * (number + 1)]
        assert entry["time/step_ms"] == pytest.approx(sum(steps_ms) / len(steps_ms), abs=0.1)
        if kind is Classifier:
            rate = entry["throughput/steps_per_sec"] / entry["throughput/optimizer_steps_per_sec"]
            assert rate == pytest.approx(cycle)
    assert ours.analysis().run.timing.step_ms.mean == pytest.approx(sum(took_ms[3:]) / (40 * cycle - 3), abs=0.1)


@pytest.mark.two_clocks
def test_a_window_far_into_the_run_is_where_it_was_asked_for(make_trainer, clock):
    forge = ForgeProfilerCallback(90, 93, analyze=False, tensorboard=False)
    ours = run(make_trainer, clock, [10] * 120, forge)
    assert ours.analysis().run.timing.split_steps < 60
    report = forge.trace_report()
    assert (report.status, tuple(report.steps)) == ("written", (90, 91, 92))


@pytest.mark.two_clocks
def test_a_fit_that_ends_before_the_window_says_after_how_many_steps(make_trainer, clock):
    forge = ForgeProfilerCallback(90, 93, analyze=False, tensorboard=False)
    run(make_trainer, clock, [10] * 70, forge)
    assert "70" in forge.trace_report().message


class SlowLogger(CSVLogger):
    """Takes 50 ms for each of our entries."""

    def __init__(self, folder, clock):
        super().__init__(folder)
        self.clock, self.entries = clock, 0

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        if STEP_MS in metrics:
            self.clock.pass_time(50)
            self.entries += 1


@pytest.mark.slow
@pytest.mark.two_clocks
@pytest.mark.parametrize("overhead", [None, TIGHT], ids=["every step split", "few steps split"])
def test_log_entries_are_the_profilers_and_no_steps(make_trainer, tmp_path, clock, overhead):
    logger = SlowLogger(tmp_path, clock)
    ours = ThroughputCallback(warmup_steps=0, overhead=overhead, log_every_n_steps=7)
    trainer = make_trainer(ours, logger=logger, log_every_n_steps=1000)
    trainer.fit(of(Classifier, clock, [10] * 351), loader(1404))
    run = ours.analysis().run
    assert (run.timing.steps, logger.entries) == (351, 50), "one step after the last entry"
    assert run.timing.step_ms.mean == pytest.approx(10, abs=0.2)
    assert excluded_s(tmp_path, "profiler") == pytest.approx(50 * 0.05, rel=0.01)
    assert ours.summary()["profiling/overhead_us"] == pytest.approx(50 * 50_000 / 351, rel=0.02)
    assert run.ledger.parts["profiler"] > 0
    assert "logger/SlowLogger.log_metrics" not in run.ledger.parts
    assert sum(run.timing.regions[name].device_ms for name in REGIONS) == pytest.approx(run.timing.step_ms.mean)

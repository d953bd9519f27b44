"""Attribution of a step's time, on a simulated GPU where every millisecond is known."""

from contextlib import contextmanager

import pytest
import torch

from lightning_forge_profiling.names import FIRST_STEP, PROFILER, REGIONS, STEPS
from lightning_forge_profiling.profiler.collector import Marks
from lightning_forge_profiling.run import run
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.events import HostEventSource
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.region import MAX_USER_REGIONS
from lightning_forge_profiling.timing.steps import StepWork
from tests.entered_steps import watch
from tests.fakes import FakeDevice
from tests.models import Classifier, ManualClosure, every_step, loader, quiet_trainer


@pytest.fixture
def device():
    return FakeDevice()


def recorder_on(device, **options):
    timers = CUDATimerCollection((), events=device, clock_ns=device.host_clock_ns)
    return StepTimer(timers, clock_ns=device.host_clock_ns, **options)


def collect(step_timer):
    seen = []
    watch(step_timer, lambda times, work, left_out: seen.append((times, work, left_out)))
    return seen


def inside(step_timer, device, name, ms, *nested):
    step_timer.regions.enter(name)
    device.pass_host_time(ms=1)
    device.enqueue(ms)
    for call in nested:
        call()
    step_timer.regions.exit(name)


def test_the_first_step_ends_so_long_after_the_fit_began(device):
    step_timer = recorder_on(device)
    device.pass_host_time(ms=2500)
    step_timer.start()
    device.enqueue(500)
    device.pass_host_time(ms=500)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert step_timer.timing().end_to_end.first_step_s == pytest.approx(3.0)


def test_nsight_gets_a_range_for_each_step_and_region_and_each_ends(device):
    seen = []

    @contextmanager
    def ranges(name):
        seen.append(name)
        yield
        seen.append(f"/{name}")

    step_timer = recorder_on(device, nsight=ranges)
    assert not seen, "nothing before training"
    step_timer.start()
    for _ in range(2):
        inside(step_timer, device, "optimizer", 5, lambda: inside(step_timer, device, "forward", 7))
        token = step_timer.user_regions.open_region("encoder")
        step_timer.user_regions.close_region("encoder", token)
        step_timer.end_step(StepWork())
    step_timer.regions.enter("data")
    step_timer.finish(wait=True)
    region = ["forge.optimizer", "forge.forward", "/forge.forward", "/forge.optimizer", "encoder", "/encoder"]
    last = ["step 2", "forge.data", "/forge.data", "/step 2"]
    assert seen == ["step 0", *region, "/step 0", "step 1", *region, "/step 1", *last]


def test_the_built_in_regions_tile_the_step_by_self_time(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    device.enqueue(1)
    inside(step_timer, device, "data", 2)
    inside(step_timer, device, "transfer", 3)
    inside(  # a closure: forward and backward run inside the optimizer's step
        step_timer,
        device,
        "optimizer",
        5,
        lambda: inside(step_timer, device, "forward", 7),
        lambda: inside(step_timer, device, "backward", 11),
        lambda: device.enqueue(13),
    )
    device.enqueue(17)
    device.pass_host_time(ms=1)
    step_timer.end_step(StepWork(samples=4))
    step_timer.finish(wait=True)
    times, work, _ = seen[0]
    assert dict(times.device_ms) == pytest.approx(
        {"data": 2, "transfer": 3, "forward": 7, "backward": 11, "optimizer": 18, "other": 18}
    )
    assert times.step_ms == pytest.approx(59)
    assert work.samples == 4


def test_the_end_of_a_step_needs_no_event_of_its_own_right_after_a_region(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    for _ in range(3):
        inside(step_timer, device, "forward", 5)
        device.pass_host_time(ms=0.09)
        step_timer.end_step(StepWork())
        device.pass_host_time(ms=1)
    step_timer.finish(wait=True)
    assert [times.step_ms for times, *_ in seen] == pytest.approx([5, 5, 5])
    assert seen[1][0].host_ms["other"] == pytest.approx(1.09), "it counts to the step that follows"
    assert device.events_made == 8, "one at the start, two a step, one at the end"


@pytest.mark.parametrize(("host_ms", "counted_to"), [(0.09, "transfer"), (0.11, "other")])
def test_a_few_lines_of_python_before_the_transfer_count_to_it(device, host_ms, counted_to):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    inside(step_timer, device, "data", 0)
    device.enqueue(2)
    device.pass_host_time(ms=host_ms)
    inside(step_timer, device, "transfer", 0)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert seen[0][0].device_ms[counted_to] == pytest.approx(2)
    assert seen[0][0].step_ms == pytest.approx(2)


def test_device_time_of_data_is_the_exposed_stall_only(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    inside(step_timer, device, "forward", 30)
    step_timer.end_step(StepWork())
    device.run(ms=10)  # the host ran ahead: 20 ms are still queued when it asks for the next batch
    step_timer.regions.enter("data")
    device.pass_host_time(ms=25)
    device.run(ms=25)
    step_timer.regions.exit("data")
    inside(step_timer, device, "forward", 30)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    second = seen[1][0]
    assert second.host_ms["data"] == pytest.approx(25)
    assert second.device_ms["data"] == pytest.approx(5), "20 of the 25 ms were hidden behind queued work"


def test_validation_is_no_part_of_a_step_and_what_comes_before_it_is(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    inside(step_timer, device, "forward", 5)
    step_timer.end_step(StepWork())
    device.enqueue(100)  # of callbacks and loggers that come after ours
    step_timer.regions.enter_validation()
    inside(step_timer, device, "transfer", 1)  # of a validation batch
    inside(step_timer, device, "checkpoint", 50)
    device.enqueue(200)
    step_timer.regions.exit_validation()
    inside(step_timer, device, "data", 3)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    times = seen[1][0]
    assert times.step_ms == pytest.approx(103)
    assert times.device_ms["other"] == pytest.approx(100)
    assert times.device_ms["validation"] == pytest.approx(201)
    assert times.device_ms["checkpoint"] == pytest.approx(50)
    assert "transfer" not in times.device_ms
    assert step_timer.timing().left_out.excluded_ms["validation"] == pytest.approx(201)


def test_waits_for_other_ranks_outside_of_steps_are_by_the_hosts_clock(device):
    step_timer = recorder_on(device)

    def reduce():  # which calls a barrier of its own
        step_timer.waits.enter()
        step_timer.waits.enter()
        device.pass_host_time(ms=30)
        step_timer.waits.exit()
        step_timer.waits.exit()

    step_timer.start()
    inside(step_timer, device, "checkpoint", 1, reduce, reduce)
    step_timer.regions.enter_validation()
    reduce()
    step_timer.regions.exit_validation()
    step_timer.end_step(StepWork())
    assert step_timer.waits.outside_ns == {"checkpoint": 60e6, "validation": 30e6}


@pytest.mark.parametrize(
    ("queued", "exchanged", "host", "held_up"),
    [
        (50, 5, 3, 5),  # the host is ahead: what comes next is launched long before
        (0, 5, 3, 2),  # the GPU waited for the host: it has something else from then on
        (0, 2, 3, 0),
    ],
)
def test_what_the_gpu_waits_for_holds_it_up_from_when_the_host_has_more_for_it(
    device, queued, exchanged, host, held_up
):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    step_timer.regions.enter("backward")
    device.enqueue(queued)
    step_timer.waits.enter("backward")
    device.enqueue(exchanged)
    step_timer.waits.end_on_gpu()
    device.pass_host_time(ms=host)
    device.run(ms=host)
    step_timer.regions.exit("backward")
    inside(step_timer, device, "optimizer", 7)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    times = seen[0][0]
    assert times.device_ms["wait/backward"] == pytest.approx(held_up)
    assert set(times.device_ms) == {"other", "wait/backward", "backward", "optimizer"}
    assert times.device_ms["optimizer"] == pytest.approx(7)


@pytest.mark.parametrize(("queued", "waited"), [(50, 5), (0, 2)])
def test_launching_an_exchange_is_no_wait_where_the_host_is_behind(device, queued, waited):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    device.enqueue(queued)
    step_timer.waits.enter("other")
    device.pass_host_time(ms=3)
    device.run(ms=0 if queued else 3)
    device.enqueue(5 if queued else 2)
    step_timer.waits.exit(host_waits=False)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert seen[0][0].device_ms["wait/other"] == pytest.approx(waited)


def test_a_wait_on_the_gpu_that_no_boundary_follows_ends_where_it_did(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    for exchanged in (3, 5):  # of two backward passes
        step_timer.waits.enter("backward")
        device.enqueue(exchanged)
        step_timer.waits.end_on_gpu()
        device.enqueue(50)
    step_timer.end_step(StepWork())
    device.enqueue(1)
    step_timer.waits.enter("backward")
    device.enqueue(2)
    step_timer.waits.exit()
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert [times.device_ms["wait/backward"] for times, *_ in seen] == pytest.approx([8, 2])


def test_a_validation_run_that_never_says_it_ended_ends_with_the_next_fetch(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    inside(step_timer, device, "forward", 1)
    step_timer.end_step(StepWork())
    step_timer.regions.enter_validation()
    device.enqueue(7)
    inside(step_timer, device, "data", 3)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert seen[1][0].step_ms == pytest.approx(3)


def test_a_region_that_is_not_asked_for_falls_into_other(device):
    step_timer = recorder_on(device, regions=("forward",))
    seen = collect(step_timer)
    step_timer.start()
    inside(step_timer, device, "forward", 2)
    inside(step_timer, device, "backward", 3)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert dict(seen[0][0].device_ms) == pytest.approx({"forward": 2, "other": 3})


def test_a_closure_in_manual_optimization_shows_its_forward(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    step_timer.regions.enter("forward")
    step_timer.regions.enter("optimizer")
    device.enqueue(5)  # the closure computes the loss ...
    step_timer.regions.forward_in_closure()  # ... and calls backward
    inside(step_timer, device, "backward", 7)
    device.enqueue(11)  # the optimizer's own work
    step_timer.regions.exit("optimizer")
    step_timer.regions.exit("forward")
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert dict(seen[0][0].device_ms) == pytest.approx({"forward": 5, "backward": 7, "optimizer": 11, "other": 0})


def test_users_regions_lie_over_the_built_in_ones(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    step_timer.regions.enter("forward")
    outer = step_timer.user_regions.open_region("block")
    inner = step_timer.user_regions.open_region("block")  # recursion: the same nanosecond is not counted twice
    device.enqueue(4)
    step_timer.user_regions.close_region("block", inner)
    step_timer.user_regions.close_region("block", outer)
    step_timer.regions.exit("forward")
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    times = seen[0][0]
    assert times.device_ms["block"] == pytest.approx(4)
    assert times.step_ms == pytest.approx(4)


def test_users_regions_are_not_timed_in_validation_and_are_limited_in_number(device):
    step_timer = recorder_on(device)
    step_timer.start()
    step_timer.regions.enter_validation()
    assert step_timer.user_regions.open_region("block") is None
    step_timer.regions.exit_validation()
    tokens = [step_timer.user_regions.open_region(f"region {i}") for i in range(MAX_USER_REGIONS + 5)]
    assert sum(token is not None for token in tokens) == MAX_USER_REGIONS


def test_warm_up_and_recorded_steps_are_told_apart(device):
    step_timer = recorder_on(device, warmup_steps=2)
    seen = collect(step_timer)
    step_timer.start()
    for step in range(5):
        inside(step_timer, device, "forward", 1)
        step_timer.end_step(StepWork(samples=2), recorded=step == 3)
    step_timer.finish(wait=True)
    assert [left_out for *_, left_out in seen] == ["warm-up", "warm-up", None, "recorded", None]
    summary = step_timer.timing()
    assert (summary.all_steps, summary.steps, summary.left_out.warmup, summary.left_out.recorded) == (5, 2, 2, 1)
    assert summary.samples == 4
    assert summary.end_to_end.samples == 10


def test_a_step_with_something_untimed_in_it_does_not_count(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    for step in range(3):
        device.is_capturing = step == 1  # a CUDA graph is captured in this step
        inside(step_timer, device, "forward", 5)
        device.is_capturing = False
        step_timer.end_step(StepWork(samples=1))
    step_timer.finish(wait=True)
    assert [times.step for times, *_ in seen] == [0, 2]
    assert step_timer.timing().left_out.untimed == 1


def test_what_an_exception_left_open_ends_with_the_step(device):
    step_timer = recorder_on(device)
    seen = collect(step_timer)
    step_timer.start()
    step_timer.regions.enter("forward")
    step_timer.regions.enter("backward")
    device.enqueue(2)  # raises, and the user's code carries on
    step_timer.end_step(StepWork())
    inside(step_timer, device, "forward", 3)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=True)
    assert dict(seen[1][0].device_ms) == pytest.approx({"forward": 3, "other": 0})


def test_after_an_exception_nobody_waits_for_the_gpu(device):
    step_timer = recorder_on(device)
    step_timer.start()
    device.enqueue(1e9)
    step_timer.end_step(StepWork())
    step_timer.finish(wait=False)
    assert device.waits == 0
    assert step_timer.timing().steps == 0


class BreakingDevice(FakeDevice):
    """Takes no event any more once it is broken, and its clock none once that is."""

    broken = clock_broken = False

    def stream(self):
        if self.broken:
            raise RuntimeError("the driver is gone")
        return super().stream()

    def host_clock_ns(self):
        if self.clock_broken:
            raise OSError("no clock")
        return super().host_clock_ns()


def no_cpu_clock(_):
    raise OSError("/proc is gone")


# the regions that are open, and the call in which timing fails
BOUNDARIES = {
    "training begins": ((), lambda timer, _: timer.start()),
    "a region begins": ((), lambda timer, _: timer.regions.enter("forward")),
    "a region ends": (("forward",), lambda timer, _: timer.regions.exit("forward")),
    "the loader ends": (("data",), lambda timer, _: timer.regions.loader_ended()),
    "a closure's forward": (("optimizer",), lambda timer, _: timer.regions.forward_in_closure()),
    "validation": ((), lambda timer, _: timer.regions.enter_validation()),
    "a step ends": ((), lambda timer, _: timer.end_step(StepWork())),
    "a custom region begins": ((), lambda timer, _: timer.user_regions.open_region("other block")),
    "a custom region ends": ((), lambda timer, token: timer.user_regions.close_region("block", token)),
    "training ends": ((), lambda timer, _: timer.finish(wait=False)),
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_failure_at_a_boundary_is_logged_once_and_switches_timing_off(boundary, caplog):
    device = BreakingDevice()
    ledger = LedgerClock(0, clock_ns=device.host_clock_ns)
    step_timer = recorder_on(device, ledger=ledger)
    regions, call = BOUNDARIES[boundary]
    token = None
    if boundary != "training begins":
        step_timer.start()
        token = step_timer.user_regions.open_region("block")
    for name in regions:
        step_timer.regions.enter(name)
    device.pass_host_time(ms=1)
    device.broken, step_timer.regions.followers.mark = True, Marks().begin
    device.clock_broken = boundary == "the loader ends"  # which takes no event
    step_timer.regions.followers.region_ends = no_cpu_clock
    call(step_timer, token)
    assert (step_timer.regions.active, step_timer.regions.followers.mark) == (False, None)
    for name, (_, each) in BOUNDARIES.items():
        if name not in {"training begins", "a custom region ends"}:
            each(step_timer, None)
    step_timer.finish(wait=True)
    [message] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("Profiling is switched off for the rest of this run: ")
    assert message.endswith((": RuntimeError: the driver is gone", ": OSError: /proc is gone", ": OSError: no clock"))


def test_a_failure_to_read_completed_steps_is_logged_once_and_switches_timing_off(device, caplog):
    step_timer = recorder_on(device)

    def broken(*_):
        raise RuntimeError("no sum")

    watch(step_timer, broken)
    step_timer.start()
    for _ in range(70):
        inside(step_timer, device, "forward", 1)
        step_timer.end_step(StepWork())
        device.run(ms=10)
    assert step_timer.step == 64, "completed steps are read 64 at a time"
    step_timer.finish(wait=True)
    assert not step_timer.regions.active
    [message] = [record.message for record in caplog.records]
    assert message == "Profiling is switched off for the rest of this run: RuntimeError: no sum"


class BreakingSource(HostEventSource):
    """Host events, the n-th of which cannot be recorded, and none after it."""

    def __init__(self, nth):
        super().__init__()
        self.left = nth

    def stream(self):
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("the driver is gone")
        return 0


def weights_of(*callbacks, model=Classifier, **options):
    torch.manual_seed(7)
    trained = model()
    quiet_trainer(*callbacks, **options).fit(trained, loader(16, 4), loader(8, 4))
    return [value.clone() for value in trained.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("model", [Classifier, ManualClosure])
def test_a_fit_whose_timing_fails_at_any_event_trains_as_one_without_us(tmp_path, monkeypatch, caplog, capsys, model):
    options = {"val_check_interval": 2, "default_root_dir": tmp_path}
    expected = weights_of(model=model, **options)
    for nth in range(1, 40, 3):
        timers = CUDATimerCollection((), events=(source := BreakingSource(nth)))
        monkeypatch.setattr(run, "CUDATimerCollection", lambda *_, timers=timers, **__: timers)
        caplog.clear()
        trained = weights_of(ours := every_step(warmup_steps=0), model=model, **options)
        assert source.left <= 0
        assert all(map(torch.equal, trained, expected)), nth
        assert [record.message for record in caplog.records if record.name.startswith("lightning_forge")] == [
            "Profiling is switched off for the rest of this run: RuntimeError: the driver is gone"
        ]
        assert ours.ledger().parts, "the ledger goes on"


# -- the profiler's own time ---------------------------------------------------------------------------------------


def test_own_time_of_a_step_is_what_recording_its_events_took(device):
    device.record_ns = 2000
    ledger = LedgerClock(0, clock_ns=device.host_clock_ns)
    step_timer = recorder_on(device, ledger=ledger)
    step_timer.start()
    for _ in range(10):
        for region in ("data", "forward", "backward"):  # two events each, and 0.2 ms of the loop's between them
            inside(step_timer, device, region, 1)
            device.pass_host_time(ms=0.2)
        step_timer.end_step(StepWork(), began_ns=device.host_ns)  # one event
        device.run(ms=10)
    step_timer.finish(wait=True)
    rates = step_timer.timing()
    assert rates.steps == 10
    in_all_us = 10 * 6 * 2 + 9 * 2
    assert rates.overhead_us == pytest.approx(in_all_us / 10), "the end of a step counts to the one that follows"
    assert rates.metrics()["profiling/overhead_us"] == rates.overhead_us
    parts = {part: 1e6 * seconds for part, seconds in ledger.read().parts.items()}
    assert parts[PROFILER] == pytest.approx(in_all_us)


def test_what_is_slow_at_the_ends_of_a_log_entry_is_in_one_part_once(device):
    """On a busy machine the host waits for a core anywhere, also where the part has just changed."""
    ledger = LedgerClock(0, clock_ns=device.host_clock_ns)
    step_timer = recorder_on(device, ledger=ledger)
    step_timer.start()
    step_timer.regions.followers.region_ends = lambda _: device.pass_host_time(ms=5)
    with step_timer.profiler_overhead():
        pass
    step_timer.end_step(StepWork(), began_ns=device.host_ns)
    step_timer.finish(wait=True)
    ledger_ms = {part: 1e3 * seconds for part, seconds in ledger.read().parts.items()}
    assert ledger_ms[PROFILER] == pytest.approx(5)
    assert sum(ledger_ms.values()) == pytest.approx(1e-6 * device.host_ns)
    assert min(ledger_ms.values()) >= 0


def test_own_time_at_the_end_of_the_first_step_is_not_taken_from_the_second(device):
    ledger = LedgerClock(0, FIRST_STEP, clock_ns=device.host_clock_ns)
    step_timer = recorder_on(device, ledger=ledger)
    step_timer.start()
    device.pass_host_time(ms=20)
    device.record_ns = 5_000_000
    step_timer.end_step(StepWork(), began_ns=device.host_ns)
    device.record_ns = 0
    device.pass_host_time(ms=1)
    step_timer.end_step(StepWork(), began_ns=device.host_ns)
    step_timer.finish(wait=True)
    ledger_ms = {part: 1e3 * seconds for part, seconds in ledger.read().parts.items()}
    assert ledger_ms == {FIRST_STEP: pytest.approx(20), PROFILER: pytest.approx(5), STEPS: pytest.approx(1)}


def test_time_of_log_entries_is_own_time_per_step_too(device):
    ledger = LedgerClock(0, clock_ns=device.host_clock_ns)
    step_timer = recorder_on(device, ledger=ledger)
    step_timer.start()
    for step in range(4):
        inside(step_timer, device, "forward", 1)
        step_timer.end_step(StepWork(), began_ns=device.host_ns)
        if step % 2:
            with step_timer.profiler_overhead():
                device.pass_host_time(ms=3)
        device.run(ms=10)
    step_timer.finish(wait=True)
    with step_timer.profiler_overhead():  # after the steps: the ledger's, and no step's
        device.pass_host_time(ms=5)
    summary = step_timer.timing()
    assert (summary.steps, summary.overhead_us) == (4, pytest.approx(6000 / 4))
    assert summary.left_out.excluded_ms[PROFILER] == 0, "on the GPU, which went on"
    assert ledger.read().parts[PROFILER] == pytest.approx(0.011)


def test_boundaries_outside_the_training_loop_are_ignored(device):
    step_timer = recorder_on(device)
    inside(step_timer, device, "forward", 1)  # sanity check, learning-rate finder
    step_timer.end_step(StepWork())
    assert device.events_made == 0
    assert step_timer.step == 0


@pytest.mark.slow
@pytest.mark.parametrize(("regions", "counted"), [(400, 20), (9000, 0)])
def test_many_regions_a_step_are_all_counted_or_the_step_is_not(device, regions, counted):
    step_timer = recorder_on(device)
    step_timer.start()
    for _ in range(20):
        step_timer.regions.enter("forward")
        for _ in range(regions):
            token = step_timer.user_regions.open_region("layer")
            device.enqueue(0.5)
            step_timer.user_regions.close_region("layer", token)
            device.run(ms=0.5)
        step_timer.regions.exit("forward")
        step_timer.end_step(StepWork())
        device.run(ms=1)
    step_timer.finish(wait=True)
    steady = step_timer.timing()
    assert steady.steps == counted
    assert step_timer.timing().left_out.untimed == 20 - counted
    layer_ms = steady.regions["layer"].device_ms if "layer" in steady.regions else 0
    assert layer_ms == pytest.approx(regions * 0.5 if counted else 0)


def test_events_do_not_accumulate_over_a_long_run(device):
    step_timer = recorder_on(device)
    step_timer.start()

    def train(steps):
        for _ in range(steps):
            for region in REGIONS[:-1]:
                inside(step_timer, device, region, 1)
            step_timer.end_step(StepWork())
            device.run(ms=5)
        return device.events_made

    assert train(steps=1000) == train(steps=200)
    assert step_timer.timers.dropped == 0

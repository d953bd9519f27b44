"""CUDATimer and CUDATimerCollection, on the host clock and on a fake device."""

import gc
import os
import weakref

import pytest
import torch

from lightning_forge_profiling import CUDATimer, CUDATimerCollection
from lightning_forge_profiling.errors import TimerError, TimerNotStartedError, TimerRunningError, UnknownRegionError
from lightning_forge_profiling.timing.events import DeviceEventSource
from tests.fakes import FakeDevice


def test_timer_reads_the_device_not_the_host():
    device = FakeDevice()
    timer = CUDATimer(events=device)
    with timer:
        device.enqueue(ms=12.5)
    assert timer.on_device
    assert not timer.ready(), "the GPU has not run the work yet"
    assert timer.elapsed_ms() == pytest.approx(12.5)
    assert timer.ready()


def test_timer_waits_for_its_own_end_only():
    device = FakeDevice()
    timer = CUDATimer(events=device)
    with timer:
        device.enqueue(ms=1)
    device.enqueue(ms=1000)
    assert timer.elapsed_ms() == pytest.approx(1)
    assert device.now_ms == pytest.approx(1), "it waited for work queued after the end event"


@pytest.mark.parametrize(
    ("misuse", "error", "advice"),
    [
        (lambda timer: timer.stop(), TimerNotStartedError, "call start"),
        (lambda timer: (timer.start(), timer.start()), TimerRunningError, "call stop"),
        (lambda timer: timer.elapsed_ms(), TimerNotStartedError, "start"),
        (lambda timer: (timer.start(), timer.elapsed_ms()), TimerRunningError, "call stop"),
    ],
)
def test_timer_misuse_says_what_to_do(misuse, error, advice):
    with pytest.raises(error, match=advice) as raised:
        misuse(CUDATimer(device="cpu"))
    assert isinstance(raised.value, TimerError)


def test_timer_can_be_used_again():
    device = FakeDevice()
    timer = CUDATimer(events=device)
    for ms in (3, 5):
        with timer:
            device.enqueue(ms=ms)
        assert timer.elapsed_ms() == pytest.approx(ms)


def test_without_an_accelerator_the_timer_says_that_it_reads_the_host_clock():
    timer = CUDATimer(device="cpu")
    assert not timer.on_device
    assert "host clock" in repr(timer)
    with timer:
        pass
    assert timer.ready()
    assert timer.elapsed_ms() >= 0


def test_intervals_of_one_region_add_up_until_reset():
    device = FakeDevice()
    timers = CUDATimerCollection(["backward", "never"], events=device)
    for ms in (2, 3):  # a GAN calls backward twice
        with timers.region("backward"):
            device.enqueue(ms=ms)
    assert timers.elapsed_ms("backward") == pytest.approx(5)
    assert timers.counts == {"backward": 2, "never": 0}
    assert timers.elapsed_all(reset=True) == pytest.approx({"backward": 5, "never": 0})
    assert timers.elapsed_all() == {"backward": 0, "never": 0}


def test_harvest_returns_what_has_completed_and_never_waits():
    device = FakeDevice()
    timers = CUDATimerCollection(["forward", "backward"], events=device)
    for step, (region, ms) in enumerate([("forward", 4), ("backward", 6)]):
        timers.tag = step
        with timers.region(region):
            device.enqueue(ms=ms)
    assert timers.harvest() == ()
    device.run(ms=4.5)
    assert [(i.region, i.tag, i.device_ms) for i in timers.harvest()] == [("forward", 0, pytest.approx(4))]
    device.run(ms=100)
    assert [(i.region, i.tag, i.device_ms) for i in timers.harvest()] == [("backward", 1, pytest.approx(6))]
    assert device.waits == 0


def test_host_time_is_kept_beside_device_time():
    device = FakeDevice()
    timers = CUDATimerCollection(["forward"], events=device, clock_ns=device.host_clock_ns)
    timers.start("forward")
    device.enqueue(ms=10)
    device.pass_host_time(ms=2)
    timers.stop("forward")
    device.run(ms=100)
    [interval] = timers.harvest()
    assert (interval.device_ms, interval.host_ms) == (pytest.approx(10), pytest.approx(2))


def test_regions_that_meet_can_share_one_event():
    device = FakeDevice()
    timers = CUDATimerCollection(["a", "b"], events=device)
    timers.start("a")
    device.enqueue(ms=1)
    mark = timers.mark()
    timers.stop("a", at=mark)
    timers.start("b", at=mark)
    device.enqueue(ms=2)
    timers.stop("b")
    assert timers.elapsed_all() == pytest.approx({"a": 1, "b": 2})
    assert device.events_made == 3


def test_the_number_of_events_is_bounded_however_long_nobody_reads():
    device = FakeDevice()
    timers = CUDATimerCollection(["step"], events=device, max_events=8)
    for _ in range(1000):
        with timers.region("step"):
            device.enqueue(ms=1)
        device.run(ms=1)
    assert device.events_made <= 8
    assert timers.dropped == 0
    assert timers.elapsed_ms("step") == pytest.approx(1000)
    assert timers.unread == 1000 - len(timers.harvest())


def test_intervals_beyond_the_bound_are_dropped_and_counted_not_waited_for():
    device = FakeDevice()
    timers = CUDATimerCollection(["step"], events=device, max_events=8)
    for _ in range(10):  # the GPU never gets there
        with timers.region("step"):
            device.enqueue(ms=1)
    assert device.waits == 0
    assert timers.dropped == 6
    assert timers.elapsed_ms("step") == pytest.approx(4)


def test_no_event_is_touched_while_a_graph_is_captured():
    device = FakeDevice()
    timers = CUDATimerCollection(["a"], events=device)
    with timers.region("a"):
        device.enqueue(ms=1)
    device.is_capturing = True
    touched = device.calls
    with timers.region("a"):
        pass
    assert timers.harvest() == ()
    assert device.calls == touched
    device.is_capturing = False
    assert timers.elapsed_ms("a") == pytest.approx(1)
    assert timers.dropped == 1


def test_a_region_behind_one_that_a_capture_left_untimed_has_its_own_time():
    device = FakeDevice()
    timers = CUDATimerCollection(["a", "b", "c"], events=device)
    with timers.region("a"):
        pass
    device.is_capturing = True
    timers.start("a")
    device.is_capturing = False
    timers.switch("a", "b")
    device.enqueue(ms=5)
    timers.switch("b", "c")
    device.enqueue(ms=3)
    timers.stop("c")
    assert timers.elapsed_all() == pytest.approx({"a": 0, "b": 5, "c": 3})
    assert timers.dropped == 1


def test_an_unknown_region_lists_the_known_ones():
    timers = CUDATimerCollection(["forward", "backward"], device="cpu")
    for call in (timers.start, timers.stop, timers.elapsed_ms):
        with pytest.raises(UnknownRegionError, match=r"'foward'.*forward, backward"):
            call("foward")


def test_a_region_out_of_order_says_what_to_do():
    timers = CUDATimerCollection(["forward"], device="cpu")
    with pytest.raises(TimerNotStartedError, match="start"):
        timers.stop("forward")
    timers.start("forward")
    with pytest.raises(TimerRunningError, match="stop"):
        timers.start("forward")


def test_disabled_does_nothing_also_for_unknown_regions():
    device = FakeDevice()
    timers = CUDATimerCollection(["forward"], enabled=False, events=device)
    assert not timers.enabled
    timers.start("no such")
    timers.stop("no such")
    with timers.region("no such"):
        pass
    timers.reset()
    assert timers.elapsed_ms("no such") == 0.0
    assert timers.elapsed_all() == {"forward": 0.0}
    assert timers.harvest() == ()
    assert device.calls == 0


def test_reset_lets_a_running_region_go_on():
    device = FakeDevice()
    timers = CUDATimerCollection(["epoch", "step"], events=device)
    timers.start("epoch")
    with timers.region("step"):
        device.enqueue(ms=1)
    timers.reset()
    device.enqueue(ms=2)
    timers.stop("epoch")
    assert timers.elapsed_all() == pytest.approx({"epoch": 3, "step": 0})


class Cycle:
    """What only the garbage collector frees, as a Trainer with its callbacks."""

    def __init__(self, held):
        self.held, self.itself = held, self


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_events_of_an_earlier_fit_outlive_a_forked_worker():
    """One that is destroyed there ends the worker, which has no CUDA."""
    gc.collect()
    event = DeviceEventSource(torch.device("cpu", 0)).new_event()
    alive = weakref.ref(event)
    Cycle(event)
    del event
    pid = os.fork()
    if not pid:
        gc.collect()
        os._exit(0 if alive() is not None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    gc.collect()
    assert alive() is None, "here it is freed as ever"

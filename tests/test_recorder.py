"""Attribution of a step's time, on a GPU of paper where every millisecond is known."""

import pytest

from lightning_forge_profiling.callbacks.step_timer import MAX_USER_REGIONS, StepRecorder
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.rates import StepWork
from tests.fakes import FakeDevice


@pytest.fixture
def device():
    return FakeDevice()


def recorder_on(device, **options):
    timers = CUDATimerCollection((), events=device, clock_ns=device.host_clock_ns)
    return StepRecorder(timers, clock_ns=device.host_clock_ns, **options)


def collect(recorder):
    seen = []
    recorder.listeners.append(lambda times, work, left_out: seen.append((times, work, left_out)))
    return seen


def inside(recorder, device, name, ms, *nested):
    recorder.enter(name)
    device.pass_host_time(ms=1)
    device.enqueue(ms)
    for call in nested:
        call()
    recorder.exit(name)


def test_the_built_in_regions_tile_the_step_by_self_time(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    device.enqueue(1)
    inside(recorder, device, "data", 2)
    inside(recorder, device, "transfer", 3)
    inside(  # a closure: forward and backward run inside the optimizer's step
        recorder,
        device,
        "optimizer",
        5,
        lambda: inside(recorder, device, "forward", 7),
        lambda: inside(recorder, device, "backward", 11),
        lambda: device.enqueue(13),
    )
    device.enqueue(17)
    device.pass_host_time(ms=1)
    recorder.end_step(StepWork(samples=4))
    recorder.finish(wait=True)
    times, work, _ = seen[0]
    assert dict(times.device_ms) == pytest.approx(
        {"data": 2, "transfer": 3, "forward": 7, "backward": 11, "optimizer": 18, "other": 18}
    )
    assert times.step_ms == pytest.approx(59)
    assert work.samples == 4


def test_the_end_of_a_step_needs_no_event_of_its_own_right_after_a_region(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    for _ in range(3):
        inside(recorder, device, "forward", 5)
        device.pass_host_time(ms=0.09)
        recorder.end_step(StepWork())
        device.pass_host_time(ms=1)
    recorder.finish(wait=True)
    assert [times.step_ms for times, *_ in seen] == pytest.approx([5, 5, 5])
    assert seen[1][0].host_ms["other"] == pytest.approx(1.09), "it counts to the step that follows"
    assert device.events_made == 8, "one at the start, two a step, one at the end"


@pytest.mark.parametrize(("host_ms", "counted_to"), [(0.09, "transfer"), (0.11, "other")])
def test_a_few_lines_of_python_before_the_transfer_count_to_it(device, host_ms, counted_to):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    inside(recorder, device, "data", 0)
    device.enqueue(2)
    device.pass_host_time(ms=host_ms)
    inside(recorder, device, "transfer", 0)
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    assert seen[0][0].device_ms[counted_to] == pytest.approx(2)
    assert seen[0][0].step_ms == pytest.approx(2)


def test_device_time_of_data_is_the_exposed_stall_only(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    inside(recorder, device, "forward", 30)
    recorder.end_step(StepWork())
    device.run(ms=10)  # the host ran ahead: 20 ms are still queued when it asks for the next batch
    recorder.enter("data")
    device.pass_host_time(ms=25)
    device.run(ms=25)
    recorder.exit("data")
    inside(recorder, device, "forward", 30)
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    second = seen[1][0]
    assert second.host_ms["data"] == pytest.approx(25)
    assert second.device_ms["data"] == pytest.approx(5), "20 of the 25 ms were hidden behind queued work"


def test_validation_is_no_part_of_a_step_and_what_comes_before_it_is(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    inside(recorder, device, "forward", 5)
    recorder.end_step(StepWork())
    device.enqueue(100)  # of callbacks and loggers that come after ours
    recorder.enter_validation()
    inside(recorder, device, "transfer", 1)  # of a validation batch
    inside(recorder, device, "checkpoint", 50)
    device.enqueue(200)
    recorder.exit_validation()
    inside(recorder, device, "data", 3)
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    times = seen[1][0]
    assert times.step_ms == pytest.approx(103)
    assert times.device_ms["other"] == pytest.approx(100)
    assert times.device_ms["validation"] == pytest.approx(201)
    assert times.device_ms["checkpoint"] == pytest.approx(50)
    assert "transfer" not in times.device_ms
    assert recorder.summary().excluded_ms["validation"] == pytest.approx(201)


def test_a_validation_run_that_never_says_it_ended_ends_with_the_next_fetch(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    inside(recorder, device, "forward", 1)
    recorder.end_step(StepWork())
    recorder.enter_validation()
    device.enqueue(7)
    inside(recorder, device, "data", 3)
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    assert seen[1][0].step_ms == pytest.approx(3)


def test_a_region_that_is_not_asked_for_falls_into_other(device):
    recorder = recorder_on(device, regions=("forward",))
    seen = collect(recorder)
    recorder.start()
    inside(recorder, device, "forward", 2)
    inside(recorder, device, "backward", 3)
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    assert dict(seen[0][0].device_ms) == pytest.approx({"forward": 2, "other": 3})


def test_a_closure_in_manual_optimization_shows_its_forward(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    recorder.enter("forward")
    recorder.enter("optimizer")
    device.enqueue(5)  # the closure computes the loss ...
    recorder.forward_in_closure()  # ... and calls backward
    inside(recorder, device, "backward", 7)
    device.enqueue(11)  # the optimizer's own work
    recorder.exit("optimizer")
    recorder.exit("forward")
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    assert dict(seen[0][0].device_ms) == pytest.approx({"forward": 5, "backward": 7, "optimizer": 11, "other": 0})


def test_users_regions_lie_over_the_built_in_ones(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    recorder.enter("forward")
    outer = recorder.open_region("block")
    inner = recorder.open_region("block")  # recursion: the same nanosecond is not counted twice
    device.enqueue(4)
    recorder.close_region("block", inner)
    recorder.close_region("block", outer)
    recorder.exit("forward")
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    times = seen[0][0]
    assert times.device_ms["block"] == pytest.approx(4)
    assert times.counts["block"] == 1
    assert times.step_ms == pytest.approx(4)


def test_users_regions_are_not_timed_in_validation_and_are_limited_in_number(device):
    recorder = recorder_on(device)
    recorder.start()
    recorder.enter_validation()
    assert recorder.open_region("block") is None
    recorder.exit_validation()
    tokens = [recorder.open_region(f"region {i}") for i in range(MAX_USER_REGIONS + 5)]
    assert sum(token is not None for token in tokens) == MAX_USER_REGIONS


def test_warm_up_and_recorded_steps_are_told_apart(device):
    recorder = recorder_on(device, warmup_steps=2)
    seen = collect(recorder)
    recorder.start()
    for step in range(5):
        inside(recorder, device, "forward", 1)
        recorder.end_step(StepWork(samples=2), recorded=step == 3)
    recorder.finish(wait=True)
    assert [left_out for *_, left_out in seen] == ["warm-up", "warm-up", None, "recorded", None]
    summary = recorder.summary()
    assert (summary.steps, summary.steady.steps, summary.warmup_steps, summary.recorded_steps) == (5, 2, 2, 1)
    assert summary.steady.samples == 4
    assert summary.samples == 10


def test_a_step_with_something_untimed_in_it_does_not_count(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    for step in range(3):
        device.is_capturing = step == 1  # a CUDA graph is captured in this step
        inside(recorder, device, "forward", 5)
        device.is_capturing = False
        recorder.end_step(StepWork(samples=1))
    recorder.finish(wait=True)
    assert [times.step for times, *_ in seen] == [0, 2]
    assert recorder.summary().untimed_steps == 1


def test_what_an_exception_left_open_ends_with_the_step(device):
    recorder = recorder_on(device)
    seen = collect(recorder)
    recorder.start()
    recorder.enter("forward")
    recorder.enter("backward")
    device.enqueue(2)  # raises, and the user's code carries on
    recorder.end_step(StepWork())
    inside(recorder, device, "forward", 3)
    recorder.end_step(StepWork())
    recorder.finish(wait=True)
    assert dict(seen[1][0].device_ms) == pytest.approx({"forward": 3, "other": 0})


def test_after_an_exception_nobody_waits_for_the_gpu(device):
    recorder = recorder_on(device)
    recorder.start()
    device.enqueue(1e9)
    recorder.end_step(StepWork())
    recorder.finish(wait=False)
    assert device.waits == 0
    assert recorder.summary().steady.steps == 0


def test_a_failure_inside_switches_the_recorder_off_and_says_so_once(device, caplog):
    recorder = recorder_on(device)

    def broken(*_):
        raise RuntimeError("listener broke")

    recorder.listeners.append(broken)
    recorder.start()
    for _ in range(5):
        inside(recorder, device, "forward", 1)
        recorder.end_step(StepWork())
        device.run(ms=10)
    recorder.finish(wait=True)
    assert not recorder.active
    assert [record.message for record in caplog.records].count(
        "Profiling is switched off for the rest of this run: RuntimeError: listener broke"
    ) == 1


def test_boundaries_outside_the_training_loop_are_ignored(device):
    recorder = recorder_on(device)
    inside(recorder, device, "forward", 1)  # sanity check, learning-rate finder
    recorder.end_step(StepWork())
    assert device.events_made == 0
    assert recorder.step == 0


@pytest.mark.parametrize(("regions", "counted"), [(400, 20), (9000, 0)])
def test_many_regions_a_step_are_all_counted_or_the_step_is_not(device, regions, counted):
    recorder = recorder_on(device)
    recorder.start()
    for _ in range(20):
        recorder.enter("forward")
        for _ in range(regions):
            token = recorder.open_region("layer")
            device.enqueue(0.5)
            recorder.close_region("layer", token)
            device.run(ms=0.5)
        recorder.exit("forward")
        recorder.end_step(StepWork())
        device.run(ms=1)
    recorder.finish(wait=True)
    steady = recorder.summary().steady
    assert steady.steps == counted
    assert recorder.summary().untimed_steps == 20 - counted
    assert steady.device_ms.get("layer", 0) == pytest.approx(counted * regions * 0.5)


def test_events_do_not_accumulate_over_a_long_run(device):
    recorder = recorder_on(device)
    recorder.start()

    def train(steps):
        for _ in range(steps):
            for region in REGIONS[:-1]:
                inside(recorder, device, region, 1)
            recorder.end_step(StepWork())
            device.run(ms=5)
        return device.events_made

    assert train(steps=1000) == train(steps=200)
    assert recorder.timers.dropped == 0

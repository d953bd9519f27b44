"""The timers with DeepSpeed's and Megatron's names."""

import pytest

from lightning_forge_profiling.compat import SynchronizedWallClockTimer, ThroughputTimer, print_rank_0
from lightning_forge_profiling.errors import TimerNotStartedError, TimerRunningError, UnknownRegionError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_elapsed_is_in_seconds_adds_up_and_resets():
    clock = Clock()
    timers = SynchronizedWallClockTimer(clock)
    for _ in range(2):
        timers("forward").start()
        clock.now += 0.5
        timers("forward").stop()
    assert timers("forward").elapsed(reset=False) == pytest.approx(1.0)
    assert timers("forward").elapsed() == pytest.approx(1.0)
    assert timers("forward").elapsed() == 0.0


def test_a_running_timer_can_be_read_and_goes_on():
    clock = Clock()
    timer = SynchronizedWallClockTimer(clock)("forward")
    timer.start()
    clock.now += 1
    assert timer.elapsed() == pytest.approx(1)
    clock.now += 2
    timer.stop()
    assert timer.elapsed() == pytest.approx(2)


def test_a_timer_works_without_a_group():
    clock = Clock()
    timer = SynchronizedWallClockTimer.Timer("forward", clock)
    for seconds in (0.5, 0.25):
        timer.start()
        clock.now += seconds
        timer.stop()
    assert timer.elapsed(reset=False) == pytest.approx(0.75)
    timer.start()
    clock.now += 2
    timer.stop(reset=True)
    assert timer.elapsed() == pytest.approx(2), "the sum starts anew with this time"
    with pytest.raises(TimerNotStartedError, match="'forward'"):
        timer.stop()
    assert isinstance(SynchronizedWallClockTimer()("forward"), SynchronizedWallClockTimer.Timer)


def test_log_prints_milliseconds_divided_by_the_normalizer(capsys):
    clock = Clock()
    timers = SynchronizedWallClockTimer(clock)
    for name, seconds in (("forward", 0.0246), ("backward", 0.05)):
        timers(name).start()
        clock.now += seconds
        timers(name).stop()
    timers.log(["forward", "backward"], normalizer=2.0)
    assert capsys.readouterr().out == "time (ms) | forward: 12.30 | backward: 25.00\n"
    assert timers("forward").elapsed() == 0.0


def test_misuse_of_wall_clock_timers():
    timers = SynchronizedWallClockTimer(Clock())
    with pytest.raises(TimerNotStartedError):
        timers("forward").stop()
    timers("forward").start()
    with pytest.raises(TimerRunningError):
        timers("forward").start()
    with pytest.raises(UnknownRegionError, match=r"'backward'.*forward"):
        timers.log(["backward"])
    with pytest.raises(ValueError, match="normalizer"):
        timers.log(["forward"], normalizer=0)


def throughput_after(steps, *, start_step=2, batch_size=8, num_workers=2, name=None):
    clock = Clock()
    timer = ThroughputTimer(name, batch_size, num_workers, start_step, clock=clock)
    for step in range(steps):
        timer.start()
        clock.now += 10.0 if step == 0 else 2.0
        timer.stop()
        clock.now += 1000.0  # between steps nothing counts
    return timer


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_give_minus_999(steps):
    timer = throughput_after(steps)
    assert timer.avg_samples_per_sec() == -999
    assert timer.avg_steps_per_sec() == -999


def test_averages_leave_the_first_step_out():
    timer = throughput_after(5)
    assert timer.avg_steps_per_sec() == pytest.approx(0.5)
    assert timer.avg_samples_per_sec() == pytest.approx(0.5 * 8 * 2)


def test_a_condition_that_is_false_times_nothing():
    timer = throughput_after(3)
    before = timer.avg_steps_per_sec()
    timer.start(cond=False)
    timer.stop(cond=False)
    assert timer.avg_steps_per_sec() == before
    with pytest.raises(TimerNotStartedError):
        timer.stop()


def test_elapsed_time_is_printed_every_thousand_steps(capsys):
    throughput_after(999, name="train").print_elapsed_time(num_ops=4e12)
    assert capsys.readouterr().out == ""
    throughput_after(1000, name="train").print_elapsed_time(num_ops=4e12)
    assert capsys.readouterr().out == "train: 2000.000 ms per step after 1000 steps, 2.00 TFLOP/s\n"


def test_print_rank_0_prints_without_a_process_group(capsys):
    print_rank_0("hello")
    assert capsys.readouterr().out == "hello\n"

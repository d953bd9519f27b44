"""The timers with DeepSpeed's and Megatron's names."""

from types import SimpleNamespace

import pytest

from lightning_forge_profiling.compat import SynchronizedWallClockTimer, ThroughputTimer, print_rank_0
from lightning_forge_profiling.errors import ConfigurationError, TimerNotStartedError, TimerRunningError


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
    for normalizer in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="normalizer"):
            timers.log(["forward"], normalizer=normalizer)
        with pytest.raises(ValueError, match="normalizer"):
            timers.get_mean(["forward"], normalizer=normalizer)


def timed(timer, clock, *seconds):
    for each in seconds:
        timer.start()
        clock.now += each
        timer.stop(reset=False, record=True)


def test_the_mean_leaves_out_a_tenth_at_either_end():
    clock = Clock()
    timer = SynchronizedWallClockTimer.Timer("forward", clock)
    assert timer.mean() == 0.0
    timed(timer, clock, 0.5)
    assert timer.mean() == pytest.approx(0.5)
    timed(timer, clock, *[0.5] * 8, 300.0)
    assert timer.mean() == pytest.approx(0.5), "of ten intervals the longest and the shortest are left out"
    assert timer.elapsed() == pytest.approx(304.5)
    assert timer.mean() == 0.0


def test_reading_a_running_timer_adds_no_interval_to_the_mean():
    clock = Clock()
    timer = SynchronizedWallClockTimer.Timer("forward", clock)
    timer.start()
    clock.now += 1
    assert timer.elapsed(reset=False) == pytest.approx(1)
    clock.now += 3
    timer.stop()
    assert timer.mean() == pytest.approx(4)


def test_names_that_were_never_timed_are_left_out(capsys):
    clock = Clock()
    timers = SynchronizedWallClockTimer(clock)
    timed(timers("bwd"), clock, 0.002, 0.004)
    assert timers.get_mean(["bwd", "bwd_allreduce"]) == {"bwd": pytest.approx(3.0)}
    timers.log(["bwd", "bwd_allreduce"], memory_breakdown=True)
    line = capsys.readouterr().out
    assert line.startswith("time (ms) | bwd: 6.00 | mem_allocated: ")
    assert line.count("cache_allocated: ") == 2
    assert timers.get_timers().keys() == {"bwd"}
    assert "bwd_allreduce" not in timers.get_timers(), "asking for a time makes no timer"


def test_log_prints_on_the_ranks_that_are_named(capsys, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    timers = SynchronizedWallClockTimer(Clock())
    timers.log([])
    assert capsys.readouterr().out == ""
    timers.log([], ranks=[0, 1])
    assert capsys.readouterr().out == "time (ms)\n"


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


def deepspeed_timer(clock, *, enabled=True, synchronized=True, **options):
    """As DeepSpeed's engine makes it since 0.14."""
    config = SimpleNamespace(enabled=enabled, synchronized=synchronized)
    return ThroughputTimer(config, batch_size=16, clock=clock, **options)


def accumulate(timer, clock, steps, *, micro_steps=2, seconds=1.0):
    """Micro-steps as DeepSpeed's engine times them, with gradient accumulation."""
    for _ in range(steps):
        for micro_step in range(micro_steps):
            timer.start()
            clock.now += seconds
            timer.stop(global_step=micro_step == micro_steps - 1, report_speed=True)
            clock.now += 1000.0


def test_with_a_config_micro_steps_add_up_to_a_step():
    clock = Clock()
    timer = deepspeed_timer(clock)
    accumulate(timer, clock, 2, seconds=50.0)
    assert timer.avg_samples_per_sec() == float("-inf"), "the first two steps are not timed"
    accumulate(timer, clock, 3)
    assert timer.global_step_count == 5
    assert timer.avg_steps_per_sec() == pytest.approx(0.5)
    assert timer.avg_samples_per_sec() == pytest.approx(8.0)
    timer.start()
    clock.now += 100.0
    timer.stop()
    assert timer.avg_samples_per_sec() == pytest.approx(8.0), "only whole steps count"


@pytest.mark.parametrize("options", [(2, 3), (2, 3, False, None)])
def test_with_a_config_the_speed_is_logged_every_so_many_steps(options, capsys):
    clock = Clock()
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = ThroughputTimer(config, 16, *options, clock=clock)
    accumulate(timer, clock, 6)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "epoch=0/micro_step=6/global_step=3",
        "epoch=0/micro_step=12/global_step=6",
    ]
    assert ", RunningAvgSamplesPerSec=8.0, CurrSamplesPerSec=8.0, MemAllocated=" in lines[0]


def test_with_a_config_the_line_goes_to_logging_fn_and_counts_micro_steps_of_the_epoch(capsys):
    lines = []
    clock = Clock()
    timer = deepspeed_timer(clock, start_step=0, steps_per_output=1, logging_fn=lines.append)
    accumulate(timer, clock, 1)
    timer.update_epoch_count()
    accumulate(timer, clock, 1)
    assert [line.partition(",")[0] for line in lines] == [
        "epoch=0/micro_step=2/global_step=1",
        "epoch=1/micro_step=2/global_step=2",
    ]
    timer.start()
    timer.stop(global_step=True, report_speed=False)
    assert len(lines) == 2
    assert capsys.readouterr().out == ""


def test_a_config_that_is_not_enabled_times_nothing():
    timer = deepspeed_timer(Clock(), enabled=False)
    timer.stop()
    timer.start()
    timer.stop(global_step=True)
    assert timer.global_step_count == 0


@pytest.mark.parametrize(("synchronized", "waits"), [(True, 4), (False, 0)])
def test_only_a_synchronized_config_waits_for_the_gpu(synchronized, waits, monkeypatch):
    waited = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waited.append(1))
    clock = Clock()
    accumulate(deepspeed_timer(clock, synchronized=synchronized), clock, 1)
    assert len(waited) == waits


def test_the_first_argument_of_stop_is_that_of_the_version():
    clock = Clock()
    timer = deepspeed_timer(clock, start_step=0)
    for ends_a_step in (False, True):
        timer.start()
        clock.now += 1
        timer.stop(ends_a_step)
    assert (timer.micro_step_count, timer.global_step_count) == (2, 1)
    assert timer.avg_steps_per_sec() == pytest.approx(0.5)


def test_what_a_throughput_timer_refuses():
    config = SimpleNamespace(enabled=True, synchronized=True)
    with pytest.raises(TypeError, match=r"a name or a config .* got int"):
        ThroughputTimer(8, 4)
    with pytest.raises(ConfigurationError, match="monitor_memory"):
        ThroughputTimer(config, 8, monitor_memory=True)
    with pytest.raises(ConfigurationError, match="steps_per_output must be positive or None, got 0"):
        ThroughputTimer(config, 8, steps_per_output=0)
    with pytest.raises(TypeError, match="num_workers"):
        ThroughputTimer(config, 8, num_workers=4)
    with pytest.raises(TimerNotStartedError):
        ThroughputTimer(config=config, batch_size=None).stop()


def test_print_rank_0_prints_without_a_process_group(capsys):
    print_rank_0("hello")
    assert capsys.readouterr().out == "hello\n"

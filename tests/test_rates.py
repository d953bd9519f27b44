"""Means and shares of steps on two clocks: the GPU's and the host's, which differ."""

import pytest

from lightning_forge_profiling.names import LOADER_START, WHOLE
from lightning_forge_profiling.schema import WorkerRestarts
from lightning_forge_profiling.timing.run_totals import RunTotals, percentiles
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork


def totals_of(*steps):
    """Totals over steps of device times, host times, and whether they were split by choice."""
    totals = RunTotals()
    for number, (device_ms, host_ms, chosen) in enumerate(steps):
        times = StepTimes(number, device_ms, host_ms)
        totals.add(times, StepWork(optimizer_steps=1), None, StepTiming(chosen=chosen))
    return totals


def sums(timing, clock="device_ms"):
    """Times by region of all steps by a clock, but for regions without any."""
    return {name: timing.steps * ms for name, region in timing.regions.items() if (ms := getattr(region, clock))}


def test_host_means_are_of_the_hosts_clock():
    totals = RunTotals(on_device=True)
    for step in range(4):
        totals.add(StepTimes(step, {"forward": 10.0, "data": 1.0}, {"forward": 2.0, "data": 3.0}), StepWork(), None)
    timing = totals.steady()
    assert (timing.regions["forward"].device_ms, timing.regions["forward"].host_ms) == (10, 2)
    assert (timing.step_ms.mean, timing.host_step_ms) == (11, 5)
    assert (timing.regions["backward"].device_ms, timing.regions["backward"].host_ms) == (0, 0)
    assert (RunTotals().steady().step_ms.mean, RunTotals().steady().host_step_ms) == (0, 0)
    metrics = timing.metrics()
    assert (metrics["time/forward_ms"], metrics["time_host/forward_ms"], metrics["time_host/step_ms"]) == (10, 2, 5)


def test_each_clock_divides_unsplit_steps_by_its_own_times():
    rates = totals_of(
        ({"forward": 6.0, "backward": 4.0}, {"forward": 1.0, "backward": 3.0}, True),
        ({WHOLE: 20.0}, {WHOLE: 8.0}, True),
        ({WHOLE: 30.0}, {WHOLE: 4.0}, True),
    ).steady()
    assert (rates.steps, rates.split_steps) == (3, 1)
    assert sums(rates) == pytest.approx({"forward": 36, "backward": 24})
    assert sums(rates, "host_ms") == pytest.approx({"forward": 4, "backward": 12})


def test_a_step_that_had_to_be_split_represents_no_other():
    rates = totals_of(
        ({"forward": 6.0, "backward": 4.0}, {"forward": 5.0, "backward": 5.0}, True),
        ({"forward": 90.0, "backward": 10.0}, {"forward": 9.0, "backward": 1.0}, False),
        ({WHOLE: 10.0}, {WHOLE: 10.0}, True),
    ).steady()
    assert sums(rates) == pytest.approx({"forward": 102, "backward": 18})
    assert sums(rates, "host_ms") == pytest.approx({"forward": 19, "backward": 11})


@pytest.mark.parametrize("long_ones", [1, 4])
def test_a_long_step_among_few_split_ones_stands_for_long_ones_alone(long_ones):
    """Of 100 steps 10 were split, one of them with 200 ms in its update: it is no tenth of the others."""
    usual, long = {"forward": 18.0, "optimizer": 2.0}, {"forward": 18.0, "optimizer": 202.0}
    steps = [(long if number == 50 else usual) if number % 10 == 0 else {WHOLE: 20.0} for number in range(100)]
    for number in range(1, long_ones):
        steps[50 + number] = {WHOLE: 220.0}
    rates = totals_of(*((step, step, True) for step in steps)).steady()
    assert rates.regions["forward"].device_ms == pytest.approx(18)
    assert rates.regions["optimizer"].device_ms == pytest.approx(2 + 2 * long_ones)


def test_loader_starts_are_data_on_both_clocks():
    timing = totals_of(
        ({"data": 1.0, LOADER_START: 5.0}, {"data": 2.0, LOADER_START: 40.0}, True),
        ({"data": 1.0}, {"data": 2.0}, True),
    ).timing(steps=2, before_first_s=0.0, wall_s=1.0, workers=4)
    assert (sums(timing), sums(timing, "host_ms")) == ({"data": 7}, {"data": 44})
    assert timing.worker_restarts == WorkerRestarts(count=1, workers=4, device_ms=2.5, host_ms=20.0)


def test_own_time_of_steps_and_of_log_entries_is_per_step():
    totals = RunTotals()
    for number in range(4):
        times = StepTimes(number, {"forward": 10.0}, {"forward": 2.0})
        totals.add(times, StepWork(), None, StepTiming(timing_us=30.0))
    totals.add_log_time(800.0)
    rates = totals.take()
    assert rates.overhead_us == (4 * 30 + 800) / 4
    assert (rates.step_ms.mean, rates.host_step_ms) == (10, 2), "neither is in the steps"
    assert totals.take().overhead_us is None, "it was taken"
    assert totals.steady().overhead_us == 230


def test_percentiles():
    assert percentiles(range(101)) == (50, 95)
    assert percentiles([1.0, 2.0, 9.0]) == (2, None), "too few for the 95th"

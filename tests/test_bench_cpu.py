"""`benchmark` on this machine's CPU, and its parts that need no device."""

import gc
from math import inf
from time import perf_counter_ns

import numpy as np
import pytest
import torch

from lightning_forge_profiling.bench.benchmark import Options, benchmark, collect, drift, time_call
from lightning_forge_profiling.bench.call import TimedCall
from lightning_forge_profiling.bench.methods import CALL, busy_us_per_call
from lightning_forge_profiling.errors import ForgeProfilingError


class Host:
    """A clock that only the function moves."""

    def __init__(self):
        self.ns = 0

    def clock_ns(self):
        return self.ns

    def work(self, ns):
        self.ns += ns


def options(**others):
    return Options(**{"min_time": 0.01, "max_time": 0.5, **others})


@pytest.mark.parametrize("ns", [40, 3_000, 900_000, 300_000_000])
def test_a_call_takes_what_the_clock_says_from_nanoseconds_to_a_third_of_a_second(ns):
    host = Host()
    result = time_call(TimedCall(host.work, (ns,)), options(), clock_ns=host.clock_ns)
    assert result.median_us == ns / 1e3
    assert (result.calls_per_sample == 1) == (ns >= 900_000)


def test_a_first_call_that_compiles_is_no_sample():
    host = Host()
    times = iter([2_000_000_000])
    result = time_call(TimedCall(lambda: host.work(next(times, 50_000)), ()), options(), clock_ns=host.clock_ns)
    assert max(result.samples_us) == 50.0
    assert result.warnings == ()


def test_a_function_of_many_seconds_is_called_few_times_with_a_warning():
    host = Host()
    calls = []

    def slow():
        calls.append(0)
        host.work(10_000_000_000)

    result = time_call(TimedCall(slow, ()), options(), clock_ns=host.clock_ns)
    assert len(calls) <= 3
    assert any("too few" in warning for warning in result.warnings)


def test_no_sample_is_begun_that_would_end_after_max_time():
    host = Host()
    result = time_call(TimedCall(host.work, (300_000_000,)), options(one_call_warms_up=True), clock_ns=host.clock_ns)
    assert len(result.samples_us) == 1


def test_a_clock_that_gives_no_sample_ends_with_a_sentence():
    host = Host()

    def nothing():
        host.work(1_000_000)
        return []

    with pytest.raises(ForgeProfilingError, match=r"Could not collect a sample within max_time \(0.5 s\)"):
        collect(nothing, options(), host.clock_ns)


def test_a_real_function_is_timed_near_what_it_takes():
    vector, fastest_us = torch.ones(1000), inf

    def add(x, number):
        nonlocal fastest_us
        began = perf_counter_ns()
        torch.add(x, number)
        fastest_us = min(fastest_us, (perf_counter_ns() - began) / 1e3)

    began = perf_counter_ns()
    result = benchmark(add, vector, 1, max_time=0.3)
    passed_us = (perf_counter_ns() - began) / 1e3
    assert (result.method, result.device, result.name) == ("cpu", "cpu", f"{add.__qualname__}(float32[1000], 1)")
    assert fastest_us <= min(result.samples_us)
    assert result.samples_us[-1] * result.calls_per_sample <= passed_us
    assert result.calls_per_sample > 1
    assert gc.isenabled()


@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_however_few_calls_warm_it_up_a_sample_is_of_many_short_ones(one_call, slow):
    host = Host()
    first = iter([3_000_000] * slow)
    reading_ns = 50

    def clock_ns():
        host.work(reading_ns)
        return host.ns

    short = TimedCall(lambda: host.work(next(first, 40)), ())
    result = time_call(short, options(one_call_warms_up=one_call), clock_ns=clock_ns)
    assert result.median_us == pytest.approx(0.04, rel=0.01)
    assert result.calls_per_sample > 1000


def test_a_single_call_can_be_the_warm_up():
    host = Host()
    calls = []
    slow = TimedCall(lambda: (calls.append(0), host.work(400_000_000)), ())
    result = time_call(slow, options(one_call_warms_up=True), clock_ns=host.clock_ns)
    assert len(calls) - len(result.samples_us) == 1


def test_an_error_of_the_function_reaches_the_caller_and_the_collector_runs_again():
    with pytest.raises(ZeroDivisionError):
        benchmark(lambda: 1 / 0)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([10.0] * 40, ""),
        ([10.0, 11.0] * 20, ""),
        ([10.0] * 20 + [50.0] + [10.0] * 20, ""),
        ([40.0] + [10.0] * 30, "first sample"),
        ([14.0] * 12 + [10.0] * 36, "first quarter"),
        ([10.0] * 36 + [14.0] * 12, "getting slower"),
        ([40.0] + [10.0] * 5, ""),
    ],
)
def test_drift_is_named_and_single_outliers_are_not(samples, said):
    assert said in drift(samples)
    assert bool(drift(samples)) == bool(said)


@pytest.mark.parametrize("count", [20, 40])
def test_noise_is_seldom_taken_for_drift(count):
    random = np.random.default_rng(0)
    said = [drift(list(10 * (1 + random.uniform(-0.3, 0.3, count)))) for _ in range(1000)]
    assert sum(map(bool, said)) < 25


@pytest.mark.parametrize("count", [20, 100])
def test_drift_in_noise_is_found_in_as_few_samples(count):
    random = np.random.default_rng(0)
    moves = np.linspace(1, 2, count)
    said = [drift(list(moves * (1 + random.uniform(-0.1, 0.1, count)))) for _ in range(100)]
    assert sum("getting slower" in text for text in said) > 95


def span(start, end):
    return {"ph": "X", "cat": "user_annotation", "name": CALL, "ts": start, "dur": end - start, "args": {}}


def work(number, launched, start, end, kind="kernel", *, api="cuda_runtime"):
    args = {"correlation": number}
    return [
        {"ph": "X", "cat": api, "name": "launch", "ts": launched, "dur": 1, "args": args},
        {"ph": "X", "cat": kind, "name": "k", "ts": start, "dur": end - start, "args": args},
    ]


def test_a_calls_time_is_the_union_of_the_work_launched_in_it():
    events = [
        {"ph": "M", "name": "process_name", "args": {}},
        span(100, 110),
        span(120, 130),
        span(140, 150),
        *work(1, 90, 95, 119, "gpu_memset"),  # the flush before the first call
        *work(2, 101, 300, 310),
        *work(3, 102, 305, 320, "gpu_memcpy"),  # on another stream, over the first
        *work(4, 110, 340, 345, api="cuda_driver"),  # after a gap, which does not count
        *work(5, 125, 400, 407),
        {"ph": "X", "cat": "gpu_user_annotation", "name": CALL, "ts": 300, "dur": 200, "args": {}},
    ]
    assert busy_us_per_call(events) == [25.0, 7.0, 0.0]  # the third call launched nothing


def test_work_without_a_known_launch_belongs_to_no_call():
    events = [span(100, 110), work(1, 105, 200, 210)[1]]
    assert busy_us_per_call(events) == [0.0]

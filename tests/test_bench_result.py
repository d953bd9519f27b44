"""What a measurement looks like: its figures, its text, its JSON; and comparing several."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from lightning_forge_profiling.bench.result import (
    BenchmarkResult,
    compare_benchmarks,
    in_unit,
    median_interval,
    median_noise,
)
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.clocks import ClockSummary

CLOCK = ClockSummary(1900.0, 1700, 1980, 1980, ("power cap",), 3)


def result(samples, name="f", **options):
    return BenchmarkResult(name=name, method="graph", device="GPU", samples_us=tuple(samples), **options)


def test_the_figures_are_those_of_the_samples():
    samples = np.random.default_rng(0).gamma(3, 2, 1001)
    measured = result(samples)
    assert measured.median_us == np.median(samples)
    assert measured.mean_us == pytest.approx(samples.mean())
    assert (measured.min_us, measured.p5_us, measured.p95_us) == (samples.min(), *np.percentile(samples, [5, 95]))
    assert measured.iqr_us == pytest.approx(np.subtract(*np.percentile(samples, [75, 25])))


def test_the_interval_of_the_median_holds_the_true_one_in_95_of_100_cases_by_the_exact_binomial():
    wider = []  # by a sample on either side than it need be
    for count in (*range(6, 500), 1000, 3000):
        low, high = median_interval(range(1, count + 1))
        assert high == count + 1 - low
        beyond = sum(math.comb(count, below) for below in range(low)) / 2**count
        assert 2 * beyond <= 0.05, count
        if 2 * (beyond + math.comb(count, low) / 2**count) <= 0.05:
            wider.append(count)
    assert wider == [17, 44, 67, 94, 138, 190, 267, 301, 396, 438]


@pytest.mark.parametrize("count", [6, 21])
def test_the_interval_of_the_median_holds_it_in_samples_that_are_drawn(count):
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        samples = random.lognormal(0, 1, count)  # its median is 1
        low, high = median_interval(samples.tolist())
        assert median_noise(samples) == pytest.approx((high - low) / 2 / np.median(samples))
        hits += low <= 1 <= high
    assert hits / 2000 > 0.943  # 95 % less three halves of its standard error


def test_five_samples_say_nothing_about_how_well_the_median_is_known():
    assert median_noise([1.0] * 5) == math.inf
    assert median_noise([1.0] * 6) == 0


def test_a_result_survives_json():
    measured = result(
        [2.0, 1.0, 3.0], clock=CLOCK, warnings=("it waits",), waits_for_gpu=True, enqueue_us=5.0, queued_us=2.5
    )
    text = measured.to_json(indent=1)
    assert BenchmarkResult.from_json(text) == measured
    assert json.loads(text)["median_us"] == 2.0
    assert json.loads(text)["noise"] is None  # three samples: unknown, and JSON has no infinity
    assert json.loads(text)["clock"]["reasons"] == ["power cap"]


def test_a_printed_result_has_the_measurement_and_its_warnings():
    given = {"clock": CLOCK, "warnings": ("it waits",), "calls_per_sample": 400, "enqueue_us": 5.0}
    text = str(result([2.0] * 40, allocated_bytes=4096, **given))
    parts = (
        "f on GPU",
        "2.00 µs, median of 40 samples of 400 calls, known to ±0.0% within this run",
        "graph, L2 hot",
        "1700 to 1980",
        "it waits",
    )
    assert "4 CPU threads" in str(result([2.0], threads=4))
    for part in (*parts, "4,096 bytes from the caching allocator"):
        assert part in text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.00123, "1.23 ns"),
        (0.5, "500 ns"),
        (12.34, "12.3 µs"),
        (999.9, "1000 µs"),
        (1500, "1.50 ms"),
        (2.5e6, "2.50 s"),
    ],
)
def test_times_are_printed_in_a_unit_that_suits_them(us, text):
    assert in_unit(us) == text


def noisy(random, median, count=200, drift=0.0, noise=0.02):
    walk = np.cumsum(random.normal(0, drift, count)) if drift else 0.0
    return median * (1 + walk + random.normal(0, noise, count))


def test_a_real_difference_is_shown_with_an_interval_around_it():
    random = np.random.default_rng(3)
    comparison = compare_benchmarks(
        [result(noisy(random, us), name) for _ in range(5) for us, name in ((10, "f"), (9, "g"))]
    )
    (other,) = comparison.functions
    assert other.outcome == "faster"
    assert other.ratio.low < 0.9 < other.ratio.high
    assert other.ratio.high - other.ratio.low < 0.03
    assert "faster" in str(comparison)


@pytest.mark.parametrize("runs", [1, 5])
def test_no_difference_is_shown_where_there_is_none(runs):
    random = np.random.default_rng(4)
    found = [
        compare_benchmarks([result(noisy(random, 10), name) for _ in range(runs) for name in "fg"]).functions[0].outcome
        for _ in range(40)
    ]
    assert sum(outcome in {"faster", "slower"} for outcome in found) <= 5  # 5 % of 40 is 2


def test_runs_of_one_name_widen_the_interval_by_what_differs_between_them():
    random = np.random.default_rng(5)
    levels = [(10.0, 11.1), (10.6, 9.0), (9.7, 11.5), (10.2, 8.8), (10.1, 10.0)]
    runs = [result(noisy(random, level), name) for pair in levels for name, level in zip("fg", pair, strict=True)]
    comparison = compare_benchmarks(runs)
    assert comparison.functions[0].outcome == "too noisy"


def test_runs_made_in_turns_are_compared_pair_by_pair():
    random = np.random.default_rng(5)
    levels = [10.0, 11.0, 12.0, 13.0, 14.0]  # the machine gets slower
    first, second = (
        [result(noisy(random, us * factor), name) for us in levels] for name, factor in (("f", 1), ("g", 1.1))
    )
    in_turns = compare_benchmarks(run for pair in zip(first, second, strict=True) for run in pair)
    assert in_turns.functions[0].outcome == "slower"
    assert compare_benchmarks([*first, *second]).functions[0].outcome == "too noisy"


@pytest.mark.parametrize("samples", [1, 3])
def test_a_call_of_which_a_run_has_few_samples_is_compared_by_its_runs(samples):
    random = np.random.default_rng(8)
    runs = [result(noisy(random, us, samples), name) for _ in range(5) for us, name in ((1e6, "f"), (3e6, "g"))]
    comparison = compare_benchmarks(runs)
    (other,) = comparison.functions
    assert other.outcome == "slower"
    assert 2.8 < other.ratio.low < other.ratio.ratio < other.ratio.high < 3.2
    assert comparison.warnings == ()


@pytest.mark.parametrize(("method", "said"), [("kernels", True), ("graph", True), ("wall", False)])
def test_a_ratio_of_what_the_gpu_takes_is_no_ratio_of_the_loop_where_the_host_takes_longer(method, said):
    given = {"device": "GPU", "method": method}
    first = BenchmarkResult(name="eager", samples_us=(30.0,) * 9, enqueue_us=100.0, **given)
    second = BenchmarkResult(name="fused", samples_us=(9.0,) * 9, enqueue_us=77.0, **given)
    warnings = " ".join(compare_benchmarks([first, second]).warnings)
    assert ("host is the limit of eager: it takes 100 µs to launch what takes the GPU 30.0 µs" in warnings) == said
    assert ("host is the limit of fused: it takes 77.0 µs" in warnings) == said


def test_what_the_gpu_is_the_limit_of_is_compared_without_a_warning():
    runs = [result([100.0] * 9, name, enqueue_us=20.0) for name in "fg"]
    assert compare_benchmarks(runs * 5).warnings == ()


@pytest.mark.parametrize("zero", ["f", "g"])
def test_what_takes_no_time_cannot_be_compared(zero):
    with pytest.raises(ConfigurationError, match=f"A median of {zero} is 0"):
        compare_benchmarks([result([0.0 if name == zero else 1.0] * 9, name) for name in "fg"])


def test_too_few_samples_have_no_interval():
    comparison = compare_benchmarks([result([1.0] * 3, "f"), result([1.5] * 3, "g")])
    assert comparison.functions[0].outcome == "too short"
    assert "[unknown]" in str(comparison)
    assert comparison.functions[0].ratio.low is None


def test_results_that_were_measured_differently_are_compared_with_a_warning():
    slow = ClockSummary(1500.0, 1500, 1500, 1980, (), 0)
    fast = ClockSummary(1980.0, 1980, 1980, 1980, (), 0)
    comparison = compare_benchmarks(
        [result([1.0] * 9, "f", clock=slow, flush_l2=True), result([1.0] * 9, "g", clock=fast)]
    )
    assert "the results differ in whether the L2 cache was flushed" in comparison.warnings
    assert any("1500 to 1980 MHz" in warning for warning in comparison.warnings)


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        ({"threads": 64}, "CPU threads"),
        ({"device": "another CPU"}, "device"),
        ({"method": "kernels", "device": "GPU", "threads": None}, "method and device"),
    ],
)
def test_results_of_other_threads_or_another_device_are_compared_with_a_warning(other, differing):
    given = {"method": "cpu", "device": "a CPU", "threads": 4, "samples_us": (1.0,) * 9}
    first = BenchmarkResult(name="f", **given)
    assert compare_benchmarks([first, BenchmarkResult(name="g", **given)] * 5).warnings == ()
    comparison = compare_benchmarks([first, BenchmarkResult(**({"name": "g"} | given | other))] * 5)
    assert comparison.warnings == (f"the results differ in {differing}",)


def test_runs_of_one_name_that_are_clearly_of_different_functions_are_named():
    given = {"f": (10.0, 10.1, 30.0), "g": (12.0, 13.0, 11.0)}
    runs = [result([us] * 9, name) for name, medians in given.items() for us in medians]
    [warning] = [text for text in compare_benchmarks(runs).warnings if "different functions" in text]
    assert warning.startswith("the runs of f took from 10.0 µs to 30.0 µs: ")
    assert "name=" in warning


def test_one_name_alone_cannot_be_compared():
    with pytest.raises(ConfigurationError, match="name"):
        compare_benchmarks([result([1.0] * 9), result([2.0] * 9)])


# -- names and files from elsewhere ----------------------------------------------------------------------------------

HOSTILE = ["a\x1b[31mred\x07\x00", "\ud800", "\ufffe", "line\nbreak\u2028and\u202eback", "tab\tand\x9bcsi"]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_reaches_the_terminal_as_an_escape_sequence_or_a_line(text):
    clock = ClockSummary(1900.0, 1700, 1980, 1980, (text,), 3)
    given = {"samples_us": (1.0,) * 9, "clock": clock, "warnings": (text,)}
    measured = BenchmarkResult(name=text, method=text, device=text, **given)
    bound = [result([1.0] * 9, name, enqueue_us=5.0) for name in (text, text + "x")]  # a warning names each of them
    for shown, lines in ((str(measured), 5), (str(compare_benchmarks(bound * 5)), 4)):
        assert len(shown.splitlines()) == lines
        assert all(character.isprintable() for character in shown.replace("\n", ""))
    assert BenchmarkResult.from_json(measured.to_json()) == measured


def test_what_a_terminal_cannot_show_is_escaped_so_that_names_stay_apart():
    assert str(result([1.0], "a\x1b[31mred\x00")).startswith("a\\x1b[31mred\\x00 on GPU\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 5},
        {"method": None},
        {"device": ["cpu"]},
        {"flush_l2": "yes"},
        {"waits_for_gpu": 1},
        {"samples_us": "12"},
        {"samples_us": [True]},
        {"samples_us": [None]},
        {"samples_us": {"1": 2}},
        {"samples_us": []},
        {"calls_per_sample": "x"},
        {"calls_per_sample": None},
        {"calls_per_sample": True},
        {"enqueue_us": "fast"},
        {"queued_us": -1.0},
        {"allocated_bytes": 1.5},
        {"threads": -1},
        {"warnings": "abc"},
        {"warnings": None},
        {"warnings": [1]},
        {"clock": 5},
        {"clock": {"median_mhz": 1}},
        {"clock": {**asdict(CLOCK), "reasons": "abc"}},
        {"clock": {**asdict(CLOCK), "median_mhz": "x"}},
    ],
)
def test_json_with_a_field_of_the_wrong_kind_is_refused(wrong):
    right = {"name": "f", "method": "cpu", "device": "cpu", "samples_us": [1.0], "clock": asdict(CLOCK)}
    assert str(BenchmarkResult.from_json(json.dumps(right))).startswith("f on cpu")
    with pytest.raises(ConfigurationError, match="Not a result of to_json"):
        BenchmarkResult.from_json(json.dumps(right | wrong))

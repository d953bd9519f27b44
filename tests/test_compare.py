"""Two traces side by side: what changed, and when a gate fails."""

import io
import re

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.comparison.compare import compare
from lightning_forge_profiling.comparison.outcome import gates, print_comparison
from lightning_forge_profiling.comparison.ratio import decide, ratio_of, steps_needed
from lightning_forge_profiling.comparison.source import TRACE_METRICS, trace_source
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.timing.bootstrap import FEWEST_PIECES, Estimate, bootstrap_difference, median_estimate
from tests.models import Classifier, loader
from tests.samples import sample_analysis

CUT_OFF = 999.0  # the sample's last step is a cut-off one


def run(steps, ranks=1):
    return sample_analysis(ranks, step_ms=[*steps, CUT_OFF])


def steps(mean, spread, count=20, seed=1):
    """Step times as they are: a floor that some steps lie well above."""
    return list(mean + spread * np.random.default_rng(seed).exponential(size=count))


def compared(before, after, limit=None):
    return compare([trace_source(before)], [trace_source(after)], limit_pct=limit)


def decided(before, after, limit, metric="step", ranks=1):
    return gates(compared(run(before, ranks), run(after, ranks), limit), [metric], limit)[0]


def printed(comparison, decided=(), width=80):
    text = io.StringIO()
    print_comparison(comparison, decided, Screen(text, width=width), verbose=True)
    return text.getvalue()


# --- the gate --------------------------------------------------------------------------------------------------------


def test_the_same_run_is_the_same_also_without_any_tolerance_where_steps_do_not_vary():
    decision = decided([50.0] * 20, [50.0] * 20, 0)
    assert decision.outcome == "same"
    assert decision.text == "step +0.0 % (+0.0 to +0.0 %): 50.0 to 50.0 ms"


def test_without_any_tolerance_steps_that_vary_leave_it_open():
    assert decided(steps(50, 1), steps(50, 1), 0).outcome == "too noisy"


@pytest.mark.parametrize("metric", TRACE_METRICS)
def test_what_is_20_percent_worse_fails_at_10_and_passes_at_30(metric):
    before, after = steps(50, 0.5), [1.2 * ms for ms in steps(50, 0.5, seed=2)]
    assert decided(before, after, 10, metric, ranks=2).outcome == "slower"
    assert decided(before, after, 30, metric, ranks=2).outcome == "same"
    assert decided(before, after, 10, metric, ranks=2).text.startswith(metric.replace("_", " ") + " 20 % slower (")


def test_what_got_better_is_faster():
    decision = decided(steps(50, 1), steps(30, 1), 0)
    assert decision.outcome == "faster"
    assert re.fullmatch(r"step (39|40) % faster \(3\d to 4\d %\): 5\d.\d to 3\d.\d ms", decision.text)


def test_a_difference_within_the_noise_is_undecided_and_the_steps_that_it_takes_are_named():
    decision = decided(steps(50, 30, count=8), [1.2 * ms for ms in steps(50, 30, count=8, seed=3)], 5)
    assert decision.outcome == "too noisy"
    assert re.fullmatch(r"about \d[\d,]+ steps a side would decide", decision.missing)


def test_one_slow_step_does_not_fail_a_run():
    assert decided([50.0] * 10, [50.0] * 9 + [500.0], 1).outcome == "same"


@pytest.mark.parametrize("count", [1, 3, 4])
def test_too_few_steps_to_tell_are_too_short_and_it_is_said(count):
    for sides in ((count, 20), (20, count)):
        decision = decided(*([50.0 * (1 + side)] * sides[side] for side in (0, 1)), 10)
        assert decision.outcome == "too short"
        assert "each side needs 5" in decision.missing
        assert decision.text == "step +100 %, no interval: 50.0 to 100 ms", "the difference is still shown"


def test_ten_times_slower_is_slower_however_few_the_steps():
    assert decided([50.0] * 2, [500.0] * 2, 10).outcome == "slower"
    assert decided([500.0] * 2, [50.0] * 2, 10).outcome == "faster"


def test_from_five_steps_on_there_is_an_interval():
    assert FEWEST_PIECES == 5
    assert decided([50.0, 50.1, 50.2, 50.1, 50.0], [60.0, 60.1, 60.2, 60.1, 60.0], 10).outcome == "slower"


def test_what_was_not_there_before_is_worse_than_any_limit():
    [decision] = gates(compared(run([50.0] * 6), run([50.0] * 6, ranks=2), 1000), ["comm"], 1000)
    assert decision.outcome == "slower"
    assert decision.text.startswith("comm 0 to ")


def test_of_several_gates_the_worst_decides():
    comparison = compared(run(steps(50, 0.5)), run([1.2 * ms for ms in steps(50, 0.5)]), 5)
    decided = gates(comparison, ["comm", "step"], 5)
    assert [(gate.metric, gate.outcome) for gate in decided] == [("step", "slower"), ("comm", "same")]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1.0, 0.5])
def test_equal_runs_with_the_steps_that_are_said_to_be_needed_pass_in_four_of_five_comparisons(limit):
    """By simulation: a binomial count of 200 scatters by 6 % at two standard deviations."""
    random = np.random.default_rng(1)
    ratios = [ratio_of(*medians(random, 1000), 0.0) for _ in range(20)]
    needed = int(np.median([steps_needed(ratio, 1000, limit) for ratio in ratios]))
    passed = sum(decide(ratio_of(*medians(random, needed), 0.0), limit) in {"same", "faster"} for _ in range(200))
    assert 0.7 * 200 <= passed <= 0.9 * 200


def medians(random, count):
    """Of steps that vary by 1 %, on both sides."""
    return [[median_estimate(side)] for side in random.normal(100, 1, size=(2, count))]


def test_equal_runs_fail_in_no_more_than_one_case_of_forty():
    random = np.random.default_rng(7)
    failed = 0
    for _ in range(400):
        before, after = random.lognormal(4, 0.1, size=(2, 8))
        failed += decide(ratio_of([median_estimate(before)], [median_estimate(after)], 0.0), None) == "slower"
    assert failed <= 400 / 40 + 8, "2.5 % and three standard deviations of chance"


def test_the_interval_of_a_difference_is_the_same_each_time_and_narrows_with_more_steps():
    few, many = (bootstrap_difference(steps(50, 5, count), steps(60, 5, count, seed=2)) for count in (10, 1000))
    assert few == bootstrap_difference(steps(50, 5, 10), steps(60, 5, 10, seed=2))
    assert many[1] - many[0] < (few[1] - few[0]) / 3
    assert few[0] < 10 < few[1]


def test_without_an_error_only_a_factor_of_more_than_two_decides():
    alone = [Estimate(value=10.0)]
    for value, outcome in ((4.9, "faster"), (12.0, "too short"), (20.9, "too short"), (21.1, "slower")):
        assert decide(ratio_of(alone, [Estimate(value=value)], 0.04), 5) == outcome
        rate = ratio_of(alone, [Estimate(value=100 / value)], 0.04)
        assert decide(rate, 5, more_is_better=True) == outcome


# --- what is compared ------------------------------------------------------------------------------------------------


def test_steps_that_are_cut_off_count_only_where_none_is_whole():
    comparison = compared(run([50.0, 51.0, 52.0]), run([CUT_OFF + 1]))
    assert (comparison.metrics["step"].a, comparison.a.steps) == (pytest.approx(51), (3,))
    comparison = compared(run([50.0, 51.0, 52.0]), run([]))
    assert (comparison.metrics["step"].b, comparison.b.steps) == (pytest.approx(CUT_OFF), (1,))


def test_a_step_takes_as_long_as_on_its_slowest_rank_and_parts_are_means():
    metrics = compared(run([50.0] * 5), run([50.0] * 5, ranks=3)).metrics
    assert metrics["step"].b == pytest.approx(50.4), "rank 2 is 0.4 ms slower"
    assert metrics["matmul"].b == pytest.approx(0.38 * 50.2)
    assert metrics["busy"].b + metrics["idle"].b == pytest.approx(50.2)


def test_ranks_that_recorded_different_steps_are_still_compared():
    two = run([50.0, 51.0, 52.0], ranks=2)
    later = tuple(replace(step, number=step.number + 100) for step in two.ranks[1].per_step)
    two = replace(two, ranks=(two.ranks[0], replace(two.ranks[1], per_step=later)))
    comparison = compared(two, two)
    assert (comparison.metrics["step"].a, comparison.a.steps) == (pytest.approx(51.2), (3,))


def test_kinds_kernels_and_causes_of_idle_time_come_with_the_biggest_mover_first():
    before, after = run([50.0] * 5), run([50.0] * 5)
    rank = after.ranks[0]
    kernels = [
        replace(rank.top_kernels[0], ms_per_step=rank.top_kernels[0].ms_per_step / 2, calls_per_step=48.0),
        *rank.top_kernels[2:],
        replace(rank.top_kernels[1], name="new kernel"),
    ]
    kinds = {**rank.kinds, "softmax": replace(rank.kinds["softmax"], ms_per_step=99.0)}
    after = replace(after, ranks=(replace(rank, top_kernels=tuple(kernels), kinds=kinds),))

    comparison = compared(before, after)

    assert comparison.kinds[0].name == "softmax"
    first, second, third, *rest = comparison.kernels
    assert first.name == rank.top_kernels[0].name
    assert first.pct == pytest.approx(-50)
    assert (first.a_calls, first.b_calls) == (96, 48)
    assert {second.name, third.name} == {rank.top_kernels[1].name, "new kernel"}
    assert sorted([second.pct or 0, third.pct or 0]) == [-100, 0]
    assert all(change.b == pytest.approx(change.a) for change in rest)


def test_what_makes_two_runs_hard_to_compare_is_noted():
    other = run([50.0] * 5, ranks=2)
    other = replace(other, source="b", ranks=tuple(replace(rank, device="NVIDIA L40S") for rank in other.ranks))
    comparison = compared(run([50.0] * 5), other)
    assert comparison.differs == (
        "different device: NVIDIA H200 before, NVIDIA L40S now",
        "different world size: 1 before, 2 now",
    )
    assert "now: not counted in the medians, for they are cut off: steps 10" in comparison.doubts


def test_an_analysis_without_ranks_cannot_be_compared():
    with pytest.raises(TraceError, match="runs/gpt/forge: no recorded rank"):
        trace_source(replace(run([50.0]), ranks=()))


# --- printed ---------------------------------------------------------------------------------------------------------


def test_the_table_shows_both_sides_and_the_decision():
    comparison = compared(run(steps(50, 0.5)), run([1.2 * ms for ms in steps(50, 0.5)]), 10)
    text = printed(comparison, gates(comparison, ["step", "comm"], 10))
    headline, first, second, *_ = text.splitlines()
    assert headline.startswith("step 20 % slower (")
    assert re.fullmatch(r"slower: step 20 % slower \(19 to 2[01] %\): 50.\d to 60.\d ms, limit 10 %", first)
    assert second == "same: comm 0 to 0 ms, limit 10 %"
    assert re.search(r"(?m)^step, median ms +50\.\d +60\.\d +\+20 % +\+\d\d to \+\d\d +slower$", text)
    assert re.search(r"(?m)^matmul +\d+\.\d{3} .* 96$", text), "with calls per step"
    assert "\x1b" not in text
    tables = text[text.index("step, median ms") : text.index("\nbasis ")]
    assert max(map(len, tables.splitlines())) <= 80


def test_a_scatter_that_was_given_is_not_explained_by_how_the_runs_were_made():
    before, after = (trace_source(run(steps(50, 0.5))) for _ in range(2))
    text = " ".join(printed(compare([before], [after], scatter_pct=4)).split())
    assert "Assumed: 4 % (one standard deviation; by --scatter)" in text
    assert "--scatter sets it" not in text


def test_a_trace_that_is_given_twice_is_refused():
    once = trace_source(run(steps(50, 0.5)))
    with pytest.raises(ConfigurationError, match="are the same run"):
        compare([once, once], [once])


def test_without_gpu_work_there_is_no_idle_gpu_to_compare(make_trainer, tmp_path):
    make_trainer(ForgeProfilerCallback(start_step=3, end_step=5, trace_dir=tmp_path)).fit(Classifier(), loader(32))
    [folder] = tmp_path.glob("*_steps_*")
    on_cpu, on_gpu = analyze(folder).analysis, run([50.0] * 5)

    text = printed(compared(on_cpu, on_cpu))
    assert re.findall(r"(?m)^([a-z]+),? .* unknown$", text) == ["step"]
    assert "Idle by cause" not in text
    assert "no GPU activity in the trace of before and of now" in text

    text = printed(compared(on_cpu, on_gpu))
    assert re.findall(r"(?m)^(\w+(?: kernels)?) .* new$", text) == ["busy", "matmul", "memory", "other kernels"]
    assert "Idle by cause" not in text
    assert "Kinds of kernels" in text
    assert "no GPU activity in the trace of before\n" in text
    assert "different devices" not in text

    text = printed(compared(on_gpu, on_gpu))
    assert "Idle by cause" in text
    assert "no GPU activity" not in text


def test_names_cannot_steer_the_terminal():
    wild = run([50.0] * 3)
    kernels = tuple(replace(kernel, name="a\x1b[31m\u202eb[bold]") for kernel in wild.ranks[0].top_kernels[:1])
    wild = replace(wild, source="s\x1b[2J", ranks=(replace(wild.ranks[0], top_kernels=kernels),))
    text = printed(compared(wild, wild))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "ab[bold]" in text

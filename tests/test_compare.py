"""Two runs side by side: what changed, and when a gate fails."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.diagnosis.bootstrap import FEWEST_VALUES, bootstrap_difference
from lightning_forge_profiling.diagnosis.compare import METRICS, compare
from lightning_forge_profiling.diagnosis.gate import Gate, gate, overall, shown_difference
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.comparison import print_comparison
from lightning_forge_profiling.report.screen import Screen
from tests.models import Classifier, loader
from tests.samples import sample_analysis

CUT_OFF = 999.0  # the sample's last step is a cut-off one


def run(steps, ranks=1):
    return sample_analysis(ranks, step_ms=[*steps, CUT_OFF])


def steps(mean, spread, count=20, seed=1):
    """Step times as they are: a floor that some steps lie well above."""
    return list(mean + spread * np.random.default_rng(seed).exponential(size=count))


def decided(before, after, limit, metric="step", ranks=1):
    return gate(compare(run(before, ranks), run(after, ranks)), metric, limit)


def printed(comparison, gates=(), width=80):
    text = io.StringIO()
    print_comparison(comparison, gates, Screen(text, width=width))
    return text.getvalue()


# --- the gate --------------------------------------------------------------------------------------------------------


def test_the_same_run_is_the_same_also_without_any_tolerance_where_steps_do_not_vary():
    found = decided([50.0] * 20, [50.0] * 20, 0)
    assert found.outcome == "same"
    assert "(+0.0 %)" in found.text


def test_without_any_tolerance_steps_that_vary_leave_it_open():
    assert decided(steps(50, 1), steps(50, 1), 0).outcome == "inconclusive"


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_20_percent_worse_fails_at_10_and_passes_at_30(metric):
    before, after = steps(50, 0.5), [1.2 * ms for ms in steps(50, 0.5, seed=2)]
    assert decided(before, after, 10, metric, ranks=2).outcome == "slower"
    assert decided(before, after, 30, metric, ranks=2).outcome == "same"
    assert f"{metric}: median" in decided(before, after, 10, metric, ranks=2).text


def test_what_got_better_is_faster():
    found = decided(steps(50, 1), steps(30, 1), 0)
    assert found.outcome == "faster"
    assert "95 % interval of the difference -2" in found.text


def test_a_difference_within_the_noise_is_inconclusive_and_the_steps_that_it_takes_are_named():
    found = decided(steps(50, 30, count=8), [1.2 * ms for ms in steps(50, 30, count=8, seed=3)], 5)
    assert found.outcome == "inconclusive"
    assert "the steps vary too much to decide whether it is worse by more than 5 %" in found.text
    noise, five, eight, twenty, limit, needed = map(
        float,
        re.search(
            r"vary by (\S+) %: 5 steps show (\S+) %, 8 steps show (\S+) %, 20 steps show (\S+) % on each side; "
            r"a limit of (\S+) % takes about (\d+)$",
            found.text,
        ).groups(),
    )
    assert five > eight > twenty
    assert twenty == pytest.approx(shown_difference(noise, 20), rel=0.05)
    assert limit == 5
    assert shown_difference(noise, needed) == pytest.approx(5, rel=0.1)


def test_one_slow_step_does_not_fail_a_run():
    assert decided([50.0] * 10, [50.0] * 9 + [500.0], 1).outcome == "same"


@pytest.mark.parametrize("count", [1, 3, 4])
def test_too_few_steps_to_tell_are_inconclusive_and_it_is_said(count):
    for sides in ((count, 20), (20, count)):
        found = decided(*([50.0 * (1 + side)] * sides[side] for side in (0, 1)), 10)
        assert found.outcome == "inconclusive"
        assert f"too few steps to decide: {sides[0]} before and {sides[1]} now" in found.text
        assert "(+100.0 %)" in found.text, "the difference is still shown"


def test_from_five_steps_on_there_is_an_interval():
    assert FEWEST_VALUES == 5
    assert decided([50.0, 50.1, 50.2, 50.1, 50.0], [60.0, 60.1, 60.2, 60.1, 60.0], 10).outcome == "slower"


def test_what_was_not_there_before_is_worse_than_any_limit():
    found = gate(compare(run([50.0] * 6), run([50.0] * 6, ranks=2)), "comm", 1000)
    assert found.outcome == "slower"
    assert "median 0.000 ms before" in found.text


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], None),
        (["same", "faster"], "same"),
        (["faster", "faster"], "faster"),
        (["inconclusive", "same"], "inconclusive"),
        (["inconclusive", "slower", "same"], "slower"),
    ],
)
def test_of_several_gates_the_worst_decides(outcomes, expected):
    gates = [Gate(metric="step", limit_pct=5, outcome=outcome, text="") for outcome in outcomes]
    assert overall(gates) == expected


@pytest.mark.parametrize("count", [5, 8, 20])
def test_the_difference_that_steps_are_said_to_show_is_found_in_four_of_five_comparisons(count):
    """By simulation: a binomial count of 200 scatters by 6 % at two standard deviations."""
    random = np.random.default_rng(count)
    slower = passed = 0
    for trial in range(200):
        before, after = random.normal(100, 1, size=(2, count))
        difference = shown_difference(1, count)
        low, _ = bootstrap_difference(before, after + difference, seed=trial, resamples=400)
        _, high = bootstrap_difference(before, after, seed=trial, resamples=400)
        slower += low > 0
        passed += high <= difference
    assert 0.7 * 200 <= slower <= 0.9 * 200
    assert 0.7 * 200 <= passed <= 0.9 * 200, "and equal runs pass a limit that large as often"


@pytest.mark.parametrize("spread", [0.2, 2.0])
def test_the_noise_is_the_deviation_of_the_steps_whatever_one_of_them_does(spread):
    before, after = np.random.default_rng(2).normal((50, 70), spread, size=(400, 2)).T.tolist()
    noise = compare(run([*before, 5000.0]), run(after)).metrics["step"].noise_ms
    assert noise == pytest.approx(spread, rel=0.15)


def test_equal_runs_fail_in_no_more_than_one_case_of_forty():
    random = np.random.default_rng(7)
    failed = 0
    for trial in range(400):
        before, after = random.lognormal(4, 0.1, size=(2, 8))
        low, high = bootstrap_difference(before, after, seed=trial, resamples=400)
        assert low <= high
        failed += low > 0
    assert failed <= 400 / 40 + 8, "2.5 % and three standard deviations of chance"


def test_the_interval_is_the_same_for_the_same_seed_and_narrows_with_more_steps():
    few, many = (bootstrap_difference(steps(50, 5, count), steps(60, 5, count, seed=2), seed=3) for count in (10, 1000))
    assert few == bootstrap_difference(steps(50, 5, 10), steps(60, 5, 10, seed=2), seed=3)
    assert many[1] - many[0] < (few[1] - few[0]) / 3
    assert few[0] < 10 < few[1]


# --- what is compared ------------------------------------------------------------------------------------------------


def test_steps_that_are_cut_off_count_only_where_none_is_whole():
    metric = compare(run([50.0, 51.0, 52.0]), run([CUT_OFF + 1])).metrics["step"]
    assert (metric.a_ms, metric.a_steps) == (51.0, 3)
    metric = compare(run([50.0, 51.0, 52.0]), run([])).metrics["step"]
    assert (metric.b_ms, metric.b_steps) == (CUT_OFF, 1)


def test_a_step_takes_as_long_as_on_its_slowest_rank_and_parts_are_means():
    metrics = compare(run([50.0] * 5), run([50.0] * 5, ranks=3)).metrics
    assert metrics["step"].b_ms == pytest.approx(50.4), "rank 2 is 0.4 ms slower"
    assert metrics["matmul"].b_ms == pytest.approx(0.38 * 50.2)
    assert metrics["busy"].b_ms + metrics["idle"].b_ms == pytest.approx(50.2)


def test_ranks_that_recorded_different_steps_are_still_compared():
    two = run([50.0, 51.0, 52.0], ranks=2)
    later = tuple(replace(step, number=step.number + 100) for step in two.ranks[1].per_step)
    two = replace(two, ranks=(two.ranks[0], replace(two.ranks[1], per_step=later)))
    metric = compare(two, two).metrics["step"]
    assert (metric.a_ms, metric.a_steps) == (pytest.approx(51.2), 3)


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

    comparison = compare(before, after)

    assert comparison.kinds[0].name == "softmax"
    first, second, third, *rest = comparison.kernels
    assert first.name == rank.top_kernels[0].name
    assert first.pct == pytest.approx(-50)
    assert (first.a_calls, first.b_calls) == (96, 48)
    assert {second.name, third.name} == {rank.top_kernels[1].name, "new kernel"}
    assert sorted([second.pct or 0, third.pct or 0]) == [-100, 0]
    assert all(change.difference_ms == pytest.approx(0) for change in rest)


def test_what_makes_two_runs_hard_to_compare_is_noted():
    other = run([50.0] * 5, ranks=2)
    other = replace(other, source="b", ranks=tuple(replace(rank, device="NVIDIA L40S") for rank in other.ranks))
    notes = compare(run([50.0] * 5), other).notes
    assert "recorded on different devices: NVIDIA H200 before, NVIDIA L40S now" in notes
    assert "a different number of ranks: 1 before, 2 now" in notes
    assert "b: not counted in the medians, for they are cut off: steps 10" in notes


def test_an_analysis_without_ranks_cannot_be_compared():
    with pytest.raises(TraceError, match="runs/gpt/forge: no recorded rank"):
        compare(run([50.0]), replace(run([50.0]), ranks=()))


# --- printed ---------------------------------------------------------------------------------------------------------


def test_the_table_shows_both_sides_and_the_decision():
    comparison = compare(run(steps(50, 0.5)), run([1.2 * ms for ms in steps(50, 0.5)]))
    text = printed(comparison, [gate(comparison, "step", 10), gate(comparison, "comm", 10)])
    assert re.search(r"(?m)^step +50\.\d{3} +60\.\d{3} +\+10\.\d{3} +\+20\.0 +\+\d", text)
    assert re.search(r"(?m)^matmul +\d+\.\d{3} .* 96$", text), "with calls per step"
    assert "slower step: median" in text
    assert "same comm: median 0.000 ms before, 0.000 ms now" in text
    assert "\x1b" not in text
    tables = text[text.index("Median step") : text.index("\nnote ")]
    assert max(map(len, tables.splitlines())) <= 80


def test_without_gpu_work_there_is_no_idle_gpu_to_compare(make_trainer, tmp_path):
    make_trainer(ForgeProfilerCallback(start_step=3, end_step=5, trace_dir=tmp_path)).fit(Classifier(), loader(32))
    [folder] = tmp_path.glob("*_steps_*")
    on_cpu, on_gpu = analyze(folder).analysis, run([50.0] * 5)

    text = printed(compare(on_cpu, on_cpu))
    assert re.findall(r"(?m)^([a-z]+) .* too few steps$", text) == ["step"]
    assert "Idle by cause" not in text
    assert "note no GPU activity in the trace of before and of now" in text

    text = printed(compare(on_cpu, on_gpu))
    shown = re.findall(r"(?m)^([a-z]+) .* too few steps$", text)
    assert shown == ["step", "busy", "matmul", "comm", "memory", "other"]
    assert "Idle by cause" not in text
    assert "Kinds of kernels" in text
    assert "note no GPU activity in the trace of before\n" in text
    assert "different devices" not in text

    text = printed(compare(on_gpu, on_gpu))
    assert "Idle by cause" in text
    assert "no GPU activity" not in text


def test_names_cannot_steer_the_terminal():
    wild = run([50.0] * 3)
    kernels = tuple(replace(kernel, name="a\x1b[31m\u202eb[bold]") for kernel in wild.ranks[0].top_kernels[:1])
    wild = replace(wild, source="s\x1b[2J", ranks=(replace(wild.ranks[0], top_kernels=kernels),))
    text = printed(compare(wild, wild))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "ab[bold]" in text

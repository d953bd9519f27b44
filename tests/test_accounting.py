"""Every nanosecond of a step is counted once: checked against `oracle`, and against sets of integers."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.pipeline import analyze
from tests.oracle import account
from tests.synthetic import ADD, GEMM, NCCL, Synthetic

TRACES = Path(__file__).parent / "data" / "traces"
CASES = sorted(path.name for path in TRACES.iterdir())

# -- sets of nanoseconds

ends = st.integers(0, 60)
any_spans = st.lists(st.tuples(ends, ends), max_size=12)


def intervals(spans):
    return Intervals.of([start for start, _ in spans], [end for _, end in spans])


def instants(spans):
    return {instant for start, end in spans for instant in range(start, end)}


def instants_of(found):
    """What they cover; they must be disjoint, ascending and not empty."""
    spans = list(zip(found.start.tolist(), found.end.tolist(), strict=True))
    assert all(start < end for start, end in spans)
    assert all(one[1] <= next_[0] for one, next_ in pairwise(spans))
    return instants(spans)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_spans, any_spans)
def test_interval_algebra_is_that_of_sets(ours, theirs):
    a, b = intervals(ours), intervals(theirs)
    assert instants_of(a) == instants(ours)
    assert instants_of(a | b) == instants(ours) | instants(theirs)
    assert instants_of(a & b) == instants(ours) & instants(theirs)
    assert instants_of(a - b) == instants(ours) - instants(theirs)
    assert a.total == len(instants(ours))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_spans, any_spans)
def test_how_much_lies_within_and_what_contains_what(ours, asked):
    covered, asked = instants(ours), [(min(span), max(span)) for span in asked]
    found = intervals(ours).within([start for start, _ in asked], [end for _, end in asked])
    assert found.tolist() == [len(covered & instants([span])) for span in asked]
    times = range(-1, 62)
    assert intervals(ours).contains(list(times)).tolist() == [time in covered for time in times]


# -- random traces

KERNELS = {"matmul": GEMM, "other": ADD, "comm": NCCL}
CATEGORY = {name: category for category, name in KERNELS.items()}
NS = 1e-6  # in milliseconds
MOST_PARTS = 10  # of the idle time that are listed
BEGIN = 10_000  # so that nothing is before the trace's own beginning

work = st.fixed_dictionaries(
    {
        "what": st.sampled_from([*KERNELS, "memory"]),
        "launch": st.integers(-60, 460),
        "delay": st.integers(0, 150),
        "duration": st.integers(0, 120),
        "stream": st.sampled_from([7, 20]),
        "linked": st.sampled_from([True, True, True, False]),
    }
)
span = st.tuples(st.integers(-20, 400), st.integers(0, 90))
between_batches = st.tuples(st.sampled_from(["forge.validation", "forge.checkpoint", "forge.optimizer"]), span)
HOST = ("enumerate(DataLoader)#X.__next__", "cudaStreamSynchronize", "cudaMalloc", "cudaMemcpyAsync")
on_the_host = st.tuples(st.sampled_from(HOST), span)


@st.composite
def traces(draw):
    trace = Synthetic()
    edges = sorted(draw(st.lists(st.integers(0, 400), min_size=2, max_size=5, unique=True)))
    for number, (start, end) in enumerate(pairwise(edges)):
        trace.step(number, (BEGIN + start) * NS, (BEGIN + end) * NS)
    for name, (start, length) in draw(st.lists(between_batches, max_size=4)):
        trace.mark(name, (BEGIN + start) * NS, (BEGIN + start + length) * NS)
    for name, (start, length) in draw(st.lists(on_the_host, max_size=6)):
        add = trace.mark if "(" in name else trace.call
        add(name, (BEGIN + start) * NS, (BEGIN + start + length) * NS)
    for one in draw(st.lists(work, max_size=25)):
        start = BEGIN + one["launch"] + one["delay"]
        times = {"start": start * NS, "end": (start + one["duration"]) * NS, "stream": one["stream"]}
        launched = (BEGIN + one["launch"]) * NS if one["linked"] else None
        if one["what"] == "memory":
            trace.copy(**times, launched=launched)
        else:
            trace.kernel(**times, launched=launched, name=KERNELS[one["what"]])
    return trace


def ns(ms):
    return round(ms * 1e6)


def check_against_oracle(result, steps):
    """Step by step and in all, to the nanosecond."""
    rank, timeline = result.analysis.ranks[0], result.timelines[0]
    found = [(step.number, ns(step.ms), ns(step.busy_ms)) for step in rank.per_step]
    assert found == [(step.number, step.length, step.busy) for step in steps]
    steps = [step for step, of_rank in zip(steps, rank.per_step, strict=True) if of_rank.counted]
    in_all = {
        "busy": rank.gpu.busy_ms_per_step,
        "idle": rank.gpu.idle_ms_per_step,
        "comm": rank.comm.ms_per_step,
        "exposed": rank.comm.exposed_ms_per_step,
    }
    for name, ms in in_all.items():
        assert ns(ms * rank.steps) == sum(getattr(step, name) for step in steps), name
    assert ns(sum(kind.ms_per_step for kind in rank.kinds.values()) * rank.steps) == ns(in_all["busy"] * rank.steps)
    assert ns(sum(cause.ms_per_step for cause in rank.idle.values()) * rank.steps) == ns(in_all["idle"] * rank.steps)
    assert min((cause.ms_per_step for cause in rank.idle.values()), default=0) >= 0
    parts = [ns(part.ms_per_step * rank.steps) for part in rank.idle_parts]
    assert min(parts, default=1) > 0
    listed = sum(parts)
    assert (
        listed == ns(in_all["idle"] * rank.steps)
        if len(parts) < MOST_PARTS
        else listed <= in_all["idle"] * 1e6 * rank.steps + 1
    )
    assert all(ns(one[2] / 1e3) == ns(following[1] / 1e3) for one, following in pairwise(timeline.steps))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
def test_any_trace_is_accounted_for_to_the_nanosecond(tmp_path, trace):
    steps = account(trace.events, CATEGORY.__getitem__)
    result = analyze(trace.write(tmp_path))
    check_against_oracle(result, steps)
    categories = [
        {name: ns(ms) for name, ms in step.categories_ms.items()} for step in result.analysis.ranks[0].per_step
    ]
    assert categories == [step.categories for step in steps]


# Painting a quarter of a second, as its steps with a validation take, needs more memory than it is worth.
@pytest.mark.slow
@pytest.mark.parametrize("case", sorted({*CASES} - {"validation_inside"}))
def test_real_traces_are_accounted_for_to_the_nanosecond(case):
    file = TRACES / case / "rank0.trace.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    result, steps = analyze(file), account(events, lambda name: "comm" if name.startswith("nccl") else "other")
    check_against_oracle(result, steps)
    for found, expected in zip(result.analysis.ranks[0].per_step, steps, strict=True):
        computation = found.categories_ms["matmul"] + found.categories_ms["other"]
        assert ns(computation) == expected.categories["other"]
        assert ns(found.categories_ms["comm"]) == expected.categories["comm"]
        assert ns(found.categories_ms["memory"]) == expected.categories["memory"]

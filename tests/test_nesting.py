"""How ranges lie in each other, on columns, beside loops that say the same one range at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_forge_profiling.analysis.intervals import Nesting
from lightning_forge_profiling.kineto.trace import Spans

TIMES = st.integers(0, 12)
RANGES = st.lists(st.tuples(TIMES, TIMES, st.integers(0, 2), st.integers(0, 2)), max_size=24)


def spans_of(ranges):
    """Ranges of (start, length, thread, name), in the order of a trace: an outer range before the inner ones."""
    rows = sorted(ranges, key=lambda row: (row[0], -row[1]))
    start, length, thread, name = (np.array([row[column] for row in rows], np.int64) for column in range(4))
    return Spans(start=start, end=start + length, thread=thread, name=name)


def parents(spans):
    """With a stack for each thread: a range is left once a later one begins at or after its end."""
    stacks, parent = {}, []
    for row, thread in enumerate(spans.thread.tolist()):
        stack = stacks.setdefault(thread, [])
        while stack and spans.end[stack[-1]] <= spans.start[row]:
            stack.pop()
        parent.append(stack[-1] if stack else -1)
        stack.append(row)
    return parent


def chains(spans):
    """For each range itself and all that are around it, from the inside out."""
    chains = []
    for row, above in enumerate(parents(spans)):
        chains.append([row, *(chains[above] if above >= 0 else [])])
    return chains


@given(RANGES)
def test_parents_are_the_ranges_still_open(ranges):
    spans = spans_of(ranges)
    nesting = Nesting(spans)
    assert nesting.parent.tolist() == parents(spans)
    assert nesting.depth().tolist() == [len(chain) - 1 for chain in chains(spans)]


@given(RANGES, st.integers(0, 2**62))
def test_what_is_inside_is_summed_and_what_is_around_is_compared(ranges, scale):
    spans = spans_of(ranges)
    nesting, around = Nesting(spans), chains(spans)
    values = (np.arange(len(around)) * 7919 % 11 - 3) * (scale // 16)
    sums = [sum(int(values[row]) for row, chain in enumerate(around) if top in chain) for top in range(len(around))]
    most = 2**63 - 1
    assert nesting.sums(values).tolist() == [max(min(value, most), -most) for value in sums]
    assert nesting.least_around(values).tolist() == [min(values[row] for row in chain) for chain in around]
    assert nesting.in_namesake().tolist() == [spans.name[chain[0]] in spans.name[chain[1:]] for chain in around]


@given(RANGES)
def test_marked_ranges_around(ranges):
    spans = spans_of(ranges)
    nesting, marked = Nesting(spans), spans.name == 0
    around = [[row for row in chain if marked[row]] for chain in chains(spans)]
    assert nesting.innermost(marked).tolist() == [chain[0] if chain else -1 for chain in around]
    assert nesting.outermost(marked).tolist() == [chain[-1] if chain else -1 for chain in around]


@given(RANGES, st.lists(st.tuples(st.integers(-1, 25), st.integers(-1, 2)), max_size=12))
def test_an_instant_lies_in_the_innermost_range_that_has_begun_and_not_ended(ranges, instants):
    spans = spans_of(ranges)
    time, thread = (np.array([instant[column] for instant in instants], np.int64) for column in range(2))
    expected = []
    for at, on in instants:
        around = np.flatnonzero((spans.thread == on) & (spans.start <= at) & (spans.end >= at))
        expected.append(int(around[-1]) if len(around) else -1)
    assert Nesting(spans).enclosing(time, thread).tolist() == expected


@pytest.mark.parametrize("followers", [1, 50])
def test_a_deep_tower_that_ends_at_once(followers):
    depth = 500
    tower = [(row, 1000 - 2 * row, 0, 0) for row in range(depth)]
    spans = spans_of([*tower, *((990 + row, 1, 0, 0) for row in range(followers)), (2000, 5, 0, 0)])
    nesting = Nesting(spans)
    assert nesting.parent.tolist() == parents(spans)
    assert nesting.depth().max() == depth - 1

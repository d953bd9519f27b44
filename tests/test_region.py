"""`region(...)` outside of any callback, and what it refuses."""

import pytest
import torch

from lightning_forge_profiling import region
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.timing.region import set_region_sink


class Sink:
    def __init__(self):
        self.seen = []

    def open_region(self, name):
        self.seen.append(f"+{name}")
        return name

    def close_region(self, name, token):
        assert token == name
        self.seen.append(f"-{name}")


@pytest.fixture
def sink():
    sink = Sink()
    before = set_region_sink(sink)
    yield sink
    set_region_sink(before)


def attention(x):
    with region("attention"):
        x = x.softmax(-1)
        with region("projection"):
            return mlp(x + 1)


@region("mlp")
def mlp(x):
    """Doubles."""
    return x * 2


def test_without_a_callback_it_does_nothing():
    assert torch.equal(attention(torch.zeros(2)), torch.full((2,), 3.0))


def test_regions_nest_as_context_managers_and_decorators(sink):
    attention(torch.zeros(2))
    assert sink.seen == ["+attention", "+projection", "+mlp", "-mlp", "-projection", "-attention"]
    assert mlp.__doc__ == "Doubles."


def test_a_decorated_function_may_call_itself(sink):
    @region("tree")
    def depth(n):
        return n if n == 0 else depth(n - 1)

    depth(2)
    assert sink.seen == ["+tree"] * 3 + ["-tree"] * 3


def test_an_exception_closes_the_region_and_goes_on(sink):
    with pytest.raises(ZeroDivisionError), region("attention"):
        _ = 1 / 0
    assert sink.seen == ["+attention", "-attention"]


@pytest.mark.parametrize("compile_now", ["before", "while"])
def test_a_compiled_function_keeps_one_graph_and_is_not_timed_inside(sink, compile_now):
    if compile_now == "before":
        set_region_sink(None)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 3.0))
    set_region_sink(sink)
    assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 3.0))
    assert sink.seen == []


@pytest.mark.parametrize("name", ["", "other", "profiler", "step"])
def test_a_reserved_name_is_refused(name):
    with pytest.raises(ConfigurationError, match="choose one that is not among"):
        region(name)

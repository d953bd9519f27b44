"""On a real GPU: `benchmark` agrees with a trace of the same run, and leaves the process as it was."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.microbench import subjects, traced_us
from lightning_forge_profiling.bench.benchmark import benchmark

pytestmark = pytest.mark.gpu
QUICK = {"min_time": 0.03, "max_time": 0.5, "device": "cuda"}


@pytest.fixture
def vector():
    return torch.randn(2**20, device="cuda")


def test_the_default_method_agrees_with_the_trace():
    for name, fn in subjects().items():
        before = traced_us(fn)
        found = benchmark(fn, flush_l2=False, name=name, **QUICK)
        truth = (before + traced_us(fn)) / 2
        print(f"{name}: {found.method} {found.median_us:.2f} us, trace {truth:.2f}")
        assert found.median_us == pytest.approx(truth, rel=0.05, abs=0.5)


def test_methods_read_in_the_order_of_what_they_cannot_keep_out(vector):
    read = {
        method: benchmark(torch.add, vector, vector, method=method, flush_l2=False, **QUICK).median_us
        for method in ("kernels", "graph", "saturated", "events", "wall")
    }
    print(read)
    assert abs(read["graph"] - read["kernels"]) < 0.5
    assert read["graph"] < read["saturated"] < read["events"] < read["wall"]


def test_cold_takes_longer_than_hot(vector):
    hot, cold = (benchmark(torch.add, vector, vector, flush_l2=flush, **QUICK) for flush in (False, True))
    assert cold.median_us > 1.2 * hot.median_us


@pytest.mark.parametrize("wait", ["item", "synchronize", "event", "to"])
def test_every_way_to_wait_is_noticed(vector, wait):
    def fn():
        total = vector.sum()
        if wait == "item":
            total.item()
        elif wait == "synchronize":
            torch.cuda.synchronize()
        elif wait == "event":
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        else:
            total.to("cpu")

    found = benchmark(fn, **QUICK)
    assert found.method == "wall"
    assert any("waits for the GPU" in warning for warning in found.warnings)


def test_work_that_does_not_wait_is_not_said_to(vector):
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    rows = vector.view(1024, 1024)
    found = benchmark(lambda: layer(rows).sum().backward(), flush_l2=False, **QUICK)
    assert (found.method, found.warnings) == ("kernels", ())


def test_memory_that_is_kept_and_cudamalloc_are_noticed(vector):
    gc.collect()  # what other tests have left behind would go while this one looks
    kept = []
    found = benchmark(lambda: kept.append(vector + 1), **QUICK)
    assert any("keeps memory" in warning for warning in found.warnings)
    kept.clear()

    def returns_its_memory():
        block = torch.zeros(2**24, device="cuda")
        del block
        torch.cuda.empty_cache()

    assert any("cudaMalloc" in warning for warning in benchmark(returns_its_memory, **QUICK).warnings)


def test_what_cannot_be_captured_falls_back_and_leaves_the_generator_usable(vector):
    def refuses():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while capturing")
        return torch.nn.functional.dropout(vector)

    stream = torch.cuda.current_stream()
    with profile(activities=[ProfilerActivity.CPU]):
        found = benchmark(refuses, flush_l2=False, **QUICK)
    assert found.method == "saturated"
    assert any("another torch profiler" in warning for warning in found.warnings)
    assert any("not while capturing" in warning for warning in found.warnings)
    assert torch.cuda.current_stream() == stream
    replayed = benchmark(torch.nn.functional.dropout, vector, method="graph", flush_l2=False, **QUICK)
    assert replayed.method == "graph"
    assert torch.rand(4, device="cuda").isfinite().all()


def test_the_clock_was_watched(vector):
    found = benchmark(torch.add, vector, vector, **QUICK)
    assert found.clock is not None, found.warnings
    assert 0 < found.clock.min_mhz <= found.clock.max_mhz <= found.clock.limit_mhz

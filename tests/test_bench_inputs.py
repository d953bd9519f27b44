"""What a user may hand to `benchmark` and `compare_benchmarks`, right and wrong, and what it answers."""

import gc
import json
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import FunctionType

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_forge_profiling.bench.benchmark import benchmark
from lightning_forge_profiling.bench.call import default_name, find_device
from lightning_forge_profiling.bench.result import BenchmarkResult, compare_benchmarks
from lightning_forge_profiling.errors import ConfigurationError
from tests.simulated_gpu import SimulatedGpu

QUICK = {"max_time": 0.02, "device": "cpu"}
VECTOR = torch.ones(8)
LAYER = torch.nn.Linear(8, 2)


@pytest.fixture
def on_a_gpu():
    try:
        with FakeTensorMode():
            return torch.empty(4, device="cuda:0")
    except RuntimeError as exc:  # an older torch for GPUs, without the driver
        pytest.skip(str(exc))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


# -- refused, with what to do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "graph"}, r"seems to run on the CPU: leave method out"),
        ({"method": "fast"}, r"method must be one of auto, cpu, wall, events, saturated, graph, kernels, got 'fast'"),
        ({"max_time": -1}, r"max_time must be a number of seconds, 0 or more, got -1"),
        ({"max_time": "1"}, r"max_time must be a number of seconds, 0 or more, got '1'"),
        ({"max_time": float("nan")}, r"max_time must be a number of seconds, 0 or more, got nan"),
        ({"device": "gpu"}, r"device='gpu' is not a device: pass 'cpu' or one such as 'cuda:0'"),
        ({"device": "meta"}, r"only the CPU and CUDA devices can"),
        ({"device": -1}, r"device=-1 is not a device"),
        ({"device": 256}, r"device=256 is not a device"),
        ({"device": True}, r"device=True is not a device"),
        ({"name": 5}, r"name must be a str, got int"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_call(options, message):
    called = []
    with pytest.raises(ConfigurationError, match=message):
        benchmark(called.append, **({"device": "cpu"} | options))
    assert called == []


@pytest.mark.parametrize("given", [VECTOR, 3, "torch.add", None])
def test_a_result_instead_of_a_function_is_answered_with_how_to_write_it(given):
    with pytest.raises(ConfigurationError, match=r"fn must be callable, got \w+: .* benchmark\(torch.softmax, x, -1\)"):
        benchmark(given)


@pytest.mark.parametrize("kind", ["generator", "coroutine", "async_generator"])
def test_a_function_of_which_a_call_runs_nothing_is_refused(kind, recwarn):
    def generator():
        yield 1

    async def coroutine():
        return 1

    async def async_generator():
        yield 1

    fn = {"generator": generator, "coroutine": coroutine, "async_generator": async_generator}[kind]
    with pytest.raises(ConfigurationError, match=rf"returns a {kind}: calling it runs nothing .*list\(fn\(x\)\)"):
        benchmark(lambda: fn(), **QUICK)  # noqa: PLW0108  (what it is shows when it is called)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_cuda_device_where_there_is_none():
    with pytest.raises(ConfigurationError, match="'cuda:7', but PyTorch sees no CUDA device here: leave device out"):
        benchmark(torch.add, VECTOR, 1, device="cuda:7")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "expected"), [("cuda:1", 1), (0, 0), ("cuda", 1), (torch.device("cuda", 0), 0)])
def test_a_cuda_device_that_there_is(asked, expected):
    assert find_device([VECTOR], asked) == torch.device("cuda", expected)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("asked", ["cuda:7", 7])
def test_a_cuda_device_that_there_is_not(asked):
    with pytest.raises(ConfigurationError, match="'cuda:7', but PyTorch sees cuda:0 to cuda:1 here"):
        find_device([VECTOR], asked)


@pytest.mark.usefixtures("two_gpus")
def test_the_cpu_is_not_believed_for_tensors_on_a_gpu(on_a_gpu):
    with pytest.raises(ConfigurationError, match="there are tensors on cuda:0: leave device out"):
        find_device([print, (on_a_gpu,)], "cpu")


@pytest.mark.usefixtures("two_gpus")
def test_where_it_runs_is_found_in_arguments_modules_and_what_the_function_holds(on_a_gpu):
    assert find_device([{"x": [torch.zeros(1)]}], None) == torch.device("cpu")
    assert find_device([torch.nn.Linear(1, 1)], None) == torch.device("cpu")
    assert find_device([partial(torch.add, VECTOR, 1), ()], None) == torch.device("cpu")
    assert find_device([VECTOR.sum, ()], None) == torch.device("cpu")
    assert find_device([print, (3,)], None) == torch.device("cuda", 1)  # the current one
    first = torch.device("cuda", 0)
    module = torch.nn.Module()
    module.register_buffer("mean", on_a_gpu)
    of_the_script = FunctionType(compile("target.copy_(x)", "", "eval"), {"target": on_a_gpu})
    for fn in (partial(torch.add, other=on_a_gpu), lambda x: x + on_a_gpu, on_a_gpu.add, module, of_the_script):
        assert find_device([fn, (VECTOR,)], None) == first
    assert find_device([{"x": [on_a_gpu]}], None) == first


class Engine:
    """A plain object, into which nothing looks."""

    def __init__(self, model):
        self._model = model

    def step(self, batch):
        return self._model(batch)


@pytest.fixture
def simulated_gpu(monkeypatch):
    """The second of two GPUs that `benchmark` takes for those of this machine. Nothing has used it yet."""
    gpu = SimulatedGpu()
    gpu.index = 1

    def memory_stats(device):
        assert gpu.kernels, "it would start CUDA"
        return {"allocated_bytes.all.allocated": gpu.memory().allocated_bytes} if device == gpu.index else {}

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu.kernels > 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    monkeypatch.setattr(
        "lightning_forge_profiling.bench.benchmark.CudaDevice", {torch.device("cuda", 1): gpu}.__getitem__
    )
    gpu.is_capturing = False
    return gpu


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("method", ["auto", "kernels"])
def test_kernels_behind_tensors_on_the_cpu_are_found(simulated_gpu, used, method):
    if used:
        simulated_gpu.kernel(1000)

    def model(_):
        simulated_gpu.kernel(20_000)
        simulated_gpu.allocate(1024, keep=False)

    measured = benchmark(Engine(model).step, VECTOR, max_time=0.05, method=method)
    assert (measured.method, measured.device) == ("kernels", simulated_gpu.name)
    assert measured.median_us == pytest.approx(20)


@pytest.mark.parametrize("used", [False, True])
def test_a_function_of_the_cpu_is_timed_there_beside_a_gpu(simulated_gpu, used):
    if used:
        simulated_gpu.kernel(1000)
    before = simulated_gpu.kernels
    for options in ({}, {"method": "wall"}, {"device": "cpu"}):
        measured = benchmark(torch.add, VECTOR, 1, max_time=0.1, **options)
        assert (measured.method, measured.device, measured.clock) == ("cpu", "cpu", None)
        assert measured.threads == torch.get_num_threads()
        assert not any("GPU" in warning or "CUDA" in warning for warning in measured.warnings)
    with pytest.raises(ConfigurationError, match="the function seems to run on the CPU"):
        benchmark(torch.add, VECTOR, 1, method="graph")
    assert simulated_gpu.kernels == before, "the GPU is left alone"


def test_a_function_without_tensors_starts_no_gpu(simulated_gpu):
    measured = benchmark(sorted, [3, 1, 2], max_time=0.05)
    assert (measured.method, measured.device, simulated_gpu.kernels) == ("cpu", "cpu", 0)


def test_while_a_graph_is_captured_a_function_that_may_be_the_gpus_is_not_called(simulated_gpu):
    simulated_gpu.kernel(1000)
    simulated_gpu.is_capturing = True
    calls = []
    with pytest.raises(ConfigurationError, match="A CUDA graph is being captured"):
        benchmark(calls.append, VECTOR)
    assert calls == []
    assert benchmark(torch.neg, VECTOR, **QUICK).device == "cpu", "as device='cpu' says"


def test_tensors_without_data_are_refused():
    with pytest.raises(ConfigurationError, match="meta device, which have no data"):
        benchmark(torch.add, torch.empty(4, device="meta"), 1)


# -- taken -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "args", "options", "name"),
    [
        (partial(torch.sum, dim=0), (VECTOR,), {}, "sum(float32[8], dim=0)"),
        (partial(torch.add, VECTOR, alpha=2), (1,), {}, "add(float32[8], 1, alpha=2)"),
        (partial(partial(torch.add, VECTOR), 1), (), {}, "add(float32[8], 1)"),
        (LAYER, (VECTOR,), {}, "Linear(in_features=8, out_features=2, bias=True)(float32[8])"),
        (LAYER.forward, (VECTOR,), {}, "Linear.forward(float32[8])"),
        (VECTOR.sum, (), {}, "Tensor.sum()"),
        (torch.compile(LAYER, backend="eager"), (VECTOR,), {}, f"compiled {LAYER}(float32[8])"),
        (torch.compile(torch.nn.functional.gelu, backend="eager"), (VECTOR,), {}, "compiled gelu(float32[8])"),
        (partial(print, end=""), (), {"name": "mine"}, "mine"),
    ],
)
def test_anything_that_can_be_called_is_timed_and_named(fn, args, options, name):
    result = benchmark(fn, *args, **options, **QUICK)
    assert (result.name, result.method) == (name, "cpu")
    assert result.median_us > 0


def test_names_tell_functions_apart():
    first, second = lambda: 1, lambda: 2
    assert default_name(first, ()).startswith("<lambda test_bench_inputs.py:")
    assert default_name(second, ("x" * 99,)) != default_name(second, ("y",))
    module = torch.nn.Linear(2, 2)
    before = default_name(module, ())
    module.compile(backend="eager")
    assert default_name(module, ()) == f"compiled {before}"


def test_functions_of_one_default_name_are_compared_by_names_of_their_own():
    def power(n):
        return lambda x: x**n

    with pytest.raises(ConfigurationError, match=r"got 1: .*Name the functions with benchmark\(..., name=...\)"):
        compare_benchmarks(benchmark(power(n), VECTOR, **QUICK) for n in (2, 3))
    named = compare_benchmarks(benchmark(power(n), VECTOR, name=f"x**{n}", **QUICK) for n in (2, 3))
    assert (named.baseline, named.functions[0].name) == ("x**2", "x**3")


def test_a_benchmark_keeps_neither_model_nor_tensors_alive():
    model, x = torch.nn.Linear(8, 2), torch.ones(8)
    alive = [weakref.ref(one) for one in (model, x, model.weight)]
    for fn in (model, model.forward, partial(model), partial(torch.nn.functional.linear, weight=model.weight)):
        benchmark(fn, x, **QUICK)
    del model, x, fn
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_a_function_that_holds_itself_has_a_name():
    def recurses(n):
        return recurses(n - 1) if n else 0

    assert benchmark(recurses, 2, **QUICK).name == f"{recurses.__qualname__}(2)"


@pytest.mark.parametrize("last", [1, 100, 5000])
def test_an_error_of_a_later_call_reaches_the_user_as_it_is(last):
    calls = 0

    def breaks():
        nonlocal calls
        calls += 1
        if calls == last:
            raise LookupError(calls)

    with pytest.raises(LookupError, match=f"^{last}$"):
        benchmark(breaks, **QUICK)
    assert gc.isenabled()


def test_a_function_that_writes_to_its_arguments_gets_a_warning():
    def writes(x, more):
        more[0].add_(x)

    (warning,) = benchmark(writes, VECTOR, [torch.zeros(8)], **QUICK).warnings[:1]
    assert "writes to its arguments" in warning
    warnings = benchmark(lambda batch: batch["x"].add_(1), {"x": torch.zeros(8)}, **QUICK).warnings
    assert any("writes to" in text for text in warnings)
    grows = torch.ones(2, requires_grad=True).clone()
    assert any("writes to" in text for text in benchmark(lambda x: x.mul_(1.0), grows, **QUICK).warnings)


def test_a_function_that_only_reads_or_fills_what_it_keeps_is_not():
    out = torch.empty(8)
    with torch.inference_mode():
        unversioned = torch.ones(8)
    for fn, x in ((partial(torch.add, VECTOR, out=out), 1), (out.copy_, VECTOR), (torch.neg, unversioned)):
        assert not any("writes to" in text for text in benchmark(fn, x, **QUICK).warnings)


def test_a_backward_pass_can_be_timed_again_and_again():
    layer = torch.nn.Linear(8, 2)
    result = benchmark(lambda: layer(VECTOR).sum().backward(), **QUICK)
    assert not any("writes to" in warning for warning in result.warnings)


def test_it_runs_in_a_thread_and_in_several_at_once():
    names = []

    def work():
        names.append(benchmark(torch.add, VECTOR, 1, **QUICK).name)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["add(float32[8], 1)"] * 3
    assert gc.isenabled()


@pytest.mark.slow
def test_the_users_profiler_continues():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        benchmark(torch.add, VECTOR, 1, **QUICK)
    assert any(event.key == "aten::add" for event in profiler.key_averages())


# -- comparing -------------------------------------------------------------------------------------------------------


def result(name):
    return BenchmarkResult(name=name, method="cpu", device="cpu", samples_us=(1.0,) * 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([result("f")], "two names or more, got 1"),
        (result("f"), "two names or more, got 1"),
        ([], "two names or more, got 0"),
        ([result("f"), 3.5], "list of BenchmarkResult, got float among them"),
        ("fg", "list of BenchmarkResult, got str among them"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        compare_benchmarks(given)


def test_results_may_come_from_a_generator():
    assert compare_benchmarks(result(name) for name in "fg").baseline == "f"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        None,
        '{"name": "f", "method": "cpu", "device": "cpu"}',
        '{"name": "f", "method": "cpu", "device": "cpu", "samples_us": 3}',
        '{"name": "f", "method": "cpu", "device": "cpu", "samples_us": [3], "clock": {"reasons": []}}',
    ],
)
def test_json_of_something_else_is_no_result(text):
    with pytest.raises(ConfigurationError, match="Not a result of to_json"):
        BenchmarkResult.from_json(text)


@pytest.mark.parametrize("sample", ["x", -1.0, float("nan"), float("inf"), None])
def test_what_is_no_time_is_no_sample(sample):
    given = {"name": "f", "method": "cpu", "device": "cpu", "samples_us": [1.0, sample]}
    with pytest.raises(ConfigurationError, match=r"Not a result of to_json.*samples_us\[1\]"):
        BenchmarkResult.from_json(json.dumps(given))

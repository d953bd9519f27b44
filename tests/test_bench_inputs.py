"""What a user may hand to `benchmark` and `compare_benchmarks`, right and wrong, and what it answers."""

import gc
import threading
import weakref
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import getitem
from types import FunctionType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_forge_profiling.bench.benchmark import benchmark
from lightning_forge_profiling.bench.comparison import compare_benchmarks
from lightning_forge_profiling.bench.names import Names, default_name
from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.bench.sampling import Limits
from lightning_forge_profiling.bench.timed_call import find_device
from lightning_forge_profiling.errors import ConfigurationError
from tests.simulated_gpu import SimulatedGpu

QUICK = {"min_time": 0.0, "max_time": 0.02, "warmup": 1, "device": "cpu"}
VECTOR = torch.ones(8)
LAYER = torch.nn.Linear(8, 2)


@pytest.fixture(autouse=True)
def _no_name_is_taken(monkeypatch):
    """Names that other tests have given are not in the way."""
    monkeypatch.setattr("lightning_forge_profiling.bench.benchmark._NAMES", Names())


@pytest.fixture
def on_a_gpu():
    with FakeTensorMode():
        return torch.empty(4, device="cuda:0")


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
        ({"method": "fast"}, r"choose one of auto, cpu, wall, events, saturated, graph, kernels"),
        ({"inputs": []}, r"inputs is empty: give a list of argument tuples"),
        ({"inputs": ((x,) for x in (1, 2))}, r"inputs is a generator: give a list of argument tuples"),
        ({"inputs": VECTOR}, r"inputs is a Tensor: give a list of argument tuples"),
        ({"inputs": [(VECTOR,), VECTOR]}, r"inputs\[1\] is a Tensor: each is a tuple of arguments"),
        ({"max_time": -1}, r"max_time \(-1\) is no time: give seconds"),
        ({"max_time": "1"}, r"max_time \('1'\) is no time: give seconds"),
        ({"max_time": float("nan")}, r"max_time \(nan\) is no time"),
        ({"min_time": [1]}, r"min_time \(\[1\]\) is no time"),
        ({"min_time": 0.1, "max_time": 0.05}, r"min_time \(0.1\) exceeds max_time \(0.05\)"),
        ({"max_noise": 0}, r"max_noise \(0\) is no positive number: 0.01 is 1 %"),
        ({"max_noise": None}, r"max_noise \(None\) is no positive number"),
        ({"warmup": -1}, r"warmup \(-1\) is no number of calls: give one such as 3, or leave it out"),
        ({"warmup": 0.5}, r"warmup \(0.5\) is no number of calls"),
        ({"warmup": "3"}, r"warmup \('3'\) is no number of calls"),
        ({"kwargs": [1]}, r"kwargs is a list: give keyword arguments by name, as in kwargs={'dim': -1}"),
        ({"kwargs": {1: 2}}, r"kwargs is of other keys than names"),
        ({"dim": -1}, r"no option 'dim': keyword arguments of the function go into kwargs={'dim': ...}"),
        ({"device": "gpu"}, r"device='gpu' is no device: give 'cpu' or 'cuda:0'"),
        ({"device": "meta"}, r"takes the CPU or a CUDA device"),
        ({"device": -1}, r"device=-1 is no device"),
        ({"device": 256}, r"device=256 is no device"),
        ({"device": True}, r"device=True is no device"),
        ({"flush_l2": 1}, r"flush_l2 \(1\) is neither True nor False"),
        ({"name": 5}, r"name \(5\) is no text: give a string, or leave it out"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_call(options, message):
    called = []
    with pytest.raises(ConfigurationError, match=message):
        benchmark(called.append, **({"device": "cpu"} | options))
    assert called == []


@pytest.mark.parametrize("given", [VECTOR, 3, "torch.add", None])
def test_a_result_instead_of_a_function_is_answered_with_how_to_write_it(given):
    with pytest.raises(ConfigurationError, match=r"cannot be called: .* benchmark\(torch.softmax, x, -1\)"):
        benchmark(given)


def test_arguments_and_inputs_together_are_refused():
    with pytest.raises(ConfigurationError, match="inputs takes the place of arguments"):
        benchmark(print, 1, inputs=[(1,)])


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
        return {"allocated_bytes.all.allocated": gpu.memory().given_bytes} if device == gpu.index else {}

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu.kernels > 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    monkeypatch.setattr("lightning_forge_profiling.bench.benchmark.Gpu", {torch.device("cuda", 1): gpu}.__getitem__)
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

    found = benchmark(Engine(model).step, VECTOR, watch_clock=False, max_time=0.05, method=method)
    assert (found.method, found.device) == ("kernels", simulated_gpu.name)
    assert found.median_us == pytest.approx(20)


@pytest.mark.parametrize("used", [False, True])
def test_a_function_of_the_cpu_is_timed_there_beside_a_gpu(simulated_gpu, used):
    if used:
        simulated_gpu.kernel(1000)
    before = simulated_gpu.kernels
    for options in ({}, {"method": "wall"}, {"device": "cpu"}):
        found = benchmark(torch.add, VECTOR, 1, watch_clock=False, max_time=0.1, max_noise=1, **options)
        assert (found.method, found.device, found.clock) == ("cpu", "cpu", None)
        assert found.threads == torch.get_num_threads()
        assert not any("GPU" in warning or "CUDA" in warning for warning in found.warnings)
    with pytest.raises(ConfigurationError, match="the function seems to run on the CPU"):
        benchmark(torch.add, VECTOR, 1, watch_clock=False, method="graph")
    assert simulated_gpu.kernels == before, "the GPU is left alone"


def test_a_function_without_tensors_starts_no_gpu(simulated_gpu):
    found = benchmark(sorted, [3, 1, 2], watch_clock=False, max_time=0.05)
    assert (found.method, found.device, simulated_gpu.kernels) == ("cpu", "cpu", 0)


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
        (torch.sum, (VECTOR,), {"kwargs": {"dim": 0}}, "sum(float32[8], dim=0)"),
        (partial(torch.add, VECTOR, alpha=2), (1,), {}, "add(float32[8], 1, alpha=2)"),
        (partial(partial(torch.add, VECTOR), 1), (), {}, "add(float32[8], 1)"),
        (LAYER, (VECTOR,), {}, "Linear(in_features=8, out_features=2, bias=True)(float32[8])"),
        (LAYER.forward, (VECTOR,), {}, "Linear.forward(float32[8])"),
        (VECTOR.sum, (), {}, "Tensor.sum()"),
        (torch.compile(LAYER, backend="eager"), (VECTOR,), {}, f"compiled {LAYER}(float32[8])"),
        (torch.compile(torch.nn.functional.gelu, backend="eager"), (VECTOR,), {}, "compiled gelu(float32[8])"),
        (print, (), {"inputs": [[], ()], "kwargs": {"end": ""}}, "print(end='') over 2 inputs"),
        (print, (), {"name": "mine", "kwargs": {"end": ""}}, "mine"),
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


def power(n):
    return lambda x: x**n


class Scale:
    """Something that can be called, and its method; nothing tells two of them apart but what they hold."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    run = __call__


def with_a_default(factor):
    def scaled(x, *, factor=factor):
        return x * factor

    return scaled


def names_of(calls):
    """The names of results, in order; each call is made when the one before has gone."""
    return [benchmark(*call, **QUICK).name for call in calls]


@pytest.mark.parametrize(
    "make",
    [
        power,
        with_a_default,
        Scale,
        lambda n: Scale(n).run,
        lambda n: torch.nn.Dropout(0.5),
        lambda n: partial(Scale(n)),
    ],
    ids=["closure", "default", "instance", "method", "module", "partial"],
)
def test_two_functions_never_have_one_name_and_one_function_always_does(make):
    gone = names_of((make(n), VECTOR) for n in (2, 3, 2, 3))
    assert len(set(gone)) == 4
    assert gone[1] == f"{gone[0]} #2"
    kept = [make(n) for n in (2, 3)]
    names = names_of((fn, VECTOR) for fn in kept * 2)
    assert names[:2] == names[2:]
    assert len({*names, *gone}) == 6


def test_what_a_lambda_finds_elsewhere_is_no_reason_to_take_it_for_another():
    names = [benchmark(lambda: fn(VECTOR), **QUICK).name for fn in (torch.sin, torch.cos)]  # noqa: B023
    assert len(set(names)) == 2


def test_methods_of_one_object_are_one_function():
    scale = Scale(2)
    assert len(set(names_of((scale.run, VECTOR) for _ in range(3)))) == 1
    assert len(set(names_of((LAYER.forward, VECTOR) for _ in range(3)))) == 1
    lengths = {"a": 1}
    assert len(set(names_of((lengths.get, "a") for _ in range(3)))) == 1


class Batch(NamedTuple):
    """What a data loader may give."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass(slots=True)
class Slotted:
    """What cannot be referred to weakly."""

    x: torch.Tensor


@dataclass
class Settings:
    """An argument that equals another."""

    count: int


def test_arguments_count_by_what_they_are_to_a_benchmark():
    same = [
        [(torch.relu, torch.randn(9)) for _ in range(3)],
        [(torch.ones(9).add, n) for n in (1, 1)],
        [(torch.cat, [torch.ones(9), torch.ones(8)]) for _ in range(2)],
        [(torch.zeros, torch.ones(9, 2).shape) for _ in range(2)],
        [(id, Batch(torch.ones(n), torch.ones(3))) for n in (9, 9)],
        [(len, OrderedDict(x=torch.ones(9))) for _ in range(2)],
        [(max, np.float32(1), np.float32(2)) for _ in range(2)],
        [(id, [slice(3), range(4), torch.channels_last, np.dtype("f4"), ...]) for _ in range(2)],
        [(getitem, torch.ones(2, 2), (..., 0)) for _ in range(2)],
        [(np.sin, 1.5) for _ in range(2)],
    ]
    for calls in same:
        assert len(set(names_of(calls))) == 1
    matrix = torch.ones(6, 6)
    other = [
        [(len, [1, 2]), (len, [1]), (len, (1,))],
        [(len, "x" * 50 + "y"), (len, "x" * 51)],
        [(torch.relu, matrix), (torch.relu, matrix[:, ::2].repeat(1, 2).t()), (torch.relu, matrix.to_sparse())],
        [(print, Settings(1)), (print, Settings(1))],
        [(torch.ones(7).sum,), (torch.ones(8, 8).sum,)],
    ]
    for calls in other:
        assert len(set(names_of(calls))) == len(calls)
    sets = [[(VECTOR,), (torch.ones(n),)] for n in (10, 11)]
    assert len({benchmark(torch.neg, inputs=one, **QUICK).name for one in sets}) == 2


def test_a_name_keeps_neither_model_nor_tensors_alive():
    model, x = torch.nn.Linear(8, 2), torch.ones(8)
    alive = [weakref.ref(one) for one in (model, x, model.weight)]
    functions = [model, model.forward, partial(model), x.add, partial(torch.nn.functional.linear, weight=model.weight)]
    for fn in functions:
        benchmark(fn, x, **QUICK)
    benchmark(torch.cat, [x] * 500, **QUICK)
    for holder in (Batch(x, x), Slotted(x), defaultdict(list, x=[x])):
        benchmark(id, holder, **QUICK)
    del holder, model, x, fn, functions
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_a_function_that_holds_itself_has_a_name():
    def recurses(n):
        return recurses(n - 1) if n else 0

    assert benchmark(recurses, 2, **QUICK).name == f"{recurses.__qualname__}(2)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.1, 3.0)),
        ({"max_time_s": 0.05}, (0.05, 0.05)),
        ({"min_time_s": 5}, (5, 5)),
        ({"min_time_s": 1, "max_time_s": 2}, (1, 2)),
    ],
)
def test_a_time_that_is_not_given_suits_the_one_that_is(given, expected):
    limits = Limits.between(**{"min_time_s": None, "max_time_s": None, "max_noise": 0.01, **given})
    assert (limits.min_time_s, limits.max_time_s) == expected


def test_inputs_are_of_any_shape_and_take_turns():
    seen = []
    benchmark(lambda x: seen.append(len(x)), inputs=[(torch.ones(2),), (torch.ones(3),)], **QUICK)
    assert set(seen[::2]) == {2}
    assert set(seen[1::2]) == {3}


@pytest.mark.parametrize("last", [1, 100, 5000])
def test_an_error_of_a_later_call_reaches_the_user_as_it_is(last):
    calls = 0

    def breaks():
        nonlocal calls
        calls += 1
        if calls == last:
            raise LookupError(calls)

    with pytest.raises(LookupError, match=f"^{last}$"):
        benchmark(breaks, **QUICK | {"warmup": None, "max_time": 2, "min_time": 2})
    assert gc.isenabled()


def test_a_function_that_writes_to_its_arguments_is_said_to():
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
    found = []

    def work():
        found.append(benchmark(torch.add, VECTOR, 1, **QUICK).name)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["add(float32[8], 1)"] * 3
    assert gc.isenabled()


def test_a_profiler_of_the_users_own_goes_on():
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
        ([result("f"), 3.5], "and a float is in it"),
        ("fg", "and a str is in it"),
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
    with pytest.raises(ConfigurationError, match="no result of to_"):
        BenchmarkResult.from_json(text)


@pytest.mark.parametrize("sample", ["x", -1.0, float("nan"), float("inf"), None])
def test_what_is_no_time_is_no_sample(sample):
    with pytest.raises(ConfigurationError, match="which is no time: microseconds, 0 or more"):
        BenchmarkResult(name="f", method="cpu", device="cpu", samples_us=(1.0, sample))

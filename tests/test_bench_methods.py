"""Which method `benchmark` takes, what each reads, and what it notices, on a simulated GPU."""

from itertools import count

import pytest
import torch

from lightning_forge_profiling.bench.benchmark import Options, time_call
from lightning_forge_profiling.bench.call import TimedCall
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError
from lightning_forge_profiling.gpu.clocks import ClockWatch
from tests.fake_nvml import FakeNvml
from tests.simulated_gpu import GAP_NS, SimulatedGpu

KERNEL_US = 2.0


@pytest.fixture
def gpu():
    return SimulatedGpu()


def options(method="auto", **others):
    return Options(method=method, **{"flush_l2": False, "min_time": 0.01, "max_time": 0.5, **others})


def timed(gpu, fn, how=None, *, clock_watch=None, no_clock="", rest=None):
    how = options() if how is None else how
    clocks = {"clock_watch": clock_watch, "no_clock": no_clock, "clock_ns": gpu.clock_ns, "rest": rest or gpu.rest}
    return time_call(TimedCall(fn, ()), how, gpu, **clocks)


def add(gpu):
    return lambda: gpu.kernel(KERNEL_US * 1e3, cold_ns=1500)


def waiting(gpu):
    def waits():
        gpu.kernel(2000)
        gpu.synchronize()

    return waits


def growing(gpu):
    def grows():
        gpu.kernel(2000)
        gpu.allocate(1024, keep=True)

    return grows


def refusing_capture(gpu):
    def refuses():
        if gpu.captured is not None:
            raise RuntimeError("no capture\nmore")
        gpu.kernel(2000)

    return refuses


def warming_up(gpu):
    calls = count()
    return lambda: gpu.kernel(2000 if next(calls) >= 300 else 50_000)


def test_auto_reads_what_the_kernel_takes(gpu):
    result = timed(gpu, add(gpu))
    assert result.method == "kernels"
    assert result.median_us == pytest.approx(KERNEL_US)
    assert result.enqueue_us == pytest.approx(5, abs=0.2)
    assert result.queued_us == pytest.approx(KERNEL_US + GAP_NS / 1e3, abs=0.1)
    assert result.warnings == ()
    assert "the host is the limit" in str(result)


def test_each_method_reads_the_kernel_and_what_it_cannot_keep_out(gpu):
    read = {name: timed(gpu, add(gpu), options(name)).median_us for name in ("graph", "saturated", "events", "wall")}
    assert read["graph"] == pytest.approx(KERNEL_US + 0.1, abs=0.01)
    assert read["saturated"] == pytest.approx(KERNEL_US + 0.9, abs=0.01)
    assert 5 < read["events"] < read["wall"]


@pytest.mark.parametrize(("method", "gap"), [("kernels", 0), ("saturated", 0.9)])
def test_an_l2_flush_makes_the_data_cold_and_is_not_in_the_time(gpu, method, gap):
    result = timed(gpu, add(gpu), options(method, flush_l2=True))
    assert gpu.flushes >= len(result.samples_us)
    assert result.median_us == pytest.approx(KERNEL_US + 1.5 + gap, abs=0.01)
    assert result.flush_l2
    assert "flushed" in str(result)


def test_events_include_the_launch_with_and_without_an_l2_flush(gpu):
    hot, cold = (timed(gpu, add(gpu), options("events", flush_l2=flush)).median_us for flush in (False, True))
    assert cold == pytest.approx(hot + 1.5, abs=0.01)


def test_a_graph_of_a_function_that_waits_is_refused_before_the_capture(gpu):
    with pytest.raises(ConfigurationError, match=r"cannot capture a function that waits .*such as .item\(\)"):
        timed(gpu, waiting(gpu), options("graph"))
    assert gpu.captures == 0


def broken_off(calls, count):
    del calls, count
    raise ForgeProfilingError("CUDA aborted the graph capture: operation not permitted")


def test_a_graph_that_cuda_breaks_off_is_one_sentence(gpu):
    gpu.capture = broken_off
    with pytest.raises(
        ForgeProfilingError, match=r"cannot be used: CUDA aborted .* not permitted\. Leave method out"
    ) as raised:
        timed(gpu, add(gpu), options("graph"))
    assert "\n" not in str(raised.value)
    gpu.profiler_error = ForgeProfilingError("no")
    assert timed(gpu, add(gpu)).method == "saturated"


def test_work_on_another_stream_is_read_from_the_profiler(gpu):
    result = timed(gpu, lambda: gpu.kernel_aside(20_000), options(flush_l2=True))
    assert (result.method, result.median_us, result.flush_l2) == ("kernels", pytest.approx(20), False)
    assert result.queued_us is None
    assert any("found on other streams" in warning for warning in result.warnings)
    assert timed(gpu, lambda: gpu.kernel_aside(20_000), options("kernels")).median_us == pytest.approx(20)


def test_whether_there_is_work_on_other_streams_is_left_open_without_the_profiler(gpu):
    gpu.profiler_error = ForgeProfilingError("another torch profiler is active in this process")
    result = timed(gpu, lambda: gpu.kernel_aside(20_000))
    assert (result.method, result.device) == ("cpu", "cpu")
    assert any("is unknown (another torch profiler" in warning for warning in result.warnings)


@pytest.mark.parametrize("method", ["graph", "saturated", "events"])
def test_a_method_that_reads_one_stream_is_refused_where_nothing_is_on_it(gpu, method):
    with pytest.raises(ConfigurationError, match="the function launches nothing there: leave method out"):
        timed(gpu, lambda: gpu.kernel_aside(20_000), options(method))


def test_a_graph_cannot_flush_the_l2_cache_and_says_so(gpu):
    result = timed(gpu, add(gpu), options("graph", flush_l2=True))
    assert gpu.flushes == 0
    assert not result.flush_l2
    assert any("hot" in warning for warning in result.warnings)


def test_a_function_that_waits_for_the_gpu_is_named_and_timed_by_the_wall(gpu):
    result = timed(gpu, waiting(gpu))
    assert result.method == "wall"
    assert result.median_us > 8
    assert any("waits for the GPU" in warning for warning in result.warnings)
    assert gpu.captures == 0


def test_a_function_that_waits_is_still_timed_as_asked(gpu):
    result = timed(gpu, waiting(gpu), options("saturated"))
    assert result.method == "saturated"
    assert any("time includes that wait" in warning for warning in result.warnings)


def test_a_function_that_puts_nothing_on_the_gpu_is_timed_on_the_host(gpu):
    def host_only():
        gpu.host_ns += 700

    watch = ClockWatch(uuid=gpu.uuid, nvml=FakeNvml(), clock_ns=gpu.clock_ns)
    for method in ("auto", "cpu", "wall"):
        result = timed(gpu, host_only, options(method), clock_watch=watch)
        assert (result.method, result.device, result.threads) == ("cpu", "cpu", torch.get_num_threads())
        assert (result.clock, result.allocated_bytes, result.enqueue_us, result.warnings) == (None, None, None, ())
        assert result.median_us == pytest.approx(0.7, rel=0.01)


def test_the_cpu_does_not_rest_between_its_samples(gpu):
    def host_only():
        gpu.host_ns += 700

    rests = []
    timed(gpu, host_only, options(min_time=0.1), rest=lambda _: rests.append(gpu.host_ns))
    assert gpu.host_ns - rests[-1] > 100_000_000


def test_a_function_of_the_cpu_whose_calls_differ_is_not_taken_for_one_that_waits(gpu):
    calls = 0

    def gets_slower():
        nonlocal calls
        calls += 1
        gpu.host_ns += 20_000_000 * 2**calls

    result = timed(gpu, gets_slower, options(one_call_warms_up=True))
    assert (result.method, result.device) == ("cpu", "cpu")
    assert not any("GPU" in warning for warning in result.warnings)


@pytest.mark.parametrize("slow_first", range(0, 40, 6))
@pytest.mark.parametrize("flush_l2", [True, False])
def test_a_function_of_the_cpu_of_which_few_calls_are_slow_is_timed_there(gpu, slow_first, flush_l2):
    """As a data loader that runs empty now and then."""
    calls = slow_first

    def next_batch():
        nonlocal calls
        calls += 1
        gpu.host_ns += 20_000_000 if calls % 40 == 0 else 100_000

    result = timed(gpu, next_batch, options(one_call_warms_up=True, max_time=0.5, min_time=0.1, flush_l2=flush_l2))
    assert (result.method, result.device) == ("cpu", "cpu")


@pytest.mark.parametrize("method", ["auto", "wall"])
def test_under_a_profiler_that_sees_nothing_a_function_that_waits_is_still_the_gpus(gpu, monkeypatch, method):
    """As where nsys or ncu is attached."""
    trace = gpu.trace
    monkeypatch.setattr(gpu, "trace", lambda run: [each for each in trace(run) if each["cat"] == "user_annotation"])

    def step():
        gpu.kernel(50_000)
        gpu.synchronize()

    result = timed(gpu, step, options(method))
    assert (result.method, result.device, result.waits_for_gpu) == ("wall", gpu.name, True)
    assert any("waits for the GPU" in warning for warning in result.warnings) == (method == "auto")
    with pytest.raises(ForgeProfilingError, match="no GPU work at all"):
        timed(gpu, step, options("kernels"))


def test_a_function_that_only_takes_gpu_memory_is_timed_on_the_host_and_is_the_gpus(gpu):
    def allocates():
        gpu.host_ns += 1000
        gpu.allocate(1024, keep=True)

    result = timed(gpu, allocates)
    assert (result.method, result.device, result.allocated_bytes) == ("cpu", gpu.name, 1024)
    assert any("it keeps memory" in warning for warning in result.warnings)


@pytest.mark.parametrize(("method", "median_us"), [("wall", 28), ("cpu", 5)])
def test_work_on_another_stream_is_found_for_the_host_methods_too(gpu, method, median_us):
    def aside():
        gpu.kernel_aside(20_000)
        gpu.free_ns = max(gpu.free_ns, gpu.host_ns + 23_000)  # a synchronization of the device waits for it

    result = timed(gpu, aside, options(method, max_time=0.02))
    assert (result.method, result.device) == (method, gpu.name)
    assert result.median_us == pytest.approx(median_us, abs=1)


def test_memory_that_a_call_keeps_or_asks_the_driver_for_is_named(gpu):
    warnings = " ".join(timed(gpu, growing(gpu)).warnings)
    assert "1,024 bytes more after each call" in warnings
    assert "cudaMalloc" in warnings


def test_an_output_that_is_let_go_is_counted_and_no_warning(gpu):
    def allocates():
        gpu.kernel(2000)
        gpu.allocate(4096, keep=False)

    result = timed(gpu, allocates)
    assert (result.allocated_bytes, result.warnings) == (4096, ())


def test_without_the_profiler_and_without_a_flush_a_function_is_replayed_as_a_graph(gpu):
    gpu.profiler_error = ForgeProfilingError("another torch profiler is active in this process")
    result = timed(gpu, add(gpu))
    assert result.method == "graph"
    assert any("another torch profiler" in warning for warning in result.warnings)
    assert gpu.replays > len(result.samples_us) - 1


def test_without_the_profiler_and_with_a_flush_a_function_is_timed_in_a_full_queue(gpu):
    gpu.profiler_error = ForgeProfilingError("no")
    assert timed(gpu, add(gpu), options(flush_l2=True)).method == "saturated"


def test_without_the_profiler_a_function_that_keeps_memory_is_not_captured(gpu):
    gpu.profiler_error = ForgeProfilingError("no")
    assert timed(gpu, growing(gpu)).method == "saturated"
    assert gpu.captures == 0


def test_what_cannot_be_captured_is_timed_in_a_full_queue(gpu):
    gpu.profiler_error = ForgeProfilingError("no")
    result = timed(gpu, refusing_capture(gpu))
    assert result.method == "saturated"
    assert any("(no capture)" in warning for warning in result.warnings)


@pytest.mark.parametrize("method", ["graph", "kernels"])
def test_a_method_asked_for_by_name_fails_rather_than_becoming_another(gpu, method):
    gpu.profiler_error = RuntimeError("no profiler")
    with pytest.raises((RuntimeError, ForgeProfilingError), match=r"no capture|no profiler"):
        timed(gpu, refusing_capture(gpu), options(method))


def test_a_method_that_fails_says_what_to_choose_instead(gpu):
    gpu.profiler_error = ForgeProfilingError("another torch profiler is active in this process")
    with pytest.raises(ForgeProfilingError) as raised:
        timed(gpu, add(gpu), options("kernels"))
    said = "another torch profiler is active in this process. Leave method out, or take 'graph' or 'saturated'"
    assert said in str(raised.value)

    with pytest.raises(RuntimeError) as raised:
        timed(gpu, refusing_capture(gpu), options("graph"))
    assert "'saturated'" in raised.value.__notes__[0]


def test_the_host_part_alone_gets_a_warning(gpu):
    result = timed(gpu, add(gpu), options("cpu", max_time=0.02))
    assert result.method == "cpu"
    assert any("only the host's part" in warning for warning in result.warnings)


def test_calls_that_only_sometimes_reach_the_gpu_count_as_they_are_and_are_named(gpu):
    calls = 0

    def cached():
        nonlocal calls
        calls += 1
        gpu.host_ns += 1000
        if calls % 4 == 0:
            gpu.kernel(2000)

    result = timed(gpu, cached)
    assert result.method == "kernels"
    assert result.mean_us == pytest.approx(0.5, rel=0.1)
    assert any("saw no GPU work" in warning for warning in result.warnings)


@pytest.mark.parametrize("call", [1, 2, 30, 300, 700])
@pytest.mark.parametrize("method", ["auto", "graph", "saturated", "events", "wall", "cpu"])
def test_an_error_of_any_call_reaches_the_user_whatever_the_method(gpu, method, call):
    calls = 0

    def breaks():
        nonlocal calls
        calls += 1
        if calls == call:
            raise LookupError(calls)
        gpu.kernel(2000)

    with pytest.raises(LookupError, match=f"^{call}$"):
        timed(gpu, breaks, options(method, min_time=0.4))


def test_calls_of_many_kernels_are_made_fewer_until_the_queue_holds_them(gpu):
    def fifty():
        for _ in range(50):
            gpu.kernel(100)

    result = timed(gpu, fifty, options("saturated"))
    assert 1 <= result.calls_per_sample <= 20
    assert result.median_us == pytest.approx(50 * (0.1 + 0.9), rel=0.02)
    assert not any("wait for the host" in warning for warning in result.warnings)


def test_a_host_that_stalls_for_once_costs_a_sample_and_no_accuracy(gpu):
    calls = 0

    def stalls_sometimes():
        nonlocal calls
        calls += 1
        gpu.host_ns += 3_000_000 if calls % 700 == 0 else 0
        gpu.kernel(2000)

    result = timed(gpu, stalls_sometimes, options("saturated"))
    assert result.p95_us == pytest.approx(2.9, abs=0.01)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_call_of_a_second_is_made_six_times_however_little_time_there_is(gpu, on_gpu):
    calls = 0

    def slow():
        nonlocal calls
        calls += 1
        gpu.host_ns += 0 if on_gpu else 1_000_000_000
        if on_gpu:
            gpu.kernel(1_000_000_000)

    result = timed(gpu, slow, options(max_time=0.5))
    assert calls == 6
    assert result.method == ("kernels" if on_gpu else "cpu")
    assert result.median_us == pytest.approx(1e6, rel=0.001)


def test_samples_wait_until_the_function_is_warm(gpu):
    result = timed(gpu, warming_up(gpu), options("saturated"))
    assert max(result.samples_us) == pytest.approx(2.9, abs=0.01)
    assert result.warnings == ()


def test_a_function_that_was_not_warmed_up_is_named(gpu):
    result = timed(gpu, warming_up(gpu), options("events", one_call_warms_up=True, min_time=0.2))
    assert any("not warmed up" in warning for warning in result.warnings)


def test_a_function_that_does_not_settle_is_named_and_ends_in_time(gpu):
    calls = 0

    def erratic():
        nonlocal calls
        calls += 1
        gpu.kernel(20_000 if calls // 7 % 2 else 40_000)

    result = timed(gpu, erratic, options("events", max_time=0.2, max_noise=0.001))
    assert any(warning.endswith(": raise max_time") for warning in result.warnings)
    assert result.noise > 0.001


def test_more_time_is_no_advice_for_a_function_that_gets_slower(gpu):
    calls = 0

    def slower():
        nonlocal calls
        calls += 1
        gpu.kernel(20_000 + 50 * calls)

    warnings = timed(gpu, slower, options("events", max_noise=0.0001, one_call_warms_up=True)).warnings
    assert any("getting slower" in warning for warning in warnings)
    assert any("did not converge" in warning for warning in warnings)
    assert not any("raise max_time" in warning for warning in warnings)


def test_samples_taken_while_the_clock_was_held_down_are_left_out(gpu):
    nvml = FakeNvml()
    watch = ClockWatch(uuid=gpu.uuid, nvml=nvml, clock_ns=gpu.clock_ns)
    began = []

    def under_a_power_cap():
        began.append(gpu.host_ns)
        held = (gpu.host_ns - began[0]) % 400_000_000 > 300_000_000
        gpu.slowdown = 2.0 if held else 1.0
        nvml.boards[0].sm_mhz, nvml.boards[0].reasons = (990, 0x4) if held else (1980, 0)
        gpu.kernel(100_000)

    result = timed(gpu, under_a_power_cap, options("events", min_time=1.0, max_time=1.0), clock_watch=watch)
    assert result.clock is not None
    assert result.clock.discarded > 100
    assert (result.clock.min_mhz, result.clock.max_mhz, result.clock.limit_mhz) == (990, 1980, 1980)
    assert max(result.samples_us) < 150
    assert any("samples were left out" in warning and "power cap" in warning for warning in result.warnings)


def test_a_clock_held_down_throughout_gets_a_warning_and_keeps_all_samples(gpu):
    nvml = FakeNvml()
    nvml.boards[0].sm_mhz, nvml.boards[0].reasons = 1200, 0x20
    watch = ClockWatch(uuid=gpu.uuid, nvml=nvml, clock_ns=gpu.clock_ns)
    result = timed(gpu, add(gpu), clock_watch=watch)
    assert result.clock is not None
    assert result.clock.discarded == 0
    assert any("1200 of 1980 MHz" in warning and "temperature" in warning for warning in result.warnings)


def test_why_the_clock_was_not_watched_is_in_the_result(gpu):
    result = timed(gpu, add(gpu), no_clock="pip install nvidia-ml-py")
    assert result.clock is None
    assert result.warnings == ("pip install nvidia-ml-py",)


def test_the_gpu_rests_most_of_the_time(gpu):
    rests = []

    def rest(seconds):
        rests.append(seconds)
        gpu.rest(seconds)

    began = gpu.host_ns
    timed(gpu, lambda: gpu.kernel(170_000), options("graph"), rest=rest)
    assert sum(rests) > 0.6 * (gpu.host_ns - began) / 1e9
    assert max(rests) <= 0.005

"""What the GPU waited for, one cause at a time: it works from 0 to 10 ms and from 60 to 100, and waits in between."""

import pytest

from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import ADD, AUTOGRAD, MAIN, WORKER, Synthetic

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.fixture
def waiting():
    """One step with a gap of 50 ms, that ends as soon as the host launches the next kernel."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.kernel(60, 100, launched=60)
    return trace


def causes(rank):
    """The causes that there are, in milliseconds."""
    return {name: cause.ms_per_step for name, cause in rank.idle.items() if cause.ms_per_step}


def prices(rank):
    """What waits for the GPU, allocations and launches cost."""
    host = rank.host
    return (
        host.idle_after_sync_ms_per_step,
        host.idle_after_allocator_ms_per_step,
        pytest.approx(host.idle_launching_ms_per_step),
    )


def test_python_is_the_cause_where_the_host_calls_nothing(waiting, tmp_path):
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"python": 50}
    assert prices(rank) == (0, 0, 50)
    assert (rank.gpu.idle_ms_per_step, rank.gpu.idle_pct) == (50, 50)


@pytest.mark.parametrize("name", [LOADER, "forge.data", "[pl][profile][_TrainingEpochLoop].train_dataloader_next"])
def test_waiting_for_data(waiting, tmp_path, name):
    waiting.mark(name, 20, 50)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"data": 30, "python": 20}
    assert prices(rank) == (0, 0, 20)
    assert rank.host.data_wait_ms_per_step == 30


def test_a_loader_costs_what_the_gpu_does_not_hide(waiting, tmp_path):
    waiting.mark(LOADER, 4, 24)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"data": 14, "python": 36}
    assert rank.host.data_wait_ms_per_step == 20


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "hipMalloc", "cuMemCreate", "cudaHostAlloc"])
def test_waiting_for_an_allocation(waiting, tmp_path, call):
    waiting.call(call, 20, 50)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"allocator": 30, "python": 20}
    assert prices(rank) == (0, 30, 20)


@pytest.mark.parametrize(
    "call", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "hipMemcpyWithStream"]
)
def test_waiting_in_a_sync(waiting, tmp_path, call):
    waiting.call(call, 20, 50)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"sync": 30, "python": 20}
    assert prices(rank) == (30, 0, 20)


def test_waiting_for_the_host_to_copy(waiting, tmp_path):
    waiting.call("cudaMemcpyAsync", 20, 50)
    assert causes(waiting.rank(tmp_path)) == {"copy": 30, "python": 20}


def test_data_comes_before_what_the_loader_itself_calls(waiting, tmp_path):
    waiting.mark(LOADER, 20, 50)
    waiting.call("cudaMalloc", 30, 40)
    waiting.call("cudaMemcpyAsync", 45, 55)
    assert causes(waiting.rank(tmp_path)) == {"data": 30, "copy": 5, "python": 15}


def test_work_that_was_launched_and_did_not_begin_is_the_gpus_own_affair(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    for start in (2, 4, 6):
        trace.kernel(start, start + 2, launched=start - 2)  # launches take 2 ms to get through
    trace.kernel(60, 100, launched=30)
    rank = trace.rank(tmp_path)
    assert causes(rank) == {"python": 2 + (32 - 8), "gpu": 60 - 32}


def test_the_gpu_waits_for_the_host_until_the_launching_call_returns(tmp_path):
    """Lazy loading: the first launch of a kernel loads its module."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.operator("aten::add_", 25, 61)
    trace.kernel(60, 100, launched=30, takes=30, by="hipLaunchKernel")
    found = analyze(trace.write(tmp_path)).analysis
    rank = found.ranks[0]
    assert causes(rank) == {"launch": 30, "python": 20}
    assert prices(rank) == (0, 0, 20)
    assert found.verdict == "slow-launches"
    assert "waits 30.0 ms of each 100.0 ms step inside launch calls" in found.verdict_text
    assert "hipLaunchKernel of aten::add_" in found.verdict_text


def test_a_graph_launch_may_take_long_without_loading_anything(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.kernel(60, 100, launched=30, takes=30, by="cudaGraphLaunch")
    assert causes(trace.rank(tmp_path)) == {"python": 50}


def test_the_largest_idle_part_is_named_where_no_rule_explains_it(tmp_path):
    """The next kernel has been launched, and the host waits in a copy."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    for start in range(10):
        trace.kernel(start, start + 1, launched=max(start - 0.001, 0))
    trace.kernel(90, 100, launched=11, name=ADD, stream=20)
    trace.operator("aten::copy_", 14, 96)
    trace.call("hipMemcpyWithStream", 15, 95)
    found = analyze(trace.write(tmp_path)).analysis
    assert found.verdict == "gpu-idle"
    assert "idles 79.0 ms of each 100.0 ms step although its next work has been launched" in found.verdict_text
    assert (
        "before vectorized_elementwise_kernel; for 75.0 ms of it the host is in hipMemcpyWithStream of aten::copy_"
        in (found.verdict_text)
    )
    longest = found.ranks[0].idle_parts[0]
    assert (longest.launched, longest.thread, longest.ms_per_step) == (True, str(MAIN), 75)


def test_where_the_launching_thread_is_in_nothing_the_call_of_another_one_is_named(tmp_path):
    """As where one thread copies the next batch, and the one that replays the graphs waits for it in Python."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    for start in range(10):
        trace.kernel(start, start + 1, launched=max(start - 0.001, 0))
    trace.kernel(90, 100, launched=11, name=ADD, stream=20)
    trace.operator("aten::copy_", 14, 86, WORKER)
    trace.call("cudaMemcpyAsync", 15, 85, WORKER)
    trace.call("cudaEventRecord", 40, 41, WORKER + 1)
    found = analyze(trace.write(tmp_path)).analysis
    assert "for 70.0 ms of it the host is in cudaMemcpyAsync of aten::copy_" in found.verdict_text
    parts = [(part.activity, part.thread, part.ms_per_step) for part in found.ranks[0].idle_parts if part.launched]
    assert parts[0] == ("cudaMemcpyAsync", str(WORKER), 70)
    assert sum(ms for *_, ms in parts) == pytest.approx(79, abs=0.1)


@pytest.mark.parametrize("calls", [("hipMalloc", "hipFree"), ("hipFree", "hipMalloc")])
def test_calls_of_two_other_threads_are_two_kinds(calls, tmp_path):
    """Each takes less than half of the time in which the launching thread is in nothing, both together more."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.kernel(90, 100, launched=11, name=ADD, stream=20)
    for at, name in enumerate(("hipMalloc", "hipFree")):  # in either order of their first calls
        trace.call(name, 1 + at, 1.5 + at, WORKER)
    trace.call(calls[0], 15, 50, WORKER)
    trace.call(calls[1], 50, 85, WORKER + 1)
    parts = [part.activity for part in trace.rank(tmp_path).idle_parts]
    assert set(parts) == {"", "cudaLaunchKernel"}


def test_time_in_which_no_thread_does_anything_is_named_by_the_kernel_after_its_longest_gap(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.kernel(70, 80, launched=70, name=ADD)
    trace.kernel(90, 100, launched=90)
    [part] = [part for part in trace.rank(tmp_path).idle_parts if not part.activity]
    assert (part.following, part.ms_per_step) == (ADD, 70)


def test_idle_time_is_listed_by_what_the_launching_thread_was_doing(waiting, tmp_path):
    waiting.mark("forge.backward", 12, 58)
    waiting.operator("aten::mm", 20, 40)
    waiting.call("cudaFuncGetAttributes", 25, 35)
    waiting.operator("aten::add", 10, 50, WORKER)
    parts = [(part.activity, part.operator, part.ms_per_step) for part in waiting.rank(tmp_path).idle_parts]
    assert parts == [
        ("forge.backward", "", 26),
        ("cudaFuncGetAttributes", "aten::mm", 10),
        ("aten::mm", "", 10),
        ("", "", 4),
    ]


def test_other_threads_do_not_keep_the_gpu_waiting(waiting, tmp_path):
    waiting.mark(LOADER, 20, 30, WORKER)
    waiting.call("cudaMalloc", 30, 40, WORKER)
    waiting.call("cudaEventSynchronize", 40, 50, WORKER)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"python": 50}
    assert prices(rank) == (0, 0, 50)


def item(trace, start, end, thread=MAIN):
    """`.item()`, that waits for the GPU but for its first and last millisecond."""
    trace.operator("aten::item", start, end, thread)
    trace.operator("aten::_local_scalar_dense", start + 0.5, end - 0.5, thread)
    trace.call("cudaStreamSynchronize", start + 1, end - 1, thread)


@pytest.mark.parametrize(("returns", "in_sync"), [(12, {"sync": 1}), (10, {})])
def test_a_sync_that_drains_the_queue_costs_all_of_the_gap_that_follows(waiting, tmp_path, returns, in_sync):
    item(waiting, 5, returns)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {**in_sync, "python": 50 - in_sync.get("sync", 0)}
    assert prices(rank) == (50, 0, 0)


def test_a_sync_with_the_queue_empty_costs_its_own_time(waiting, tmp_path):
    item(waiting, 20, 40)
    assert prices(waiting.rank(tmp_path)) == (20, 0, 30)


@pytest.mark.parametrize(("takes", "launch"), [(0.1, 0.1), (0.099_999, 0)])
def test_a_launch_of_a_tenth_of_a_millisecond_is_long(takes, launch, tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.kernel(60, 100, launched=50, takes=takes)
    assert causes(trace.rank(tmp_path)).get("launch", 0) == pytest.approx(launch)


def test_the_iterator_of_the_data_loader_is_named(waiting, tmp_path):
    assert waiting.rank(tmp_path / "none").host.data_loader == ""
    waiting.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 20, 50)
    assert waiting.rank(tmp_path / "some").host.data_loader == "_MultiProcessingDataLoaderIter"


@pytest.mark.parametrize(("before", "cost"), [(1e-6, 50), (0, 20)])
def test_a_sync_costs_all_of_a_gap_that_begins_in_it_to_the_nanosecond(waiting, before, cost, tmp_path):
    waiting.call("cudaDeviceSynchronize", 10 - before, 30)
    assert waiting.rank(tmp_path).host.idle_after_sync_ms_per_step == pytest.approx(cost, abs=1e-9)


def test_a_sync_does_not_cost_the_gaps_between_kernels_that_were_launched_before(waiting, tmp_path):
    waiting.kernel(12, 20, launched=1)
    item(waiting, 5, 25)
    rank = waiting.rank(tmp_path)
    assert rank.gpu.idle_ms_per_step == 42
    assert rank.host.idle_after_sync_ms_per_step == 40


@pytest.mark.parametrize(
    "around", ["autograd::engine::evaluate_function: MyBackward", "Torch-Compiled Region: 0/0", "My"]
)
def test_a_sync_deep_in_a_program_does_not_cost_all_of_the_program(waiting, tmp_path, around):
    waiting.operator(around, 15, 55, AUTOGRAD)
    item(waiting, 20, 40, AUTOGRAD)
    waiting.kernel(60, 61, launched=56, thread=AUTOGRAD)
    assert waiting.rank(tmp_path).host.idle_after_sync_ms_per_step == 20


def test_a_free_that_drains_the_queue_costs_all_of_the_gap_that_follows(waiting, tmp_path):
    waiting.call("cudaFree", 5, 12)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"allocator": 2, "python": 48}
    assert prices(rank) == (0, 50, 0)


def test_a_gap_is_not_paid_for_twice(waiting, tmp_path):
    item(waiting, 5, 12)
    waiting.call("cudaMalloc", 20, 50)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"sync": 1, "allocator": 30, "python": 19}
    assert prices(rank) == (50, 0, 0)


def test_what_lightnings_own_sync_costs_is_not_the_users(waiting, tmp_path):
    waiting.operator("aten::to", 1, 2)
    waiting.operator("c10d::broadcast_", 3, 4)
    item(waiting, 5, 12)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"sync": 1, "python": 49}
    assert prices(rank) == (0, 0, 0)


def test_a_trace_without_launches_has_no_cause_but_python(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(20, 70, launched=None)
    assert causes(trace.rank(tmp_path)) == {"python": 50}

"""What the GPU waited for, one cause at a time: it works from 0 to 1 ms and from 6 to 10, and waits in between."""

import pytest

from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import ADD, AUTOGRAD, MAIN, WORKER, Synthetic

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.fixture
def waiting():
    """One step with a gap of 5 ms, that ends as soon as the host launches the next kernel."""
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(0, 1, launched=0)
    trace.kernel(6, 10, launched=6)
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
    assert causes(rank) == {"python": 5}
    assert prices(rank) == (0, 0, 5)
    assert (rank.gpu.idle_ms_per_step, rank.gpu.idle_pct) == (5, 50)


@pytest.mark.parametrize("name", [LOADER, "forge.data", "[pl][profile][_TrainingEpochLoop].train_dataloader_next"])
def test_waiting_for_data(waiting, tmp_path, name):
    waiting.mark(name, 2, 5)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"data": 3, "python": 2}
    assert prices(rank) == (0, 0, 2)
    assert rank.host.data_wait_ms_per_step == 3


def test_a_loader_costs_what_the_gpu_does_not_hide(waiting, tmp_path):
    waiting.mark(LOADER, 0.4, 2.4)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"data": 1.4, "python": 3.6}
    assert rank.host.data_wait_ms_per_step == 2


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "hipMalloc", "cuMemCreate", "cudaHostAlloc"])
def test_waiting_for_an_allocation(waiting, tmp_path, call):
    waiting.call(call, 2, 5)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"allocator": 3, "python": 2}
    assert prices(rank) == (0, 3, 2)


@pytest.mark.parametrize(
    "call", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "hipMemcpyWithStream"]
)
def test_waiting_in_a_sync(waiting, tmp_path, call):
    waiting.call(call, 2, 5)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"sync": 3, "python": 2}
    assert prices(rank) == (3, 0, 2)


def test_waiting_for_the_host_to_copy(waiting, tmp_path):
    waiting.call("cudaMemcpyAsync", 2, 5)
    assert causes(waiting.rank(tmp_path)) == {"copy": 3, "python": 2}


def test_data_comes_before_what_the_loader_itself_calls(waiting, tmp_path):
    waiting.mark(LOADER, 2, 5)
    waiting.call("cudaMalloc", 3, 4)
    waiting.call("cudaMemcpyAsync", 4.5, 5.5)
    assert causes(waiting.rank(tmp_path)) == {"data": 3, "copy": 0.5, "python": 1.5}


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
    trace.step(0, 0, 10)
    trace.kernel(0, 1, launched=0)
    trace.operator("aten::add_", 2.5, 6.1)
    trace.kernel(6, 10, launched=3, takes=3, by="hipLaunchKernel")
    found = analyze(trace.write(tmp_path)).analysis
    rank = found.ranks[0]
    assert causes(rank) == {"launch": 3, "python": 2}
    assert prices(rank) == (0, 0, 2)
    assert found.verdict == "slow-launches"
    assert "waits 3.00 ms of each 10.0 ms step inside launch calls" in found.verdict_text
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
        "before elementwise_kernel: CUDAFunctor_add<float>; "
        "for 75.0 ms of it the host is in hipMemcpyWithStream of aten::copy_" in (found.verdict_text)
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
    waiting.mark("forge.backward", 1.2, 5.8)
    waiting.operator("aten::mm", 2, 4)
    waiting.call("cudaFuncGetAttributes", 2.5, 3.5)
    waiting.operator("aten::add", 1, 5, WORKER)
    parts = [(part.activity, part.operator, part.ms_per_step) for part in waiting.rank(tmp_path).idle_parts]
    assert parts == [
        ("forge.backward", "", 2.6),
        ("cudaFuncGetAttributes", "aten::mm", 1),
        ("aten::mm", "", 1),
        ("", "", 0.4),
    ]


def test_other_threads_do_not_keep_the_gpu_waiting(waiting, tmp_path):
    waiting.mark(LOADER, 2, 3, WORKER)
    waiting.call("cudaMalloc", 3, 4, WORKER)
    waiting.call("cudaEventSynchronize", 4, 5, WORKER)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"python": 5}
    assert prices(rank) == (0, 0, 5)


def item(trace, start, end, thread=MAIN):
    """`.item()`, that waits for the GPU but for its first and last tenth of a millisecond."""
    trace.operator("aten::item", start, end, thread)
    trace.operator("aten::_local_scalar_dense", start + 0.05, end - 0.05, thread)
    trace.call("cudaStreamSynchronize", start + 0.1, end - 0.1, thread)


@pytest.mark.parametrize(("returns", "in_sync"), [(1.2, {"sync": 0.1}), (1, {})])
def test_a_sync_that_drains_the_queue_costs_all_of_the_gap_that_follows(waiting, tmp_path, returns, in_sync):
    item(waiting, 0.5, returns)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {**in_sync, "python": 5 - in_sync.get("sync", 0)}
    assert prices(rank) == (5, 0, 0)


def test_a_sync_with_the_queue_empty_costs_its_own_time(waiting, tmp_path):
    item(waiting, 2, 4)
    assert prices(waiting.rank(tmp_path)) == (2, 0, 3)


@pytest.mark.parametrize(("takes", "launch"), [(0.1, 0.1), (0.099_999, 0)])
def test_a_launch_of_a_tenth_of_a_millisecond_is_long(takes, launch, tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    trace.kernel(60, 100, launched=50, takes=takes)
    assert causes(trace.rank(tmp_path)).get("launch", 0) == pytest.approx(launch)


def test_the_iterator_of_the_data_loader_is_named(waiting, tmp_path):
    assert waiting.rank(tmp_path / "none").host.data_loader == ""
    waiting.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 2, 5)
    assert waiting.rank(tmp_path / "some").host.data_loader == "_MultiProcessingDataLoaderIter"


@pytest.mark.parametrize(("before", "cost"), [(1e-6, 5), (0, 2)])
def test_a_sync_costs_all_of_a_gap_that_begins_in_it_to_the_nanosecond(waiting, before, cost, tmp_path):
    waiting.call("cudaDeviceSynchronize", 1 - before, 3)
    assert waiting.rank(tmp_path).host.idle_after_sync_ms_per_step == pytest.approx(cost, abs=1e-9)


def test_a_sync_does_not_cost_the_gaps_between_kernels_that_were_launched_before(waiting, tmp_path):
    waiting.kernel(1.2, 2, launched=0.1)
    item(waiting, 0.5, 2.5)
    rank = waiting.rank(tmp_path)
    assert rank.gpu.idle_ms_per_step == 4.2
    assert rank.host.idle_after_sync_ms_per_step == 4


@pytest.mark.parametrize(
    "around", ["autograd::engine::evaluate_function: MyBackward", "Torch-Compiled Region: 0/0", "My"]
)
def test_a_sync_deep_in_a_program_does_not_cost_all_of_the_program(waiting, tmp_path, around):
    waiting.operator(around, 1.5, 5.5, AUTOGRAD)
    item(waiting, 2, 4, AUTOGRAD)
    waiting.kernel(6, 6.1, launched=5.6, thread=AUTOGRAD)
    assert waiting.rank(tmp_path).host.idle_after_sync_ms_per_step == 2


def test_a_free_that_drains_the_queue_costs_all_of_the_gap_that_follows(waiting, tmp_path):
    waiting.call("cudaFree", 0.5, 1.2)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"allocator": 0.2, "python": 4.8}
    assert prices(rank) == (0, 5, 0)


def test_a_gap_is_not_paid_for_twice(waiting, tmp_path):
    item(waiting, 0.5, 1.2)
    waiting.call("cudaMalloc", 2, 5)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"sync": 0.1, "allocator": 3, "python": 1.9}
    assert prices(rank) == (5, 0, 0)


def test_what_lightnings_own_sync_costs_is_not_the_users(waiting, tmp_path):
    waiting.operator("aten::to", 0.1, 0.2)
    waiting.operator("c10d::broadcast_", 0.3, 0.4)
    item(waiting, 0.5, 1.2)
    rank = waiting.rank(tmp_path)
    assert causes(rank) == {"sync": 0.1, "python": 4.9}
    assert prices(rank) == (0, 0, 0)


def test_a_gap_much_longer_than_launches_take_is_the_hosts_own_work_with_its_function(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.frame("input.py(10): decode", 1, 60)
    for start in range(60, 100, 2):  # and one millisecond between launches
        trace.kernel(start, start + 1, launched=start)
    found = analyze(trace.write(tmp_path)).analysis
    assert found.ranks[0].host.idle_launching_ms_per_step == pytest.approx(20, abs=0.1)
    [first, second] = found.findings
    assert (first.code, second.code) == ("gpu-idle", "launch-bound")
    assert first.title.startswith("the GPU idles 60.0 ms of each 100.0 ms step and waits for the host")
    assert "59.0 ms of 80.0 ms are in input.py:10 decode" in first.title
    assert first.fix == ""
    assert "Look at input.py:10 decode first" in found.verdict_text


@pytest.mark.parametrize("by", ["cudaGraphLaunch", "cudaLaunchKernel in an update"])
def test_long_gaps_that_a_graph_would_close_are_gaps_between_launches(by, tmp_path):
    call, _, where = by.partition(" in an ")
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 10, launched=0)
    if where:
        trace.mark("Optimizer.step#Adam.step", 12, 65)
    trace.kernel(60, 100, launched=60, by=call)
    assert trace.rank(tmp_path).host.idle_launching_ms_per_step == pytest.approx(50)


def test_of_several_gpus_in_a_process_one_is_judged_and_waits_for_the_others(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    for start in range(0, 100, 20):  # in turns; the second works less
        trace.kernel(start, start + 10, launched=start)
        trace.kernel(start + 12, start + 20, launched=start + 12, device=1)
    found = analyze(trace.write(tmp_path)).analysis
    assert causes(found.ranks[0]) == {"python": pytest.approx(10), "others": pytest.approx(40)}
    assert found.verdict_text.startswith("gpu-idle: the GPU idles 40.0 ms of each 100.0 ms step while other GPUs of")
    [note] = found.warnings
    assert "several GPUs work in this process (GPU 0 50.0 ms, GPU 1 40.0 ms); all figures are of GPU 0" in note


def test_a_trace_without_launches_has_no_cause_but_python(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(20, 70, launched=None)
    assert causes(trace.rank(tmp_path)) == {"python": 50}

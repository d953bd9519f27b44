"""GPU time by region and by operator, copies, memory and the costliest kernels."""

import pytest

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import ADD, AUTOGRAD, GEMM, PAGEABLE, PINNED, Synthetic

# -- regions


def regions(rank):
    """Host time, busy time and launches of those that have any."""
    found = {one.name: (one.host_ms_per_step, one.gpu_ms_per_step, one.launches_per_step) for one in rank.regions}
    return {name: figures for name, figures in found.items() if any(figures)}


def closure(trace):
    """Lightning's order of things: the optimizer's step runs forward and backward before it updates the weights."""
    trace.step(0, 0, 100)
    trace.kernel(4, 5, launched=4)  # by a callback, say
    trace.kernel(25, 35, launched=25)
    trace.kernel(45, 65, launched=45, thread=AUTOGRAD)
    trace.kernel(75, 80, launched=75, name=ADD)
    trace.kernel(80, 85, launched=76, name=ADD)


def test_marked_regions_take_what_they_contain_out_of_what_is_around_them(tmp_path):
    trace = Synthetic()
    closure(trace)
    trace.mark("forge.data", 5, 10)
    trace.mark("forge.optimizer", 15, 85)
    trace.mark("forge.forward", 20, 40)
    trace.mark("forge.backward", 40, 70)
    rank = trace.rank(tmp_path)
    assert regions(rank) == {
        "data": (5, 0, 0),
        "forward": (20, 10, 1),
        "backward": (30, 20, 1),
        "optimizer": (20, 10, 2),
        "other": (25, 1, 1),
    }
    assert sum(region.host_ms_per_step for region in rank.regions) == 100
    assert [region.name for region in rank.regions if region.calls_per_step] == [
        "data",
        "forward",
        "backward",
        "optimizer",
    ]


def test_regions_are_inferred_from_operators_where_nothing_marks_them(tmp_path):
    trace = Synthetic()
    closure(trace)
    trace.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 10)
    trace.mark("Optimizer.step#AdamW.step", 15, 85)
    trace.operator("aten::linear", 20, 40, **{"Sequence number": 3})
    trace.operator("autograd::engine::evaluate_function: AddmmBackward0", 40, 70, AUTOGRAD, **{"Sequence number": 3})
    trace.operator("aten::mm", 44, 50, AUTOGRAD)
    trace.operator("aten::_fused_adamw_", 72, 80)
    assert regions(trace.rank(tmp_path)) == {
        "data": (5, 0, 0),
        "forward": (20, 10, 1),
        "backward": (30, 20, 1),
        "optimizer": (20, 10, 2),
        "other": (25, 1, 1),
    }


def test_a_region_is_told_how_long_the_gpu_waited_for_its_launches(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.mark("forge.forward", 0, 50)
    trace.mark("forge.optimizer", 50, 100)
    trace.kernel(10, 20, launched=10)
    trace.kernel(60, 90, launched=60)
    waits = {region.name: region.idle_ms_per_step for region in trace.rank(tmp_path).regions}
    assert (waits["forward"], waits["optimizer"]) == (10, 40)


def test_traces_of_pytorch_before_1_10_have_regions_too(tmp_path):
    """They mark neither autograd's engine nor number what it records."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.operator("aten::conv2d", 10, 20)
    trace.kernel(12, 30, launched=12)
    for start, node in (
        (40, "CudnnConvolutionBackward"),
        (50, "ReluBackward1"),
        (60, "torch::autograd::AccumulateGrad"),
    ):
        trace.operator(node, start, start + 9, AUTOGRAD)
        trace.kernel(start + 1, start + 8, launched=start + 1, thread=AUTOGRAD)
    trace.mark("Optimizer.step#SGD.step", 75, 95)
    trace.operator("aten::add_", 80, 90)
    trace.kernel(82, 92, launched=82)
    regions = {region.name: region.gpu_ms_per_step for region in trace.rank(tmp_path).regions}
    assert regions == {"data": 0, "transfer": 0, "forward": 18, "backward": 21, "optimizer": 10, "other": 0}


def test_the_users_regions_lie_over_the_others(tmp_path):
    trace = Synthetic()
    for number in range(3):  # the first does not count
        trace.step(number, 50 * number, 50 * number + 50)
    trace.kernel(15, 25, launched=15)
    trace.mark("forge.forward", 60, 90)
    trace.mark("encoder", 60, 80)
    trace.mark("attention", 62, 70)
    trace.mark("encoder", 110, 120)
    trace.kernel(65, 75, launched=65)
    trace.kernel(75, 95, launched=85)
    trace.kernel(115, 145, launched=115)
    rank = trace.rank(tmp_path)
    found = {region.name: region for region in rank.regions if region.user}
    assert set(found) == {"encoder", "attention"}
    assert (found["encoder"].calls_per_step, found["encoder"].host_ms_per_step) == (1, 15)
    assert (found["encoder"].gpu_ms_per_step, found["attention"].gpu_ms_per_step) == (20, 5)
    assert next(region for region in rank.regions if region.name == "forward").gpu_ms_per_step == 15


# -- operators


def operators(rank):
    return {one.name: one for one in rank.operators}


def nested():
    """`aten::linear` from 0 to 10 that calls `aten::addmm` from 2 to 8, which launches 20 ms of work."""
    trace = Synthetic()
    trace.step(0, 0, 50)
    trace.operator("aten::linear", 0, 10, dims=[[4, 8], [8, 8]])
    trace.operator("aten::addmm", 2, 8, dims=[[8], [4, 8], [8, 8]])
    trace.kernel(5, 25, launched=5)
    return trace


def test_operators_have_what_they_called_and_what_is_their_own(tmp_path):
    found = operators(nested().rank(tmp_path))
    linear, addmm = found["aten::linear"], found["aten::addmm"]
    assert (
        linear.host_ms_per_step,
        linear.self_host_ms_per_step,
        linear.device_ms_per_step,
        linear.self_device_ms_per_step,
    ) == (10, 4, 20, 0)
    assert (
        addmm.host_ms_per_step,
        addmm.self_host_ms_per_step,
        addmm.device_ms_per_step,
        addmm.self_device_ms_per_step,
    ) == (6, 6, 20, 20)
    assert linear.input_shapes == ("[[4, 8], [8, 8]]",)


def test_an_operator_within_one_of_its_name_is_not_counted_again(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 50)
    trace.operator("aten::to", 0, 10)
    trace.operator("aten::_to_copy", 1, 9)
    trace.operator("aten::to", 2, 8)
    trace.kernel(5, 25, launched=5)
    found = operators(trace.rank(tmp_path))["aten::to"]
    assert (found.calls_per_step, found.host_ms_per_step, found.self_host_ms_per_step) == (2, 10, 8)
    assert (found.device_ms_per_step, found.self_device_ms_per_step) == (20, 20)


def test_the_costliest_shapes_come_first(tmp_path):
    trace = nested()
    trace.operator("aten::addmm", 30, 31, dims=[[8], [64, 8], [8, 8]])
    trace.kernel(30, 60, launched=30)
    found = operators(trace.rank(tmp_path))["aten::addmm"]
    assert found.input_shapes == ("[[8], [64, 8], [8, 8]]", "[[8], [4, 8], [8, 8]]")


def test_operators_have_the_memory_that_they_keep(tmp_path):
    trace = nested()
    trace.allocation(3, 1000, allocated=5000, reserved=8000)
    trace.allocation(4, -300, allocated=4700, reserved=8000)
    trace.allocation(6, 9999, allocated=9999, reserved=9999, device_type=0)  # on the host
    found = operators(trace.rank(tmp_path))
    assert found["aten::linear"].allocated_bytes_per_step == found["aten::addmm"].allocated_bytes_per_step == 700
    assert operators(nested().rank(tmp_path))["aten::addmm"].allocated_bytes_per_step is None


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("device", "aten::linear"),
        ("self_device", "aten::addmm"),
        ("host", "aten::linear"),
        ("self_host", "aten::addmm"),
    ],
)
def test_operators_are_sorted_and_cut_as_asked(tmp_path, sort, first):
    trace = nested()
    trace.kernel(25, 26, launched=9)
    assert [one.name for one in trace.rank(tmp_path, sort=sort, top=1).operators] == [first]


def test_operators_are_means_per_step_over_the_steps_that_count(tmp_path):
    trace = Synthetic()
    for number, calls in enumerate((9, 1, 2)):  # the first does not count
        start = 100 * number
        trace.step(number, start, start + 100)
        for call in range(calls):
            begin = start + 5 + 10 * call
            trace.operator("aten::mm", begin, begin + 4)
            trace.kernel(begin + 1, begin + 7, launched=begin + 1)
            trace.allocation(begin + 2, 1000, allocated=1000, reserved=8000)
    rank = trace.rank(tmp_path)
    [found], [kernel] = rank.operators, rank.top_kernels
    assert (found.calls_per_step, found.host_ms_per_step, found.self_host_ms_per_step) == (1.5, 6, 6)
    assert (found.device_ms_per_step, found.self_device_ms_per_step) == (9, 9)
    assert found.allocated_bytes_per_step == 1500
    assert (kernel.calls_per_step, kernel.ms_per_step, kernel.mean_us) == (1.5, 9, 6000)


@pytest.mark.parametrize(
    ("on_gpu", "names"),
    [(True, ["aten::addmm", "aten::relu", "aten::linear"]), (False, ["aten::relu", "aten::addmm", "aten::linear"])],
)
def test_no_wrapper_comes_before_the_operators_that_do_its_work(tmp_path, on_gpu, names):
    trace = Synthetic()
    trace.step(0, 0, 50)
    trace.operator("aten::linear", 0, 20)
    trace.operator("aten::addmm", 1, 8)
    trace.operator("aten::relu", 9, 19)
    if on_gpu:
        trace.kernel(2, 25, launched=2)
    assert [one.name for one in trace.rank(tmp_path).operators] == names


def test_an_unknown_order_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="sort must be one of self_device, "):
        analyze(nested().write(tmp_path), sort="colour")


def test_operators_outside_of_the_steps_are_left_out(tmp_path):
    trace = nested()
    trace.operator("aten::addmm", 60, 70)
    trace.kernel(65, 80, launched=65)
    found = operators(trace.rank(tmp_path))["aten::addmm"]
    assert (found.calls_per_step, found.device_ms_per_step) == (1, 20)


# -- kernels


def test_top_kernels_have_calls_total_mean_and_share(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 30, launched=0)
    trace.kernel(30, 40, launched=1)
    trace.kernel(40, 45, launched=2, name=ADD)
    trace.kernel(90, 100, launched=90, name="mystery")
    trace.copy(45, 85, launched=3)
    rank = trace.rank(tmp_path, top=2)
    assert [(one.name, one.calls_per_step, one.ms_per_step, one.mean_us, one.pct) for one in rank.top_kernels] == [
        (GEMM, 2, 40, 20_000, 40),
        ("mystery", 1, 10, 10_000, 10),
    ]
    assert (rank.gpu.kernels_per_step, rank.kinds["memcpy"].calls_per_step) == (4, 1)


# -- copies and memory


def test_copies_have_bytes_bandwidth_and_the_memory_they_come_from(tmp_path):
    trace = Synthetic()
    for number in range(3):  # the first does not count
        trace.step(number, 50 * number, 50 * number + 50)
        trace.copy(50 * number + 1, 50 * number + 11, launched=50 * number, size=60_000_000)
    trace.copy(70, 74, launched=62, name=PINNED, size=200_000_000, stream=20)
    trace.kernel(71, 81, launched=63)
    trace.copy(90, 91, launched=90, name="Memcpy DtoH (Device -> Pinned)", size=4)
    rank = trace.rank(tmp_path)
    found = {(copy.direction, copy.memory): copy for copy in rank.copies}
    pageable, pinned = found["HtoD", "pageable"], found["HtoD", "pinned"]
    assert (pageable.calls_per_step, pageable.ms_per_step, pageable.exposed_ms_per_step) == (1, 10, 10)
    assert (pageable.bytes_per_step, pageable.gb_per_s) == (60e6, 6)
    assert (pinned.calls_per_step, pinned.ms_per_step, pinned.exposed_ms_per_step) == (0.5, 2, 0.5)
    assert (pinned.bytes_per_step, pinned.gb_per_s) == (100e6, 50)
    assert rank.host.h2d_bytes_per_step == 160e6
    assert found["DtoH", "pinned"].bytes_per_step == 2


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (PAGEABLE, ("HtoD", "pageable")),
        ("Memcpy DtoH (Device -> Pageable)", ("DtoH", "pageable")),
        ("Memcpy DtoD (Device -> Device)", ("DtoD", "")),
        ("Memcpy PtoP (Device -> Device)", ("PtoP", "")),
        ("CopyHostToDevice", ("HtoD", "")),
        ("Memcpy HtoD (Host -> Device)", ("HtoD", "")),
        ("something new", ("other", "")),
    ],
)
def test_copies_are_told_apart_by_name(tmp_path, name, what):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.copy(1, 2, launched=1, name=name)
    assert [(copy.direction, copy.memory) for copy in trace.rank(tmp_path).copies] == [what]


def test_allocations_on_the_device_count_and_those_on_the_host_do_not(tmp_path):
    trace = nested()
    for at, name in enumerate(
        ("cudaMalloc", "cudaMalloc", "cudaMallocHost", "cudaHostAlloc", "cudaFree", "cudaFreeHost")
    ):
        trace.call(name, 30 + at, 30.5 + at)
    trace.call("cudaMalloc", 60, 61)  # after the step
    host = trace.rank(tmp_path).host
    assert (host.cuda_mallocs_per_step, host.cuda_frees_per_step) == (2, 1)


def test_the_memory_peak_may_be_before_the_first_free(tmp_path):
    trace = nested()
    trace.allocation(3, -4000, allocated=1000, reserved=8000)
    trace.allocation(4, 2000, allocated=3000, reserved=9000)
    memory = trace.rank(tmp_path).memory
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (5000, 9000)
    assert (memory.allocations_per_step, memory.frees_per_step) == (1, 1)


def test_memory_that_was_not_recorded_is_not_known(tmp_path):
    assert nested().rank(tmp_path).memory is None

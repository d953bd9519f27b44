"""FLOPs of recorded operator calls: against PyTorch's own counter, on recorded traces, and on nonsense."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lightning_forge_profiling.flops.operator import COUNTED, OperatorFlops, operator_flops

TRACES = Path(__file__).parent / "data" / "traces"


def counted_calls(events):
    """Each operator in a trace that can be counted and is inside no other such."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] in COUNTED:
            threads[event["tid"]].append(event)
    for calls in threads.values():
        end = float("-inf")
        for call in sorted(calls, key=lambda call: (call["ts"], -call["dur"])):
            if call["ts"] >= end:
                end = call["ts"] + call["dur"]
                yield call


def flops_of(call):
    args = call["args"]
    return operator_flops(call["name"], args["Input Dims"], args["Input type"], args["Concrete Inputs"])


def recorded(work, tmp_path):
    """Run `work` under the profiler and read the trace back."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]


def from_trace(work, tmp_path):
    return sum(flops_of(call).flops for call in counted_calls(recorded(work, tmp_path)))


def from_torch(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def train(module, *shape):
    def work():
        module(torch.randn(*shape, requires_grad=True)).sum().backward()

    return work


def attend(backend, heads=4, key_heads=4, **options):
    def work():
        query = torch.randn(2, heads, 24, 16, requires_grad=True)
        key = torch.randn(2, key_heads, 40, 16, requires_grad=True)
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, key, key, enable_gqa=heads != key_heads, **options).sum().backward()

    return work


FLASH = torch.ops.aten._scaled_dot_product_flash_attention
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention


def fused(operator, **options):
    """A fused attention kernel that no CPU has, on tensors without data."""

    def work():
        query, key, value = (
            torch.empty(2, 8, length, depth, device="meta", dtype=torch.float16, requires_grad=True)
            for length, depth in ((128, 64), (256, 64), (256, 64))
        )
        operator(query, key, value, **options)[0].sum().backward()

    return work


a, b = torch.randn(6, 10), torch.randn(10, 14)
batches = torch.randn(3, 6, 10), torch.randn(3, 10, 14)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: a @ b, id="mm"),
        pytest.param(lambda: torch.mm(a, b, out=torch.empty(6, 14)), id="mm out"),
        pytest.param(lambda: torch.addmm(torch.randn(14), a, b), id="addmm"),
        pytest.param(lambda: torch.bmm(*batches), id="bmm"),
        pytest.param(lambda: torch.baddbmm(torch.randn(3, 6, 14), *batches), id="baddbmm"),
        pytest.param(lambda: torch.einsum("bij,bjk->ik", *batches), id="einsum"),
        pytest.param(train(nn.Linear(8, 12), 4, 6, 8), id="linear"),
        pytest.param(train(nn.Linear(8, 12, bias=False), 4, 6, 8), id="linear without bias"),
        pytest.param(train(nn.Conv1d(4, 6, 3, stride=2, padding=2), 2, 4, 33), id="conv1d"),
        pytest.param(train(nn.Conv1d(4, 6, 4, padding="same", dilation=2), 2, 4, 33), id="conv1d same"),
        pytest.param(train(nn.Conv2d(4, 6, (3, 5), stride=(2, 1), dilation=2), 2, 4, 17, 19), id="conv2d"),
        pytest.param(train(nn.Conv3d(4, 6, 3, padding=1), 2, 4, 5, 7, 9), id="conv3d"),
        pytest.param(train(nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1), 2, 6, 7, 9), id="transposed"),
        pytest.param(attend(SDPBackend.MATH), id="attention as products"),
        pytest.param(attend(SDPBackend.MATH, heads=8, key_heads=2), id="grouped-query attention as products"),
        pytest.param(fused(FLASH), id="flash attention"),
        pytest.param(fused(FLASH, is_causal=True), id="causal flash attention"),
        pytest.param(fused(EFFICIENT, attn_bias=None, compute_log_sumexp=True), id="memory-efficient attention"),
        pytest.param(fused(CUDNN, attn_bias=None, compute_log_sumexp=True), id="cuDNN attention"),
    ],
)
def test_a_trace_gives_what_torch_counts(work, tmp_path):
    expected = from_torch(work)
    assert expected > 0
    assert from_trace(work, tmp_path) == expected


@pytest.mark.parametrize(
    ("work", "multiply_adds"),
    [
        (lambda: torch.randn(6, 14).addmm_(a, b), 6 * 10 * 14),
        (lambda: torch.randn(3, 6, 14).baddbmm_(*batches), 3 * 6 * 10 * 14),
        (lambda: torch.addbmm(torch.randn(6, 14), *batches), 3 * 6 * 10 * 14),
        (lambda: torch._int_mm(torch.ones(32, 16).char(), torch.ones(16, 8).char()), 32 * 16 * 8),
    ],
)
def test_products_that_torch_does_not_count_are_counted(work, multiply_adds, tmp_path):
    assert from_torch(work) == 0
    assert from_trace(work, tmp_path) == 2 * multiply_adds


@pytest.mark.parametrize(
    ("module", "shape", "groups"),
    [(nn.Conv2d(8, 12, 3, groups=4), (2, 8, 9, 11), 4), (nn.ConvTranspose2d(8, 12, 3, groups=4), (2, 8, 9, 11), 4)],
)
def test_a_grouped_convolution_counts_its_three_passes_alike(module, shape, groups, tmp_path):
    forward = from_torch(lambda: module(torch.randn(shape)))
    assert from_trace(train(module, *shape), tmp_path) == 3 * forward
    # torch.utils.flop_counter takes the weight's gradient for that of a convolution without groups
    assert from_torch(train(module, *shape)) == (2 + groups) * forward


def test_gradients_that_are_not_requested_are_not_counted(tmp_path):
    module, image = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 9)
    forward = from_torch(lambda: module(image))
    assert from_trace(lambda: module(image).sum().backward(), tmp_path) == 2 * forward


def test_fused_attention_on_a_cpu_counts_as_on_a_gpu(tmp_path):
    forward = from_torch(lambda: attend_forward(SDPBackend.MATH))
    assert from_trace(lambda: attend_forward(SDPBackend.FLASH_ATTENTION), tmp_path) == forward
    assert from_trace(attend(SDPBackend.FLASH_ATTENTION), tmp_path) == forward + forward * 5 // 2


def attend_forward(backend):
    with torch.no_grad(), sdpa_kernel(backend):
        F.scaled_dot_product_attention(*(torch.randn(2, 4, length, 16) for length in (24, 40, 40)))


def test_a_products_type_under_autocast_is_that_of_the_call_inside(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        events = recorded(lambda: torch.mm(a, b), tmp_path)
    calls = [flops_of(event) for event in events if event.get("name") == "aten::mm"]
    assert calls == [OperatorFlops(2 * 6 * 10 * 14, "fp32"), OperatorFlops(2 * 6 * 10 * 14, "bf16")]


def test_a_recorded_gpt_step_counts_as_its_formula_says():
    """Three steps of 4 blocks, width 1024, 16 heads, 32000 tokens, batch 32 of 512 tokens, bf16, cuDNN attention."""
    with gzip.open(TRACES / "compute_bound" / "rank0.trace.json.gz") as file:
        calls = list(counted_calls(json.load(file)["traceEvents"]))
    tokens, width, blocks, vocabulary, length = 32 * 512, 1024, 4, 32000, 512
    products = 2 * tokens * (blocks * 12 * width**2 + width * vocabulary)
    attention = blocks * 2 * 2 * tokens * length * width
    assert sum(flops_of(call).flops for call in calls) == 3 * (3 * products + attention * 7 // 2)
    assert {flops_of(call).dtype for call in calls} == {"bf16"}


# Recorded on an H200 with PyTorch 2.11. Q is the query's shape, K that of key and value; a string is a value that is
# recorded in `Concrete Inputs`, a list a tensor's shape, None an argument that was not given.
FORWARD = 2 * 2 * (2 * 8 * 128 * 256) * 64
Q, K, LSE = [2, 8, 128, 64], [2, 2, 256, 64], [2, 8, 128]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("_scaled_dot_product_flash_attention", [Q, K, K, "0.", "False", "False", "0.125"], FORWARD),
        (
            "_scaled_dot_product_flash_attention_backward",
            [Q, Q, K, K, Q, LSE, None, None, "128", "256", "0.", "False", [2], None, "0.125"],
            FORWARD * 5 // 2,
        ),
        ("_addmm_activation", [[16], [32, 64], [64, 16], "1", "1", "False"], 65536),
    ],
)
def test_a_call_recorded_on_a_gpu_counts(name, arguments, expected):
    dims = [argument if isinstance(argument, list) else [] for argument in arguments]
    concrete = [argument if isinstance(argument, str) else "" for argument in arguments]
    counted = operator_flops(f"aten::{name}", dims, ["c10::Half"] * len(dims), concrete)
    assert counted == (None if expected is None else OperatorFlops(expected, "fp16"))


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("c10::BFloat16", "bf16"),
        ("c10::Half", "fp16"),
        ("float", "fp32"),
        ("double", "fp64"),
        ("c10::Float8_e4m3fn", "fp8"),
        ("c10::Float8_e5m2", "fp8"),
        ("signed char", "int8"),
        ("torch::headeronly::BFloat16", "bf16"),
        ("c10::complex<float>", None),
        ("c10::Float4_e2m1fn_x2", None),
        ("long int", None),
        ("", None),
    ],
)
def test_the_type_is_that_of_the_operands(spelling, dtype):
    counted = operator_flops("aten::mm", [[4, 8], [8, 2]], [spelling] * 2, ["", ""])
    assert counted == (OperatorFlops(128, dtype) if dtype else None)


CONVOLUTION = [[2, 4, 9, 9], [6, 4, 3, 3], [6], [], [], [], [], [], []]
VALUES = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]


@pytest.mark.parametrize(
    ("name", "dims", "concrete"),
    [
        ("aten::mm", [], []),
        ("aten::mm", [[4, 8]], []),
        ("aten::mm", [[4, 8], [9, 2]], []),
        ("aten::mm", [[4, 8], [8, 2, 1]], []),
        ("aten::mm", [[4, -8], [-8, 2]], []),
        ("aten::mm", [[4, 8.0], [8.0, 2]], []),
        ("aten::bmm", [[3, 4, 8], [2, 8, 2]], []),
        ("aten::linear", [[4, 8], [2, 8]], []),
        ("aten::convolution", CONVOLUTION, []),  # as traces of older PyTorch have it
        ("aten::convolution", CONVOLUTION, [*VALUES[:3], "[1, 1, 1]", *VALUES[4:]]),
        ("aten::convolution", CONVOLUTION, [*VALUES[:3], "[0, 0]", *VALUES[4:]]),
        ("aten::convolution", CONVOLUTION, [*VALUES[:5], "[9, 9]", *VALUES[6:]]),
        ("aten::convolution", [[2, 4, 9], *CONVOLUTION[1:]], VALUES),
        ("aten::_scaled_dot_product_flash_attention", [Q, [2, 3, 256, 64], [2, 3, 256, 64]], []),
        ("aten::_scaled_dot_product_flash_attention", [[], [], []], []),  # nested tensors
    ],
)
def test_what_does_not_fit_is_not_counted(name, dims, concrete):
    assert operator_flops(name, dims, ["float"] * len(dims), concrete) is None


def test_one_number_stands_for_all_dimensions():
    one_each = operator_flops("aten::convolution", CONVOLUTION, ["float"] * 9, VALUES)
    values = [*VALUES[:3], "[1]", "[0]", "[1]", *VALUES[6:]]
    assert operator_flops("aten::convolution", CONVOLUTION, ["float"] * 9, values) == one_each
    assert one_each == OperatorFlops(2 * 2 * 7 * 7 * 6 * 4 * 9, "fp32")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=8
)
shapes = st.lists(st.integers(-1, 9) | st.integers(), max_size=5)
texts = st.sampled_from(["", "1", "True", "False", "[True, True, False]", "[1, 1]", "[0, 0]", "[]"]) | st.text()


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(COUNTED)),
    dims=st.lists(shapes | json_values, max_size=17),
    types=st.lists(st.sampled_from(["float", "c10::Half"]) | json_values, max_size=17),
    concrete=st.lists(texts | json_values, max_size=17),
)
def test_nonsense_is_counted_or_not_but_never_raises(name, dims, types, concrete):
    counted = operator_flops(name, dims, types, concrete)
    assert counted is None or (counted.flops >= 0 and float(counted.flops) < float("inf"))

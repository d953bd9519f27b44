"""FLOPs from recorded shapes, over the time that they took, against what the device can do."""

from pathlib import Path

import pytest

from lightning_forge_profiling.diagnosis.hints import rules_of_thumb
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.wording import efficiency
from tests.synthetic import ADD, Synthetic

TRACES = Path(__file__).parent / "data" / "traces"
BF16, FP32 = "c10::BFloat16", "float"
SQUARE = [[1000, 1000], [1000, 1000]]  # 2 GFLOP as a product


def product(dtype=BF16, *, device="NVIDIA H200", name="aten::mm", dims=SQUARE, kernel=None):
    """A step of 10 ms: a product that takes 2 ms, and 2 ms of something else."""
    trace = Synthetic(device=device)
    trace.step(0, 0, 10)
    trace.kernel(0, 2, launched=0, name=ADD)
    trace.operator(name, 3, 4, dims=dims, types=[dtype] * len(dims))
    kernel = {"name": kernel} if kernel else {}
    trace.kernel(8, 10, launched=3.5, **kernel)
    return trace


def test_rates_are_over_the_products_the_busy_time_and_the_step(tmp_path):
    flops = product().rank(tmp_path).flops
    assert flops.per_step == 2e9
    assert (flops.matmul_tflops, flops.busy_tflops, flops.step_tflops) == (1, 0.5, 0.2)
    assert (flops.counted_pct, flops.uncounted) == (100, ())


def test_rates_are_compared_with_the_dense_peak_of_their_type(tmp_path):
    flops = product().rank(tmp_path).flops
    assert (flops.dtype, flops.peak_tflops) == ("bf16", 989.5)
    assert flops.matmul_pct_of_peak == pytest.approx(100 / 989.5)
    assert flops.busy_pct_of_peak == pytest.approx(50 / 989.5)
    assert product(FP32).rank(tmp_path).flops.peak_tflops == 67


def test_an_unknown_device_has_rates_and_no_ratio(tmp_path):
    flops = product(device="Some Accelerator 9000").rank(tmp_path).flops
    assert flops.matmul_tflops == 1
    assert (flops.peak_tflops, flops.matmul_pct_of_peak, flops.busy_pct_of_peak) == (None, None, None)


def test_without_shapes_nothing_is_guessed(tmp_path):
    rank = product(dims=()).rank(tmp_path)
    assert rank.flops is None
    assert "record_shapes" in rank.flops_note


def test_a_step_without_products_says_so(tmp_path):
    rank = product(name="aten::add", kernel=ADD).rank(tmp_path)
    assert rank.flops is None
    assert "no matrix product" in rank.flops_note


def test_an_operator_that_launches_products_and_cannot_be_counted_is_named(tmp_path):
    trace = product()
    trace.operator("mylib::fused_linear", 5, 6, dims=SQUARE, types=[BF16] * 2)
    trace.kernel(10, 16, launched=5.5)
    flops = trace.rank(tmp_path).flops
    assert (flops.per_step, flops.matmul_tflops, flops.counted_pct) == (2e9, 1, 25)
    assert flops.uncounted == ("mylib::fused_linear",)


def test_nested_calls_of_one_product_count_once(tmp_path):
    """Autocast calls the operator again, in the type it runs in."""
    trace = product(FP32)
    trace.operator("aten::mm", 3.2, 3.8, dims=SQUARE, types=[BF16] * 2)
    flops = trace.rank(tmp_path).flops
    assert (flops.per_step, flops.dtype) == (2e9, "bf16")


def test_a_sharded_product_counts_what_this_rank_computes(tmp_path):
    """DTensor calls the operator with the whole shapes, and within that with this rank's."""
    trace = product(dims=[[1000, 4000], [4000, 1000]])
    trace.operator("aten::mm", 3.2, 3.8, dims=SQUARE, types=[BF16] * 2)
    assert trace.rank(tmp_path).flops.per_step == 2e9


def test_a_product_of_parts_counts_each_of_them(tmp_path):
    trace = product(dims=[[1000, 2000], [2000, 1000]])
    trace.operator("aten::mm", 3.2, 3.4, dims=SQUARE, types=[BF16] * 2)
    trace.operator("aten::mm", 3.6, 3.8, dims=SQUARE, types=[BF16] * 2)
    assert trace.rank(tmp_path).flops.per_step == 4e9


def test_a_product_that_is_carried_out_in_fp8_counts_as_that(tmp_path):
    trace = product(BF16)
    scales = [[1], [1]]
    trace.operator("aten::_scaled_mm", 3.2, 3.8, dims=SQUARE + scales, types=["c10::Float8_e4m3fn"] * 2 + [FP32] * 2)
    flops = trace.rank(tmp_path).flops
    assert (flops.per_step, flops.dtype, flops.peak_tflops) == (2e9, "fp8", 1979)


def test_a_product_with_a_sparse_matrix_is_named_and_not_counted(tmp_path):
    """It has a shape, and as the trace shows it, no strides."""
    trace = product()
    sparse = {"Input Strides": [[], [1000, 1]]}
    trace.operator("aten::mm", 6, 7, dims=SQUARE, types=[FP32] * 2, **sparse)
    trace.kernel(10, 12, launched=6.5)
    flops = trace.rank(tmp_path).flops
    assert (flops.per_step, flops.counted_pct) == (2e9, 50)
    assert flops.uncounted == ("aten::mm",)


def checkpointed():
    """A product, and in the backward pass the same again before a gradient of another form."""
    trace = product()
    trace.operator("autograd::engine::evaluate_function: ReluBackward0", 4, 7)
    trace.operator("aten::mm", 4.5, 5, dims=SQUARE, types=[BF16] * 2, **{"Sequence number": 7})
    trace.operator("autograd::engine::evaluate_function: MmBackward0", 7, 9)
    trace.operator("aten::mm", 7.5, 8, dims=[[1000, 500], [500, 1000]], types=[BF16] * 2)
    trace.kernel(10, 12, launched=4.6)
    trace.kernel(12, 13, launched=7.6)
    return trace


def test_what_is_computed_a_second_time_is_not_the_models_and_a_hint_says_so(tmp_path):
    rank = checkpointed().rank(tmp_path)
    assert (rank.flops.per_step, rank.flops.model_per_step) == (5e9, 3e9)
    [hint] = [hint for hint in rules_of_thumb([rank]) if hint.code == "recomputation"]
    assert "40 % of the operations" in hint.text
    assert "(40 % of the operations recompute activations" in efficiency(rank)


def test_shapes_of_the_call_itself_serve_where_those_inside_are_missing(tmp_path):
    trace = product()
    trace.operator("aten::mm", 3.2, 3.8)
    assert trace.rank(tmp_path).flops.per_step == 2e9


def test_the_type_is_that_of_most_flops(tmp_path):
    trace = product(FP32)
    trace.operator("aten::mm", 4, 5, dims=SQUARE, types=[FP32] * 2)
    trace.kernel(10, 12, launched=4.5)
    trace.operator("aten::mm", 5, 6, dims=[[1500, 1000], [1000, 1000]], types=[BF16] * 2)
    trace.kernel(12, 14, launched=5.5)
    flops = trace.rank(tmp_path).flops
    assert (flops.per_step, flops.dtype) == (2e9 + 2e9 + 3e9, "fp32")


def test_tf32_is_told_by_the_kernels_name_or_by_a_rate_that_fp32_cannot_have(tmp_path):
    by_name = product(FP32, kernel="sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage3_execute_kernel")
    of_cutlass = product(FP32, kernel="cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1")
    by_rate = product(FP32, dims=[[6000, 6000], [6000, 6000]])
    for trace in (by_name, of_cutlass, by_rate):
        assert trace.rank(tmp_path).flops.dtype == "tf32"


def test_where_few_products_can_be_counted_there_is_no_rate_over_the_busy_time(tmp_path):
    trace = product()
    trace.operator("CompiledFunction", 4, 5)
    trace.kernel(10, 30, launched=4.5)
    text = efficiency(trace.rank(tmp_path))
    assert "% of matrix products whose FLOPs are known (not of CompiledFunction)" in text
    assert "while busy" not in text


def test_products_outside_of_the_steps_do_not_count(tmp_path):
    trace = product()
    trace.operator("aten::mm", 11, 12, dims=SQUARE, types=[BF16] * 2)
    trace.kernel(12, 14, launched=11.5)
    assert trace.rank(tmp_path).flops.per_step == 2e9


def gpt_flops(*, layers, width, batch, length, vocabulary):
    """Forward, and backward with twice as many products; fused attention has two products forward and five back."""
    tokens = batch * length
    linear = 6 * tokens * (layers * 12 * width**2 + vocabulary * width)
    attention = (2 + 5) * 2 * batch * length**2 * width * layers
    return linear + attention


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("compute_bound", {"layers": 4, "width": 1024, "batch": 32, "length": 512, "vocabulary": 32_000}),
        ("validation_inside", {"layers": 2, "width": 768, "batch": 16, "length": 1024, "vocabulary": 8192}),
        ("attention_long", {"layers": 2, "width": 1024, "batch": 1, "length": 16_384, "vocabulary": 8192}),
        ("input_hidden", {"layers": 6, "width": 1024, "batch": 32, "length": 1024, "vocabulary": 8192}),
    ],
)
def test_a_real_gpt_computes_what_its_formula_says(case, shape):
    flops = analyze(TRACES / case).analysis.ranks[0].flops
    assert flops.per_step == gpt_flops(**shape)
    assert flops.counted_pct == 100
    assert 40 < flops.matmul_pct_of_peak < 100


def test_a_real_mlp_computes_what_its_formula_says():
    """The gradient of the first layer's input is not asked for."""
    flops = analyze(TRACES / "slow_optimizer").analysis.ranks[0].flops
    assert flops.per_step == (3 * 24 - 1) * 2 * 8192 * 1024**2

"""What kernels are told apart by, from V100 to MI300: their names, and where those say nothing what launched them."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_forge_profiling.analysis.kernels import CATEGORY_OF, KINDS, base_name, classify
from lightning_forge_profiling.schema import CATEGORIES

LAMBDA = "(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(float)#1}"
LOOP = "void at::native::vectorized_elementwise_kernel<4, {}, std::array<char*, 2ul> >(int, {})"
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<2>, at::native::(anonymous namespace)::{}>(TensorListMetadata<2>)"
)
MULTIPLY = FOREACH.format("BinaryOpScalarFunctor<float, 1, 1, 0>, std::multiplies<float>, float")

NAMES = {
    "matmul": [
        "volta_sgemm_128x64_nn",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_stages_32x1_tn",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_relu_f2f_stages_64x3_nt",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int> > >(Params)",
        "void cutlass::Kernel2<cutl",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEE",
        "void gemmSN_TN_kernel<float, 128, 16, false, cublasGemvTensorStridedBatched<float const> >(int)",
        "void gemv2T_kernel_val<int, int, __half, __half, float, 128>(cublasGemvParamsEx<int>)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, false>(int)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)",
        "void cublasLt::epilogue::impl::globalKernel<8, 32, float, __half, true, 0>(int, int, long)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const> > >(cublasDotParams<float>)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB0_AFC1_AFEM1",
        "void rocblas_gemvt_sn_kernel<256, 4, float>(int, int)",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<RowMajor>, true>(Argument)",
        "_ZN7ck_tile6kentryILi1ENS_10GemmKernelINS_24GemmTilePartitionerEEEEEvT_",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u, 128u>(float*, int*)",
        "void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, true>(int4 const*)",
        "fused_moe_kernel",
        "triton_mm",
        "triton_tem_fused_addmm_relu_2",
    ],
    "convolution": [
        "cudnn_infer_volta_scudnn_128x64_relu_small_nn_v1",
        "volta_fp16_s884cudnn_fp16_256x64_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
        "ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x32_kernel_cudnn",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad_optimized_f16_128x64_nhwc_align8>(Params)",
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionI",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(WinogradDataParams<float, float>)",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)2>(int)",
        "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, int, cudnn::reduced_divisor, bool)",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false>(int, kernel_conv_params)",
        "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int, kernel_grad_params)",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(int)",
        "void at::native::im2col_kernel<float>(long, float const*)",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x256x32_wt32x32x8_gkgs",
        "naive_conv_ab_nonpacked_fwd_nchw_half_double_half",
        "void cudnn::cnn::pointwise_mult_and_sum_complex<float2, 8, 4>(float2*, float2*, float2*, int, int)",
        "SubTensorOpWithScalar1d",
        "void ck::tensor_operation::device::(anonymous namespace)::kernel_grouped_conv_fwd<ck::GridwiseGemm<x> >(x)",
        "triton_tem_fused_convolution_3",
    ],
    "attention": [
        "void sage_fwd<128, 64, true, __nv_bfloat16>(Params)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128> >(Flash_fwd_params)",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128> >(Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop<2> > > >(x)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 256>(__nv_bfloat16*)",
        "void vllm::paged_attention_v2_reduce_kernel<__half, 128, 128, 512>(__half*)",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<1> >(Params)",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_25BlockFmhaPipelineQRKSVSEEEEEvT_",
        "_ZN5aiter32fmha_fwd_hd192_hd128_bf16_causalE.kd",
        "_attn_fwd",
        "bwd_kernel_dk_dv",
        "triton_tem_fused__to_copy_flex_attention_0",
    ],
    "normalization": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct)",
        "MIOpenBatchNormFwdTrainSpatial",
        "void transformer_engine::normalization::ln_fwd_tuned_kernel<Kernel_traits<float> >(ForwardKernelParams)",
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8ELb0EEEvPT0_PT_i",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
    ],
    "softmax": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*, float const*, int)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, true, false>(float*)",
        "triton_per_fused__softmax_add_div_2",
    ],
    "loss": [
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        LOOP.format(*["at::native::mse_kernel_cuda" + LAMBDA] * 2),
        "liger_cross_entropy_kernel",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float> > >(x)",
        "void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>, float*, bool>(long)",
        "void cub::DeviceReduceSingleTileKernel<cub::DeviceReducePolicy<float> >(float*)",
        "triton_per_fused_sum_1",
    ],
    "elementwise": [
        LOOP.format(*["at::native::CUDAFunctor_add<float>"] * 2),
        LOOP.format(*["at::native::GeluCUDAKernelImpl" + LAMBDA] * 2),
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::sin_kernel_cu",
        MULTIPLY,
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
        "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16EEvPT_i",
        "triton_poi_fused_add_native_layer_norm_mul_2",
    ],
    "optimizer": [
        FOREACH.format("FusedAdamMathFunctor<float, 4, true>, float const*"),
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, adamMode_t>(long)",
        "void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>(float*)",
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, long>(long const*)",
        "void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int const*)",
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>(x)",
    ],
    "indexing": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2>(x)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 4, at::native::OpaqueType<4> >(x)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<DeviceRadixSortPolicy<long> >(int*)",
        "void rocprim::ROCPRIM_400200_NS::detail::trampoline_kernel<wrapped_scan_config<long> >(x)",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>(x)",
        "void (anonymous namespace)::resolve_future_token_ids_kernel<long>(long*, long const*, unsigned long)",
        "void (anonymous namespace)::clamp_position_kernel<long>(long*, long const*, unsigned long)",
        "compute_position_kernel",
        "_compute_writeback_idx",
        "void at::to_dense_representation_kernel<float>(long, long, long const*, float const*, long const*, float*)",
        "compute_seg_indptr_triton_kernel",
        "void at::native::compute_cuda_kernel<long>(long const*, long const*, long*, long, long)",
    ],
    "resampling": [
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*)",
        "void at::native::(anonymous namespace)::upsample_bilinear2d_nhwc_out_frame<float, float>(x)",
    ],
    "random": [
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, 1, 4, bool>(x)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long)",
    ],
    "routing": [
        "void tensorrt_llm::kernels::cutlass_kernels::finalizeKernelVecLoad<__nv_bfloat16, __nv_bfloat16>(int)",
        "void moe::dev::routing::routingDeepSeek::routingIndicesOffsetsKernel<KernelParams<float, 8> >(KernelParams)",
        "_combined_routing_compute",
        "_finalize_matmul_scatter_bf16",
        "_sum_bitmatrix_rows",
        "_expt_data_memset",
        "void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
        "compute_src2dst_triton_kernel",
        "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int)",
    ],
    "copy": [
        "batched_transpose_32x32_dword.kd",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<float, int, 1>(x)",
        LOOP.format(*["at::native::direct_copy_kernel_cuda" + LAMBDA] * 2),
        "at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(__nv_bfloat16 const*)",
        "__amd_rocclr_copyBuffer.kd",
        "triton_poi_fused__to_copy_transpose_0",
    ],
    "fill": [
        LOOP.format(*["at::native::FillFunctor<float>"] * 2),
        "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(int)>(x)",
    ],
    "comm": [
        "void dpsk::ep::internode::dispatch<false, 4, false, 24, 8>(int4*, float*, long*)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)",
    ],
    "memcpy": ["Memcpy HtoD (Pinned -> Device)"],
    "memset": ["Memset (Device)"],
    "other": [
        "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16> >(SSMParamsBase)",
        "void preprocessCUDA<3>(int)",
        "",
    ],
}

# What a search for substrings, or in arguments and parameters, takes them for
TRAPS = {
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long)": "normalization",  # mm
    "my_kernel(ncclDevComm*)": "other",  # comm, mm
    "void multi_tensor_apply_kernel<TensorListMetadata<2>, ScaleFunctor<float>, adamMode_t>(x)": "elementwise",  # adam
    LOOP.format(*["at::native::CUDAFunctor_add<float>" + "::{lambda" * 60] * 2): "elementwise",  # a cut to `lamb`
    "ampere_sgemm_128x64_relu_softmax_nn": "softmax",
    "void convert_fp32_to_bf16(float*)": "other",  # conv
    "void all_gather_matmul_kernel<float>(x)": "comm",  # matmul, gather
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x128": "matmul",
    "void grouped_gemm_experts<float>(int const* offsets)": "matmul",  # expert, offsets
    "void scaled_add(float*, long const* indices)": "elementwise",  # indices
    "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(x)": "normalization",  # flash
    "create_flashmla_kv_indices_triton": "indexing",  # mla
    "triton_poi_fused_native_dropout_all_reduce_3": "elementwise",  # all_reduce, dropout
    "void at::native::vectorized_templated_elementwise_kernel<4, at::native::FillFunctor<int> >(x)": "fill",
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_is_known_by_its_name(kind: str, name: str) -> None:
    assert classify(name) == kind


@pytest.mark.parametrize(("name", "kind"), TRAPS.items())
def test_a_word_inside_another_or_in_the_parameters_does_not_count(name: str, kind: str) -> None:
    assert classify(name) == kind


def test_every_kind_has_a_category_and_an_example() -> None:
    assert set(CATEGORY_OF.values()) == set(CATEGORIES)
    assert tuple(CATEGORY_OF) == KINDS
    assert set(NAMES) == set(KINDS)


@pytest.mark.parametrize("activity", ["gpu_memcpy", "Memcpy"])
def test_a_copy_activity_is_memory_whatever_it_is_called(activity: str) -> None:
    assert classify("CopyHostToDevice", activity=activity) == "memcpy"


@pytest.mark.parametrize("activity", ["gpu_memset", "Memset"])
def test_a_set_activity_is_memory_whatever_it_is_called(activity: str) -> None:
    assert classify("FillBuffer", activity=activity) == "memset"


@pytest.mark.parametrize("activity", ["kernel", "Kernel", "concurrent_kernel"])
def test_the_spellings_of_a_kernel_make_no_difference(activity: str) -> None:
    assert classify("volta_sgemm_128x64_nn", activity=activity) == "matmul"


def test_a_kernel_that_names_its_collective_is_communication() -> None:
    assert classify("kernel_0", collective="allreduce") == "comm"


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::linear", "matmul"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_scaled_dot_product_efficient_attention", "attention"),
        ("aten::native_layer_norm", "normalization"),
        ("aten::copy_", "copy"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("c10d::allreduce_", "comm"),
        ("aten::_local_scalar_dense", "other"),
        ("", "other"),
    ],
)
def test_where_the_name_says_nothing_the_operator_decides(operator: str, kind: str) -> None:
    assert classify("kernel_0", operator=operator) == kind


def test_the_name_comes_before_the_operator() -> None:
    assert classify("volta_sgemm_128x64_nn", operator="aten::convolution_backward") == "matmul"


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("Optimizer.step#SGD.step", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_mul_", "elementwise"),
    ],
)
def test_a_foreach_kernel_is_the_optimizers_only_under_an_optimizer(operator: str, kind: str) -> None:
    assert classify(MULTIPLY, operator=operator) == kind


def test_an_unnamed_template_of_torch_compile_is_what_its_operator_is() -> None:
    assert classify("triton_tem_fused_0", operator="flex_attention") == "attention"
    assert classify("triton_tem_fused_0") == "matmul"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("void foo<int>(int)", "foo"),
        ("unsigned int foo(int)", "foo"),
        ("void at::native::(anonymous namespace)::foo<float>(float)", "at::native::foo"),
        ("void at::native::<unnamed>::foo<(int)4>(T1 *)", "at::native::foo"),
        ("void foo<(a)2, &(float silu(float const&)), ((4)>(0))>(int)", "foo"),
        ("void foo<at::bar(at::T&)::{lambda()#1}::operator()() const::{lambda(int)#1}>(int)", "foo"),
        ("at::bar::operator()(int)", "at::bar::operator()"),
        ("std::enable_if<!(v<gfx950_t>), void>::type ck_tile::kentry<1, K<P> >(K<P>::Args)", "ck_tile::kentry"),
        ("void at::native::reduce_kernel<512, 1, at::native::Reduce", "at::native::reduce_kernel"),
        ("foo)>}<bar", "foo)>}"),
        ("_Z3fooi", "foo"),
        ("_ZN2at6native12_GLOBAL__N_13fooIfEEvi", "at::native::foo"),
        ("_ZN2at6nat", "at::nat"),
        ("_Zebra", "_Zebra"),
        ("foo.kd", "foo"),
        ("void foo<int>(int) [clone .kd]", "foo"),
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH"),
        ("", ""),
    ],
)
def test_the_base_name_is_without_return_type_arguments_and_parameters(name: str, base: str) -> None:
    assert base_name(name) == base


PIECES = st.sampled_from(
    ["<", ">", "(", ")", "{", "}", "::", " ", "->", "operator", "(anonymous", "_ZN", "12", "I", "S_"]
)
TEXTS = st.text() | st.lists(PIECES | st.text(max_size=5)).map("".join)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=TEXTS, activity=TEXTS, collective=TEXTS, operator=TEXTS)
def test_any_text_has_a_kind(name: str, activity: str, collective: str, operator: str) -> None:
    assert classify(name, activity=activity, collective=collective, operator=operator) in KINDS


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=TEXTS.map("_Z{}".format) | TEXTS)
def test_any_text_has_a_base_name_that_is_no_longer(name: str) -> None:
    assert len(base_name(name)) <= len(name)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        ("", "<("),  # brackets that stay open
        ("void foo<", "a<b>::"),  # and that close
        ("void foo<", "operator()"),
        ("", "(anonymous namespace)::"),
        ("_ZN", "1a"),  # mangled names
        ("_Z", "L1"),
        ("", "aB"),  # words
        ("triton_poi_fused_", "a_"),
    ],
)
def test_four_times_the_name_takes_four_times_as_long(start: str, piece: str) -> None:
    def spent(length: int) -> float:
        name = start + piece * (length // len(piece))
        began = time.process_time()
        classify(name, operator=name)
        return time.process_time() - began

    # sixteen is what squares take; no machine stretches the same one three times
    assert any(spent(1_000_000) < 8 * max(spent(250_000), 0.02) for _ in range(3))

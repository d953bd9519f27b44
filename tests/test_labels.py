"""Names in a table: cut where they are too long, and never so that two kernels read alike."""

from itertools import combinations

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.report.labels import kernel_labels, operator_labels
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.page import report_page
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import print_analysis
from tests.samples import sample_analysis

# as CUPTI demangles a kernel of CUTLASS 3.x
CUTLASS = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<(int){stages}, "
    "cute::tuple<cute::C<(int)2>, cute::C<(int)1>, cute::C<(int)1> >, cutlass::gemm::KernelTmaWarpSpecializedPingpong>,"
    " cute::tuple<cute::C<(int){m}>, cute::C<(int)128>, cute::C<(int)64> >, cutlass::{dtype}, "
    "cute::tuple<{layout}>, cutlass::{dtype}, cute::tuple<long, cute::C<(int)1>, long>, cute::TiledMMA<cute::MMA_Atom<"
    "cute::SM90_64x128x16_F32BF16BF16_SS<(cute::GMMA::Major)0, (cute::GMMA::Major)1, (cute::GMMA::ScaleIn)1> > > >, "
    "cutlass::epilogue::collective::CollectiveEpilogue<cutlass::epilogue::Sm90TmaWarpSpecialized<(int)4, (int)2>, "
    "cutlass::epilogue::fusion::{epilogue}> > >(cutlass::gemm::kernel::GemmUniversal<int>::Params)"
)
USUAL = {
    "stages": "4",
    "m": "128",
    "dtype": "bfloat16_t",
    "layout": "long, cute::C<(int)1>, long",
    "epilogue": "LinearCombination<float>",
}
TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT{tile}_MI16x16x1_SN_LDSB1_AFC1_AFEM1_CLR1_GRVWA4_WG{group}_1"
LAMBDA = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::gelu_kernel(at::TensorIteratorBase&)::"
    "{lambda()#1}::operator()() const::{lambda()#%d}::operator()() const::{lambda(float)#1}>(int, float*)"
)
EVALUATE = "autograd::engine::evaluate_function: "


def cutlass(**differing):
    return CUTLASS.format(**{**USUAL, **differing})


@pytest.mark.parametrize("width", [40, 64, 120])
@pytest.mark.parametrize(
    ("differing", "shown"),
    [
        ({"m": "256"}, ("128x128x64", "256x128x64")),
        ({"dtype": "half_t"}, ("bfloat16", "half")),
        ({"layout": "cute::C<(int)1>, long, long"}, ("long, 1", "1, long")),
        ({"epilogue": "LinCombEltAct<ReLu>"}, ("LinearCombination", "LinCombEltAct")),
    ],
)
def test_two_kernels_that_differ_late_show_in_what(width, differing, shown):
    labels = kernel_labels([cutlass(), cutlass(**differing)], width)
    for label, part in zip(labels.values(), shown, strict=True):
        assert label.startswith("device_kernel")
        assert part in label
        assert len(label) <= width


@pytest.mark.parametrize("width", [20, 30, 40, 64, 120, 300])
def test_no_two_kernels_of_a_table_read_alike(width):
    names = [
        *(cutlass(m=m, dtype=dtype) for m in ("64", "128", "256") for dtype in ("half_t", "bfloat16_t", "tfloat32_t")),
        *(TENSILE.format(tile=tile, group=group) for tile in ("256x32x64", "16x32x512") for group in ("16_16", "32_8")),
        *(LAMBDA % number for number in (1, 2, 12)),
        "void a::first<int>(int)",
        "void b::first<int>(int)",
        "void a::first<int>(float)",
    ]
    labels = kernel_labels(names, width)
    assert [*labels] == names
    assert max(map(len, labels.values())) <= width
    for (one, its), (other, theirs) in combinations(labels.items(), 2):
        assert its != theirs, (one, other)
    assert width < 64 or not any(" #" in label for label in labels.values()), "there is room for what they differ in"


NATIVE = "void at::native::"
DTYPES = "c10::BFloat16, c10::BFloat16, c10::BFloat16"
MUL = f"at::native::BinaryFunctor<{DTYPES}, at::native::binary_internal::MulFunctor<float> >"
COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}::operator()() const::"
    "{{lambda()#7}}::operator()() const::{{lambda({})#1}}"
)
SUM = (
    "at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)"
    "::{lambda(float, float)#1}>"
)
METADATA = "at::native::(anonymous namespace)::TensorListMetadata<2>"


LOOPS = {
    "elementwise_kernel: MulFunctor<BFloat16>": (
        f"{NATIVE}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<{MUL} >(at::TensorIteratorBase&, "
        f"{MUL} const&)::{{lambda(int)#1}}>(int, at::native::gpu_kernel_impl_nocast<{MUL} >)"
    ),
    "elementwise_kernel: direct_copy_kernel_cuda<BFloat16>": (
        f"{NATIVE}unrolled_elementwise_kernel<{COPY.format('c10::BFloat16')}, std::array<char*, 2ul>, 4, "
        "TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1> >(int)"
    ),
    "reduce_kernel: sum_functor<float>": (
        f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, {SUM}, unsigned int, float, 4> >(int)"
    ),
    "multi_tensor_apply_kernel: Sqrt<float>, UnaryOpFunctor<float>": (
        f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<{METADATA}, at::native::(anonymous namespace)::"
        f"UnaryOpFunctor<float, 2, 1, 1>, at::native::Sqrt<float> >({METADATA})"
    ),
    "_scatter_gather_elementwise_kernel: _cuda_scatter_gather_internal_kernel<TensorAssign>": (
        f"{NATIVE}_scatter_gather_elementwise_kernel<128, 4, at::native::_cuda_scatter_gather_internal_kernel<false, "
        "at::native::OpaqueType<4> >::operator()<at::native::TensorAssign>(at::TensorIterator&)::{lambda(int)#1}>(int)"
    ),
    "elementwise_kernel: AbsFun": f"{NATIVE}elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::AbsFun",
    "vectorized_elementwise_kernel<4, float>": f"{NATIVE}vectorized_elementwise_kernel<4, float>(int)",  # no function
}


@pytest.mark.parametrize("label", LOOPS)
def test_a_loop_is_called_after_what_it_computes(label):
    assert [*kernel_labels([LOOPS[label]], 100).values()] == [label]


@pytest.mark.parametrize("width", [56, 64, 120])
def test_loops_that_compute_the_same_show_that_first_and_then_what_they_differ_in(width):
    alike = [
        f"{NATIVE}vectorized_elementwise_kernel<4, {MUL}, std::array<char*, 3ul> >(int, {MUL})",
        f"{NATIVE}vectorized_elementwise_kernel<8, {MUL}, std::array<char*, 3ul> >(int, {MUL})",
    ]
    copies = [f"{NATIVE}unrolled_elementwise_kernel<{COPY.format(dtype)}>(int)" for dtype in ("float", "long")]
    labels = kernel_labels(alike + copies, width)
    assert len(set(labels.values())) == 4
    assert [labels[name] for name in alike] == [f"elementwise_kernel: MulFunctor<BFloat16> …{n}…" for n in "48"]
    assert [labels[name] for name in copies] == [
        f"elementwise_kernel: direct_copy_kernel_cuda<{dtype}>" for dtype in ("float", "long")
    ]


def test_a_tile_is_shown_as_people_write_it():
    [label] = kernel_labels([cutlass()], 400).values()
    assert "<4, 2x1x1, KernelTmaWarpSpecializedPingpong>, 128x128x64, bfloat16_t" in label


def test_a_name_that_nothing_resembles_is_cut_at_its_end():
    labels = kernel_labels([cutlass(), "memset"], 40)
    assert [*labels.values()] == ["device_kernel<GemmUniversal<tuple<int,…", "memset"]


def test_the_same_kernel_twice_has_the_same_name():
    assert kernel_labels(["void f<1>(int)", "void f<1>(int)"], 20) == {"void f<1>(int)": "f<1>"}


def test_names_that_differ_in_nothing_that_is_shown_are_numbered():
    assert [*kernel_labels(["gemm\x00", "gemm\x01", "gemm"], 20).values()] == ["gemm", "gemm #2", "gemm #3"]
    huge = ["f<" + "int, " * 10**5 + f"{number}>" for number in range(3)]
    assert [label[-3:] for label in kernel_labels(huge, 20).values()][1:] == [" #2", " #3"]


def test_operators_too():
    names = [f"{EVALUATE}{kind}Backward0" for kind in ("Convolution", "NativeLayerNorm", "NativeGroupNorm")]
    labels = operator_labels(names, 40)
    assert len(set(labels.values())) == 3
    assert "Convolution" in labels[names[0]]
    assert operator_labels(["aten::mm"], 40) == {"aten::mm": "aten::mm"}


def test_each_report_tells_them_apart():
    analysis = sample_analysis(1)
    rank = analysis.ranks[0]
    names = [cutlass(m=str(64 * (number + 1))) for number in range(len(rank.top_kernels))]
    kernels = tuple(replace(kernel, name=name) for name, kernel in zip(names, rank.top_kernels, strict=True))
    analysis = replace(analysis, ranks=(replace(rank, top_kernels=kernels),))
    tiles = [f"{64 * (number + 1)}x128x64" for number in range(len(kernels))]

    lines = []
    print_analysis(analysis, Screen(_Lines(lines), width=80, wrap=True), kernels=len(kernels))
    terminal = "".join(lines).partition("Top kernels")[2]
    page = report_page(analysis, []).partition('"details":')[2]
    table = markdown(analysis).partition("## Top kernels")[2]
    for tile in tiles:
        assert "".join(terminal.split()).count(tile) == 1
        assert table.count(tile) == 1
        assert page.count(tile) == 1


class _Lines:
    """A stream that keeps what is written."""

    def __init__(self, lines):
        self.lines = lines

    def write(self, text):
        self.lines.append(text)

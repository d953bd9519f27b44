"""Kind of work of a kernel, copy or fill, classified by its name: matmul, attention, communication, ...

The rules look for whole words (`words` splits at underscores, colons, camel case and digits) in the base name.
Template arguments and parameters mislead: `ncclDevComm` contains `mm`, `adamMode_t` is a parameter of Apex's other
optimizers too, and the epilogue of a matrix product names the activation.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from string import ascii_letters
from types import MappingProxyType
from typing import Final

# Characters of the template arguments to keep: the first one or two show what a generic kernel computes.
_ARGUMENTS_LENGTH: Final = 400
_LONGEST, _DEEPEST = 20_000, 100  # the rest of a longer or more deeply nested name, which no compiler makes, is ignored

_ANONYMOUS: Final = re.compile(r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\}|\(anonymous\))(?:::)?")
_BRACKET: Final = re.compile(r"[<>(){}]")
_OPENING: Final = {">": "<", ")": "(", "}": "{"}
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# Itanium C++ ABI, "External Names (a.k.a. Mangling)": https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling
_IDENTIFIER_LENGTH: Final = re.compile(r"\d{1,4}")
_LITERAL_OR_LENGTH: Final = re.compile(r"L[a-zA-Z]n?\d+E|[ST][0-9A-Z]*_|(\d{1,4})")
_NAMELESS: Final = ("_GLOBAL__N_", "_INTERNAL_")  # how GCC and Clang, and nvcc, spell an anonymous namespace


def base_name(name: str) -> str:
    """A kernel's qualified name without return type, anonymous namespaces, template arguments and parameters."""
    return split_name(name)[0]


def split_name(name: str) -> tuple[str, str]:
    """A kernel's base name and the beginning of its template arguments, "" without."""
    text = cut(name, _LONGEST).partition(" [clone ")[0].removesuffix(".kd")  # what ROCm's compiler and GCC append
    mangled = text.startswith("_Z")
    base, arguments = _split_mangled(text) if mangled else _split_signature(_ANONYMOUS.sub("", text))
    return base or text, arguments


def words(text: str) -> str:
    """The words of an identifier in lower case, joined by underscores, so that rules can match whole words."""
    return f"_{'_'.join(_WORD.findall(text)).lower()}_"


def cut(text: str, length: int) -> str:
    """Truncate a text without leaving part of a word: `lambda` must not become `lamb`."""
    return text if len(text) <= length else text[:length].rstrip(ascii_letters)


def _split_signature(text: str) -> tuple[str, str]:
    outside: list[str] = []  # the text that is in no brackets
    open_brackets: list[str] = []
    outside_from = 0
    inside_from = 0
    arguments = ""
    is_function = text.startswith("void ")
    for match in _BRACKET.finditer(text):
        bracket, at = match[0], match.start()
        if bracket in "<({":
            if not open_brackets:
                outside.append(text[outside_from:at])
                if bracket == "(" and _ends_name(text, at):
                    is_function = is_function or text[at - 1] != " "
                    outside_from = len(text)
                    break
                outside.append("()" * text.startswith("operator()", at - 8))
                is_function = is_function or bracket == "<"
                inside_from = at + 1
            open_brackets.append(bracket)
            if len(open_brackets) > _DEEPEST:
                break
        elif open_brackets and (bracket != ">" or open_brackets[-1] == "<"):  # else a comparison or an arrow
            _close(open_brackets, bracket)
            if not open_brackets:
                outside_from = at + 1
                if bracket == ">":
                    arguments = text[inside_from:at]
    if open_brackets:
        arguments = text[inside_from:].rstrip(ascii_letters)  # cut off, perhaps within a word
    else:
        outside.append(text[outside_from:])
    base = "".join(outside).strip()
    return base.rpartition(" ")[2] if is_function else base, cut(arguments, _ARGUMENTS_LENGTH)


def _close(open_brackets: list[str], bracket: str) -> None:
    while open_brackets and open_brackets.pop() != _OPENING[bracket]:
        pass


def _ends_name(text: str, at: int) -> bool:
    """Whether the parenthesis there begins the parameters, rather than being part of `operator()` or the like."""
    before = text[max(at - 8, 0) : at]
    return before != "operator" and (before[-1:] in ("_", ">", " ") or before[-1:].isalnum())


def _split_mangled(text: str) -> tuple[str, str]:
    at = 3 if text.startswith("_ZN") else 2
    names: list[str] = []
    while length := _IDENTIFIER_LENGTH.match(text, at):
        at = length.end() + int(length[0])
        names.append(text[length.end() : at])
    arguments: list[str] = []
    end = min(at + _ARGUMENTS_LENGTH, len(text))
    while at < end and (match := _LITERAL_OR_LENGTH.search(text, at, end)):
        at = match.end()
        if match[1]:
            at += int(match[1])
            arguments.append(text[match.end() : at])
    return "::".join(name for name in names if not name.startswith(_NAMELESS)), " ".join(arguments)


# The category of each kind. `routing` sends tokens to experts and back; `indexing` is gather, scatter, sort, scan;
# `resampling` is pooling and interpolation; `copy` and `fill` are kernels, `memcpy` and `memset` runtime calls.
CATEGORY_OF: Final[Mapping[str, str]] = MappingProxyType({
    "matmul": "matmul",
    **dict.fromkeys((
        "convolution", "attention", "normalization", "softmax", "loss", "reduction", "elementwise", "optimizer",
        "embedding", "routing", "indexing", "resampling", "random", "copy", "fill",
    ), "other"),
    "comm": "comm", "memcpy": "memory", "memset": "memory", "other": "other",
})  # fmt: skip
KINDS: Final = tuple(CATEGORY_OF)  # in the order to show them
PRODUCT_KINDS: Final = ("matmul", "convolution", "attention")
# that memory bandwidth does not limit, or of which that is unknown
NO_BANDWIDTH: Final = frozenset({*PRODUCT_KINDS, "comm", "memcpy", "memset", "other"})

# Characters of a name that the rules look at. Tensile's names are three times as long, but begin with `Cijk`.
_EXAMINED_LENGTH: Final = 160

_Rules = tuple[tuple[str, re.Pattern[str]], ...]


def _compile(*rows: tuple[str, str]) -> _Rules:
    """Compile rows of a kind and its phrases into rules; the first row that matches wins.

    A phrase is a regular expression over words, with `*` for further letters of a word, `#` for a number and `~` for
    an optional word break: `soft~max*` matches `softmax`, `SoftMaxForward` and `soft_max`.
    """

    def pattern(phrases: str) -> re.Pattern[str]:
        meanings = {"*": "[a-z]*", "#": r"\d+", "~": "_?"}
        expression = "".join(meanings.get(character, character) for character in phrases)
        return re.compile(rf"_(?:{'|'.join(expression.split())})(?=_)")

    runs = groupby(rows, key=lambda row: row[0])  # neighbours of one kind become one rule
    return tuple((kind, pattern(" ".join(phrases for _, phrases in run))) for kind, run in runs)


_NAMES: Final = _compile(
    # NCCL and RCCL; what replaces them inside a node (PyTorch's symmetric memory, vLLM, TensorRT-LLM, AITER,
    # Transformer Engine); the exchange between experts (DeepEP, MORI)
    ("comm", "nccl* rccl* msccl* nvshmem* rocshmem* gloo* all~reduce* all~gather* reduce~scatter* send~recv"),
    ("comm", "all~to~all* all_#_all cross_device_reduce* quick~reduce* multimem* lamport* symmetric_memory symm~mem*"),
    ("comm", "k?userbuffers* deep_ep ep_(dispatch|combine|internode|intranode)* moe_comm barrier_kernel"),
    # Mixture of experts: routing tokens and combining their results (TensorRT-LLM, vLLM, Triton)
    ("routing", "*routing* finalize_kernel_vec_load finalize_moe* moe_(align|sort*|permute*|unpermute*|finalize*)"),
    ("routing", "finalize_(matmul|scatter) *bitmatrix* expt_data*"),
    # Writing keys and values to the cache computes no attention
    ("copy", "(reshape|concat)_and_cache* (store|set|write|append|update|copy|transfer)_(mla_|paged_)?kv*"),
    ("copy", "concat_(and_cast_)?m[lh]a*"),
    ("indexing", "kv_indices"),
    # FlashAttention 2 to 4, xFormers, cuDNN, Composable Kernel, FlashInfer, vLLM; Triton's, whose names may contain
    # only the direction or the gradients; linear and deformable attention
    ("attention", "flash flash~att* flash~mla* *attn* *attention* *mha fmha* mla xqa sdpa scaled_dot_product* splitkv"),
    ("attention", "(batch|single)_(prefill|decode)* merge_states* reduce_segments"),
    ("attention", "(?<=^_)fwd_(grouped_)?kernel bwd_kernel_(dk_dv|dq|fuse)* bwd_preprocess* dot_do_o convert_dq"),
    ("attention", "pa_(fwd|decode|prefill|bf|fp|mqa|ps) gemm_softmax_gemm qk_int"),
    ("attention", "delta_rule* chunk_fwd_kernel ms_deform* sage_(fwd|bwd|att)* kv_splits varlen*"),
    # `norm` alone may be a vector's: see reductions
    ("normalization", "*layernorm* *batchnorm* *groupnorm* *rmsnorm* rms normalization gamma_beta mio_bn*"),
    ("normalization", "(layer|batch|group|instance|rms|weight|qk|add)~norm* welford cu_compute_grad_input"),
    ("normalization", "norm_(fwd|bwd|forward|backward|quant*|rope*) (ln|bn|gn)_(fw|bw|parallel)* rowwise_moments"),
    ("normalization", "compute_(#_d_backward_|gradient_)?fused_params compute_internal_gradients"),
    ("loss", "*loss(?!_scal) nll* cross~entropy* *entropy ctc* *criterion kl_div*"),
    ("softmax", "soft~max* *softmax*"),
    ("resampling", "(max|avg|average)~pool* *maxpool* *pooling* adaptive_average* upsample* interpolat*"),
    ("resampling", "grid_sampl* roi_* resize*"),
    ("random", "distribution* dropout* bernoulli* rand* random* philox* multinomial* curand* sampling*"),
    # cuDNN has recurrent networks too
    ("elementwise", "(lstm|gru)_(cell*|elem*) elem_wise_rnn*"),
    ("other", "*rnn* lstm* gru*"),
    # cuDNN, whose layout changes and offset tables belong to the convolution; MIOpen and its assembly; PyTorch
    ("convolution", "*cudnn cudnn* *conv convol* fprop bprop [dw]grad winograd* implicit_gemm n[cdhw]*_(to|#)_*"),
    ("convolution", "fft_#_d_[cr]_#_[cr] dse flip_filter kern_precompute_indices"),
    ("convolution", "miopen* mi_open* igemm_(fwd|bwd|wrw|v)* wrw sub_tensor_op* op_(#_d_)?tensor*"),
    ("convolution", "pointwise_mult_and_sum* (im|vol)_#_(d_#_)?col* col_#_(im|vol)*"),
    # cuBLAS, hipBLASLt (Tensile's `Cijk_` spells the order of the indices), rocBLAS, MAGMA; Triton's templates;
    # quantized and mixture-of-experts kernels. FBGEMM's embedding kernels carry its name too.
    ("matmul", "(?!fbgemm)*gemm* *gemv* cijk nvjet* xmma* cublas* rocblas* hipblas* splitk split_kq?"),
    ("matmul", "(add|b|baddb|flat|ll|sp|csr)?mm bmm* *matmul* mat_mul* mul_mat* contraction* einsum*"),
    ("matmul", "split~kreduce magma* aten_(linear|mv|dot) marlin* machete* fmoe* fused_moe_kernel* moe_(stage|q)"),
    # What of the experts is no product
    ("routing", "*expert* moe_sum* expand_input_rows* src_#_dst dispatch_layout"),
    # Rotary position embeddings look nothing up
    ("elementwise", "rotary* *rope kn_entry"),
    # FBGEMM and TorchRec, whose backward applies the optimizer in the same kernel; PyTorch
    ("embedding", "fbgemm* embedding* embed emb embs tbe jagged* lxu* linearize* bounds_check_indices recat*"),
    ("embedding", "permute_pooled* compute_grad_weight* sum_and_scatter krn_partial* compute_num_of_partial*"),
    ("optimizer", "*adam adamw adamax lamb lion sgd adagrad* adadelta* rmsprop* adafactor* muon* newton_schulz*"),
    ("optimizer", "k?optimizer* precondition*"),
    # Mamba's scan is a recurrence over the sequence, not a prefix sum
    ("other", "selective_scan* chunk_(scan|state)* state_passing* ss[dm]"),
    ("indexing", "index* *gather* *scatter* *sort* radix* *scan* *cumsum* cumprod* *topk* top_k* kth* unique*"),
    ("indexing", "non~zero* select *searchsorted* bucketize* *histogram* histc* partition* take* put"),
    ("indexing", "compact* run_length* by_key position_kernel"),
    ("reduction", "reduc* *sum arg~max* arg~min* amax* amin* mean* var std_var* welford* norm l_#_norm lp~norm*"),
    ("copy", "copy(?!sign)* *copy cat concat* transpos* permut* contiguous* pack* unpack* stack* flip* roll pad*"),
    ("copy", "clone* repeat* cast* chunk_cat* split_with_sizes* memcpy* shuffle*"),
    ("fill", "fill* zero* memset* arange* linspace* eye ones full"),
    ("elementwise", "elementwise* *elemwise* pointwise* vectorized_#_kernel multi_tensor_apply* foreach* transform"),
    ("elementwise", "*unary* *binary* activation* act_and_mul *relu* *gelu* *silu* *swish* *glu* sigmoid* tanh*"),
    ("elementwise", "add* mul* sub div* scale* bias* axpy* axpby* clamp* lerp* exp log sqrt pow abs neg where mask*"),
    ("elementwise", "softplus* triu* tril* *quant* amp unscale*"),
    # What computes where others read or write, if the name says nothing more (SGLang, vLLM, Triton's products, PyTorch)
    ("indexing", "indices indx idx indptr* position* token_ids? offsets? strides? cu_seqlens* segments? req_to_token*"),
    ("indexing", "to_dense* to_sparse* compute_cuda"),
)

# Functors of PyTorch's element-by-element loops
_FUNCTORS: Final = _compile(
    ("optimizer", "*adam*(?!_mode) lamb sgd adagrad rmsprop lion"),
    ("reduction", "l_#_norm* lp_norm* max_norm*"),
    ("normalization", "(batch|layer|group)_norm*"),
    ("loss", "mse* smooth_l huber* cross_entropy* kl_div* *loss"),
    ("softmax", "soft~max*"),
    ("random", "bernoulli* uniform* dropout* random*"),
    ("copy", "copy(?!sign)*"),
    ("fill", "fill_functor zero_functor arange* linspace* logspace* range"),
)
_LOOP: Final = re.compile(
    r"_native_(?!index_|scatter_gather_)(?:[a-z]+_)*?elementwise_kernel_"
    r"|_elementwise_kernel_with_index_|_(?:multi_tensor|pointwise)_apply_"
)

# Kernels of torch.compile: its letter code for the loop, then the operators fused into it
_INDUCTOR: Final = re.compile(r"_triton_(poi|red|per|tem|spl|for|split_scan)_fused_")
_TEMPLATES: Final = tuple(rule for rule in _NAMES if rule[0] in ("attention", "convolution", "matmul"))
_FUSED_REDUCTIONS: Final = _compile(
    ("loss", "nll_loss* cross_entropy* *loss"),
    ("softmax", "*softmax"),
    ("normalization", "*_norm* rsqrt"),
)
_MOVES: Final = re.compile(
    r"to|copy|clone|cat|stack|t|transpose|permute|view|unsafe|slice|split|with|sizes|expand|constant|pad|nd"
)

# Kernels that run whatever their template arguments name
_WRAPPER: Final = re.compile(
    r"_(?:cutlass_[a-z0-9_]*kernel(?:_2)?|device_kernel|kentry|kernel_agent|(?:static|trampoline|transform)_kernel)_$"
)
_LIBRARIES: Final = ("cublas", "cudnn", "rocblas")  # their helper kernels show them by the types of their parameters


def classify(name: str, *, activity: str = "kernel", collective: str = "", operator: str = "") -> str:
    """The kind of a GPU activity by its name, else by the operator that launched it."""
    for kind in ("memcpy", "memset"):
        if kind in activity.lower() or name.startswith(f"{kind.capitalize()} "):
            return kind
    return "comm" if collective else _kernel(name, operator)


def _kernel(name: str, operator: str) -> str:
    base, arguments = split_name(name)
    text = words(cut(base, _EXAMINED_LENGTH))
    if inductor := _INDUCTOR.match(text):
        return _inductor(inductor[1], text[inductor.end() - 1 :], operator)
    if _LOOP.search(text):
        return _first_match(_FUNCTORS, words(arguments)) or _elementwise(operator)
    text += "".join(f"{library}_" for library in _LIBRARIES if library in name)
    if kind := _first_match(_NAMES, text):
        return kind
    if _WRAPPER.search(text) and (kind := _first_match(_NAMES, words(arguments))):
        return kind
    if "_cutlass_" in text:
        return "matmul"
    return _first_match(_NAMES, _operator_words(operator)) or "other"


def _elementwise(operator: str) -> str:
    """Elementwise kernels launched by an optimizer are its update."""
    return "optimizer" if _first_match(_NAMES, _operator_words(operator)) == "optimizer" else "elementwise"


def _inductor(loop: str, fused: str, operator: str) -> str:
    if loop in ("red", "per"):
        return _first_match(_FUSED_REDUCTIONS, fused) or "reduction"
    if loop == "tem":
        return _first_match(_TEMPLATES, fused) or _first_match(_TEMPLATES, _operator_words(operator)) or "matmul"
    if loop in ("spl", "split_scan"):
        return "indexing"
    if "_embedding_" in fused:
        return "embedding"
    operators = {word for word in fused.split("_") if word.isalpha()}
    return "copy" if operators and all(map(_MOVES.fullmatch, operators)) else _elementwise(operator)


def _operator_words(operator: str) -> str:
    return words(cut(operator, _EXAMINED_LENGTH))


def _first_match(rules: _Rules, text: str) -> str:
    return next((kind for kind, pattern in rules if pattern.search(text)), "")

"""`count_flops`: a module's floating-point operations per batch, counted before training on shapes alone."""

import copy
import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import prod
from traceback import walk_tb
from typing import Any, Final

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd import graph as autograd_graph
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.operator import COUNTED, convolution_flops


def _convolution_backward(*shapes_and_values: Any, **_: Any) -> int:
    gradient, image, weight, _bias, _stride, _padding, _dilation, transposed, _, _groups, asked_for = shapes_and_values
    positions = image[2:] if transposed else gradient[2:]
    return int(sum(asked_for[:2])) * convolution_flops(image, weight, positions)


_ATTENTION: Final = "_scaled_dot_product_flash_attention_for_cpu"
# What PyTorch's counter lacks or has wrong: it does not count attention on a CPU, where a module usually is before
# training, nor `torch.sparse.mm`, and it counts the weight gradient of a grouped convolution as if it were not grouped.
FORMULAS: Final[dict[Any, Callable[..., int]]] = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        (_ATTENTION, lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)),  # type: ignore[no-untyped-call]
        (f"{_ATTENTION}_backward", lambda *four, **__: sdpa_backward_flop_count(*four[:4])),  # type: ignore[no-untyped-call]
        ("convolution_backward", _convolution_backward),
        ("_sparse_addmm", lambda _, left, right, **__: 2 * prod(left) * right[-1]),
    )
}


class _Uncounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operators of one step that may multiply and have no formula."""

    supports_higher_order_operators = True

    def __init__(self, formulas: Container[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._formulas = formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func if isinstance(func, HigherOrderOperator) else func.overloadpacket
        if operator not in self._formulas and _may_multiply(operator):
            self.names.add(str(operator))
        return func(*args, **(kwargs or {}))


class _Phase(nullcontext[None]):
    """Replaces the counter's module tracker, whose hooks fail in some steps: what is counted here is by phase."""

    in_backward = False

    @property
    def parents(self) -> tuple[str, str]:
        """What an operator counts for: its phase, and the whole, which the counter calls `Global`."""
        if not self.in_backward:
            return "Global", "forward"
        return "Global", "recomputed" if _computes_again() else "backward"


def _computes_again() -> bool:
    """Whether an operator in the backward pass belongs to a recomputed forward pass."""
    # Gradients are computed with grad mode off. A recomputed forward has it on, or is a custom operator that PyTorch's
    # checkpoint calls.
    if torch.is_grad_enabled():
        return True
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == autograd_graph.__file__ and code.co_name == "_engine_run_backward":
            return False
        if code.co_filename == torch_checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_PYTORCHS_OWN: Final = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor")
# Prefixes of PyTorch's operators that multiply and are not in `COUNTED`.
_ALSO_MULTIPLY: Final = (
    "linalg_", "_linalg_", "cholesky", "triangular_solve", "geqrf", "ormqr", "_fft_",
    "_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer",
    "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_triton_multi_head_attention",
    "_scaled_dot_product_",
    "_grouped_mm", "_scaled_grouped_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_dyn_quant_matmul",
    "_mixed_dtypes_linear",
    "_sparse_mm", "_sparse_sparse_matmul", "_sparse_semi_structured_", "_cslt_sparse_mm", "sparse_sampled_addmm",
    "sspaddmm", "hspmm",
    "_cdist", "_pdist", "_trilinear",
)  # fmt: skip
_NO_PRODUCTS: Final = ("linalg_vector_norm", "linalg_cross")  # of those: a few operations per element


def _may_multiply(operator: Any) -> bool:
    """Whether an operator without a formula multiplies, judged by its name."""
    namespace, _, name = str(operator).rpartition(".")
    if namespace not in _PYTORCHS_OWN:
        return True
    return f"aten::{name}" in COUNTED or (name.startswith(_ALSO_MULTIPLY) and name not in _NO_PRODUCTS)


NESTED: Final = "Nested tensors cannot be counted: their lengths are values. Count a padded batch."


def fake_copy(module: nn.Module, batch: Any, mode: FakeTensorMode) -> tuple[nn.Module, Any]:
    """Copy both, with fake tensors in place of all tensors."""
    name = type(module).__name__
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise ConfigurationError(
            f"{name} cannot be counted, because it has parameters without a shape yet. "
            "Run it once with a batch: that initializes them."
        )
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    # Copying a generator copies its state, a tensor that must not be fake.
    leaves = (leaf for held in (batch, *map(vars, module.modules())) for leaf in tree_leaves(held))
    memo: dict[int, Any] = {id(each): copy.deepcopy(each) for each in leaves if isinstance(each, torch.Generator)}
    with mode, _CopyShapes(device):
        # the same memo for both, so that what they share stays shared
        memo |= {
            id(parameter): nn.Parameter(_fake(parameter, device), parameter.requires_grad)
            for parameter in module.parameters()
        }
        try:
            copied, batch = copy.deepcopy((module, batch), dict(memo))
        except ConfigurationError:
            raise
        except Exception as exc:
            wrapped = is_wrapped(module)
            what = "it" if wrapped else _what_fails(module, batch, memo)
            advice = " Count it before it is wrapped or sharded." if wrapped else ""
            raise ConfigurationError(
                f"{name} cannot be counted, because {what} cannot be copied ({type(exc).__name__}: {exc}).{advice}"
            ) from exc
    for part in copied.modules():
        if "_device" in vars(part):  # a LightningModule and a metric store their device
            vars(part)["_device"] = device
    return copied, batch


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_nested:
        raise ConfigurationError(NESTED)
    if tensor.layout is not torch.strided:  # a sparse one counts as dense
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class _CopyShapes(TorchFunctionMode):
    """Makes `deepcopy` copy tensors as fake ones: buffers, and those in lists and in the batch's classes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, self._device).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func is torch.Tensor.clone:  # how a parameter that is not registered is copied
            return _fake(args[0], self._device)
        return func(*args, **(kwargs or {}))


def _what_fails(module: nn.Module, batch: Any, memo: dict[int, Any]) -> str:
    """The name of the part that cannot be copied, if it can be found."""
    parts = [("the batch", batch)]
    for path, part in module.named_modules():
        with suppress(Exception):
            state = part.__reduce_ex__(4)[2]  # what deepcopy copies: without a Trainer
            parts += [
                (f"its attribute {path}.{name}".replace(" .", " "), value)
                for name, value in state.items()
                if name not in {"_parameters", "_buffers", "_modules"}
            ]
    for what, held in parts:
        try:
            copy.deepcopy(held, dict(memo))
        except Exception:
            return what
    return "it"


_WRAPPERS: Final = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel", "DTensor"}


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is wrapped or sharded for several devices."""
    held = (*module.modules(), *module.parameters())
    return any(base.__name__ in _WRAPPERS for part in held for base in type(part).__mro__)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating-point operations of one batch; a multiply-add is two.

    Attributes:
        forward: operations of the step up to its loss.
        backward: operations of the backward pass, without recomputation.
        recomputed: operations that activation checkpointing recomputes in the backward pass.
        by_operator: the sum of all three by operator, such as `aten.mm`, the largest first.
        uncounted: operators that multiply, or may multiply, and have no formula; their operations are missing.
    """

    forward: int
    backward: int
    recomputed: int
    by_operator: Mapping[str, int]
    uncounted: tuple[str, ...]

    @property
    def total(self) -> int:
        """Operations that the model needs, forward and backward: `flops_per_batch` for MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Operations that the device executes, recomputation included: those of HFU."""
        return self.total + self.recomputed

    def __str__(self) -> str:
        scale, unit = next(((scale, unit) for scale, unit in _UNITS if self.hardware >= scale), (1, "FLOP"))

        def text(flops: int) -> str:
            return f"{flops / scale:,.{0 if scale == 1 else 3}f} {unit}"

        parts = [f"{text(self.total)} a batch: {text(self.forward)} forward, {text(self.backward)} backward"]
        if self.recomputed:
            parts[0] += f"; {text(self.recomputed)} more are recomputed"
        parts += [
            f"  {text(flops):>18} {flops / (self.hardware or 1):6.1%}  {name}"
            for name, flops in self.by_operator.items()
        ]
        if any("attention" in name for name in self.by_operator):
            parts.append("Attention counts in full: a causal mask does not halve it.")
        if self.uncounted:
            parts.append(f"Not counted, because they have no formula: {', '.join(self.uncounted)}.")
        return "\n".join(parts)


_UNITS: Final = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"), (10**3, "kFLOP"))


def count_flops(module: nn.Module, batch: Any, *, backward: bool = True) -> FlopCount:
    """Count the floating-point operations of one batch, on a copy of the module with shapes and no data.

    Nothing is computed, and the copy's tensors take no memory; other contents of the module and the batch, such as
    NumPy arrays, are copied. The module, its gradients, its buffers and all random number generators stay unchanged.
    The module may be on the `meta` device. Call it before training and before the module is wrapped or sharded: the
    result is for the whole batch, however many devices share it.

    Matrix products, convolutions and attention are counted, as by PyTorch's `FlopCounterMode`: causal attention counts
    in full; the backward of fused attention counts five products, its forward two, because it recomputes the scores.
    Compiled parts run in eager mode.

    A step may fill a cache outside of the module (`functools.lru_cache`) with tensors of the copy, which have no data.
    Clear such a cache before the module runs.

    Args:
        module: a LightningModule with automatic optimization, whose `training_step` is called with the batch; or any
            other module, called with the batch, or with its parts if it is a tuple, a list, or a mapping whose keys are
            the module's arguments.
        batch: a batch as the module receives it. Its values are not read.
        backward: whether to count the backward pass too, from the output `loss` or, without one, from all outputs.
            Frozen parameters have none.

    Returns:
        The operations. Pass `count_flops(module, batch).total` as `ThroughputCallback(flops_per_batch=...)`.

    Raises:
        ConfigurationError: it is not a module, or cannot run on shapes: it cannot be copied (FSDP), reads values
            (`.item()`, a mask of varying size, nested tensors), needs its Trainer, or uses tensors from elsewhere.

    Examples:
        >>> counted = count_flops(torch.nn.Linear(256, 512), torch.randn(128, 256))
        >>> counted.forward, counted.backward  # the input needs no gradient: the weight's alone
        (33554432, 33554432)
        >>> print(counted)
        67.109 MFLOP a batch: 33.554 MFLOP forward, 33.554 MFLOP backward
                33.554 MFLOP  50.0%  aten.addmm
                33.554 MFLOP  50.0%  aten.mm
    """
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise ConfigurationError(f"count_flops takes a module (torch.nn.Module) and a batch, got {what}.")
    name = type(module).__name__
    mode = FakeTensorMode()
    with torch.inference_mode(mode=False), _nothing_changes():
        try:
            return _count(*fake_copy(module, batch, mode), mode, backward=backward)
        except ConfigurationError:
            raise
        except Exception as exc:
            raise ConfigurationError(
                f"{name} cannot be counted on shapes alone ({type(exc).__name__}: {exc}).{_advice(module, exc)}"
            ) from exc


_FLEX: Final = "flex_attention cannot be counted: use scaled_dot_product_attention instead while counting."
_FROM_ELSEWHERE: Final = (
    "It uses a tensor that belongs to neither the module nor the batch; real and fake tensors cannot be mixed. "
    "Make a constant a buffer (register_buffer); clear a cache that was filled before."
)
_FROM_EARLIER: Final = (
    "Something outside of the module holds a tensor of an earlier count: clear it, a cache by its cache_clear()."
)


def _advice(module: nn.Module, exc: Exception) -> str:
    """Advice for an error of the step."""
    message = str(exc)
    values = isinstance(exc, DataDependentOutputException | DynamicOutputShapeException) or ".numpy() is not" in message
    nested = any(
        frame.f_globals.get("__name__", "").startswith("torch.nested") for frame, _ in walk_tb(exc.__traceback__)
    )
    of_none = isinstance(exc, AttributeError) and exc.obj is None and hasattr(module, "training_step")
    inside = "count the network inside: count_flops(module.net, inputs)."
    advice = (
        (is_wrapped(module), "Count it before it is wrapped or sharded."),
        (nested, NESTED),
        (values, f"Its step reads values, and the copy has none: {inside}"),
        ("not attached to a `Trainer`" in message, f"Its step uses its Trainer, and has none here: {inside}"),
        (of_none, f"If that is its logger or something else of its Trainer, {inside}"),
        ("flexattention" in message.lower().replace("_", ""), _FLEX),
        ("convert all Tensors to FakeTensors" in message, _FROM_ELSEWHERE),
        ("Mixing fake modes" in message, _FROM_EARLIER),
    )
    return next((f" {text}" for applies, text in advice if applies), "")


@contextmanager
def _nothing_changes() -> Iterator[None]:
    """Restore what a step may change outside of its module."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)  # a user who has not imported it has no numbers
    state, numpy_state = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # what self.log says without a Trainer
            warnings.filterwarnings("ignore", message=".*`self.trainer` reference is not registered")
            yield
    finally:
        random.setstate(state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


@contextmanager
def _as_products() -> Iterator[None]:
    """Run recurrent and transformer layers as separate products instead of one fused operator."""
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    enabled = [library.enabled for library in libraries]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        for library in libraries:
            library.enabled = False
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        for library, before in zip(libraries, enabled, strict=True):
            library.enabled = before
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _count(module: nn.Module, batch: Any, mode: FakeTensorMode, *, backward: bool) -> FlopCount:
    """Run a step of what `fake_copy` made."""
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counter.mod_tracker = phase = _Phase()  # type: ignore[assignment]
    uncounted = _Uncounted(counter.flop_registry)
    # the counter decomposes composites and passes the rest on
    with _as_products(), torch.enable_grad(), mode, uncounted, counter:
        loss = _loss(_step(module, batch))
        if backward and loss is not None:
            phase.in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
    counts = counter.get_flop_counts()
    of_forward, of_backward, recomputed = (
        sum(counts.get(name, {}).values()) for name in ("forward", "backward", "recomputed")
    )
    return FlopCount(
        forward=of_forward,
        backward=of_backward,
        recomputed=recomputed,
        by_operator={str(operator): flops for operator, flops in Counter(counts.get("Global", {})).most_common()},
        uncounted=tuple(sorted(uncounted.names)),
    )


def _step(module: nn.Module, batch: Any) -> Any:
    """The output of a training step with this batch."""
    training_step = getattr(module, "training_step", None)
    if callable(training_step):
        signature = inspect.getfullargspec(training_step)
        # a second argument behind self, by whatever name, as Lightning does
        takes_index = signature.args[2:] or signature.varargs
        return training_step(batch, 0) if takes_index else training_step(batch)
    if isinstance(batch, Mapping):
        return module(**batch) if _takes(module, batch) else module(batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def _takes(module: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the batch's keys are the module's arguments."""
    try:
        inspect.signature(module.forward).bind(**batch)
    except TypeError:
        return False
    return True


def _loss(output: Any) -> torch.Tensor | None:
    """The scalar to start the backward pass from; None if nothing requires a gradient."""
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    parts = [leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum(parts[1:], parts[0]) if parts else None

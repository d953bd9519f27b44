"""`count_flops`: a module's floating-point operations per batch, by PyTorch's counter around one step of it."""

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.operator import convolution_flops


def _convolution_backward(*shapes_and_values: Any, **_: Any) -> int:
    gradient, image, weight, _bias, _stride, _padding, _dilation, transposed, _, _groups, asked_for = shapes_and_values
    positions = image[2:] if transposed else gradient[2:]
    return int(sum(asked_for[:2])) * convolution_flops(image, weight, positions)


_ATTENTION: Final = "_scaled_dot_product_flash_attention_for_cpu"
# What PyTorch's counter lacks or has wrong (2.11 and 2.13). It does not count attention on a CPU, where a module is
# before training, and it counts the weight gradient of a grouped convolution as if it were not grouped.
FORMULAS: Final[dict[Any, Callable[..., int]]] = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        (_ATTENTION, lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)),  # type: ignore[no-untyped-call]
        (f"{_ATTENTION}_backward", lambda *four, **__: sdpa_backward_flop_count(*four[:4])),  # type: ignore[no-untyped-call]
        ("convolution_backward", _convolution_backward),
    )
}

_PYTORCHS_OWN: Final = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor")
# Beginnings of the names of PyTorch's operators that multiply; those with a formula among them.
_MULTIPLIES: Final = re.compile(
    r"\w*((mm|mv|dot|matmul)(_|$)|_linear$|convolution|attention|_rnn|rnn_layer)|_?conv_depthwise|_slow_conv|slow_conv"
    r"|_?linalg_(?!vector_norm|cross)|cholesky|triangular_solve|geqrf|ormqr|_fft_|_transformer_encoder"
    r"|_sparse_semi_structured|_cdist|_pdist|_trilinear"
)


class _Uncounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operators of one step that have no formula and multiply, or are not PyTorch's own."""

    supports_higher_order_operators = True

    def __init__(self, formulas: Container[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._formulas = formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func if isinstance(func, HigherOrderOperator) else func.overloadpacket
        namespace, _, name = str(operator).rpartition(".")
        if operator not in self._formulas and (namespace not in _PYTORCHS_OWN or _MULTIPLIES.match(name)):
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
    """Count the floating-point operations of one batch, by running one step.

    The module's parameters, gradients and buffers and PyTorch's random numbers are as before afterwards. Call it before
    training and before the module is wrapped or sharded: the result is for the whole batch, however many devices share
    it. On the `meta` device nothing is computed, and neither module nor batch takes memory.

    Matrix products, convolutions and attention are counted, as by PyTorch's `FlopCounterMode`: causal attention counts
    in full; the backward of fused attention counts five products, its forward two, because it recomputes the scores.
    Compiled parts run in eager mode.

    Args:
        module: a LightningModule with automatic optimization, whose `training_step` is called with the batch; or any
            other module, called with the batch, or with its parts if it is a tuple, a list, or a mapping whose keys are
            the module's arguments.
        batch: a batch as the module receives it, on the module's device.
        backward: whether to count the backward pass too, from the output `loss` or, without one, from all outputs.
            Frozen parameters have none.

    Returns:
        The operations. Pass `count_flops(module, batch).total` as `ThroughputCallback(flops_per_batch=...)`.

    Raises:
        ConfigurationError: it is not a module.
        Exception: whatever the step raises. One that needs its Trainer cannot be counted: count the network inside.

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
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counter.mod_tracker = phase = _Phase()  # type: ignore[assignment]
    uncounted = _Uncounted(counter.flop_registry)
    # the counter decomposes composites and passes the rest on
    with _unchanged(module), _as_products(), torch.enable_grad(), uncounted, counter:
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


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Put back what a step changes: gradients, buffers and PyTorch's random numbers."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # what self.log says without a Trainer
            warnings.filterwarnings("ignore", message=".*`self.trainer` reference is not registered")
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


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

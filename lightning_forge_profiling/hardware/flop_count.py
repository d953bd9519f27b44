"""What one batch costs a module in floating-point operations, counted before training without computing anything."""

import copy
import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph as autograd_graph
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.hardware.flops import COUNTED

if TYPE_CHECKING:
    from torch.utils.module_tracker import ModuleTracker

__all__ = ["FlopCount", "count_flops"]


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The operations of one batch; a multiply-add is two.

    Attributes:
        forward: of the step up to its loss.
        backward: of the backward pass, without what activation checkpointing computes again in it.
        recomputed: that.
        by_operator: all three together by operator, as `aten.mm`, the largest first.
        uncounted: operators that multiply (or may, where they are no operators of PyTorch's own) and that there is no
            formula for: what they compute is missing above.
    """

    forward: int
    backward: int
    recomputed: int
    by_operator: Mapping[str, int]
    uncounted: tuple[str, ...]

    @property
    def total(self) -> int:
        """What the model asks for, forward and backward: `flops_per_batch` of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What the device carries out, recomputation included: what HFU is made of."""
        return self.total + self.recomputed

    def __str__(self) -> str:
        parts = [f"{_gflop(self.total)} a batch: {_gflop(self.forward)} forward, {_gflop(self.backward)} backward"]
        if self.recomputed:
            parts[0] += f"; {_gflop(self.recomputed)} more are computed a second time"
        parts += [
            f"  {_gflop(flops):>18} {flops / self.hardware:6.1%}  {name}" for name, flops in self.by_operator.items()
        ]
        if any("attention" in name for name in self.by_operator):
            parts.append("Attention counts in full: a causal mask is not taken to halve it.")
        if self.uncounted:
            parts.append(f"Not counted, because there is no formula: {', '.join(self.uncounted)}.")
        return "\n".join(parts)


def _gflop(flops: int) -> str:
    return f"{flops / 1e9:,.3f} GFLOP"


def count_flops(module: nn.Module, batch: Any, *, backward: bool = True) -> FlopCount:
    """Count what one batch costs, on a copy of the module that has shapes and no data.

    Nothing is computed and no memory is taken; the module, its gradients and buffers and all random numbers stay as
    they are. It may be on the `meta` device. To be called before training, and before the module is wrapped or sharded:
    what it gives is the whole batch's count, whatever number of devices will share it.

    Counted are matrix products, convolutions and attention, by PyTorch's `FlopCounterMode` and with its peculiarities:
    causal attention counts in full; fused attention's backward counts five products where its forward has two, the
    scores among them that it computes again; the weight gradient of a grouped convolution counts `groups` times too
    much. Compiled parts run as written.

    Args:
        module: a LightningModule with automatic optimization, whose `training_step` is called with the batch, or any
            other module, which is called with the batch, or with its parts where that is a tuple, a list or a mapping
            whose keys are its arguments.
        batch: a batch as the module gets it. Its values are not looked at.
        backward: whether to count the backward pass too, from the loss or, where there is none by that name, from all
            outputs. Frozen parameters have none.

    Returns:
        The operations. `count_flops(module, batch).total` is what `ThroughputCallback(flops_per_batch=...)` wants.

    Raises:
        ConfigurationError: where the module cannot run so: it cannot be copied (FSDP's cannot), it looks at values
            (`.item()`, a mask of varying size), or it needs its Trainer.

    Example:
        >>> counted = count_flops(torch.nn.Linear(256, 512), torch.randn(128, 256))
        >>> counted.forward, counted.backward  # the input needs no gradient: the weight's alone
        (33554432, 33554432)
        >>> print(counted)
        0.067 GFLOP a batch: 0.034 GFLOP forward, 0.034 GFLOP backward
                 0.034 GFLOP  50.0%  aten.addmm
                 0.034 GFLOP  50.0%  aten.mm
    """
    name = type(module).__name__
    with _nothing_changes(), FakeTensorMode():
        try:
            module, batch = _shapes_of(module, batch)
        except Exception as exc:
            raise ConfigurationError(
                f"{name} cannot be counted, because it cannot be copied ({type(exc).__name__}: {exc}). "
                "Count it before it is wrapped or sharded."
            ) from exc
        try:
            return _count(module, batch, backward=backward)
        except Exception as exc:
            raise ConfigurationError(
                f"{name} cannot be counted on shapes alone ({type(exc).__name__}: {exc}). Where its step looks at "
                "values or at the Trainer, count the network inside: count_flops(module.net, inputs)."
            ) from exc


@contextmanager
def _nothing_changes() -> Iterator[None]:
    """Put back what a step may change outside of its module."""
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
def _recurrence_apart() -> Iterator[None]:
    """Without these libraries a recurrent layer is the products that it consists of, and no operator of its own."""
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    enabled = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, before in zip(libraries, enabled, strict=True):
            library.enabled = before


def _shapes_of(module: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Copies of both with fake tensors, all on one device, in place of all tensors. To be called in a fake mode."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    # the same for both, so that what they share stays shared
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(_fake(parameter, device), parameter.requires_grad)
        for parameter in module.parameters()
    }
    with _CopyShapes(device):
        module, batch = copy.deepcopy((module, batch), memo)
    for part in module.modules():
        if "_device" in vars(part):  # a LightningModule and a metric remember where they are
            vars(part)["_device"] = device
    return module, batch


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class _CopyShapes(TorchFunctionMode):
    """What `deepcopy` does with tensors: buffers, those in lists, those in a batch's own classes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, self._device).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func is torch.Tensor.clone:  # a parameter that is not registered copies itself so
            return _fake(args[0], self._device)
        return func(*args, **(kwargs or {}))


def _count(module: nn.Module, batch: Any, *, backward: bool) -> FlopCount:
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    counter.mod_tracker = cast("ModuleTracker", _AnyModule())
    watch = _Watch(counter.flop_registry)
    # the counter takes composites apart and hands on what is left
    with _recurrence_apart(), torch.enable_grad(), watch, counter:
        loss = _loss(_step(module, batch))
        forward = counter.get_total_flops()
        if backward and loss is not None:
            watch.in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
    operators = Counter(counter.get_flop_counts().get("Global", {}))
    return FlopCount(
        forward=forward,
        backward=counter.get_total_flops() - forward - watch.recomputed,
        recomputed=watch.recomputed,
        by_operator={str(operator): flops for operator, flops in operators.most_common()},
        uncounted=tuple(sorted(watch.uncounted)),
    )


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


_CPU_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001  (that is its name)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001
}
"""What attention is on a CPU, where a module that is not trained yet usually lies; PyTorch has its formula for GPUs."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what runs: what has no formula, and what the backward pass computes a second time."""

    supports_higher_order_operators = True

    def __init__(self, formulas: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_backward = False
        self.recomputed = 0
        self.uncounted: set[str] = set()
        self._formulas = formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operator = func if isinstance(func, HigherOrderOperator) else func.overloadpacket
        if operator not in self._formulas:
            if _may_multiply(operator):
                self.uncounted.add(str(operator))
        elif self.in_backward and _computes_again():
            self.recomputed += self._formulas[operator](*args, **kwargs, out_val=out)
        return out


def _computes_again() -> bool:
    """Whether what runs in the backward pass is a forward pass once more.

    Gradients are computed with gradients off. What is computed again has them on, or lies in an operator of the user's
    own that PyTorch's checkpoint calls.
    """
    if torch.is_grad_enabled():
        return True
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (what inspect.currentframe is)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == autograd_graph.__file__ and code.co_name == "_engine_run_backward":
            return False
        if code.co_filename == torch_checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


class _AnyModule:
    """In place of what watches which module runs, which no figure here is by and whose hooks refuse some steps."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_PYTORCHS_OWN: Final = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor")
_ALSO_MULTIPLY: Final = (
    "_cudnn_rnn",
    "miopen_rnn",
    "mkldnn_rnn_layer",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_cdist",
    "_trilinear",
)
_ALSO_MULTIPLY_PREFIXES: Final = (*_ALSO_MULTIPLY, "linalg_", "_linalg_", "cholesky", "_fft_", "triangular_solve")


def _may_multiply(operator: Any) -> bool:
    """Whether an operator without a formula computes more than its inputs have elements, as far as its name tells."""
    namespace, _, name = str(operator).rpartition(".")
    if namespace not in _PYTORCHS_OWN:
        return True
    return f"aten::{name}" in COUNTED or name.startswith(_ALSO_MULTIPLY_PREFIXES)


def _step(module: nn.Module, batch: Any) -> Any:
    """What a training step makes of the batch."""
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
    """Whether a batch's keys are arguments of the module."""
    try:
        inspect.signature(module.forward).bind(**batch)
    except TypeError:
        return False
    return True


def _loss(output: Any) -> torch.Tensor | None:
    """A scalar to go backward from; None where nothing needs a gradient."""
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    parts = [leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum(parts[1:], parts[0]) if parts else None

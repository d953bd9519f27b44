"""`count_flops`: a module's floating-point operations per batch, counted before training on shapes alone."""

import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.fake_copy import NESTED, fake_copy, is_wrapped
from lightning_forge_profiling.flops.operator_watch import FORMULAS, OperatorWatch

if TYPE_CHECKING:
    from torch.utils.module_tracker import ModuleTracker


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


class _AnyModule:
    """Replaces the counter's module tracker: no result here is per module, and its hooks fail in some steps."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _count(module: nn.Module, batch: Any, mode: FakeTensorMode, *, backward: bool) -> FlopCount:
    """Run a step of what `fake_copy` made."""
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counter.mod_tracker = cast("ModuleTracker", _AnyModule())
    watch = OperatorWatch(counter.flop_registry)
    # the counter decomposes composites and passes the rest on
    with _as_products(), torch.enable_grad(), mode, watch, counter:
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

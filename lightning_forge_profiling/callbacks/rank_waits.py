"""Where a rank waits for others in its steps, by events around what makes it wait: no trace, no synchronization."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn

from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.wrapped_methods import Around, WrappedMethod
from lightning_forge_profiling.diagnosis.ranks import Waits
from lightning_forge_profiling.names import SIGTERM_LEAF
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.schema import RunTiming

# with these set, the host waits for each collective all the same, but not for DDP's
_BLOCKING: Final = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")

# of Lightning's strategies: what `sync_dist`, `all_gather` and the user's own calls go through
_COLLECTIVES: Final = ("barrier", "broadcast", "reduce", "all_gather")


class RankWaits:
    """Measures, in steps whose regions are timed, communication and waiting that nothing hides.

    After the last gradient, autograd calls DDP's and FSDP's final callbacks, which make the stream wait for what is
    still being exchanged. One event before them and one behind them are the exposed part of backward: DDP calls it
    `backward_comm_time` less the overlap (`torch/csrc/distributed/c10d/logger.cpp`).
    """

    def __init__(self, trainer: Trainer, step_timer: StepTimer) -> None:
        self._step_timer, self._thread = step_timer, get_ident()
        self._wrapped: list[WrappedMethod] = []
        self._hooks: list[Any] = []
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        model, sharded = strategy.model, _fsdp_modules(strategy.model)
        self.measures = _is_ddp(model) or bool(sharded)
        # at the end of backward DDP's host waits for nothing but what others have used, if it has to find that out
        self._host_goes_on = _is_ddp(model) and not model.find_unused_parameters and _has_nccl()
        self.unmeasured: tuple[str, ...] = ()  # leaves with collectives that no event is around
        self.because = ""
        if not self.measures:
            self.because = f"the waits of {type(strategy).__name__} have no events around them"
            return
        if sharded:
            self.unmeasured, self.because = ("backward",), "FSDP2 waits for reduce-scatters inside backward"
        if _has_sync_batch_norm(model):
            self.unmeasured, self.because = ("forward", "backward"), "SyncBatchNorm waits inside forward and backward"
        self._wrapped.append(
            WrappedMethod(loop, "_broadcast_sigterm_tensor", self._in_broadcast, lambda: step_timer.regions.is_split)
        )
        for name in _COLLECTIVES:
            self._wrap(strategy, name)
        if _is_ddp(model):
            self._wrap(model, "_sync_buffers")
        self._wrapped.append(WrappedMethod(strategy, "backward", self._nothing, self._backward_begins))
        for module in sharded:
            self._hooks += _around_unshard(module, step_timer)

    def measured(self, timing: RunTiming) -> Waits:
        """The waits per step, as far as they are measured."""
        if not self.measures:
            return Waits(because=self.because)
        if not timing.split_steps or timing.atypical:
            return Waits(because="too few typical steps had their regions timed")
        timer = self._step_timer
        outside_ms = {part: ns / 1e6 / max(timer.step, 1) for part, ns in timer.waits.outside_ns.items()}
        return Waits({**timing.waits_ms, **outside_ms}, self.unmeasured, self.because)

    def close(self) -> None:
        """Restore what was wrapped."""
        for wrapped in self._wrapped:
            wrapped.release()
        for hook in self._hooks:
            hook.remove()
        self._wrapped, self._hooks = [], []  # they hold the model

    def _wrap(self, owner: Any, name: str) -> None:
        self._wrapped.append(WrappedMethod(owner, name, self._waiting, lambda *_, **__: get_ident() == self._thread))

    @contextmanager
    def _waiting(self, leaf: str = "", *, host_waits: bool = True) -> Iterator[None]:
        self._step_timer.waits.enter(leaf)
        try:
            yield
        finally:
            self._step_timer.waits.exit(host_waits=host_waits)

    @contextmanager
    def _in_broadcast(self) -> Iterator[None]:
        """Wait in the broadcast alone: Lightning's copies to and from the GPU around it are work of this rank."""
        measured = _MeasuredBroadcast(torch.distributed.broadcast, self._waiting_in_broadcast)
        torch.distributed.broadcast = measured
        try:
            yield
        finally:
            measured.around = nullcontext  # another thread of the user's may have kept it to put it back
            if torch.distributed.broadcast is measured:
                torch.distributed.broadcast = measured.original

    def _waiting_in_broadcast(self) -> AbstractContextManager[None]:
        if get_ident() != self._thread:
            return nullcontext()
        host_waits = not _has_nccl() or any(os.environ.get(name, "0") != "0" for name in _BLOCKING)
        return self._waiting(SIGTERM_LEAF, host_waits=host_waits)

    @staticmethod
    def _nothing() -> Any:
        raise AssertionError  # `_backward_begins` never asks for a context

    def _backward_begins(self, *args: Any, **kwargs: Any) -> bool:
        """Have autograd call us after the last gradient: callbacks run in the order in which they were queued."""
        loss: Any = args[0] if args else kwargs.get("closure_loss")
        regions = self._step_timer.regions
        if regions.is_split and regions.active and getattr(loss, "requires_grad", False) and not _compiles_autograd():
            loss.register_hook(self._queue)
        return False

    def _queue(self, _: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients_ready)  # noqa: SLF001

    def _gradients_ready(self) -> None:
        """Called before DDP waits; queues the call behind that."""
        waits = self._step_timer.waits
        waits.enter("backward")
        ends = waits.end_on_gpu if self._host_goes_on else waits.exit
        torch.autograd.Variable._execution_engine.queue_callback(ends)  # noqa: SLF001


class _MeasuredBroadcast:
    """`torch.distributed.broadcast` with a context around it; once released, without."""

    def __init__(self, broadcast: Any, around: Around) -> None:
        # one that another thread has put back is not called through
        self.original: Any = broadcast.original if isinstance(broadcast, _MeasuredBroadcast) else broadcast
        self.around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            return self.original(*args, **kwargs)


def _is_ddp(model: object) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


def _has_nccl() -> bool:
    """Whether ranks exchange by kernels on a stream of their own, for which the host need not wait."""
    return torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()


def _fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and loaded where it is used
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _has_sync_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _compiles_autograd() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def _around_unshard(module: nn.Module, step_timer: StepTimer) -> list[Any]:
    """Events around the wait for a module's parameters, before its forward and before its backward."""

    def enter(region: str, *_: Any) -> None:
        step_timer.waits.enter(region)

    def exit_(*_: Any) -> None:
        step_timer.waits.exit()

    def on_outputs(hook: Any, _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in torch.utils._pytree.tree_leaves(output):  # noqa: SLF001
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and step_timer.regions.is_split:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    return [
        module.register_forward_pre_hook(partial(enter, "forward"), prepend=True),
        module.register_forward_pre_hook(exit_),
        module.register_forward_hook(partial(on_outputs, partial(enter, "backward")), prepend=True),
        module.register_forward_hook(partial(on_outputs, exit_)),
    ]

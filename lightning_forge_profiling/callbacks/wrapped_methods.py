"""Wraps methods of Lightning's objects that have no hook around them: loops, loggers, `self.log`, restoring."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from types import FunctionType
from typing import Any, Final

import torch

from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer, implemented_hooks
from lightning_forge_profiling.plain_text import name_of

Around = Callable[[], AbstractContextManager[None]]
AroundLogger = Callable[[Any], AbstractContextManager[None]]


class WrappedMethod:
    """A context manager around each call of an object's method, until `release`.

    It equals the method: `self.log` keeps the strategy's `reduce`, in a sanity check before the fit begins or in an
    earlier fit of the Trainer, and refuses another one.
    """

    def __init__(
        self, owner: Any, name: str, around: Around, when: Callable[..., bool] = lambda *_, **__: True
    ) -> None:
        self._owner, self._name, self._around, self._when = owner, name, around, when
        self._others = vars(owner).get(name)  # somebody else's wrapper; the class's own could not always be pickled
        if hasattr(type(owner), name):
            setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        applies, method = self._when(*args, **kwargs), self._others
        if method is None:
            method, args = getattr(type(self._owner), self._name), (self._owner, *args)
        if not applies:
            return method(*args, **kwargs)
        with self._around():
            return method(*args, **kwargs)

    @property
    def _own(self) -> Any:
        """The owner's method by its class."""
        return getattr(type(self._owner), self._name).__get__(self._owner)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same method, wrapped or not."""
        return bool(self._own == (other._own if isinstance(other, WrappedMethod) else other))

    def __hash__(self) -> int:
        return hash(self._own)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the object has its own method."""
        return getattr, (self._owner, self._name)  # of the class: the copy has no attribute yet

    def release(self) -> None:
        """Restore what was there. Who has kept this object still calls the method."""
        self._around, self._when = nullcontext, _never
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
            if self._others is not None:
                setattr(self._owner, self._name, self._others)


_SAVES: Final = "save_checkpoint"  # the method, and the action that announces it


def _never(*_: Any, **__: Any) -> bool:
    return False


class WrappedLoggerMethod:
    """A context manager around a method of a logger's class: a logger may be copied in a fit, or refuse attributes."""

    def __init__(self, owner: Any, name: str, around: AroundLogger) -> None:
        self.around = around
        original, mine = getattr(owner, name), weakref.ref(self)  # the class outlives the fit

        @wraps(original)
        def method(logger: Any, *args: Any, **kwargs: Any) -> Any:
            wrapper = mine()
            with nullcontext() if wrapper is None else wrapper.around(logger):
                return original(logger, *args, **kwargs)

        setattr(owner, name, method)
        self._restore = weakref.finalize(self, _restore, owner, name, original, method)  # or if a fit is abandoned

    def release(self) -> None:
        """Restore the class's own method; let calls through if somebody else has wrapped ours since."""
        self.around = nullcontext
        self._restore()


def _restore(owner: Any, name: str, original: object, ours: object) -> None:
    if getattr(owner, name) is ours:
        setattr(owner, name, original)


def wrap_logger_method(
    trainer: Trainer, name: str, around: Callable[[str], AbstractContextManager[None]]
) -> list[WrappedLoggerMethod]:
    """Wraps a method of the fit's loggers; `around` gets the call's part of the ledger."""
    loggers = tuple(trainer.loggers)

    def of_fit(logger: Any) -> AbstractContextManager[None]:
        known = any(logger is one for one in loggers)
        return around(f"logger/{name_of(logger)}.{name}") if known else nullcontext()

    owners = (
        next((base for base in type(logger).__mro__ if isinstance(vars(base).get(name), FunctionType)), None)
        for logger in loggers
    )
    return [WrappedLoggerMethod(owner, name, of_fit) for owner in dict.fromkeys(owners) if owner is not None]


def wrap_logging(trainer: Trainer, around: Around) -> WrappedMethod:
    """Wraps the Trainer's own way to give an entry to its loggers, `self.log` and the end of an epoch included."""
    # which Lightning calls without metrics too, and then calls no logger
    return WrappedMethod(trainer._logger_connector, "log_metrics", around, lambda metrics, *_, **__: bool(metrics))  # noqa: SLF001


def wrap_self_log(trainer: Trainer, log: Around, epoch: Around, validation: Around) -> tuple[WrappedMethod, ...]:
    """Wraps how the training loop takes what `self.log` gives it, and how that is computed at the end of a loop."""
    loop = trainer.fit_loop.epoch_loop
    return (
        WrappedMethod(loop._results, "log", log, lambda *_, **__: not torch.compiler.is_compiling()),  # noqa: SLF001
        WrappedMethod(loop._results, "metrics", epoch, lambda on_step: not on_step),  # noqa: SLF001
        WrappedMethod(loop.val_loop._results, "metrics", validation, lambda on_step: not on_step),  # noqa: SLF001
    )


def wrap_originals(
    trainer: Trainer, module: LightningModule, around: Callable[[str], AbstractContextManager[None]]
) -> list[WrappedMethod]:
    """Wraps what a module's own hook calls to do Lightning's work: the update with its closure, and the clipping."""
    originals = {
        "optimizer_step": (trainer.strategy, "optimizer_step"),
        "configure_gradient_clipping": (trainer.precision_plugin, "clip_gradients"),
    }
    hooks = implemented_hooks(module)
    return [WrappedMethod(*original, partial(around, hook)) for hook, original in originals.items() if hook in hooks]


def wrap_restoring(trainer: Trainer, around: Around) -> tuple[WrappedMethod, WrappedMethod]:
    """Wraps the Trainer's ways to restore a checkpoint: weights and callbacks, then loops and optimizers."""
    connector = trainer._checkpoint_connector  # noqa: SLF001

    def restores(path: object = None, *_: Any, **__: Any) -> bool:
        return bool(path or connector._loaded_checkpoint)  # noqa: SLF001

    return (
        WrappedMethod(connector, "_restore_modules_and_callbacks", around, restores),
        WrappedMethod(connector, "restore_training_state", around, restores),
    )


def wrap_last_teardown(trainer: Trainer, over: Callable[[], object]) -> WrappedMethod:
    """Calls `over` when Lightning has done all it does in a fit that has failed."""

    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        finally:
            over()

    return WrappedMethod(trainer._signal_connector, "teardown", around)  # noqa: SLF001


def watch_failure(loop: Any, failed: Callable[[BaseException], object]) -> WrappedMethod:
    """Calls `failed` when an exception ends one of Lightning's loops."""
    # Lightning calls `on_exception` only in the process that launched the ranks, not in spawned or forked ones, and not
    # on a callback behind one whose own `on_exception` raises

    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            failed(exc)
            raise

    return WrappedMethod(loop, "run", around)


def announce_saves(trainer: Trainer) -> list[WrappedMethod]:
    """Announces that a checkpoint is saved as later versions do: Lightning 2.4 does not."""
    code = getattr(type(trainer).save_checkpoint, "__code__", None)
    if code is None or _SAVES in code.co_consts:
        return []
    return [WrappedMethod(trainer, _SAVES, lambda: trainer.profiler.profile(_SAVES))]


def watch_validation(trainer: Trainer, around: Around) -> WrappedMethod:
    """Wraps a validation run: during accumulation Lightning announces it after its workers' start."""
    return WrappedMethod(trainer.fit_loop.epoch_loop.val_loop, "run", around)

"""Hugging Face's `Trainer`: the hooks of its callbacks delimit steps, and get what a Lightning Trainer's steps get."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from transformers import TrainerCallback

from lightning_forge_profiling.callbacks.loop_watch import replace_function
from lightning_forge_profiling.callbacks.plain_loop import LoopProfiling, PlainLoop
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.timing.region import region


class HuggingFaceCallback(LoopProfiling, TrainerCallback):  # type: ignore[misc]
    """Profiles the training of a Hugging Face `Trainer`.

    A step is one update of the optimizer: with accumulation, of several batches, which Hugging Face fetches before the
    first of them. Its samples are those that the arguments ask for, also where an epoch ends with fewer. Its loaders,
    backward passes and optimizers are seen as those of a plain loop are; evaluation is `validation`, and saving is
    `checkpoint`.

    Args:
        *callbacks: a `ForgeProfilerCallback` to record a window of steps, a `ThroughputCallback` with other settings,
            or both.
        log_dir: the folder for the record and the traces; None for the Trainer's `output_dir`.

    Raises:
        ConfigurationError: something else than one callback of each kind, or a `log_dir` that is no path.
        ImportError: where `transformers` is not installed.

    Examples:
        ```python
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[HuggingFaceCallback()])
        ```
    """

    trainer = "transformers"
    _training: ClassVar["HuggingFaceCallback | None"] = None  # whose training has begun and not ended
    added: ClassVar[Callable[[], Sequence[TimedCallback]]] = tuple  # by `forge-profiling run`

    def __init__(self, *callbacks: TimedCallback, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(callbacks, added=HuggingFaceCallback.added(), folder=log_dir)
        self._stepped: PlainLoop | None = None
        self._samples: float | None = None
        self._restore: Callable[[], None] = lambda: None
        if type(self) is not _AddedByRun:  # which would take part beside this one
            with suppress(KeyError, ValueError):
                sys.modules["transformers.trainer"].DEFAULT_CALLBACKS.remove(_AddedByRun)

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Training begins."""
        if (failed := HuggingFaceCallback._training) is not None:  # which calls no hook
            failed.on_train_end()
        HuggingFaceCallback._training = self
        if self.folder is None:
            self.folder = args.output_dir
        of_batch = getattr(state, "train_batch_size", None) or args.train_batch_size  # which may have been made smaller
        self._samples = of_batch * args.gradient_accumulation_steps
        self._restore = replace_function(sys.modules["transformers.trainer"].Trainer, "_save_checkpoint", _saving)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self._stepped = loop = self.loop()
        if loop is not None and not loop.failed and not loop.in_step:
            loop.begin_step(None, self._samples)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        loop, self._stepped = self._stepped, None
        if loop is not None and loop.in_step:
            loop.end_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Training has ended."""
        HuggingFaceCallback._training = None
        self._restore()
        self.end()


def _saving(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with region("checkpoint"):
        return original(*arguments, **options)


class _AddedByRun(HuggingFaceCallback):
    """What `forge-profiling run` adds to each Trainer of a script that gives it none itself."""


def add_to_trainers(trainer: Any, added: Callable[[], Sequence[TimedCallback]]) -> None:
    """Add a callback to each Trainer that is built from here on.

    Args:
        trainer: the module `transformers.trainer`.
        added: the callbacks that `run` adds.
    """
    HuggingFaceCallback.added = staticmethod(added)
    trainer.DEFAULT_CALLBACKS.append(_AddedByRun)

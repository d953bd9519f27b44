"""`Trainer(profiler=ForgeProfiler())`: the same as the two callbacks, where Lightning's own profilers are given."""

from typing import Any

from lightning_forge_profiling.callbacks.forge_profiler import ForgeProfilerCallback
from lightning_forge_profiling.callbacks.lightning_api import PassThroughProfiler, Trainer
from lightning_forge_profiling.callbacks.throughput import ThroughputCallback
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.schema import Analysis


class ForgeProfiler(PassThroughProfiler):
    """Adds a `ForgeProfilerCallback` and a `ThroughputCallback` to the fits of its Trainer, which has none of its own.

    For settings of `ThroughputCallback`, give the Trainer the callbacks themselves.

    Args:
        start_step: the first recorded step; None to wait until the run is steady.
        end_step: the first step after the window; None for six steps.
        **recording: other arguments of `ForgeProfilerCallback`, by name.

    Raises:
        ConfigurationError: as `ForgeProfilerCallback`.

    Examples:
        >>> profiler = ForgeProfiler(start_step=5, end_step=8)  # for Trainer(profiler=profiler)
        >>> profiler.summary()  # of the last fit
        ''

        With LightningCLI: `--trainer.profiler=lightning_forge_profiling.ForgeProfiler`.
    """

    _lightning_module: Any  # which Lightning sets

    def __init__(self, start_step: int | None = None, end_step: int | None = None, **recording: Any) -> None:
        super().__init__()
        recorder = ForgeProfilerCallback(start_step, end_step, **recording)
        self.callbacks: tuple[TimedCallback, ...] = (recorder, ThroughputCallback())
        if not recorder.settings.enabled:
            self.callbacks = (recorder,)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Add the callbacks, before Lightning sets them up."""
        super().setup(stage, local_rank, log_dir)
        if stage != "fit" or self._lightning_module is None:
            return
        trainer: Trainer = self._lightning_module.trainer
        if _is_trial(trainer):
            return
        timed = [callback for callback in trainer.callbacks if isinstance(callback, TimedCallback)]
        own = tuple(type(callback) for callback in timed if not callback.settings.injected_by_cli)
        added = [callback for callback in self.callbacks if not issubclass(type(callback), own)]
        for callback in timed:  # the first of all begins the ledger
            callback.leave_begun()
        trainer.callbacks[:0] = [callback for callback in added if callback not in timed]
        for callback in dict.fromkeys((*added, *timed)):
            callback.log = self._lightning_module.log  # as Lightning gives each its own, a moment before this

    def analysis(self) -> Analysis | None:
        """The verdict on the last fit, with the findings and figures behind it; None before one."""
        return self.callbacks[0].analysis()

    def __repr__(self) -> str:
        """The table of the last fit; before one what any object says."""
        return self.summary() or super().__repr__()

    def _repr_html_(self) -> str | None:
        """The same table for a notebook; None before a fit."""
        return self.callbacks[0]._repr_html_()

    def describe(self) -> None:
        """Print nothing: the callbacks print the table when the fit ends."""
        self.teardown(stage=self._stage)

    def summary(self) -> str:
        """The table of the last fit; "" before one."""
        return repr(self.callbacks[0]) if self.analysis() is not None else ""


def _is_trial(trainer: Trainer) -> bool:
    """Whether this is a fit of Lightning's Tuner, which replaces callbacks and loggers for it, and not the profiler."""
    loggers = {type(logger).__name__ for logger in trainer.loggers}
    finds_rate = any(type(callback).__module__.endswith("tuner.lr_finder") for callback in trainer.callbacks)
    return finds_rate or ("DummyLogger" in loggers and not trainer.fast_dev_run)

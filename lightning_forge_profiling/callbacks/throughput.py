"""The callback that logs throughput and the time of each region."""

from collections.abc import Callable
from typing import Any

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.recording import DEFAULT_WARMUP_STEPS, RecordingCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.timing.throughput import Rates

__all__ = ["ThroughputCallback"]


class ThroughputCallback(RecordingCallback):
    """Log samples, steps and tokens per second and milliseconds per region, without waiting for the GPU.

    Warm-up steps, steps in which the profiler ran, validation and checkpoints do not count. Rates are over device time
    from event to event (host time without a GPU). Logged are `throughput/samples_per_sec`,
    `throughput/steps_per_sec`, `throughput/optimizer_steps_per_sec`, with `tokens_fn` `throughput/tokens_per_sec`, the
    same of one device under `throughput/device/`, `time/REGION_ms` and, where there is a GPU, `time_host/REGION_ms`.
    Samples and tokens of rank 0 are multiplied by the data-parallel replicas: an estimate where ranks have uneven
    batches. What is logged is what has completed: the last step or two come with the next row. At the end of fit rank 0
    prints a table that ends in a verdict: what bounds the run, and what to change first.

    Args:
        warmup_steps: steps at the start of a fit that do not count: compilation, autotuning, the allocator's first
            blocks, and the batches a loader had prefetched.
        batch_size_fn: samples in a batch; None takes the length of its first tensor.
        tokens_fn: tokens in a batch; None logs no tokens. Neither function should return a tensor on the GPU.
        log_every_n_steps: how often to log; None for the Trainer's `log_every_n_steps`.
        prog_bar: also show samples/s (or steps/s) and the step's time in the progress bar.

    Raises:
        ConfigurationError: a negative or non-integer number of steps, or a function that is none; in `setup`, a second
            callback of this kind.

    Example:
        >>> callback = ThroughputCallback(warmup_steps=20, tokens_fn=lambda batch: batch["input_ids"].numel())
        >>> callback.summary()
        {}
    """

    def __init__(
        self,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        batch_size_fn: Callable[[Any], int] | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        log_every_n_steps: int | None = None,
        prog_bar: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("warmup_steps", warmup_steps), ("log_every_n_steps", log_every_n_steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ConfigurationError(f"{name} must be an integer from 0 on, got {value!r}.")
        for name, function in (("batch_size_fn", batch_size_fn), ("tokens_fn", tokens_fn)):
            if function is not None and not callable(function):
                raise ConfigurationError(f"{name} must be a function of the batch, got {function!r}.")
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn
        self.tokens_fn = tokens_fn
        self.log_every_n_steps = log_every_n_steps
        self.prog_bar = prog_bar
        self._last = Rates()
        self._summary: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """The metrics over all steps that count, of the run under way or else the last one; {} before any.

        Returns:
            The logged names and their values on this process (in a process of its own, as `ddp_spawn` uses, they stay
            there).
        """
        return dict(self._summary)

    def prepare(self, trainer: Trainer) -> None:
        """Forget the last fit."""
        self._last, self._summary = Rates(), {}

    def after_step(self, trainer: Trainer) -> None:
        """Log, when it is time to."""
        if self._recorder is not None and lightning_api.logs_now(trainer, self.log_every_n_steps):
            self._recorder.deliver()
            self._log(trainer, self._recorder.steady(), lightning_api.logger_step(trainer))

    def end(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Log the steps since the last time, and in a run of nothing but warm-up steps those."""
        if self._recorder is not None:
            steady = self._recorder.summary().steady
            self._log(trainer, steady, max(lightning_api.logger_step(trainer) - 1, 0))

    def _metrics(self, trainer: Trainer, rates: Rates) -> dict[str, float]:
        on_device = self._recorder is not None and self._recorder.timers.on_device
        return rates.metrics(replicas=lightning_api.replicas(trainer), on_device=on_device)

    def _log(self, trainer: Trainer, steady: Rates, step: int) -> None:
        rates, self._last = steady.since(self._last), steady
        if not rates.steps:
            return
        self._summary = self._metrics(trainer, steady)
        metrics = self._metrics(trainer, rates)
        if self.prog_bar:
            shown = ("throughput/samples_per_sec", "throughput/steps_per_sec")
            rate = next((name for name in shown if name in metrics), "time/step_ms")
            trainer.progress_bar_metrics.update({name: metrics[name] for name in (rate, "time/step_ms")})
        if trainer.is_global_zero:
            for logger in trainer.loggers:  # not self.log: it would put each number on the device first
                logger.log_metrics(metrics, step=step)

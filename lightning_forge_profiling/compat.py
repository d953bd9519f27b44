"""DeepSpeed's and Megatron's timers by their names, so that code moves over by changing its import.

Example:
    >>> from lightning_forge_profiling.compat import SynchronizedWallClockTimer
    >>> timers = SynchronizedWallClockTimer()
"""

from collections.abc import Callable, Collection, Iterable
from time import perf_counter
from typing import Any, Protocol, overload

import torch

from lightning_forge_profiling.errors import ConfigurationError, TimerNotStartedError, TimerRunningError

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "print_rank_0"]

_TRIMMED = 0.1  # of the intervals, at either end of `mean()`, as in DeepSpeed


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_rank_0(message: str) -> None:
    """Print on rank 0 only, or always without `torch.distributed`.

    Args:
        message: what to print.

    Examples:
        >>> print_rank_0("epoch done")
        epoch done
    """
    _print_on((0,), message)


def _print_on(ranks: Collection[int], message: str) -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() in ranks:
        print(message, flush=True)  # noqa: T201  (printing is what it is for)


class SynchronizedWallClockTimer:
    """Named host-clock timers that synchronize the GPU at every start and stop.

    Args:
        clock: the clock, in seconds; for tests.

    Examples:
        >>> timers = SynchronizedWallClockTimer()
        >>> timers("forward").start()
        >>> timers("forward").stop()
        >>> timers("forward").elapsed() > 0
        True
    """

    class Timer:
        """One named timer, on its own or made by `timers(name)`."""

        def __init__(self, name: str, clock: Callable[[], float] = perf_counter) -> None:
            self._name = name
            self._clock = clock
            self._intervals: list[float] = []
            self._started_at: float | None = None

        def start(self) -> None:
            """Wait for the GPU, then start.

            Raises:
                TimerRunningError: the timer is running.
            """
            if self._started_at is not None:
                raise TimerRunningError(f"timer {self._name!r}: start() while it is running: call stop() first.")
            synchronize()
            self._started_at = self._clock()

        def stop(self, reset: bool = False, record: bool = False) -> None:  # noqa: ARG002  (DeepSpeed's signature)
            """Wait for the GPU, then stop and add the interval to the sum.

            Args:
                reset: drop the intervals before this one.
                record: no effect: `mean()` covers every interval, as in DeepSpeed.

            Raises:
                TimerNotStartedError: the timer is not running.
            """
            if self._started_at is None:
                raise TimerNotStartedError(f"timer {self._name!r}: stop() without start(): call start() first.")
            synchronize()
            elapsed = self._clock() - self._started_at
            if reset:
                self._intervals.clear()
            self._intervals.append(elapsed)
            self._started_at = None

        def reset(self) -> None:
            """Drop all intervals. A running timer stops without adding one."""
            self._intervals.clear()
            self._started_at = None

        def elapsed(self, reset: bool = True) -> float:
            """Seconds since the last reset. A running timer is included and keeps running.

            Args:
                reset: drop the intervals; a running timer starts again from now.
            """
            elapsed = sum(self._intervals)
            if self._started_at is not None:
                synchronize()
                now = self._clock()
                elapsed += now - self._started_at
                if reset:
                    self._started_at = now
            if reset:
                self._intervals.clear()
            return elapsed

        def mean(self) -> float:
            """Seconds per interval since the last reset: the mean without the longest and shortest 10 %.

            0.0 without a completed interval.
            """
            cut = round(len(self._intervals) * _TRIMMED)
            kept = sorted(self._intervals)[cut : len(self._intervals) - cut]
            return sum(kept) / len(kept) if kept else 0.0

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer of that name, made on its first use."""
        if name not in self.timers:
            self.timers[name] = self.Timer(name, self._clock)
        return self.timers[name]

    def get_timers(self) -> dict[str, Timer]:
        """All timers by name."""
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Print milliseconds on rank 0, as `time (ms) | forward: 12.30 | backward: 24.60`.

        Args:
            names: the timers, in this order; names without a timer are left out.
            normalizer: divides the times, such as the number of steps.
            reset: reset the timers that are printed.
            memory_breakdown: add `memory_usage()` to the line.
            ranks: the ranks that print, instead of rank 0.

        Raises:
            ValueError: `normalizer` is not positive.
        """
        _refuse_normalizer(normalizer)
        line = "time (ms)"
        for name in names:
            if name in self.timers:
                line += f" | {name}: {self.timers[name].elapsed(reset=reset) * 1e3 / normalizer:.2f}"
        _print_on(ranks or (0,), line + (self.memory_usage() if memory_breakdown else ""))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:  # noqa: ARG002  (DeepSpeed's signature)
        """Mean milliseconds per interval, by name.

        Args:
            names: the timers; names without a timer are left out.
            normalizer: divides the times.
            reset: no effect, as in DeepSpeed.

        Raises:
            ValueError: `normalizer` is not positive.
        """
        _refuse_normalizer(normalizer)
        return {name: self.timers[name].mean() * 1e3 / normalizer for name in names if name in self.timers}

    @staticmethod
    def memory_usage() -> str:
        """GiB of the current GPU that tensors and PyTorch's allocator take, now and at the peak, as text."""
        figures = {
            "mem_allocated": torch.cuda.memory_allocated(),
            "max_mem_allocated": torch.cuda.max_memory_allocated(),
            "cache_allocated": torch.cuda.memory_reserved(),
            "max_cache_allocated": torch.cuda.max_memory_reserved(),
        }
        return "".join(f" | {name}: {used / 2**30:.4f} GB" for name, used in figures.items())


def _refuse_normalizer(normalizer: float) -> None:
    if not normalizer > 0:
        raise ValueError(f"normalizer must be positive, got {normalizer}.")


class ThroughputTimerConfig(Protocol):
    """What `ThroughputTimer` reads of DeepSpeed's configuration of it (`timers.throughput`)."""

    enabled: bool
    synchronized: bool


class ThroughputTimer:
    """Average samples and steps per second, with the signature of early or of current DeepSpeed.

    With a `config` first it is the timer of DeepSpeed since 0.14: `stop(global_step=True)` ends a step, and any other
    `stop()` a micro-step of it. Otherwise it is the timer of early DeepSpeed, where each `stop()` ends a step. Averages
    are over the timed steps; the first steps are not timed.

    Args:
        name: the name in the line that `print_elapsed_time` prints.
        batch_size: samples per step: of one worker, or of all of them with a `config`.
        num_workers: number of workers with such a batch each.
        start_step: 2 leaves out the first step; with a `config` the first two.
        config: DeepSpeed's `timers.throughput`. If not `enabled`, nothing is timed; if not `synchronized`, nothing
            waits for the GPU.
        steps_per_output: log a line every this many steps; None for no lines.
        monitor_memory: must be False: the host's memory is not monitored.
        logging_fn: receives the line instead of `print_rank_0`.
        clock: the clock, in seconds; for tests.

    Raises:
        TypeError: the first argument is neither a name nor a `config`.
        ConfigurationError: `monitor_memory` is True, or `steps_per_output` is not positive.

    Examples:
        >>> ticks = iter([0.0, 9.0, 10.0, 12.0, 20.0, 22.0])
        >>> timer = ThroughputTimer(batch_size=8, clock=lambda: next(ticks))
        >>> for _ in range(3):
        ...     timer.start()
        ...     timer.stop()
        >>> timer.avg_samples_per_sec()
        4.0
    """

    LOG_EVERY = 1000  # steps, of `print_elapsed_time`

    @overload
    def __init__(
        self,
        name: str | None = None,
        batch_size: int = 1,
        num_workers: int = 1,
        start_step: int = 2,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: ThroughputTimerConfig,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None: ...

    def __init__(self, *args: Any, clock: Callable[[], float] = perf_counter, **options: Any) -> None:
        self.global_step_count = self.micro_step_count = self.epoch_count = 0
        self.total_elapsed_time = self._step_time = 0.0
        self._clock = clock
        self._started_at: float | None = None
        self.config: ThroughputTimerConfig | None = None
        self.name: str | None = None
        self.num_workers = 1
        self.steps_per_output: int | None = None
        self._log: Callable[[str], object] = print_rank_0
        if "config" in options or (args and not isinstance(args[0], str | None)):
            self._set_up_with_config(*args, **options)
        else:
            self._set_up_early(*args, **options)

    def _set_up_early(
        self, name: str | None = None, batch_size: int = 1, num_workers: int = 1, start_step: int = 2
    ) -> None:
        self.name = name
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._untimed = max(start_step - 1, 0)
        self._too_few = 3, -999.0  # until so many steps, this

    def _set_up_with_config(  # noqa: PLR0917  (DeepSpeed's signature)
        self,
        config: ThroughputTimerConfig,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        if not (hasattr(config, "enabled") and hasattr(config, "synchronized")):
            raise TypeError(
                "ThroughputTimer: the first argument must be a name or a config with `enabled` and `synchronized`, "
                f"got {type(config).__name__}."
            )
        if monitor_memory:
            raise ConfigurationError("ThroughputTimer does not monitor the host's memory: leave monitor_memory=False.")
        if steps_per_output is not None and steps_per_output <= 0:
            raise ConfigurationError(f"steps_per_output must be positive or None, got {steps_per_output}.")
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self._untimed = start_step
        self._too_few = 1, float("-inf")
        self.steps_per_output = steps_per_output
        self._log = self._log if logging_fn is None else logging_fn

    def update_epoch_count(self) -> None:
        """Begin the next epoch: micro-steps in the logged line are counted from 0 again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self, cond: bool = True) -> None:
        """Wait for the GPU and start a step or micro-step; does nothing when `cond` is False."""
        if cond and self._enabled:
            self._started_at = self._now()

    def stop(self, cond: bool | None = None, report_speed: bool = True, *, global_step: bool = False) -> None:
        """Wait for the GPU and stop.

        Args:
            cond: early DeepSpeed's argument: False does nothing. With a `config` the first argument is `global_step`.
            report_speed: log the line that `steps_per_output` asks for.
            global_step: with a `config`: this ends a step.

        Raises:
            TimerNotStartedError: `start()` was not called.
        """
        if not self._enabled or (self.config is None and cond is False):
            return
        if self._started_at is None:
            raise TimerNotStartedError("ThroughputTimer.stop() without start(): call start() before the step.")
        self._step_time += self._now() - self._started_at
        self._started_at = None
        self.micro_step_count += 1
        if self.config is None or global_step or cond:
            self._end_step(report_speed)

    def _end_step(self, report_speed: bool) -> None:
        self.global_step_count += 1
        step_time, self._step_time = self._step_time, 0.0
        if self._timed > 0:
            self.total_elapsed_time += step_time
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._log(self._speed(step_time))

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all workers; with too few steps -999, or -inf with a `config`."""
        steps_per_sec = self.avg_steps_per_sec()
        return (
            steps_per_sec if steps_per_sec == self._too_few[1] else steps_per_sec * self.batch_size * self.num_workers
        )

    def avg_steps_per_sec(self) -> float:
        """Steps per second; with too few steps -999, or -inf with a `config`."""
        fewest_steps, too_few = self._too_few
        if self.global_step_count < fewest_steps or self.total_elapsed_time <= 0:
            return too_few
        return self._timed / self.total_elapsed_time

    def print_elapsed_time(self, num_ops: float | None = None) -> None:
        """Print the mean time of a step, every 1000 steps.

        Args:
            num_ops: floating-point operations per step, to print TFLOP/s.
        """
        steps_per_sec = self.avg_steps_per_sec()
        if steps_per_sec == self._too_few[1] or self.global_step_count % self.LOG_EVERY:
            return
        name = self.name or "ThroughputTimer"
        line = f"{name}: {1e3 / steps_per_sec:.3f} ms per step after {self.global_step_count} steps"
        if num_ops is not None:
            line += f", {num_ops * steps_per_sec / 1e12:.2f} TFLOP/s"
        print_rank_0(line)

    @property
    def _enabled(self) -> bool:
        return self.config is None or self.config.enabled

    @property
    def _timed(self) -> int:
        return max(self.global_step_count - self._untimed, 0)

    def _now(self) -> float:
        if self.config is None or self.config.synchronized:
            synchronize()
        return self._clock()

    def _speed(self, step_time: float) -> str:
        """The line that `steps_per_output` asks for, with DeepSpeed's keys, which programs search logs for."""
        return (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / step_time if step_time > 0 else float('inf')}, "
            f"MemAllocated={torch.cuda.memory_allocated() / 2**30:.2f}GB, "
            f"MaxMemAllocated={torch.cuda.max_memory_allocated() / 2**30:.2f}GB"
        )

"""Wall-clock timers with the names and signatures of DeepSpeed's and Megatron's, for code that moves over.

They wait for the GPU at every start and stop, by design: that is what makes a host clock right, and what slows the
run they measure. For a training loop use `CUDATimerCollection`; docs/timers.md shows both on the same loop.
"""

from collections.abc import Callable, Iterable
from time import perf_counter

import torch

from lightning_forge_profiling.errors import TimerNotStartedError, TimerRunningError, UnknownRegionError

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "print_rank_0"]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_rank_0(message: str) -> None:
    """Print on rank 0 only, or always where `torch.distributed` is not in use.

    Args:
        message: what to print.

    Example:
        >>> print_rank_0("epoch done")
        epoch done
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
        print(message, flush=True)  # noqa: T201  (printing is what it is for)


class SynchronizedWallClockTimer:
    """Named host-clock timers that synchronize the GPU at every start and stop.

    Args:
        clock: the clock, in seconds; for tests.

    Example:
        >>> timers = SynchronizedWallClockTimer()
        >>> timers("forward").start()
        >>> timers("forward").stop()
        >>> timers("forward").elapsed() > 0
        True
    """

    class Timer:
        """One named timer; `timers(name)` makes it, and it works without a group too.

        Args:
            name: what its errors call it.
            clock: the clock, in seconds; for tests.

        Example:
            >>> timer = SynchronizedWallClockTimer.Timer("forward")
            >>> timer.start()
            >>> timer.stop()
            >>> timer.elapsed() > 0
            True
        """

        def __init__(self, name: str, clock: Callable[[], float] = perf_counter) -> None:
            self._name = name
            self._clock = clock
            self._elapsed = 0.0
            self._started_at: float | None = None

        def start(self) -> None:
            """Wait for the GPU, then start.

            Raises:
                TimerRunningError: the timer is running.
            """
            if self._started_at is not None:
                raise TimerRunningError(f"timer {self._name!r}: start() while it is running: call stop() first.")
            _synchronize()
            self._started_at = self._clock()

        def stop(self, reset: bool = False) -> None:
            """Wait for the GPU, then stop and add the time to the sum.

            Args:
                reset: start a new sum with this time.

            Raises:
                TimerNotStartedError: the timer is not running.
            """
            if self._started_at is None:
                raise TimerNotStartedError(f"timer {self._name!r}: stop() without start(): call start() first.")
            _synchronize()
            elapsed = self._clock() - self._started_at
            self._elapsed = elapsed if reset else self._elapsed + elapsed
            self._started_at = None

        def reset(self) -> None:
            """Set the sum to zero; a running timer is abandoned."""
            self._elapsed = 0.0
            self._started_at = None

        def elapsed(self, reset: bool = True) -> float:
            """Seconds summed up so far. A running timer is read and goes on.

            Args:
                reset: start a new sum.
            """
            running = self._started_at is not None
            if running:
                self.stop()
            elapsed = self._elapsed
            if reset:
                self.reset()
            if running:
                self.start()
            return elapsed

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer of that name, made on its first use."""
        if name not in self.timers:
            self.timers[name] = self.Timer(name, self._clock)
        return self.timers[name]

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print milliseconds of some timers on rank 0, as `time (ms) | forward: 12.30 | backward: 24.60`.

        Args:
            names: which timers, in this order.
            normalizer: what to divide by, such as the number of steps.
            reset: start new sums.

        Raises:
            ValueError: `normalizer` is not positive.
            UnknownRegionError: no timer of that name was ever used.
        """
        if normalizer <= 0:
            raise ValueError(f"normalizer must be positive, got {normalizer}.")
        line = "time (ms)"
        for name in names:
            if name not in self.timers:
                raise UnknownRegionError(f"Unknown timer {name!r}. Used so far: {', '.join(self.timers) or 'none'}.")
            line += f" | {name}: {self.timers[name].elapsed(reset=reset) * 1e3 / normalizer:.2f}"
        print_rank_0(line)


class ThroughputTimer:
    """Average samples and steps per second over the steps that count.

    Steps are counted as they stop; the time of those before step number `start_step` (counted from 1) is left out,
    and the averages divide by the steps that were timed.

    Args:
        name: what the log line calls it.
        batch_size: samples per step and worker.
        num_workers: how many workers do the same beside this one.
        start_step: the first step whose time counts. At its default, 2, only the first step is warm-up.
        clock: the clock, in seconds; for tests.

    Example:
        >>> ticks = iter([0.0, 9.0, 10.0, 12.0, 20.0, 22.0])
        >>> timer = ThroughputTimer(batch_size=8, clock=lambda: next(ticks))
        >>> for _ in range(3):
        ...     timer.start()
        ...     timer.stop()
        >>> timer.avg_samples_per_sec()
        4.0
    """

    MIN_STEPS = 3
    """Averages and the log line need this many steps, as in DeepSpeed."""
    NOT_YET = -999
    """What the averages are until then."""
    LOG_EVERY = 1000
    """`print_elapsed_time` logs at multiples of this many steps."""

    def __init__(
        self,
        name: str | None = None,
        batch_size: int = 1,
        num_workers: int = 1,
        start_step: int = 2,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = name
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.start_step = start_step
        self.count = 0
        self.total_elapsed_time = 0.0
        self._timed = 0
        self._clock = clock
        self._started_at: float | None = None

    def start(self, cond: bool = True) -> None:
        """Wait for the GPU and start a step; nothing happens when `cond` is False."""
        if cond:
            _synchronize()
            self._started_at = self._clock()

    def stop(self, cond: bool = True) -> None:
        """Wait for the GPU and end the step; nothing happens when `cond` is False.

        Raises:
            TimerNotStartedError: no step was started.
        """
        if not cond:
            return
        if self._started_at is None:
            raise TimerNotStartedError("ThroughputTimer.stop() without start(): call start() before the step.")
        _synchronize()
        elapsed = self._clock() - self._started_at
        self._started_at = None
        self.count += 1
        if self.count >= self.start_step:
            self.total_elapsed_time += elapsed
            self._timed += 1

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all workers, or -999 while there are too few steps."""
        steps_per_sec = self.avg_steps_per_sec()
        return steps_per_sec if steps_per_sec == self.NOT_YET else steps_per_sec * self.batch_size * self.num_workers

    def avg_steps_per_sec(self) -> float:
        """Steps per second, or -999 while there are too few steps."""
        if self.count < self.MIN_STEPS or not self._timed or self.total_elapsed_time <= 0:
            return self.NOT_YET
        return self._timed / self.total_elapsed_time

    def print_elapsed_time(self, num_ops: float | None = None) -> None:
        """Log the mean time of a step, every 1000 steps.

        Args:
            num_ops: floating-point operations of one step, for TFLOP/s.
        """
        steps_per_sec = self.avg_steps_per_sec()
        if steps_per_sec == self.NOT_YET or self.count % self.LOG_EVERY:
            return
        line = f"{self.name or 'ThroughputTimer'}: {1e3 / steps_per_sec:.3f} ms per step after {self.count} steps"
        if num_ops is not None:
            line += f", {num_ops * steps_per_sec / 1e12:.2f} TFLOP/s"
        print_rank_0(line)

"""Host-clock timers that synchronize the GPU, with DeepSpeed's names: `SynchronizedWallClockTimer` and its `Timer`.

They wait for the GPU at every start and stop. That makes a host clock right, and slows down the run that they measure.
For a training loop use `CUDATimerCollection`; docs/timers.md shows both on the same loop.
"""

from collections.abc import Callable, Collection, Iterable
from time import perf_counter

import torch

from lightning_forge_profiling.errors import TimerNotStartedError, TimerRunningError

_TRIMMED = 0.1
"""The share of the intervals that `mean()` leaves out at either end, as DeepSpeed does."""


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_rank_0(message: str) -> None:
    """Print on rank 0 only, or always without `torch.distributed`.

    Args:
        message: what to print.

    Example:
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

    Example:
        >>> timers = SynchronizedWallClockTimer()
        >>> timers("forward").start()
        >>> timers("forward").stop()
        >>> timers("forward").elapsed() > 0
        True
    """

    class Timer:
        """One named timer, on its own or made by `timers(name)`.

        Args:
            name: the name in error messages.
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
        for name, timer in self._known(names).items():
            line += f" | {name}: {timer.elapsed(reset=reset) * 1e3 / normalizer:.2f}"
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
        return {name: timer.mean() * 1e3 / normalizer for name, timer in self._known(names).items()}

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

    def _known(self, names: Iterable[str]) -> dict[str, Timer]:
        return {name: self.timers[name] for name in names if name in self.timers}


def _refuse_normalizer(normalizer: float) -> None:
    if not normalizer > 0:
        raise ValueError(f"normalizer must be positive, got {normalizer}.")

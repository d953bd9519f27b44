"""DeepSpeed's and Megatron's timers by their names, so that code moves over by changing its import.

Example:
    >>> from lightning_forge_profiling.compat import SynchronizedWallClockTimer
    >>> timers = SynchronizedWallClockTimer()
"""

from lightning_forge_profiling.timing.throughput_timer import ThroughputTimer
from lightning_forge_profiling.timing.wall_clock import SynchronizedWallClockTimer, print_rank_0

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "print_rank_0"]

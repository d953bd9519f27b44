"""Assembles intervals into steps, and holds the times of one step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from lightning_forge_profiling.names import BETWEEN_EPOCHS, EXCLUDED, REGIONS, WHOLE


class Interval(NamedTuple):
    """One completed start-to-stop of a region."""

    region: str
    tag: int
    """The value of `CUDATimerCollection.tag` at the stop; the callbacks use the step's number."""
    device_ms: float
    """Milliseconds between the two events on the GPU's timeline (on the host clock without a GPU)."""
    host_ms: float
    """Milliseconds on the host between the two calls."""


# begins the name of an interval in which the host is behind: only what the GPU takes longer than the host counts
HOST_BEHIND: Final = "host behind/"

_WITHIN_STEP: Final = frozenset((*REGIONS, *BETWEEN_EPOCHS, WHOLE))

NAMED_BY_LOOP: Final = (*(region for region in REGIONS if region != "other"), "validation", "checkpoint")
"""The reserved names that a plain loop may give its regions, as nothing else announces them there."""


class StepTimes(NamedTuple):
    """The times of one step, in milliseconds by region name."""

    step: int  # its number, counted from 0 at the start of the fit
    # device time of every region that ran (host time where there is no GPU), the excluded ones and the user's included
    device_ms: Mapping[str, float] = MappingProxyType({})
    host_ms: Mapping[str, float] = MappingProxyType({})  # host time of the same

    @property
    def step_ms(self) -> float:
        """Device time of the step: the sum of the built-in regions, so without validation and checkpoints."""
        return _within_step(self.device_ms)

    @property
    def split(self) -> bool:
        """Whether the regions of the whole step were timed."""
        return WHOLE not in self.device_ms

    def whole(self) -> "StepTimes":
        """The same step without regions: its whole time, and what is not part of it."""
        device_ms, host_ms = (
            {name: ms for name, ms in by.items() if name in EXCLUDED} for by in (self.device_ms, self.host_ms)
        )
        return self._replace(
            device_ms={**device_ms, WHOLE: self.step_ms}, host_ms={**host_ms, WHOLE: _within_step(self.host_ms)}
        )


def _within_step(by_region: Mapping[str, float]) -> float:
    total = 0.0
    for region, ms in by_region.items():  # a loop: this runs each step, and most often over one region
        if region in _WITHIN_STEP:
            total += ms
    return total


class StepWork(NamedTuple):  # made each step, in a fifth of a frozen dataclass's time, as StepTiming is
    """Samples, tokens and FLOPs of one step on this rank."""

    samples: float | None = None  # in the batch; None if unknown
    tokens: float | None = None  # None if not counted
    optimizer_steps: int = 0  # 1 if the weights changed in this step, else 0
    flops: float | None = None  # of the batch; None if unknown
    ends_cycle: bool = True  # the last of an accumulation cycle, as every step is without accumulation


class StepTiming(NamedTuple):
    """How one step was timed."""

    # whether the GPU had finished all but the optimizer's update when the host ended the step; None if unknown
    gpu_starved: bool | None = None
    # whether its regions were timed by choice, so that it can represent steps that were not split; False where it had
    # to be split, as the first step after a validation run
    chosen: bool = True
    timing_us: float = 0.0  # host time in microseconds that timing it took
    before_fetch_ms: float = 0.0  # host time from its beginning to its fetch, if its regions were timed
    all_boundaries_seen: bool = True  # were announced; otherwise only the whole step is valid
    ended_ns: int = 0  # when it ended, by the host's clock; 0 if unknown


class StepAssembler:
    """Groups intervals by their tag. A step is complete when the first interval of a later one arrives."""

    def __init__(self) -> None:
        self.step: int | None = None  # the one under way
        self._device: dict[str, float] = {}
        self._host: dict[str, float] = {}

    def add(self, interval: Interval) -> StepTimes | None:
        """Add one interval, in the order in which they end; returns the step that it completes, if any."""
        region, tag, device_ms, host_ms = interval
        done = None
        if tag != self.step:
            done = self.flush()
            self.step = tag
        if region.startswith(HOST_BEHIND):
            region, device_ms = region.removeprefix(HOST_BEHIND), max(device_ms - host_ms, 0.0)
        self._device[region] = self._device.get(region, 0.0) + device_ms
        self._host[region] = self._host.get(region, 0.0) + host_ms
        return done

    def flush(self) -> StepTimes | None:
        """The current step as far as it is known, if there is one."""
        done = None if self.step is None else StepTimes(self.step, self._device, self._host)
        self.step, self._device, self._host = None, {}, {}
        return done

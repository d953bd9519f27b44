"""What the callbacks are told to do: frozen objects, checked where they are built."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite
from numbers import Real
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory import validate_snapshot_step
from lightning_forge_profiling.gpu.telemetry import DEFAULT_PERIOD_S
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.profiler.config import STEADY_STEPS, ProfilingConfig, StepWindow
from lightning_forge_profiling.timing.completed_steps import DEFAULT_SHARE

# compilation, autotuning and lazy initialization happen in the first step or two, the allocator's pools settle within a
# few, and a loader with four workers has eight batches ready at the start that it will never have again
DEFAULT_WARMUP_STEPS: Final = 10

_SHORTEST_PERIOD_S: Final = 0.01  # NVML needs 1 ms or more per sample; a shorter period adds cost, not information
_LOWEST_SHARE: Final = 1e-6

FlopsPerBatch: TypeAlias = float | Callable[[Any], float] | None


@dataclass(frozen=True, kw_only=True)
class TimingSettings:
    """What callbacks of both kinds are told; those of a script know it from `run` alone."""

    # whether `forge-profiling run` added it: then it gives way to others of its kind, and refuses nothing
    injected_by_cli: bool = False
    # False under `run`: the loggers are the script's, and of fits of equal modules the first alone is printed in full
    of_script: bool = True
    batch_size_fn: Callable[[Any], float] | None = None

    @property
    def enabled(self) -> bool:
        """Whether the callback does anything."""
        return True

    def under_run(self) -> Self:
        """The settings of a callback that `forge-profiling run` adds."""
        return replace(self, injected_by_cli=True, of_script=False)


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings(TimingSettings):
    """The arguments of `ThroughputCallback`, which describes them."""

    warmup_steps: int = DEFAULT_WARMUP_STEPS
    tokens_fn: Callable[[Any], float] | None = None
    log_every_n_steps: int | None = None
    prog_bar: bool = False
    flops_per_batch: FlopsPerBatch = None
    peak_flops: float | None = None
    telemetry_period_s: float | None = DEFAULT_PERIOD_S
    overhead: float | None = DEFAULT_SHARE
    record: bool = True
    window: Literal["on-demand"] | None = None
    publish: bool = True
    # log entries at the Trainer's own interval come at most this often: TensorBoard alone takes 0.6 ms for one
    log_period_s: float = 1.0
    shares_period_s: float = 10.0  # they have the shares of the run at most this often, and the first and the last one

    def __post_init__(self) -> None:
        if self.window not in {None, "on-demand"}:
            raise ConfigurationError(f'window must be "on-demand" or None, got {self.window!r}.')
        _refuse_unless_integer("warmup_steps", self.warmup_steps)
        _refuse_unless_integer("log_every_n_steps", 0 if self.log_every_n_steps is None else self.log_every_n_steps)
        _refuse_unless_function("batch_size_fn", self.batch_size_fn)
        _refuse_unless_function("tokens_fn", self.tokens_fn)
        if not callable(self.flops_per_batch):
            _refuse_unless_operations("flops_per_batch", self.flops_per_batch)
        _refuse_unless_operations("peak_flops", self.peak_flops)
        _refuse_unless_between(
            _SHORTEST_PERIOD_S,
            self.telemetry_period_s,
            inf,
            f"telemetry_period_s must be a number of seconds from {_SHORTEST_PERIOD_S} on, or None for no telemetry",
        )
        _refuse_unless_between(
            _LOWEST_SHARE,
            self.overhead,
            1,
            "overhead must be a share of the step between 0 and 1, as 0.005 for half a percent, or None to split every "
            "step into regions",
        )


@dataclass(frozen=True, kw_only=True)
class RecordingSettings(TimingSettings):
    """The arguments of `ForgeProfilerCallback`, which describes them."""

    config: ProfilingConfig
    window: StepWindow | None = None  # None: once the run is steady
    default_dir: bool = True  # whether the traces' folder is one in the logger's
    regions: Collection[str] = REGIONS
    ranks: Literal["all"] | Collection[int] = "all"
    every: int | None = None
    when: Literal["slow"] | None = None
    memory_snapshot: Literal["oom"] | int | None = None
    on_demand: bool = False

    def __post_init__(self) -> None:
        if not self.enabled:  # a configuration file may have a disabled section that would not work
            object.__setattr__(self, "regions", REGIONS)
            object.__setattr__(self, "ranks", "all")
            return
        _refuse_unless_list("regions must be a list of names", self.regions)
        object.__setattr__(self, "regions", tuple(self.regions))
        if self.every is not None and not (type(self.every) is int and self.every > STEADY_STEPS):
            raise ConfigurationError(f"every must be a number of steps above {STEADY_STEPS}, got {self.every!r}.")
        if self.when not in {None, "slow"}:
            raise ConfigurationError(f'when must be "slow" or None, got {self.when!r}.')
        if self.memory_snapshot is not None:
            validate_snapshot_step(self.memory_snapshot)
        unknown = [region for region in self.regions if region not in REGIONS]
        if unknown:
            raise ConfigurationError(
                f"Unknown regions {unknown}; known are {', '.join(REGIONS)}. "
                'Custom regions need no list: write `with region("name"):` in the module.'
            )
        if self.ranks != "all":
            _refuse_unless_list('ranks must be "all" or a list of global ranks', self.ranks)
            ranks = tuple(self.ranks)
            object.__setattr__(self, "ranks", ranks)
            if not (ranks and all(type(rank) is int and rank >= 0 for rank in ranks)):
                raise ConfigurationError(f'ranks must be "all" or global ranks from 0 on, got {list(ranks)!r}.')

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self.config.enable


Kind = TypeVar("Kind", ThroughputSettings, RecordingSettings)


@dataclass(frozen=True, slots=True)
class FitSettings:
    """What the callbacks of one fit ask for together, at most one of each kind."""

    callbacks: tuple[TimingSettings, ...]
    timing_only: bool = False  # whether this fit is timed only: no window, no record, one line

    def _of(self, kind: type[Kind]) -> Kind | None:
        return next((each for each in self.callbacks if isinstance(each, kind)), None)

    @property
    def throughput(self) -> ThroughputSettings | None:
        """Those of the `ThroughputCallback`; None without one."""
        return self._of(ThroughputSettings)

    @property
    def recording(self) -> RecordingSettings | None:
        """Those of the windows; None if none is recorded, not even when asked."""
        throughput, recording = self.throughput, self._of(RecordingSettings)
        asked = throughput is not None and throughput.window == "on-demand"
        return None if self.timing_only else recording or (_when_asked() if asked else None)

    @property
    def warmup_steps(self) -> int:
        """Steps at the start of the fit that do not count."""
        return DEFAULT_WARMUP_STEPS if self.throughput is None else self.throughput.warmup_steps

    @property
    def overhead(self) -> float | None:
        """The share of a step that timing may cost."""
        return DEFAULT_SHARE if self.throughput is None else self.throughput.overhead

    @property
    def regions(self) -> frozenset[str]:
        """The regions to time."""
        recording = self._of(RecordingSettings)
        return frozenset(REGIONS if recording is None else recording.regions)

    @property
    def batch_size_fn(self) -> Callable[[Any], float] | None:
        """The function that counts a batch's samples."""
        return next((each.batch_size_fn for each in self.callbacks if each.batch_size_fn is not None), None)

    @property
    def keeps_record(self) -> bool:
        """Whether the run's record is written."""
        return self.throughput is not None and self.throughput.record

    @property
    def all_added(self) -> bool:
        """Whether the script itself has none of the callbacks."""
        return all(each.injected_by_cli for each in self.callbacks)


# smaller values are a mistake of unit: the lowest plausible value, and an example of a right one
_OPERATIONS: Final = {
    "flops_per_batch": (1e3, "operations, as 2.5e12"),
    "peak_flops": (1e9, "operations a second, as 989e12"),
}


def _refuse_unless_between(lowest: float, value: float | None, above: float, rule: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and lowest <= value < above):
        raise ConfigurationError(f"{rule}; got {value!r}.")


def _refuse_unless_function(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} must be a function of the batch, got {value!r}.")


def _refuse_unless_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{name} must be an integer >= 0, got {value!r}.")


def _refuse_unless_list(what: str, value: object) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{what}, got {value!r}.")


def _refuse_unless_operations(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not isfinite(value) or value <= 0:
        got = f"a {type(value).__name__}: give its .total" if hasattr(value, "total") else repr(value)
        raise ConfigurationError(f"{name} must be a number of operations above 0, got {got}.")
    fewest, unit = _OPERATIONS[name]
    if value < fewest:
        raise ConfigurationError(f"{name} is in {unit}; got {value!r}.")


@cache
def _when_asked() -> RecordingSettings:
    """Settings that record nothing until a live run is asked for it."""
    return RecordingSettings(config=ProfilingConfig(enable=True), injected_by_cli=True, on_demand=True)

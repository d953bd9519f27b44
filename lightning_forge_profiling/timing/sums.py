"""Sums over the steps of a run, from which its rates follow."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from statistics import median
from typing import Final

from lightning_forge_profiling.names import BETWEEN_EPOCHS, EXCLUDED, LOADER_START, WHOLE
from lightning_forge_profiling.schema import Distribution, Rates, step_ms
from lightning_forge_profiling.timing.rates import StepTiming, StepWork, percentiles
from lightning_forge_profiling.timing.steps import StepTimes

MEDIAN_OVER: Final = 4096  # the median covers at most this many recent steps, which is what is kept of them

# steps of more than so many medians are summed apart: those of one such length say nothing about those of another
_LONG: Final = (2.0, 8.0, 32.0, 128.0)

# the percentiles of regions cover at most this many recent steps of those whose regions were timed
REGIONS_OVER: Final = 1024


# what simply adds up; None for an amount that is unknown
_ADDED: Final = (
    *("steps", "starved", "asked", "optimizer_steps", "loader_starts", "samples", "tokens", "flops"),
    *("timing_us", "log_entries_us", "before_fetch_ms"),
)


class _Times:
    """Sums of the times of some steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.device_ms: dict[str, float] = {}
        self.host_ms: dict[str, float] = {}

    def add(self, steps: int, device_ms: Mapping[str, float], host_ms: Mapping[str, float]) -> None:
        self.steps += steps
        mine = self.device_ms
        for region, ms in device_ms.items():  # two loops: this runs each step
            if region not in EXCLUDED:
                mine[region] = mine.get(region, 0.0) + ms
        mine = self.host_ms
        for region, ms in host_ms.items():
            if region not in EXCLUDED:
                mine[region] = mine.get(region, 0.0) + ms


class _Kind:
    """Steps that are alike: how many were split by choice, with their regions timed, and how many were not."""

    def __init__(self) -> None:
        self.chosen, self.unsplit = _Times(), _Times()

    @property
    def is_known(self) -> bool:
        """Whether steps of this kind were split, if there are any."""
        return bool(self.chosen.steps or not self.unsplit.steps)

    def extrapolated(self) -> _Times:
        """The times of all of them, where unsplit steps divide into regions as the split ones do."""
        both = _Times()
        both.steps = self.chosen.steps + self.unsplit.steps
        both.device_ms = _divided(self.chosen.device_ms, self.unsplit.device_ms)
        both.host_ms = _divided(self.chosen.host_ms, self.unsplit.host_ms)
        return both


class Typical:
    """The median of recent step times, renewed now and then."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=63)
        self._count, self._ms = 0, inf

    def length(self, ms: float) -> int:
        """How long the next step is: 0 as usual, else how many of the limits it exceeds."""
        self._latest.append(ms)
        self._count = count = self._count + 1
        if not count & (count - 1) or not count % 32:
            self._ms = median(self._latest)
        return bisect_left(_LONG, ms / self._ms) if self._ms else 0


class StepSums:
    """Running sums from which rates and spread follow.

    Steps are split by choice, with their regions timed; unsplit, of which only the end was timed and whose regions are
    estimated from those; or forced, which had to be split, as the first after a validation run, and represent no
    others. Steps that change the weights and steps that accumulate gradients are summed apart, since their regions
    differ most, and so are long ones: one of them among few split steps would else stand for a part of all.
    """

    def __init__(
        self,
        regions: tuple[str, ...],
        bucket: Callable[[float], int] | None = None,
        typical: tuple[Typical, Typical] | None = None,
    ) -> None:
        self.regions = regions
        self._bucket = bucket
        self._typical = typical or (Typical(), Typical())  # accumulating, changing the weights
        self.histogram: Counter[int] = Counter()
        self.steps = 0
        # of each step how long, and whether weights changed: numbers, which the garbage collector does not count
        self.latest: deque[float] = deque(maxlen=MEDIAN_OVER)
        self.latest_changed: deque[bool] = deque(maxlen=MEDIAN_OVER)
        self.latest_split: deque[tuple[Mapping[str, float], bool]] = deque(maxlen=REGIONS_OVER)  # and whether chosen
        self.shortest_ms, self.longest_ms = float("inf"), 0.0
        self.starved = self.asked = 0
        self.optimizer_steps = 0
        self.samples: float | None = 0.0
        self.tokens: float | None = 0.0
        self.flops: float | None = 0.0
        self.timing_us = self.log_entries_us = self.before_fetch_ms = 0.0
        self.loader_starts = 0
        # accumulating and changing the weights, of each the usual ones and those of each length
        self._kinds = tuple(tuple(_Kind() for _ in range(1 + len(_LONG))) for _ in (False, True))
        self.forced = _Times()

    @property
    def times(self) -> tuple[_Times, ...]:
        """Those of each kind."""
        kinds = [kind for kinds in self._kinds for kind in kinds]
        return (*(kind.chosen for kind in kinds), *(kind.unsplit for kind in kinds), self.forced)

    @property
    def unsplit_steps(self) -> int:
        """How many were not split."""
        return sum(kind.unsplit.steps for kinds in self._kinds for kind in kinds)

    @property
    def _loader_starts_in(self) -> str:
        """The region that loader starts count to."""
        return "data" if "data" in self.regions else "other"

    def add(self, times: StepTimes, took_ms: float, work: StepWork, timing: StepTiming) -> None:
        """Add a step with its time."""
        samples, tokens, optimizer_steps, flops, _ = work
        starved, chosen, timing_us, before_fetch_ms, _, _ = timing
        changes = optimizer_steps > 0
        self.steps += 1
        self.latest.append(took_ms)
        self.latest_changed.append(changes)
        self.shortest_ms = min(self.shortest_ms, took_ms)
        self.longest_ms = max(self.longest_ms, took_ms)
        if self._bucket is not None:
            self.histogram[self._bucket(took_ms)] += 1
        if starved is not None:
            self.starved += starved
            self.asked += 1
        self.optimizer_steps += optimizer_steps
        self.samples = added(self.samples, samples)
        self.tokens = added(self.tokens, tokens)
        self.flops = added(self.flops, flops)
        self.timing_us += timing_us
        self.before_fetch_ms += before_fetch_ms
        self.loader_starts += LOADER_START in times.device_ms
        split = times.split
        if split:
            self.latest_split.append((times.device_ms, chosen))
        kind = self._kinds[changes][self._typical[changes].length(took_ms)]
        of_kind = self.forced if split and not chosen else kind.chosen if split else kind.unsplit
        of_kind.add(1, times.device_ms, times.host_ms)

    def merge(self, other: "StepSums", *, single_steps: bool = True) -> None:
        """Add the sums of later steps."""
        for name in _ADDED:
            setattr(self, name, added(getattr(self, name), getattr(other, name)))
        self.shortest_ms = min(self.shortest_ms, other.shortest_ms)
        self.longest_ms = max(self.longest_ms, other.longest_ms)
        if single_steps:
            self.latest.extend(other.latest)
            self.latest_changed.extend(other.latest_changed)
            self.latest_split.extend(other.latest_split)
            self.histogram.update(other.histogram)
        for mine, theirs in zip(self.times, other.times, strict=True):
            if theirs.steps:
                mine.add(theirs.steps, theirs.device_ms, theirs.host_ms)

    def read(self) -> Rates:
        """The rates so far."""
        forced, unknown = self.forced, _Times()
        kinds = [kind for alike in self._kinds for kind in _known(_apart(alike, unknown))]
        kinds = _known([kind for kind in kinds if kind.chosen.steps or kind.unsplit.steps])
        atypical = any(not kind.is_known for kind in kinds)  # none was split by choice
        if atypical:
            kinds[0].chosen, forced = forced, _Times()
        parts = [kind.extrapolated() for kind in kinds]
        alone = len(parts) == 1 and not forced.steps and not unknown.device_ms
        whole = parts[0] if alone else _merged([*parts, forced, unknown])
        started_ms, started_host_ms = (
            _folded(sums, self._loader_starts_in) for sums in (whole.device_ms, whole.host_ms)
        )
        return Rates(
            device_ms=whole.device_ms,
            host_ms=whole.host_ms,
            regions=self.regions,
            split_steps=self.steps - self.unsplit_steps,
            atypical=atypical,
            unknown_ms=sum(unknown.device_ms.values()),
            unknown_steps=unknown.steps,
            loader_start_ms=started_ms,
            loader_start_host_ms=started_host_ms,
            **{name: getattr(self, name) for name in _ADDED if name not in {"starved", "asked"}},
        )

    def distribution(self, mean_ms: float) -> tuple[Distribution, float]:
        """The distribution of the steps' times, and the mean of typical ones (see `RunSummary.typical_mean_ms`)."""
        if not self.latest:
            return Distribution(), 0.0
        latest = [*zip(self.latest, self.latest_changed, strict=True)]
        kinds = [[ms for ms, changes in latest if changes is kind] for kind in (False, True)]
        counts = (self.steps - self.optimizer_steps, self.optimizer_steps)
        known = [(count, median(times)) for count, times in zip(counts, kinds, strict=True) if times]
        typical_mean_ms = sum(count * ms for count, ms in known) / max(sum(count for count, _ in known), 1)
        p50, p95 = percentiles(list(self.latest))
        return Distribution(mean=mean_ms, p50=p50, min=self.shortest_ms, max=self.longest_ms, p95=p95), typical_mean_ms

    def region_percentiles(self) -> dict[str, tuple[float, float | None]]:
        """Percentiles of each region, the user's included, per step: 0 in a step without it."""
        # if some steps are unsplit, the forced ones are left out: they would count too often.
        only_chosen = self.unsplit_steps > 0 and any(chosen for _, chosen in self.latest_split)
        steps = [dict(times_ms) for times_ms, chosen in self.latest_split if chosen or not only_chosen]
        for times_ms in steps:
            _folded(times_ms, self._loader_starts_in)
        ran = (name for times_ms in steps for name in times_ms if name not in EXCLUDED)
        names = dict.fromkeys((*self.regions, *ran) if steps else ())
        return {name: percentiles([times_ms.get(name, 0.0) for times_ms in steps]) for name in names}

    @property
    def gpu_starved_pct(self) -> float | None:
        """Percentage of steps at whose end the GPU waited for the host; None if unknown."""
        return 100 * self.starved / self.asked if self.asked else None


def _merged(several: Iterable[_Times]) -> _Times:
    merged = _Times()
    for times in several:
        merged.add(times.steps, times.device_ms, times.host_ms)
    return merged


def _apart(kinds: tuple[_Kind, ...], unknown: _Times) -> tuple[_Kind, ...]:
    """The kinds. Where none of the long ones was split, what they take more than usual is added to `unknown`."""
    normal, *long = kinds
    if not normal.chosen.steps:
        return kinds
    for kind in long:
        if not kind.is_known:
            normal = _with_unknown(normal, kind, unknown)
    return normal, *(kind for kind in long if kind.is_known)


def _with_unknown(normal: _Kind, long: _Kind, unknown: _Times) -> _Kind:
    """Usual steps with long ones that nobody knows, which count as usual; the rest goes to `unknown`."""
    together, steps = _Kind(), long.unsplit.steps
    together.chosen = normal.chosen
    like: list[dict[str, float]] = []
    for name in ("device_ms", "host_ms"):
        took = sum(step_ms(getattr(times, name)) for times in (normal.chosen, normal.unsplit))
        usual_ms = steps * took / (normal.chosen.steps + normal.unsplit.steps)
        of_long = getattr(long.unsplit, name)
        more_ms = max(step_ms(of_long) - usual_ms, 0.0)
        like.append({**of_long, WHOLE: of_long.get(WHOLE, 0.0) - more_ms})
        getattr(unknown, name)["other"] = getattr(unknown, name).get("other", 0.0) + more_ms
    unknown.steps += steps
    together.unsplit = _merged([normal.unsplit])
    together.unsplit.add(steps, *like)
    return together


def _known(kinds: Sequence[_Kind]) -> list[_Kind]:
    """The kinds of steps; all of them as one if none of a kind was split."""
    if all(kind.is_known for kind in kinds):
        return list(kinds)
    together = _Kind()
    together.chosen = _merged(kind.chosen for kind in kinds)
    together.unsplit = _merged(kind.unsplit for kind in kinds)
    return [together]


def _divided(chosen: Mapping[str, float], unsplit: Mapping[str, float]) -> dict[str, float]:
    chosen_ms = step_ms(chosen)
    if not chosen_ms:
        return dict(unsplit)
    factor = 1 + step_ms(unsplit) / chosen_ms
    divided = {region: factor * ms for region, ms in chosen.items()}
    for part in BETWEEN_EPOCHS:  # in its own step alone
        if part in chosen or part in unsplit:
            divided[part] = chosen.get(part, 0.0) + unsplit.get(part, 0.0)
    return divided


def _folded(sums: dict[str, float], into: str) -> float:
    """Move the time of loader starts and ends to another region; returns that time."""
    started_ms = sum(sums.pop(part, 0.0) for part in BETWEEN_EPOCHS)
    if started_ms:
        sums[into] = sums.get(into, 0.0) + started_ms
    return started_ms


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def added(one: float | None, other: float | None) -> float | None:
    """The sum; None if a summand is unknown."""
    return None if one is None or other is None else one + other

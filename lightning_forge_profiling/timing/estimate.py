"""What steps that were not split into regions lack: one estimate for summary, watch, compare and page.

Splitting each step costs too much where steps are short, so the regions of some are timed, and of the others only the
whole step. The regions of all follow by the regression estimator of survey sampling: W. G. Cochran, Sampling Techniques
(3rd edition, 1977), sections 7.2 to 7.4, with the step's time as the auxiliary variable that is known of every step. A
region's mean over all steps is its mean over the split ones plus its slope times what the mean step is longer than the
mean split step. The slopes of the built-in regions sum to 1, so the regions tile the step. Kinds of steps (see
`counters.KINDS`) are strata, each with an estimate of its own (section 7.10).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Final, NamedTuple

from lightning_forge_profiling.names import REGIONS, RESERVED, WAIT_PREFIX, WHOLE, hook_region
from lightning_forge_profiling.schema import (
    Distribution,
    RunRegion,
    RunTiming,
    StepCounters,
    StepGroup,
    WorkerRestarts,
)
from lightning_forge_profiling.timing.counters import FORCED, KINDS, add_group, known, total

# fewer split steps, or some that differ from the others by more than twice their own deviation, do not show a slope:
# then a region grows with the step, which is the ratio estimator (Cochran, chapter 6)
_ENOUGH: Final = 8
_BEYOND: Final = 2.0
# of less long split steps, each is taken to be of one region alone for the error
_ENOUGH_LONG: Final = 5
_NOTHING: Final = (0.0, 0.0, 0.0)
_ANY_SLOPE: Final = 1 / 12  # variance of a slope that may be anything between 0 and 1
_Z: Final = 1.96


class _Region(NamedTuple):
    mean_ms: float  # over the split steps
    slope: float  # milliseconds of it per millisecond that a step takes longer
    variance: float  # of the sum over all steps, in ms²


class _Stratum(NamedTuple):
    kinds: tuple[str, ...]
    weight: float  # how many steps a split one stands for
    step_ms: float  # mean of the split ones
    regions: Mapping[str, _Region]


class Estimate:
    """The times by region of groups of steps by one clock, and of any part of them: parts sum to the whole."""

    def __init__(self, groups: Mapping[str, StepGroup]) -> None:
        self.unknown_steps = 0
        # of long steps of which none was split, the share of their time that is usual
        self._kept: dict[str, float] = {}
        self._is_sampled = any(group.split for kind, group in groups.items() if kind != FORCED)
        lacks = any(group.unsplit for group in groups.values())
        self.atypical = lacks and not self._is_sampled
        strata = list(self._strata(groups)) if lacks else []  # else the sums are those of all steps
        if any(not self._sum(groups, kinds).split for kinds in strata):
            together = tuple(kind for kinds in strata for kind in kinds)
            strata = [(*together, *(() if self._is_sampled else (FORCED,)))] if together else []
        self._fits = [self._fit(groups, kinds) for kinds in strata]

    def _strata(self, groups: Mapping[str, StepGroup]) -> Iterator[tuple[str, ...]]:
        for kinds in KINDS:
            present = [kind for kind in kinds if kind in groups]
            first, *long = present or [""]
            if first == kinds[0] and groups[first].split:
                unknown = [kind for kind in long if not groups[kind].split]
                usual_ms = (groups[first].ms + groups[first].unsplit_ms) / (groups[first].split + groups[first].unsplit)
                for kind in unknown:
                    group = groups[kind]
                    self._kept[kind] = min(group.unsplit * usual_ms / group.unsplit_ms, 1) if group.unsplit_ms else 1
                    self.unknown_steps += group.unsplit
                yield (first, *unknown)
                yield from ((kind,) for kind in long if kind not in unknown)
            elif first:
                apart = all(groups[kind].split for kind in present)
                yield from ((kind,) for kind in present) if apart else [tuple(present)]

    def _sum(self, groups: Mapping[str, StepGroup], kinds: Iterable[str]) -> StepGroup:
        """The steps of some kinds as one group, long ones of which none was split as long as is usual."""
        result = StepGroup()
        for kind in kinds:
            if kind in groups:
                add_group(result, groups[kind])
                result.unsplit_ms -= groups[kind].unsplit_ms * (1 - self._kept.get(kind, 1.0))
        return result

    def _fit(self, groups: Mapping[str, StepGroup], kinds: tuple[str, ...]) -> _Stratum:
        group = self._sum(groups, kinds)
        if not group.split or group.ms <= 0:
            return _Stratum(kinds, 1.0, 0.0, {})
        usual = groups.get(kinds[0].partition("/")[0]) if "/" in kinds[0] else None
        regions = _regions(group, usual if usual is not None and usual.split else None)
        return _Stratum(kinds, (group.split + group.unsplit) / group.split, group.ms / group.split, regions)

    def region_ms(self, groups: Mapping[str, StepGroup]) -> dict[str, float]:
        """Times by region of the steps or of a part of them, custom regions included; the whole where none is known."""
        found: dict[str, float] = {}
        used: set[str] = set()
        for kinds, weight, step_ms, regions in self._fits:
            used.update(kinds)
            part = self._sum(groups, kinds)
            steps = part.split + part.unsplit
            if not regions:
                _add(found, WHOLE, part.unsplit_ms)
                for name, (ms, _, _) in part.regions.items():
                    _add(found, name, ms)
                continue
            beyond_ms, split_beyond_ms = part.ms + part.unsplit_ms - steps * step_ms, part.ms - part.split * step_ms
            for name, (mean_ms, slope, _) in regions.items():
                sums = part.regions.get(name)
                off_ms = (sums[0] if sums else 0.0) - part.split * mean_ms - slope * split_beyond_ms
                _add(found, name, steps * mean_ms + slope * beyond_ms + weight * off_ms)
        for kind, group in groups.items():
            if kind not in used:  # the forced, or all of them
                for name, (ms, _, _) in group.regions.items():
                    _add(found, name, ms)
        return found

    def unknown_ms(self, groups: Mapping[str, StepGroup]) -> float:
        """What long steps of which none was split take more than usual ones."""
        return sum(group.unsplit_ms * (1 - self._kept.get(kind, 1.0)) for kind, group in groups.items())

    def errors_ms(self) -> dict[str, float]:
        """Half the width of the 95 % interval of each region's time, from not having split each step."""
        variances: dict[str, float] = {}
        for fit in self._fits:
            for name, region in fit.regions.items():
                _add(variances, name, region.variance)
        return {name: sqrt(variance) for name, variance in variances.items()}


def _add(sums: dict[str, float], name: str, amount: float) -> None:
    sums[name] = sums.get(name, 0.0) + amount


def _regions(group: StepGroup, usual: StepGroup | None) -> dict[str, _Region]:
    """The fit of each region; for long steps, given the `usual` ones, by the line through their mean."""
    split, unsplit, step_ms = group.split, group.unsplit, group.ms / group.split
    beyond_ms = group.unsplit_ms / unsplit - step_ms if unsplit else 0.0
    scatter = max(group.squares - split * step_ms**2, 0.0)
    regresses = split >= _ENOUGH and 0 < scatter >= split * (beyond_ms / _BEYOND) ** 2
    of_regions = {**dict.fromkeys(usual.regions if usual else (), _NOTHING), **group.regions}
    means = {name: sums[0] / split for name, sums in of_regions.items()}
    by_ratio = {name: mean_ms / step_ms for name, mean_ms in means.items()}
    slopes = by_ratio
    if usual is not None:
        slopes = _slopes_from(usual, group)
    elif regresses:
        slopes = {name: (sums[2] - split * means[name] * step_ms) / scatter for name, sums in of_regions.items()}
    # unsplit steps have no less than nothing of a region: as much nearer to the ratio as that takes
    near = {name: _nearness(means[name], slopes[name], by_ratio[name], beyond_ms) for name in means}
    of_step = min((near[name] for name in means if name in REGIONS), default=1.0)
    found: dict[str, _Region] = {}
    for name, (_, squares, products) in of_regions.items():
        share = of_step if name in REGIONS else near[name]
        slope = share * slopes[name] + (1 - share) * by_ratio[name]
        off = squares - split * means[name] ** 2 - 2 * slope * (products - split * means[name] * step_ms)
        off = max(off + slope**2 * scatter, 0.0)  # squares of what is off the line
        if usual is not None:
            longer_ms = step_ms - usual.ms / usual.split + beyond_ms
            of_slope = _any_of_few(split, slope) if split < _ENOUGH_LONG else 0.0
        else:
            longer_ms = beyond_ms
            of_slope = off / (split - 2) / scatter if regresses else _ANY_SLOPE
        each = off / max(split - 2, 1) if split > 1 or usual is not None else means[name] ** 2
        variance = _student(split - 2) ** 2 * (
            each * (1 + unsplit / split) * unsplit + of_slope * (unsplit * longer_ms) ** 2
        )
        found[name] = _Region(means[name], slope, variance if unsplit else 0.0)
    return found


def _slopes_from(usual: StepGroup, group: StepGroup) -> dict[str, float]:
    """Slopes of lines through the mean usual step: of what long steps take more, which share is a region's."""
    step_ms, split = usual.ms / usual.split, group.split
    scatter = group.squares - 2 * step_ms * group.ms + split * step_ms**2
    slopes: dict[str, float] = {}
    for name in dict.fromkeys((*group.regions, *usual.regions)):
        ms, _, products = group.regions.get(name, _NOTHING)
        of_usual_ms = usual.regions.get(name, _NOTHING)[0] / usual.split
        off = products - of_usual_ms * group.ms - step_ms * ms + split * of_usual_ms * step_ms
        slopes[name] = off / scatter if scatter > 0 else ms / group.ms
    return slopes


def _nearness(mean_ms: float, slope: float, by_ratio: float, beyond_ms: float) -> float:
    """How much of a slope, the rest being the ratio, leaves unsplit steps no less than nothing of a region."""
    left_ms, left_by_ratio_ms = mean_ms + slope * beyond_ms, mean_ms + by_ratio * beyond_ms
    return 1.0 if left_ms >= 0 else max(left_by_ratio_ms, 0.0) / (max(left_by_ratio_ms, 0.0) - left_ms)


def _any_of_few(split: int, slope: float) -> float:
    """The variance of a slope by so few long steps, each of which may be long by one region alone."""
    share = min(max((split * slope + 0.5) / (split + 1), 0.0), 1.0)
    return share * (1 - share) / (split + 1)


def _student(degrees: int) -> float:
    """Student's t for a 95 % interval (Abramowitz and Stegun, 26.7.5), with at least two degrees of freedom."""
    few, z = max(degrees, 2), _Z
    return z + (z**3 + z) / (4 * few) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * few**2)


def timing_of(
    counters: StepCounters, regions: tuple[str, ...] = REGIONS, *, on_device: bool = False, workers: int = 0
) -> RunTiming:
    """Times and amounts of counted steps, of which these regions are timed apart.

    Args:
        counters: of the steps.
        regions: the built-in regions that are timed; the others' time is in `other`.
        on_device: whether device times are measured on a GPU.
        workers: how many processes each new iterator of the loader starts.
    """
    estimate, on_host = Estimate(counters.groups), Estimate(counters.host_groups)
    into, steps = "data" if "data" in regions else "other", max(counters.steps, 1)
    device = with_between(estimate.region_ms(counters.groups), counters.between_ms, into)
    host = with_between(on_host.region_ms(counters.host_groups), counters.between_host_ms, into)
    errors = estimate.errors_ms()
    users = tuple(name for name in device if name not in RESERVED and not name.startswith(WAIT_PREFIX))
    waits = {name.removeprefix(WAIT_PREFIX): name for name in device if name.startswith(WAIT_PREFIX)}
    split_steps, unknown_ms = (
        sum(group.split for group in counters.groups.values()),
        estimate.unknown_ms(counters.groups),
    )
    return RunTiming(
        steps=counters.steps,
        on_device=on_device,
        step_ms=Distribution(mean=(_step_ms(device) + unknown_ms) / steps),
        host_step_ms=(_step_ms(host) + on_host.unknown_ms(counters.host_groups)) / steps,
        regions={
            name: RunRegion(
                device_ms=device.get(name, 0.0) / steps,
                host_ms=host.get(name, 0.0) / steps,
                error_ms=errors.get(name, 0.0) / steps,
            )
            for name in ((*regions, *users) if split_steps else ())
        },
        user_regions=users,
        # hooks are timed by the host
        waits_ms={leaf: (host if hook_region(leaf) else device).get(name, 0.0) / steps for leaf, name in waits.items()},
        split_steps=split_steps,
        atypical=estimate.atypical,
        optimizer_steps=counters.optimizer_steps,
        samples=known(counters.samples, counters.no_samples),
        tokens=known(counters.tokens, counters.no_tokens),
        flops=known(counters.flops, counters.no_flops),
        unknown_ms=unknown_ms / steps,
        unknown_steps=estimate.unknown_steps,
        gpu_starved_pct=100 * counters.starved / counters.asked if counters.asked else None,
        overhead_us=(counters.timing_us + counters.log_entries_us) / counters.steps if counters.steps else None,
        worker_restarts=WorkerRestarts(
            count=counters.loader_starts,
            workers=workers,
            device_ms=counters.between_ms / steps,
            host_ms=counters.between_host_ms / steps,
        )
        if workers and counters.loader_starts
        else None,
    )


def _step_ms(by_region: Mapping[str, float]) -> float:
    """The time of the step: the sum of the built-in regions, or the whole if they were not timed."""
    return sum(by_region.get(region, 0.0) for region in (*REGIONS, WHOLE))


def region_pieces(pieces: Sequence[StepCounters]) -> list[dict[str, float]]:
    """Device times by region, and `unknown`, of consecutive pieces, which sum to the run's estimate; [] without one."""
    estimate = Estimate(total(pieces).groups)
    if estimate.atypical:
        return []
    return [
        with_between(estimate.region_ms(piece.groups), piece.between_ms)
        | {"unknown": estimate.unknown_ms(piece.groups)}
        for piece in pieces
    ]


def with_between(region_ms: dict[str, float], between_ms: float, into: str = "data") -> dict[str, float]:
    """Times by region with what is between two epochs, which is a part of one of them."""
    if between_ms > 0:
        _add(region_ms, into, between_ms)
    return region_ms

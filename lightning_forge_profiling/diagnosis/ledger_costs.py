"""Costs of the parts of a run's ledger: without one-time work in short runs, and of hooks what the GPU waits for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.catalogue import mistakes_in
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    Evidence,
    RunTimes,
    in_ms,
    in_s,
    of_step,
    subtract,
)
from lightning_forge_profiling.names import (
    BEFORE_FIT,
    COMPILE,
    EPOCH_METRICS,
    FIRST_STEP,
    GC_FULL,
    GC_YOUNG,
    REGIONS,
    STEPS,
    hook_region,
    part_kind,
    whole_part,
)
from lightning_forge_profiling.schema import CpuUse, RunEvidence, RunLedger, RunRegion, SampledLine

# from this length on, one-time work such as startup is a cause. A shorter run is taken for a trial of a longer one, in
# which such work would not grow.
_LONG_RUN_S: Final = 600.0

# kinds of parts that occur once in a run, however long it is
ONCE: Final = frozenset({"startup", "sanity_check", "profiler", "teardown"})

# parts that come once an epoch, as hooks of epochs do: in a trial of one epoch they are no one-time work
_EACH_EPOCH: Final = frozenset({"validation", EPOCH_METRICS})

_AT_THE_END: Final = ("on_train_end", "on_fit_end", "on_exception", "teardown", "finalize")
# what ends a fit is named in a trial, too, from this time on: whoever tries something waits for it each time
NOTICED_S: Final = 1.0

# from this many times the mean of the others, the first time is an outlier: it creates files, workers, buffers
_UNLIKE: Final = 2.0

# a part of at least this mean that most steps take less than 0.1 ms for has a median under half its mean
_RARE_MS: Final = 0.2

_MATTERS: Final = 0.1  # a first time that is a smaller share of its part is not left out

# if the GPU waits for less than this share of a hook's time, the rest is hidden behind queued work
_HIDDEN: Final = 0.9


_NO_LEDGER: Final = RunLedger(wall_s=0.0, parts={}, unexplained_s=0.0, counts={})


@dataclass(frozen=True, slots=True)
class LedgerCosts:
    """Costs of the parts of a ledger, on one of two bases."""

    evidence: RunEvidence
    # the basis. `run` is the fit's wall time. `step` is the mean step, on which only hooks and loggers that run in most
    # steps have a cost; it shows them also in a run that spends most of its time elsewhere.
    of: Literal["run", "step"] = "run"

    @property
    def ledger(self) -> RunLedger:
        """The ledger; an empty one if the run has none."""
        return self.evidence.ledger or _NO_LEDGER

    @property
    def steps(self) -> int:
        """Number of all steps of the fit."""
        return max(self.evidence.timing.all_steps or self.evidence.timing.steps, 1)

    def per_step_ms(self, part: str) -> float:
        """Milliseconds of a part in the mean step: of the steps that count, if the ledger has them."""
        counted_s = self.ledger.counted_s
        if counted_s is not None:
            return 1e3 * self._sum(counted_s, part) / max(self.evidence.timing.steps, 1)
        return 1e3 * self._sum(self.ledger.parts, part) / self.steps

    def exposed_ms(self, part: str) -> float:
        """Milliseconds of a part in the mean step, on a GPU no more than the GPU waits in its region."""
        ms = self.per_step_ms(part)
        return ms * self._exposed(part, ms)

    def _exposed(self, part: str, ms: float) -> float:
        """How much of a part that takes so long a step the GPU waits for. All hooks of a region share what it takes."""
        name = hook_region(part)
        region = self.evidence.timing.regions.get(name)
        if region is None or not self.evidence.timing.on_device or not ms:
            return 1.0
        return min(1.0, region.device_ms / max(self.inside_ms(name), ms))

    @property
    def is_trial(self) -> bool:
        """Whether the run is so short that one-time work would weigh too much."""
        return self.ledger.wall_s < _LONG_RUN_S

    @property
    def whole_s(self) -> float:
        """Seconds that costs are a share of."""
        # time before the fit is left out, since the script may have run for long, and so is the profiler's. In a trial,
        # one-time work is left out too: setup, the sanity check. But not a call there that is known to be a mistake.
        if self.of == "step":
            return self.evidence.timing.step_ms.mean * self.steps / 1e3
        if not self.is_trial:
            return self.ledger.fit_s
        once = {name: s for name, s in self.ledger.parts.items() if part_kind(name) in ONCE and name not in BEFORE_FIT}
        known_s = sum(once.get(made.part, 0.0) * made.share for made in mistakes_in(self.evidence))
        before_s = sum(self.ledger.parts.get(name, 0.0) for name in BEFORE_FIT)
        return self.ledger.wall_s - before_s - sum(once.values()) + known_s

    def leaves(self) -> list[str]:
        """The parts of the ledger that may be named, no two of which have time in common."""
        return list(dict.fromkeys(map(whole_part, self.ledger.parts)))

    def region(self, part: str) -> str:
        """The region that contains a part; "" outside the step."""
        if part == "data_loader" or part.endswith("/train_dataloader"):
            # worker restarts are already taken out of `data`
            return "data" if self.evidence.timing.worker_restarts is None else ""
        # most is compiled where it is called: what autograd or an update compiles is taken out of all regions below
        return "forward" if part == COMPILE else hook_region(part)

    def inside_ms(self, region: str) -> float:
        """Milliseconds of all parts inside a region in the mean step, named or not."""
        return sum(self.per_step_ms(name) for name in self.ledger.parts if self.region(name) == region)

    @property
    def apart_ms(self) -> float:
        """Milliseconds of the mean step in hooks, loggers, compilations and collections: no region's own time."""
        return sum(map(self.inside_ms, REGIONS)) + sum(map(self.per_step_ms, (GC_FULL, GC_YOUNG)))

    def seconds(self, part: str) -> float:
        """Cost of a part. On a GPU, the hooks within a region together cost at most what the GPU waits in it."""
        # a garbage collection may come anywhere in a step. It costs all its time if the GPU waits for the host anyway;
        # otherwise its excess over the step time, because the GPU has about one step queued.
        seconds, count = self._recurring(part)
        gpu_starved_pct = self.evidence.timing.gpu_starved_pct
        if part_kind(part) == "gc" and self.evidence.timing.on_device and gpu_starved_pct is not None:
            return max(seconds * gpu_starved_pct / 100, seconds - count * self.evidence.timing.step_ms.mean / 1e3)
        return seconds * self._exposed(part, 1e3 * seconds / self.steps)

    def per_batch(self, part: str) -> bool:
        """Whether a part is a hook or a logger that runs in most steps."""
        return bool(hook_region(part)) and self.ledger.counts.get(part, 0) > self.steps / 2

    def steps_apart(self, part: str) -> int:
        """In one of how many steps a hook or a logger of each step takes nearly all its time; 1 if in most of them."""
        long_steps = self.ledger.long_steps.get(part)
        if not long_steps or not self.per_batch(part) or self.per_step_ms(part) < _RARE_MS:
            return 1
        return max(round(self.evidence.timing.steps / long_steps), 1)

    def _sum(self, by_part: Mapping[str, float], part: str) -> float:
        """Sum of a part and the parts within it, as `checkpoint/write` is within `checkpoint`."""
        return sum(value for name, value in by_part.items() if name == part or name.startswith(f"{part}/"))

    def count(self, part: str) -> int:
        """How often a part was entered; if it was not, how often the parts within it were."""
        counts = self.ledger.counts
        return counts[part] if part in counts else int(self._sum(counts, part))

    def _recurring(self, part: str) -> tuple[float, int]:
        """A part's seconds and count; in a trial without a first time that is an outlier."""
        seconds, count = self._sum(self.ledger.parts, part), self.count(part)
        if self.of == "step" and not self.per_batch(part):
            return 0.0, 0
        if self.of == "step" and self.ledger.counted_s is not None:
            return self.per_step_ms(part) * self.steps / 1e3, count
        if not self.is_trial:
            return seconds, count
        if part_kind(part) in ONCE:
            return 0.0, 0
        if count <= 1:  # of a longer run it would be as much, but for what comes each epoch
            at_the_end = part.endswith(_AT_THE_END) and seconds >= NOTICED_S
            return (seconds, count) if part in _EACH_EPOCH or "_epoch_" in part or at_the_end else (0.0, 0)
        first_s = self._sum(self.ledger.first_s, part)
        later_s = seconds - first_s
        is_other = first_s > max(_UNLIKE * later_s / (count - 1), _MATTERS * seconds)
        return (later_s, count - 1) if is_other else (seconds, count)

    def recurring_count(self, part: str) -> int:
        """How often a part was entered; in a trial without a first time that is an outlier."""
        return self._recurring(part)[1]

    def inside_s(self, whole: str) -> dict[str, float]:
        """The seconds of a part and of those inside it, each by itself; without a first time that is left out."""
        first_s = self.ledger.first_s if self.recurring_count(whole) < self.count(whole) else {}
        parts = {part: s for part, s in self.ledger.parts.items() if whole_part(part) == whole}
        return {part: s - first_s.get(part, 0.0) for part, s in parts.items()}

    def times(self, part: str) -> Evidence:
        """Evidence of a part: its name and how often it was entered."""
        return {"part": part, "times": self.count(part)}

    def takes(self, part: str, events: str) -> str:
        """A part's time in words: per fit and per event, or per step."""
        seconds, count = self._recurring(part)
        exposed_s = self.seconds(part)
        if self.of == "step":
            each_ms, exposed_ms = 1e3 * seconds / self.steps, 1e3 * exposed_s / self.steps
            took, waits = f"takes {of_step(each_ms, self.evidence.timing.step_ms.mean)}", in_ms(exposed_ms)
        else:
            took, waits = f"takes {in_s(seconds)} of the fit's {in_s(self.whole_s)}", in_s(exposed_s)
            if count > 1:
                after = " after the first" if count < self.count(part) else ""
                took += f" ({count} {events}{after}, {in_s(seconds / count)} each)"
        if (apart := self.steps_apart(part)) > 1:
            took += f", nearly all in 1 of {apart} steps"
        return took if exposed_s >= _HIDDEN * seconds else f"{took}, of which the GPU waits {waits}"


def lines_in(run: RunEvidence, part: str) -> tuple[SampledLine, ...]:
    """The lines of a part of the ledger with those of the parts inside it, in percent of all of it."""
    parts_s = {} if run.ledger is None else run.ledger.parts
    inside_s = {name: s for name, s in parts_s.items() if whole_part(name) == part and s > 0}
    if inside_s.keys() <= {part}:
        return run.lines.get(part, ())
    shares = {name: s / sum(inside_s.values()) for name, s in inside_s.items()}
    lines = (replace(line, pct=line.pct * share) for name, share in shares.items() for line in run.lines.get(name, ()))
    return tuple(sorted(lines, key=lambda line: -line.pct))


def in_steps_pct(evidence: RunEvidence) -> float:
    """Share of the fit that its steps take, in percent, to convert shares of the step; 100 if unknown."""
    run, step_ms = LedgerCosts(evidence), evidence.timing.step_ms.mean
    if run.whole_s <= 0:
        return 100.0
    steps_s, own_ms = step_ms * run.steps / 1e3, step_ms - run.apart_ms
    if own_ms > 0 and not evidence.timing.on_device and STEPS in run.ledger.parts:
        # the regions' own time in all steps is known exactly; in a trial the first step is startup
        loop_s = run.ledger.parts[STEPS] + (0.0 if run.is_trial else run.ledger.parts.get(FIRST_STEP, 0.0))
        steps_s = loop_s * step_ms / own_ms
    return min(100 * steps_s / run.whole_s, 100.0)


def self_times(evidence: RunEvidence) -> RunTimes:
    """The run's times without hooks, loggers and compilations in its regions, so that no time counts twice."""
    # all of those and garbage collections are measured in every step, regions are estimated from split ones. So what
    # they leave of the mean step is the most that the regions have together, where the GPU hides none of it. That also
    # takes a collection, which may come anywhere, and self.log in training_step out of the regions.
    measured = RunTimes.of(evidence)
    if evidence.ledger is None:
        return measured
    costs = LedgerCosts(evidence)
    hooks_ms = {name: costs.inside_ms(name) for name in REGIONS}
    own = {
        name: subtract(times, hooks_ms[name], hooks_ms[name])
        for name, times in measured.regions.items()
        if name in REGIONS
    }
    left_ms, sum_ms = max(measured.step_ms - costs.apart_ms, 0.0), sum(times.device_ms for times in own.values())
    if measured.host_sets_the_pace and sum_ms > left_ms:
        scale = left_ms / sum_ms
        own = {
            name: replace(times, device_ms=times.device_ms * scale, host_ms=times.host_ms * scale)
            for name, times in own.items()
        }
    cpu = measured.cpu and _own_waits(measured.cpu, evidence, own, hooks_ms)
    return RunTimes(evidence, {**measured.regions, **own}, cpu)


def _own_waits(
    cpu: CpuUse, evidence: RunEvidence, own: Mapping[str, RunRegion], hooks_ms: Mapping[str, float]
) -> CpuUse:
    """The use of the cores with waits in the regions' own times, if hooks only wait; no more than no core was used."""
    waits_ms = {}
    for name in COMPUTE:
        if name in own and own[name].device_ms:
            blocked_ms = evidence.timing.regions[name].device_ms * cpu.blocked_pct(name) / 100
            waits_ms[name] = min(max(blocked_ms - hooks_ms[name], 0.0), own[name].device_ms)
    most_ms, sum_ms = evidence.timing.step_ms.mean * max(1 - cpu.used, 0.0), sum(waits_ms.values())
    scale = min(most_ms / sum_ms, 1.0) if sum_ms else 0.0
    regions = dict(cpu.regions)
    for name in waits_ms.keys() & regions.keys():
        was, blocked_pct = regions[name], 100 * scale * waits_ms[name] / own[name].device_ms
        longer_pct = scale * was.longer_pct * evidence.timing.regions[name].device_ms / own[name].device_ms
        regions[name] = replace(was, blocked_pct=blocked_pct, longer_pct=min(longer_pct, blocked_pct))
    return replace(cpu, regions=regions)


def hooks_ms(evidence: RunEvidence, *regions: str) -> float:
    """Milliseconds per step of hooks and loggers in some regions."""
    return sum(map(LedgerCosts(evidence).inside_ms, regions))

"""Decides which changes to keep: each in turns with what is kept so far, by the one comparison."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from time import monotonic
from typing import Final, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.comparison.compare import REPEATS, compare, none_above
from lightning_forge_profiling.comparison.source import Source
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import Analysis, ComparedMetric, Finding, Ratio, TriedChange
from lightning_forge_profiling.trial.changes import Change, Row, build
from lightning_forge_profiling.trial.processes import Measured

# one pair decides where the interval by the assumed scatter of equal runs leaves no doubt
_CLEARLY_FASTER: Final = 0.6
_CLEARLY_NOT: Final = 0.97
_PROMISING: Final = 0.95  # ratio below which undecided pairs get more, and a change is kept
_MOST_PAIRS: Final = 5
_ROUNDING: Final = 0.02  # relative difference of the first losses that rounding can make
_AS_OWN: Final = 3.0  # times that by which equal runs differ
_OTHER_MASKS: Final = ("compile", "precision", "attention")  # changes whose kernels draw dropout's masks themselves
_EXACT: Final = 1e-4  # the same in float32, where operations are only done in another order

Measure = Callable[[Sequence[Change]], Measured]
Rows = Callable[[Analysis | None], Iterable[tuple[Row, Finding | None]]]


class TrialError(ForgeProfilingError):
    """The unchanged script cannot be measured."""


class Turns(NamedTuple):
    """Runs of two sides, made in turns."""

    before: list[Measured]
    after: list[Measured]

    @property
    def step(self) -> ComparedMetric | None:
        """The step of both; None if a side has no run."""
        return step_of(self.before, self.after)


def step_of(before: Iterable[Measured], after: Iterable[Measured]) -> ComparedMetric | None:
    """The step of some runs with that of others; None if a side has none."""
    sides: list[list[Source]] = [[run.source for run in side if run.source is not None] for side in (before, after)]
    return compare(sides[0], sides[1]).metrics["step"] if all(sides) else None


@dataclass(slots=True)
class _Asked:
    """Which changes were asked for: each is tried once after a diagnosis, and once for each finding."""

    _now: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    _for: set[tuple[str, tuple[str, ...], str]] = field(default_factory=set)
    _done: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    def is_new(self, change: Change) -> bool:
        """Whether a change is to be tried; it counts as tried from here on."""
        key = change.name, change.places
        cause = (*key, "" if change.cause is None else change.cause.code)
        if key in self._now or key in self._done or cause in self._for:
            return False
        self._now.add(key)
        self._for.add(cause)
        return True

    @property
    def causes(self) -> set[str]:
        """The codes of the findings that had a change."""
        return {code for *_, code in self._for}

    def ends(self, change: Change) -> None:
        """Try a change no more: it is kept, or has failed."""
        self._done.add((change.name, change.places))

    def diagnosed(self) -> None:
        """What was left out may be tried again for what bounds the script now."""
        self._now.clear()


@dataclass(slots=True)
class Search:
    """A greedy search: each change on top of those that were kept.

    Args:
        measure: makes one run of the script with some changes.
        diagnose: makes one that tells what bounds the script with these changes; None if that is not asked for.
        budget_s: seconds after which no further change is tried.
        tell: is called with what has been decided, as soon as it is.
        clock: gives the time in seconds.

    Examples:
        >>> run = lambda changes: ...
        >>> search = Search(measure=run, diagnose=run, budget_s=600.0, tell=print)
        >>> search.kept, search.tried
        ([], [])
    """

    measure: Measure
    diagnose: Measure | None
    budget_s: float
    tell: Callable[[TriedChange], object]
    clock: Callable[[], float] = monotonic
    kept: list[Change] = field(default_factory=list)
    tried: list[TriedChange] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    runs: dict[tuple[str, ...], list[Measured]] = field(default_factory=dict)  # by names of the changes
    final: ComparedMetric | None = None  # of the last decision that kept something on top of nothing
    asked: _Asked = field(default_factory=_Asked)
    _diagnosed: Measured | None = None
    _began: float = 0.0
    _longest_s: float = 0.0  # of a run

    def run(self, diagnosed: Measured, rows: Rows, known: Mapping[str, str] | None = None) -> None:
        """Try what the diagnosis calls for; after a change that is kept, what the next one does.

        Args:
            diagnosed: the first run, without changes.
            rows: what an analysis calls for, with the finding that does.
            known: by code of a change why it is not tried again, of earlier tries.
        """
        self._begin(diagnosed)
        facts, waiting = diagnosed.facts, [*rows(diagnosed.analysis)]
        while waiting:
            row, cause = waiting.pop(0)
            change = build(row, facts, cause)
            if change is None or not self.asked.is_new(change):
                continue
            if known and not self.kept and change.code in known:
                self.not_tried[change.code] = known[change.code]
            elif self.left_s < 2 * self._longest_s:
                self.not_tried[change.code] = "no time left"
            elif (after := self._try(change)) is not None:
                facts, again = after.facts, self._diagnose_again()
                if again is not None:
                    self.asked.diagnosed()
                    waiting = [*rows(again)]
        self._drop()
        if (
            len(self.kept) > 1 and self.left_s >= 2 * self._longest_s
        ):  # the machine may have changed since the first runs
            self.final = self._turns((), self.kept).step

    def _diagnose_again(self) -> Analysis | None:
        """What bounds the script with what is kept; None without the time to try anything for it, or a failure."""
        if self.diagnose is None or self.left_s < 3 * self._longest_s:
            return None
        diagnosed = self.diagnose(self.kept)
        return None if diagnosed.failure else diagnosed.analysis

    def ablate(self, change: Change, diagnosed: Measured) -> None:
        """Measure what a call costs by leaving it out, which is never kept."""
        self._begin(diagnosed)
        tried = self._described(change, self._turns((), [change]), ())
        if tried.state != "failed":
            text = f"{tried.text}; changes what is learned or logged"
            tried = replace(tried, state="left out", text=text)
        self.tried.append(tried)
        self.tell(tried)

    def _begin(self, diagnosed: Measured) -> None:
        self._began, self._longest_s = self.clock() - diagnosed.seconds, diagnosed.seconds
        self._diagnosed = diagnosed

    def _described(self, change: Change, turns: Turns, on_top_of: Sequence[str]) -> TriedChange:
        """What came of a change, beside how much runs without any differ."""
        plain = self.runs.get((), ())
        own = losses_apart(self._diagnosed, plain[0]) if self._diagnosed is not None and plain else None
        tried = described(change, turns, on_top_of, own or 0.0)
        treated = any(each.cause is change.cause for each in self.kept)  # its prediction was of the step before that
        return replace(tried, predicted=None) if treated else tried

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.budget_s - (self.clock() - self._began)

    def _try(self, change: Change) -> Measured | None:
        """Decide on a change; a run with it if it is kept."""
        self.not_tried.pop(change.code, None)
        turns = self._turns(self.kept, [*self.kept, change])
        tried = self._described(change, turns, [each.name for each in self.kept])
        if tried.state == "kept":
            self.final = turns.step if not self.kept else None
            self.kept.append(change)
        if tried.state != "left out":
            self.asked.ends(change)
        self.tried.append(tried)
        self.tell(tried)
        return turns.after[-1] if tried.state == "kept" else None

    def _turns(self, before: Sequence[Change], after: Sequence[Change]) -> Turns:
        """Runs of both in turns: one pair if that leaves no doubt, else three, or five where a gain is likely."""
        turns = Turns([], [])
        for number in range(_MOST_PAIRS):
            if number and (self.left_s < 2 * self._longest_s or _is_enough(turns.step, number)):
                break
            for side, changes in zip(turns, (before, after), strict=True):
                run = self.measure(changes)
                self._longest_s = max(self._longest_s, run.seconds)
                side.append(run)
                if run.failure and side is turns.before:
                    raise TrialError(f"the script without a further change has failed: {run.failure} ({run.folder})")
                if run.failure:
                    return turns
                self.runs.setdefault(tuple(each.name for each in changes), []).append(run)
        return turns

    def _drop(self) -> None:
        """Leave out what no longer helps beside what was kept after it."""
        for change in self.kept[:-1]:
            if self.left_s < 2 * self._longest_s:
                return
            others = [each for each in self.kept if each is not change]
            turns = self._turns(self.kept, others)
            step = turns.step
            if step is not None and not turns.after[-1].failure and step.outcome in {"same", "faster"}:
                names = [each.name for each in others]
                self.kept, self.final = others, None
                text = f"no longer helps beside {', '.join(names)}: {none_above(step)}"
                tried = TriedChange(name=change.name, code=change.code, state="dropped", text=text, on_top_of=(*names,))
                self.tried.append(tried)
                self.tell(tried)

    def result(self) -> ComparedMetric | None:
        """The step without changes and with all that were kept; None if none was."""
        if not self.kept:
            return None
        if self.final is not None:
            return self.final
        return step_of(self.runs.get((), ()), self.runs.get(tuple(each.name for each in self.kept), ()))


def _is_enough(step: ComparedMetric | None, pairs: int) -> bool:
    """Whether some pairs leave no doubt, or more of them would hardly decide."""
    ratio = None if step is None else step.ratio
    if step is None or ratio is None or ratio.low is None or ratio.high is None:
        return pairs >= REPEATS
    if pairs < REPEATS:
        return pairs == 1 and (ratio.high < _CLEARLY_FASTER or ratio.low > _CLEARLY_NOT)
    # no look at four: each further one would keep more that does not help
    return pairs == REPEATS and (step.outcome != "too noisy" or ratio.ratio > _PROMISING)


def described(change: Change, turns: Turns, on_top_of: Sequence[str], own: float) -> TriedChange:
    """What came of a change, and whether it is kept: if it is faster, and the training the same."""
    saves = None if change.cause is None or change.cause.of != "step" else change.cause.saves
    tried = TriedChange(
        name=change.name,
        code=change.code,
        places=change.places,
        cause="" if change.cause is None else change.cause.code,
        state="failed",
        text=turns.after[-1].failure,
        predicted=saves,
        on_top_of=tuple(on_top_of),
        runs=len(turns.after),
    )
    if turns.after[-1].failure:
        applied = turns.after[-1].source is not None or not tried.text.startswith("could not be applied")
        return replace(tried, state="failed" if applied else "not applied")
    step, losses = turns.step, same_training(change, turns.before[0], turns.after[0], own)
    if step is None or step.ratio is None:
        return replace(tried, state="left out", text="undecided: too few steps", losses=losses.text)
    kept = step.outcome == "faster" and step.ratio.ratio < _PROMISING and losses.same
    return replace(
        tried,
        state="kept" if kept else "left out",
        text=_gain(step),
        losses=losses.text,
        before_ms=step.a,
        after_ms=step.b,
        ratio=step.ratio,
    )


def _gain(step: ComparedMetric) -> str:
    """`2.29 times as fast (2.2 to 2.4)`, `13 % slower (10 to 16 %)`, or that there is no difference."""
    ratio = step.ratio
    if ratio is None or step.outcome not in {"faster", "slower"}:
        text, _, rest = none_above(step).partition(": step ")
        return f"{text}, {rest.partition(':')[0]}" if rest else text
    if step.outcome == "faster":
        return times_as_fast(ratio)
    between = "" if ratio.low is None or ratio.high is None else f" ({_pct(ratio.low)} to {_pct(ratio.high)} %)"
    return f"{_pct(ratio.ratio)} % slower{between}"


def _pct(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f}"


def times_as_fast(ratio: Ratio) -> str:
    """How many times as fast the second side is, with the 95 % interval."""
    between = "" if ratio.low is None or ratio.high is None else f" ({1 / ratio.high:.3g} to {1 / ratio.low:.3g})"
    return f"{1 / ratio.ratio:.3g} times as fast{between}"


def in_words(runs: Sequence[Measured]) -> str:
    """The step of the runs without changes: how many they are, and between what they lie."""
    steps_ms = [run.source.metrics["step"].value for run in runs if run.source is not None]
    steps = [run.source.steps for run in runs if run.source is not None]
    if not steps_ms:
        return "not measured"
    many = "1 run" if len(steps) == 1 else f"{len(steps)} runs"
    between = f" ({digits(min(steps_ms))} to {digits(max(steps_ms))})" if len(steps) > 1 else ""
    mean = sum(steps_ms) / len(steps_ms)
    return f"{many} of {min(steps)} steps: {digits(mean)} ms a step{between}"


class Training(NamedTuple):
    """How the first losses with a change compare with those without."""

    text: str
    same: bool  # as far as the change may alter them


def same_training(change: Change, before: Measured, after: Measured, own: float = 0.0) -> Training:
    """Whether a change trains the same.

    Args:
        change: what it may alter is known.
        before: a run without it.
        after: a run with it, from the same seed.
        own: relative difference of the losses of two runs without changes.
    """
    apart = losses_apart(before, after)
    if not apart:
        text = "losses unknown" if apart is None else "losses bit-identical"
        return Training(text, same=apart == 0 or change.alters != "rounding")
    if apart == inf:
        return Training("losses are no longer finite", same=False)
    text = f"losses differ by {float(f'{100 * apart:.1g}'):g} %"
    if apart <= _EXACT:
        return Training(f"{text}, within rounding", same=True)
    if own > _EXACT and apart <= _AS_OWN * own:
        return Training("losses differ as between equal runs", same=True)
    drawn = change.alters == "random numbers" and any(each.draws for each in before.facts.loaders)
    masks = change.name.startswith(_OTHER_MASKS) and "dropout" in before.facts.has
    if drawn or masks:
        return Training(f"different random numbers{'' if drawn else ' (dropout)'}", same=True)
    return Training(text, same=change.alters == "rounding" and apart <= _ROUNDING)


def losses_apart(before: Measured, after: Measured) -> float | None:
    """Largest relative difference of the first losses; infinite if one is no longer finite, None if unknown."""
    pairs = [*zip(before.facts.losses, after.facts.losses, strict=False)]
    if any(isfinite(a) and not isfinite(b) for a, b in pairs):
        return inf
    return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs if isfinite(a)), default=None)

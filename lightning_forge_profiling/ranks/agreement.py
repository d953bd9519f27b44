"""When all ranks record the same steps although none waits for another, and when a run becomes slow."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.schema import (
    MOST_TEXT,
    LateRank,
    Pulse,
    RanksStatus,
    WindowAnswer,
    WindowPlan,
    WindowRequest,
)

_FEWEST: Final = 20  # looks before which nothing is called slow
_KEPT: Final = 120  # looks that the usual pace is taken of
_LASTING: Final = 10  # looks over which a drift lasts
_DRIFT: Final = 1.1
_OUTLIER: Final = 3.0
_PAUSE_S: Final = 60.0  # between two that are noticed


class Slowness:
    """Compares the steps since the last look, about a second ago, with those before."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_KEPT)  # mean milliseconds per step, by look
        self._latest: deque[float] = deque(maxlen=_LASTING)
        self._before: tuple[float, int, float] | None = None
        self._slowest = 0.0
        self._late: tuple[int, str] | None = None
        self._quiet_until = 0.0

    def look(self, at_s: float, step: int, paused_s: float, slowest: tuple[int, float], late: LateRank | None) -> str:
        """What has become slow since the last look; "" for nothing.

        Args:
            at_s: the time, by any clock.
            step: number of steps that ended.
            paused_s: time so far that is no part of a step, such as validation.
            slowest: number and milliseconds of the slowest step so far.
            late: the rank that the others wait for.
        """
        before = self._before
        if before is not None and step <= before[1]:
            return ""
        self._before = at_s, step, paused_s
        if before is None:
            return ""
        self._latest.append(1e3 * (at_s - before[0] - (paused_s - before[2])) / (step - before[1]))
        said = ""
        if at_s >= self._quiet_until:  # what lasts is still to be seen when the pause is over
            said = self._said(step, slowest, late) if len(self._usual) >= _FEWEST else ""
            if len(self._latest) == _LASTING:  # so that a drift is not taken for usual before it is noticed
                self._usual.append(self._latest[0])
        self._slowest = max(self._slowest, slowest[1])
        if said:
            self._quiet_until = at_s + _PAUSE_S
        return said

    def _said(self, step: int, slowest: tuple[int, float], late: LateRank | None) -> str:
        usual, lasting = median(self._usual), min(self._latest)
        found = None if late is None else (late.rank, late.cause)
        if found is not None and found != self._late:
            self._late = found
            return f"rank {found[0]} has become late: {found[1]}"
        if len(self._latest) == _LASTING and lasting > _DRIFT * usual:
            self._usual.clear()  # what it is now is usual from here on
            self._usual.extend([median(self._latest)] * _FEWEST)
            return f"steps before {step} took {median(self._latest):.3g} ms, earlier ones {usual:.3g} ms"
        if slowest[1] > max(_OUTLIER * max(usual, self._latest[-1]), self._slowest):  # longer than those about it, too
            return f"step {slowest[0]} took {slowest[1]:.3g} ms, the usual one {usual:.3g} ms"
        return ""


_LEAD_S: Final = 5.0  # how far ahead: the plan, the answers and the agreement need a second each to be read
_LEAD_PERIODS: Final = 5
_LEFT_PERIODS: Final = 2.5  # of that, what must be left when all have answered
_TRIES: Final = 4  # each twice as far ahead as the one before
_PACES: Final = 8  # looks in which steps ended, over which their pace is taken
_SEARCHED: Final = 1000  # steps among which some without a pause are looked for


class Leader:
    """Rank 0's part: makes plans, and finds out whether the ranks can keep them.

    It names a step that is some seconds ahead of the rank that is furthest. Each rank that reads this says whether it
    can begin there. Once all can, rank 0 says so, and a rank that has read that records. If one is past the step
    already, a later step is tried.
    """

    def __init__(
        self,
        run: str,
        world_size: int,
        pause_before: Callable[[int], bool],
        of_fit: int | None = None,
        named_steps: int = 0,
    ) -> None:
        self.plan: WindowPlan | None = None  # the latest
        self._run, self._world_size = run, world_size
        self._of_fit = of_fit  # number of steps of the run; None if unknown
        self._named = named_steps  # with operators, after those that are asked for, which then have none
        self._pause_before = pause_before  # whether validation, an epoch's end or a checkpoint comes before a step
        self._waiting: deque[WindowRequest] = deque(maxlen=1)
        self._request: WindowRequest | None = None  # the one that the plan is for
        self._tries = 0
        self._looks: deque[tuple[float, int]] = deque(maxlen=_PACES)
        self._paces: deque[float] = deque(maxlen=_PACES)  # in steps per second

    @property
    def is_free(self) -> bool:
        """Whether nothing is planned or waited for."""
        return not self._waiting and (self.plan is None or self.plan.state in {"recorded", "refused"})

    def ask(self, request: WindowRequest) -> None:
        """Take a request; of several that wait, the latest counts."""
        self._waiting.append(request)

    def look(self, now: float, pulses: Mapping[int, Pulse], status: RanksStatus) -> bool:
        """Go on by what the ranks said last; returns whether the plan has changed."""
        before, newest = self.plan, max((pulse.step for pulse in pulses.values()), default=0)
        if self._looks and newest > self._looks[-1][1] and now > self._looks[-1][0]:
            self._paces.append((newest - self._looks[-1][1]) / (now - self._looks[-1][0]))
        self._looks.append((now, newest))
        period_s = max((now - self._looks[0][0]) / max(len(self._looks) - 1, 1), 1.0)
        if before is not None and before.state == "planned":
            self.plan = self._answered(before, newest, period_s, pulses)
        elif before is not None and before.state == "agreed":
            self.plan = self._followed(before, pulses)
        if self._waiting and self._paces and (self.plan is None or self.plan.state in {"recorded", "refused"}):
            self._request, self._tries = self._waiting.popleft(), 0
            ranks = slow_ranks(status) if self._request.ranks == "slow" else ()
            self.plan = self._planned(self._request, ranks, newest, period_s, pulses)
        return self.plan is not before

    def _planned(
        self,
        request: WindowRequest,
        ranks: tuple[int, ...],
        newest: int,
        period_s: float,
        pulses: Mapping[int, Pulse],
    ) -> WindowPlan:
        self._tries += 1
        lead_s = 2 ** (self._tries - 1) * max(_LEAD_S, _LEAD_PERIODS * period_s)
        start = newest + 2 + round(lead_s * self._pace(pulses))
        steps = request.steps + self._named
        # the first step from there on whose window has no pause in it, nor before it
        from_there = range(start, start + _SEARCHED)
        start = next((n for n in from_there if not any(map(self._pause_before, range(n, n + steps)))), start)
        too_late = self._of_fit is not None and start + steps > self._of_fit
        return WindowPlan(
            run=self._run,
            number=1 if self.plan is None else self.plan.number + 1,
            request=request.id,
            state="refused" if too_late else "planned",
            start=start,
            steps=steps,
            light=request.steps if self._named else 0,
            ranks=ranks,
            text=f"the run has {self._of_fit} steps, and {newest} have ended" if too_late else request.why,
        )

    def _pace(self, pulses: Mapping[int, Pulse]) -> float:
        """Steps per second, at most: by the latest looks in which steps ended, and by the time of a step."""
        timed = [1e3 / pulse.work.step_ms for pulse in pulses.values() if pulse.work and pulse.work.step_ms > 0]
        return max([*self._paces, *timed])

    def _answered(self, plan: WindowPlan, newest: int, period_s: float, pulses: Mapping[int, Pulse]) -> WindowPlan:
        answers = {rank: pulse.answer for rank, pulse in pulses.items() if pulse.answer.number == plan.number}
        said = [answer.text for answer in answers.values() if answer.text]
        if said:  # such as a disk that is full
            return replace(plan, state="refused", text=said[0])
        left_s = (plan.start - 1 - newest) / self._pace(pulses)
        in_time = left_s >= _LEFT_PERIODS * period_s
        if in_time and len(answers) == self._world_size and all(answer.keeps for answer in answers.values()):
            return replace(plan, state="agreed")
        if any(pulse.ended for pulse in pulses.values()):
            return replace(plan, state="refused", text="the run has ended")
        if in_time and all(answer.keeps for answer in answers.values()):
            return plan  # others have not answered yet
        if self._request is None or self._tries == _TRIES:
            quiet = sorted({*range(self._world_size)} - {*answers})
            why = f"rank {quiet[0]} did not answer" if quiet else "the steps were too fast"
            return replace(plan, state="refused", text=f"no step was found that all ranks could record: {why}")
        return self._planned(self._request, plan.ranks, newest, period_s, pulses)

    @staticmethod
    def _followed(plan: WindowPlan, pulses: Mapping[int, Pulse]) -> WindowPlan:
        ranks = [pulse for rank, pulse in pulses.items() if not plan.ranks or rank in plan.ranks]
        if ranks and all(pulse.ended and pulse.step <= plan.start for pulse in ranks):
            return replace(plan, state="refused", text=f"the run ended before step {plan.start}")
        if all(pulse.step >= plan.start + plan.steps or pulse.ended for pulse in ranks):
            said = [f"rank {pulse.rank}: {pulse.answer.text}" for pulse in ranks if pulse.answer.text]
            return replace(plan, state="recorded", text="; ".join([*filter(None, [plan.text]), *said])[:MOST_TEXT])
        return plan


def slow_ranks(status: RanksStatus) -> tuple[int, ...]:
    """The straggler or else the rank with most work of its own, of the others one with a median of it, and rank 0."""
    ranks = [rank for _, rank in sorted((one.own_ms, one.rank) for one in status.ranks if one.own_ms is not None)]
    late = status.straggler.rank if status.straggler is not None else ranks[-1] if ranks else 0
    others = [rank for rank in ranks if rank not in {0, late}]
    return tuple(sorted({0, late, *others[len(others) // 2 :][:1]}))


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank's part: says whether it can keep a plan, and arms it once all can."""

    run: str
    rank: int
    refusal: Callable[[], str]  # why nothing can be recorded here; "" if it can
    arm: Callable[[WindowPlan], object]

    def hear(self, plan: WindowPlan | None, before: WindowAnswer, step: int) -> WindowAnswer:
        """What to answer to the latest plan."""
        if plan is None or plan.run != self.run or plan.number < before.number:
            return before
        in_time = step + 1 < plan.start  # the step before is the profiler's warm-up
        if plan.number > before.number and plan.state == "planned":
            text = self.refusal()[:MOST_TEXT]
            return WindowAnswer(number=plan.number, keeps=in_time and not text, text=text)
        if plan.number == before.number and plan.state == "agreed" and before.keeps:
            records = not plan.ranks or self.rank in plan.ranks
            if records and in_time:
                self.arm(plan)
            late = records and not in_time
            return WindowAnswer(number=plan.number, text="it heard too late of the agreement" if late else "")
        return before

"""Ranks that hear each other late agree on the steps to record, or record none: by made-up clocks."""

import random
from itertools import pairwise

import pytest

from lightning_forge_profiling.ranks.agreement import Follower, Leader, Slowness, slow_ranks
from lightning_forge_profiling.record.files import decode_pulse, encode_message
from lightning_forge_profiling.schema import (
    LateRank,
    Pulse,
    RanksStatus,
    RankStatus,
    WindowAnswer,
    WindowPlan,
    WindowRequest,
)

RUN = "r"


def pulse(rank, step, answer=None, *, ended=""):
    known = {"run": RUN, "rank": rank, "world_size": 8, "host": "a", "pid": 10, "number": 1, "at": 0.0}
    return Pulse(**known, step=step, answer=answer or WindowAnswer(), ended=ended)


class Rank:
    """Trains, and looks about once a second, as its thread does."""

    def __init__(self, rank, clock, step_s, pauses=(), refusal=""):
        self.rank, self.clock, self.step_s, self.pauses = rank, clock, step_s, pauses
        self.armed, self.answer, self.recorded = None, WindowAnswer(), []
        self.follower = Follower(RUN, rank, refusal=lambda: refusal, arm=self.arm)

    def arm(self, plan):
        assert self.step() < plan.start - 1, "the warm-up step has not begun"
        self.recorded.append((plan.start, plan.steps))

    def step(self):
        paused_s = sum(min(max(self.clock.now - begin, 0.0), length) for begin, length in self.pauses)
        return int((self.clock.now - paused_s) / self.step_s)


class Clock:
    now = 0.0


def train(seed, world_size, *, asks, seconds, step_s, lag_s=1.0, pauses=(), deaf=(), refusals=None):
    """Let ranks look at random moments, about a second apart, with what others said arriving late; all their plans."""
    chance, clock = random.Random(seed), Clock()  # noqa: S311
    ranks = [Rank(rank, clock, step_s, pauses, (refusals or {}).get(rank, "")) for rank in range(world_size)]
    leader, told, pulses, plans = Leader(RUN, world_size, lambda _: False), [], {}, []
    due = [(chance.random(), rank) for rank in range(world_size)]
    asks = list(asks)
    while due:
        due.sort()
        clock.now, number = due.pop(0)
        if clock.now > seconds:
            break
        rank = ranks[number]
        heard = [plan for at, plan in told if at <= clock.now]
        if number == 0:
            rank.answer = rank.follower.hear(leader.plan, rank.answer, rank.step())
        elif number not in deaf:
            rank.answer = rank.follower.hear(heard[-1] if heard else None, rank.answer, rank.step())
        pulses.setdefault(number, []).append(
            (clock.now + chance.random() * lag_s, pulse(number, rank.step(), rank.answer))
        )
        if number == 0:
            if asks and clock.now >= asks[0]:
                asks.pop(0)
                leader.ask(WindowRequest(id=str(clock.now), steps=3))
            known = {one: [said for at, said in pulses[one] if at <= clock.now or one == 0][-1:] for one in pulses}
            if leader.look(clock.now, {one: said[0] for one, said in known.items() if said}, RanksStatus()):
                told.append((clock.now + chance.random() * lag_s / 2, leader.plan))
                plans.append(leader.plan)
        due.append((clock.now + 1.0 + chance.random() * 0.2, number))
    return ranks, plans


@pytest.mark.parametrize("step_s", [0.002, 0.05, 0.7, 4.0])
def test_all_ranks_record_the_same_steps(step_s):
    windows = 0
    for seed in range(25):
        pauses = [(seed % 7 * 5.0, 12.0)] if seed % 2 else []  # validation, in which no step ends
        ranks, plans = train(
            seed, 4, asks=[20.0 + seed / 10, 70.0, 130.0], seconds=240 + 40 * step_s, step_s=step_s, pauses=pauses
        )
        assert len({tuple(rank.recorded) for rank in ranks}) == 1, plans
        windows += len(ranks[0].recorded)
        assert [plan.state for plan in plans].count("agreed") == len(ranks[0].recorded)
    assert windows == 75, "each request was kept"


def test_ranks_that_hear_late_are_given_more_time():
    ranks, plans = train(1, 8, asks=[20.0], seconds=200, step_s=0.05, lag_s=6.0)
    assert len({tuple(rank.recorded) for rank in ranks}) == 1
    assert len(ranks[0].recorded) == 1
    assert [plan.state for plan in plans].count("planned") > 1
    leads = [later.start - earlier.start for earlier, later in pairwise(p for p in plans if p.state == "planned")]
    assert all(lead > 0 for lead in leads)


def test_a_rank_that_never_answers_makes_that_none_records():
    ranks, plans = train(1, 4, asks=[20.0], seconds=300, step_s=0.05, deaf=[2])
    assert not any(rank.recorded for rank in ranks)
    assert plans[-1].state == "refused"
    assert plans[-1].text == "no step was found that all ranks could record: rank 2 did not answer"


def test_a_rank_that_cannot_record_makes_that_none_does_and_says_why():
    ranks, plans = train(1, 4, asks=[20.0], seconds=60, step_s=0.05, refusals={3: "the disk of /t is full"})
    assert not any(rank.recorded for rank in ranks)
    assert (plans[-1].state, plans[-1].text) == ("refused", "the disk of /t is full")


def test_a_long_reason_still_reaches_rank_0():
    """An answer that is too long would not be read, nor what the rank says besides."""
    ranks, plans = train(1, 4, asks=[20.0], seconds=60, step_s=0.05, refusals={3: "the disk is full " * 100})
    assert plans[-1].text == ("the disk is full " * 100)[:500]
    said = pulse(3, 1, ranks[3].answer)
    assert decode_pulse(encode_message(said)) == said


def test_a_run_that_ends_before_the_step_says_so():
    leader, now = Leader(RUN, 1, lambda _: False), 0.0
    leader.ask(WindowRequest(id="a"))
    for step, ended, answer in [(100, "", 0), (110, "", 0), (120, "", 1), (130, "finished", 1)]:
        now += 1.0
        leader.look(now, {0: pulse(0, step, WindowAnswer(number=answer, keeps=True), ended=ended)}, RanksStatus())
    assert leader.plan.state == "refused"
    assert leader.plan.text == f"the run ended before step {leader.plan.start}"


def test_steps_that_the_run_does_not_have_are_not_promised():
    for of_fit, state in ((1030, "refused"), (1060, "planned"), (None, "planned")):
        leader = Leader(RUN, 1, lambda _: False, of_fit)
        leader.ask(WindowRequest(id="a", steps=3))
        for now in range(3):
            leader.look(float(now), {0: pulse(0, 1000 + 8 * now)}, RanksStatus())
        assert leader.plan.state == state
        assert of_fit != 1030 or leader.plan.text == "the run has 1030 steps, and 1008 have ended"


def test_no_window_has_a_pause_in_it():
    leader = Leader(RUN, 1, lambda step: step % 10 == 0)
    for steps in (1, 3, 9):
        leader.ask(WindowRequest(id="a", steps=steps))
        for now in range(3):
            leader.look(float(now), {0: pulse(0, 1000 + now)}, RanksStatus())
        start = leader.plan.start
        assert all(step % 10 for step in range(start, start + steps))
        leader.plan = None


def test_another_runs_plan_and_an_older_one_are_not_followed():
    armed = []
    follower = Follower(RUN, 1, refusal=str, arm=armed.append)
    plan = WindowPlan(run="another", number=3, request="a", state="agreed", start=100)
    answer = WindowAnswer(number=3, keeps=True)
    assert follower.hear(plan, answer, 5) == answer
    assert follower.hear(WindowPlan(run=RUN, number=2, request="a", state="agreed", start=100), answer, 5) == answer
    # one whose planning it has not heard of: it has not said that it can keep it
    assert follower.hear(WindowPlan(run=RUN, number=4, request="a", state="agreed", start=100), answer, 5) == answer
    assert not armed


def test_slow_ranks_are_the_late_one_a_median_one_and_rank_0():
    def one(rank, own_ms):
        return RankStatus(rank=rank, host="a", pid=1, state="live", age_s=0.0, step=1, own_ms=own_ms)

    ranks = tuple(one(rank, 10.0 + rank) for rank in range(9))
    late = LateRank(rank=3, cause="forward", ms=5.0)
    assert slow_ranks(RanksStatus(ranks=ranks, straggler=late)) == (0, 3, 5)
    assert slow_ranks(RanksStatus(ranks=ranks)) == (0, 4, 8)
    assert slow_ranks(RanksStatus(ranks=ranks[:2])) == (0, 1)
    assert slow_ranks(RanksStatus(ranks=ranks[:2], straggler=LateRank(rank=0, cause="forward", ms=5.0))) == (0, 1)
    assert slow_ranks(RanksStatus()) == (0,)


# -- what is called slow ----------------------------------------------------------------------------------------------


def looked(step_ms, *, slowest=lambda _: (0, 0.0), late=lambda _: None, paused_s=lambda _: 0.0):
    """What is said of a run whose steps take so long in each second."""
    slowness, said, step, at = Slowness(), [], 0, 0.0
    for second, ms in enumerate(step_ms):
        steps = max(round(1000 / ms), 1)
        step, at = step + steps, at + steps * ms / 1e3 + (paused_s(second) - paused_s(second - 1))
        if text := slowness.look(at, step, paused_s(second), slowest(second), late(second)):
            said.append((second, text))
    return said


def test_a_steady_run_is_never_slow_nor_one_that_scatters_or_pauses():
    chance = random.Random(1)  # noqa: S311
    assert looked([20.0] * 600) == []
    assert looked([20.0 * chance.uniform(0.9, 1.25) for _ in range(3600)]) == []
    assert looked([20.0] * 600, paused_s=lambda second: 30.0 * (second // 60)) == []
    assert looked([20.0 if second % 30 > 8 else 40.0 for second in range(600)]) == [], "slow for less than ten seconds"


def test_steps_that_stay_longer_are_noticed_once():
    [(second, text)] = looked([20.0] * 100 + [26.0] * 300)
    assert 109 <= second <= 111
    assert text.endswith("took 26 ms, earlier ones 20 ms")


def test_a_very_long_step_is_noticed():
    [(second, text)] = looked([20.0] * 300, slowest=lambda second: (4711, 90.0) if second >= 80 else (12, 30.0))
    assert second == 80
    assert text == "step 4711 took 90 ms, the usual one 20 ms"


def test_a_phase_of_long_steps_is_no_single_step_and_one_in_the_pause_is_said_after_it():
    def phase(second):
        return (0, 0.0) if second < 100 else (4711, 70.0)

    [(second, text)] = looked([20.0] * 100 + [60.0] * 200, slowest=phase)
    assert second >= 109
    assert text.endswith("took 60 ms, earlier ones 20 ms")
    (first, one), (second, lasting) = looked([20.0] * 40 + [26.0] * 300, slowest=lambda s: (9, 90.0 if s > 35 else 0.0))
    assert (first, one) == (36, "step 9 took 90 ms, the usual one 20 ms")
    assert 90 < second < 100
    assert lasting.endswith("took 26 ms, earlier ones 20 ms")


def test_a_rank_that_becomes_late_is_noticed_once_for_each_cause():
    def late(second):
        return None if second < 50 else LateRank(rank=2, cause="data" if second < 200 else "forward", ms=3.0)

    said = looked([20.0] * 400, late=late)
    assert said == [(50, "rank 2 has become late: data"), (200, "rank 2 has become late: forward")]

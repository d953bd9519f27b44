"""Gradient accumulation: where a cycle ends, and which of its steps are in a log entry, the record and the totals."""

from types import SimpleNamespace

import pytest
from torch.nn import Linear

from lightning_forge_profiling.run.batches import WorkCounter
from lightning_forge_profiling.run.training import BatchSource
from lightning_forge_profiling.timing.estimate import timing_of
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepWork


def cycles(updates, *, automatic=False):
    """Counts batches after each of which the weights have been updated so often: whether one changed them, and ended
    a cycle."""
    counter = WorkCounter(None, None, None, Linear(1, 1), updates=updates, automatic=automatic)
    training = SimpleNamespace(accumulated=1, batch_source=lambda: BatchSource(()))

    def after(updates, step):
        work = counter.count(None, training, step, updates=updates)
        return bool(work.optimizer_steps), work.ends_cycle

    return after


def test_a_cycle_ends_with_the_batch_that_changes_the_weights():
    after = cycles(updates=5)  # of the checkpoint that the fit goes on from
    ends = [after(updates, step) for step, updates in enumerate([5, 5, 6, 6, 6, 8])]
    assert ends == [(False, False), (False, False), (True, True)] * 2, "two optimizers are one change"


def test_without_accumulation_every_batch_ends_a_cycle_also_where_no_update_is_counted():
    after = cycles(updates=0, automatic=True)
    assert after(0, 0) == (False, True)
    assert after(1, 1) == (True, True)


def test_a_module_whose_updates_are_not_counted_is_taken_to_accumulate_no_longer_than_64_steps():
    after = cycles(updates=0)
    assert [after(0, step)[1] for step in range(66)] == [False] * 64 + [True] * 2
    assert after(1, 66) == (True, True)
    assert after(1, 67) == (False, False), "its cycles are known from here on"


class Steps:
    """Steps of 10, 11, 12, ... ms with one sample each: `.` accumulates, `u` changes the weights and ends a cycle.

    In capitals, `R` and `U`, the profiler records them.
    """

    def __init__(self, bucket=int):
        self.totals, self.step = RunTotals(bucket=bucket), 0

    def run(self, steps):
        for each in steps:
            ends, ms = each in "uU", 10.0 + self.step
            work = StepWork(samples=1, optimizer_steps=int(ends), ends_cycle=ends)
            times = StepTimes(self.step, {"forward": ms}, {"forward": ms / 2})
            self.totals.add(times, work, "recorded" if each in "RU" else None)
            self.step += 1
        return self

    def logged(self):
        return figures(self.totals.take())

    def written(self, **options):
        counters = self.totals.take_interval(**options)
        assert sum(counters.steps_us.values()) == counters.steps
        return figures(timing_of(counters))

    def all(self):
        return figures(self.totals.steady())


def figures(rates):
    """Steps, steps that changed the weights, samples, and milliseconds on the device and the host."""
    return rates.steps, rates.optimizer_steps, rates.samples, rates.total_ms, rates.steps * rates.host_step_ms


NONE = (0, 0, 0, 0, 0)


def test_a_log_entry_holds_whole_cycles_and_the_next_one_the_rest():
    steps = Steps().run("..u.")
    assert steps.logged() == (3, 1, 3, 33, 16.5), "10, 11 and 12 ms, without the beginning of the next cycle"
    assert steps.logged() == NONE
    steps.run(".")
    assert steps.logged() == NONE, "still in the middle"
    steps.run("u")
    assert steps.logged() == (3, 1, 3, 13 + 14 + 15, 21)
    assert steps.all() == (6, 2, 6, 75, 37.5)


def test_the_totals_have_the_steps_of_a_cycle_that_has_not_ended():
    steps = Steps().run("..u..")
    assert steps.all() == (5, 1, 5, 60, 30)
    summary = steps.totals.timing(steps=5, before_first_s=0, wall_s=1)
    assert (summary.steps, summary.left_out.untimed, summary.step_ms.max) == (5, 0, 14)
    assert sum(steps.totals.counters().steps_us.values()) == 5


def test_an_interval_of_the_record_waits_for_the_log_entry_and_the_last_one_has_everything():
    steps = Steps().run("..u..")
    assert steps.written() == NONE
    steps.logged()
    assert steps.written() == (3, 1, 3, 33, 16.5)
    assert steps.written(last=True) == (2, 0, 2, 27, 13.5)
    assert steps.logged() == NONE, "written already"
    assert steps.all() == (5, 1, 5, 60, 30)


@pytest.mark.parametrize("window", [".R", "R.", "RR"])
def test_a_cycle_with_a_recorded_step_in_it_is_in_no_log_entry_and_its_other_steps_count(window):
    steps = Steps().run("..u" + window + "u")
    assert steps.logged() == (3, 1, 3, 33, 16.5)
    others = [13 + at for at, each in enumerate(window) if each == "."] + [15]
    assert steps.written() == (3 + len(others), 2, 3 + len(others), 33 + sum(others), (33 + sum(others)) / 2)
    steps.run("..u")
    assert steps.logged() == (3, 1, 3, 16 + 17 + 18, 25.5), "the next cycle is whole again"


def test_a_window_that_ends_with_a_cycle_breaks_none_after_it():
    steps = Steps().run("..u..U")
    assert steps.logged()[0] == 3
    steps.run("..u")
    assert steps.logged()[0] == 3
    assert steps.all()[0] == 8


def test_a_step_that_could_not_be_timed_breaks_its_cycle():
    steps = Steps().run("..u.")
    steps.totals.skip(StepWork(samples=1, ends_cycle=False))
    steps.run("u..u")
    assert steps.logged() == (6, 2, 6, 33 + 15 + 16 + 17, 40.5)
    assert steps.all()[0] == 8
    steps.totals.skip(StepWork(samples=1, optimizer_steps=1, ends_cycle=True))
    steps.run("u")
    assert steps.logged()[0] == 1, "a cycle of its own was lost, and the next is whole"

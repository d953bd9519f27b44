"""Whether the step is steady when the warm-up ends: a drift is found with its end, noise is not taken for one."""

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_forge_profiling.schema import StepDrift
from lightning_forge_profiling.timing.bootstrap import DRIFT_STEPS, step_drift
from lightning_forge_profiling.timing.events import HostEventSource
from tests.models import Classifier, every_step, loader
from tests.outcomes import summary_of


def noise(rng, steps, *, correlation, spread):
    """Step times of a mean of 10 ms whose logarithm is an AR(1) process."""
    shocks = rng.standard_normal(steps + 100) * np.sqrt(1 - correlation**2)
    level, levels = rng.standard_normal(), []
    for shock in shocks:
        level = correlation * level + shock
        levels.append(level)
    return 10 * np.exp(spread * np.array(levels[100:]))


@pytest.mark.parametrize("steps", [DRIFT_STEPS, 256, 512])
def test_noise_is_taken_for_a_drift_in_under_5_percent_of_runs(steps):
    """Of correlations up to 0.9 and spreads up to 0.3, both at once have the most: 1 to 3 %."""
    rng = np.random.default_rng(20)
    runs = [noise(rng, steps, correlation=0.9, spread=0.3) for _ in range(300)]
    assert sum(step_drift(range(steps), run) is not None for run in runs) < 0.05 * len(runs)


def test_steps_fall_until_they_are_steady():
    times = [12.0 - step // 8 if step < 40 else 8.0 for step in range(200)]
    assert step_drift(range(10, 210), times) == StepDrift(first_ms=12.0, steady_ms=8.0, until_step=42)


@pytest.mark.parametrize(("lasts", "by"), [(12, 9.0), (50, 0.5), (150, 0.5), (150, 0.2), (150, -0.3)])
def test_a_drift_is_found_with_its_end(lasts, by):
    rng = np.random.default_rng(7)
    ramp = 1 + by * np.clip(1 - np.arange(512) / lasts, 0, None)
    runs = [step_drift(range(10, 522), ramp * noise(rng, 512, correlation=0.5, spread=0.03)) for _ in range(50)]
    drifts = [run for run in runs if run is not None]
    assert len(drifts) >= 48
    assert all((run.first_ms > run.steady_ms) == (by > 0) for run in drifts)
    ends = [run.until_step for run in drifts]
    assert 10 + lasts / 3 <= np.median(ends) <= 10 + lasts + 32


def test_a_run_that_never_settles_has_no_end():
    drift = step_drift(range(512), [20 - 10 * step / 512 if step < 400 else 12.0 for step in range(512)])
    assert drift is not None
    assert drift.until_step is None


def test_few_steps_say_nothing():
    assert step_drift(range(DRIFT_STEPS - 1), [50.0] * 30 + [5.0] * (DRIFT_STEPS - 31)) is None


@pytest.mark.parametrize("each", [2, 4, 8])
def test_steps_that_take_turns_do_not_drift(each):
    assert step_drift(range(512), [20.0 if step % each == 0 else 5.0 for step in range(512)]) is None


class SlowAtFirst(Callback):
    """Moves a clock by 60 ms in each of the first steps, and by 8 ms in the others."""

    def __init__(self, slow_steps):
        self.slow_steps, self.now_ns = slow_steps, 0

    def on_train_batch_end(self, trainer, *_):
        self.now_ns += 60_000_000 if trainer.global_step <= self.slow_steps else 8_000_000


@pytest.mark.slow
@pytest.mark.two_clocks
@pytest.mark.parametrize(
    ("slow_steps", "until"),
    [
        (30, "until step 34; warmup_steps=40 leaves that out"),
        (66, "after the warm-up, and was not steady within the steps that were compared"),
    ],
)
def test_a_fit_that_settles_late_says_so(make_trainer, tmp_path, monkeypatch, slow_steps, until):
    slow = SlowAtFirst(slow_steps)
    source = HostEventSource(lambda: slow.now_ns)
    monkeypatch.setattr("lightning_forge_profiling.timing.collection.event_source", lambda _: source)
    make_trainer(every_step(warmup_steps=2), slow, logger=False).fit(Classifier(), loader(4 * 130))
    assert f"step time still fell from 60.0 to 8.00 ms {until}" in summary_of(tmp_path)

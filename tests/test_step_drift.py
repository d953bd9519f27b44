"""Whether the step is steady when the warm-up ends: a drift is found with its end, noise is not taken for one."""

import time

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.step_drift import FEWEST_STEPS, step_drift
from tests.models import Classifier, loader


def noise(rng, steps, *, correlation, spread):
    """Step times of a mean of 10 ms whose logarithm is an AR(1) process."""
    shocks = rng.standard_normal(steps + 100) * np.sqrt(1 - correlation**2)
    level, levels = rng.standard_normal(), []
    for shock in shocks:
        level = correlation * level + shock
        levels.append(level)
    return 10 * np.exp(spread * np.array(levels[100:]))


@pytest.mark.parametrize("steps", [FEWEST_STEPS, 256, 512])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_noise_is_taken_for_a_drift_in_under_5_percent_of_runs(steps, correlation, spread):
    rng = np.random.default_rng(20)
    runs = [noise(rng, steps, correlation=correlation, spread=spread) for _ in range(300)]
    assert sum(step_drift(range(steps), run) is not None for run in runs) < 0.05 * len(runs)


@pytest.mark.parametrize(("lasts", "by"), [(12, 9.0), (50, 0.5), (150, 0.5), (150, 0.2), (150, -0.3)])
def test_a_drift_is_found_with_its_end(lasts, by):
    rng = np.random.default_rng(7)
    ramp = 1 + by * np.clip(1 - np.arange(512) / lasts, 0, None)
    runs = [step_drift(range(10, 522), ramp * noise(rng, 512, correlation=0.5, spread=0.03)) for _ in range(50)]
    found = [run for run in runs if run is not None]
    assert len(found) >= 48
    assert all((run.first_ms > run.steady_ms) == (by > 0) for run in found)
    ends = [run.until_step for run in found]
    assert 10 + lasts / 3 <= np.median(ends) <= 10 + lasts + 32


def test_a_run_that_never_settles_has_no_end():
    found = step_drift(range(512), [20 - 10 * step / 512 if step < 400 else 12.0 for step in range(512)])
    assert found is not None
    assert found.until_step is None


def test_few_steps_say_nothing():
    assert step_drift(range(FEWEST_STEPS - 1), [50.0] * 30 + [5.0] * (FEWEST_STEPS - 31)) is None


@pytest.mark.parametrize("each", [2, 4, 8])
def test_steps_that_take_turns_do_not_drift(each):
    assert step_drift(range(512), [20.0 if step % each == 0 else 5.0 for step in range(512)]) is None


class SlowAtFirst(Callback):
    """Sleeps in the first 30 steps, for longer than a busy machine's steps vary."""

    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.06 if trainer.global_step <= 30 else 0.0)


def test_a_fit_that_settles_late_says_so(make_trainer, capsys):
    ours = ThroughputCallback(warmup_steps=2)
    make_trainer(ours, SlowAtFirst(), logger=False).fit(Classifier(), loader(4 * 130))
    drift = ours.analysis().run.drift
    assert drift.first_ms > 60 > drift.steady_ms
    said = " ".join(capsys.readouterr().out.split())
    assert "step time still fell from " in said
    if drift.until_step is not None:  # a busy machine's steps may not have become steady by then
        assert drift.until_step >= 25
        assert f"until step {drift.until_step}; warmup_steps=" in said

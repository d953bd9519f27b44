"""What a recorded window leaves behind: CUPTI is told to leave, and steps after it are compared with those before."""

import json
import os

import pytest
import torch

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.profiler.collector import detached_at_stop, why_attached
from lightning_forge_profiling.report.run_wording import window_effect_words
from lightning_forge_profiling.timing.bootstrap import WINDOW_STEPS, window_effect
from tests.models import Classifier, loader


@pytest.fixture
def _cuda_13(monkeypatch):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.usefixtures("_cuda_13")
def test_kineto_is_told_to_detach_cupti_for_the_time_of_the_stop():
    before = dict(os.environ)
    with detached_at_stop() as why:
        assert os.environ["TEARDOWN_CUPTI"] == "1"
        assert not why
    assert dict(os.environ) == before


@pytest.mark.usefixtures("_cuda_13")
def test_the_environment_is_put_back_when_the_stop_fails():
    with pytest.raises(RuntimeError), detached_at_stop():
        raise RuntimeError
    assert "TEARDOWN_CUPTI" not in os.environ


@pytest.mark.usefixtures("_cuda_13")
@pytest.mark.parametrize("chosen", ["0", "1"])
def test_what_the_user_or_inductor_chose_stays(monkeypatch, chosen):
    monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    with detached_at_stop() as why:
        assert os.environ["TEARDOWN_CUPTI"] == chosen
        assert bool(why) == (chosen == "0")
    assert os.environ["TEARDOWN_CUPTI"] == chosen


@pytest.mark.parametrize("cuda", ["11.8", "12.1", "12.4"])
def test_it_stays_attached_where_detaching_may_crash_and_says_what_to_do(cuda, monkeypatch):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with detached_at_stop() as why:
        assert "TEARDOWN_CUPTI" not in os.environ
    assert f"CUDA {cuda}" in why
    assert "set TEARDOWN_CUPTI=1" in why


@pytest.mark.parametrize("cuda", ["12.6", "12.10", "13.0", "13.2.1"])
def test_newer_cuda_versions_are_safe(cuda):
    assert not why_attached({}, cuda)


def test_a_build_without_cuda_has_nothing_to_detach():
    assert not why_attached({"TEARDOWN_CUPTI": "0"}, None)


def test_the_summary_compares_the_steps_on_both_sides(make_trainer):
    forge = ForgeProfilerCallback(40, 42)
    make_trainer(forge, logger=False).fit(Classifier(), loader(4 * 100))
    effect = forge.analysis().run.timing.window_effect
    assert effect.steps_before == 34, "without the first five, and without the profiler's warm-up step"
    assert effect.steps_after == 53, "without the first five after the window"
    assert effect.low_pct <= effect.change_pct <= effect.high_pct
    assert effect.change_pct == pytest.approx(100 * (effect.after_ms / effect.before_ms - 1))
    report = forge.trace_report()
    written = json.loads(report.summary_path.read_text())["run"]["timing"]["window_effect"]
    assert written["change_pct"] == effect.change_pct
    text = report.summary_path.with_suffix(".md").read_text()
    assert "the median step takes" in text
    assert ("slower since then" in text) == (effect.low_pct > 10)  # as on a machine that becomes busy


def test_a_window_too_early_to_compare_is_not_compared(make_trainer, capsys):
    forge = ForgeProfilerCallback(5, 8)
    make_trainer(forge, logger=False).fit(Classifier(), loader(4 * 60))
    assert forge.analysis().run.timing.window_effect is None
    assert "after the window" not in capsys.readouterr().out


def test_a_slower_run_is_seen_and_an_equal_one_is_not_called_slower():
    before = [5.0 + 0.05 * (step % 9) for step in range(60)]
    slower = window_effect(before, [1.25 * ms for ms in before])
    assert slower.change_pct == pytest.approx(25)
    assert slower.low_pct > 20
    assert window_effect_words(slower).endswith("%); slower since then, by the profiler or by the machine")
    same = window_effect(before, before[::-1])
    assert same.low_pct <= 0 <= same.high_pct
    assert "slowed" not in window_effect_words(same)
    assert window_effect(before[: WINDOW_STEPS - 1], before) is None
    assert window_effect(before, []) is None

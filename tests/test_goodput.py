"""Goodput: the share of the wall time in which a run trained, in its rows, its table and its summary."""

import json
import time

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import BEFORE_FIT, LOGGED_KINDS
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.run_wording import goodput_words
from lightning_forge_profiling.schema import Analysis, Distribution, RunLedger, RunRegion, RunTiming
from lightning_forge_profiling.timing.ledger import goodput, ledger_metrics
from tests.evidence import made_evidence
from tests.models import Classifier, loader
from tests.outcomes import logged


class Slow(Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.02)


class AtTheEnd(Callback):
    """Reads the ledger behind ours, at the moment of its summary."""

    def __init__(self, ours):
        self.ours = ours

    def on_train_end(self, *_):
        self.ledger = self.ours.ledger()


class SlowValidation(Classifier):
    def validation_step(self, batch):
        time.sleep(0.1)


def ledger(**parts):
    parts = {name.replace("__", "/"): seconds for name, seconds in parts.items()}
    return RunLedger(wall_s=sum(parts.values()), parts=parts, unexplained_s=0.0, counts={})


def test_each_log_entry_has_the_run_up_to_then(make_trainer, tmp_path):
    ours = ThroughputCallback(warmup_steps=0)
    at_end = AtTheEnd(ours)
    make_trainer(ours, Slow(), at_end, max_epochs=2, log_every_n_steps=4).fit(SlowValidation(), loader(32), loader(8))

    rows, parts = logged(tmp_path), at_end.ledger.parts
    for row in rows:
        assert sum(row[f"run/{kind}_pct"] for kind in LOGGED_KINDS) == pytest.approx(100)
        process_pct = 100 - row["run/profiler_pct"]  # of which a part of `startup` lies before the fit
        least, most = (row["run/steps_pct"] / pct for pct in (process_pct, process_pct - row["run/startup_pct"]))
        assert 0.999 * least <= row["run/goodput"] <= 1.001 * most
    assert rows[0]["run/validation_pct"] == 0 < rows[-1]["run/validation_pct"]
    callbacks_s = sum(s for name, s in parts.items() if name.startswith("callback/"))
    assert ours.summary()["run/callbacks_pct"] == pytest.approx(100 * callbacks_s / at_end.ledger.wall_s, rel=0.1)


def test_the_table_and_all_reports_have_it(make_trainer, tmp_path, capsys):
    forge = ForgeProfilerCallback(2, 4, trace_dir=tmp_path)
    ours = ThroughputCallback(warmup_steps=0)
    make_trainer(ours, forge, Slow(), log_every_n_steps=4).fit(Classifier(), loader(32))

    run = ours.analysis().run
    words = goodput_words(run.ledger)
    assert " % of the fit was training" in words
    folder = forge.trace_report().path.parent
    assert words in capsys.readouterr().out
    assert words in (folder / "summary.md").read_text()
    assert json.loads((folder / "summary.json").read_text())["run"]["ledger"]["goodput"] == run.ledger.goodput
    parts = run.ledger.parts
    assert parts["profiler"] > 0
    outside = sum(parts.get(name, 0.0) for name in (*BEFORE_FIT, "profiler"))
    assert run.ledger.goodput == pytest.approx(parts["steps"] / (run.ledger.wall_s - outside))


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "hook_s", "productive"),
    [
        (30.0, 0.3, 2.6, 0.8 + 0.2),  # the hook reads a value, and waits for what the GPU computes
        (30.0, 30.0, 2.6, 0.8),  # the GPU waits for the hook
        (30.0, 25.0, 2.6, 0.8 + 0.5 / 13),  # of which it computes 5 ms a step
    ],
)
def test_on_a_gpu_a_hook_that_waits_for_its_work_is_productive(host_ms, device_ms, hook_s, productive):
    whole = RunLedger(
        wall_s=13.0,
        parts={"steps": 10.4, "callback/Bar.on_train_batch_end": hook_s},
        unexplained_s=0.0,
        counts={},
    )
    other = RunRegion(device_ms=device_ms, host_ms=host_ms)
    timing = RunTiming(steps=100, on_device=True, regions={"other": other})
    assert goodput(whole, timing) == pytest.approx(productive)
    assert goodput(whole, RunTiming()) == pytest.approx(0.8)


def test_a_part_of_no_known_kind_is_in_other():
    metrics = ledger_metrics(ledger(steps=3.0, invented__by_a_later_version=1.0), RunTiming())
    assert metrics["run/other_pct"] == pytest.approx(25)
    assert metrics.keys() == {"run/goodput", *(f"run/{kind}_pct" for kind in LOGGED_KINDS)}


def test_before_any_time_has_passed_there_is_none():
    assert ledger_metrics(RunLedger(wall_s=0.0, parts={}, unexplained_s=0.0, counts={}), RunTiming()) == {}


def test_a_report_of_an_older_version_has_none():
    steps = Distribution(mean=5.0, p50=5.0, min=5.0, max=5.0)
    old = RunLedger(wall_s=2.0, parts={"steps": 2.0}, unexplained_s=0.0, counts={})
    run = made_evidence(steps=9, on_device=False, step_ms=steps, regions={}, ledger=old)
    analysis = Analysis(source="run", verdict="x", verdict_text="", findings=(), run=run)
    assert "| **`the run`** | 2.000 | 100.0 % |  |" in markdown(analysis)

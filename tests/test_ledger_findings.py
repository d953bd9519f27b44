"""What bounds a run outside its steps: a planted cost is the verdict, and its seconds are those that were planted."""

import time
from dataclasses import replace

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.results.analysis import RunEvidence, RunLedger, RunRegion
from lightning_forge_profiling.results.rank import Distribution
from tests.models import Classifier, loader

STEP_MS, STEPS = 50.0, 200


def evidence(*, data_ms=0.0, before_s=2.0, **parts):
    """A run of `STEPS` steps of `STEP_MS`, and what else took its time."""
    ledger = {"startup/process": before_s, "steps": STEPS * STEP_MS / 1e3, **parts}
    return RunEvidence(
        steps=STEPS,
        on_device=True,
        step_ms=Distribution(mean=STEP_MS, p50=STEP_MS, min=STEP_MS, max=STEP_MS),
        regions={"data": RunRegion(device_ms=data_ms, host_ms=data_ms)},
        ledger=RunLedger(
            wall_s=sum(ledger.values()), parts=ledger, unexplained_s=0.0, counts=dict.fromkeys(ledger, 10)
        ),
    )


@pytest.mark.parametrize(
    ("part", "code", "named"),
    [
        (
            "checkpoint",
            "checkpoint-bound",
            "saving checkpoints takes 30.0 s of the fit's 40.0 s (10 times, 3.0 s each)",
        ),
        ("validation", "validation-bound", "validation takes 30.0 s of the fit's 40.0 s (10 runs, 3.0 s each)"),
        ("callback/EMA.on_train_epoch_end", "slow-callback", "callback EMA.on_train_epoch_end takes 30.0 s"),
        ("callback/EMA.on_train_batch_end", "slow-callback", "30.0 s of the fit's 40.0 s (10 calls, 3.0 s each)"),
        ("module/on_train_epoch_end", "slow-hook", "the module's on_train_epoch_end takes 30.0 s"),
        ("datamodule/on_before_batch_transfer", "slow-hook", "the data module's on_before_batch_transfer takes 30.0 s"),
        ("logger/WandbLogger", "slow-logger", "the logger WandbLogger takes 30.0 s"),
        ("data_loader", "loader-startup", "creating the DataLoader and its iterator takes 30.0 s"),
        ("compile", "compile-bound", "torch.compile takes 30.0 s of the fit's 40.0 s (10 compilations, 3.0 s each)"),
    ],
)
def test_each_part_has_its_finding(part, code, named):
    analysis = combine(None, evidence(**{part: 30.0}))
    assert analysis.verdict == code
    [found] = analysis.findings
    assert named in found.title
    assert (found.of, round(found.share_pct), found.evidence["seconds"]) == ("run", 75, 30.0)
    assert f"of each {STEP_MS}" not in analysis.verdict_text
    assert analysis.verdict_text.endswith("That saves at most 30.0 s of the fit's 40.0 s (75 %).")


def test_what_is_small_is_not_named():
    assert combine(None, evidence(checkpoint=0.4, validation=0.4)).findings == ()


def test_the_verdict_is_what_gains_most_of_the_fit():
    waits = evidence(data_ms=25.0, validation=3.0)  # 5 of 13 s against 3 of 13 s
    assert [found.code for found in combine(None, waits).findings] == ["input-bound", "validation-bound"]
    waits = evidence(data_ms=25.0, validation=6.0)  # 5 of 16 s against 6 of 16 s
    assert [found.code for found in combine(None, waits).findings] == ["validation-bound", "input-bound"]


def test_what_happens_once_in_a_short_run_is_not_named():
    waits = evidence(checkpoint=30.0)
    once = replace(waits.ledger, counts={"checkpoint": 1})
    assert combine(None, replace(waits, ledger=once)).findings == ()
    long = replace(once, parts={**once.parts, "steps": 570.0}, wall_s=602.0)
    assert [found.code for found in combine(None, replace(waits, ledger=long)).findings] == ["checkpoint-bound"]


def test_startup_is_named_in_a_long_run_only():
    assert combine(None, evidence(before_s=500.0)).findings == (), "a trial of a longer run"
    [found] = combine(None, evidence(before_s=500.0, validation=0.0, **{"startup/fit": 100.0})).findings
    assert found.code == "startup-bound"
    assert found.title == "600 s pass before the first batch, 500 s of them before the fit"
    assert found.saves.text == "That saves at most 600 s of the run's 610 s (98 %)."


class SlowSave(Classifier):
    def state_dict(self, *args, **kwargs):
        time.sleep(0.3)
        return super().state_dict(*args, **kwargs)


class SlowValidation(Classifier):
    def validation_step(self, batch):
        time.sleep(0.1)


class Slow(Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.05)


class SlowHook(Classifier):
    def on_train_epoch_end(self):
        time.sleep(0.5)


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(0.3)
        super().log_metrics(metrics, step)


def saves_often(path):
    return [ModelCheckpoint(path, every_n_train_steps=10)]


@pytest.mark.parametrize(
    ("code", "part", "model", "options"),
    [
        (
            "checkpoint-bound",
            "checkpoint",
            SlowSave,
            {"callbacks": saves_often},
        ),
        ("validation-bound", "validation", SlowValidation, {}),
        ("slow-callback", "callback/Slow.on_train_batch_end", Classifier, {"callbacks": lambda _: [Slow()]}),
        ("slow-hook", "module/on_train_epoch_end", SlowHook, {}),
        ("slow-logger", "logger/SlowLogger", Classifier, {"logger": SlowLogger, "log_every_n_steps": 5}),
    ],
)
def test_a_planted_cost_is_the_verdict_of_a_real_fit(make_trainer, tmp_path, *, code, part, model, options):
    callbacks = options.get("callbacks", lambda _: [])(tmp_path)
    ours = ThroughputCallback(warmup_steps=2)
    trainer = make_trainer(
        ours, *callbacks, max_epochs=3, num_sanity_val_steps=0, log_every_n_steps=options.get("log_every_n_steps", 50),
        enable_checkpointing=bool(callbacks), logger=options["logger"](tmp_path) if "logger" in options else False,
    )  # fmt: skip
    trainer.fit(model(), loader(80), loader(16))
    analysis = ours.analysis()
    assert analysis.verdict == code, analysis.verdict_text
    assert analysis.findings[0].evidence["seconds"] == pytest.approx(
        ours.ledger().parts[next(iter(p for p in ours.ledger().parts if p not in {"startup/process", "steps"}))],
        rel=0.3,
    )

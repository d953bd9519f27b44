"""What bounds a run outside its steps: a planted cost is the verdict, and its seconds are those that were planted."""

import time

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from msgspec.structs import replace

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.schema import Distribution, LoaderSettings, RunLedger, RunRegion, SampledLine
from tests.evidence import made_evidence
from tests.models import Classifier, loader

STEP_MS, STEPS = 50.0, 200


def evidence(*, data_ms=0.0, before_s=2.0, gpu_starved_pct=None, counts=None, **parts):
    """A run of `STEPS` steps of `STEP_MS`, and what else took its time, each part 10 times unless `counts` has it."""
    ledger = {"startup/process": before_s, "steps": STEPS * STEP_MS / 1e3, **parts}
    return made_evidence(
        steps=STEPS,
        on_device=True,
        step_ms=Distribution(mean=STEP_MS, p50=STEP_MS, min=STEP_MS, max=STEP_MS),
        regions={"data": RunRegion(device_ms=data_ms, host_ms=data_ms)},
        ledger=RunLedger(
            wall_s=sum(ledger.values()),
            parts=ledger,
            unexplained_s=0.0,
            counts={**dict.fromkeys(ledger, 10), **(counts or {})},
        ),
        gpu_starved_pct=gpu_starved_pct,
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
        (
            "data_loader",
            "loader-startup",
            "creating the DataLoader, and beginning and ending its iterators, takes 30.0 s",
        ),
        (
            "gc/generation_2",
            "gc-bound",
            "garbage collection of generation 2 takes 30.0 s of the fit's 40.0 s (10 collections, 3.0 s each)",
        ),
        (
            "checkpoint/write",
            "checkpoint-bound",
            "saving checkpoints takes 30.0 s of the fit's 40.0 s (10 times, 3.0 s each); 30.0 s to write them",
        ),
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
    bound = "about" if code == "slow-logger" else "at most"  # fewer rows are less work for Lightning, too
    goes = ", if all of it goes" if bound == "at most" else ""
    assert analysis.verdict_text.endswith(f"That saves {bound} 30.0 s of the fit's 40.0 s (75 %){goes}.")


@pytest.mark.parametrize(("sampler", "drawn"), [("RandomSampler", True), ("SequentialSampler", False)])
def test_a_loader_that_shuffles_all_samples_each_epoch_may_draw_as_many_as_it_uses(sampler, drawn):
    loader = LoaderSettings(kind="DataLoader", loaders=1, num_workers=0, sampler=sampler, cores=2, ranks_on_host=1)
    run = evidence(data_loader=30.0)
    run = replace(run, settings=replace(run.settings, loader=loader))
    [found] = combine(None, run).findings
    assert ("RandomSampler(dataset, replacement=True, num_samples=N)" in found.advice) is drawn


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
    assert found.title == (
        "600 s pass until the first step has ended, 500 s of them before the fit; the longest is the script to the "
        "callbacks, with its imports, 500 s"
    )
    assert found.saves.text == "That saves at most 600 s of the run's 610 s (98 %), if all of it goes."


@pytest.mark.parametrize(
    ("part", "said", "advice"),
    [
        ("startup/imports", "the start of Python with the imports", "python -X importtime"),
        ("startup/script", "the script from its imports to the callbacks", "cache it on disk"),
        ("startup/trainer", "the script from the callbacks to the fit", "cache it on disk"),
        ("startup/datamodule.prepare_data", "the data module's prepare_data", "prepared files exist"),
        ("startup/callback.EMA.setup", "callback.EMA.setup", "Do less there"),
    ],
)
def test_the_longest_part_of_the_startup_is_named(part, said, advice):
    [found] = combine(None, evidence(before_s=100.0, validation=0.0, **{part: 500.0})).findings
    assert f"the longest is {said}, 500 s" in found.title
    assert advice in found.advice
    assert found.evidence["part"] == part


def in_set_up(function, pct, file=""):
    return SampledLine(file=file, line=7 if file else 0, function=function, pct=pct)


@pytest.mark.parametrize(
    ("called", "said", "advice"),
    [
        (
            SampledLine(file="", line=0, function="lightning.x.Strategy.setup", pct=90.0),
            "90 % of it in setup",
            "moves the",
        ),
        (
            SampledLine(file="train.py", line=7, function="Log.begin", pct=90.0),
            "90 % of it in train.py:7 Log",
            "Do less",
        ),
        (SampledLine(file="", line=0, function="lightning.x.Strategy.setup", pct=9.0), "500 s", "It sets up strategy"),
    ],
)
def test_of_the_set_up_the_call_is_named_that_takes_most_of_it(called, said, advice):
    ran = evidence(before_s=100.0, validation=0.0, **{"startup/fit": 500.0})
    [found] = combine(None, replace(ran, lines={"startup/fit": (called,)})).findings
    assert said in found.title.partition("the longest is Lightning's set-up between the hooks, ")[2]
    assert advice in found.advice


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


@pytest.mark.slow
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
    assert analysis.findings[0].evidence["seconds"] == pytest.approx(ours.ledger().wholes[part], rel=0.3)


# -- hooks within a step ---------------------------------------------------------------------------------------------


def stepping(*, parts, counts=None, other_ms=1.0, optimizer_ms=0.5, on_device=False, **options):
    """A run of `STEPS` steps of 5 ms, with its regions."""
    ledger = {"steps": STEPS * 5.0 / 1e3, **parts}
    regions = dict.fromkeys(("data", "transfer", "forward", "backward"), RunRegion(device_ms=0.1, host_ms=0.1))
    regions["other"] = RunRegion(device_ms=other_ms, host_ms=max(other_ms, 4.0))
    regions["optimizer"] = RunRegion(device_ms=optimizer_ms, host_ms=optimizer_ms)
    return made_evidence(
        steps=STEPS - 20,
        all_steps=STEPS,
        on_device=on_device,
        step_ms=Distribution(mean=5.0, p50=5.0, min=5.0, max=5.0),
        regions=regions,
        ledger=RunLedger(
            wall_s=sum(ledger.values()),
            parts=ledger,
            unexplained_s=0.0,
            counts=dict.fromkeys(ledger, STEPS) | (counts or {}),
            first_s=options.pop("first_s", {}),
        ),
        **options,
    )


LOGS = {"logger/CSVLogger": STEPS * 1.0 / 1e3}


def test_the_recording_of_a_short_run_does_not_hide_a_logger_of_each_step():
    recorded = stepping(parts={**LOGS, "profiler": 8.0, "startup/fit": 3.0, "teardown": 1.0}, other_ms=1.2)
    analysis = combine(None, recorded)
    assert analysis.verdict == "slow-logger"
    assert [found.code for found in analysis.findings] == ["slow-logger", "compute-bound"]
    assert analysis.findings[0].saves.ms_per_step == pytest.approx(1.0)
    assert "200 ms of the fit's 1.2 s (200 calls, 1.00 ms each)" in analysis.verdict_text


def test_a_logger_of_each_step_is_judged_by_the_step_where_the_fit_is_mostly_elsewhere():
    validates = stepping(parts={**LOGS, "validation": 30.0}, counts={"validation": 20}, other_ms=1.2)
    first, second, computes = combine(None, validates).findings
    assert computes.code == "compute-bound"
    assert first.code == "validation-bound"
    assert (second.code, second.of, second.share_pct) == ("slow-logger", "step", pytest.approx(20))
    assert second.title == "the logger CSVLogger takes 1.00 ms of each 5.00 ms step"


def test_what_comes_once_an_epoch_is_never_called_a_part_of_each_step():
    rare = stepping(
        parts={"module/on_train_epoch_end": 0.6, "validation": 1.0},
        counts={"module/on_train_epoch_end": 10, "validation": 10},
        other_ms=3.5,
    )
    findings = combine(None, rare).findings
    assert {"slow-hook", "validation-bound"} <= {found.code for found in findings}
    for found in findings:
        if found.code in {"slow-hook", "validation-bound"}:
            assert "of each" not in found.title
            assert "of each" not in found.saves.text


def test_what_an_epochs_hook_takes_is_not_between_regions_too():
    rare = stepping(
        parts={"module/on_train_epoch_end": 0.6}, counts={"module/on_train_epoch_end": 10}, other_ms=3.4
    )  # of the 3.4 ms, 3.0 are the hook's
    assert [found.code for found in combine(None, rare).findings] == ["slow-hook", "compute-bound"]


@pytest.mark.parametrize("part", ["callback/EMA.on_before_optimizer_step", "module/on_before_zero_grad"])
def test_a_hook_within_the_update_is_not_the_optimizers(part):
    hooked = stepping(parts={part: STEPS * 2.0 / 1e3}, optimizer_ms=2.3, other_ms=0.2)
    codes = [found.code for found in combine(None, hooked).findings]
    assert codes == ["slow-callback" if part.startswith("callback") else "slow-hook", "compute-bound"]
    without = stepping(parts={}, optimizer_ms=2.3, other_ms=0.2)
    assert [found.code for found in combine(None, without).findings] == ["slow-optimizer"]


def test_on_a_gpu_a_hook_costs_no_more_than_the_gpu_waits():
    prints = {"callback/Bar.on_train_batch_end": STEPS * 3.5 / 1e3}
    waits = stepping(parts=prints, other_ms=1.0, on_device=True)
    found = next(found for found in combine(None, waits).findings if found.code == "slow-callback")
    assert found.saves.ms_per_step == pytest.approx(1.0)
    assert found.title.endswith("(200 calls, 3.50 ms each), of which the GPU waits 200 ms")
    hidden = stepping(parts=prints, other_ms=0.05, on_device=True)
    assert "slow-callback" not in {found.code for found in combine(None, hidden).findings}, "behind queued work"


def test_workers_that_start_once_are_no_cost_of_each_epoch():
    parts, counts = {"data_loader": 0.130}, {"data_loader": 11}
    persistent = stepping(parts=parts, counts=counts, first_s={"data_loader": 0.110})
    assert "loader-startup" not in {found.code for found in combine(None, persistent).findings}
    each = stepping(parts=parts, counts=counts, first_s={"data_loader": 0.012})
    [found] = [found for found in combine(None, each).findings if found.code == "loader-startup"]
    assert found.title.endswith("(11 times, 12 ms each)")


class SleepsInUpdate(Classifier):
    def on_before_optimizer_step(self, optimizer):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_sleep_within_the_update_is_blamed_once(make_trainer, tmp_path):
    ours, forge = ThroughputCallback(warmup_steps=2, overhead=None), ForgeProfilerCallback(20, 31, trace_dir=tmp_path)
    make_trainer(ours, forge, logger=False).fit(SleepsInUpdate(), loader(4 * 40))
    analysis = ours.analysis()
    assert analysis.verdict == "slow-hook"
    assert analysis.findings[0].evidence["part"] == "module/on_before_optimizer_step"
    assert "slow-optimizer" not in {found.code for found in analysis.findings}
    assert sum(found.share_pct for found in analysis.findings[1:]) < 50, "and of what is left, the sleep is no part"


class LogsSlowly(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(0.01)
        super().log_metrics(metrics, step)


def test_a_recorded_run_of_few_steps_names_the_logger(make_trainer, tmp_path):
    ours, forge = ThroughputCallback(warmup_steps=2), ForgeProfilerCallback(20, 23, trace_dir=tmp_path)
    make_trainer(ours, forge, logger=LogsSlowly(tmp_path), log_every_n_steps=1).fit(Classifier(), loader(4 * 40))
    analysis = ours.analysis()
    assert analysis.verdict == "slow-logger", analysis.verdict_text
    assert analysis.findings[0].saves.ms_per_step > 10

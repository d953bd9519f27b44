"""A validation that takes long: what is named is its loader, its workers' start, a line or its metrics, with the saving
of that change; one cause in training and validation is one finding."""

import time

import pytest
from torch.utils.data import DataLoader

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.schema import (
    VALIDATION_WORKER_LINES,
    CpuUse,
    Distribution,
    LoaderSettings,
    RunLedger,
    RunRegion,
    SampledLine,
)
from tests.evidence import made_evidence
from tests.models import Classifier, Samples, loader
from tests.test_cpu_time import found

RUNS, BATCHES = 10, 20


def line(function, callee=""):
    return SampledLine(
        file="train.py", line=7, function=function, pct=90.0, call="self.work()", callee=callee, samples=100
    )


def evidence(settings, *, data_ms=0.0, training=None, cpu=None, lines=None, **inside_s):
    """A fit of 4 s of steps, 40 ms each, and ten validations of twenty batches with these seconds by part."""
    parts = {f"validation/{part}": seconds for part, seconds in inside_s.items() if part != "rest"}
    parts["validation"] = inside_s.get("rest", 0.0)
    counts = {**dict.fromkeys(parts, RUNS), "validation/step": RUNS * BATCHES}
    return made_evidence(
        steps=100,
        on_device=False,
        step_ms=Distribution(mean=40.0, p50=40.0, min=40.0, max=40.0),
        regions={"data": RunRegion(device_ms=data_ms, host_ms=data_ms)},
        ledger=RunLedger(
            wall_s=4.0 + sum(parts.values()), parts={"steps": 4.0, **parts}, unexplained_s=0.0, counts=counts
        ),
        validation_loader=settings,
        loader=training,
        cpu=cpu,
        lines=lines or {},
    )


def saved_s(finding):
    return finding.saves.ms_per_step * 100 / 1e3


WAITS = CpuUse(cores=8.0, used=0.2, idle=7.0, loader_busy_pct=5.0, validation_busy_pct=5.0)
IN_PROCESS = LoaderSettings(kind="DataLoader", num_workers=0, cores=8)


def workers(count, *, persistent, batch_ms):
    return LoaderSettings(
        kind="DataLoader",
        num_workers=count,
        persistent_workers=persistent,
        prefetch_factor=2,
        cores=8,
        batch_ms=batch_ms,
    )


def test_a_loader_in_the_training_process_gets_workers_with_what_they_save():
    finding = found(combine(None, evidence(IN_PROCESS, data=2.0, step=0.6, cpu=WAITS)))["validation-bound"]
    assert (
        "validation takes 2.6 s of the fit's 6.6 s (10 runs, 260 ms each), 2.0 s of it waiting for its" in finding.title
    )
    assert finding.fix == "DataLoader(..., num_workers=4, persistent_workers=True)"
    assert finding.advice.startswith("The validation DataLoader loads in the training process (num_workers=0).")
    # a batch takes 10 ms to make and 3 ms to validate on: after the first, four workers are ahead
    assert saved_s(finding) == pytest.approx(2.6 - RUNS * (0.010 + 20 * 0.0035), rel=0.01)
    assert not finding.saves.at_most, "its dataset waits, and cores are free"


def test_workers_that_start_anew_in_each_validation_are_to_stay():
    restarts = workers(2, persistent=False, batch_ms=8.0)
    finding = found(combine(None, evidence(restarts, loader=1.0, data=0.1, step=1.0)))["validation-bound"]
    assert "1.0 s of it until the first batch of new workers" in finding.title
    assert finding.advice.startswith(
        "Set persistent_workers=True in the validation DataLoader: its num_workers=2 start"
    )
    assert finding.fix == "DataLoader(..., persistent_workers=True)"
    assert saved_s(finding) == pytest.approx(0.9 * (1.0 - RUNS * 0.008)), "without the first start, and the first batch"


def test_workers_are_left_out_where_a_batch_is_made_in_no_more_time_than_they_take():
    stay = workers(2, persistent=True, batch_ms=0.1)
    finding = found(combine(None, evidence(stay, loader=0.1, data=0.4, step=0.1)))["validation-bound"]
    assert finding.fix == "DataLoader(..., num_workers=0)"
    assert finding.advice.startswith("In the validation DataLoader: set num_workers=0: a batch takes 0.10 ms to make")
    assert saved_s(finding) == pytest.approx(0.6 - 0.1 - RUNS * BATCHES * 0.0001)


def test_more_workers_are_advised_where_they_do_not_keep_up():
    one = workers(1, persistent=True, batch_ms=20.0)
    lines = {VALIDATION_WORKER_LINES: (line("Pictures.__getitem__"),)}
    finding = found(combine(None, evidence(one, loader=0.2, data=3.5, step=0.5, lines=lines)))["validation-bound"]
    assert finding.fix == "DataLoader(..., num_workers=8)"
    assert finding.title.endswith("a worker spends 90 % of its time on batches in self.work() at train.py:7")
    assert saved_s(finding) == pytest.approx(4.2 - RUNS * (0.020 + 20 * 0.003), rel=0.01)


def test_an_iterable_that_is_not_split_is_split_first():
    unsplit = LoaderSettings(kind="DataLoader", num_workers=2, persistent_workers=True, unsplit=True, batch_ms=20.0)
    finding = found(combine(None, evidence(unsplit, data=3.0, step=0.5)))["validation-bound"]
    assert "split the dataset by torch.utils.data.get_worker_info() in its __iter__" in finding.advice


def test_a_line_of_the_step_is_named_unless_it_calls_the_model():
    lines = {"validation/step": (line("Model.score", callee="sorted"),)}
    finding = found(combine(None, evidence(IN_PROCESS, data=0.1, step=3.0, lines=lines)))["validation-bound"]
    assert finding.title.endswith("3.0 s of it in validation_step; 90 % of it in self.work() at train.py:7")
    assert finding.advice.startswith("Take that line out of validation_step")
    assert saved_s(finding) == pytest.approx(0.9 * 3.0)
    model = {"validation/step": (line("Model.validation_step", callee="torch.nn.modules.linear.Linear.forward"),)}
    finding = found(combine(None, evidence(IN_PROCESS, data=0.1, step=3.0, lines=model)))["validation-bound"]
    assert finding.advice.startswith("Validate less often (check_val_every_n_epoch, val_check_interval)")
    assert saved_s(finding) == pytest.approx(3.1)
    finding = found(combine(None, evidence(IN_PROCESS, data=1.5, step=1.6, rest=1.5, lines=lines)))["validation-bound"]
    assert "90 % of it in self.work() at train.py:7" in finding.title
    assert finding.advice.startswith("Validate less often"), "which saves more than a line of a third of it"
    assert saved_s(finding) == pytest.approx(4.6)


@pytest.mark.parametrize(
    ("part", "words", "advice"),
    [
        ("metrics", "computing what it has logged", "Make the metrics' compute() cheaper"),
        ("transfer", "moving its batches to the device", "Set pin_memory=True in the validation DataLoader"),
    ],
)
def test_any_other_part_that_takes_most_of_it_is_named(part, words, advice):
    finding = found(combine(None, evidence(IN_PROCESS, step=0.3, **{part: 2.0})))["validation-bound"]
    assert f"2.0 s of it {words}" in finding.title
    assert finding.advice.startswith(advice)
    assert saved_s(finding) == pytest.approx(2.0)


@pytest.mark.parametrize("settings", [None, LoaderSettings(kind="Reader"), IN_PROCESS])
def test_a_validation_of_which_nothing_is_known_is_to_be_shorter(settings):
    advice = found(combine(None, evidence(settings, rest=3.0)))["validation-bound"].advice
    assert advice.startswith("Validate less often (check_val_every_n_epoch, val_check_interval) or on fewer batches")


def test_both_loaders_are_one_finding_with_the_sum():
    both = evidence(IN_PROCESS, data=2.0, step=0.6, data_ms=30.0, training=IN_PROCESS, cpu=WAITS)
    alone = evidence(IN_PROCESS, data_ms=30.0, training=IN_PROCESS, cpu=WAITS, step=0.0)
    named = found(combine(None, both))
    assert "validation-bound" not in named
    of_training, of_both = saved_s(found(combine(None, alone))["input-bound"]), saved_s(named["input-bound"])
    of_validation = saved_s(
        found(combine(None, evidence(IN_PROCESS, data=2.0, step=0.6, cpu=WAITS)))["validation-bound"]
    )
    assert of_both == pytest.approx(of_training + of_validation)
    assert named["input-bound"].share_pct == pytest.approx(100 * (3.0 + 2.6) / 6.6)
    assert "training waits 30.0 ms of each 40.0 ms step" in named["input-bound"].title
    assert "validation takes 2.6 s" in named["input-bound"].title
    assert "Do the same in the other DataLoader" in named["input-bound"].advice


# -- fits --------------------------------------------------------------------------------------------------------------


class SlowSamples(Samples):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class Validates(Classifier):
    def validation_step(self, batch):
        self(batch[0])


@pytest.mark.real_time
@pytest.mark.parametrize("both", [False, True])
def test_a_slow_loader_of_a_fit_is_named_with_its_line(make_trainer, both):
    callback = ThroughputCallback(2)
    trainer = make_trainer(callback, logger=False, max_epochs=3)
    slow = DataLoader(SlowSamples(32), 4)
    trainer.fit(Validates(), slow if both else loader(32), slow)
    first = callback.analysis().findings[0]
    assert first.code == ("input-bound" if both else "validation-bound")
    assert "of it waiting for its loader" in first.title
    assert "SlowSamples.__getitem__" in first.evidence["line"]
    assert "num_workers=" in first.advice
    assert ("Do the same in the other DataLoader" in first.advice) == both


class Averages(Validates):
    def validation_step(self, batch):
        super().validation_step(batch)
        self.rank(batch[0])

    def rank(self, rows):
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            sorted(rows.flatten().tolist())


@pytest.mark.real_time
def test_a_line_that_validation_spends_its_time_in_is_named(make_trainer):
    callback = ThroughputCallback(2)
    trainer = make_trainer(callback, logger=False, max_epochs=3)
    trainer.fit(Averages(), loader(32), loader(64))
    first = callback.analysis().findings[0]
    assert first.code == "validation-bound"
    assert "Averages.rank" in first.evidence["line"]
    assert first.advice.startswith("Take that line out of validation_step")


def test_a_fit_that_starts_workers_in_each_validation_says_so(make_trainer):
    callback = ThroughputCallback(2)
    trainer = make_trainer(callback, logger=False, max_epochs=4)
    trainer.fit(Classifier(), loader(16), loader(8, num_workers=1))
    finding = found(callback.analysis())["validation-bound"]
    assert "Set persistent_workers=True in the validation DataLoader: its num_workers=1 start anew" in finding.advice
    assert callback.analysis().run.settings.validation_loader.num_workers == 1
    assert callback.analysis().run.settings.validation_loader.batches == 2

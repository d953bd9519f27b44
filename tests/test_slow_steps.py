"""When a run's parts took place, and what the slowest steps waited for: planted costs are named with their step."""

import json
import time

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.run_wording import cause, slowest_line
from lightning_forge_profiling.schema import Distribution, RunRegion, SlowStep, Span
from lightning_forge_profiling.timing.ledger import LedgerClock, SpanLog
from tests.evidence import made_evidence
from tests.models import Classifier, loader
from tests.outcomes import summary_of

PLANTED_S = 0.5
SLOW_STEP = 33


def stall():
    """Sleeps, and returns how long it really was."""
    began = time.perf_counter()
    time.sleep(PLANTED_S)
    return time.perf_counter() - began


class Stalls(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == SLOW_STEP:
            self.took_s = stall()


class SlowForward(Classifier):
    def training_step(self, batch):
        if self.trainer.fit_loop.epoch_loop.batch_idx == SLOW_STEP:
            self.took_s = stall()
        return super().training_step(batch)


def the_slow_step(run):
    """The planted one; on a busy machine it need not be the slowest."""
    [slow] = [slow for slow in run.timing.slowest if slow.step == SLOW_STEP]
    return slow


@pytest.mark.parametrize("overhead", [None, 1e-6], ids=["every step split", "most steps unsplit"])
def test_a_callback_that_makes_a_step_slow_is_named_with_it(make_trainer, tmp_path, overhead):
    ours = ThroughputCallback(warmup_steps=3, overhead=overhead)
    stalls = Stalls()
    make_trainer(stalls, ours, logger=False).fit(Classifier(), loader(200))

    run = ours.analysis().run
    slow = the_slow_step(run)
    assert slow.ms >= 1e3 * PLANTED_S
    assert slow.parts_ms["callback/Stalls.on_train_batch_end"] == pytest.approx(1e3 * stalls.took_s, rel=0.1)
    assert [one.ms for one in run.timing.slowest] == sorted((one.ms for one in run.timing.slowest), reverse=True)
    assert len(run.timing.slowest) == 5
    [line] = [line for line in summary_of(tmp_path).splitlines() if line.startswith("slowest ")]
    assert f"step {SLOW_STEP}: " in line
    assert "of it callback/Stalls.on_train_batch_end" in line
    assert f"| {SLOW_STEP} | `" in markdown(ours.analysis())


def test_a_region_that_makes_a_step_slow_is_named_with_it(make_trainer):
    ours = ThroughputCallback(warmup_steps=3, overhead=None)
    model = SlowForward()
    make_trainer(ours, logger=False).fit(model, loader(200))

    run = ours.analysis().run
    slow = the_slow_step(run)
    assert cause(slow, run).endswith(" of it forward")
    assert slow.regions_ms["forward"] == pytest.approx(1e3 * model.took_s, rel=0.1)


@pytest.mark.slow
def test_steps_that_do_not_count_and_what_is_outside_a_step_make_none_slow(make_trainer):
    class Validates(Classifier):
        def validation_step(self, batch):
            time.sleep(PLANTED_S)

        def on_validation_epoch_end(self):
            time.sleep(PLANTED_S)

    class SlowStart(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                time.sleep(PLANTED_S)

    ours = ThroughputCallback(warmup_steps=3, overhead=None)
    trainer = make_trainer(SlowStart(), ours, logger=False, val_check_interval=25, num_sanity_val_steps=0)
    trainer.fit(Validates(), loader(200), loader(4))
    for slow in ours.analysis().run.timing.slowest:
        assert slow.step >= 3
        assert slow.ms < 1e3 * PLANTED_S
        assert not {"validation", "module/on_validation_epoch_end"} & {*slow.parts_ms}


def test_the_ledger_knows_when_epochs_validations_and_the_window_took_place(make_trainer, tmp_path):
    class Validates(Classifier):
        def validation_step(self, batch):
            time.sleep(0.15)  # a busy machine takes some 0.04 s beside it

    forge = ForgeProfilerCallback(20, 23, trace_dir=tmp_path)
    make_trainer(forge, ThroughputCallback(warmup_steps=2), logger=False, max_epochs=2).fit(
        Validates(), loader(160), loader(8)
    )

    summary = json.loads(forge.trace_report().summary_path.read_text(encoding="utf-8"))
    ledger = summary["run"]["ledger"]
    spans = {}
    for span in ledger["spans"]:
        assert 0 <= span["start_s"] < span["end_s"] <= ledger["wall_s"]
        spans.setdefault(span["part"], []).append(span)
    assert [one["step"] for one in spans["epoch"]] == [40, 80]
    assert [one["step"] for one in spans["validation"]] == [40, 80]
    for epoch, validation in zip(spans["epoch"], spans["validation"], strict=True):
        assert epoch["start_s"] < validation["start_s"] < validation["end_s"] <= epoch["end_s"]
    [window], [steps] = spans["window"], spans["steps"]
    assert steps["start_s"] < window["start_s"] < window["end_s"] < spans["validation"][0]["start_s"]
    parts = {name: seconds for name, seconds in ledger["parts"].items() if name.startswith("validation")}
    assert sum(one["seconds"] for one in spans["validation"]) == pytest.approx(sum(parts.values()), rel=0.1)
    assert max(parts, key=parts.__getitem__) == "validation/step"
    assert not any(name.startswith("validation/") for name in spans), "a validation is one span"


@pytest.mark.slow
def test_the_list_of_spans_does_not_grow_with_the_run():
    log = SpanLog()
    for number in range(100_000):
        for part in range(40):
            log.add(Span(f"part{part}", number / 10, number / 10 + 0.01, 0.01, step=number))
    spans = log.read()
    assert len(spans) <= 32 * 128
    of_one = [span for span in spans if span.part == "part3"]
    assert sum(span.count for span in of_one) == 100_000, "none is lost"
    assert sum(span.seconds for span in of_one) == pytest.approx(1000)
    assert max(span.end_s - span.start_s for span in of_one) < 10_000 / 32


def test_a_long_span_keeps_its_place_among_many_short_ones():
    log = SpanLog()
    for number in range(1000):
        length_s = 1000.0 if number == 500 else 0.001
        start_s = number + (1000.0 if number > 500 else 0.0)
        log.add(Span("validation", start_s, start_s + length_s, length_s))
    [long] = [span for span in log.read() if span.seconds >= 1000]
    assert (long.start_s, long.count) == (500.0, 1)


def test_what_took_long_is_kept_for_few_steps_only():
    now = iter(range(0, 10**15, 10**6))
    clock = LedgerClock(0, clock_ns=now.__next__)
    clock.enter("steps")
    for step in range(10_000):
        clock.enter("callback/X.hook")
        clock.exit("callback/X.hook")
        clock.begin_step(step + 1)
    kept = clock.long_parts()
    assert 0 < len(kept) <= 32
    assert all({*parts} == {"callback/X.hook"} for parts in kept.values())


def evidence(*slowest, median=90.0):
    spread = Distribution(mean=median, p50=median, min=80.0, max=900.0)
    return made_evidence(
        steps=2000, on_device=True, step_ms=spread, slowest=slowest,
        regions={"data": RunRegion(device_ms=4.0, host_ms=4.0), "forward": RunRegion(device_ms=40.0, host_ms=40.0)},
    )  # fmt: skip


def test_ordinary_steps_are_not_called_slow():
    assert slowest_line(evidence(SlowStep(step=5, ms=179.0))) == ""
    assert slowest_line(evidence()) == ""


def test_at_most_three_steps_are_named():
    line = slowest_line(evidence(*(SlowStep(step=step, ms=900.0 - step) for step in range(5))))
    assert line == "step 0: 900 ms; step 1: 899 ms; step 2: 898 ms (median 90.0 ms)"


@pytest.mark.parametrize(
    ("parts", "regions", "said"),
    [
        ({"data_loader": 500.0, "callback/A.hook": 100.0}, {}, "500 of it data_loader, 100 of it callback/A.hook"),
        ({"callback/A.hook": 20.0}, {}, ""),
        ({}, {"data": 700.0, "forward": 60.0}, "700 of it data"),
        ({"callback/A.hook": 100.0}, {"data": 600.0, "other": 120.0}, "600 of it data, 100 of it callback/A.hook"),
        ({"callback/A.hook": 1500.0}, {}, "1,500 ms of host time callback/A.hook"),
        ({}, {"data": 30.0, "forward": 50.0}, ""),
    ],
)
def test_the_cause_is_what_is_known_to_have_taken_long(parts, regions, said):
    slow = SlowStep(step=5, ms=812.0, parts_ms=parts, regions_ms=regions)
    assert cause(slow, evidence(slow)) == said

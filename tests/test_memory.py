"""What fills the GPU's memory."""

import csv
from math import inf
from random import Random

import pytest
import torch
from lightning.pytorch import Callback
from msgspec.structs import replace
from selenium.webdriver.common.keys import Keys
from torch import nn

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.machine_rules import growth_words
from lightning_forge_profiling.gpu.memory import AllocatorReading
from lightning_forge_profiling.report.run_wording import memory_line
from lightning_forge_profiling.run.memory_watch import MemoryWatch, model_memory
from lightning_forge_profiling.schema import Distribution, MemoryCurve, MemoryGrowth, ModelMemory, RunMemory
from tests.browser import wait_until
from tests.evidence import made_evidence
from tests.models import Classifier, loader
from tests.report_page import Page

FLOAT = 4
GIB = 2**30


class Tied(nn.Module):
    """64 x 32 weights used twice, a frozen layer, and a buffer with a view of it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(requires_grad=False)
        self.register_buffer("whole", torch.zeros(100))
        self.register_buffer("part", self.whole[:10])

    def forward(self, tokens):
        return self.head(self.frozen(self.table(tokens)))


def stepped(optimizer_class, **options):
    model = Tied()
    optimizer = optimizer_class(model.parameters(), **options)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_each_storage_counts_once():
    model, optimizer = stepped(torch.optim.Adam)
    found = model_memory(model, [optimizer], "cpu")
    assert found.parameters_bytes == (64 * 32 + 32 * 32) * FLOAT
    assert found.gradients_bytes == 64 * 32 * FLOAT
    assert found.optimizer_bytes == (2 * 64 * 32 + 1) * FLOAT, "two moments, and the number of steps"
    assert found.buffers_bytes == 100 * FLOAT
    assert found.bytes == sum(
        (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes, found.buffers_bytes)
    )


def test_what_lies_on_another_device_does_not_count():
    model, optimizer = stepped(torch.optim.Adam)
    assert model_memory(model, [optimizer], "cuda").bytes == 0


def test_gradients_that_are_freed_and_an_optimizer_without_state_take_nothing():
    model, optimizer = stepped(torch.optim.SGD, lr=0.1)
    optimizer.zero_grad()
    found = model_memory(model, [optimizer], "cpu")
    assert (found.gradients_bytes, found.optimizer_bytes) == (0, 0)


class Halves(torch.Tensor):
    """A tensor that consists of two others and has no storage, as quantized ones do."""

    @staticmethod
    def __new__(cls, *halves):
        return torch.Tensor._make_wrapper_subclass(cls, (2, *halves[0].shape), dtype=halves[0].dtype)

    def __init__(self, *halves):
        self.low, self.high = halves

    def __tensor_flatten__(self):
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_tensor_that_consists_of_others_is_as_large_as_they_are():
    model, optimizer = stepped(torch.optim.SGD, lr=0.1)
    optimizer.state["moment"] = {"quantized": Halves(torch.zeros(5), torch.zeros(7))}
    assert model_memory(model, [optimizer], "cpu").optimizer_bytes == 12 * FLOAT


def test_state_in_lists_and_dictionaries_counts():
    model, optimizer = stepped(torch.optim.SGD, lr=0.1)
    optimizer.state["history"] = {"directions": [torch.zeros(7), (torch.zeros(3),)], "name": "x"}
    assert model_memory(model, [optimizer], "cpu").optimizer_bytes == 10 * FLOAT


# -- growth ------------------------------------------------------------------------------------------------------------


class Gpu:
    """A GPU of 20 GiB on which a step of 20 ms takes what `kept` and `needs` say, in GiB by step."""

    LIMIT = 20.0
    MODEL = ModelMemory(parameters_bytes=GIB, gradients_bytes=GIB, optimizer_bytes=2 * GIB, buffers_bytes=0)

    def __init__(self, kept, needs, model=lambda _: Gpu.MODEL, *, peak=0.0):
        self.kept, self.needs, self.model = kept, needs, model
        self.step, self.peak, self.said = 0, peak, []
        self.watch = MemoryWatch(
            self.allocator,
            lambda: model(self.step),
            lambda _: int(self.LIMIT * GIB),
            began_ns=0,
            say=self.said.append,
            clock_ns=lambda: self.step * 20_000_000,
        )

    def allocator(self):
        reserved = int(max(self.peak, self.kept(self.step)) * 1.1 * GIB)
        return AllocatorReading(
            allocated_bytes=int(self.kept(self.step) * GIB), peak_bytes=int(self.peak * GIB), reserved_bytes=reserved
        )

    def ends_step(self):
        now_ns = self.step * 20_000_000
        if now_ns >= self.watch.due_ns:
            self.watch.end_step(self.step, now_ns)

    def trains(self, until, *, begin=10):
        """The growth that was said first, and the step in which the memory was full; None for what did not happen."""
        for self.step in range(begin, until):
            self.peak = max(self.peak, self.kept(self.step) + self.needs(self.step))
            if self.peak > self.LIMIT:
                return next(iter(self.said), None), self.step
            self.ends_step()
        return next(iter(self.said), None), None

    def memory(self):
        return self.watch.memory()


def varied(seed, most):
    """What batches of random lengths need: few of them much."""
    random = Random(seed)  # noqa: S311  (not for secrets)
    needs = [most * min(random.lognormvariate(-2, 0.7), 1.0) for _ in range(20_000)]
    return needs.__getitem__


@pytest.mark.parametrize("gib_per_step", [0.05, 0.02, 0.005, 0.001])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_growth_is_said_at_least_50_steps_before_the_memory_is_full(gib_per_step, noise):
    rest = varied(1, noise)
    gpu = Gpu(lambda step: 4 + gib_per_step * step + rest(step), varied(2, 4.0))
    said, full = gpu.trains(20_000)
    assert (said.category, said.bytes_per_step) == ("other tensors", pytest.approx(gib_per_step * GIB, rel=0.3))
    assert full - said.to_step >= 50
    last = gpu.memory().growth
    assert last.full_step == pytest.approx(full, abs=max(100, 0.05 * full))


@pytest.mark.parametrize("part", ["parameters", "optimizer", "buffers"])
def test_what_grows_in_the_model_is_named(part):
    def model(step):
        return replace(Gpu.MODEL, **{f"{part}_bytes": getattr(Gpu.MODEL, f"{part}_bytes") + GIB * step // 50})

    said, _ = Gpu(lambda step: model(step).bytes / GIB, lambda _: 1.0, model).trains(2000)
    assert said.category == part


def test_batches_that_get_longer_are_named():
    said, full = Gpu(lambda _: 4.0, lambda step: 1 + 0.01 * step).trains(5000)
    assert said.category == "activations"
    assert full - said.to_step >= 50


@pytest.mark.parametrize("seed", range(10))
def test_lengths_that_vary_are_no_growth(seed):
    rest = varied(seed + 100, 0.5)
    assert Gpu(lambda step: 4 + rest(step), varied(seed, 15.5)).trains(20_000) == (None, None)


def test_what_an_epoch_collects_and_its_end_frees_is_no_growth_in_the_next():
    gpu = Gpu(lambda step: 4 + 0.01 * (step % 400), lambda _: 2.0)
    first, _ = gpu.trains(400)
    assert first is not None, "nobody knows yet that it will be freed"
    gpu.trains(4000, begin=400)
    assert gpu.memory().growth is None
    assert "memory/grows_mib_per_step" not in gpu.watch.metrics()
    assert len(gpu.said) == 1


def test_a_growth_over_epochs_is_not_taken_for_that_within_one():
    gpu = Gpu(lambda step: 4 + 0.01 * (step % 400) + 0.002 * step, lambda _: 2.0)
    gpu.trains(400)
    for until in range(800, 4001, 400):
        gpu.trains(until, begin=until - 400)
        growth = gpu.memory().growth
        if growth is not None:
            assert growth.bytes_per_step == pytest.approx(0.002 * GIB, rel=0.5)
    _, full = gpu.trains(20_000, begin=4000)
    assert gpu.memory().growth.full_step == pytest.approx(full, rel=0.1)


def test_a_growth_that_stops_is_none_any_more():
    gpu = Gpu(lambda step: 4 + 0.01 * min(step, 300), lambda _: 2.0)
    gpu.trains(300)
    assert gpu.memory().growth.category == "other tensors"
    gpu.trains(2000, begin=300)
    assert gpu.memory().growth is None


def test_a_second_growth_is_said_too_and_named_by_itself():
    gpu = Gpu(lambda step: 4 + 0.004 * max(step - 3000, 0), lambda step: 1 + 0.01 * min(step, 500))
    gpu.trains(5000)
    assert [one.category for one in gpu.said] == ["activations", "other tensors"]
    assert gpu.memory().growth.category == "other tensors"


def test_what_came_before_the_growth_is_not_taken_for_it():
    def model(step):
        return replace(Gpu.MODEL, optimizer_bytes=2 * GIB * (1 + (step >= 800)))

    gpu = Gpu(lambda step: 4 + 2 * (step >= 800) + 0.002 * max(step - 2000, 0), lambda _: 1.0, model)
    gpu.trains(4000)
    assert [one.category for one in gpu.said] == ["other tensors"]
    assert gpu.memory().model.optimizer_bytes == 4 * GIB, "counted again as more is kept"


def test_a_higher_peak_before_the_fit_hides_that_of_the_steps():
    gpu = Gpu(lambda step: 5 + 0.01 * max(step - 100, 0), lambda _: 2.0, peak=15.0)
    gpu.trains(100)
    assert not gpu.memory().peak_known
    line = memory_line(replace(evidence(), memory=gpu.memory()))
    assert line == (
        "at least 5.00 of 20.0 GiB: parameters 1.00, gradients 1.00, optimizer 2.00, other tensors 1.00; "
        "the process had a higher peak before, which hides that of the steps"
    )
    assert "memory/activations_gib" not in gpu.watch.metrics()
    _, full = gpu.trains(3000, begin=100)
    assert gpu.memory().peak_known
    assert gpu.memory().growth.full_step == pytest.approx(full, rel=0.05)


def test_a_peak_of_validation_is_not_the_steps():
    gpu = Gpu(lambda _: 5.0, lambda _: 2.0)
    for until in range(510, 5010, 500):
        gpu.trains(until, begin=until - 500)
        gpu.watch.pause()
        gpu.peak = max(gpu.peak, 12.0 + until / 1000)
        gpu.watch.resume()
    gpu.trains(5100, begin=5010)
    assert gpu.memory().curve.peak_gib[-1] == 7.0
    assert gpu.said == []
    assert gpu.watch.metrics()["memory/activations_gib"] == 2.0


def test_a_limit_that_has_risen_is_read_again():
    gpu = Gpu(lambda step: 4 + 0.01 * step, lambda _: 1.0)
    gpu.LIMIT = 8.0  # beside another process
    gpu.trains(200)
    gpu.LIMIT = 20.0
    _, full = gpu.trains(3000, begin=200)
    assert gpu.memory().limit_gib == 20.0
    assert gpu.memory().growth.full_step == pytest.approx(full, rel=0.05)


def test_the_curve_of_a_long_run_is_short_and_ends_with_the_latest_reading():
    gpu = Gpu(lambda _: 5.0, lambda _: 3.0)
    gpu.trains(20_000)
    curve = gpu.memory().curve
    assert 64 <= len(curve.steps) == len(curve.seconds) == len(curve.kept_gib) <= 130
    assert (curve.steps[0], curve.steps[-1]) == (10, 19_995)
    assert {*curve.kept_gib} == {5.0}
    assert {*curve.peak_gib} == {8.0}
    assert gpu.watch.metrics() == {
        "memory/model_gib": 4.0,
        "memory/other_tensors_gib": 1.0,
        "memory/activations_gib": 3.0,
        "memory/cache_gib": pytest.approx(0.8),
    }


# -- a fit -------------------------------------------------------------------------------------------------------------


class Stops(Callback):
    """Ends a fit after an epoch, which nothing knows before."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


class OnGpu(Callback):
    """Has the callbacks of a fit watch a made-up GPU, which fills up."""

    def __init__(self, ours, gpu):
        self.ours, self.gpu = ours, gpu

    def on_train_start(self, trainer, pl_module):
        self.ours.run.steps.events.memory = self.gpu.watch
        self.gpu.watch._say = self.ours.run.steps.events.memory_grows

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.gpu.watch.due_ns < inf:
            self.gpu.watch.due_ns = 0
        self.gpu.step = batch_idx
        self.gpu.peak = max(self.gpu.peak, self.gpu.kept(batch_idx) + 2)


@pytest.fixture
def leaking(make_trainer):
    """Fits on a GPU that grows by 16 MiB a step."""

    def fit(**options):
        ours, gpu = ThroughputCallback(2, **options), Gpu(lambda step: 4 + step / 64, lambda _: 2.0)
        limits = {"max_steps": -1, "max_epochs": -1, "limit_train_batches": 120}
        trainer = make_trainer(ours, OnGpu(ours, gpu), Stops(), enable_checkpointing=False, **limits)
        trainer.fit(Classifier(), loader(480))
        return ours

    return fit


def test_the_run_says_what_grows_and_until_when(leaking, tmp_path, capsys, caplog):
    analysis = leaking(record=True).analysis()
    [finding] = [one for one in analysis.findings if one.code == "memory-near-limit"]
    assert finding.title.startswith("memory on the GPU grows by 16.0 MiB a step (steps ")
    assert "tensors that are kept from one step to the next and are not the model's" in finding.title
    assert (finding.of, finding.share_pct) == ("memory", pytest.approx(39, abs=1))
    assert finding.evidence["full_step"] == pytest.approx(14 * 64, abs=10)
    assert "loss.detach()" in finding.advice
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory memory on the GPU grows by 16.0 MiB a step" in printed
    warned = [record.getMessage() for record in caplog.records if "grows by" in record.getMessage()]
    assert len(warned) == 1
    [record] = tmp_path.rglob("rank0.jsonl")
    assert len([line for line in record.read_text().splitlines() if '"memory-growth"' in line]) == 1
    assert main(["show", str(record)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "memory peak 7.81 of 20.0 GiB: parameters 1.00, gradients 1.00, optimizer 2.00, other tensors 1.81," in shown
    assert "activations and temporaries 2.00 (512 MiB a sample)" in shown
    assert "memory-near-limit 39 % of the memory" in shown


def test_the_loggers_get_it(leaking, tmp_path):
    leaking()
    [metrics] = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    known = [row for row in rows if row.get("memory/model_gib")]
    assert float(known[-1]["memory/model_gib"]) == 4.0
    assert float(known[-1]["memory/other_tensors_gib"]) > float(known[0]["memory/other_tensors_gib"])
    assert float(known[-1]["memory/grows_mib_per_step"]) == pytest.approx(16, rel=0.01)


def test_a_growth_that_the_run_does_not_live_to_see_is_no_warning(make_trainer, caplog):
    ours, gpu = ThroughputCallback(2), Gpu(lambda step: 4 + step / 64, lambda _: 2.0)
    trainer = make_trainer(ours, OnGpu(ours, gpu), max_steps=120, enable_checkpointing=False)
    trainer.fit(Classifier(), loader(480))
    assert "memory-near-limit" in {one.code for one in ours.analysis().findings}
    assert not [record for record in caplog.records if "grows by" in record.getMessage()]


def test_a_failing_reading_ends_the_readings_and_not_the_run(make_trainer):
    ours, gpu = ThroughputCallback(2), Gpu(lambda _: 4.0, lambda _: 2.0, model=lambda _: 1 / 0)
    make_trainer(ours, OnGpu(ours, gpu), max_steps=60, logger=False, enable_checkpointing=False).fit(
        Classifier(), loader(240)
    )
    assert ours.analysis().run.timing.steps > 40
    assert ours.analysis().run.memory is None


@pytest.mark.browser
def test_the_page_stacks_what_fills_the_memory(leaking, tmp_path, browser):
    page = Page(browser, tmp_path, leaking().analysis())
    assert page.one("#memory h2").text == "What fills the GPU's memory"
    names = page.texts("#memory .chart-line > :nth-child(2)")
    assert names == [
        *("parameters", "gradients", "optimizer", "other tensors"),
        *("activations and temporaries", "cached by the allocator"),
    ]
    layers = page.all("#memory path.layer.spread")
    tops = [layer.rect["y"] for layer in layers]
    assert len(tops) == 6
    assert tops == sorted(tops), "what is drawn first lies above the others"
    page.one("#memory .scrubber").send_keys(Keys.END)
    assert page.texts("#memory .chart-line .reading")[:4] == ["1.0", "1.0", "2.0", "1.8"]
    page.one("#memory details:not(.fold) > summary").click()
    wait_until(lambda: page.all("#memory table"), "the table is there")
    assert "Grows: memory on the GPU grows by 16.0 MiB a step" in page.one("#memory .notes").text
    assert page.complaints() == []


# -- in words ----------------------------------------------------------------------------------------------------------


def evidence(*, kept=(10, 10, 20, 0), reserved=60.0, peak=55.0, limit=78.0, **more):
    names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")
    model = ModelMemory(**{name: gib * GIB for name, gib in zip(names, kept, strict=True)})
    step_ms = Distribution(mean=1.0, p50=1.0, min=1.0, max=1.0)
    curve = MemoryCurve(
        seconds=(1.0,), steps=(10,), kept_gib=(float(sum(kept)),), peak_gib=(peak,), reserved_gib=(reserved,)
    )
    memory = RunMemory(model=model, limit_gib=limit, curve=curve, **more)
    return made_evidence(steps=1, on_device=True, step_ms=step_ms, regions={}, memory=memory)


def test_the_peak_is_what_the_model_keeps_and_activations():
    assert memory_line(evidence(samples_per_step=8, tokens_per_step=8192)) == (
        "peak 55.0 of 78.0 GiB: parameters 10.0, gradients 10.0, optimizer 20.0, activations and temporaries 15.0 "
        # the 30 that are kept during backward leave 48 for 25
        "(1,920 MiB a sample, 1,920 KiB a token); 5.00 more cached by the allocator. A batch 1.9 times as large fills "
        "it, if all of those grow with it"
    )


def test_without_readings_nothing_is_said():
    assert memory_line(replace(evidence(), memory=None)) == ""
    memory = replace(evidence().memory, curve=MemoryCurve())
    assert memory_line(replace(evidence(), memory=memory)) == ""


def test_a_model_that_leaves_nearly_all_of_the_memory_has_no_limit_worth_a_word():
    assert "times as large" not in memory_line(evidence(kept=(1, 1, 1, 0), peak=4.0, reserved=4.0))


@pytest.mark.parametrize(
    ("each", "said"), [(512, "0.50 KiB"), (20 * 2**10, "20.0 KiB"), (2**20, "1.00 MiB"), (123.4 * 2**20, "123 MiB")]
)
def test_a_growth_has_a_unit_that_fits(each, said):
    growth = MemoryGrowth(category="buffers", bytes_per_step=each, from_step=1, to_step=12_345, full_step=99_999)
    assert growth_words(growth) == (
        f"memory on the GPU grows by {said} a step (steps 1 to 12,345): the model's buffers. If that goes on, it is "
        "full at about step 99,999"
    )


def test_a_model_that_needs_next_to_nothing_gets_no_line():
    assert memory_line(evidence(kept=(0.01, 0, 0, 0), peak=0.02, reserved=0.02)) == ""


def test_a_run_on_a_cpu_has_no_memory_of_a_gpu(make_trainer):
    ours = ThroughputCallback(2)
    make_trainer(ours, max_steps=20, logger=False, enable_checkpointing=False).fit(Classifier(), loader(80))
    assert ours.analysis().run.memory is None
    assert not any(name.startswith("memory/") for name in ours.summary())

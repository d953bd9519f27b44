"""What takes longer and longer, and host memory that grows, with the line of it; not on a busy machine."""

import ctypes
import gc
import re
import time
from collections import defaultdict, deque
from random import Random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.growth import GROWTH
from lightning_forge_profiling.diagnosis.machine_rules import growth_words
from lightning_forge_profiling.run.containers import Containers
from lightning_forge_profiling.schema import CpuUse, MemoryGrowth, PartGrowth
from lightning_forge_profiling.timing.growth import part_growth
from tests.models import quiet_trainer

LONG = {"steps": 20_000, "seconds": 4}  # for what is read five times a second

losses = []


def blocks(level, count=40, noise=0.1, seed=0):
    """Times of blocks around a level, which is given by how much of the run is over."""
    random = Random(seed)  # noqa: S311  (not for secrets)
    return [level(at / count) * max(1 + noise * random.gauss(0, 1), 0.1) for at in range(count)]


def growth(part, rest=lambda _: 2.0, **options):
    """The growth of a part beside the rest of the step, in 100 runs."""
    found = []
    for seed in range(100):
        part_ms, rest_ms = blocks(part, seed=2 * seed, **options), blocks(rest, seed=2 * seed + 1, **options)
        found.append(part_growth(part_ms, [*map(sum, zip(part_ms, rest_ms, strict=True))]))
    return [each for each in found if each is not None]


def test_what_grows_is_found_with_its_first_and_last_time():
    found = growth(lambda over: 1.8 + 5.2 * over)
    assert len(found) >= 98
    first = sum(each.first_ms for each in found) / len(found)
    last = sum(each.last_ms for each in found) / len(found)
    assert (first, last) == (pytest.approx(2.4, rel=0.1), pytest.approx(6.5, rel=0.1))


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.3])
def test_noise_is_no_growth(noise):
    assert len(growth(lambda _: 2.0, noise=noise)) == 0


def test_a_slower_machine_and_longer_batches_are_no_growth_of_a_part():
    assert len(growth(lambda over: 2 + 2 * (over > 0.5), lambda over: 2 + 2 * (over > 0.5))) == 0
    assert len(growth(lambda over: 2 + 2 * over, lambda over: 2 + 2 * over)) == 0


@pytest.mark.parametrize("at", [0.3, 0.5, 0.8])
def test_what_is_longer_from_one_moment_on_does_not_grow(at):
    assert len(growth(lambda over: 2 + 2 * (over > at))) <= 5


def test_few_blocks_do_not_tell():
    assert growth(lambda over: 2 + 8 * over, count=11) == []
    assert len(growth(lambda over: 2 + 8 * over, count=20)) >= 90


# -- what keeps memory -------------------------------------------------------------------------------------------------


class Keeper:
    """Adds to containers, and has a property that nobody may read."""

    def __init__(self):
        self.by_name, self.seen, self.latest, self.of_epoch = defaultdict(list), set(), deque(maxlen=4), []
        self.pairs = []

    @property
    def costly(self):
        raise AssertionError

    def by_key(self, step):
        self.by_name["loss"] += [torch.ones(1, requires_grad=True) * step]

    def each(self, step):
        self.seen.add(f"{step:09}" * 50)

    def bounded(self, step):
        self.latest.append(torch.ones(2**20))

    def cleared(self, step):
        self.of_epoch.append(torch.ones(2**20))
        if step % 10 == 9:
            self.of_epoch.clear()

    def twice(self, step):
        self.pairs.extend([np.ones(1000), np.ones(1000)])


@pytest.mark.parametrize(
    ("adds", "said"),
    [
        ("by_key", "self.by_name['loss'] (list of Keeper, FILE by_key) gets a tensor with its graph in each"),
        ("each", "self.seen (set of Keeper, FILE each) gets an entry in each"),
        ("twice", "self.pairs (list of Keeper, FILE twice) gets 2 times an entry in each"),
        ("bounded", None),
        ("cleared", None),
    ],
)
def test_a_container_that_grows_is_named_with_what_it_gets(adds, said):
    keeper, bytes_per_step = Keeper(), 400.0
    containers = Containers(lambda: [("self", keeper)])
    for step in range(100):
        getattr(keeper, adds)(step)
        if step in {1, 3, 7, 15, 31, 63, 99}:
            containers.count(step)
    holder = containers.holder(bytes_per_step)
    if said is None:
        assert holder is None
    else:
        grows = MemoryGrowth(
            category="host", bytes_per_step=bytes_per_step, from_step=1, to_step=99, full_step=None, holder=holder
        )
        words = re.sub(r"(tests/)?test_growth.py:\d+", "FILE", growth_words(grows))
        assert words == f"host memory grows by 0.39 KiB a step: {said}"


def test_a_container_that_is_too_small_for_the_growth_is_not_what_keeps_it():
    keeper = Keeper()
    containers = Containers(lambda: [("self", keeper)])
    for step in range(10):
        keeper.each(step)
        containers.count(step)
    assert containers.holder(1e6) is None


# -- a fit -------------------------------------------------------------------------------------------------------------


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LongerAndLonger(Net):
    def training_step(self, batch, batch_idx):
        sum(range(3000 * batch_idx))
        return super().training_step(batch)


class LongerCallback(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(batch_idx / 4e4)


class Wide(Net):
    """Has 512 KiB of activations."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 8192), torch.nn.Linear(8192, 1))
        self.kept, self.counted = [], []

    def training_step(self, batch):
        self.counted.append(len(batch[0]))
        hidden = self.net[0](batch[0])
        self.keep(hidden.square().mean())
        return self.net[1](hidden).square().mean()

    def keep(self, loss):
        self.kept.append(loss.item())


class KeepsGraphs(Wide):
    def keep(self, loss):
        self.kept.append(loss)


class KeepsGraphsInScript(Wide):
    def keep(self, loss):
        losses.append({"loss": loss, "name": "second"})


class KeepsGraphsInCallback(Callback):
    def __init__(self):
        self.of_steps = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.of_steps[batch_idx] = pl_module.net[0](batch[0]).square().mean()


class KeepsNowhere(Wide):
    """Keeps tensors where nothing looks."""

    def keep(self, loss, *, hidden=[]):  # noqa: B006
        hidden.append(torch.zeros(2**16))


@pytest.fixture
def _no_memory_is_left():
    """What an earlier fit has freed would be taken again before the process grows."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    yield
    losses.clear()


def analysed(model, *callbacks, steps=400, seconds=None):
    ours = ThroughputCallback(warmup_steps=2, record=False)
    data = DataLoader(TensorDataset(torch.randn(steps * 16, 16)), 16)
    limit = None if seconds is None else {"seconds": seconds}
    quiet_trainer(ours, *callbacks, max_epochs=1, max_time=limit).fit(model, data)
    return ours.analysis()


def found(analysis, code=GROWTH):
    return [finding for finding in analysis.findings if finding.code == code]


def on_a_quiet_machine(analysis):
    """The analysis; skips the test where other processes had half a core: which part waits for them is chance."""
    cpu = analysis.run.machine.cpu
    others = cpu.cores - cpu.used - cpu.workers - cpu.idle
    if others > 0.5:
        pytest.skip(f"other processes use {others:.1f} of {cpu.cores:.0f} cores")
    return analysis


@pytest.mark.real_time
def test_a_region_that_grows_is_a_finding_with_its_line():
    [finding] = found(on_a_quiet_machine(analysed(LongerAndLonger())))
    assert finding.title.startswith("forward grows from ")
    assert "of it in sum(range(3000 * batch_idx)) at " in finding.title
    first, last = (finding.evidence[f"{name}_ms_per_step"] for name in ("first", "last"))
    assert 0 < finding.saves.ms_per_step < last < 100 * first


@pytest.mark.parametrize(("first", "last", "more"), [(0.2, 1.8, 1.0), (0.6, 1.4, 0.5), (0.1, 1.9, 1.0)])
def test_growth_costs_what_a_step_takes_more_than_the_first_one_would(first, last, more):
    run = analysed(LongerAndLonger()).run
    ms = run.timing.regions["forward"].device_ms
    grows = {"forward": PartGrowth(first_ms=first * ms, last_ms=last * ms)}  # the middles of the first and last fifth
    [finding] = found(combine(None, replace(run, timing=replace(run.timing, grows=grows))))
    assert finding.saves.ms_per_step == pytest.approx(more * ms)


@pytest.mark.real_time
def test_a_finding_about_a_part_says_that_it_grows():
    analysis = on_a_quiet_machine(analysed(Net(), LongerCallback()))
    [finding] = found(analysis, "slow-callback")
    assert "; it grows from " in finding.title
    assert not any("callback" in each.title for each in found(analysis))


def test_a_step_that_stays_as_long_says_nothing_of_growth():
    analysis = analysed(Net(), steps=800)
    assert analysis.run.timing.grows == {}
    assert not any("grows" in finding.title for finding in analysis.findings)
    assert "growing-steps" not in {hint.code for hint in analysis.hints}


@pytest.mark.linux
@pytest.mark.usefixtures("_no_memory_is_left")
@pytest.mark.parametrize(
    ("model", "callbacks", "kept", "line"),
    [
        (KeepsGraphs, (), "self.kept (list of KeepsGraphs, ", "keep) gets a tensor with its graph in each"),
        (KeepsGraphsInScript, (), "losses (list of ", "keep) gets a tensor with its graph in each"),
        (Wide, (KeepsGraphsInCallback,), "KeepsGraphsInCallback.of_steps (dict of ", "on_train_batch_end) gets a"),
    ],
)
def test_what_keeps_graphs_is_named_with_the_line_that_adds_to_it(model, callbacks, kept, line):
    analysis = analysed(model(), *(callback() for callback in callbacks), **LONG)
    [finding] = [each for each in found(analysis) if "memory" in each.title]
    assert f"a step: {kept}" in finding.title
    assert line in finding.title
    assert ", test_growth.py:" in finding.title.replace("tests/", "")
    assert "detach()" in finding.advice
    mib = finding.evidence["mib_per_step"]
    assert 0.4 < mib < 2, "512 KiB of activations, and what hangs on them"
    assert finding.evidence["full_step"] > finding.evidence["entries"]


class Cached(Dataset):
    """Keeps each sample that was asked for."""

    def __init__(self, steps):
        self.steps, self.samples = steps, {}

    def __len__(self):
        return 16 * self.steps

    def __getitem__(self, index):
        self.samples[index] = torch.ones(2**14)
        return (self.samples[index][:16],)


@pytest.mark.linux
@pytest.mark.usefixtures("_no_memory_is_left")
def test_workers_that_grow_are_named():
    ours = ThroughputCallback(warmup_steps=2, record=False)
    data = DataLoader(Cached(LONG["steps"]), 16, num_workers=1, multiprocessing_context="fork")
    quiet_trainer(ours, max_time={"seconds": LONG["seconds"]}).fit(Net(), data)
    [finding] = found(ours.analysis())
    assert "it is the DataLoader's workers that grow" in finding.title
    assert "cache of samples" in finding.advice


@pytest.mark.linux
@pytest.mark.usefixtures("_no_memory_is_left")
def test_memory_that_grows_for_an_unknown_reason_says_how_to_look():
    [finding] = found(analysed(KeepsNowhere(), **LONG))
    assert finding.of == "memory"
    assert "what keeps it is not known" in finding.title
    assert "tracemalloc" in finding.advice


def test_a_fit_that_keeps_numbers_has_no_growth_of_memory():
    analysis = analysed(Wide(), **LONG)
    assert analysis.run.machine.growth is None
    assert found(analysis) == []


def test_growth_that_waits_for_a_core_explain_is_none():
    analysis = analysed(LongerAndLonger())
    cpu = CpuUse(cores=2, used=1, idle=0, threads=1, waits_pct=95.0)
    run = replace(analysis.run, machine=replace(analysis.run.machine, cpu=cpu))
    assert found(combine(None, run)) == []

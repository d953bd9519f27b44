"""Advice on the loader knows the loader, the cores and the accumulation: on real Trainers, and for all settings."""

import json
import os
import re
import warnings
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, get_worker_info

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.diagnosis.loader import (
    LoaderWait,
    loader_advice,
    only_bounded,
    pin_memory_advice,
    workers_to_try,
)
from lightning_forge_profiling.kineto.copies import write_anonymous_copy
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import LoaderSettings
from tests.models import Classifier, Samples, Stream, every_step, loader
from tests.synthetic import Synthetic

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def one_core():
    """This process may use one core only, as under `taskset`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def trained(make_trainer, data, module=None, **options):
    callback = every_step(2)
    make_trainer(callback, logger=False, **options).fit(module or Classifier(), data)
    return callback.analysis()


def the(code, analysis):
    [found] = [found for found in analysis.findings if found.code == code]
    return found


def workers_advised(advice):
    return [int(number) for number in re.findall(r"(?:try|measure) num_workers=(\d+)", advice)]


# -- on real Trainers -------------------------------------------------------------------------------------------------


def test_the_settings_of_the_loader_are_in_the_summary_and_in_the_finding(make_trainer):
    data = loader(60, slow="data", shuffle=True)
    analysis = trained(make_trainer, data, accumulate_grad_batches=3)
    assert analysis.run.settings.loader == LoaderSettings(
        kind="DataLoader",
        num_workers=0,
        batch_size=4,
        sampler="RandomSampler",
        cores=CORES,
        accumulate_grad_batches=3,
    )
    evidence = the("input-bound", analysis).evidence
    assert (evidence["num_workers"], evidence["usable_cores"], evidence["accumulate_grad_batches"]) == (0, CORES, 3)
    assert (evidence["persistent_workers"], evidence["pin_memory"]) == ("False", "False")


def test_the_workers_that_are_advised_are_no_more_than_torch_has_cores_for(make_trainer):
    advice = the("input-bound", trained(make_trainer, loader(40, slow="data"))).advice
    for workers in workers_advised(advice):  # none on a machine without an idle core
        assert 1 <= workers <= CORES
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as of more workers than cores
            DataLoader(Samples(), num_workers=workers)
    assert "pin_memory" not in advice, "there is no GPU to copy to"


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_on_one_core_a_loader_with_a_worker_gets_other_advice(make_trainer):
    without = the("input-bound", trained(make_trainer, loader(200, slow="data")))
    assert not workers_advised(without.advice), "it computes, and the core is not idle"
    assert "of the one usable core are free: more workers would compete" in without.advice
    assert without.advice.startswith("Make that line cheaper"), "the one that is named"
    assert without.evidence["usable_cores"] == 1

    data = loader(60, slow="data", num_workers=1, persistent_workers=True)
    found = the("input-bound", trained(make_trainer, data, Classifier()))
    assert "num_workers=1" in found.advice
    assert "the one usable core" in found.advice
    assert "ake a sample cheaper" in found.advice
    assert "persistent_workers=True" not in found.advice


class Split(Stream):
    def __iter__(self):
        return islice(super().__iter__(), mine(), None, 2)


def mine():
    worker = get_worker_info()
    return 0 if worker is None else worker.id


def test_an_iterable_dataset_is_to_be_split_before_it_gets_workers(make_trainer):
    slow = Stream(60)
    slow.samples.slow = "data"
    analysis = trained(make_trainer, DataLoader(slow, 4))
    found = the("input-bound", analysis)
    assert found.remedy.startswith("Split the dataset by torch.utils.data.get_worker_info() in its __iter__ first")
    assert (found.fix, found.saves) == ("", None), "no number before that"
    assert "try_num_workers" not in found.evidence
    slow = Split(60)
    slow.samples.slow = "data"
    assert not trained(make_trainer, DataLoader(slow, 4)).run.settings.loader.unsplit
    other = DataLoader(Stream(60), 4, worker_init_fn=print)
    assert not trained(make_trainer, other).run.settings.loader.unsplit


def test_what_is_no_torch_dataloader_gets_other_advice(make_trainer):
    class Reader:
        def __iter__(self):
            return iter(loader(40, slow="data"))

    analysis = trained(make_trainer, Reader())
    assert (analysis.run.settings.loader.kind, analysis.run.settings.loader.num_workers) == ("Reader", None)
    assert "The loader is of type Reader" in the("input-bound", analysis).advice


def test_of_several_loaders_the_workers_are_those_of_all(make_trainer):
    class First(Classifier):
        def training_step(self, batch):
            return super().training_step(batch["a"])

    both = CombinedLoader({"a": loader(40, num_workers=1, persistent_workers=True), "b": loader(40)}, "min_size")
    settings = trained(make_trainer, both, First()).run.settings.loader
    assert (settings.loaders, settings.num_workers, settings.persistent_workers) == (2, 1, True)
    assert settings.prefetch_factor == 2


def test_a_trace_that_is_analysed_alone_knows_them_too(make_trainer, tmp_path):
    callback = ForgeProfilerCallback(3, 8, trace_dir=tmp_path / "traces")
    data = loader(60, slow="data", num_workers=np.int64(0))  # as from a search of parameters
    make_trainer(callback, accumulate_grad_batches=2).fit(Classifier(), data)
    trace = callback.trace_report().path
    expected = LoaderSettings(
        kind="DataLoader",
        num_workers=0,
        batch_size=4,
        sampler="SequentialSampler",
        cores=CORES,
        accumulate_grad_batches=2,
    )
    analysis = analyze(trace).analysis
    assert analysis.ranks[0].loader == expected
    found = the("input-bound", analysis)
    assert found.evidence["usable_cores"] == CORES
    assert max(workers_advised(found.advice)) <= CORES
    shared = tmp_path / "shared" / "rank0.trace.json.gz"
    shared.parent.mkdir()
    write_anonymous_copy(trace, shared)
    assert analyze(shared).analysis.ranks[0].loader == expected


@pytest.mark.parametrize("about", [7, {"loader": 3}, {"loader": {"num_workers": "many"}}, {"loader": {"cores": []}}])
def test_settings_that_are_none_are_unknown(about, tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(2, 5, launched=1)
    path = trace.write(tmp_path)
    path.write_text(json.dumps({"forge_profiling": about, **json.loads(path.read_text())}))
    assert analyze(path).analysis.ranks[0].loader is None


# -- for all settings -------------------------------------------------------------------------------------------------

WAITS = [
    LoaderWait(host_ms=host, exposed_ms=exposed, step_ms=step, on_gpu=on_gpu)
    for host, exposed, step in ((25.0, 25.0, 40.0), (3.0, 2.0, 30.0), (500.0, 480.0, 481.0))
    for on_gpu in (True, False)
]
SETTINGS = [
    LoaderSettings(
        kind="DataLoader",
        num_workers=workers,
        persistent_workers=bool(workers) and stays,
        pin_memory=pinned,
        prefetch_factor=2 if workers else None,
        cores=cores,
        ranks_on_host=ranks,
    )
    for workers, stays, pinned, cores, ranks in product(
        (0, 1, 2, 8, 64), (True, False), (True, False), (1, 2, 16), (1, 4)
    )
]


@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_nothing_is_advised_that_is_set_or_that_the_cores_do_not_allow(wait):
    for settings in SETTINGS:
        advice, _ = loader_advice(replace(wait, settings=settings))
        tried = workers_to_try(replace(wait, settings=settings))
        assert workers_advised(advice) == ([] if tried is None else [tried]), settings
        most = max(settings.cores // settings.ranks_on_host, 2 * settings.num_workers, 1)
        for workers in workers_advised(advice):
            assert workers <= most, settings
            assert workers != settings.num_workers, settings
            assert workers > settings.num_workers or settings.num_workers > settings.most_workers, settings
        if settings.pin_memory or not wait.on_gpu:
            assert "pin_memory=True" not in advice, settings
        if settings.persistent_workers:
            assert "persistent_workers=True" not in advice, settings
        if settings.num_workers >= most:
            assert "cheaper" in advice, "there is something left to do"
        assert "forge-profiling compare" in advice, "what is not known to gain is to be measured"


def test_workers_that_keep_up_are_reckoned_from_those_there_are():
    wait = LoaderWait(host_ms=16, exposed_ms=16, step_ms=24, on_gpu=True)  # 8 ms without the wait
    settings = LoaderSettings(kind="DataLoader", num_workers=2, prefetch_factor=2, pin_memory=True, cores=16)
    assert workers_advised(loader_advice(replace(wait, settings=settings))[0]) == [6]


def test_without_the_settings_the_words_are_right_for_all():
    wait = LoaderWait(host_ms=16, exposed_ms=16, step_ms=24, on_gpu=True)
    advice, _ = loader_advice(wait)
    assert "more num_workers than now" in advice
    assert "all ranks on the host counted" in advice
    assert "forge-profiling compare A B" in advice


@pytest.mark.parametrize(("cores", "on_gpu", "bounded"), [(16, True, False), (2, True, True), (16, False, True)])
def test_the_whole_wait_is_expected_to_go_only_where_workers_can_keep_up(cores, on_gpu, bounded):
    wait = LoaderWait(host_ms=25, exposed_ms=25, step_ms=30, on_gpu=on_gpu)  # five workers keep up
    settings = LoaderSettings(kind="DataLoader", num_workers=0, cores=cores)
    assert only_bounded(replace(wait, settings=settings)) is bounded


def test_memory_that_is_pinned_already_is_not_advised_to_be():
    assert "Set pin_memory=True" in pin_memory_advice(None)
    assert "Set pin_memory=True" in pin_memory_advice(LoaderSettings(num_workers=2))
    assert "Set" not in pin_memory_advice(LoaderSettings(num_workers=2, pin_memory=True))


def test_small_batches_are_made_larger_at_the_price_of_the_accumulation():
    wait = LoaderWait(host_ms=0.6, exposed_ms=0.6, step_ms=2, on_gpu=True)
    advice, _ = loader_advice(
        replace(wait, settings=LoaderSettings(kind="DataLoader", num_workers=0, accumulate_grad_batches=4))
    )
    assert "make batches larger or cheaper" in advice
    assert "accumulate_grad_batches=4" in advice

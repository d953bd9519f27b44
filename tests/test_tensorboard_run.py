"""What `tensorboard --logdir` on the logger's folder shows of a run with our callbacks, in a real browser too."""

import gzip
import json
from statistics import fmean
from time import perf_counter

import lightning as L
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from selenium.webdriver.common.by import By

from lightning_forge_profiling import ForgeProfilerCallback, region
from tests.browser import chromium, tensorboard_server, wait_until
from tests.entered_steps import watch
from tests.models import SLOW_MS, Classifier, every_step, loader, quiet_trainer


class Keep(L.Callback):
    """Keep the recorder's step times, and the time between two steps, in which the fetch lies."""

    def __init__(self):
        self.times = {}
        self.between_ms = []
        self.ended = 0.0

    def on_train_start(self, trainer, module):
        watch(trainer.profiler.step_timer, lambda times, *_: self.times.__setitem__(times.step, times))

    def on_train_batch_start(self, *_):
        self.between_ms.append((perf_counter() - self.ended) * 1e3)

    def on_train_batch_end(self, *_):
        self.ended = perf_counter()


class WithRegion(Classifier):
    def training_step(self, batch):
        with region("mine"):
            return super().training_step(batch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    logger, keep, forge = TensorBoardLogger(root), Keep(), ForgeProfilerCallback(start_step=5, end_step=8)
    trainer = quiet_trainer(
        forge,
        every_step(warmup_steps=2),
        keep,
        max_epochs=2,
        log_every_n_steps=2,
        logger=logger,
        enable_checkpointing=True,
    )
    trainer.fit(WithRegion(), loader(slow="data"))
    return logger.log_dir, keep, forge.trace_report()


@pytest.fixture(scope="module")
def board(run):
    with tensorboard_server(run[0]) as server:
        yield server


@pytest.mark.slow
def test_the_scalars_are_there(board):
    expected = {
        "throughput/samples_per_sec",
        "throughput/steps_per_sec",
        "time/step_ms",
        "time/data_ms",
        "time/mine_ms",
    }
    [tags] = board.scalar_tags(expected).values()
    assert expected <= set(tags)


def test_one_window_is_one_run_with_one_worker(board, run):
    [name] = board.profiler_runs()
    assert name == str(run[2].plugin_path.parent.relative_to(run[0]))
    assert board.workers(name) == ["rank0"]


@pytest.mark.slow
def test_the_plugin_counts_our_steps_and_our_data_time(board, run):
    _, keep, report = run
    [name] = board.profiler_runs()
    overview = board.profile("overview", name, "rank0")
    assert [row[0] for row in overview["steps"]["rows"]] == ["5", "6", "7"]
    [total] = overview["performance"]
    shown = {part["name"]: part["value"] / 1e3 for part in total["children"]}
    events = json.loads(gzip.decompress(report.path.read_bytes()))["traceEvents"]
    fetches = [event["dur"] / 1e3 for event in events if event["name"] == "forge.data"]
    assert len(fetches) == 3
    assert shown["DataLoader"] == pytest.approx(fmean(fetches), abs=0.001)
    ours = fmean(keep.times[step].host_ms["data"] for step in (5, 6, 7))
    for mean in (shown["DataLoader"], ours):  # both are of the fetch, and of hardly anything else
        assert 4 * SLOW_MS <= mean <= fmean(keep.between_ms[5:8])


@pytest.mark.slow
@pytest.mark.browser
def test_the_profiler_tab_opens_and_offers_the_run(board, run):
    with chromium() as browser:
        browser.get(f"{board.url}#pytorch_profiler")
        frame = wait_until(lambda: browser.find_elements(By.TAG_NAME, "iframe"), "the tab is a frame")[0]
        browser.switch_to.frame(frame)
        name = str(run[2].plugin_path.parent.relative_to(run[0]))
        wait_until(lambda: name in browser.find_element(By.TAG_NAME, "body").text, "the run is offered")

"""What the Trainer's own loggers get at the end of a fit, read back from the files of their real clients."""

import json
import os
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.run.loggers import Result, publish
from tests.browser import chromium, tensorboard_server, wait_until
from tests.models import Classifier, every_step, loader, quiet_trainer
from tests.outcomes import REPORTS, script, tables, traces
from tests.samples import sample_analysis

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

OFFLINE = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


def tracked(kind, folder, *options):
    """What a reader of the tracker finds after a fit in a process of its own, and what that printed."""
    done = script("tracked.py", kind, folder, *options, cwd=folder, env={**os.environ, **OFFLINE})
    assert done.returncode == 0, done.stderr
    assert tables(done.stdout) == 1
    return json.loads(done.stdout.splitlines()[-1]), done


# -- W&B -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs in one folder, each with a trace: the folder, and what is found after each."""
    folder = tmp_path_factory.mktemp("wandb")
    return folder, [tracked("wandb", folder, "profile")[0] for _ in range(2)]


@pytest.mark.slow
def test_wandb_gets_the_page_and_the_means_of_the_run_as_its_summary(two_runs):
    folder, (found, _) = two_runs
    summary, trace = found["summary"], traces(folder)[0]
    assert {name: summary[name] for name in found["means"]} == pytest.approx(found["means"])
    assert summary["profile/verdict"] == found["verdict"]
    assert summary["profile/trace"] == str(trace.parent)
    page = Path(found["folder"], summary["profile/report"])
    assert page.read_bytes() == (trace.parent / "report.html").read_bytes()


@pytest.mark.slow
def test_each_run_of_wandb_has_its_own_folder_which_summary_json_names(two_runs):
    folder, runs = two_runs
    names = [json.loads((trace.parent / "summary.json").read_text())["tracked"] for trace in traces(folder)]
    assert [[[*run.values()] for run in tracked] for tracked in names] == [found["tracked"] for found in runs]
    for trace, [run] in zip(traces(folder), names, strict=True):
        assert trace.parents[2] == folder / "lightning_logs" / run["version"]
        assert list((folder / "wandb").glob(f"offline-run-*-{run['version']}"))
    assert names[0] != names[1]


@pytest.mark.slow
def test_with_a_prefix_and_without_a_trace_the_page_is_of_the_run_alone(tmp_path):
    found, _ = tracked("wandb-prefix", tmp_path)
    summary = found["summary"]
    assert {name: summary[f"mine-{name}"] for name in found["means"]} == pytest.approx(found["means"])
    assert "mine-profile/trace" not in summary
    page = Path(found["folder"], summary["mine-profile/report"])
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_with_publish_false_a_tracker_gets_rows_only(tmp_path):
    found, _ = tracked("wandb", tmp_path, "quiet")
    assert found["summary"]["time/step_ms"] > 0
    assert not [name for name in found["summary"] if name.startswith("profile/")]
    assert not Path(found["folder"], "media").exists()


# -- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_gets_the_reports_as_artifacts_and_the_means_as_metrics_of_their_own(tmp_path):
    found, _ = tracked("mlflow-sqlite", tmp_path, "profile")
    means = {f"run/{name}": value for name, value in found["means"].items()}
    assert {name: found["metrics"][name] for name in means} == pytest.approx(means)
    assert {found["rows"][name] for name in means} == {1}
    assert found["rows"]["time/step_ms"] > 1, "the rows of the run are as they were"
    assert {Path(path).name for path in found["artifacts"]} == REPORTS
    [trace] = traces(tmp_path)
    assert found["tags"]["profile.verdict"] == found["verdict"]
    assert found["tags"]["profile.trace"] == str(trace.parent)
    assert trace.parents[2].name == found["tracked"][0][2]


@pytest.mark.slow
def test_the_listing_of_mlflows_file_store_is_whole_with_a_trace_beside_it(tmp_path):
    for count in (1, 2):
        found, done = tracked("mlflow-files", tmp_path, "profile")
        assert len(found["runs"]) == count
        assert found["experiments"] == 2, "the default one and ours"
        assert {Path(path).name for path in found["artifacts"]} == REPORTS
        assert "Malformed" not in done.stderr
    assert len({trace.parents[2] for trace in traces(tmp_path)}) == 2


@pytest.mark.slow
def test_a_failed_fit_has_its_result_too_and_its_own_exception(tmp_path):
    found, _ = tracked("mlflow-sqlite", tmp_path, "fails")
    assert found["failed"] == "mine"
    assert found["tags"]["profile.verdict"] == found["verdict"]
    assert found["metrics"]["run/time/step_ms"] == pytest.approx(found["means"]["time/step_ms"])


@pytest.mark.slow
def test_a_store_that_is_gone_costs_one_warning(tmp_path):
    done = script("tracked.py", "mlflow-gone", tmp_path, cwd=tmp_path, env={**os.environ, **OFFLINE})
    assert tables(done.stdout) == 1
    assert done.stderr.count("The logger MLFlowLogger did not take the result of the run: ") == 1


# -- TensorBoard -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """A run with TensorBoard's logger: its folder and its callback."""
    folder, throughput = tmp_path_factory.mktemp("board"), every_step(warmup_steps=2)
    trainer = quiet_trainer(
        throughput, ForgeProfilerCallback(5, 7), logger=TensorBoardLogger(folder, name="gpt"), log_every_n_steps=6
    )
    trainer.fit(Classifier(), loader(80))
    return folder, throughput


def test_tensorboard_gets_the_summary_as_text(board):
    folder, throughput = board
    events = EventAccumulator(str(folder / "gpt" / "version_0")).Reload()
    [text] = events.Tensors("profile/text_summary")
    [written] = text.tensor_proto.string_val
    written = written.decode()
    [trace] = traces(folder)
    assert written.startswith((trace.parent / "summary.md").read_text())
    for name, value in throughput.summary().items():
        assert f"| `{name}` | {value:.6g} |" in written
    assert text.step == 19
    assert events.Tags()["scalars"], "and the rows are there"


@pytest.mark.slow
@pytest.mark.browser
def test_the_text_tab_shows_verdict_and_tables(board):
    folder, throughput = board
    with tensorboard_server(folder) as server, chromium() as browser:
        browser.get(f"{server.url}#text")

        def shown():
            return browser.execute_script(
                "const all = node => [node, ...[...node.querySelectorAll('*')].flatMap("
                "  each => [each, ...(each.shadowRoot ? all(each.shadowRoot) : [])])];"
                "return all(document).filter(node => node.tagName === 'TD').map(node => node.textContent)"
            )

        cells = wait_until(lambda: "time/step_ms" in (found := shown()) and found, "the text is shown")
        assert f"{throughput.summary()['time/step_ms']:.6g}" in cells


# -- whichever -------------------------------------------------------------------------------------------------------


class CometLogger:
    """Has the name of Lightning's, and none of its methods works."""


def test_a_client_that_fails_costs_one_warning_and_the_others_nothing(tmp_path, caplog):
    board = TensorBoardLogger(tmp_path, name="tb")
    publish([CometLogger(), board], Result(sample_analysis(), {"time/step_ms": 1.5}, step=3))
    board.experiment.close()
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("The logger CometLogger did not take the result of the run: AttributeError")
    assert "profile/text_summary" in EventAccumulator(board.log_dir).Reload().Tags()["tensors"]


def test_no_time_means_no_attempt(tmp_path):
    board = TensorBoardLogger(tmp_path, name="tb")
    publish([board], Result(sample_analysis(), {}, step=0), limit_s=0)
    assert not (tmp_path / "tb").exists()

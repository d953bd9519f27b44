"""A fit with a tracker's real client, offline: KIND, the folder, and any of `quiet`, `fails`, `profile`.

Prints what a reader of the tracker finds, as one line of JSON.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, Fails, loader, quiet_trainer


def mlflow(folder, uri):
    # a store for artifacts of its own, since that of a database is the working directory
    where = None if uri.startswith("file:") else f"file:{folder}/artifacts"
    return MLFlowLogger(tracking_uri=uri, artifact_location=where)


LOGGERS = {
    "wandb": lambda folder: WandbLogger(offline=True, save_dir=folder),
    "wandb-prefix": lambda folder: WandbLogger(offline=True, save_dir=folder, prefix="mine"),
    "mlflow-sqlite": lambda folder: mlflow(folder, f"sqlite:///{folder}/mlflow.db"),
    "mlflow-files": lambda folder: mlflow(folder, f"file:{folder}/mlruns"),
    "mlflow-gone": lambda folder: mlflow(folder, f"sqlite:///{folder}/mlflow.db"),
}


class Goes(L.Callback):
    """Takes the server away at the end of the training loop."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        (self.folder / "mlflow.db").unlink()


def found_in_mlflow(logger):
    client, run_id = logger.experiment, logger.run_id
    run = client.get_run(run_id)
    return {
        "metrics": run.data.metrics,
        "tags": run.data.tags,
        "artifacts": [artifact.path for artifact in client.list_artifacts(run_id, "profile")],
        "experiments": len(client.search_experiments()),
        "runs": [run.info.run_id for run in client.search_runs([logger.experiment_id])],
        "rows": {name: len(client.get_metric_history(run_id, name)) for name in run.data.metrics},
    }


def found_in_wandb(logger):
    """The summary as the client's own service has it: offline there is no file of it that can be read."""
    summary = dict(logger.experiment.summary)
    files = {name: value["path"] for name, value in summary.items() if hasattr(value, "keys")}
    found = {"summary": {**summary, **files}, "folder": logger.experiment.dir}
    logger.experiment.finish()
    return found


def main(kind, folder, *options):
    folder = Path(folder)
    os.chdir(folder)
    logger = LOGGERS[kind](folder)
    throughput = ThroughputCallback(warmup_steps=2, overhead=None, publish="quiet" not in options)
    callbacks = [throughput, *([ForgeProfilerCallback(5, 7)] if "profile" in options else [])]
    trainer = quiet_trainer(
        *callbacks,
        *([Goes(folder)] if kind == "mlflow-gone" else []),
        logger=logger,
        log_every_n_steps=6,
        default_root_dir=folder,
    )
    failed = ""
    try:
        trainer.fit(Fails(15, ValueError("mine")) if "fails" in options else Classifier(), loader(80))
    except ValueError as exc:
        failed = str(exc)
    analysis = throughput.analysis()
    found = {"verdict": analysis.verdict, "means": throughput.summary(), "failed": failed}
    found["tracked"] = [[run.logger, run.name, run.version] for run in analysis.tracked]
    if kind.startswith("wandb"):
        found |= found_in_wandb(logger)
    elif kind != "mlflow-gone":
        found |= found_in_mlflow(logger)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

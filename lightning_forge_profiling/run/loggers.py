"""What the Trainer's loggers get: metrics during a fit, and the result at its end. One that raises affects no other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

from lightning_forge_profiling.names import REPORT_HTML, SUMMARY_JSON, SUMMARY_MARKDOWN
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import problems_within
from lightning_forge_profiling.report.markdown import markdown, markdown_table
from lightning_forge_profiling.report.page import write_reports
from lightning_forge_profiling.report.screen import Column, Row, Table
from lightning_forge_profiling.safe_files import read_regular
from lightning_forge_profiling.schema import Analysis

_log = plain_logger(__name__)

_FAILURES: Final = 3


@dataclass(slots=True)
class _Failures:
    """Those of one logger."""

    logger: str
    consecutive: int = 0
    lost: int = 0  # log entries that were lost and not reported yet
    problem: str = ""


class Loggers:
    """Gives each log entry to every logger; drops one that raised three times in a row. One warning per logger."""

    def __init__(self) -> None:
        self._failures: dict[int, _Failures] = {}  # by id: a logger is the user's, and is not held

    def log(self, loggers: Iterable[Any], metrics: Mapping[str, float], step: int) -> None:
        """Log one entry."""
        for logger in loggers:
            failures = self._failures.setdefault(id(logger), _Failures(type(logger).__name__))
            if failures.consecutive == _FAILURES:
                continue
            try:
                logger.log_metrics(dict(metrics), step=step)
            except Exception as exc:
                failures.consecutive += 1
                failures.lost += 1
                failures.problem = f"{type(exc).__name__}: {exc}"
                _log.debug("", exc_info=exc)
                if failures.consecutive == _FAILURES:
                    self._warn(failures, f"failed {_FAILURES} times in a row and gets no more metrics in this fit")
            else:
                failures.consecutive = 0

    def close(self) -> None:
        """Warn of log entries that were lost without a warning so far."""
        for failures in self._failures.values():
            if failures.lost:
                self._warn(failures, f"did not take {failures.lost} log entr{'y' if failures.lost == 1 else 'ies'}")

    def _warn(self, failures: _Failures, what: str) -> None:
        failures.lost = 0
        _log.warning("The logger %s %s: %s", failures.logger, what, failures.problem)


# longest wait for all loggers together at the end of a fit. A client whose server is gone retries for minutes.
PUBLISH_S: Final = 30.0

_NAME: Final = "profile"  # prefix of each name, so that a tracker groups them


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    analysis: Analysis
    means: Mapping[str, float]  # logged metrics over all counted steps
    step: int  # x-axis value of the last log entry
    trace: str = ""  # folder or URL of the trace; "" without one
    reports: Path | None = None  # folder with the three reports; None to write them for the loggers


def publish(loggers: Iterable[Any], result: Result, *, limit_s: float = PUBLISH_S) -> None:
    """Publish the result to each logger that can hold it. Never raises: a failure is one warning per logger."""
    known = [(logger, kind) for logger in loggers if (kind := _kind(logger)) is not None]
    if not known or limit_s <= 0:
        return
    problems = problems_within(limit_s, [partial(_publish, kind, logger, result) for logger, kind in known])
    for (logger, _), problem in zip(known, problems, strict=True):
        if problem is not None:
            what = f"{type(problem).__name__}: {problem}"
            _log.warning("The logger %s did not take the result of the run: %s", type(logger).__name__, what)
            _log.debug("", exc_info=problem)


def _publish(kind: "_Kind", logger: Any, result: Result) -> None:
    if result.reports is not None:
        kind(logger, result, result.reports)
        return
    with TemporaryDirectory(prefix="forge-profiling-") as folder:
        write_reports(result.analysis, (), folder)
        kind(logger, result, Path(folder))


def _tensorboard(logger: Any, result: Result, _reports: Path) -> None:
    """Log the summary to the tab TEXT. Not as hparams: a run without any would get an empty row in that tab."""
    logger.experiment.add_text(_NAME, _text(result), global_step=result.step)


def _wandb(logger: Any, result: Result, reports: Path) -> None:
    """Log the page as a panel, and the means to the run's summary, which would otherwise have the last entry's."""
    html: Any = import_module("wandb").Html  # its logger has imported it
    page = StringIO(read_regular(reports / REPORT_HTML).decode())  # a str may be taken for a path
    logger.log_metrics({f"{_NAME}/report": html(page, inject=False)}, step=result.step)
    prefix = f"{logger._prefix}-" if logger._prefix else ""  # noqa: SLF001  (Lightning puts it before every name)
    shown = {**result.means, **_tags(result)}
    logger.experiment.summary.update({f"{prefix}{name}": value for name, value in shown.items()})


def _mlflow(logger: Any, result: Result, reports: Path) -> None:
    """Log the reports as artifacts, and the means under separate names: MLflow shows the last value of each metric."""
    logger.log_metrics(_means(result), step=result.step)
    for name, value in _tags(result).items():
        logger.experiment.set_tag(logger.run_id, name.replace("/", "."), value)
    for report in _files(reports):
        logger.experiment.log_artifact(logger.run_id, str(report), artifact_path=_NAME)


def _comet(logger: Any, result: Result, reports: Path) -> None:
    """Log the page to the tab HTML, the reports as assets, and the means under separate names, as for MLflow."""
    experiment = logger.experiment
    logger.log_metrics(_means(result), step=result.step)
    experiment.log_others(_tags(result))
    experiment.log_html(read_regular(reports / REPORT_HTML).decode())
    for report in _files(reports):
        experiment.log_asset(str(report), file_name=f"{_NAME}/{report.name}")


_Kind = Callable[[Any, Result, Path], None]

# by class name, so that clients of other loggers are not imported
_KINDS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {"TensorBoardLogger": _tensorboard, "WandbLogger": _wandb, "MLFlowLogger": _mlflow, "CometLogger": _comet}
)


def _kind(logger: Any) -> _Kind | None:
    return next((_KINDS[base.__name__] for base in type(logger).__mro__ if base.__name__ in _KINDS), None)


def _means(result: Result) -> dict[str, float]:
    return {f"run/{name}": value for name, value in result.means.items()}


def _tags(result: Result) -> dict[str, str]:
    tags = {f"{_NAME}/verdict": result.analysis.verdict, f"{_NAME}/trace": result.trace}
    return {name: value for name, value in tags.items() if value}


def _files(reports: Path) -> Iterator[Path]:
    return (path for name in (REPORT_HTML, SUMMARY_JSON, SUMMARY_MARKDOWN) if (path := reports / name).is_file())


def _text(result: Result) -> str:
    rows = tuple(Row((name, f"{value:.6g}")) for name, value in result.means.items())
    means = (
        "\n".join(markdown_table(Table((Column("metric", "code"), Column("mean of the run")), rows))) if rows else ""
    )
    return markdown(result.analysis) + means

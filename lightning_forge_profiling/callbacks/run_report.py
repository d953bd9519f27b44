"""Report on a run: collects its figures, analyses run and trace, and rewrites the trace's reports at the end."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.folders import logger_folder, tracked_runs
from lightning_forge_profiling.callbacks.host_readings import HostReadings
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.run_analysis import (
    analysis_of,
    run_compute,
    run_evidence,
    run_ledger,
    share_intervals,
)
from lightning_forge_profiling.callbacks.run_settings import loader_settings, optimizer_settings, restarted_workers
from lightning_forge_profiling.diagnosis.ledger_costs import NOTICED_S
from lightning_forge_profiling.diagnosis.ranks import rank_work
from lightning_forge_profiling.names import PROFILER, REPORT_HTML, SUMMARY_JSON, SUMMARY_MARKDOWN
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import exit_timeout_s, problems_within
from lightning_forge_profiling.report.files import write_reports
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.markdown_tables import table
from lightning_forge_profiling.report.text import code_cell
from lightning_forge_profiling.results.analysis import Analysis, RankWork, RunLedger
from lightning_forge_profiling.results.run_report import RunReport
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.safe_files import read_regular
from lightning_forge_profiling.timing.ledger import Ledger
from lightning_forge_profiling.timing.rates import Compute, LoopRates
from lightning_forge_profiling.timing.run_totals import RunSummary, StepBlock

_log = plain_logger(__name__)

PUBLISH_S: Final = 30.0
"""Longest wait for all loggers together at the end of a fit. A client whose server is gone retries for minutes."""

_NAME: Final = "profile"
"""Prefix of each name, so that a tracker groups them."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run.

    Attributes:
        analysis: analysis of the run, and of the trace if there is one.
        means: logged metrics over all counted steps.
        step: x-axis value of the last row.
        trace: folder or URL of the trace; "" without one.
        reports: folder with the three reports; None to write them for the loggers.
    """

    analysis: Analysis
    means: Mapping[str, float]
    step: int
    trace: str = ""
    reports: Path | None = None


def publish(loggers: Iterable[Any], result: Result, *, limit_s: float = PUBLISH_S) -> None:
    """Publish the result to each logger that can hold it. Never raises: a failure is one warning per logger."""
    found = [(logger, kind) for logger in loggers if (kind := _kind(logger)) is not None]
    if not found or limit_s <= 0:
        return
    problems = problems_within(limit_s, [partial(_publish, kind, logger, result) for logger, kind in found])
    for (logger, _), problem in zip(found, problems, strict=True):
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
    """Log the page as a panel, and the means to the run's summary, which would otherwise have the last row."""
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

_KINDS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {"TensorBoardLogger": _tensorboard, "WandbLogger": _wandb, "MLFlowLogger": _mlflow, "CometLogger": _comet}
)
"""By class name, so that clients of other loggers are not imported."""


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
    rows = ((code_cell(name), f"{value:.6g}") for name, value in result.means.items())
    means = "\n".join(table(("metric", "mean of the run"), rows)) if result.means else ""
    return markdown(result.analysis) + means


OtherRanks = Callable[[RankWork], Sequence[RankWork]]
"""Reads the work of the other ranks, given that of this one."""


def run_report(
    trainer: Trainer,
    run: RunSummary,
    *,
    on_device: bool,
    trace: TraceReport | None,
    recorded: Analysis | None,
    others: OtherRanks | None,
    gpu: TelemetrySummary | str | None,
    compute: Sequence[Compute],
    ledger: Ledger,
    continues_from: int,
    readings: HostReadings,
    blocks: Sequence[StepBlock] = (),
    loops: tuple[LoopRates, ...] = (),
) -> RunReport:
    """The report on a fit. With the analysis of its trace, the reports beside the trace are rewritten."""
    rates = tuple(run_compute(found) for found in compute)
    evidence = run_evidence(
        run,
        on_device=on_device,
        world_size=trainer.world_size,
        telemetry=gpu if isinstance(gpu, TelemetrySummary) else None,
        compute=rates,
        workers=restarted_workers(trainer),
        loader=loader_settings(trainer),
        ledger=ledger,
        continues_from=continues_from,
    )
    if evidence is not None:
        evidence = replace(
            evidence,
            validation_loader=loader_settings(trainer, validation=True),
            optimizer=optimizer_settings(trainer),
            intervals=share_intervals(blocks),
            lines=readings.lines(),
            cpu=readings.cpu_use(max(int(trainer.num_devices), 1)),
            switches=readings.switches,
            rank=trainer.global_rank,
        )
        if trainer.world_size > 1:
            mine = rank_work(evidence, host=gethostname())
            evidence = replace(evidence, ranks=(mine, *(() if others is None else others(mine))))
    folder = logger_folder(trainer) if trainer.is_global_zero else None
    return RunReport(
        run,
        trace,
        device=lightning_api.device_name(trainer),
        on_device=on_device,
        replicas=lightning_api.replicas(trainer),
        log_folder=None if folder is None else folder.path,
        analysis=analysis_of(trace, recorded, evidence, tracked_runs(trainer)),
        compute=rates,
        gpu=gpu,
        loops=loops,
    )


def with_ledger(report: RunReport, recorded: Analysis | None, ledger: Ledger) -> RunReport:
    """The report with findings and verdict by a later reading of the ledger; the reports beside the trace have it, too.

    Less than a second could be no finding, and the report stays as it is. So do copies of it in a remote folder.
    """
    analysis = report.analysis
    if analysis is None or analysis.run is None or analysis.run.ledger is None:
        return report
    if _own_s(ledger) - _own_s(analysis.run.ledger) < NOTICED_S:
        return report
    read = run_ledger(ledger, report.run.steady if report.on_device else None)
    trace = None if report.trace is None or report.trace.url else report.trace
    return replace(report, analysis=analysis_of(trace, recorded, replace(analysis.run, ledger=read), analysis.tracked))


def _own_s(ledger: Ledger | RunLedger) -> float:
    return ledger.wall_s - ledger.parts.get(PROFILER, 0.0)


def further_findings(before: RunReport, after: RunReport) -> list[str]:
    """Findings of parts of the ledger, as text, that an earlier report does not have."""
    if before.analysis is None or after.analysis is None:
        return []
    known = {found.evidence.get("part") for found in before.analysis.findings}
    return [
        f"{found.code}: {found.title}. {found.advice}"
        for found in after.analysis.findings
        if found.evidence.get("part") not in {None, *known}
    ]


def publish_run(
    trainer: Trainer,
    analysis: Analysis,
    means: Mapping[str, float],
    trace: TraceReport | None,
    *,
    interrupted: bool,
) -> None:
    """Publish the result to the Trainer's loggers that hold more than scalars. Called on rank 0, after the table."""
    result = Result(
        analysis,
        means,
        step=lightning_api.last_logger_step(trainer),
        trace=trace.url or str(trace.path.parent) if trace is not None and trace.path is not None else "",
        reports=trace.report_path.parent if trace is not None and trace.report_path is not None else None,
    )
    publish(trainer.loggers, result, limit_s=exit_timeout_s(trainer.world_size) if interrupted else PUBLISH_S)

"""Gives rows of metrics to the Trainer's loggers; one that raises does not affect the others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)

_FAILURES: Final = 3


@dataclass(slots=True)
class _Rows:
    """Failures of one logger."""

    logger: str
    failures: int = 0
    """In a row, up to now."""
    lost: int = 0
    """So far unreported."""
    problem: str = ""


class Loggers:
    """Gives each row to every logger, and drops a logger that has raised three times in a row.

    A logger that loses rows causes one warning: when it is dropped, else at the end of the fit.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}  # by id: a logger is the user's, and is not held

    def log(self, loggers: Iterable[Any], metrics: Mapping[str, float], step: int) -> None:
        """Log one row."""
        for logger in loggers:
            rows = self._rows.setdefault(id(logger), _Rows(type(logger).__name__))
            if rows.failures == _FAILURES:
                continue
            try:
                logger.log_metrics(dict(metrics), step=step)
            except Exception as exc:
                rows.failures += 1
                rows.lost += 1
                rows.problem = f"{type(exc).__name__}: {exc}"
                _log.debug("", exc_info=exc)
                if rows.failures == _FAILURES:
                    self._warn(rows, f"failed {_FAILURES} times in a row and gets no more rows in this fit")
            else:
                rows.failures = 0

    def close(self) -> None:
        """Warn of rows that were lost without a warning so far."""
        for rows in self._rows.values():
            if rows.lost:
                self._warn(rows, f"did not take {rows.lost} row{'' if rows.lost == 1 else 's'} of metrics")

    def _warn(self, rows: _Rows, what: str) -> None:
        rows.lost = 0
        _log.warning("The logger %s %s: %s", rows.logger, what, rows.problem)

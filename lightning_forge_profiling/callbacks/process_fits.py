"""The fits of a process under `forge-profiling run`: the first of each module in full, a further one in a line."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from lightning_forge_profiling.callbacks.lightning_api import LightningModule
from lightning_forge_profiling.diagnosis.rule import in_ms, in_s
from lightning_forge_profiling.schema import NO_VERDICT, RunReport

# counted steps from which a further fit can differ from the first: in a few milliseconds anything may come first
_TELLS: Final = 50
_SHORT: Final = "too short to differ from the first"


@dataclass(frozen=True, slots=True)
class _Fit:
    model: str
    shapes: Hashable
    seconds: float
    verdict: str


class ProcessFits:
    """What was fitted in this process so far."""

    def __init__(self) -> None:
        self.begun = False  # whether any fit was set up
        self._done: list[_Fit] = []

    def has_had(self, module: LightningModule) -> bool:
        """Whether a module of this class and of these parameters was fitted before."""
        key = type(module).__name__, shapes_of(module)
        return any((fit.model, fit.shapes) == key for fit in self._done)

    def add(self, shapes: Hashable, began_s: float, report: RunReport, *, brief: bool) -> str:
        """Enter a fit that has ended; returns a line about it."""
        fit = _Fit(report.model, shapes, perf_counter() - began_s, self._verdict(report, brief=brief))
        self._done.append(fit)
        number = sum(fit.model == done.model for done in self._done)
        run = report.run
        steps = f"{run.steps} step{'s' * (run.steps != 1)}"
        pace = f" of {in_ms(run.steady.mean_ms('step'))}" if run.steady.steps else ""
        return f"forge-profiling: fit {number} of {fit.model}: {in_s(fit.seconds)}, {steps}{pace}, {fit.verdict}"

    def _verdict(self, report: RunReport, *, brief: bool) -> str:
        """The verdict: in a line, that of the first fit of this class if its cause is named again."""
        analysis = report.analysis
        if analysis is None:
            return NO_VERDICT
        if not brief:
            return analysis.verdict
        first = next((fit.verdict for fit in self._done if fit.model == report.model), "")
        if report.run.steady.steps < _TELLS:
            return _SHORT
        return first if any(finding.code == first for finding in analysis.findings) else analysis.verdict

    def overview(self) -> Iterator[str]:
        """A line on each class of module that was fitted more than once."""
        for model, count in Counter(fit.model for fit in self._done).items():
            if count > 1:
                fits = [fit for fit in self._done if fit.model == model]
                verdicts = Counter(fit.verdict for fit in fits).most_common()
                shapes = len({fit.shapes for fit in fits})
                sizes = f" in {shapes} sizes" if shapes > 1 else ""
                said = ", ".join(f"{verdict} in {number}" for verdict, number in verdicts)
                same = f"the same verdict in all: {verdicts[0][0]}" if len(verdicts) == 1 else said
                yield f"{count} fits of {model}{sizes}, {in_s(sum(fit.seconds for fit in fits))}, {same}"


FITS: Final = ProcessFits()


def shapes_of(module: LightningModule) -> Hashable:
    """Names and shapes of a module's parameters; a lazy one has none yet."""
    shapes = []
    for name, parameter in module.named_parameters():
        shape: tuple[int, ...] = ()
        with suppress(RuntimeError):
            shape = tuple(parameter.shape)
        shapes.append((name, shape))
    return tuple(shapes)

"""What makes a validation long: its loader, the start of its workers, a line of its step, metrics, or its length."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts, in_steps_pct, lines_in
from lightning_forge_profiling.diagnosis.loader import (
    TRY_WORKERS,
    LoaderWait,
    loader_advice,
    loader_evidence,
    makes_batches_waiting,
    without_workers,
    workers_to_try,
)
from lightning_forge_profiling.diagnosis.rule import PERSISTENT, Explanation, in_s, saving_of_fit
from lightning_forge_profiling.names import (
    VALIDATION,
    VALIDATION_DATA,
    VALIDATION_LOADER,
    VALIDATION_METRICS,
    VALIDATION_STEP,
    VALIDATION_TRANSFER,
)
from lightning_forge_profiling.schema import Finding, RunEvidence

_HANDED_OVER_MS: Final = 0.5  # what getting a batch from a worker takes, however cheap it is (`loader.py`)
_NEARLY: Final = 0.8  # from this share of another fix's saving on, the smaller change is the one to name
_MOSTLY_PCT: Final = 50.0
_MODEL: Final = "torch.nn."  # what a line calls that is the model's work: it has to be done

_LESS: Final = (
    "Validate less often (check_val_every_n_epoch, val_check_interval) or on fewer batches (limit_val_batches), or "
    "with a larger batch."
)


@dataclass(frozen=True)
class _Runs:
    """The validation runs of a fit, without a first one that is left out."""

    costs: LedgerCosts

    @cached_property
    def inside_s(self) -> dict[str, float]:
        """Seconds by part."""
        return self.costs.inside_s(VALIDATION)

    def s(self, *parts: str) -> float:
        """Seconds in some of the parts."""
        return sum(self.inside_s.get(part, 0.0) for part in parts)

    @cached_property
    def count(self) -> int:
        """How many there are."""
        return max(self.costs.recurring_count(VALIDATION), 1)

    @cached_property
    def batches(self) -> int:
        """How many batches each has."""
        return max(round(self.costs.count(VALIDATION_STEP) / max(self.costs.count(VALIDATION), 1)), 1)

    @cached_property
    def rest_ms(self) -> float:
        """How long a batch takes that is there."""
        of_loader = self.s(VALIDATION_DATA, VALIDATION_LOADER)
        return 1e3 * (sum(self.inside_s.values()) - of_loader) / self.count / self.batches

    @cached_property
    def wait(self) -> LoaderWait:
        """The wait for a batch, as that of training is given; with workers but for the first."""
        evidence = self.costs.evidence
        settings, cpu = evidence.settings.validation_loader, evidence.machine.cpu
        wait_ms = 1e3 * self.s(VALIDATION_DATA) / self.count / self.batches
        workers = 0 if settings is None else settings.num_workers or 0
        return LoaderWait(
            host_ms=wait_ms,
            exposed_ms=wait_ms,
            step_ms=wait_ms + self.rest_ms,
            on_gpu=evidence.timing.on_device,
            settings=settings and replace(settings, kind=f"validation {settings.kind}"),
            cpu=cpu
            and replace(
                cpu,
                loader_busy_pct=None if workers else cpu.validation_busy_pct,
                batch_ms=None,
                # the workers of training wait meanwhile
                idle=None if cpu.idle is None else min(cpu.idle + cpu.workers, cpu.cores),
            ),
        )

    @property
    def made_ms(self) -> float | None:
        """How long a batch takes to make; None if unknown."""
        settings = self.wait.settings
        if settings is None or settings.num_workers is None:
            return None
        return settings.batch_ms if settings.num_workers else self.wait.host_ms

    def saved_s(self, workers: int) -> float:
        """What so many workers would save, if they stay from run to run and make batches side by side."""
        made_ms = self.made_ms or 0.0
        if workers:
            each_ms = self.rest_ms + _HANDED_OVER_MS
            fetching_ms = max(made_ms * ceil(self.batches / workers), made_ms + (self.batches - 1) * each_ms)
            run_ms = fetching_ms + each_ms
        else:
            run_ms = self.batches * (made_ms + self.rest_ms)
        return max(sum(self.inside_s.values()) - self.count * run_ms / 1e3, 0.0)


_WAITING: Final = "waiting for its loader"
_STARTING: Final = "until the first batch of new workers"


def explain_validation(costs: LedgerCosts, _: str) -> Explanation:
    """The words for validation, by the largest of its parts; what is saved is by the fix that is named."""
    runs = _Runs(costs)
    parts_s = {**runs.inside_s, VALIDATION_DATA: runs.s(VALIDATION_DATA, VALIDATION_LOADER), VALIDATION_LOADER: 0.0}
    largest = max(parts_s, key=parts_s.__getitem__)
    if largest == VALIDATION_DATA:
        return _of_loader(runs)
    if largest == VALIDATION_STEP:
        return _of_step(runs)
    if largest in _OTHERS:
        words, advice = _OTHERS[largest]
        return _explanation(runs, largest, words, advice, saves_s=runs.s(largest))
    return _explanation(runs, VALIDATION, "", _LESS, saves_s=None)


_OTHERS: Final = {
    VALIDATION_METRICS: (
        "computing what it has logged",
        (
            "Make the metrics' compute() cheaper (torchmetrics that keep all predictions are the costly ones), or log "
            "them in fewer validations."
        ),
    ),
    VALIDATION_TRANSFER: (
        "moving its batches to the device",
        (
            "Set pin_memory=True in the validation DataLoader (only from pinned memory is a copy asynchronous), and "
            "copy less: uint8 or bf16 instead of float32 with the conversion on the GPU."
        ),
    ),
}


def _explanation(
    runs: _Runs,
    part: str,
    words: str,
    advice: str,
    fix: str = "",
    *,
    saves_s: float | None,
    certain: bool = False,
    workers: int | None = None,
) -> Explanation:
    """An explanation by one of the parts, and the number of workers to try."""
    of_it = f", {in_s(runs.s(part))} of it {words}" if words else ""
    evidence = runs.costs.times(VALIDATION) | {"mostly": part, "mostly_s": round(runs.s(part), 3)}
    evidence |= loader_evidence(runs.wait.settings) | ({} if workers is None else {TRY_WORKERS: workers})
    title = f"validation {runs.costs.takes(VALIDATION, 'runs')}{of_it}"
    return Explanation(title, evidence, advice, fix, saves_s=saves_s, certain=certain)


def _of_loader(runs: _Runs) -> Explanation:
    fixes = {each.fix: each for each in _fixes(runs) if each.saves_s}
    best = max(fixes.values(), key=lambda each: each.saves_s or 0.0, default=None)
    if best is None:
        advice, fix = loader_advice(runs.wait)
        return _explanation(runs, VALIDATION_DATA, _WAITING, _named(advice), fix, saves_s=runs.s(VALIDATION_DATA))
    if PERSISTENT in fixes and (fixes[PERSISTENT].saves_s or 0.0) >= _NEARLY * (best.saves_s or 0.0):
        best = fixes[PERSISTENT]
    return best


def _fixes(runs: _Runs) -> Iterator[Explanation]:
    """The changes of the loader that are known to help, with what each saves."""
    wait, settings = runs.wait, runs.wait.settings
    if settings is None or settings.num_workers is None:
        return
    now, tried, made_ms = settings.num_workers, workers_to_try(wait), runs.made_ms
    certain = not wait.on_gpu and wait.cpu is not None and makes_batches_waiting(wait.cpu)
    if now and not settings.persistent_workers:
        again_s = runs.s(VALIDATION_LOADER) - runs.count * (made_ms or 0.0) / 1e3
        started = runs.count - ("sanity_check" not in runs.costs.ledger.parts)  # the first run has to start them
        yield _explanation(
            runs,
            VALIDATION_LOADER,
            _STARTING,
            f"Set persistent_workers=True in the validation DataLoader: its num_workers={now} start anew in each run.",
            PERSISTENT,
            saves_s=max(again_s * started / runs.count, 0.0),
            certain=made_ms is not None,
        )
    if now and made_ms is not None:
        advice, fix = without_workers(wait)
        yield _explanation(
            runs,
            VALIDATION_DATA if settings.persistent_workers else VALIDATION_LOADER,
            _WAITING if settings.persistent_workers else _STARTING,
            _named(advice),
            fix,
            saves_s=runs.saved_s(0),
            certain=not wait.on_gpu,
            workers=0,
        )
    if tried and made_ms is not None and not settings.unsplit:
        advice, fix = loader_advice(wait)
        if now and not settings.persistent_workers:
            advice, fix = f"{advice} Set persistent_workers=True, too.", f"{fix[:-1]}, persistent_workers=True)"
        yield _explanation(
            runs,
            VALIDATION_DATA,
            _WAITING,
            _named(advice),
            fix,
            saves_s=runs.saved_s(tried),
            certain=certain,
            workers=tried,
        )


def _named(advice: str) -> str:
    """Advice on a loader as that on the one to validate on."""
    of_it = "validation" in advice.partition(".")[0]
    return advice if of_it else f"In the validation DataLoader: {advice[0].lower()}{advice[1:]}"


def _of_step(runs: _Runs) -> Explanation:
    """By the line that most of validation is in, unless that calls the model: its work has to be done."""
    line = next((line for line in lines_in(runs.costs.evidence, VALIDATION_STEP) if line.file), None)
    line_s = 0.0 if line is None else runs.s(VALIDATION_STEP) * line.pct / 100
    if line is None or 100 * line_s < _MOSTLY_PCT * sum(runs.inside_s.values()) or line.callee.startswith(_MODEL):
        return _explanation(runs, VALIDATION_STEP, "in validation_step", _LESS, saves_s=None)
    return _explanation(
        runs,
        VALIDATION_STEP,
        "in validation_step",
        "Take that line out of validation_step, which is called for each batch: collect what it needs and do it once "
        "in on_validation_epoch_end, or for a few batches; make cheaper what it does for each sample. Else "
        f"v{_LESS[1:]}",
        saves_s=line_s,
    )


# -- one cause in training and in validation ---------------------------------------------------------------------------

_OF_LOADER: Final = ("input-bound", "worker-restarts", "loader-startup")


def of_both_loaders(findings: Sequence[Finding], run: RunEvidence) -> list[Finding]:
    """The findings, those on the training loader and on the one to validate on as one if the same fix is for both."""
    costs, of_loader = LedgerCosts(run), [each for each in findings if each.code in _OF_LOADER and each.saves]
    validation = next((each for each in findings if each.code == "validation-bound" and each.fix), None)
    training = next((each for each in of_loader if validation and _change(each) == _change(validation)), None)
    if validation is None or validation.saves is None or training is None or training.saves is None:
        return list(findings)
    of_fit = in_steps_pct(run) / 100 if training.of == "step" else 1.0
    saved_s = costs.whole_s * (of_fit * training.saves.pct + validation.saves.pct) / 100
    first = training if of_fit * training.saves.pct >= validation.saves.pct else validation
    both = replace(
        first,
        of="run",
        share_pct=of_fit * training.share_pct + validation.share_pct,
        saves=saving_of_fit(
            saved_s, costs.whole_s, costs.steps, at_most=training.saves.at_most or validation.saves.at_most
        ),
        title=f"{training.title}; {validation.title}",
        advice=f"{first.advice} Do the same in the other DataLoader: training and validation have one each.",
    )
    return [both if each is first else each for each in findings if each is first or each not in (training, validation)]


def _change(finding: Finding) -> str:
    """A fix without how many workers it is with, if any."""
    return re.sub(r"num_workers=[1-9]\d*", "num_workers", finding.fix)

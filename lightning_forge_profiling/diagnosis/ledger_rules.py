"""Causes of lost time outside the step, from the ledger of the run: checkpoints, validation, hooks, loggers, ..."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, Explanation, Rule
from lightning_forge_profiling.names import STARTUP_PROCESS, STEPS
from lightning_forge_profiling.results.analysis import Finding, RunEvidence, RunLedger
from lightning_forge_profiling.results.saving import Saving

__all__ = ["LEDGER_RULES", "in_steps_pct", "ledger_findings", "together"]

STARTUP_BOUND: Final = "startup-bound"

_LONG_RUN_S: Final = 600.0
"""Startup, and what happens once, is a cause in a run that is at least so long; a shorter one is a trial of one that is
longer, in which it would not grow."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The fit's part of a ledger."""

    ledger: RunLedger
    workers: int = 0

    @property
    def fit_s(self) -> float:
        """Wall time without what came before the fit, which may be a long-lived script."""
        return self.ledger.wall_s - self.ledger.parts.get(STARTUP_PROCESS, 0.0)

    def seconds(self, part: str) -> float:
        """The seconds of a part that grows with the run; 0 for one that was entered once in a short run."""
        once = self.ledger.counts.get(part, 0) <= 1 and self.ledger.wall_s < _LONG_RUN_S
        return 0.0 if once else self.ledger.parts.get(part, 0.0)

    def largest(self, prefix: str) -> str:
        """The largest part whose name begins so; "" without one."""
        return max((name for name in self.ledger.parts if name.startswith(prefix)), key=self.seconds, default="")

    def times(self, part: str) -> dict[str, float | str]:
        """How often a part was entered, as evidence."""
        return {"times": self.ledger.counts.get(part, 0)}

    def takes(self, part: str, events: str) -> str:
        """A part's time in words: of the fit, and of each of its events."""
        seconds, count = self.ledger.parts[part], self.ledger.counts.get(part, 0)
        took = f"takes {in_s(seconds)} of the fit's {in_s(self.fit_s)}"
        return f"{took} ({count} {events}, {in_s(seconds / count)} each)" if count > 1 else took


def in_s(seconds: float) -> str:
    """A time with two or three digits."""
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"  # noqa: PLR2004


def _part_rule(code: str, part: str, subject: str, events: str, advice: str) -> Rule[_Run]:
    """The rule for one part of the ledger."""
    return Rule(
        code,
        lambda run: run.seconds(part),
        lambda run: Explanation(f"{subject} {run.takes(part, events)}", run.times(part), advice),
    )


def _largest_rule(code: str, prefix: str, subject: str, advice: str) -> Rule[_Run]:
    """The rule for the largest of the parts whose names begin with `prefix`."""

    def explain(run: _Run) -> Explanation:
        part = run.largest(prefix)
        return Explanation(f"{subject} {part.removeprefix(prefix)} {run.takes(part, 'calls')}", run.times(part), advice)

    return Rule(code, lambda run: run.seconds(run.largest(prefix)), explain)


def _loader(run: _Run) -> Explanation:
    if not run.workers:
        return Explanation(
            f"creating the DataLoader and its iterator {run.takes('data_loader', 'times')}",
            advice="Do less in train_dataloader and in the dataset's or sampler's __iter__, or make epochs longer.",
        )
    return Explanation(
        f"creating the DataLoader's iterator and its workers {run.takes('data_loader', 'times')}",
        advice="Set persistent_workers=True in the DataLoader if it is not set, use fewer workers, make the dataset "
        "object smaller (each worker gets a copy), or make epochs longer.",
    )


def _startup_s(run: _Run) -> float:
    startup = sum(s for name, s in run.ledger.parts.items() if name.startswith("startup/"))
    return startup if run.ledger.wall_s >= _LONG_RUN_S else 0.0


def _startup(run: _Run) -> Explanation:
    before_s = run.ledger.parts.get(STARTUP_PROCESS, 0.0)
    return Explanation(
        f"{in_s(_startup_s(run))} pass before the first batch, {in_s(before_s)} of them before the fit",
        advice="Look at what the script does before trainer.fit (downloads, tokenization, building the dataset) and "
        "cache it on disk; load large weights with mmap=True.",
    )


_HOOK: Final = (
    "Do less in it or do it less often. On a GPU, reading a value (.item(), .cpu(), printing a tensor) waits for all "
    "queued work; collect values and read them every few steps."
)

LEDGER_RULES: Final[tuple[Rule[_Run], ...]] = (
    _part_rule(
        "checkpoint-bound",
        "checkpoint",
        "saving checkpoints",
        "times",
        "Save less often (every_n_train_steps or every_n_epochs of ModelCheckpoint), save less (save_weights_only=True "
        "leaves out the optimizer's state), or save beside the training (AsyncCheckpointIO).",
    ),
    _part_rule(
        "validation-bound",
        "validation",
        "validation",
        "runs",
        "Validate less often (check_val_every_n_epoch, val_check_interval), on fewer batches (limit_val_batches), or "
        "faster: a larger batch, workers and pinned memory in its DataLoader.",
    ),
    _largest_rule("slow-callback", "callback/", "callback", _HOOK),
    _largest_rule("slow-hook", "module/", "the module's", _HOOK),
    _largest_rule("slow-hook", "datamodule/", "the data module's", _HOOK),
    _largest_rule(
        "slow-logger",
        "logger/",
        "the logger",
        "Log less often (Trainer(log_every_n_steps=...)), fewer metrics per row, or to a local logger.",
    ),
    Rule("loader-startup", lambda run: run.seconds("data_loader"), _loader),
    _part_rule(
        "compile-bound",
        "compile",
        "torch.compile",
        "compilations",
        "TORCH_LOGS=recompiles names the reason of each recompilation. Batches of many shapes: "
        "torch._dynamo.mark_dynamic, or pad them to a few sizes.",
    ),
    Rule(STARTUP_BOUND, _startup_s, _startup),
)
"""Costs are seconds of the run."""


def ledger_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """What costs at least `NAMED_FROM_PCT` of the fit outside the steps, or in a hook inside them.

    Example:
        >>> from lightning_forge_profiling.results.rank import Distribution
        >>> ledger = RunLedger(
        ...     wall_s=10.0, parts={"checkpoint": 7.6, "steps": 2.4}, unexplained_s=0.0, counts={"checkpoint": 20}
        ... )
        >>> steps = Distribution(mean=24.0, p50=24.0, min=24.0, max=24.0)
        >>> [found] = ledger_findings(RunEvidence(steps=100, on_device=True, step_ms=steps, regions={}, ledger=ledger))
        >>> found.title
        "saving checkpoints takes 7.6 s of the fit's 10.0 s (20 times, 380 ms each)"
    """
    if evidence.ledger is None:
        return ()
    run = _Run(evidence.ledger, (evidence.loader.num_workers or 0) if evidence.loader is not None else 0)
    if run.fit_s <= 0:
        return ()
    return tuple(
        _finding(rule, run, evidence)
        for rule in LEDGER_RULES
        if 100 * rule.cost(run) >= NAMED_FROM_PCT * _whole(rule, run)[1]
    )


def _whole(rule: Rule[_Run], run: _Run) -> tuple[str, float]:
    """What a rule's cost is a part of, in words and seconds: startup is, but for the rest of it, no part of the fit."""
    return ("run", run.ledger.wall_s) if rule.code == STARTUP_BOUND else ("fit", run.fit_s)


def _finding(rule: Rule[_Run], run: _Run, evidence: RunEvidence) -> Finding:
    seconds, explained = rule.cost(run), rule.explain(run)
    whole, whole_s = _whole(rule, run)
    pct = 100 * seconds / whole_s
    return Finding(
        code=rule.code,
        share_pct=pct,
        of="run",
        rank=0 if evidence.world_size > 1 else None,
        source="run",
        title=explained.title,
        evidence={"seconds": round(seconds, 3), f"{whole}_s": round(whole_s, 3), **explained.evidence},
        advice=explained.advice,
        saves=Saving(
            ms_per_step=1e3 * seconds / max(evidence.steps, 1),
            pct=pct,
            at_most=True,
            text=f"That saves at most {in_s(seconds)} of the {whole}'s {in_s(whole_s)} ({pct:.0f} %).",
        ),
    )


def in_steps_pct(evidence: RunEvidence | None) -> float:
    """How much of the fit its steps take, in percent: the basis of a share of the step; 100 if unknown."""
    if evidence is None or evidence.ledger is None:
        return 100.0
    run = _Run(evidence.ledger)
    in_step = [s for name, s in run.ledger.parts.items() if name in {STEPS, "profiler"} or _per_batch(name, evidence)]
    return min(100 * sum(in_step) / run.fit_s, 100.0) if run.fit_s > 0 else 100.0


def _per_batch(part: str, evidence: RunEvidence) -> bool:
    """Whether a part comes in most steps, so that it is in the step's own times too."""
    hook = part.startswith(("callback/", "module/", "datamodule/", "logger/"))
    return hook and evidence.ledger is not None and _often(evidence.ledger.counts.get(part, 0), evidence)


def _often(times: float, evidence: RunEvidence) -> bool:
    return times >= evidence.steps / 2


def together(findings: Sequence[Finding], outside: Sequence[Finding], evidence: RunEvidence) -> list[Finding]:
    """Findings of the step and of the ledger, without those whose time another one explains better.

    Args:
        findings: of the step.
        outside: of the ledger.
        evidence: what they are from.
    """
    hidden = set()
    hooks = [found for found in outside if found.code in {"slow-callback", "slow-hook", "slow-logger"}]
    if any(_often(float(found.evidence.get("times", 0)), evidence) for found in hooks):
        hidden.add("between-regions")
    if any(found.code == "worker-restarts" for found in findings):
        hidden.add("loader-startup")
    return [found for found in (*findings, *outside) if found.code not in hidden]

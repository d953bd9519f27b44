"""Causes of lost time outside the step, from the ledger of the run: checkpoints, validation, hooks, loggers, ..."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts, in_s
from lightning_forge_profiling.diagnosis.rule import MEASURE, NAMED_FROM_PCT, Explanation, saving
from lightning_forge_profiling.names import (
    BEFORE_FIT,
    CHECKPOINT_WRITE,
    COUNTING,
    EPOCH_METRICS,
    FIRST_STEP,
    REGIONS,
    SELF_LOG,
    STARTUP_IMPORTS,
    STARTUP_PROCESS,
    STARTUP_SCRIPT,
    STARTUP_TRAINER,
    STEPS,
    function_part,
)
from lightning_forge_profiling.results.analysis import Finding, RunEvidence, Saving
from lightning_forge_profiling.results.run import CpuUse

STARTUP_BOUND: Final = "startup-bound"

_SHORT_VALIDATION_S: Final = 10.0
"""Starting and ending one to four forked workers took 30 to 60 ms on two free cores, 220 to 480 ms on busy ones (torch
2.13, `python -m benchmarks.handover`): in a validation of so many seconds that is at most 5 %."""


@dataclass(frozen=True, slots=True)
class LedgerRule:
    """What is said of one kind of leaf of the ledger.

    Attributes:
        code: the code of its finding.
        kind: the kind of leaf, or the leaf.
        explain: the words for a leaf.
    """

    code: str
    kind: str
    explain: Callable[[LedgerCosts, str], Explanation]


def _takes(subject: str, events: str, advice: str) -> Callable[[LedgerCosts, str], Explanation]:
    """Words for a leaf, of which the subject may have the name."""

    def explain(run: LedgerCosts, part: str) -> Explanation:
        named = subject.format(part.partition("/")[2])
        return Explanation(f"{named} {run.takes(part, events)}", run.times(part), advice)

    return explain


def _loader(run: LedgerCosts, _: str) -> Explanation:
    settings = run.evidence.loader
    if settings is None or not settings.num_workers:
        what = "creating the DataLoader and its iterator"
        advice = "Do less in train_dataloader and in the dataset's or sampler's __iter__, or make epochs longer."
    elif settings.persistent_workers:
        what = "a new pass over the DataLoader, until its first batch,"
        advice = "Make epochs longer (a sampler with several passes over the dataset), or the first batch cheaper."
    else:
        what = "creating the DataLoader's iterator and its workers"
        advice = (
            "Set persistent_workers=True in the DataLoader, make the dataset object smaller (each worker gets a copy), "
            "or make epochs longer."
        )
    return Explanation(f"{what} {run.takes('data_loader', 'times')}", run.times("data_loader"), advice)


def _validation(run: LedgerCosts, _: str) -> Explanation:
    settings, each_s = run.evidence.validation_loader, run.seconds("validation") / max(run.count("validation"), 1)
    numbers = run.times("validation")
    advice = (
        "Validate less often (check_val_every_n_epoch, val_check_interval) or on fewer batches (limit_val_batches), or "
        "with a larger batch."
    )
    if settings is not None and settings.num_workers is not None:
        workers = settings.num_workers
        numbers |= {"num_workers": workers, "persistent_workers": str(settings.persistent_workers)}
        numbers |= {} if settings.batches is None else {"batches": settings.batches}
        if not workers:
            advice += (
                " Its DataLoader has num_workers=0. Workers gain only if making batches takes most of it: measure "
                f"num_workers=1 with persistent_workers=True, without which they start anew in each run ({MEASURE})."
            )
        elif not settings.persistent_workers and each_s < _SHORT_VALIDATION_S:
            advice = (
                f"Set persistent_workers=True in the validation DataLoader: its num_workers={workers} start anew in "
                f"each run. Where a batch is cheap to make, num_workers=0 is faster still: measure it ({MEASURE}). Or "
                f"v{advice[1:]}"
            )
    return Explanation(f"validation {run.takes('validation', 'runs')}", numbers, advice)


def _garbage(run: LedgerCosts, part: str) -> Explanation:
    generations = part.removeprefix("gc/generation_").replace("_", " and ")
    return Explanation(
        f"garbage collection of generation {generations} {run.takes(part, 'collections')}",
        run.times(part),
        "Call gc.collect() and gc.freeze() once before training, so that collections skip the objects that exist by "
        "then; or gc.disable(), and gc.collect() every n steps, with the same n on every rank. Calls of gc.collect() "
        "in the script count, too.",
    )


def _checkpoint(run: LedgerCosts, _: str) -> Explanation:
    write_s = run.ledger.parts.get(CHECKPOINT_WRITE, 0.0)
    to_write = f"; {in_s(write_s)} to write them" if write_s else ""
    return Explanation(
        f"saving checkpoints {run.takes('checkpoint', 'times')}{to_write}",
        run.times("checkpoint"),
        "Save less often (every_n_train_steps or every_n_epochs of ModelCheckpoint), save less (save_weights_only=True "
        "leaves out the optimizer's state), or save beside the training (AsyncCheckpointIO).",
    )


def _startup_s(run: LedgerCosts) -> float:
    startup = sum(s for name, s in run.ledger.parts.items() if name.startswith("startup/"))
    return 0.0 if run.is_trial or run.of == "step" else startup


def _startup(run: LedgerCosts, _: str) -> Explanation:
    parts = {part: s for part, s in run.ledger.parts.items() if part.startswith("startup/")}
    before_s, largest = sum(parts.get(part, 0.0) for part in BEFORE_FIT), max(parts, key=parts.__getitem__)
    what, advice = next(
        (said for part, said in _STARTUP.items() if largest.startswith(part)),
        (largest.removeprefix("startup/"), "Do less there, or cache its result on disk."),
    )
    return Explanation(
        f"{in_s(_startup_s(run))} pass until the first step has ended, {in_s(before_s)} of them before the fit; the "
        f"longest is {what}, {in_s(parts[largest])}",
        {"part": largest},
        advice,
    )


_CACHE: Final = (
    "Look at what the script does there (downloads, tokenization, building the dataset) and cache it on disk; load "
    "large weights with mmap=True."
)
_IMPORTS: Final = "`python -X importtime SCRIPT` lists what each import takes."
_PREPARE: Final = "Return early where the prepared files exist: it runs in each fit, and all ranks wait for it."
_STARTUP: Final = {
    STARTUP_IMPORTS: ("the start of Python with the imports", _IMPORTS),
    STARTUP_SCRIPT: ("the script from its imports to the callbacks", f"{_CACHE} {_IMPORTS}"),
    STARTUP_PROCESS: ("the script to the callbacks, with its imports", f"{_CACHE} {_IMPORTS}"),
    STARTUP_TRAINER: ("the script from the callbacks to the fit", _CACHE),
    "startup/datamodule.prepare_data": ("the data module's prepare_data", _PREPARE),
    "startup/module.prepare_data": ("the module's prepare_data", _PREPARE),
    "startup/compile": ("torch.compile", "Set TORCHINDUCTOR_CACHE_DIR to a folder that outlasts the job."),
    "startup/fit": ("Lightning's set-up between the hooks", "It sets up strategy, loggers, loaders and the device."),
    FIRST_STEP: ("the first step", "It starts the loader's workers and loads libraries: see what its batch takes."),
}
"""By part, what is said of the longest part of the startup, and what to do about it."""


def _logger(run: LedgerCosts, part: str) -> Explanation:
    advice = "Log less often (Trainer(log_every_n_steps=...)), fewer metrics per row, or to a local logger."
    if part.endswith(".finalize"):
        advice = (
            "It uploads and closes files at the end of the fit: upload less (log_model=False, fewer artifacts), or log "
            "to local files and upload them later."
        )
    return _takes("the logger {}", "calls", advice)(run, part)


_HOOK: Final = (
    "Do less in it or do it less often. On a GPU, reading a value (.item(), .cpu(), printing a tensor) waits for all "
    "queued work; collect values and read them every few steps."
)
_FUNCTION: Final = (
    "It is called for each batch: take the number from shapes and lengths (len(batch), ids.numel()), and read no "
    "values, for which a GPU would have to finish its queued work. Without batch_size_fn the samples are inferred from "
    "the DataLoader; flops_per_batch may be a number."
)

LEDGER_RULES: Final = (
    LedgerRule("checkpoint-bound", "checkpoint", _checkpoint),
    LedgerRule("validation-bound", "validation", _validation),
    *(LedgerRule("slow-hook", function_part(name), _takes("{}", "calls", _FUNCTION)) for name in COUNTING),
    LedgerRule("slow-callback", "callback", _takes("callback {}", "calls", _HOOK)),
    LedgerRule(
        "slow-hook",
        "module/lr_scheduler_step",
        _takes(
            "the learning-rate scheduler's step (lr_scheduler_step)",
            "calls",
            "Make the scheduler's step() cheaper, or call it less often (interval, frequency in configure_optimizers).",
        ),
    ),
    LedgerRule("slow-hook", "module", _takes("the module's {}", "calls", _HOOK)),
    LedgerRule("slow-hook", "datamodule", _takes("the data module's {}", "calls", _HOOK)),
    LedgerRule(
        "slow-logger",
        SELF_LOG,
        _takes(
            "self.log",
            "values",
            "Log fewer values, or every few steps: each call costs some 0.1 ms, whether or not the logger gets a row. "
            "Collect values in a tensor and log them with on_step=False, on_epoch=True at the end of an epoch.",
        ),
    ),
    LedgerRule(
        "slow-logger",
        EPOCH_METRICS,
        _takes(
            "computing the logged metrics at an epoch's end",
            "times",
            "Make the metrics' compute() cheaper (torchmetrics that keep all predictions are the costly ones), or log "
            "them every few epochs.",
        ),
    ),
    LedgerRule("slow-logger", "logger", _logger),
    LedgerRule("loader-startup", "data_loader", _loader),
    LedgerRule(
        "compile-bound",
        "compile",
        _takes(
            "torch.compile",
            "compilations",
            "TORCH_LOGS=recompiles prints the reason of each recompilation. For batches of many shapes use "
            "torch._dynamo.mark_dynamic, or pad them to a few sizes.",
        ),
    ),
    LedgerRule("gc-bound", "gc", _garbage),
    LedgerRule(STARTUP_BOUND, "startup", _startup),
)
"""What is said of each kind of leaf; the first that fits a leaf is its rule."""


def ledger_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """Findings that cost at least `NAMED_FROM_PCT` of the fit: outside the steps, or in a hook inside them.

    Example:
        >>> from lightning_forge_profiling.results.analysis import RunLedger
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
    bases = [LedgerCosts(evidence, evidence.ledger, of) for of in ("run", "step")]
    found = []
    for rule in LEDGER_RULES:
        for part in ["startup"] if rule.kind == "startup" else filter(partial(_is_of, rule), bases[0].leaves()):
            named = [base for base in bases if 100 * _cost_s(base, part) >= NAMED_FROM_PCT * _whole(base, part)[1] > 0]
            found += [_finding(rule, base, part) for base in named[:1]]
    return tuple(found)


def ledger_advice(part: str, evidence: RunEvidence) -> str:
    """What to do about a leaf of the ledger; "" if no rule is of it."""
    rule = next((rule for rule in LEDGER_RULES if _is_of(rule, part)), None)
    if rule is None or evidence.ledger is None:
        return ""
    return rule.explain(LedgerCosts(evidence, evidence.ledger), part).advice


def _is_of(rule: LedgerRule, part: str) -> bool:
    kinds = (part, part.partition("/")[0])
    return rule is next((known for known in LEDGER_RULES if known.kind in kinds), None)


def _cost_s(run: LedgerCosts, part: str) -> float:
    return _startup_s(run) if part == "startup" else run.seconds(part)


def _whole(run: LedgerCosts, part: str) -> tuple[str, float]:
    """The whole that a leaf's cost is a share of, in words and seconds. Startup is mostly before the fit."""
    return ("run", run.ledger.wall_s) if part == "startup" else ("fit", run.whole_s)


def _finding(rule: LedgerRule, run: LedgerCosts, part: str) -> Finding:
    seconds, explained, evidence = _cost_s(run, part), rule.explain(run, part), run.evidence
    whole, whole_s = _whole(run, part)
    pct, ms_per_step = 100 * seconds / whole_s, 1e3 * seconds / run.steps
    at_most = rule.code != "slow-logger"  # a row less also saves Lightning's and the callbacks' work for it
    if run.of == "step":
        step_ms = evidence.step_ms.mean
        numbers = {"ms_per_step": round(ms_per_step, 3), "step_ms": round(step_ms, 3)}
        saves = saving(ms_per_step, step_ms, at_most=at_most)
    else:
        numbers = {"seconds": round(seconds, 3), f"{whole}_s": round(whole_s, 3)}
        bound = "at most" if at_most else "about"
        text = f"That saves {bound} {in_s(seconds)} of the {whole}'s {in_s(whole_s)} ({pct:.0f} %)."
        saves = Saving(ms_per_step=ms_per_step, pct=pct, at_most=at_most, text=text)
    return Finding(
        code=rule.code,
        share_pct=pct,
        of=run.of,
        rank=evidence.rank if evidence.world_size > 1 else None,
        source="run",
        title=explained.title,
        evidence={**numbers, **explained.evidence},
        advice=explained.advice,
        saves=saves,
    )


def in_steps_pct(evidence: RunEvidence | None) -> float:
    """Share of the fit that its steps take, in percent, to convert shares of the step; 100 if unknown."""
    if evidence is None or evidence.ledger is None:
        return 100.0
    run, step_ms = LedgerCosts(evidence, evidence.ledger), evidence.step_ms.mean
    if run.whole_s <= 0:
        return 100.0
    steps_s, own_ms = step_ms * run.steps / 1e3, step_ms - run.apart_ms
    if own_ms > 0 and not evidence.on_device and STEPS in run.ledger.parts:
        # the regions' own time in all steps is known exactly; in a trial the first step is startup
        loop_s = run.ledger.parts[STEPS] + (0.0 if run.is_trial else run.ledger.parts.get(FIRST_STEP, 0.0))
        steps_s = loop_s * step_ms / own_ms
    return min(100 * steps_s / run.whole_s, 100.0)


def self_times(evidence: RunEvidence) -> RunEvidence:
    """The evidence with all hooks and loggers taken out of its regions, named or not, so that no time counts twice.

    Hooks and garbage collections are measured in every step, regions are estimated from the split ones. So on a CPU
    what those leave of the mean step is the most that the regions have together.
    """
    if evidence.ledger is None:
        return evidence
    run, step_ms = LedgerCosts(evidence, evidence.ledger), evidence.step_ms.mean
    hooks_ms = {name: run.inside_ms(name) for name in REGIONS}
    timed = {name: region for name, region in evidence.regions.items() if name in REGIONS}
    own_ms = {name: max(region.device_ms - hooks_ms[name], 0.0) for name, region in timed.items()}
    left_ms, sum_ms = max(step_ms - run.apart_ms, 0.0), sum(own_ms.values())
    scale = 1.0 if evidence.on_device or sum_ms <= left_ms else left_ms / sum_ms
    regions = dict(evidence.regions)
    for name, ms in own_ms.items():
        host_ms = max(regions[name].host_ms - hooks_ms[name], 0.0) * scale
        regions[name] = replace(regions[name], device_ms=ms * scale, host_ms=host_ms)
    own = replace(evidence, regions=regions)
    return own if own.cpu is None else replace(own, cpu=_own_waits(own.cpu, evidence, own, hooks_ms))


def _own_waits(cpu: CpuUse, evidence: RunEvidence, own: RunEvidence, hooks_ms: Mapping[str, float]) -> CpuUse:
    """The use of the cores with waits in the regions' own times, if hooks only wait; no more than no core was used."""
    waits_ms = {}
    for name in ("forward", "backward"):
        region, own_ms = evidence.regions.get(name), own.regions[name].device_ms if name in own.regions else 0.0
        if region is not None and own_ms:
            waits_ms[name] = min(max(region.device_ms * cpu.blocked_pct(name) / 100 - hooks_ms[name], 0.0), own_ms)
    most_ms, sum_ms = evidence.step_ms.mean * max(1 - cpu.used, 0.0), sum(waits_ms.values())
    scale = min(most_ms / sum_ms, 1.0) if sum_ms else 0.0
    blocked = {
        name: replace(region, blocked_pct=100 * scale * waits_ms[name] / own.regions[name].device_ms)
        if name in waits_ms
        else region
        for name, region in cpu.regions.items()
    }
    return replace(cpu, regions=blocked)


def hooks_pct(evidence: RunEvidence, *regions: str) -> float:
    """Time of regions in hooks and loggers, in percent of the mean step."""
    if evidence.ledger is None or evidence.step_ms.mean <= 0:
        return 0.0
    run = LedgerCosts(evidence, evidence.ledger)
    return 100 * sum(map(run.inside_ms, regions)) / evidence.step_ms.mean


def together(findings: Sequence[Finding], outside: Sequence[Finding], evidence: RunEvidence) -> list[Finding]:
    """Merge findings of the step and of the ledger, without those whose time another one explains better."""
    hidden = set()
    collecting_ms = sum(found.saves.ms_per_step for found in outside if found.code == "gc-bound" and found.saves)
    between_pct = max((found.share_pct for found in findings if found.code == "between-regions"), default=0.0)
    if collecting_ms > evidence.step_ms.mean * between_pct / 100 / 2:  # which region it was in is not known
        hidden.add("between-regions")
    if any(found.code == "worker-restarts" for found in findings):
        hidden.add("loader-startup")
    in_update = hooks_pct(evidence, "optimizer")
    of_trace = [found for found in findings if found.code == "slow-optimizer" and found.source == "trace"]
    if any(found.share_pct < 2 * in_update for found in of_trace):  # its region contains the hooks
        hidden.add("slow-optimizer")
    return [found for found in (*findings, *outside) if found.code not in hidden]

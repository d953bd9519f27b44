"""Causes of lost time outside the step, from the ledger of the run: checkpoints, validation, hooks, loggers, ..."""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Final

from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts, lines_in
from lightning_forge_profiling.diagnosis.rule import (
    MIN_SHARE_PCT,
    PERSISTENT,
    Evidence,
    Explanation,
    as_finding,
    in_s,
    saving,
    saving_of_fit,
)
from lightning_forge_profiling.diagnosis.validation import explain_validation
from lightning_forge_profiling.names import (
    BEFORE_FIT,
    CHECKPOINT_WRITE,
    COMPILE,
    COUNTING,
    EPOCH_METRICS,
    FIRST_STEP,
    SELF_LOG,
    SET_UP,
    STARTUP_IMPORTS,
    STARTUP_PROCESS,
    STARTUP_SCRIPT,
    STARTUP_TRAINER,
    function_part,
    part_kind,
)
from lightning_forge_profiling.schema import Finding, Recompilation, RunEvidence, Saving

Explain = Callable[[LedgerCosts, str], Explanation]  # the words for a leaf


def _takes(subject: str, events: str, advice: str, on_gpu: str = "") -> Explain:
    """Words for a leaf, of which the subject may have the name; `on_gpu` is advice for a run on one."""

    def explain(run: LedgerCosts, part: str) -> Explanation:
        named = subject.format(part.partition("/")[2])
        what = f"{advice} {on_gpu}" if on_gpu and run.evidence.timing.on_device else advice
        return Explanation(f"{named} {run.takes(part, events)}", run.times(part), what)

    return explain


def _loader(run: LedgerCosts, _: str) -> Explanation:
    settings, fix = run.evidence.settings.loader, ""
    if settings is None or not settings.num_workers:
        what = "creating the DataLoader, and beginning and ending its iterators,"
        advice = (
            "Do less in train_dataloader and in the dataset's or sampler's __iter__, also after the last batch, or "
            "make epochs longer."
        )
        if settings is not None and settings.sampler == "RandomSampler":
            advice = f"{_SHUFFLED} {advice}"
    elif settings.persistent_workers:
        what = "a new pass over the DataLoader, until its first batch,"
        advice = "Make epochs longer (a sampler with several passes over the dataset), or the first batch cheaper."
    else:
        what, fix = "creating the DataLoader's iterator and its workers", PERSISTENT
        advice = (
            "Set persistent_workers=True in the DataLoader, make the dataset object smaller (each worker gets a copy), "
            "or make epochs longer."
        )
    return Explanation(f"{what} {run.takes('data_loader', 'times')}", run.times("data_loader"), advice, fix)


_SHUFFLED: Final = (
    "shuffle=True draws an order of all samples for each epoch: where an epoch uses few of them, "
    "sampler=RandomSampler(dataset, replacement=True, num_samples=N) draws N."
)


def _garbage(run: LedgerCosts, part: str) -> Explanation:
    generations = part.removeprefix("gc/generation_").replace("_", " and ")
    return Explanation(
        f"garbage collection of generation {generations} {run.takes(part, 'collections')}",
        run.times(part),
        "Call gc.collect() and gc.freeze() once before training, so that collections skip the objects that exist by "
        "then; or gc.disable(), and gc.collect() every n steps, with the same n on every rank. Calls of gc.collect() "
        "in the script count, too.",
        "gc.collect(); gc.freeze()",
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


def _compile(run: LedgerCosts, part: str) -> Explanation:
    whole = f"torch.compile {run.takes(part, 'compilations')}"
    found = next(iter(run.evidence.recompilations), None)
    if found is None:
        advice = "TORCH_LOGS=recompiles,graph_breaks prints the reason of each compilation."
        return Explanation(whole, run.times(part), f"{advice} {_SHAPES}")
    where = f"{found.file}:{found.line}"
    evidence: Evidence = {
        **run.times(part),
        "kind": found.kind,
        "function": found.function,
        "where": where,
        "recompiled": found.times,
        **({"reason": found.reason} if found.reason else {}),
    }
    return Explanation(f"{whole}, most of it for {recompiled(found, timed=False)}", evidence, _against(found))


def _against(found: Recompilation) -> str:
    """What to do about a recompilation or a graph break."""
    if found.kind == "graph break":
        return (
            f"TORCH_LOGS=graph_breaks prints why the graph ends at {found.file}:{found.line}: take that line out of "
            "the compiled function, or replace it (print, .item(), numpy, a call that is not traced)."
        )
    if found.kind == "recorded again":
        return (
            "A CUDA graph is of inputs of one size at one address: pad batches to a few sizes, keep other inputs (a "
            "mask, a table) in a buffer that is written to (copy_), or compile without CUDA graphs "
            '(mode="max-autotune-no-cudagraphs").'
        )
    if "size mismatch" in found.reason or "stride mismatch" in found.reason:
        return _SHAPES
    return (
        "Keep what the guard names constant, or pass it as a tensor: a Python number, a flag, a list's length or an "
        "object that changes from step to step compiles the function once for each value, and after eight of them "
        "(torch._dynamo.config.recompile_limit) it runs uncompiled."
    )


def _startup(run: LedgerCosts, part: str) -> Explanation:
    parts = {name: s for name, s in run.ledger.parts.items() if name.startswith("startup/")}
    before_s, largest = sum(parts.get(name, 0.0) for name in BEFORE_FIT), max(parts, key=parts.__getitem__)
    what, advice = next(
        (said for name, said in _STARTUP.items() if largest.startswith(name)),
        (largest.removeprefix("startup/"), _DO_LESS),
    )
    call = next((line for line in run.evidence.lines.get(largest, ()) if line.pct >= _MOSTLY_PCT), None)
    in_call = ""
    if call is not None and largest == SET_UP:  # a line of the user's is named as in any finding
        function = call.function.rpartition(".")[2]
        in_call = "" if call.file else f", {call.pct:.0f} % of it in {function}"
        advice = _DO_LESS if call.file else _SET_UP_CALLS.get(function, advice)
    return Explanation(
        f"{in_s(run.seconds(part))} pass until the first step has ended, {in_s(before_s)} of them before the fit; the "
        f"longest is {what}, {in_s(parts[largest])}{in_call}",
        {"part": largest},
        advice,
    )


_SHAPES: Final = (
    "For batches of many shapes use torch.compile(dynamic=True) or torch._dynamo.mark_dynamic, or pad them to a few "
    "sizes; DataLoader(drop_last=True) leaves out a last batch of another size."
)
_CACHE: Final = (
    "Look at what the script does there (downloads, tokenization, building the dataset) and cache it on disk; load "
    "large weights with mmap=True."
)
_IMPORTS: Final = "`python -X importtime SCRIPT` lists what each import takes."
_PREPARE: Final = "Return early where the prepared files exist: it runs in each fit, and all ranks wait for it."
_MOSTLY_PCT: Final = 50.0
_DO_LESS: Final = "Do less there, or cache its result on disk."
_MOVE: Final = (
    "It moves the model to the device and wraps it: create it there (configure_model), or load fewer weights, in the "
    "type that it trains in."
)
# what the Trainer calls in its set-up, by the function's name, and what to do about it
_SET_UP_CALLS: Final = {
    "setup": _MOVE,
    "model_to_device": _MOVE,
    "setup_environment": "It starts the device and the process group, in which each rank waits for the last one.",
    "_run_stage": "It creates the loaders and their workers: make the dataset object smaller, each worker gets a copy.",
}
# by part, what is said of the longest part of the startup, and what to do about it
_STARTUP: Final = {
    STARTUP_IMPORTS: ("the start of Python with the imports", _IMPORTS),
    STARTUP_SCRIPT: ("the script from its imports to the callbacks", f"{_CACHE} {_IMPORTS}"),
    STARTUP_PROCESS: ("the script to the callbacks, with its imports", f"{_CACHE} {_IMPORTS}"),
    STARTUP_TRAINER: ("the script from the callbacks to the fit", _CACHE),
    "startup/datamodule.prepare_data": ("the data module's prepare_data", _PREPARE),
    "startup/module.prepare_data": ("the module's prepare_data", _PREPARE),
    "startup/compile": ("torch.compile", "Set TORCHINDUCTOR_CACHE_DIR to a folder that outlasts the job."),
    SET_UP: ("Lightning's set-up between the hooks", "It sets up strategy, loggers, loaders and the device."),
    FIRST_STEP: ("the first step", "It starts the loader's workers and loads libraries: see what its batch takes."),
}


def _logger(run: LedgerCosts, part: str) -> Explanation:
    advice = "Log less often (Trainer(log_every_n_steps=...)), fewer metrics per log entry, or to a local logger."
    if part.endswith(".finalize"):
        advice = (
            "It uploads and closes files at the end of the fit: upload less (log_model=False, fewer artifacts), or log "
            "to local files and upload them later."
        )
    return _takes("the logger {}", "calls", advice)(run, part)


_LOG_LESS: Final = (
    "Log fewer values, or every few steps: each call costs some 0.1 ms, whether or not the logger gets it. Collect "
    "values in a tensor and log them with on_step=False, on_epoch=True at the end of an epoch."
)
# Lightning's ResultMetric reduces in each call with on_step, and else once, in compute()
_REDUCE_LESS: Final = (
    "Where it has sync_dist=True, each call waits for all ranks: leave that out, or log with on_step=False, "
    "on_epoch=True, which adds up on each rank and reduces once an epoch."
)
_WAITS_PCT: Final = 25.0  # of the time without a core, as in a collective


def _self_log(run: LedgerCosts, part: str) -> Explanation:
    line = next(iter(lines_in(run.evidence, part)), None)
    if line is None or run.evidence.ranks.world_size == 1:
        return _takes("self.log", "values", _LOG_LESS)(run, part)
    reduces = "sync_dist=True" in line.call or (line.waiting_pct or 0.0) >= _WAITS_PCT
    reduces = reduces and "on_step=False" not in line.call and "sync_dist=False" not in line.call
    return _takes("self.log", "values", _REDUCE_LESS if reduces else _LOG_LESS)(run, part)


_HOOK: Final = "Do less in it or do it less often."
_LOADER_HOOK: Final = (
    "Lightning calls it again every n epochs (reload_dataloaders_every_n_epochs): leave that out if the data stays the "
    "same, or build the dataset once, in setup()."
)
_HOOK_ON_GPU: Final = (
    "On a GPU, reading a value (.item(), .cpu(), printing a tensor) waits for all queued work; collect values and read "
    "them every few steps."
)
_FUNCTION: Final = (
    "It is called for each batch: take the number from shapes and lengths (len(batch), ids.numel()), and read no "
    "values, for which a GPU would have to finish its queued work. Without batch_size_fn the samples are those of the "
    "first tensor's shape, or the DataLoader's batch size; flops_per_batch may be a number."
)

# the code of its finding and what is said of a leaf, by itself or else by its kind
LEDGER_RULES: Final[dict[str, tuple[str, Explain]]] = {
    "checkpoint": ("checkpoint-bound", _checkpoint),
    "validation": ("validation-bound", explain_validation),
    **{function_part(name): ("slow-hook", _takes("{}", "calls", _FUNCTION)) for name in COUNTING},
    "callback": ("slow-callback", _takes("callback {}", "calls", _HOOK, _HOOK_ON_GPU)),
    "module/lr_scheduler_step": (
        "slow-hook",
        _takes(
            "the learning-rate scheduler's step (lr_scheduler_step)",
            "calls",
            "Make the scheduler's step() cheaper, or call it less often (interval, frequency in configure_optimizers).",
        ),
    ),
    "module/train_dataloader": ("slow-hook", _takes("the module's train_dataloader", "calls", _LOADER_HOOK)),
    "datamodule/train_dataloader": ("slow-hook", _takes("the data module's train_dataloader", "calls", _LOADER_HOOK)),
    "module": ("slow-hook", _takes("the module's {}", "calls", _HOOK, _HOOK_ON_GPU)),
    "datamodule": ("slow-hook", _takes("the data module's {}", "calls", _HOOK, _HOOK_ON_GPU)),
    SELF_LOG: ("slow-logger", _self_log),
    EPOCH_METRICS: (
        "slow-logger",
        _takes(
            "computing the logged metrics at an epoch's end",
            "times",
            "Make the metrics' compute() cheaper (torchmetrics that keep all predictions are the costly ones), or log "
            "them every few epochs.",
        ),
    ),
    "logger": ("slow-logger", _logger),
    "data_loader": ("loader-startup", _loader),
    COMPILE: ("compile-bound", _compile),
    "gc": ("gc-bound", _garbage),
    "startup": ("startup-bound", _startup),
}


def ledger_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """Findings that cost at least `MIN_SHARE_PCT` of the fit: outside the steps, or in a hook inside them."""
    if evidence.ledger is None:
        return ()
    of_fit, of_step = LedgerCosts(evidence), LedgerCosts(evidence, "step")
    parts = ["startup", *(part for part in of_fit.leaves() if part_kind(part) != "startup")]
    named = ((_rule_of(part), _first_named(part, of_fit, of_step), part) for part in parts)
    return tuple(_finding(*rule, costs, part) for rule, costs, part in named if rule and costs)


def ledger_advice(part: str, evidence: RunEvidence) -> str:
    """What to do about a leaf of the ledger; "" if no rule is of it."""
    rule = _rule_of(part)
    if rule is None or evidence.ledger is None:
        return ""
    return rule[1](LedgerCosts(evidence), part).advice


def _rule_of(part: str) -> tuple[str, Explain] | None:
    return LEDGER_RULES.get(part) or LEDGER_RULES.get(part.partition("/")[0])


def _first_named(part: str, *bases: LedgerCosts) -> LedgerCosts | None:
    """The first basis on which a leaf costs enough."""
    return next((run for run in bases if 100 * run.seconds(part) >= MIN_SHARE_PCT * _whole(run, part)[1] > 0), None)


def _whole(run: LedgerCosts, part: str) -> tuple[str, float]:
    """The whole that a leaf's cost is a share of, in words and seconds. Startup is mostly before the fit."""
    return ("run", run.ledger.wall_s) if part == "startup" else ("fit", run.whole_s)


def _finding(code: str, explain: Explain, run: LedgerCosts, part: str) -> Finding:
    seconds, evidence = run.seconds(part), run.evidence
    whole, whole_s = _whole(run, part)
    explained = explain(run, part)
    saved_s = seconds if explained.saves_s is None else min(explained.saves_s, seconds)
    # a log entry less also saves Lightning's and the callbacks' work for it
    at_most = code != "slow-logger" and not explained.certain
    numbers: Evidence
    saves: Saving | None
    if run.of == "step":
        ms, step_ms = 1e3 * seconds / run.steps, evidence.timing.step_ms.mean
        numbers = {"ms_per_step": round(ms, 3), "step_ms": round(step_ms, 3)}
        saves = saving(ms, step_ms, at_most=at_most)
    else:
        numbers = {"seconds": round(seconds, 3), f"{whole}_s": round(whole_s, 3)}
        saves = saving_of_fit(saved_s, whole_s, run.steps, at_most=at_most, whole=whole)
    explained = explained.after(numbers)
    return as_finding(code, explained, share_pct=100 * seconds / whole_s, saves=saves, run=evidence, of=run.of)


# -- what torch.compile compiled again, in words -----------------------------------------------------------------------

_CHANGED: Final = re.compile(r"GLOBAL_STATE changed: (.*)")


def recompiled(one: Recompilation, *, timed: bool = True) -> str:
    """What was compiled again, where, how often, and why."""
    times = "once" if one.times == 1 else f"{one.times} times"
    times = f"{times} in {in_s(one.seconds)}" if timed else times
    where = f"{PurePath(one.file).name}:{one.line}"
    if one.kind == "graph break":
        return f"{one.function}, whose graph ends at {where}: what follows was compiled {times}"
    name = f"{one.function} ({where})" if one.file else one.function
    if one.kind == "recorded again":
        why = f", {_last(one)}because {one.reason}" if one.reason else ""
        return f"{name}, whose CUDA graph was recorded again {times}{why}"
    again = f"compiled again {times}, {_last(one)}because {_why(one.reason)}"
    if not one.given_up:
        return f"{name}, {again}"
    until = again if one.times else f"not compiled again, although {_why(one.reason)}"
    return f"{name}, which reached recompile_limit and runs uncompiled where no version fits: {until}"


def _last(one: Recompilation) -> str:
    return "" if one.times == 1 else "the last time "


def _why(guard: str) -> str:
    """The guard that failed, as a reason."""
    if changed := _CHANGED.fullmatch(guard):
        return f"{changed[1]} changed"
    return guard if "mismatch" in guard else f"it was no longer true that {guard}"

"""The changes that `try` makes: one row each. To add one, add a `Row` to `ROWS` with a function that builds it.

A row's function gets what a trial found out (`TrialFacts`, with what is kept already) and the finding that calls for
it, and returns what to set, or None where the change does not apply. None changes what is learned, as the batch size.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

from lightning_forge_profiling.diagnosis.loader import TRY_WORKERS
from lightning_forge_profiling.schema import Analysis, Finding, TrialFacts, TrialLoader

Alters = Literal["nothing", "rounding", "random numbers"]
_MOST_WORKERS: Final = 8
_MORE: Final = 1.5  # times as many workers are a difference that a trial can show
VALIDATION: Final = "validation-bound"


@dataclass(frozen=True, slots=True)
class Change:
    """A change to make in a trial.

    Args:
        name: a stable identifier.
        code: the code to write.
        spec: what the trial's process sets: of a `loader`, the `trainer`, the `module` or the `environment`.
        alters: what of the training it may alter.
        places: files and lines to write the code in, those of the script that build the loader or the Trainer.
        cause: the finding that it is tried for; None with `--all` or `--only`.
    """

    name: str
    code: str
    spec: Mapping[str, Any]
    alters: Alters = "rounding"
    places: tuple[str, ...] = ()
    cause: Finding | None = field(default=None, compare=False)


class Built(NamedTuple):
    """What a row sets, and the code for it."""

    spec: Mapping[str, Any]
    code: str
    places: tuple[str, ...] = ()


Build = Callable[[TrialFacts, Finding | None], Built | None]


class Row(NamedTuple):
    """One change: its name, its group for `--only`, the codes, mistakes and hints that call for it, what it alters."""

    name: str
    group: str
    causes: tuple[str, ...]
    alters: Alters
    build: Build


# -- loaders ---------------------------------------------------------------------------------------------------------


def _loaders(facts: TrialFacts, cause: Finding | None) -> list[TrialLoader]:
    """The loaders to change: of validation where that is the cause, else of training."""
    validates = cause is not None and cause.code == VALIDATION
    return [each for each in facts.loaders if each.validates is validates and not each.fixed]


def _of_loaders(loaders: Iterable[TrialLoader], **changes: Any) -> Built | None:
    places = tuple(dict.fromkeys(each.place for each in loaders if each.place))
    if not places:
        return None
    code = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return Built({"loader": {"set": changes, "places": list(places)}}, f"DataLoader(..., {code})", places)


def _workers(facts: TrialFacts, cause: Finding | None, *, more: bool) -> Built | None:
    """Workers where there are none, or more of them: as many as the finding says, else up to one for each core."""
    # where workers were left out, that is kept: none are given back
    loaders = [each for each in _loaders(facts, cause) if bool(each.num_workers) is more and (more or not each.changed)]
    now = max((each.num_workers for each in loaders), default=0)
    named = 0 if cause is None else cause.evidence.get(TRY_WORKERS, 0)
    most = min(facts.cores, _MOST_WORKERS)
    number = int(named) if isinstance(named, (int, float)) and named > now else min(2 * now, most) if more else most
    if facts.device == "cuda":  # what is tried later makes steps shorter, which then need more of them
        number = max(number, most)
    if number < max(_MORE * now, 1):
        return None
    pinned = {"pin_memory": True} if facts.device == "cuda" else {}
    return _of_loaders(loaders, num_workers=number, persistent_workers=True, **pinned)


def _set(facts: TrialFacts, cause: Finding | None, having: Callable[[TrialLoader], bool], **to: Any) -> Built | None:
    return _of_loaders([each for each in _loaders(facts, cause) if having(each)], **to)


def _pinned(facts: TrialFacts, _: Finding | None) -> Built | None:
    if facts.device != "cuda":
        return None
    places = [each for each in facts.loaders if not each.validates and not each.pin_memory]
    return _of_loaders(places, pin_memory=True)


# -- the Trainer -----------------------------------------------------------------------------------------------------


def _trainer(
    facts: TrialFacts, _: Finding | None, name: str, now: Collection[Any], to: Any, of: str = ""
) -> Built | None:
    """An argument of the Trainer, where it has one of these values now."""
    if facts.settings.get(name) not in now or (of and facts.device != of):
        return None
    return Built({"trainer": {name: to}}, f"Trainer(..., {name}={to!r})", (facts.trainer,))


def _bf16(facts: TrialFacts, cause: Finding | None) -> Built | None:
    # Lightning refuses to clip what a fused update unscales, also where bfloat16 has no scale
    refused = facts.settings.get("clipped") and any("fused" in each.split() for each in facts.optimizers)
    return _trainer(facts, cause, "precision", {"32-true"}, "bf16-mixed") if facts.bf16 and not refused else None


def _not_deterministic(facts: TrialFacts, cause: Finding | None) -> Built | None:
    if not facts.settings.get("deterministic"):
        code = "torch.backends.cudnn.deterministic = False"
        return _module(facts, cause, "not_deterministic", value=True, code=code, has="cudnn_deterministic")
    built = _trainer(facts, cause, "deterministic", {True}, to=False)
    return built and built._replace(spec={**built.spec, "module": {"not_deterministic": True}})


# -- the module ------------------------------------------------------------------------------------------------------


def _module(
    facts: TrialFacts, _: Finding | None, name: str, value: Any, code: str, *, has: str = "", gpu: bool = False
) -> Built | None:
    """A change of the module, if it has what that is about."""
    if (has and has not in facts.has) or (gpu and facts.device != "cuda"):
        return None
    return Built({"module": {name: value}}, code, (facts.fit,))


def _compiled(facts: TrialFacts, cause: Finding | None, mode: str = "") -> Built | None:
    if "compiled" in facts.has or (mode and facts.device != "cuda"):
        return None
    options, words = ({"mode": mode}, f", mode={mode!r}") if mode else ({}, "")
    return _module(facts, cause, "compile", options, f"trainer.fit(torch.compile(model{words}), ...)")


def _compiled_child(facts: TrialFacts, _: Finding | None) -> Built | None:
    if "compiled" in facts.has or not facts.child:
        return None
    return Built({"module": {"compile_child": facts.child}}, f"self.{facts.child}.compile()", (facts.built,))


def _update(facts: TrialFacts, _: Finding | None, kind: str) -> Built | None:
    """Optimizers that update all parameters in few calls. On a GPU, `foreach` is the default."""
    words = [each.split() for each in facts.optimizers]
    able = words and all(f"takes-{kind}" in each and kind not in each and "fused" not in each for each in words)
    precision, fused = str(facts.settings.get("precision")), kind == "fused"
    refused = precision == "16-mixed" or (fused and facts.settings.get("clipped") and "mixed" in precision)  # `_bf16`
    if not able or refused or (kind == "foreach" and facts.device == "cuda"):
        return None
    code = ", ".join(f"{each[0]}(..., {kind}=True)" for each in words)
    return Built({"module": {"update": kind}}, code, (facts.optimized,))


def _clipping(facts: TrialFacts, _: Finding | None) -> Built | None:
    if not facts.settings.get("clips") or facts.device == "cuda":  # where it is the default
        return None
    return Built({"module": {"clip_foreach": True}}, "torch.nn.utils.clip_grad_norm_(..., foreach=True)")


def _sparse(facts: TrialFacts, _: Finding | None) -> Built | None:
    if not facts.embedding:
        return None
    code = f"self.{facts.embedding} = nn.Embedding(..., sparse=True)"
    return Built({"module": {"sparse": facts.embedding}}, code, (facts.built,))


def _matmul(facts: TrialFacts, cause: Finding | None) -> Built | None:
    if facts.settings.get("matmul_precision") != "highest" or facts.settings.get("precision") != "32-true":
        return None
    return _module(facts, cause, "matmul_precision", "high", 'torch.set_float32_matmul_precision("high")', gpu=True)


def _threads(facts: TrialFacts, cause: Finding | None) -> Built | None:
    """As many threads as the finding names; else no more than there are cores."""
    named = None if cause is None else re.search(r"OMP_NUM_THREADS=(\d+)", f"{cause.fix} {cause.advice}")
    number = min(facts.threads, facts.cores) if named is None else int(named[1])
    if number == facts.threads:
        return None
    spec = {"environment": {"OMP_NUM_THREADS": str(number)}, "module": {"threads": number}}
    return Built(spec, f"torch.set_num_threads({number})")


_WORK: Final = ("compute-bound", "memory-bandwidth-bound", "blocked-forward", "blocked-backward")
_CALLS: Final = ("launch-bound", "python-bound", "slow-launches", "gpu-idle")
_BATCHES: Final = ("input-bound", VALIDATION, "frame-per-sample", "converted-per-sample")
_STARTS: Final = ("worker-restarts", "loader-startup")

ROWS: Final = (
    Row("anomaly", "anomaly", ("anomaly-detection",), "nothing",
        partial(_trainer, name="detect_anomaly", now={True}, to=False)),
    Row("workers", "workers", _BATCHES, "random numbers", partial(_workers, more=False)),
    Row("no-workers", "workers", (*_STARTS, "input-bound", "cpu-starved"), "random numbers",
        partial(_set, having=lambda each: each.num_workers > 0 and not each.changed, num_workers=0)),
    Row("persistent", "workers", (*_STARTS, *_BATCHES), "random numbers",
        partial(_set, having=lambda each: each.num_workers > 0 and not each.persistent_workers,
                persistent_workers=True)),
    Row("more-workers", "workers", _BATCHES, "random numbers", partial(_workers, more=True)),
    Row("pin", "workers", ("transfer-bound",), "nothing", _pinned),
    Row("precision", "precision", _WORK, "rounding", _bf16),
    Row("matmul", "precision", (*_WORK, "tf32-off"), "rounding", _matmul),
    Row("attention", "attention", (*_WORK, *_CALLS, "eager-attention"), "rounding",
        partial(_module, name="sdpa", value=True, has="eager_attention", code='model.set_attn_implementation("sdpa")')),
    Row("compile-overhead", "compile", (*_CALLS, *_WORK), "rounding", partial(_compiled, mode="reduce-overhead")),
    Row("compile", "compile", (*_CALLS, *_WORK), "rounding", _compiled),
    Row("compile-child", "compile", (*_CALLS, *_WORK), "rounding", _compiled_child),
    Row("fused", "optimizer", ("slow-optimizer", "blocked-optimizer", *_CALLS), "rounding",
        partial(_update, kind="fused")),
    Row("foreach", "optimizer", ("slow-optimizer", "blocked-optimizer"), "rounding", partial(_update, kind="foreach")),
    Row("sparse", "optimizer", ("dense-embedding",), "rounding", _sparse),
    Row("clipping", "optimizer", ("slow-optimizer", "norm-per-parameter"), "rounding", _clipping),
    Row("benchmark", "convolutions", _WORK, "rounding",
        lambda facts, cause: None if "conv2d" not in facts.has else _trainer(
            facts, cause, "benchmark", {False}, to=True, of="cuda")),
    Row("channels-last", "convolutions", _WORK, "rounding",
        partial(_module, name="channels_last", value=True, has="conv2d", gpu=True,
                code="model.to(memory_format=torch.channels_last)")),
    Row("deterministic", "deterministic", (*_WORK, "deterministic"), "rounding",
        _not_deterministic),
    Row("checkpointing", "checkpointing", ("activation-checkpointing",), "rounding",
        partial(_module, name="not_checkpointed", value=True, has="checkpointing",
                code="model.gradient_checkpointing_disable()")),
    Row("unused-parameters", "ddp", ("communication-bound", "unused-parameters", *_CALLS), "nothing",
        partial(_module, name="all_used", value=True, has="unused_parameters",
                code='Trainer(..., strategy="ddp")  # without find_unused_parameters')),
    Row("threads", "threads", ("cpu-starved", "compute-bound"), "rounding", _threads),
)  # fmt: skip
"""Every change, in the order in which those of one finding are tried."""

GROUPS: Final = tuple(dict.fromkeys(row.group for row in ROWS))


def causes_of(finding: Finding) -> set[str]:
    """The names by which rows ask for a finding: its code, and the mistake or the settings that it is about."""
    named = (str(finding.evidence.get(each, "")).split(", ") for each in ("mistake", "settings"))
    return {finding.code, *chain.from_iterable(named)} - {""}


def candidates(
    analysis: Analysis | None, *, only: Collection[str] = (), everything: bool = False
) -> Iterator[tuple[Row, Finding | None]]:
    """The rows to try, with each finding that calls for one: findings in their order, then what was asked for besides.

    Args:
        analysis: of the baseline; None if it has none.
        only: groups to try alone, whether or not a finding calls for them.
        everything: whether to try all rows.
    """
    rows = [row for row in ROWS if not only or row.group in only]
    for finding in () if analysis is None else analysis.findings:
        for row in rows:
            if causes_of(finding) & {*row.causes}:
                yield row, finding
    hints = {hint.code for hint in analysis.hints} if analysis is not None else set()
    for row in rows:
        if only or everything or hints & {*row.causes}:
            yield row, None


def build(row: Row, facts: TrialFacts, cause: Finding | None) -> Change | None:
    """The change of a row on top of what a trial had; None where it does not apply, or is so already."""
    built = row.build(facts, cause)
    if built is None:
        return None
    return Change(row.name, built.code, built.spec, row.alters, tuple(filter(None, built.places)), cause)


def by_hand(
    analysis: Analysis | None, kept: Collection[str] = (), asked: Collection[str] | None = None
) -> dict[str, str]:
    """What only the user can change, by finding.

    Of the verdict, if nothing was kept for it; of findings without a change; and of calls, which workers only spread.

    Args:
        analysis: of the baseline.
        kept: codes of the findings that what was kept is for.
        asked: codes of the findings that had a change, tried or not; None for all that a row is for.
    """
    known = {cause for row in ROWS for cause in row.causes} if asked is None else {*asked}
    left = {}
    for number, each in enumerate(() if analysis is None else analysis.findings):
        mistake = each.evidence.get("mistake", "")
        left_over = mistake or not causes_of(each) & known or (asked is not None and not number)
        if each.advice and (mistake in _BATCHES or (each.code not in kept and left_over)):
            left[", ".join(filter(None, (each.code, str(each.evidence.get("where", "")))))] = each.advice
    return left

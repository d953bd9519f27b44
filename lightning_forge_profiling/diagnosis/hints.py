"""Rules of thumb: what a glance at the breakdown tells, as data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.results.analysis import Hint
from lightning_forge_profiling.results.rank import RankSummary

__all__ = ["RULES", "Rule", "rules_of_thumb"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        code: its name.
        value: what it looks at.
        above: the hint is given where the value is greater.
        text: the hint; `{value}` stands for the value.
    """

    code: str
    value: Callable[[RankSummary], float]
    above: float
    text: str


def _copy_pct(rank: RankSummary) -> float:
    """Share of the step that operators of one name, `aten::copy_`, spend in kernels, so not in copies to the GPU."""
    spent = sum(operator.self_device_ms_per_step for operator in rank.operators if operator.name == "aten::copy_")
    spent = max(spent - sum(copy.ms_per_step for copy in rank.copies), 0.0)
    return 100 * spent / rank.step_ms.mean if rank.step_ms.mean else 0.0


def _other_pct(rank: RankSummary) -> float:
    """What could be fused: convolutions and attention count to `other`, but are as good as matrix products."""
    math = sum(kind.pct for name, kind in rank.kinds.items() if name in {"convolution", "attention"})
    return rank.categories["other"].pct - math


def _recomputed_pct(rank: RankSummary) -> float:
    """Share of the operations that the model does not ask for."""
    flops = rank.flops
    if flops is None or flops.model_per_step is None:
        return 0.0
    return 100 * (1 - flops.model_per_step / flops.per_step)


RULES: Final = (
    Rule(
        "matmul-heavy",
        lambda rank: rank.categories["matmul"].pct,
        50,
        "matrix products take {value:.0f} % of the step: the GPU does what it is good at; "
        "a lower precision or larger tiles are what is left to gain",
    ),
    Rule(
        "comm-heavy",
        lambda rank: 100 * rank.comm.ms_per_step / rank.step_ms.mean if rank.step_ms.mean else 0.0,
        20,
        "communication runs for {value:.0f} % of the step, hidden or not",
    ),
    Rule(
        "other-heavy",
        _other_pct,
        40,
        "kernels that are no matrix products, convolutions or attention take {value:.0f} % of the step: "
        "torch.compile can fuse many of them",
    ),
    Rule(
        "copy-heavy",
        _copy_pct,
        10,
        "aten::copy_ takes {value:.0f} % of the step: casts between types and layouts; "
        "keep one precision (bf16-true), make tensors contiguous once",
    ),
    Rule(
        "cuda-malloc",
        lambda rank: rank.host.cuda_mallocs_per_step,
        0,
        "cudaMalloc is called {value:.1f} times a step: in a steady state PyTorch's allocator needs none",
    ),
    Rule(
        "recomputation",
        _recomputed_pct,
        5,
        "{value:.0f} % of the operations compute activations a second time (checkpointing) or are the optimizer's own: "
        "where memory is left, checkpoint fewer layers",
    ),
)
"""From KempnerForge's summary and common teaching: above which share something is worth a look."""


def rules_of_thumb(ranks: Iterable[RankSummary], rules: Iterable[Rule] = RULES) -> tuple[Hint, ...]:
    """The rules that apply, once each: on the rank where their value is greatest."""
    ranks, hints = tuple(ranks), []
    for rule in rules:
        rank = max(ranks, key=rule.value, default=None)
        if rank is not None and rule.value(rank) > rule.above:
            hints.append(Hint(code=rule.code, rank=rank.rank, text=rule.text.format(value=rule.value(rank))))
    return tuple(hints)

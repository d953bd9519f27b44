"""Rules of thumb on a rank's breakdown: less than a cause, worth a look."""

from collections.abc import Iterable
from typing import Final

from lightning_forge_profiling.diagnosis.rule import Explanation, Rule
from lightning_forge_profiling.results.analysis import Hint
from lightning_forge_profiling.results.rank import RankSummary

_MANY_ITEMS: Final = 20
"""Lightning and its progress bar read a few a step."""


def _communication_pct(rank: RankSummary) -> float:
    return 100 * rank.comm.ms_per_step / rank.step_ms.mean if rank.step_ms.mean else 0.0


def _copy_pct(rank: RankSummary) -> float:
    """Share of the step that `aten::copy_` spends in kernels, so not in copies to the GPU."""
    spent = sum(operator.self_device_ms_per_step for operator in rank.operators if operator.name == "aten::copy_")
    spent = max(spent - sum(copy.ms_per_step for copy in rank.copies), 0.0)
    return 100 * spent / rank.step_ms.mean if rank.step_ms.mean else 0.0


def _other_pct(rank: RankSummary) -> float:
    """What could be fused: convolutions and attention count to `other`, but are as good as matrix products."""
    math = sum(kind.pct for name, kind in rank.kinds.items() if name in {"convolution", "attention"})
    return rank.categories["other"].pct - math


def _recomputed_pct(rank: RankSummary) -> float:
    return 0.0 if rank.flops is None else rank.flops.recomputed_pct


def _item_pct(rank: RankSummary) -> float:
    cpu = rank.cpu
    many = cpu is not None and cpu.item_calls_per_step >= _MANY_ITEMS and rank.step_ms.mean > 0
    return 100 * cpu.item_ms_per_step / rank.step_ms.mean if cpu is not None and many else 0.0


def _item(rank: RankSummary) -> Explanation:
    calls = 0.0 if rank.cpu is None else rank.cpu.item_calls_per_step
    return Explanation(
        f"a tensor's value is read {calls:.0f} times a step, as by .item(), float() or `if tensor:`; the "
        f"operators alone take {_item_pct(rank):.0f} % of the recorded step: read many at once with "
        ".tolist(), or every n steps"
    )


_RULES: Final[tuple[Rule[RankSummary], ...]] = (
    Rule(
        "matmul-heavy",
        lambda rank: rank.categories["matmul"].pct,
        lambda rank: Explanation(
            f"matrix products take {rank.categories['matmul'].pct:.0f} % of the step, the work that a GPU does best; "
            "a lower precision or larger tiles remain"
        ),
        above=50,
    ),
    Rule(
        "comm-heavy",
        _communication_pct,
        lambda rank: Explanation(f"communication runs for {_communication_pct(rank):.0f} % of the step, hidden or not"),
        above=20,
    ),
    Rule(
        "other-heavy",
        _other_pct,
        lambda rank: Explanation(
            f"kernels other than matrix products, convolutions and attention take {_other_pct(rank):.0f} % of the "
            "step: torch.compile can fuse many of them"
        ),
        above=40,
    ),
    Rule(
        "copy-heavy",
        _copy_pct,
        lambda rank: Explanation(
            f"aten::copy_ takes {_copy_pct(rank):.0f} % of the step: casts between types and layouts; keep one "
            "precision (bf16-true), make tensors contiguous once"
        ),
        above=10,
    ),
    Rule(
        "cuda-malloc",
        lambda rank: rank.host.cuda_mallocs_per_step,
        lambda rank: Explanation(
            f"cudaMalloc is called {rank.host.cuda_mallocs_per_step:.1f} times a step: in a steady state PyTorch's "
            "allocator needs none"
        ),
    ),
    Rule("item-calls", _item_pct, _item, above=1),
    Rule(
        "recomputation",
        _recomputed_pct,
        lambda rank: Explanation(
            f"{_recomputed_pct(rank):.0f} % of the operations recompute activations (checkpointing) or belong to the "
            "optimizer: if memory is left, checkpoint fewer layers"
        ),
        above=5,
    ),
)
"""From KempnerForge's summary and common teaching: above which share something is worth a look."""


def rules_of_thumb(ranks: Iterable[RankSummary]) -> tuple[Hint, ...]:
    """The rules that apply, once each: on the rank where their figure is greatest."""
    ranks, hints = tuple(ranks), []
    for rule in _RULES:
        rank = max(ranks, key=rule.cost, default=None)
        if rank is not None and rule.cost(rank) > rule.above:
            hints.append(Hint(code=rule.code, rank=rank.rank, text=rule.explain(rank).title))
    return tuple(hints)

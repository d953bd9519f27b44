"""Memory on a GPU that grows until it is full, and what fills it."""

from typing import Final

from lightning_forge_profiling.results.analysis import Finding, RunEvidence
from lightning_forge_profiling.results.memory import GIB, KIB, MIB, MemoryGrowth, RunMemory

CODE: Final = "memory-near-limit"

_LEAST_GIB: Final = 0.01
_MANY_TIMES: Final = 10.0
_WHAT: Final = {
    "parameters": "the model's parameters",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "buffers": "the model's buffers",
    "other tensors": "tensors that are kept from one step to the next and are not the model's",
    "activations": "activations and temporaries, which a step frees again",
}
_ADVICE: Final = {
    "other tensors": (
        "Look for a list or a dictionary that gets a tensor in each step: a loss that is appended holds the graph of "
        "its step (append loss.detach(), or loss.item() every few steps), and predictions that are kept for a metric "
        "belong on the CPU (preds.cpu()). ForgeProfilerCallback(memory_snapshot=N) shows the line that allocates them."
    ),
    "activations": (
        "Batches get larger: bound the length of a sequence or the number of tokens of a batch. Activation "
        "checkpointing (torch.utils.checkpoint) needs less of each."
    ),
}
_OF_MODEL: Final = (
    "Look for a layer, a buffer or an entry of the optimizer's state that is added or enlarged in each step."
)


def growth_words(growth: MemoryGrowth) -> str:
    """What grows, and when the memory is full."""
    return (
        f"memory on the GPU grows by {_amount(growth.bytes_per_step)} a step (steps "
        f"{growth.from_step:,} to {growth.to_step:,}): {_WHAT[growth.category]}. If that goes on, it is full at about "
        f"step {growth.full_step:,}"
    )


def _amount(count: float) -> str:
    """Bytes with three digits: 16.0 MiB, 0.50 KiB."""
    unit, size = ("MiB", MIB) if count >= MIB / 10 else ("KiB", KIB)
    return f"{count / size:.{0 if count >= 100 * size else 1 if count >= 10 * size else 2}f} {unit}"


def memory_findings(run: RunEvidence) -> tuple[Finding, ...]:
    """A finding where memory grows towards the GPU's limit. It costs no time: its share is of the memory."""
    memory = run.memory
    if memory is None or memory.growth is None or not memory.curve.peak_gib or memory.limit_gib <= 0:
        return ()
    growth, peak = memory.growth, memory.curve.peak_gib[-1]
    return (
        Finding(
            code=CODE,
            share_pct=min(100 * peak / memory.limit_gib, 100.0),
            rank=run.rank if run.world_size > 1 else None,
            source="run",
            title=growth_words(growth),
            evidence={
                "grows": growth.category,
                "mib_per_step": round(growth.bytes_per_step / MIB, 3),
                "full_step": growth.full_step,
                "peak_gib": peak,
                "limit_gib": round(memory.limit_gib, 3),
            },
            advice=_ADVICE.get(growth.category, _OF_MODEL),
            of="memory",
        ),
    )


def memory_parts(memory: RunMemory) -> dict[str, float]:
    """What the peak consists of, in GiB by name; the parts that are too small to name are left out."""
    kept, peak, model = memory.curve.kept_gib[-1], memory.curve.peak_gib[-1], memory.model
    parts = {
        "parameters": model.parameters_bytes / GIB,
        "gradients": model.gradients_bytes / GIB,
        "optimizer": model.optimizer_bytes / GIB,
        "buffers": model.buffers_bytes / GIB,
        "other tensors": kept - model.bytes / GIB,
        "activations and temporaries": peak - kept if memory.peak_known else 0.0,
    }
    return {name: gib for name, gib in parts.items() if gib >= _LEAST_GIB}


def largest_batch(memory: RunMemory) -> float | None:
    """How many times larger a batch may be; None where that is unknown, or not near."""
    kept, peak = memory.curve.kept_gib[-1], memory.curve.peak_gib[-1]
    if memory.growth is not None or not memory.peak_known or peak - kept < _LEAST_GIB:
        return None
    times = (memory.limit_gib - kept) / (peak - kept)
    return times if 0 < times < _MANY_TIMES else None

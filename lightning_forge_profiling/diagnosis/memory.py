"""Memory on a GPU that grows until it is full, and what fills it."""

from typing import Final

from lightning_forge_profiling.schema import GIB, KIB, MIB, Finding, MemoryGrowth, RunEvidence, RunMemory

CODE: Final = "memory-near-limit"

ACTIVATIONS: Final = "activations and temporaries"
CACHE: Final = "cached by the allocator"

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
            rank=run.ranks.rank if run.ranks.world_size > 1 else None,
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


def memory_layers(memory: RunMemory, *, least_gib: float = _LEAST_GIB) -> dict[str, list[float]]:
    """What fills the memory at each point of the curve, in GiB by name; smaller layers are left out."""
    model, curve = memory.model, memory.curve
    of_model = {
        "parameters": model.parameters_bytes,
        "gradients": model.gradients_bytes,
        "optimizer": model.optimizer_bytes,
        "buffers": model.buffers_bytes,
    }
    layers = {name: [count / GIB] * len(curve.steps) for name, count in of_model.items()}
    layers["other tensors"] = [max(kept - model.bytes / GIB, 0.0) for kept in curve.kept_gib]
    if memory.peak_known:
        pairs = zip(curve.peak_gib, curve.kept_gib, strict=True)
        layers[ACTIVATIONS] = [max(peak - kept, 0.0) for peak, kept in pairs]
        held = zip(curve.reserved_gib, curve.peak_gib, strict=True)
        layers[CACHE] = [max(reserved - peak, 0.0) for reserved, peak in held]
    return {name: gib for name, gib in layers.items() if max(gib, default=0.0) >= least_gib}


def largest_batch(memory: RunMemory) -> float | None:
    """How many times larger a batch may be; None where that is unknown, or not near.

    The peak is in backward, most often, before which Lightning frees the gradients: they are counted to what a batch
    takes.
    """
    kept, peak = memory.curve.kept_gib[-1], memory.curve.peak_gib[-1]
    if memory.growth is not None or not memory.peak_known or peak - kept < _LEAST_GIB:
        return None
    at_peak = max(kept - memory.model.gradients_bytes / GIB, 0.0)
    times = (memory.limit_gib - at_peak) / (peak - at_peak)
    return times if 0 < times < _MANY_TIMES else None

"""How fast the recorded steps computed, from the shapes of what they computed."""

from typing import Final

import msgspec
import numpy as np

from lightning_forge_profiling.analysis.kernel_kinds import KINDS
from lightning_forge_profiling.analysis.nesting import outermost_marked, sum_into_ancestors
from lightning_forge_profiling.analysis.rank_summary import Flops
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.trace import Ints, Signature
from lightning_forge_profiling.hardware.flops import COUNTED, OperatorFlops, operator_flops
from lightning_forge_profiling.hardware.peaks import find_peak

__all__ = ["flop_rate"]

_COUNTED_KINDS: Final = ("matmul", "convolution", "attention")
_NO_SHAPES: Final = "the trace has no input shapes (record_shapes=True records them), so FLOPs cannot be counted"
_NO_PRODUCTS: Final = "no matrix product, convolution or attention ran on the GPU in the recorded steps"
_TF32: Final = "tf32"


def flop_rate(recording: Recording, busy_ns: int, step_ns: int) -> tuple[Flops | None, str]:
    """Count what the outermost countable operators compute that launched GPU work in the recorded steps.

    Args:
        recording: the recording.
        busy_ns: busy time of all its steps.
        step_ns: length of all its steps.

    Returns:
        The rates, and why there are none.
    """
    trace, links = recording.trace, recording.links
    kinds = [KINDS.index(kind) for kind in _COUNTED_KINDS]
    work = np.flatnonzero(np.isin(recording.kind, kinds) & (recording.step >= 0))
    if not len(work):
        return None, _NO_PRODUCTS
    if not any(signature.dims for signature in trace.signatures):
        return None, _NO_SHAPES
    countable = np.isin(trace.operators.name, [row for row, name in enumerate(trace.names) if name in COUNTED])
    owner = np.append(outermost_marked(recording.operator_parent, countable), -1)
    duration = (trace.gpu.end - trace.gpu.start)[work]
    launcher = links.operator[work]
    spent = np.zeros(len(trace.operators) + 1, np.int64)
    np.add.at(spent, launcher, duration)
    under = sum_into_ancestors(recording.operator_parent, spent[:-1])
    calls = np.flatnonzero((owner[:-1] == np.arange(len(trace.operators))) & (under > 0))
    total = counted_ns = 0
    by_type: dict[str, int] = {}
    for row, flops in zip(calls.tolist(), _count(recording, calls, owner[:-1]), strict=True):
        if flops is not None:
            total += flops.flops
            counted_ns += int(under[row])
            by_type[flops.dtype] = by_type.get(flops.dtype, 0) + flops.flops
    if not total:
        return None, "no operator that launched a matrix product, convolution or attention could be counted"
    dtype = _type_used(recording, work, max(by_type, key=by_type.__getitem__))
    found = find_peak(trace.device, memory_bytes=trace.memory_bytes, sms=trace.multiprocessors)
    peaks = found.flops if found else {}
    rate = total / counted_ns / 1e3
    if dtype == "fp32" and rate * 1e12 > peaks.get("fp32", float("inf")):
        dtype = _TF32  # nothing else on the device is that fast
    peak = peaks[dtype] / 1e12 if dtype in peaks else None
    uncounted = {trace.names[trace.operators.name[row]] for row in launcher[owner[launcher] < 0].tolist() if row >= 0}
    return (
        Flops(
            per_step=total / len(recording.steps),
            counted_pct=100 * counted_ns / int(duration.sum()),
            matmul_tflops=rate,
            busy_tflops=total / max(busy_ns, 1) / 1e3,
            step_tflops=total / max(step_ns, 1) / 1e3,
            dtype=dtype,
            peak_tflops=peak,
            matmul_pct_of_peak=None if peak is None else 100 * rate / peak,
            busy_pct_of_peak=None if peak is None else 100 * total / max(busy_ns, 1) / 1e3 / peak,
            uncounted=tuple(sorted(uncounted)),
        ),
        "",
    )


def _count(recording: Recording, calls: Ints, owner: Ints) -> list[OperatorFlops | None]:
    """The FLOPs of calls, each kind of call worked out once."""
    operators = recording.trace.operators
    # autocast calls the operator again with the types it runs in
    again = np.flatnonzero((owner >= 0) & (owner != np.arange(len(owner))))
    again = again[operators.name[again] == operators.name[owner[again]]]
    inner = np.full(len(owner), -1)
    inner[owner[again]] = operators.signature[again]
    known: dict[tuple[int, int, int], OperatorFlops | None] = {}
    found = []
    for key in zip(operators.name[calls], operators.signature[calls], inner[calls], strict=True):
        if key not in known:
            known[key] = _flops(recording, *(int(part) for part in key))
        found.append(known[key])
    return found


def _flops(recording: Recording, name: int, signature: int, inner: int) -> OperatorFlops | None:
    outer = _one(recording.trace.names[name], recording.trace.signatures[signature])
    run_as = _one(recording.trace.names[name], recording.trace.signatures[inner]) if inner >= 0 else None
    return outer if outer is None or run_as is None else outer._replace(dtype=run_as.dtype)


def _one(name: str, signature: Signature) -> OperatorFlops | None:
    try:
        dims, types, concrete = (
            msgspec.json.decode(text or b"[]", type=list)
            for text in (signature.dims, signature.types, signature.concrete)
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return operator_flops(name, dims, [str(type_) for type_ in types], [str(value) for value in concrete])


def _type_used(recording: Recording, work: Ints, dtype: str) -> str:
    """TF32 where the kernels' names say so: the operators' types do not."""
    names = (recording.trace.names[name] for name in np.unique(recording.trace.gpu.name[work]).tolist())
    return _TF32 if dtype == "fp32" and any(_TF32 in name for name in names) else dtype

"""FLOPs and compute rates of the recorded steps, from the input shapes of their operators."""

import re
from typing import Final

import msgspec
import numpy as np

from lightning_forge_profiling.analysis.kernel_kinds import KINDS
from lightning_forge_profiling.analysis.nesting import outermost_marked, sum_into_ancestors
from lightning_forge_profiling.analysis.recomputation import recomputed
from lightning_forge_profiling.analysis.recording import Recording, by_optimizer
from lightning_forge_profiling.flops.operator import COUNTED, PRODUCTS, OperatorFlops, operator_flops
from lightning_forge_profiling.flops.peaks import find_peak
from lightning_forge_profiling.kineto.trace import Ints, Signature
from lightning_forge_profiling.results.flops import Flops

_COUNTED_KINDS: Final = ("matmul", "convolution", "attention")
_NO_SHAPES: Final = "the trace has no input shapes (record_shapes=True records them), so FLOPs cannot be counted"
_NO_PRODUCTS: Final = "no matrix product, convolution or attention ran on the GPU in the recorded steps"
_TF32: Final = "tf32"
_IN_TF32: Final = re.compile(r"tf32|tensorop_s1688gemm")
"""The latter is CUTLASS's name in cuBLAS for 32-bit floats on tensor cores, which compute in TF32."""


def flop_rate(recording: Recording, busy_ns: int, step_ns: int) -> tuple[Flops | None, str]:
    """Count the FLOPs of the outermost countable operators that launched GPU work in the recorded steps."""
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
    again = recomputed(recording, calls)
    extra = by_optimizer(trace, recording.operator_parent, trace.operators.start[calls], calls)
    extra |= False if again is None else again
    total = beyond_model = counted_ns = 0
    uncounted: list[int] = []
    by_type: dict[str, int] = {}
    for row, flops, is_extra in zip(calls.tolist(), _count(recording, calls, owner[:-1]), extra.tolist(), strict=True):
        if flops is not None:
            total += flops.flops
            beyond_model += flops.flops if is_extra else 0
            counted_ns += int(under[row])
            by_type[flops.dtype] = by_type.get(flops.dtype, 0) + flops.flops
        else:
            uncounted.append(row)
    if not total:
        return None, "no operator that launched a matrix product, convolution or attention could be counted"
    dtype = _type_used(recording, work, max(by_type, key=by_type.__getitem__))
    found = find_peak(trace.device, memory_bytes=trace.memory_bytes, sms=trace.multiprocessors)
    peaks = found.flops if found else {}
    rate = total / counted_ns / 1e3
    if dtype == "fp32" and _TF32 in peaks and rate * 1e12 > peaks.get("fp32", float("inf")):
        dtype = _TF32  # faster than the fp32 peak
    peak = peaks[dtype] / 1e12 if dtype in peaks else None
    uncounted += [row for row in launcher[owner[launcher] < 0].tolist() if row >= 0]
    return (
        Flops(
            per_step=total / len(recording.steps),
            model_per_step=None if again is None else (total - beyond_model) / len(recording.steps),
            counted_pct=100 * counted_ns / int(duration.sum()),
            matmul_tflops=rate,
            busy_tflops=total / max(busy_ns, 1) / 1e3,
            step_tflops=total / max(step_ns, 1) / 1e3,
            dtype=dtype,
            peak_tflops=peak,
            matmul_pct_of_peak=None if peak is None else 100 * rate / peak,
            busy_pct_of_peak=None if peak is None else 100 * total / max(busy_ns, 1) / 1e3 / peak,
            uncounted=tuple(sorted({trace.names[trace.operators.name[row]] for row in uncounted})),
        ),
        "",
    )


def _count(recording: Recording, calls: Ints, owner: Ints) -> list[OperatorFlops | None]:
    """The FLOPs of calls.

    A call may contain another of the same operator: autocast with the types it runs in, DTensor with the shapes of this
    rank, an 8-bit float tensor with its own product. The innermost has the inputs that the kernel gets.
    """
    trace, operators = recording.trace, recording.trace.operators
    products = np.array([name in PRODUCTS for name in trace.names])[operators.name]
    same = (owner >= 0) & (operators.name == operators.name[owner])
    same |= (owner >= 0) & products & products[owner]
    innermost = same & (sum_into_ancestors(recording.operator_parent, same.astype(np.int64)) == 1)
    known: dict[tuple[int, int], OperatorFlops | None] = {}

    def one(row: int) -> OperatorFlops | None:
        key = int(operators.name[row]), int(operators.signature[row])
        if key not in known:
            known[key] = _operator_flops(trace.names[key[0]], trace.signatures[key[1]])
        return known[key]

    parts: dict[int, list[OperatorFlops | None]] = {}
    for row in np.flatnonzero(innermost).tolist():
        parts.setdefault(int(owner[row]), []).append(one(row))
    return [_summed(parts[call]) or one(call) for call in calls.tolist()]


def _summed(parts: list[OperatorFlops | None]) -> OperatorFlops | None:
    """The sum of several operators' FLOPs; None if one of them could not be counted."""
    counted = [part for part in parts if part is not None]
    if len(counted) < len(parts):
        return None
    return counted[0]._replace(flops=sum(part.flops for part in counted))


def _operator_flops(name: str, signature: Signature) -> OperatorFlops | None:
    try:
        dims, types, concrete, strides = (
            msgspec.json.decode(text or b"[]", type=list)
            for text in (signature.dims, signature.types, signature.concrete, signature.strides)
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if any(shape and not steps for shape, steps in zip(dims, strides, strict=False)):
        return None  # a sparse tensor has no strides, and its shape does not determine the FLOPs
    return operator_flops(name, dims, [str(type_) for type_ in types], [str(value) for value in concrete])


def _type_used(recording: Recording, work: Ints, dtype: str) -> str:
    """The dtype of the operators, or TF32 if the kernels' names show it."""
    names = (recording.trace.names[name] for name in np.unique(recording.trace.gpu.name[work]).tolist())
    return _TF32 if dtype == "fp32" and any(_IN_TF32.search(name) for name in names) else dtype

"""Table of PyTorch operators: calls, host time, GPU time, device memory, shapes."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import summed
from lightning_forge_profiling.analysis.kernels import KINDS, PRODUCT_KINDS
from lightning_forge_profiling.analysis.recording import Recording, by_optimizer
from lightning_forge_profiling.analysis.steps import named
from lightning_forge_profiling.flops.operator import COUNTED, PRODUCTS, OperatorFlops, operator_flops
from lightning_forge_profiling.flops.peaks import find_peak
from lightning_forge_profiling.kineto.trace import Ints, Signature
from lightning_forge_profiling.schema import Flops, Operator

# Sort keys of the operator table, largest first.
SORTS: Final = MappingProxyType[str, Callable[[Operator], float]](
    {
        "self_device": lambda operator: operator.self_device_ms_per_step,
        "device": lambda operator: operator.device_ms_per_step,
        "self_host": lambda operator: operator.self_host_ms_per_step,
        "host": lambda operator: operator.host_ms_per_step,
        "calls": lambda operator: operator.calls_per_step,
        "memory": lambda operator: abs(operator.allocated_bytes_per_step or 0),
    }
)

_SHAPES_SHOWN: Final = 3
_SHAPES_LENGTH: Final = 200


def operator_table(recording: Recording, *, sort: str | None = None, top: int = 20) -> tuple[Operator, ...]:
    """The top operators of the recorded steps, means per step."""
    trace, nesting = recording.trace, recording.nesting
    operators = trace.operators
    counted = recording.steps.host.at(operators.start) >= 0
    if not counted.any():
        return ()
    gpu, rows = trace.gpu, np.flatnonzero((recording.links.operator >= 0) & (recording.step >= 0))
    self_device = summed(recording.links.operator[rows], (gpu.end - gpu.start)[rows], len(operators))
    device = nesting.sums(self_device)
    owner = nesting.enclosing(trace.allocations.start, trace.allocations.thread)  # itself, less what it freed
    memory = nesting.sums(summed(owner[owner >= 0], trace.allocations.size[owner >= 0], len(operators)))
    outer = counted & ~nesting.in_namesake()

    def by_name(values: Ints, rows: NDArray[np.bool_]) -> Ints:
        return np.bincount(operators.name[rows], values[rows], len(trace.names)).astype(np.int64)

    ones, steps, shapes = np.ones(len(operators), np.int64), recording.steps, _shapes(recording, device, counted)
    calls, self_host = by_name(ones, counted), by_name(self_time(recording), counted)
    host = by_name(operators.end - operators.start, outer)
    self_device_sum, device_sum = by_name(self_device, counted), by_name(device, outer)
    memory_sum = by_name(memory, outer)
    table = [
        Operator(
            name=trace.names[name],
            calls_per_step=int(calls[name]) / len(steps),
            host_ms_per_step=steps.mean_ms(host[name]),
            self_host_ms_per_step=steps.mean_ms(self_host[name]),
            device_ms_per_step=steps.mean_ms(device_sum[name]),
            self_device_ms_per_step=steps.mean_ms(self_device_sum[name]),
            allocated_bytes_per_step=int(memory_sum[name]) / len(steps) if len(trace.allocations) else None,
            input_shapes=tuple(shapes[trace.names[name]]),
        )
        for name in np.flatnonzero(calls).tolist()
    ]
    by = SORTS[sort or ("self_device" if self_device_sum.any() else "self_host")]
    table.sort(key=lambda operator: (-by(operator), -operator.self_host_ms_per_step))
    return tuple(table[:top])


def self_time(recording: Recording) -> Ints:
    """Host time of each operator without its child operators, in nanoseconds."""
    operators, parent = recording.trace.operators, recording.nesting.parent
    child = np.flatnonzero(parent >= 0)
    # after a clock jump a child may end after its parent: only the part inside counts
    inside = np.minimum(operators.end[child], operators.end[parent[child]]) - operators.start[child]
    return operators.end - operators.start - summed(parent[child], inside, len(operators))


def _shapes(recording: Recording, device: Ints, counted: NDArray[np.bool_]) -> dict[str, list[str]]:
    """The shapes of each operator that took the most device time."""
    trace, operators = recording.trace, recording.trace.operators
    key = operators.name[counted] * len(trace.signatures) + operators.signature[counted]
    keys, pair = np.unique(key, return_inverse=True)
    names, signatures = np.divmod(keys, len(trace.signatures))
    longest = np.lexsort((-np.bincount(pair, device[counted] + 1.0), names))
    shapes: dict[str, list[str]] = {}
    for name, signature in zip(names[longest].tolist(), signatures[longest].tolist(), strict=True):
        texts = shapes.setdefault(trace.names[name], [])
        text = trace.signatures[signature].dims[: 4 * _SHAPES_LENGTH].decode(errors="replace")[:_SHAPES_LENGTH]
        if text and text not in texts and len(texts) < _SHAPES_SHOWN:
            texts.append(text)
    return shapes


ENGINE: Final = "autograd::engine::evaluate_function"
_COMPILED: Final = re.compile("CompiledFunctionBackward")
# Autograd nodes whose gradients are products.
_OF_PRODUCTS: Final = re.compile(r"(?:Mm|Addmm|Bmm|Baddbmm|\w*Convolution\w*|\w*Attention\w*)Backward\d*")


def recomputed(recording: Recording, calls: Ints) -> NDArray[np.bool_] | None:
    """Mask of the operators in the backward pass that recompute the forward pass; the others compute gradients.

    In a backward pass autograd records only recomputation, and gives it sequence numbers. A recomputed call has the
    shapes and memory layout of one in the forward pass, and may lie in an operator that is recorded as a whole. The
    answer is unknown

    - if a recorded call is unlike all of the forward pass, or is called by the node of a product: these may be
      gradients, with `create_graph=True`;
    - if a call is like one of the forward pass but not recorded, beside others that are (a part of a checkpoint without
      gradients) or in a compiled backward pass, which records none;
    - if the trace does not show autograd's engine, as with compiled autograd.
    """
    trace, operators, nesting = recording.trace, recording.trace.operators, recording.nesting
    engine = named(trace, operators, lambda name: name.startswith(ENGINE))
    recorded = operators.sequence >= 0
    if not engine.any():
        return None if recorded.any() else np.zeros(len(calls), bool)
    # autograd nodes have the sequence numbers of their forward operators
    nodes = {name.removeprefix(f"{ENGINE}: ") for name in trace.names if name.startswith(ENGINE)}
    recorded &= ~engine & ~named(trace, operators, nodes.__contains__)
    node = nesting.innermost(engine)[calls]
    in_backward = node >= 0
    numbered = in_backward & (nesting.innermost(recorded)[calls] > node)
    compiled = in_backward & (nesting.innermost(named(trace, operators, _COMPILED))[calls] >= 0)
    form = _forms(operators.name[calls], operators.signature[calls], trace.signatures)
    like_forward = np.isin(form, form[~in_backward])
    beside_numbered = np.isin(node, node[numbered])
    called_by_node = np.append(named(trace, operators, _OF_PRODUCTS), False)[nesting.parent[calls]]
    unclear = numbered & (~like_forward | called_by_node)
    unclear |= in_backward & ~numbered & like_forward & (compiled | beside_numbered)
    return None if unclear.any() else numbered


def _forms(name: Ints, signature: Ints, signatures: Sequence[Signature]) -> Ints:
    """A number for each call, equal for calls of one operator with inputs of the same shapes and layout."""
    numbers: dict[tuple[bytes, bytes], int] = {}
    layouts = [numbers.setdefault((each.dims, each.strides), len(numbers)) for each in signatures]
    return name * max(len(numbers), 1) + np.array(layouts, np.int64)[signature]


_NO_SHAPES: Final = "the trace has no input shapes (record_shapes=True records them), so FLOPs cannot be counted"
_NO_PRODUCTS: Final = "no matrix product, convolution or attention ran on the GPU in the recorded steps"
_TF32: Final = "tf32"
# The latter is CUTLASS's name in cuBLAS for 32-bit floats on tensor cores, which compute in TF32.
IN_TF32: Final = re.compile(r"tf32|tensorop_s1688gemm")


def flop_rate(recording: Recording, busy_ns: int, step_ns: int) -> tuple[Flops | None, str]:
    """Count the FLOPs of the outermost countable operators that launched GPU work in the recorded steps."""
    trace, links = recording.trace, recording.links
    kinds = [KINDS.index(kind) for kind in PRODUCT_KINDS]
    work = np.flatnonzero(np.isin(recording.kind, kinds) & (recording.step >= 0))
    if not len(work):
        return None, _NO_PRODUCTS
    if not any(signature.dims for signature in trace.signatures):
        return None, _NO_SHAPES
    countable = np.isin(trace.operators.name, [row for row, name in enumerate(trace.names) if name in COUNTED])
    owner = np.append(recording.nesting.outermost(countable), -1)
    duration = (trace.gpu.end - trace.gpu.start)[work]
    launcher = links.operator[work]
    under = recording.nesting.sums(summed(launcher, duration, len(trace.operators) + 1)[:-1])
    calls = np.flatnonzero((owner[:-1] == np.arange(len(trace.operators))) & (under > 0))
    again = recomputed(recording, calls)
    extra = by_optimizer(trace, recording.nesting, trace.operators.start[calls], calls)
    extra |= False if again is None else again
    beyond_model = counted_ns = 0
    uncounted: list[int] = []
    by_type: Counter[str] = Counter()
    for row, flops, is_extra in zip(calls.tolist(), _count(recording, calls, owner[:-1]), extra.tolist(), strict=True):
        if flops is None:
            uncounted.append(row)
        else:
            by_type[flops.dtype] += flops.flops
            beyond_model += flops.flops if is_extra else 0
            counted_ns += int(under[row])
    total = by_type.total()
    if not total:
        return None, "no operator that launched a matrix product, convolution or attention could be counted"
    dtype = by_type.most_common(1)[0][0]
    if dtype == "fp32" and any(IN_TF32.search(trace.names[name]) for name in np.unique(trace.gpu.name[work]).tolist()):
        dtype = _TF32
    peak_of_device = find_peak(trace.device, memory_bytes=trace.memory_bytes, sms=trace.multiprocessors)
    peaks = peak_of_device.flops if peak_of_device else {}
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
    innermost = np.flatnonzero(same & (recording.nesting.sums(same.astype(np.int64)) == 1))
    inputs = operators.name * len(trace.signatures) + operators.signature

    @cache
    def flops_of(inputs: int) -> OperatorFlops | None:
        name, signature = divmod(inputs, len(trace.signatures))
        return _operator_flops(trace.names[name], trace.signatures[signature])

    parts: dict[int, list[OperatorFlops | None]] = {}
    for call, inputs_of_part in zip(owner[innermost].tolist(), inputs[innermost].tolist(), strict=True):
        parts.setdefault(call, []).append(flops_of(inputs_of_part))
    of_calls = zip(calls.tolist(), inputs[calls].tolist(), strict=True)
    return [_summed(parts[call]) or flops_of(inputs_of_call) for call, inputs_of_call in of_calls]


def _summed(parts: list[OperatorFlops | None]) -> OperatorFlops | None:
    """The sum of several operators' FLOPs; None if one of them could not be counted."""
    counted = [part for part in parts if part is not None]
    return counted[0]._replace(flops=sum(part.flops for part in counted)) if len(counted) == len(parts) else None


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

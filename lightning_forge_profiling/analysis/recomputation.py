"""Operators that the backward pass computes again, as with activation checkpointing."""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import named
from lightning_forge_profiling.analysis.nesting import innermost_marked, outermost_marked
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints, Signature

_ENGINE: Final = "autograd::engine::evaluate_function"
_COMPILED: Final = re.compile("CompiledFunctionBackward")
_OF_PRODUCTS: Final = re.compile(r"(?:Mm|Addmm|Bmm|Baddbmm|\w*Convolution\w*|\w*Attention\w*)Backward\d*")
"""Autograd nodes whose gradients are products."""


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
    trace, operators, parent = recording.trace, recording.trace.operators, recording.operator_parent
    engine = named(trace, operators, lambda name: name.startswith(_ENGINE))
    recorded = operators.sequence >= 0
    if not engine.any():
        return None if recorded.any() else np.zeros(len(calls), bool)
    # autograd nodes have the sequence numbers of their forward operators
    nodes = {name.removeprefix(f"{_ENGINE}: ") for name in trace.names if name.startswith(_ENGINE)}
    recorded &= ~engine & ~named(trace, operators, nodes.__contains__)
    node = innermost_marked(parent, engine)[calls]
    in_backward = node >= 0
    numbered = in_backward & (innermost_marked(parent, recorded)[calls] > node)
    compiled = in_backward & (outermost_marked(parent, named(trace, operators, _COMPILED))[calls] >= 0)
    form = _forms(operators.name[calls], operators.signature[calls], trace.signatures)
    like_forward = np.isin(form, form[~in_backward])
    beside_numbered = np.isin(node, node[numbered])
    called_by_node = np.append(named(trace, operators, _OF_PRODUCTS), False)[parent[calls]]
    unclear = numbered & (~like_forward | called_by_node)
    unclear |= in_backward & ~numbered & like_forward & (compiled | beside_numbered)
    return None if unclear.any() else numbered


def _forms(name: Ints, signature: Ints, signatures: Sequence[Signature]) -> Ints:
    """A number for each call, equal for calls of one operator with inputs of the same shapes and layout."""
    numbers: dict[tuple[bytes, bytes], int] = {}
    layouts = [numbers.setdefault((each.dims, each.strides), len(numbers)) for each in signatures]
    return name * max(len(numbers), 1) + np.array(layouts, np.int64)[signature]

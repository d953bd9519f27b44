"""What is computed a second time in the backward pass, as activation checkpointing does."""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import named
from lightning_forge_profiling.analysis.nesting import innermost_marked, outermost_marked
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints, Signature

__all__ = ["recomputed"]

_ENGINE: Final = "autograd::engine::evaluate_function"
_COMPILED: Final = re.compile("CompiledFunctionBackward")
_OF_PRODUCTS: Final = re.compile(r"(?:Mm|Addmm|Bmm|Baddbmm|\w*Convolution\w*|\w*Attention\w*)Backward\d*")
"""Autograd's nodes whose gradients are products."""


def recomputed(recording: Recording, calls: Ints) -> NDArray[np.bool_] | None:
    """Which operators the backward pass calls to compute again what the forward pass has computed.

    Autograd numbers what it records. In a backward pass it records only what is computed again, and there a call is
    like one of the forward pass, in shapes and memory layout; it may lie in an operator that is recorded as a whole.
    The rest are gradients. It cannot be told

    - where what is recorded is like nothing in the forward pass, or what the node of a product calls itself: gradients,
      with `create_graph=True`;
    - of a call that is like the forward pass, but not recorded: beside others that are, as a part without gradients in
      a checkpoint is, or in a compiled backward pass, where nothing is;
    - where autograd's engine does not show, as with compiled autograd.

    Args:
        recording: the recording.
        calls: positions of operators.

    Returns:
        For each of them whether it computes again; None where that cannot be told.
    """
    trace, operators, parent = recording.trace, recording.trace.operators, recording.operator_parent
    engine = named(trace, operators, lambda name: name.startswith(_ENGINE))
    recorded = operators.sequence >= 0
    if not engine.any():
        return None if recorded.any() else np.zeros(len(calls), bool)
    # autograd's nodes carry the numbers of what they are the gradients of
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
    """A number for each call, the same for calls of one operator on inputs of the same shapes and layout."""
    numbers: dict[tuple[bytes, bytes], int] = {}
    layouts = [numbers.setdefault((each.dims, each.strides), len(numbers)) for each in signatures]
    return name * max(len(numbers), 1) + np.array(layouts, np.int64)[signature]

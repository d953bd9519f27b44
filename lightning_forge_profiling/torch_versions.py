"""What PyTorch calls differently in the versions that this package runs with. Imports no torch: it is loaded or not."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _eval_frame() -> Any:
    return sys.modules.get("torch._C._dynamo.eval_frame")


def hide_from_dynamo(code: CodeType, *, callees: bool) -> bool:
    """Let Dynamo pass over code, as `torch.compiler.disable` does without importing Dynamo, which takes seconds.

    Args:
        code: what it is not to compile where it runs beside compiled code.
        callees: whether it is to pass over what that code calls, too; up to torch 2.6 see `outside_dynamo`.

    Returns:
        Whether torch is loaded, without which there is nothing to hide from.
    """
    dynamo = _eval_frame()
    if dynamo is None:
        return False
    if hasattr(dynamo, "_FrameAction"):  # from torch 2.7 on
        skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT  # noqa: SLF001
        strategy = dynamo._FrameExecStrategy(skip, skip if callees else default)  # noqa: SLF001
        dynamo.set_code_exec_strategy(code, strategy)
    else:
        dynamo.skip_code(code)
    return True


def outside_dynamo(function: _Function) -> _Function:
    """The function, which where Dynamo cannot be told to pass over callees is called while Dynamo is off."""
    dynamo = _eval_frame()
    if dynamo is None or hasattr(dynamo, "_FrameAction"):
        return function

    def called(*arguments: Any) -> Any:
        before = dynamo.set_eval_frame(None)
        try:
            return function(*arguments)
        finally:
            dynamo.set_eval_frame(before)

    dynamo.skip_code(called.__code__)
    return called  # type: ignore[return-value]


def float32_products(of: Any) -> str:
    """How a part of `torch.backends` multiplies float32, as `"ieee"` or `"tf32"`.

    Args:
        of: `torch.backends.cuda.matmul`, `torch.backends.cudnn`, or from torch 2.9 on `cudnn.conv` or `cudnn.rnn`.
    """
    try:
        return str(of.fp32_precision)  # readable whichever of the two interfaces has set it; the older one may raise
    except AttributeError:  # before torch 2.9
        return "tf32" if of.allow_tf32 else "ieee"

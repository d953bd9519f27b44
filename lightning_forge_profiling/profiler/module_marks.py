"""Marks each call of a module in the recorded steps that have operators, so that a trace says which module work is of.

Hooks on live modules would cost 5 to 30 % of a host-bound step and make `torch.compile` compile again. So
`torch.nn.Module.__call__` is replaced, for those steps alone, which no compiled code looks up.
"""

import functools
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from torch import nn
from torch._C._profiler import _RecordFunctionFast

from lightning_forge_profiling.names import MODULE_MARK
from lightning_forge_profiling.torch_versions import hide_from_dynamo

_WRAPPERS: Final = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


class ModuleMarks:
    """Begins a range of the recording for each call of a module in another one.

    Args:
        module: the one whose modules are marked, by their paths in it, and which is not kept alive; None marks nothing.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = (lambda: None) if module is None else weakref.ref(module)
        self._restore: Callable[..., None] | None = None

    def begin(self) -> None:
        """Mark the calls from now on."""
        module = self._module()
        if self._restore is not None or module is None:
            return
        called: dict[str, nn.Module] = {}
        marks = dict[int, str]()
        for name, each in module.named_modules():
            if path := _WRAPPERS.sub("", name).removeprefix("."):
                outermost = called.setdefault(path, each)  # a wrapper is called, and what it wraps has the class
                marks[id(outermost)] = f"{MODULE_MARK}{path} ({type(each).__name__})".replace('"', "'")
        original = nn.Module.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            mark = marks.get(id(module))
            if mark is None:
                return original(module, *args, **kwargs)
            with _RecordFunctionFast(mark):
                return original(module, *args, **kwargs)

        def restore(_: Any = None) -> None:
            marks.clear()
            if nn.Module.__call__ is call:  # else somebody has replaced it since, and calls ours
                nn.Module.__call__ = original  # type: ignore[method-assign]

        # beside compiled code it would compile it
        hide_from_dynamo(call.__code__, callees=False)  # type: ignore[attr-defined]
        nn.Module.__call__ = call  # type: ignore[method-assign]
        self._restore = restore
        if (
            dynamo := sys.modules.get("torch._dynamo.callback")
        ) is not None:  # what it compiles now must not have marks
            dynamo.callback_handler.register_start_callback(restore)

    def end(self) -> None:
        """Mark no more calls."""
        restore, self._restore = self._restore, None
        if restore is None:
            return
        restore()
        if (dynamo := sys.modules.get("torch._dynamo.callback")) is not None:
            with suppress(ValueError):  # it was not registered, or somebody else has cleared the list
                dynamo.callback_handler.start_callbacks.remove(restore)

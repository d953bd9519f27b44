"""What `torch.compile` compiled again, in words."""

import re
from pathlib import PurePath
from typing import Final

from lightning_forge_profiling.diagnosis.rule import in_s
from lightning_forge_profiling.schema import Recompilation

_CHANGED: Final = re.compile(r"GLOBAL_STATE changed: (.*)")


def recompiled(one: Recompilation, *, timed: bool = True) -> str:
    """What was compiled again, where, how often, and why."""
    times = "once" if one.times == 1 else f"{one.times} times"
    times = f"{times} in {in_s(one.seconds)}" if timed else times
    where = f"{PurePath(one.file).name}:{one.line}"
    if one.kind == "graph break":
        return f"{one.function}, whose graph ends at {where}: what follows was compiled {times}"
    name = f"{one.function} ({where})" if one.file else one.function
    if one.kind == "recorded again":
        why = f", {_last(one)}because {one.reason}" if one.reason else ""
        return f"{name}, whose CUDA graph was recorded again {times}{why}"
    again = f"compiled again {times}, {_last(one)}because {_why(one.reason)}"
    if not one.given_up:
        return f"{name}, {again}"
    until = again if one.times else f"not compiled again, although {_why(one.reason)}"
    return f"{name}, which reached recompile_limit and runs uncompiled where no version fits: {until}"


def _last(one: Recompilation) -> str:
    return "" if one.times == 1 else "the last time "


def _why(guard: str) -> str:
    """The guard that failed, as a reason."""
    if changed := _CHANGED.fullmatch(guard):
        return f"{changed[1]} changed"
    return guard if "mismatch" in guard else f"it was no longer true that {guard}"

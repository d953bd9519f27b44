"""What `torch.compile` compiled again, in words."""

from pathlib import PurePath

from lightning_forge_profiling.diagnosis.rule import in_s
from lightning_forge_profiling.results.run import Recompilation


def recompiled(one: Recompilation, *, timed: bool = True) -> str:
    """What was compiled again, where, how often, and why."""
    times = "once" if one.times == 1 else f"{one.times} times"
    times = f"{times} in {in_s(one.seconds)}" if timed else times
    where = f"{PurePath(one.file).name}:{one.line}"
    if one.kind == "graph break":
        return f"{one.function}, whose graph ends at {where}: what follows was compiled {times}"
    name = f"{one.function} ({where})" if one.file else one.function
    if one.kind == "recorded again":
        why = f", the last time because {one.reason}" if one.reason else ""
        return f"{name}, whose CUDA graph was recorded again {times}{why}"
    why = one.reason if "mismatch" in one.reason else f"it was no longer true that {one.reason}"
    given_up = "; recompile_limit is reached, so that it runs uncompiled where no version fits" if one.given_up else ""
    return f"{name}, compiled again {times}, the last time because {why}{given_up}"

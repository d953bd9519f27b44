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
    why = one.reason if "mismatch" in one.reason else f"it was no longer true that {one.reason}"
    return f"{one.function} ({where}), compiled again {times}, the last time because {why}"

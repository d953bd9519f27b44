"""Python functions of the recorded steps, from stacks that `with_stack` recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
    """One function in the tree of calls, with all of its calls from the same stack.

    Attributes:
        caller: position of the calling function in `PythonFunctions.tree`; -1 for the outermost.
        name: the function; of a built-in one without the address of its object.
        where: its file and first line, `train.py:26`; "" for built-in functions and for modules.
        kind: `user`, `library` (Python, torch, Lightning, installed packages) or `profiler` (this package).
        ms_per_step: time in it and in what it calls.
        self_ms_per_step: time in it alone. What its callees in the tree leave beside that is in functions left out.
        calls_per_step: number of calls.
    """

    caller: int
    name: str
    where: str
    kind: Literal["user", "library", "profiler"]
    ms_per_step: float
    self_ms_per_step: float
    calls_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function of the user, from all stacks.

    Attributes:
        where: the function, its file and first line, as `train.py:26 call_reward_server`.
        ms_per_step: time in it and in what it calls.
        own_ms_per_step: the part outside other functions of the user, library functions that it calls included.
        calls_per_step: number of calls.
    """

    where: str
    ms_per_step: float
    own_ms_per_step: float
    calls_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentIn:
    """Time of one kind, and the innermost function of the user that holds at least half of it.

    Attributes:
        where: the function, its file and first line.
        ms_per_step: the part in it and in what it calls.
        of_ms_per_step: all time of the kind.
    """

    where: str
    ms_per_step: float
    of_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFunctions:
    """Python functions on the thread that marks the steps.

    Recording a stack adds time to each call, so functions that make many calls are overstated.

    Attributes:
        tree: calls by stack, callers first, from the innermost function that contains whole steps; at most 200, the
            longest.
        users: functions of the user, by their own time; at most ten.
        spent: by kind of time the function that holds it: `data` (in the data loader), `python` (without a GPU, outside
            operators, data loader and optimizer), `forward` and `backward` (the part of `python` in them), `launching`
            (the GPU waits for Python and launches). Kinds without such a function are left out.
    """

    tree: tuple[PythonCall, ...]
    users: tuple[UserFunction, ...] = ()
    spent: Mapping[str, SpentIn] = field(default_factory=dict)

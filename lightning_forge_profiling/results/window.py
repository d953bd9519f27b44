"""A window of steps that a live run is asked for, and what its ranks agree on."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

MOST_STEPS: Final = 100
"""Most steps of a window that is asked for: a trace grows with each."""

_Whole = Annotated[int, Meta(ge=0, le=10**15)]
_Steps = Annotated[int, Meta(ge=1, le=MOST_STEPS)]
_BothParts = Annotated[int, Meta(ge=1, le=2 * MOST_STEPS)]
MOST_TEXT: Final = 500
"""Most characters of what a rank says of a window."""

_Text = Annotated[str, Meta(max_length=MOST_TEXT)]
_Id = Annotated[str, Meta(max_length=100)]
Ranks = Literal["all", "slow"]
PlanState = Literal["planned", "agreed", "recorded", "refused"]


class WindowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a live run is asked to record.

    Attributes:
        schema_version: version of this layout.
        id: names the request.
        steps: how many steps.
        ranks: `all`, or `slow` for the straggler, a median rank and rank 0.
        why: who asks, or what was noticed; "" for a person.
    """

    schema_version: Literal[1] = 1
    id: _Id
    steps: _Steps = 3
    ranks: Ranks = "all"
    why: _Text = ""


class WindowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others of the latest window that was asked for.

    Attributes:
        schema_version: version of this layout.
        run: id of the run.
        number: number of the plan, counted from 1; a plan that some rank could not keep is followed by another one.
        request: id of the request.
        state: `planned` until every rank has said that it can keep it, then `agreed`; `recorded` when the ranks are
            past it; `refused` if there will be no window.
        start: the first recorded step.
        steps: how many steps.
        light: how many of them, the first, are recorded without operators.
        ranks: the global ranks that record; none for all.
        folder: the folder of its traces, on the machine of rank 0; "" before it is agreed.
        analyzed: whether a report will be written beside them.
        text: why it was refused, or what else there is to say.
    """

    schema_version: Literal[1] = 1
    run: _Id
    number: _Whole
    request: _Id
    state: PlanState
    start: _Whole = 0
    steps: _BothParts = 3
    light: _Whole = 0
    ranks: tuple[_Whole, ...] = ()
    folder: Annotated[str, Meta(max_length=4096)] = ""
    analyzed: bool = True
    text: _Text = ""


class WindowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of the latest plan that it has read.

    Attributes:
        number: number of the plan; 0 before the first.
        keeps: whether it can begin the recording in time.
        text: why not, or why it did not record.
    """

    number: _Whole = 0
    keeps: bool = False
    text: _Text = ""

"""What a picture of a trace needs: lanes of spans, thinned out to a number that a page can hold."""

from dataclasses import dataclass

__all__ = ["Lane", "Timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of spans, in order of their start.

    Attributes:
        name: `host: regions`, `stream 7`, `communication`, ...
        group: `host`, `stream` or `comm`.
        start_us: when each span begins, in microseconds from the timeline's start.
        duration_us: how long it is.
        name_index: which of `Timeline.names` it is called.
        kind_index: which of `Timeline.kinds` it is.
    """

    name: str
    group: str
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    name_index: tuple[int, ...]
    kind_index: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The recorded window of one rank.

    Attributes:
        rank: its number.
        length_us: the whole window.
        steps: number, begin and end of each step's window on the GPU, in microseconds.
        left_out: begin and end of what lies in the windows and is no part of a step, as validation and checkpoints.
        names: what spans are called.
        kinds: what spans are: kernel kinds (`matmul`, ...), `region` for the host's.
        lanes: the rows, host first.
        omitted: how many spans were left out because there were too many; the shortest were.
    """

    rank: int
    length_us: float
    steps: tuple[tuple[int, float, float], ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    lanes: tuple[Lane, ...]
    omitted: int = 0
    left_out: tuple[tuple[float, float], ...] = ()

"""The timeline of a report: lanes of spans, thinned out to a number that a page can hold."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of spans, in order of their start.

    Attributes:
        name: `host: regions`, `stream 7`, `communication`, ...
        group: `host`, `path` for the critical path, `stream` or `comm`.
        start_us: when each span begins, in microseconds from the timeline's start.
        duration_us: duration of each span.
        name_index: position of its name in `Timeline.names`.
        kind_index: position of its kind in `Timeline.kinds`.
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
        rank: the global rank.
        length_us: length of the window.
        steps: number, begin and end of each step's window on the GPU, in microseconds.
        left_out: begin and end of time that belongs to no step, such as validation and checkpoints.
        names: names of spans.
        kinds: kinds of spans: kernel kinds (`matmul`, ...), `region` for those of the host.
        lanes: the rows, host first.
        omitted: number of spans left out, the shortest, because there were too many.
    """

    rank: int
    length_us: float
    steps: tuple[tuple[int, float, float], ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    lanes: tuple[Lane, ...]
    omitted: int = 0
    left_out: tuple[tuple[float, float], ...] = ()

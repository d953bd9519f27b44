"""The accounting once more, as plainly as it can be said: one byte for each nanosecond of a step, painted."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LAUNCHERS = ("cuda_runtime", "cuda_driver")
PAINT = ("comm", "memory", "other", "matmul")  # each over the ones before it: an instant counts to the last


@dataclass
class Span:
    """Nanoseconds; `launched` is None for what nobody is known to have launched, and for what runs on the host.

    `warm_up`: the work was launched before the recording began.
    """

    name: str
    start: int
    end: int
    category: str = ""
    launched: int | None = None
    warm_up: bool = False


@dataclass
class Account:
    """One step, in nanoseconds."""

    number: int
    start: int
    end: int
    length: int
    busy: int
    idle: int
    categories: dict[str, int]
    comm: int
    exposed: int


def account(events, category_of):
    """The steps of a trace's events; `category_of` tells of a kernel's name which of `PAINT` it is."""
    events = [event for event in events if event.get("ph") == "X"]
    launches = {e["args"]["correlation"]: _ns(e["ts"]) for e in events if "correlation" in _args(e, LAUNCHERS)}
    work = [span for event in events if (span := _work(event, launches, category_of))]
    marks = [_span(event) for event in events if event.get("cat") == "user_annotation"]
    steps = sorted((m for m in marks if m.name.startswith("ProfilerStep#")), key=lambda step: step.start)
    for step, following in pairwise(steps):
        step.end = following.start
    left_out = _not_of_steps(marks, steps, work)

    if all(span.launched is None for span in work):  # only the host tells where steps begin and end
        return [_paint(step, step.start, step.end, work, left_out) for step in steps]
    accounts, begin = [], None
    for step in steps:
        own = [span for span in work if span.launched is not None and step.start <= span.launched < step.end]
        if begin is None:
            begin = _first_begin(step, own, steps, work)
        end = max(begin, *(span.end for span in own)) if own else max(begin, step.end)
        if len(steps) == 1:  # which lasts as its mark
            end = max(end, step.end)
        accounts.append(_paint(step, begin, end, work, left_out))
        begin = end
    return accounts


def _first_begin(step, own, steps, work):
    """The first window begins with the step on the host, or once the GPU is done with what came before."""
    first = min([step.end, *(span.start for span in own)])
    others = [span for span in work if not _launched_in(steps, span)]
    return max([step.start, *(span.end for span in others if span.warm_up or span.start < first)])


def _launched_in(steps, span):
    return span.launched is not None and any(step.start <= span.launched < step.end for step in steps)


def _not_of_steps(marks, steps, work):
    """Where the GPU has reached a checkpoint or validation: the host is there, and all launched before is done."""
    found = []
    for mark in marks:
        if mark.name not in {"forge.validation", "forge.checkpoint", "forge.profiler"}:
            continue
        found.append((_reached(mark.start, work), _reached(mark.end, work)))
    return found


def _reached(time, work):
    return max([time, *(span.end for span in work if span.launched is not None and span.launched < time)])


def _paint(step, start, end, work, left_out):
    line, comm, other = np.zeros(end - start, np.int8), np.zeros(end - start, bool), np.zeros(end - start, bool)
    inside = [span for span in work if span.start < end and span.end > start]

    def place(begin, stop):
        return slice(max(begin - start, 0), max(stop - start, 0))

    for code, category in enumerate(PAINT, 1):
        for span in inside:
            if span.category == category:
                line[place(span.start, span.end)] = code
                comm[place(span.start, span.end)] |= category == "comm"
                other[place(span.start, span.end)] |= category not in {"comm", "memory"}
    for begin, stop in left_out:
        line[place(begin, stop)] = -1
    return Account(
        number=int(step.name.partition("#")[2]),
        start=start,
        end=end,
        length=int((line >= 0).sum()),
        busy=int((line > 0).sum()),
        idle=int((line == 0).sum()),
        categories={category: int((line == code).sum()) for code, category in enumerate(PAINT, 1)},
        comm=int((comm & (line > 0)).sum()),
        exposed=int((comm & ~other & (line > 0)).sum()),
    )


def _work(event, launches, category_of):
    args = _args(event, ("kernel", "gpu_memcpy", "gpu_memset"))
    if not args:
        return None
    span = _span(event)
    span.category = "memory" if event["cat"] != "kernel" else category_of(span.name)
    span.launched = launches.get(args.get("correlation"))
    span.warm_up = 0 < args.get("correlation", 0) < min((number for number in launches if number > 0), default=0)
    return span


def _span(event):
    start = _ns(event["ts"])
    return Span(event["name"], start, start + _ns(event["dur"]))


def _args(event, categories):
    return event.get("args", {}) if event.get("cat") in categories else {}


def _ns(us):
    return round(us * 1000)

"""`forge-profiling watch` and `trace`: a run, live, by its record; has it record some steps."""

import argparse
import io
import os
import secrets
import shutil
import sys
import time
from collections.abc import Container
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Final

from lightning_forge_profiling.cli.shared import Progress, say, wraps
from lightning_forge_profiling.cli.sources import find_record, warn_of_problems
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.names import REPORT_HTML, trace_name
from lightning_forge_profiling.record.files import read_plan, withdraw_request, write_request
from lightning_forge_profiling.record.reader import Follower, RecordError, RunRecord, read_run
from lightning_forge_profiling.report.live_view import print_frame, print_summary
from lightning_forge_profiling.report.ranks import ranks_of
from lightning_forge_profiling.report.run_status import status_of
from lightning_forge_profiling.report.screen import Screen, shown_width
from lightning_forge_profiling.schema import RunStatus, WindowPlan, WindowRequest

_EVERY_S: Final = 1.0  # from one frame to the next; the record's thread writes as often
_ANSWER_S: Final = 10.0  # rank 0 looks once a second
_LOOK_S: Final = 0.2
_ENDED_S: Final = 30.0  # for the reports, after the end of the run
_CLEAR: Final = "\x1b[H\x1b[J"  # the terminal, from its first row on


def watch(args: argparse.Namespace) -> int:
    """Show a run live."""
    follower, where = _run_to_watch(args.run_path, waits=args.wait)
    if args.once:
        record = follower.look()
        sys.stdout.write(_frame(record, where))
    else:
        record = _followed(follower, where)
        print_summary(record, where, time.time(), Screen(wrap=wraps()))
    warn_of_problems(record)
    return 0


def _run_to_watch(path: Path, *, waits: bool) -> tuple[Follower, str]:
    """The run to watch, and its name. With `waits`, wait for one that has not ended."""
    announced = False
    while True:
        try:
            folder, where = find_record(path)
            follower = Follower(folder)
            if not (waits and _ended(follower.look())):
                return follower, where
        except RecordError:
            if not waits:
                raise
        if not announced:
            say(f"waiting for a run in {path}")
            sys.stdout.flush()
        announced = True
        time.sleep(_EVERY_S)


def _ended(record: RunRecord) -> bool:
    return status_of(record, time.time()).ended


def _followed(follower: Follower, where: str) -> RunRecord:
    """Show a frame after the other until the run ends: in place on a terminal; else those with something new."""
    in_place, shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb", None
    while not _ended(record := follower.look()):
        ranks = ranks_of(record, time.time())
        newest = ranks.hang is not None, bool(ranks.where), [rank.lines[-1:] for rank in record.ranks]
        if in_place:
            sys.stdout.write(_CLEAR + _fitted(_frame(record, where)))
        elif newest != shown:
            sys.stdout.write(_frame(record, where) + "\n")
        sys.stdout.flush()
        shown = newest
        time.sleep(_EVERY_S)
    if in_place and shown is not None:
        sys.stdout.write(_CLEAR)
    return record


def _frame(record: RunRecord, where: str) -> str:
    """One frame, in the colours and characters that standard output supports."""
    encoding = sys.stdout.encoding
    text = io.TextIOWrapper(buffer := io.BytesIO(), encoding=encoding, errors="replace", newline="")
    print_frame(record, where, time.time(), Screen(text, wrap=wraps(), colours=Screen(sys.stdout).colours))
    text.flush()
    return buffer.getvalue().decode(encoding)


def _fitted(frame: str) -> str:
    """The lines of a frame that fit on the terminal, which wraps long ones, and a line that says how many do not."""
    columns, height = shutil.get_terminal_size()
    lines = frame.rstrip("\n").split("\n")
    rows = list(accumulate(max(1, ceil(shown_width(line) / columns)) for line in lines))
    if rows[-1] > height:
        kept = sum(row < height for row in rows)
        lines[kept:] = [f"… {len(lines) - kept} more lines"]
    return "\n".join(lines)


def trace(args: argparse.Namespace) -> int:
    """Ask a run for a window."""
    folder, where = find_record(args.run_path)
    if _ended(read_run(folder)):
        raise ForgeProfilingError(f"{where}: the run has ended, and only a live one can record steps")
    request = WindowRequest(id=secrets.token_hex(8), steps=args.steps, ranks=args.ranks)
    with Progress() as progress:
        plan = _answer(folder, request, progress)
        if plan is None:
            raise ForgeProfilingError(
                f"{where} did not answer within {_ANSWER_S:.0f} s. It is {_status(folder).text}. If it still runs, it "
                "records no steps on demand: for that it needs ThroughputCallback, which writes the record, with "
                "window='on-demand' or beside ForgeProfilerCallback"
            )
        progress("the ranks agree on a step, which is not beside a validation, a checkpoint or an epoch's end")
        plan = _plan(folder, plan, {"planned"})
    if plan.state == "planned":
        raise ForgeProfilingError(f"{where} recorded nothing: {_status(folder).text}")
    who = f"ranks {', '.join(map(str, plan.ranks))} record" if plan.ranks else "all ranks record"
    who, last = f"rank {plan.ranks[0]} records" if len(plan.ranks) == 1 else who, plan.start + plan.steps - 1
    say(f"{who} {f'step {last}' if plan.steps == 1 else f'steps {plan.start} to {last}'}: {plan.folder}")
    if args.wait:
        with Progress() as progress:
            progress("waiting for the steps and their report")
            _wait(folder, plan)
    return 0


def _answer(folder: Path, request: WindowRequest, progress: Progress) -> WindowPlan | None:
    """The first answer to a request, which may wait for windows that others asked for; None if there is none."""
    is_left, until_s = False, time.monotonic() + _ANSWER_S
    try:
        while time.monotonic() < until_s:
            is_left = is_left or write_request(folder, request)
            plan = read_plan(folder)
            if plan is not None and plan.request == request.id:
                return plan
            if plan is not None and plan.state in {"planned", "agreed"} and _runs(folder):
                progress(f"another window comes first: steps {plan.start} to {plan.start + plan.steps - 1}")
                until_s = time.monotonic() + _ANSWER_S
            time.sleep(_LOOK_S)
    finally:
        withdraw_request(folder, request)
    return None


def _wait(folder: Path, agreed: WindowPlan) -> None:
    """Wait for the traces and the report, and say where they are."""
    plan = _plan(folder, agreed, {"planned", "agreed"})
    if plan.text:
        say(plan.text)
    traces = Path(plan.folder)
    wanted = traces / (REPORT_HTML if plan.analyzed else trace_name(min(plan.ranks, default=0)))
    ended_s = None
    while not wanted.is_file():
        if ended_s is None and not _runs(folder):
            ended_s = time.monotonic()
        if ended_s is not None and time.monotonic() > ended_s + _ENDED_S:
            raise ForgeProfilingError(f"the run is {_status(folder).text}, and there is no {wanted}")
        time.sleep(_LOOK_S)
    say(f"{'report' if plan.analyzed else 'trace'}: {wanted}")


def _plan(folder: Path, plan: WindowPlan, passing: Container[str]) -> WindowPlan:
    """The plan once it is past these states, or as it was last if the run ends or goes on to a later request.

    Raises:
        ForgeProfilingError: the run refuses to record.
    """
    while plan.state in passing and _runs(folder):
        time.sleep(_LOOK_S)
        now = read_plan(folder)
        if now is not None and now.request != plan.request:
            break
        plan = now or plan
    if plan.state == "refused":
        raise ForgeProfilingError(f"no steps are recorded: {plan.text}")
    return plan


def _runs(folder: Path) -> bool:
    return _status(folder).outcome == "running"


def _status(folder: Path) -> RunStatus:
    return status_of(read_run(folder), time.time())

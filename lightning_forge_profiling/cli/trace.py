"""`forge-profiling trace`: has a live run record some of its steps."""

import argparse
import secrets
import time
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_forge_profiling.cli.shared import Progress, checked, find_record, say
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.names import REPORT_HTML, trace_name

if TYPE_CHECKING:
    from lightning_forge_profiling.report.run_status import RunStatus
    from lightning_forge_profiling.schema import WindowPlan, WindowRequest

_ANSWER_S: Final = 10.0  # rank 0 looks once a second
_LOOK_S: Final = 0.2
_ENDED_S: Final = 30.0  # for the reports, after the end of the run

_EXAMPLES = """\
examples:
  forge-profiling trace lightning_logs/ --wait              the run that is slow now; prints where the report is
  forge-profiling trace lightning_logs/version_3 --steps 10
  forge-profiling trace lightning_logs/ --ranks slow        the straggler, a median rank and rank 0
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "trace",
        help="have a live run record some of its steps, on all ranks the same",
        description="Have a live run of yours record some of its next steps with torch.profiler, the same on all\n"
        "ranks, from another terminal or node. It needs a record and ForgeProfilerCallback, or\n"
        "ThroughputCallback(window='on-demand'), or it was started with `forge-profiling run`.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=3,
        metavar="N",
        help="how many steps (default: 3), and on a GPU two more that explain them",
    )
    parser.add_argument("--ranks", choices=("all", "slow"), default="all", help="which ranks record (default: all)")
    parser.add_argument("--wait", action="store_true", help="wait for the traces and the report")
    parser.set_defaults(run=_run)


def _steps(text: str) -> int:
    from lightning_forge_profiling.schema import MOST_STEPS  # noqa: PLC0415  (loads msgspec)

    number = int(text) if text.isdecimal() else 0
    return checked(text, number, 1 <= number <= MOST_STEPS, f"a number of steps from 1 to {MOST_STEPS}")


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.schema import WindowRequest  # noqa: PLC0415  (loads msgspec)

    folder, where = find_record(args.run_path)
    if _status(folder).outcome in {"finished", "failed"}:
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
    _refuse(plan)
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


def _answer(folder: Path, request: "WindowRequest", progress: Progress) -> "WindowPlan | None":
    """The first answer to a request, which may wait for windows that others asked for; None if there is none."""
    from lightning_forge_profiling.record.windows import read_plan, withdraw_request, write_request  # noqa: PLC0415

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


def _wait(folder: Path, agreed: "WindowPlan") -> None:
    """Wait for the traces and the report, and say where they are."""
    plan = _plan(folder, agreed, {"planned", "agreed"})
    _refuse(plan)
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


def _plan(folder: Path, plan: "WindowPlan", passing: Container[str]) -> "WindowPlan":
    """The plan once it is past these states, or as it was last if the run ends or goes on to a later request."""
    from lightning_forge_profiling.record.windows import read_plan  # noqa: PLC0415

    while plan.state in passing and _runs(folder):
        time.sleep(_LOOK_S)
        now = read_plan(folder)
        if now is not None and now.request != plan.request:
            break
        plan = now or plan
    return plan


def _refuse(plan: "WindowPlan") -> None:
    if plan.state == "refused":
        raise ForgeProfilingError(f"no steps are recorded: {plan.text}")


def _runs(folder: Path) -> bool:
    return _status(folder).outcome == "running"


def _status(folder: Path) -> "RunStatus":
    from lightning_forge_profiling.record.reader import read_run  # noqa: PLC0415
    from lightning_forge_profiling.report.run_status import run_status  # noqa: PLC0415

    return run_status(read_run(folder), time.time())

"""`forge-profiling trace`: has a live run record some of its steps."""

import argparse
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_forge_profiling.cli.arguments import checked
from lightning_forge_profiling.cli.files import find_record
from lightning_forge_profiling.cli.output import say
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.names import REPORT_HTML, trace_name

if TYPE_CHECKING:
    from lightning_forge_profiling.results.window import WindowPlan

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
    parser.add_argument("--steps", type=_steps, default=3, metavar="N", help="how many steps (default: 3)")
    parser.add_argument("--ranks", choices=("all", "slow"), default="all", help="which ranks record (default: all)")
    parser.add_argument("--wait", action="store_true", help="wait for the traces and the report")
    parser.set_defaults(run=_run)


def _steps(text: str) -> int:
    from lightning_forge_profiling.results.window import MOST_STEPS  # noqa: PLC0415  (loads msgspec)

    number = int(text) if text.isdecimal() else 0
    return checked(text, number, 1 <= number <= MOST_STEPS, f"a number of steps from 1 to {MOST_STEPS}")


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.record.windows import take_request, write_request  # noqa: PLC0415  (loads msgspec)
    from lightning_forge_profiling.results.window import WindowRequest  # noqa: PLC0415

    folder, where = find_record(args.run_path)
    _refuse_ended(folder, where)
    request = WindowRequest(id=secrets.token_hex(8), steps=args.steps, ranks=args.ranks)
    write_request(folder, request)
    try:
        plan = _plan(folder, request.id, bool, limit_s=_ANSWER_S)
    finally:
        left = take_request(folder)
    if plan is None:
        what = "it records no steps on demand" if left is not None else "it ended"
        raise ForgeProfilingError(
            f"{where} did not answer within {_ANSWER_S:.0f} s: {what}. A run can be asked that has a record and "
            "ForgeProfilerCallback, or ThroughputCallback(window='on-demand')"
        )
    plan = _plan(folder, request.id, lambda plan: plan.state != "planned") or plan
    _refuse(plan)
    who = f"ranks {', '.join(map(str, plan.ranks))} record" if plan.ranks else "all ranks record"
    who, last = f"rank {plan.ranks[0]} records" if len(plan.ranks) == 1 else who, plan.start + plan.steps - 1
    say(f"{who} {f'step {last}' if plan.steps == 1 else f'steps {plan.start} to {last}'}: {plan.folder}")
    if args.wait:
        _wait(folder, plan)
    return 0


def _wait(folder: Path, agreed: "WindowPlan") -> None:
    """Wait for the traces and the report, and say where they are."""
    plan = _plan(folder, agreed.request, lambda plan: plan.state not in {"planned", "agreed"}) or agreed
    _refuse(plan)
    if plan.text:
        say(plan.text)
    traces = Path(plan.folder)
    wanted = traces / (REPORT_HTML if plan.analyzed else trace_name(min(plan.ranks, default=0)))
    ended_s = None
    while not wanted.is_file():
        if ended_s is None and not _lives(folder):
            ended_s = time.monotonic()
        if ended_s is not None and time.monotonic() > ended_s + _ENDED_S:
            raise ForgeProfilingError(f"the run has ended, and there is no {wanted}")
        time.sleep(_LOOK_S)
    say(f"{'report' if plan.analyzed else 'trace'}: {wanted}")


def _plan(
    folder: Path, request: str, is_enough: "Callable[[WindowPlan], bool]", limit_s: float | None = None
) -> "WindowPlan | None":
    """The run's answer to a request, once it is enough; None if none comes in time, or the run has ended."""
    from lightning_forge_profiling.record.windows import read_plan  # noqa: PLC0415

    began_s = time.monotonic()
    while limit_s is None or time.monotonic() < began_s + limit_s:
        plan = read_plan(folder)
        if plan is not None and plan.request == request and is_enough(plan):
            return plan
        if not _lives(folder):
            return None
        time.sleep(_LOOK_S)
    return None


def _refuse(plan: "WindowPlan") -> None:
    if plan.state == "refused":
        raise ForgeProfilingError(f"no steps are recorded: {plan.text}")


def _refuse_ended(folder: Path, where: str) -> None:
    if not _lives(folder):
        raise ForgeProfilingError(f"{where}: the run has ended, and only a live one can record steps")


def _lives(folder: Path) -> bool:
    from lightning_forge_profiling.record.reader import read_run  # noqa: PLC0415
    from lightning_forge_profiling.report.run_status import run_status  # noqa: PLC0415

    return run_status(read_run(folder), time.time()).outcome not in {"finished", "failed"}

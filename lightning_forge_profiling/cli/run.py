"""`forge-profiling run`: runs an unmodified training script with both callbacks in each of its Trainers."""

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lightning_forge_profiling import entry_point
from lightning_forge_profiling.cli.shared import at_least, share, step_range, warn
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import KINETO_LOG_LEVEL, OWN_KINETO_LEVEL, SWITCHED_OFF, switched_off

_QUIET_KINETO = "6"  # above its warnings of a machine without a GPU and its notes on start and stop

_EXAMPLES = """\
examples:
  forge-profiling run train.py --lr 0.1
  forge-profiling run --window 20:25 -m my_package.train --config config.yaml
  forge-profiling run -m torch.distributed.run --nproc-per-node 2 train.py     one line instead of torchrun
  torchrun --nproc-per-node 2 --no-python forge-profiling run train.py         the same
  srun forge-profiling run train.py
  forge-profiling run chemprop train --data-path x.csv                         a command of this environment

Options of this command come before the script; everything after it is passed to the script. The script replaces this
process, so exit code, signals, input and output are its own. The table at the end of a fit goes to standard error.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="profile a training script without changing it",
        usage="forge-profiling run [options] (SCRIPT | -m MODULE) [arguments ...]",
        description="Run a training script with ForgeProfilerCallback and ThroughputCallback in every Lightning\n"
        "Trainer that it builds, and in its loops that mark their steps. A callback of a kind that is\n"
        "already there is not added.",
        epilog=_EXAMPLES,
    )
    window = parser.add_mutually_exclusive_group()
    window.add_argument(
        "--window", type=step_range, metavar="A:B", help="record steps A to B-1 (default: six of a steady run)"
    )
    window.add_argument(
        "--no-window", action="store_true", help="record no steps, unless `forge-profiling trace` asks for some"
    )
    parser.add_argument(
        "--stacks", action="store_true", help="record Python functions too; slows the recorded steps, and those alone"
    )
    parser.add_argument(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="folder for the traces (default: profiler_traces in the logger's folder)",
    )
    parser.add_argument(
        "--warmup-steps", type=at_least(0), metavar="N", help="warm-up steps, which do not count (default: 10)"
    )
    parser.add_argument(
        "--overhead", type=share, metavar="SHARE", help="largest share of a step that timing may cost (default: 0.005)"
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        metavar="N",
        help="samples in a batch, where its tensors do not show it (default: by loader and batch)",
    )
    parser.add_argument(
        "--fits",
        choices=("first", "all"),
        default="first",
        help="record and print the first fit of each module in a process, by class and shapes, with a line on each "
        "further one (default), or all fits",
    )
    parser.add_argument("--log", action="store_true", help="write metrics and results to the script's own loggers too")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in `python -m MODULE`")
    parser.add_argument(
        "command",
        nargs=argparse.PARSER,  # at least one word, and everything after it, "--" included
        metavar="SCRIPT",
        help="the script, as in `python SCRIPT`, and its arguments",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    (script, *arguments), module = args.command, ["-m"] if args.module else []
    started = script if args.module else _file_of(script)
    _refuse_unless_installed()
    chosen = _chosen(args)
    environment = {**os.environ, entry_point.RUN_OPTIONS: json.dumps({**chosen, **_for_all(args)})}
    does = f"adding {' and '.join(_calls(chosen))} to every Trainer and marked loop of {script}"
    if switched_off():
        environment, does = dict(os.environ), f"{SWITCHED_OFF}: {script} runs without profiling"
    else:
        path = [str(Path(entry_point.__file__).with_name("at_start")), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if not args.no_window and KINETO_LOG_LEVEL not in environment:
            environment |= {KINETO_LOG_LEVEL: _QUIET_KINETO, OWN_KINETO_LEVEL: "1"}
    if entry_point.is_first_rank():
        warn(does)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(  # noqa: S606  (the script replaces this process)
        sys.executable, [sys.executable, *_interpreter_options(), *module, started, *arguments], environment
    )


def _for_all(args: argparse.Namespace) -> dict[str, Any]:
    """What concerns all callbacks, for `entry_point`."""
    batch_size = {} if args.batch_size is None else {"batch_size": args.batch_size}
    return {**batch_size, **({"log": True} if args.log else {}), **({"fits": "all"} if args.fits == "all" else {})}


def _chosen(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The given arguments of each callback."""
    start, end = args.window or (None, None)
    profiler = {
        "start_step": start,
        "end_step": end,
        "trace_dir": args.trace_dir and str(args.trace_dir.absolute()),
        "with_stack": args.stacks or None,
    }
    window = "on-demand" if args.no_window else None
    throughput = {"warmup_steps": args.warmup_steps, "overhead": args.overhead, "window": window}
    for option, given in (("--trace-dir", args.trace_dir), ("--stacks", args.stacks)):
        if args.no_window and given:
            raise ConfigurationError(f"{option} and --no-window exclude each other: without a window there is no trace")
    kinds = {"ThroughputCallback": throughput}
    if not args.no_window:
        kinds = {"ForgeProfilerCallback": profiler, **kinds}
    return {
        kind: {name: value for name, value in arguments.items() if value is not None}
        for kind, arguments in kinds.items()
    }


def _calls(chosen: Mapping[str, Mapping[str, object]]) -> list[str]:
    return [
        f"{kind}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        for kind, arguments in chosen.items()
    ]


def _interpreter_options() -> list[str]:
    """Options of this interpreter, such as the `-u` that `torchrun -m` sets."""
    unbuffered = ["-u"] if getattr(sys.stdout, "write_through", False) else []
    return [*subprocess._args_from_interpreter_flags(), *unbuffered]  # type: ignore[attr-defined]  # noqa: SLF001


def _file_of(script: str) -> str:
    """The script, or the console script of that name; refuses what cannot be read. Python reports what is no Python."""
    if not Path(script).exists():
        installed = Path(sys.executable).parent / script
        if entry_points(group="console_scripts", name=script) and installed.exists():
            return str(installed)
        raise ConfigurationError(
            f"{script}: no such file, and no command of this environment. Give the script without `python` before it, "
            "or a module after `-m`"
        )
    if not os.access(script, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), script)
    return script


def _refuse_unless_installed() -> None:
    """Refuse to run if Lightning cannot find the entry point of this package."""
    ours = f"{entry_point.__name__}:{entry_point.callbacks.__name__}"
    if all(entry.value != ours for entry in entry_points(group="lightning.pytorch.callbacks_factory")):
        raise ConfigurationError(
            "Lightning cannot find the callbacks: this package is importable but not installed, or an older version is "
            "installed. Run `pip install .` in its checkout"
        )

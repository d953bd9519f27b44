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
from lightning_forge_profiling.cli.shared import warn
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import SWITCHED_OFF, switched_off


def run(args: argparse.Namespace) -> int:
    """Run a script instead of this process."""
    (script, *arguments), module = args.script, ["-m"] if args.module else []
    started = script if args.module else script_file(script)
    refuse_unless_installed()
    chosen = _chosen(args)
    environment = {**os.environ, entry_point.RUN_OPTIONS: json.dumps(chosen)}
    does = f"adding {' and '.join(_calls(chosen))} to every Trainer and marked loop of {script}"
    if switched_off():
        environment, does = dict(os.environ), f"{SWITCHED_OFF}: {script} runs without profiling"
    else:
        environment["PYTHONPATH"] = path_at_start()
    if entry_point.is_first_rank():
        warn(does)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(  # noqa: S606  (the script replaces this process)
        sys.executable, [sys.executable, *_interpreter_options(), *module, started, *arguments], environment
    )


def path_at_start() -> str:
    """`PYTHONPATH` with which Python imports our lines before a script."""
    path = [str(Path(entry_point.__file__).with_name("at_start")), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, path))


def _chosen(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The given arguments of each callback."""
    if args.no_window:
        if args.stacks:
            raise ConfigurationError("--stacks and --no-window exclude each other: without a window there is no trace")
        return {"ThroughputCallback": {"window": "on-demand"}}
    window = {} if args.window is None else dict(zip(("start_step", "end_step"), args.window, strict=True))
    return {
        "ForgeProfilerCallback": {**window, **({"with_stack": True} if args.stacks else {})},
        "ThroughputCallback": {},
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


def script_file(script: str) -> str:
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


def refuse_unless_installed() -> None:
    """Refuse to run if Lightning cannot find the entry point of this package."""
    ours = f"{entry_point.__name__}:{entry_point.callbacks.__name__}"
    if all(entry.value != ours for entry in entry_points(group="lightning.pytorch.callbacks_factory")):
        raise ConfigurationError(
            "Lightning cannot find the callbacks: this package is importable but not installed, or an older version is "
            "installed. Run `pip install .` in its checkout"
        )

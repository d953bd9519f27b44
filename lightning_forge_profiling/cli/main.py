"""The command `forge-profiling`: which commands there are, and the one place that turns errors into exit codes.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | `compare`: a metric is worse by more than the limit |
| 2 | bad input: arguments, a file that is no trace, an output that cannot be written |
| 130 | interrupted |
| 141 | whoever read the output stopped reading |
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_forge_profiling.cli import analyze, anonymize, compare, crossover, schema, tensorboard, view
from lightning_forge_profiling.cli.output import warn
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.report.text import plain

__all__ = ["main"]

_BAD_INPUT = 2
_INTERRUPTED = 130  # 128 and the signal's number, as shells have it
_BROKEN_PIPE = 141

_EXAMPLES = """\
examples:
  forge-profiling analyze lightning_logs/version_0/profiler_traces
  forge-profiling analyze rank0.trace.json.gz --html report.html
  forge-profiling compare before/ after/ --fail-over 5
  forge-profiling view lightning_logs/version_0/profiler_traces
  forge-profiling crossover --html crossover.html

exit codes: 0 done, 1 a metric is worse than the limit, 2 bad input, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments, those of the process by default.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?", not a traceback
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would fail again when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        return _fail(f"{where}{exc.strerror or exc}")
    except ForgeProfilingError as exc:
        return _fail(str(exc))
    return code


def _fail(message: str) -> int:
    warn(message)
    return _BAD_INPUT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, which may be names of files."""
        super().error(plain(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="forge-profiling",
        description="Say what bounds a PyTorch run, from the traces that torch.profiler wrote, "
        "and from which size on a GPU is faster.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (analyze, compare, tensorboard, view, anonymize, crossover, schema):
        command.add_to(commands)
    return parser

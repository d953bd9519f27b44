"""Entry point of `forge-profiling`: its commands, and the exit code of each error, which `--help` lists.

From the moment that `run` starts the script, the exit code is the script's.
"""

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, TextIO

from lightning_forge_profiling.cli.commands import COMMANDS
from lightning_forge_profiling.cli.shared import warn
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.plain_text import plain

_VERSION = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])

_BAD_INPUT = 2
_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
_INTERRUPTED = 130  # 128 plus the signal's number, as in shells
_BROKEN_PIPE = 141

_EXIT_CODES = """\
Options: forge-profiling COMMAND --help. Exit codes: 0 success, 1 a metric is worse than the limit, 2 bad input,
3 undecided, 65 a file is cut off, 70 internal error, 130 interrupted, 141 output closed by its reader.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command."""
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (for the rest of the process)
    if sys.stdout is None:
        return _fail("standard output is closed: redirect it to a file or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?", not a traceback
    try:
        return _exit_code(argv)
    finally:
        for stream in (sys.stdout, sys.stderr):
            _discard_unwritten(stream)


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        return _fail(f"{where}{exc.strerror or exc}")
    except (ForgeProfilingError, MemoryError) as exc:
        return _fail(str(exc) or "out of memory", *getattr(exc, "__notes__", ()))
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        return _INTERNAL_ERROR
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser, commands = _parser()
    given = sys.argv[1:] if argv is None else argv
    try:
        if given and not given[0].startswith("-") and given[0] not in commands:
            parser.error(f"unknown command {given[0]!r}{_instead(given[0], commands)}")
        args, unknown = parser.parse_known_args(given)
        if unknown:
            args.parser.refuse(unknown[0])
        if "command" not in args:
            parser.print_help()
            return 0
        code: int = args.command.function()(args)
    except SystemExit as exc:  # argparse has printed the help or an error
        return int(exc.code or 0)
    return code


def _instead(given: str, commands: Sequence[str]) -> str:
    """What may have been meant by a word that is no command."""
    if given.endswith(".py"):
        return f": did you mean forge-profiling run {given}?"
    if os.path.exists(given):  # noqa: PTH110  (`--help` loads no pathlib)
        return f": did you mean forge-profiling show {given}?"
    return _did_you_mean(given, commands) or f", not one of {', '.join(commands)}"


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    alike = get_close_matches(given, known, n=1)
    return f": did you mean {alike[0]}?" if alike else ""


def _fail(*messages: str) -> int:
    with suppress(OSError):  # the exit code reports it too
        for message in messages:
            warn(message)
    return _BAD_INPUT


class _Parser(argparse.ArgumentParser):
    """The parser of the command line, and that of each command, whose help has no blank lines and no headings."""

    def __init__(self, *, usage: str, lines: Iterable[str], **options: Any) -> None:
        layout = partial(argparse.HelpFormatter, max_help_position=26)
        super().__init__(add_help=False, formatter_class=layout, **options)
        self.usage = f"{self.prog} {usage}"
        self._lines = lines
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Usage, what it does, arguments, and a last few lines."""
        layout = self._get_formatter()
        layout.add_usage(self.usage, (), ())
        layout.add_text(self.description)
        layout.start_section(None)
        for action in self._actions:
            layout.add_arguments(getattr(action, "_choices_actions", None) or [action])
        layout.end_section()
        return re.sub("\n\n+", "\n", layout.format_help()) + "".join(f"{line}\n" for line in self._lines)

    def error(self, message: str) -> NoReturn:
        """Print an error; arguments in it may be file names with terminal escapes."""
        super().error(plain(message))

    def refuse(self, argument: str) -> NoReturn:
        """Print an error on an argument that this parser does not have."""
        if argument.startswith("-"):
            known = (name for action in self._actions for name in action.option_strings)
            self.error(f"unknown option {argument!r}{_did_you_mean(argument.partition('=')[0], known)}")
        self.error(f"unexpected {argument!r}: give all files and folders together, before or after the options")


def _discard_unwritten(stream: TextIO) -> None:
    """Drop output that could not be written: Python would try again at exit, and return 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> tuple[_Parser, Sequence[str]]:
    """The parser, and the names of the commands."""
    parser = _Parser(
        prog="forge-profiling",
        usage="[--version] COMMAND [options] ...",
        description="Find what bounds a PyTorch run, from its record or from traces of torch.profiler.",
        lines=_EXIT_CODES.splitlines(),
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_VERSION}", help=argparse.SUPPRESS)
    parser.set_defaults(parser=parser)
    commands: argparse._SubParsersAction[_Parser] = parser.add_subparsers(prog=parser.prog, metavar="COMMAND")
    for each in COMMANDS:
        command = commands.add_parser(
            each.name,
            help=each.help,
            usage=each.usage,
            description=f"{each.help[0].upper()}{each.help[1:]}. {each.details}",
            lines=[f"  {parser.prog} {example}" for example in each.examples],
        )
        for add_to in each.arguments:
            add_to(command)
        command.set_defaults(command=each, parser=command)
    return parser, tuple(commands.choices)

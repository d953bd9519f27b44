"""`forge-profiling anonymize`: copies of traces that can be shared."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_forge_profiling.cli.files import copies_in, copy_each
from lightning_forge_profiling.cli.output import Progress, say, warn
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name, windows_by_rank

_EXAMPLES = """\
examples:
  forge-profiling anonymize lightning_logs/ --out share           then check the files in share/ and attach them
  forge-profiling anonymize rank0.trace.json.gz --out share
  forge-profiling analyze share --html share/report.html          a report of the copies alone

docs/sharing.md lists what is removed and what a copy still contains.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "anonymize",
        help="write copies of traces that can be shared",
        description="Write copies of traces without names of hosts and users, absolute paths, process ids,\n"
        "identifiers of GPUs, command lines and environment. Names of operators, kernels, modules,\n"
        "functions and regions stay.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a trace or a folder with one per rank")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to, created if needed")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    sources, notes = find_traces(args.path)
    args.out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        written, problems = write_copies(sources, args.out, progress)
    for remark in (*notes, *problems):
        warn(remark)
    say(copies_in(args.out, written))
    say("Names that you chose are kept (modules, functions, regions): check them before you share.")
    return 0


def write_copies(sources: Sequence[Path], folder: Path, progress: Callable[[str], None]) -> tuple[int, list[str]]:
    """Write an anonymous copy of each trace; returns how many there are, and what is missing from or in them."""
    from lightning_forge_profiling.kineto.anonymous_copy import write_anonymous_copy  # noqa: PLC0415  (start fast)

    problems: list[str] = []

    def write(source: Path, target: Path) -> None:
        problems.extend(f"{target.name}: {problem}" for problem in write_anonymous_copy(source, target))

    copies = [(source, folder / name) for source, name in _names(sources)]
    failures = copy_each(copies, write, progress)
    problems += (f"{target.name} is left out: {why.removeprefix(f'{source}: ')}" for source, target, why in failures)
    return len(copies) - len(failures), problems


def _names(sources: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Each trace and the name of its copy: rank or running number, and window; `windows_by_rank` groups them alike."""
    for number, windows in enumerate(windows_by_rank(sources), start=1):
        rank = rank_in_name(windows[0])
        for window, source in enumerate(windows, start=1):
            if rank is not None:
                yield source, f"rank{rank}{f'_{window}' if window > 1 else ''}.trace.json.gz"
            elif len(windows) > 1:
                yield source, f"trace{number}.{window:010}.pt.trace.json.gz"
            else:
                yield source, f"trace{number}.trace.json.gz"

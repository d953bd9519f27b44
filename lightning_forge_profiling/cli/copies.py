"""`forge-profiling anonymize` and `tensorboard`: copies of traces, to share and for TensorBoard's profiler plugin."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from shlex import quote

from lightning_forge_profiling.cli.shared import Progress, same_file, say, warn
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name, windows_by_rank
from lightning_forge_profiling.names import plugin_name

_ANONYMIZE_EXAMPLES = """\
examples:
  forge-profiling anonymize lightning_logs/ --out share           then check the files in share/ and attach them
  forge-profiling anonymize rank0.trace.json.gz --out share
  forge-profiling analyze share --html share/report.html          a report of the copies alone

docs/sharing.md lists what is removed and what a copy still contains.
"""


def add_anonymize_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "anonymize",
        help="write copies of traces that can be shared",
        description="Write copies of traces without names of hosts and users, absolute paths, process ids,\n"
        "identifiers of GPUs, command lines and environment. Names of operators, kernels, modules,\n"
        "functions and regions stay.",
        epilog=_ANONYMIZE_EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a trace or a folder with one per rank")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to, created if needed")
    parser.set_defaults(run=_anonymize)


def _anonymize(args: argparse.Namespace) -> int:
    sources, notes = find_traces(args.path)
    args.out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        written, problems = write_copies(sources, args.out, progress)
    for remark in (*notes, *problems):
        warn(remark)
    say(_copies_in(args.out, written))
    say("Names that you chose are kept (modules, functions, regions): check them before you share.")
    return 0


def write_copies(sources: Sequence[Path], folder: Path, progress: Callable[[str], None]) -> tuple[int, list[str]]:
    """Write an anonymous copy of each trace; returns how many there are, and what is missing from or in them."""
    from lightning_forge_profiling.kineto.copies import write_anonymous_copy  # noqa: PLC0415  (start fast)

    problems: list[str] = []

    def write(source: Path, target: Path) -> None:
        problems.extend(f"{target.name}: {problem}" for problem in write_anonymous_copy(source, target))

    copies = [(source, folder / name) for source, name in _names(sources)]
    failures = _copy_each(copies, write, progress)
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


_TENSORBOARD_EXAMPLES = """\
examples:
  forge-profiling tensorboard lightning_logs/version_0/profiler_traces --out plugin
  tensorboard --logdir plugin
"""


def add_tensorboard_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tensorboard",
        help="write copies that TensorBoard's profiler plugin reads correctly",
        description="Write copies of traces that TensorBoard's profiler plugin (torch-tb-profiler 0.4.3)\n"
        "reads correctly, named rankN.pt.trace.json.gz.",
        epilog=_TENSORBOARD_EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a trace or a folder with one per rank")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to, created if needed")
    parser.set_defaults(run=_tensorboard)


def _tensorboard(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.kineto.copies import write_plugin_copy  # noqa: PLC0415  (start fast)

    sources, notes = find_traces(args.path)
    copies = _targets(sources, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        failures = _copy_each(copies, write_plugin_copy, progress)
    for remark in (*notes, *(f"left out: {why}" for _, _, why in failures)):
        warn(remark)
    made = _copies_in(args.out, len(copies) - len(failures))
    say(f"{made}; to view them: tensorboard --logdir {quote(str(args.out))}    (tab PyTorch Profiler)")
    return 0


def _targets(sources: Sequence[Path], folder: Path) -> list[tuple[Path, Path]]:
    """Each trace and the path of its copy, by the rank in its name, else by its position."""
    named = [rank_in_name(source) for source in sources]
    ranks = [rank for rank in named if rank is not None]
    if len(set(ranks)) < len(sources):
        ranks = list(range(len(sources)))
    return [(source, folder / plugin_name(rank)) for source, rank in zip(sources, ranks, strict=True)]


def _copy_each(
    copies: Sequence[tuple[Path, Path]], write: Callable[[Path, Path], object], progress: Callable[[str], None]
) -> list[tuple[Path, Path, str]]:
    """Write a copy of each trace to its target; returns those that cannot be read. Raises if none can."""
    for (source, _), (_, target) in product(copies, copies):
        if same_file(source, target):
            raise ConfigurationError(f"{source}: the copy would replace the trace; give --out another folder")
    failures = []
    for source, target in copies:
        progress(f"copying {source}")
        try:
            write(source, target)
        except TraceError as exc:
            failures.append((source, target, str(exc)))
    if len(failures) == len(copies):
        raise TraceError.of([why for _, _, why in failures])
    return failures


def _copies_in(folder: Path, number: int) -> str:
    """How many copies there are, and where."""
    return f"{number} {'copy' if number == 1 else 'copies'} in {folder}"

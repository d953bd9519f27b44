"""`forge-profiling export`: copies of traces, for TensorBoard's plugin or to share."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from shlex import quote

from lightning_forge_profiling.cli.shared import Progress, say, warn
from lightning_forge_profiling.cli.sources import same_file
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.copies import write_anonymous_copy, write_plugin_copy
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name, windows_by_rank
from lightning_forge_profiling.names import plugin_name


def export(args: argparse.Namespace) -> int:
    """Write copies."""
    sources, notes = find_traces(args.path)
    shares = args.purpose == "sharing"
    copies = [(source, args.out / name) for source, name in (_shared_names if shares else _plugin_names)(sources)]
    for (source, _), (_, target) in product(copies, copies):
        if same_file(source, target):
            raise ConfigurationError(f"{source}: the copy would replace the trace; give --out another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    failures, problems = [], list[str]()
    with Progress() as progress:
        for source, target in copies:
            progress(f"copying {source}")
            try:
                write = write_anonymous_copy if shares else write_plugin_copy
                problems += (f"{target.name}: {problem}" for problem in write(source, target))
            except TraceError as exc:
                failures.append(str(exc))
    if len(failures) == len(copies):
        raise TraceError.of(failures)
    for remark in (*notes, *problems, *(f"left out: {why}" for why in failures)):
        warn(remark)
    number = len(copies) - len(failures)
    made = f"{number} {'copy' if number == 1 else 'copies'} in {args.out}"
    if shares:
        say(made)
        say("Names that you chose are kept (modules, functions, regions): check them before you share.")
    else:
        say(f"{made}; to view them: tensorboard --logdir {quote(str(args.out))}    (tab PyTorch Profiler)")
    return 0


def _shared_names(sources: Sequence[Path]) -> Iterator[tuple[Path, str]]:
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


def _plugin_names(sources: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Each trace and the name of its copy, by the rank in its name, else by its position."""
    named = [rank_in_name(source) for source in sources]
    ranks = [rank for rank in named if rank is not None]
    if len(set(ranks)) < len(sources):
        ranks = list(range(len(sources)))
    return zip(sources, map(plugin_name, ranks), strict=True)

"""`forge-profiling tensorboard`: copies of traces for TensorBoard's profiler plugin."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from lightning_forge_profiling.cli.files import copies_in, copy_each
from lightning_forge_profiling.cli.output import Progress, say, warn
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name
from lightning_forge_profiling.names import plugin_name

_EXAMPLES = """\
examples:
  forge-profiling tensorboard lightning_logs/version_0/profiler_traces --out plugin
  tensorboard --logdir plugin
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tensorboard",
        help="write copies that TensorBoard's profiler plugin reads correctly",
        description="Write copies of traces that TensorBoard's profiler plugin (torch-tb-profiler 0.4.3)\n"
        "reads correctly, named rankN.pt.trace.json.gz.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a trace or a folder with one per rank")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to, created if needed")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.kineto.tensorboard_copy import write_plugin_copy  # noqa: PLC0415  (start fast)

    sources, notes = find_traces(args.path)
    copies = _targets(sources, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        failures = copy_each(copies, write_plugin_copy, progress)
    for remark in (*notes, *(f"left out: {why}" for _, _, why in failures)):
        warn(remark)
    made = copies_in(args.out, len(copies) - len(failures))
    say(f"{made}; to view them: tensorboard --logdir {quote(str(args.out))}    (tab PyTorch Profiler)")
    return 0


def _targets(sources: Sequence[Path], folder: Path) -> list[tuple[Path, Path]]:
    """Each trace and the path of its copy, by the rank in its name, else by its position."""
    named = [rank_in_name(source) for source in sources]
    ranks = [rank for rank in named if rank is not None]
    if len(set(ranks)) < len(sources):
        ranks = list(range(len(sources)))
    return [(source, folder / plugin_name(rank)) for source, rank in zip(sources, ranks, strict=True)]

"""The commands of `forge-profiling`, in the order in which `--help` lists them, each with its arguments.

Imports nothing that takes time: the file that has what a command does is imported once that command is run.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Any, Final

from lightning_forge_profiling.cli import shared

# the keys of `analysis.operators.SORTS`, and dtypes of torch, repeated here so that `--help` loads neither
SORTS = ("self_device", "device", "self_host", "host", "calls", "memory")
DTYPES = ("float32", "bfloat16", "float16", "float64")

_TOP = 20  # kernels and operators in the reports by default
SIZES = "64:8192"
MAX_TIME_S = 1.0


Argument = Callable[[Any], object]  # adds itself to a parser, or to a group of one


def argument(*names: str, **options: Any) -> Argument:
    """An argument with options as of `argparse`."""
    return lambda parser: parser.add_argument(*names, **options)


def flag(name: str, help: str) -> Argument:  # noqa: A002  (argparse's name for it)
    """An option without a value."""
    return argument(name, action="store_true", help=help)


def option(named: str, type: Callable[[str], Any], help: str, **more: Any) -> Argument:  # noqa: A002
    """An option with a value, which has a name too: `--steps N`."""
    name, metavar = named.split()
    return argument(name, type=type, metavar=metavar, help=help, **more)


def path(help: str, type: Callable[[str], Any] = Path, name: str = "path", **options: Any) -> Argument:  # noqa: A002
    """A file or folder, or several."""
    return argument(name, type=type, help=help, **{"metavar": "PATH", **options})


def choice(named: str, choices: Sequence[str], help: str, **more: Any) -> Argument:  # noqa: A002
    """An option with one of some values, the first of them by default; `--sort KEY` names them in the help."""
    name, _, metavar = named.partition(" ")
    options = {"choices": choices, "metavar": metavar or None, "default": choices[0], "help": help, **more}
    return lambda parser: parser.add_argument(name, **options)


def either(*arguments: Argument) -> Argument:
    """Arguments of which one at most can be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for each in arguments:
            each(group)

    return add


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command."""

    name: str
    file: str = ""  # in this folder, with a function of the command's name; "" for a file of that name
    usage: str
    help: str  # one line, for the list of commands
    details: str = ""  # what its own help says beside that
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...]

    def function(self) -> Callable[[argparse.Namespace], int]:
        """The function that does what it says."""
        name = self.name.replace("-", "_") + "_" * iskeyword(self.name)
        function: Callable[[argparse.Namespace], int] = getattr(
            import_module(f"{__package__}.{self.file or name}"), name
        )
        return function


_RUN: Final = path("a record, its folder, or any folder above it", name="run_path", metavar="RUN")
_RECORDED: Final = shared.whole(1, 100, "a number of steps")  # at most `schema.MOST_STEPS`, which takes msgspec to load
_PATH: Final = path("a trace (JSON or gzip) or a folder with one per rank")
_SEVERAL: Final[dict[str, Any]] = {"action": "append", "default": []}

COMMANDS: Final = (
    Command(
        name="run",
        usage="[options] (SCRIPT | -m MODULE) [arguments ...]",
        help="profile a training script without changing it",
        details="Adds both callbacks to each Trainer, Fabric and marked loop; passes on all "
        "after SCRIPT. For other settings, add the callbacks to the script.",
        examples=("run train.py --lr 0.1", "run -m torch.distributed.run --nproc-per-node 2 train.py"),
        arguments=(
            either(
                option("--window A:B", shared.step_range, "record steps A to B-1 (default: six of a steady run)"),
                flag("--no-window", "record no steps, unless `forge-profiling trace` asks for some"),
            ),
            flag("--stacks", "record Python functions too; slows the recorded steps, and those alone"),
            argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in `python -m MODULE`"),
            argument(
                "script",
                nargs=argparse.PARSER,  # at least one word, and everything after it, "--" included
                metavar="SCRIPT",
                help=argparse.SUPPRESS,
            ),
        ),
    ),
    Command(
        name="try",
        usage="[options] (SCRIPT | -m MODULE) [arguments ...]",
        help="try the changes that the verdict on a training script names, and keep what makes it faster",
        details="Starts the unchanged script anew for each trial, with the change made from outside; passes on all "
        "after SCRIPT. Its loggers and checkpoints are off, and nothing after fit() is done.",
        examples=("try train.py --lr 0.1", "try --yes -m torch.distributed.run --nproc-per-node 2 train.py"),
        arguments=(
            option("--budget TIME", shared.duration, "try no further change after TIME, as 90s or 10m", default=600.0),
            option("--only A,B", shared.some_of(shared.CHANGES), f"only changes of {', '.join(shared.CHANGES)}"),
            flag("--all", "each change that applies, and not only those that a finding calls for"),
            flag("--again", "also what did not help before"),
            flag("--yes", "do not ask whether the script may be started so often"),
            option("--ablate FILE:LINE", str, "only measure what the call at that line costs, by leaving it out"),
            option("--out DIR", Path, "folder for the record of each trial", default=Path("forge_trials")),
            choice("--format FORMAT", ("text", "json", "github"), "text, json, or github (github-action-benchmark)"),
            argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in `python -m MODULE`"),
            argument("script", nargs=argparse.PARSER, metavar="SCRIPT", help=argparse.SUPPRESS),
        ),
    ),
    Command(
        name="watch",
        usage="[options] RUN",
        help="show a run live, from another terminal or node",
        details="Prints its table at the end. Ctrl-C ends it before.",
        examples=("watch lightning_logs/ --wait",),
        arguments=(
            _RUN,
            flag("--once", "print one frame and exit"),
            flag("--wait", "wait until there is a run that has not ended"),
        ),
    ),
    Command(
        name="trace",
        file="watch",
        usage="[options] RUN",
        help="have a live run record its next steps with torch.profiler, the same on all ranks",
        examples=("trace lightning_logs/ --steps 10 --wait",),
        arguments=(
            _RUN,
            option("--steps N", _RECORDED, "default: 3, and on a GPU two more that explain them", default=3),
            choice("--ranks", ("all", "slow"), "all (default), or the straggler, a median rank and rank 0"),
            flag("--wait", "wait for the traces and the report"),
        ),
    ),
    Command(
        name="show",
        usage="[options] PATH",
        help="print what bounds a run, and its numbers, from its record or its traces",
        examples=("show rank0.trace.json.gz --sort self_host --top 30",),
        arguments=(
            path("a record, a trace, or a folder: its newest record, or else its newest traces", str, nargs="?"),
            either(
                flag("--json", "print JSON and nothing else: of traces, summary.json"),
                flag("--markdown", "print Markdown and nothing else"),
                flag("--predictions", "what findings predicted beside what `try` measured, of the tries in a folder"),
                choice(
                    "--schema record",
                    ("summary", "record"),
                    "print what each field of summary.json means, or of a line of a record, as a JSON Schema",
                    nargs="?",
                    const="summary",
                    default=None,
                ),
            ),
            option("--rank N", shared.whole(0), "of traces: only this rank, without the measurements of the run"),
            option("--steps A:B", shared.step_range, "of traces: only steps A to B-1, without those measurements"),
            choice("--sort KEY", SORTS, f"of traces: also operators, by {', '.join(SORTS)}", default=None),
            option("--top N", shared.whole(1), f"of traces: number of kernels and operators (in JSON: {_TOP})"),
        ),
    ),
    Command(
        name="view",
        usage="[options] PATH",
        help="open a run or a trace as one web page, or write it; or open a trace in Perfetto",
        examples=("view lightning_logs/ --save run.html",),
        arguments=(
            path("a record, a trace, report.html, or a folder with any of them", str),
            either(
                option("--save FILE", Path, "write the page of the run or trace as it is now, and open nothing"),
                flag("--perfetto", "serve the trace itself, once and to this machine only, to https://ui.perfetto.dev"),
            ),
            flag("--no-browser", "print the address instead of opening it"),
        ),
    ),
    Command(
        name="compare",
        usage="[options] A B | A... --against B...",
        help="compare two runs, and fail if the second is slower",
        details="Compares their records, or traces, or results of benchmark().",
        examples=("compare main/ branch/ --fail-over 5",),
        arguments=(
            path("the baseline A and the run B: records, traces, or folders", nargs="+", name="paths", metavar="RUN"),
            option("--against B", Path, "repeats of B, where repeats of A came before", nargs="+"),
            option(
                "--fail-over PCT",
                shared.percentage,
                "exit with 1 if a metric is worse by more than PCT percent, with 3 if that is undecided",
            ),
            option(
                "--metric NAME",
                shared.metric,
                "of --fail-over; may be repeated (default: step and fit; a wrong name lists all)",
                action="append",
            ),
            option(
                "--scatter PCT",
                shared.percentage,
                "standard deviation between equal runs, where repeats do not measure it (default: 3 to 6)",
            ),
            flag("--anyway", "compare runs of different hardware, batch size, precision or world size"),
            choice(
                "--format FORMAT",
                ("text", "json", "github"),
                "text, json, or github: the second side's times as github-action-benchmark reads them",
            ),
            flag("--verbose", "all metrics, the ledger, findings, sensors, settings that differ"),
        ),
    ),
    Command(
        name="what-if",
        usage="[options] PATH",
        help="predict the step of a trace with something changed, and what would bound it then",
        details="Needs GPU work.",
        examples=("what-if lightning_logs/ --graphs forward,backward --drop aten::item",),
        arguments=(
            _PATH,
            option(
                "--drop NAME", str, "without this operator or named range and its work; may be repeated", **_SEVERAL
            ),
            choice(
                "--without WHAT",
                ("syncs", "reads", "allocations", "data", "pageable"),
                "syncs (waits for the GPU), reads (.item()), allocations, data, or pageable; may be repeated",
                **_SEVERAL,
            ),
            option(
                "--graphs A,B",
                shared.some_of(shared.GRAPHS),
                f"with the launches of these regions as one, as by CUDA graphs: {','.join(shared.GRAPHS)}",
                default=(),
            ),
            option(
                "--scale KIND=X",
                shared.scale,
                "kernels of a kind or category (matmul, comm, ...) take X times as long; may be repeated",
                **_SEVERAL,
            ),
            flag("--bf16", "in bf16 autocast instead of float32, by the GPU's peaks"),
            flag("--fuse", "what torch.compile fuses is one kernel"),
            flag("--overlap-comm", "nothing waits for communication"),
            flag("--equal-ranks", "each rank is as fast as the fastest"),
            option("--rank N", shared.whole(0), "only this rank"),
            option(
                "--live-ms MS", shared.positive, "the step without recording (default: that of summary.json beside it)"
            ),
            flag("--json", "print JSON and nothing else"),
        ),
    ),
    Command(
        name="export",
        usage="PATH --for {tensorboard,sharing} --out DIR",
        help="write copies of traces, for TensorBoard's profiler plugin or to share",
        examples=("export lightning_logs/ --for sharing --out share",),
        arguments=(
            _PATH,
            choice(
                "--for READER",
                ("tensorboard", "sharing"),
                "tensorboard; or sharing: no hosts, users, paths, ids, command lines, environment",
                dest="purpose",
                required=True,
            ),
            option("--out DIR", Path, "folder to write to, created if needed", required=True),
        ),
    ),
    Command(
        name="crossover",
        usage="[options]",
        help="find the sizes from which operations are faster on the GPU than on the CPU",
        details="Takes one to two minutes.",
        examples=("crossover --ops matmul --format json",),
        arguments=(
            option(
                "--ops A,B", shared.some_of(shared.OPERATIONS), f"operations (default: {','.join(shared.OPERATIONS)})"
            ),
            option(
                "--sizes A:B", shared.sizes, f"doubling from A to at most B, or a list as 100,300 (default: {SIZES})"
            ),
            choice("--dtype TYPE", DTYPES, f"of all tensors: {', '.join(DTYPES)}", default=None),
            option(
                "--max-time S",
                shared.positive,
                f"most seconds per point; ends a curve whose next call takes longer (default: {MAX_TIME_S:g})",
            ),
            option("--from FILE", Path, "measure nothing, and show what --format json wrote", dest="source"),
            choice("--format FORMAT", ("text", "json"), "text or json"),
        ),
    ),
)

"""The commands of `forge-profiling`, in the order in which `--help` lists them, each with its arguments.

Imports nothing that takes time: the file that has what a command does is imported once that command is run.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_forge_profiling.cli import shared

# the keys of `analysis.operators.SORTS`, and dtypes of torch, repeated here so that `--help` loads neither
SORTS = ("self_device", "device", "self_host", "host", "calls", "memory")
DTYPES = ("float32", "bfloat16", "float16", "float64")

_TOP = 20  # kernels and operators in the reports by default
SIZES = "64:8192"
MAX_TIME_S = 1.0
_WITHOUT = ("syncs", "reads", "allocations", "data", "pageable")


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
    does: str  # the file in this folder, and the function in it, that do what it says
    help: str  # in the list of commands
    description: str
    examples: str
    arguments: tuple[Argument, ...]
    usage: str | None = None  # None for one made from the arguments


_RUN: Final = argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
_SEVERAL: Final[dict[str, Any]] = {"action": "append", "default": []}

COMMANDS: Final = (
    Command(
        name="run",
        does="run.run",
        help="profile a training script without changing it",
        usage="forge-profiling run [options] (SCRIPT | -m MODULE) [arguments ...]",
        description="Run a training script with ForgeProfilerCallback and ThroughputCallback in every Lightning\n"
        "Trainer that it builds, and in its loops that mark their steps. A callback of a kind that is\n"
        "already there is not added.",
        examples="""\
  forge-profiling run train.py --lr 0.1
  forge-profiling run --window 20:25 -m my_package.train --config config.yaml
  forge-profiling run -m torch.distributed.run --nproc-per-node 2 train.py     one line instead of torchrun
  torchrun --nproc-per-node 2 --no-python forge-profiling run train.py         the same
  srun forge-profiling run train.py
  forge-profiling run chemprop train --data-path x.csv                         a command of this environment

Options of this command come before the script; everything after it is passed to the script. The script replaces this
process, so exit code, signals, input and output are its own. The table at the end of a fit goes to standard error.
""",
        arguments=(
            either(
                option("--window A:B", shared.step_range, "record steps A to B-1 (default: six of a steady run)"),
                flag("--no-window", "record no steps, unless `forge-profiling trace` asks for some"),
            ),
            flag("--stacks", "record Python functions too; slows the recorded steps, and those alone"),
            option("--trace-dir DIR", Path, "folder for the traces (default: profiler_traces in the logger's folder)"),
            option("--warmup-steps N", shared.at_least(0), "warm-up steps, which do not count (default: 10)"),
            option("--overhead SHARE", shared.share, "largest share of a step that timing may cost (default: 0.005)"),
            option(
                "--batch-size N",
                shared.at_least(1),
                "samples in a batch, where its tensors do not show it (default: by loader and batch)",
            ),
            argument(
                "--fits",
                choices=("first", "all"),
                default="first",
                help="record and print the first fit of each module in a process, by class and shapes, with a line on "
                "each further one (default), or all fits",
            ),
            flag("--log", "write metrics and results to the script's own loggers too"),
            argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in `python -m MODULE`"),
            argument(
                "command",
                nargs=argparse.PARSER,  # at least one word, and everything after it, "--" included
                metavar="SCRIPT",
                help="the script, as in `python SCRIPT`, and its arguments",
            ),
        ),
    ),
    Command(
        name="watch",
        does="watch.watch",
        help="show a run live, from another terminal or node",
        description="Show a run live, from the record that it writes during training: step time, regions, rates, GPU, "
        "causes of lost time, ranks, events. Exits when the run ends, and prints its table.",
        examples="""\
  forge-profiling watch lightning_logs/           quit with q
  forge-profiling watch lightning_logs/ --wait    start before the training
  forge-profiling watch lightning_logs/version_3 --once
""",
        arguments=(
            _RUN,
            flag("--once", "print one frame and exit"),
            option("--every S", shared.seconds, "seconds between frames (default: 1)", default=1.0),
            flag("--wait", "wait until there is a run that has not ended"),
        ),
    ),
    Command(
        name="trace",
        does="watch.trace",
        help="have a live run record some of its steps, on all ranks the same",
        description="Have a live run of yours record some of its next steps with torch.profiler, the same on all\n"
        "ranks, from another terminal or node. It needs a record and ForgeProfilerCallback, or\n"
        "ThroughputCallback(window='on-demand'), or it was started with `forge-profiling run`.",
        examples="""\
  forge-profiling trace lightning_logs/ --wait              the run that is slow now; prints where the report is
  forge-profiling trace lightning_logs/version_3 --steps 10
  forge-profiling trace lightning_logs/ --ranks slow        the straggler, a median rank and rank 0
""",
        arguments=(
            _RUN,
            option(
                "--steps N",
                shared.steps,
                "how many steps (default: 3), and on a GPU two more that explain them",
                default=3,
            ),
            argument("--ranks", choices=("all", "slow"), default="all", help="which ranks record (default: all)"),
            flag("--wait", "wait for the traces and the report"),
        ),
    ),
    Command(
        name="show",
        does="show.show",
        help="print what bounds a run, and its numbers, from its record or its traces",
        description="Print the table of a run that is running, has ended or was killed, from the record that it\n"
        "writes; or what bounds the steps of a trace, and the numbers behind it.",
        examples="""\
  forge-profiling show lightning_logs/                   the newest run
  forge-profiling show lightning_logs/version_3 --json | jq '.metrics["time/step_ms"]'
  forge-profiling show rank0.trace.json.gz
  forge-profiling show lightning_logs/version_0/profiler_traces --rank 3 --steps 6:8 --sort self_host --top 30
  forge-profiling show s3://bucket/window --markdown > summary.md
""",
        arguments=(
            argument(
                "path",
                nargs="?",
                metavar="PATH",
                help="a record, a trace (JSON or gzip), or a folder; with both in it, the newest record",
            ),
            either(
                flag("--json", "print JSON and nothing else: of traces, summary.json"),
                flag("--markdown", "print Markdown and nothing else"),
                argument(
                    "--schema",
                    nargs="?",
                    const="summary",
                    choices=("summary", "record"),
                    help="print the JSON Schema of summary.json, or of a line of a record",
                ),
            ),
            option("--rank N", shared.at_least(0), "of traces: only this rank, without the measurements of the run"),
            option("--steps A:B", shared.step_range, "of traces: only steps A to B-1, without those measurements"),
            argument("--sort", choices=SORTS, help="of traces: also print the operators, in this order"),
            option("--top N", shared.at_least(1), f"of traces: number of kernels and operators (in JSON: {_TOP})"),
        ),
    ),
    Command(
        name="view",
        does="view.view",
        help="open a run or a trace as one web page, or write it; or open a trace in Perfetto",
        description="Open the page of a run or a trace in the browser, created now if there is none, or write it to a\n"
        "file, which works offline; or serve a trace once, from this machine only, to ui.perfetto.dev.",
        examples="""\
  forge-profiling view lightning_logs/                   the page of the newest run, also without a trace
  forge-profiling view lightning_logs/version_3 --save run.html
  forge-profiling view --perfetto rank0.trace.json.gz    the trace at ui.perfetto.dev, which runs in the browser alone

For a trace on a remote machine, forward the port (ssh -L 9001:127.0.0.1:9001 HOST), run there with --no-browser, and
open the printed address here.
""",
        arguments=(
            argument("path", metavar="PATH", help="report.html, a trace, a record, or a folder with any of them"),
            either(
                option("--save FILE", Path, "write the page of the run or trace as it is now, and open nothing"),
                flag("--perfetto", "show the trace itself, at https://ui.perfetto.dev"),
            ),
            option(
                "--port N",
                shared.port,
                "port to serve on (default: 9001; the page connects to 9001 only, so another must be forwarded to it)",
                default=9001,
            ),
            flag("--no-browser", "print the address instead of opening it"),
        ),
    ),
    Command(
        name="compare",
        does="compare.compare",
        help="compare two runs, and fail if the second is slower",
        description="Compare runs by their records, traces, or results of benchmark(): which is faster, and where.",
        examples=f"""\
  forge-profiling compare main/ branch/
  forge-profiling compare main/ branch/ --fail-over 5
  forge-profiling compare a1 a2 a3 --against b1 b2 b3 --fail-over 5 --metric median
  forge-profiling compare main.json.gz branch.json.gz --fail-over 10 --metric comm --metric step
  forge-profiling compare main/ branch/ --format github > benchmark.json

exit codes of --fail-over: 0 same or faster, 1 slower by more than the limit, 2 bad input, 3 too noisy or too short to
decide (1 with --fail-undecided)

{shared.METRICS}

Runs are compared by all of their counted steps, read from the records that ThroughputCallback writes (the newest in a
folder). With one run a side, the scatter between equal runs is assumed (--scatter); repeats measure it, best in turns.
Traces are compared by the medians of their whole steps, of which each side needs five.
""",
        arguments=(
            argument(
                "paths",
                nargs="+",
                type=Path,
                metavar="RUN",
                help="the baseline A and the run B to compare with it: records, traces, or folders; "
                "with --against, the repeats of the baseline",
            ),
            option("--against RUN", Path, "the repeats to compare with the baseline", nargs="+"),
            option(
                "--fail-over PCT",
                shared.percentage,
                "exit with 1 if a metric is worse by more than PCT percent, with 3 if that is undecided",
            ),
            flag("--fail-undecided", "exit with 1 instead of 3 if that is undecided"),
            option(
                "--metric NAME", shared.metric, "metric of --fail-over; may be repeated; see below", action="append"
            ),
            option(
                "--scatter PCT",
                shared.percentage,
                "scatter between equal runs to assume where repeats do not measure it, as a standard deviation in "
                "percent (default: 3 if one run followed the other, else 6; 0 for traces)",
            ),
            flag("--anyway", "compare runs of different hardware, batch size, precision or world size"),
            argument(
                "--format",
                choices=("text", "json", "github"),
                default="text",
                help="text, the comparison as JSON, or the second side's times as github-action-benchmark reads them "
                "(customSmallerIsBetter)",
            ),
            flag("--verbose", "all metrics, the ledger, findings, sensors, settings that differ"),
        ),
    ),
    Command(
        name="what-if",
        does="compare.what_if",
        help="predict the step of a trace with something changed, and what would bound it then",
        description="Play the recorded steps of a trace again with something changed: how long would a step take,\n"
        "and what would bound it? Needs GPU work. Several changes are made together.",
        examples="""\
  forge-profiling what-if rank0.trace.json.gz --without syncs
  forge-profiling what-if lightning_logs/ --drop aten::item --drop aten::nonzero
  forge-profiling what-if lightning_logs/ --graphs forward,backward
  forge-profiling what-if lightning_logs/ --equal-ranks --overlap-comm
  forge-profiling what-if lightning_logs/ --scale matmul=0.5 --json | jq .after_ms
""",
        arguments=(
            argument("path", type=Path, metavar="PATH", help="a trace (JSON or gzip) or a folder with one per rank"),
            option(
                "--drop NAME",
                str,
                "without this operator or named range, and the work that it launches; may be repeated",
                **_SEVERAL,
            ),
            argument(
                "--without",
                choices=_WITHOUT,
                help="without waits for the GPU, without operators that wait for it (.item(), .cpu()), without "
                "cudaMalloc and cudaFree, without waits for data, or without pageable memory (pinned instead); may be "
                "repeated",
                **_SEVERAL,
            ),
            option(
                "--graphs A,B",
                shared.regions,
                f"with the launches of these regions as one, as by CUDA graphs: {','.join(shared.GRAPHS)}",
                default=(),
            ),
            option(
                "--scale KIND=X",
                shared.scale,
                "kernels of a kind or category (matmul, comm, elementwise, ...) take X times as long; may be repeated",
                **_SEVERAL,
            ),
            flag("--bf16", "in bf16 autocast instead of float32, by the GPU's peaks"),
            flag("--fuse", "element-wise kernels, copies and fills are fused"),
            flag("--overlap-comm", "nothing waits for communication"),
            flag("--equal-ranks", "each rank is as fast as the fastest"),
            option("--rank N", shared.at_least(0), "only this rank"),
            option(
                "--live-ms MS",
                shared.positive,
                "the step without recording, which slows the host (default: what summary.json beside the trace says)",
            ),
            flag("--json", "print the numbers as JSON and nothing else"),
        ),
    ),
    Command(
        name="export",
        does="export.export",
        help="write copies of traces, for TensorBoard's profiler plugin or to share",
        description="Write copies of traces: for TensorBoard's profiler plugin (torch-tb-profiler 0.4.3), which reads\n"
        "PyTorch's own wrongly; or for sharing, without names of hosts and users, absolute paths, process ids,\n"
        "identifiers of GPUs, command lines and environment. Names of operators, kernels and modules stay.",
        examples="""\
  forge-profiling export lightning_logs/ --for sharing --out share          then check the files, and attach them
  forge-profiling export lightning_logs/ --for tensorboard --out plugin     then tensorboard --logdir plugin
""",
        arguments=(
            argument("path", type=Path, metavar="PATH", help="a trace or a folder with one per rank"),
            argument("--for", choices=("tensorboard", "sharing"), dest="purpose", required=True, help="who reads them"),
            option("--out DIR", Path, "folder to write to, created if needed", required=True),
        ),
    ),
    Command(
        name="crossover",
        does="crossover.crossover",
        help="find the sizes from which operations are faster on the GPU than on the CPU",
        description="Time operations on the CPU and on the GPU over sizes, and find the size from which the GPU is\n"
        "faster: in a stream of calls, for a single call, and with copies to the GPU and back.",
        examples="""\
  forge-profiling crossover --html crossover.html
  forge-profiling crossover --ops matmul,softmax --sizes 64:4096 --dtype bfloat16 --html bf16.html
  forge-profiling crossover --json h100.json                          measure on the machine with the GPU,
  forge-profiling crossover --from h100.json --html crossover.html    draw on another

CUDA_VISIBLE_DEVICES chooses the GPU, OMP_NUM_THREADS the number of CPU threads. Without options it takes one to two
minutes.
""",
        arguments=(
            option("--ops A,B", shared.operations, f"operations (default: {','.join(shared.OPERATIONS)})"),
            option(
                "--sizes A:B",
                shared.sizes,
                f"doubling from A to at most B, or a list such as 100,300,1000 (default: {SIZES})",
            ),
            argument("--dtype", choices=DTYPES, help=f"of all tensors (default: {DTYPES[0]})"),
            option(
                "--max-time S",
                shared.positive,
                "sample each point for at most S seconds, and end a curve when one call is expected to take longer; a "
                f"GPU curve continues while the CPU took as long (default: {MAX_TIME_S:g})",
            ),
            option(
                "--from FILE",
                shared.file_or_dash,
                "measure nothing, and show a file that --json wrote; - reads standard input",
                dest="source",
            ),
            option("--json FILE", shared.file_or_dash, "write all numbers as JSON; - prints them and nothing else"),
            option("--html FILE", shared.file, "write a page with plots and tables"),
        ),
    ),
)

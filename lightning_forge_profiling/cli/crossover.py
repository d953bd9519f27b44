"""`forge-profiling crossover`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_forge_profiling.cli.shared import (
    Progress,
    checked,
    positive,
    refuse_bad_outputs,
    say,
    write_json,
    write_output,
)
from lightning_forge_profiling.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_forge_profiling.crossover.curves import CrossoverResult

OPERATIONS = ("matmul", "add", "softmax", "layernorm", "conv2d")
# those of `crossover.operations`, repeated here so that `--help` loads no torch
DTYPES = ("float32", "bfloat16", "float16", "float64")
_SIZES = "64:8192"
_MAX_TIME_S = 1.0
_DASH = Path("-")

_EXAMPLES = """\
examples:
  forge-profiling crossover --html crossover.html
  forge-profiling crossover --ops matmul,softmax --sizes 64:4096 --dtype bfloat16 --png crossover.png
  forge-profiling crossover --json h100.json                        measure on the machine with the GPU,
  forge-profiling crossover --from h100.json --html crossover.html  draw on another

CUDA_VISIBLE_DEVICES chooses the GPU, OMP_NUM_THREADS the number of CPU threads. Without options it takes one to two
minutes.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "crossover",
        help="find the sizes from which operations are faster on the GPU than on the CPU",
        description="Time operations on the CPU and on the GPU over sizes, and find the size from which the GPU is\n"
        "faster: in a stream of calls, for a single call, and with copies to the GPU and back.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--ops", type=_operations, metavar="A,B", help=f"operations (default: {','.join(OPERATIONS)})")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="A:B",
        help=f"doubling from A to at most B, or a list such as 100,300,1000 (default: {_SIZES})",
    )
    parser.add_argument("--dtype", choices=DTYPES, help=f"of all tensors (default: {DTYPES[0]})")
    parser.add_argument(
        "--max-time",
        type=positive,
        metavar="S",
        help="sample each point for at most S seconds, and end a curve when one call is expected to take longer; a "
        f"GPU curve continues while the CPU took as long (default: {_MAX_TIME_S:g})",
    )
    parser.add_argument(
        "--from",
        type=_file_or_dash,
        dest="source",
        metavar="FILE",
        help="measure nothing, and show a file that --json wrote; - reads standard input",
    )
    parser.add_argument(
        "--json", type=_file_or_dash, metavar="FILE", help="write all numbers as JSON; - prints them and nothing else"
    )
    parser.add_argument("--html", type=_file, metavar="FILE", help="write a page with plots and tables")
    parser.add_argument("--png", type=_file, metavar="FILE", help="write the plot")
    parser.add_argument("--svg", type=_file, metavar="FILE", help="write the plot")
    parser.set_defaults(run=_run)


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        checked(name, name, name in OPERATIONS, f"one of {', '.join(OPERATIONS)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    """Sizes, ascending: doubling in a range as 64:512, or a list as 100,300."""
    from lightning_forge_profiling.crossover.curves import MOST_SIZE  # noqa: PLC0415  (start fast)

    first, colon, last = text.partition(":")
    parts = [part.lstrip("0") for part in ([first, last] if colon else text.split(","))]
    if all(part.isascii() and part.isdecimal() for part in parts):
        if any(len(part) > len(str(MOST_SIZE)) or int(part) > MOST_SIZE for part in parts):
            raise argparse.ArgumentTypeError(f"sizes must be at most {MOST_SIZE}")
        sizes = [int(part) for part in parts]
        if not colon:
            return tuple(sorted(set(sizes)))
        size, most = sizes
        if size <= most:
            return tuple(size * 2**k for k in range((most // size).bit_length()))
    raise argparse.ArgumentTypeError(f"{text!r} is neither a range such as 64:8192 nor a list such as 100,300,1000")


def _file_or_dash(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is missing")
    return Path(text)


def _file(text: str) -> Path:
    if text == str(_DASH):
        raise argparse.ArgumentTypeError("only --json can go to standard output: name a file")
    return _file_or_dash(text)


def _run(args: argparse.Namespace) -> int:
    _refuse_early(args)
    result = _measured(args) if args.source is None else _read(args.source)
    _hand_over(args, result)
    return 0


def _refuse_early(args: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes of measuring."""
    asked = (args.ops, args.sizes, args.dtype, args.max_time)
    if args.source is not None and any(value is not None for value in asked):
        raise ConfigurationError("--from measures nothing: leave out --ops, --sizes, --dtype and --max-time")
    json = None if args.json == _DASH else args.json
    refuse_bad_outputs(
        {"--json": json, "--html": args.html, "--png": args.png, "--svg": args.svg},
        [] if args.source in {None, _DASH} else [("--from", args.source)],
    )
    if args.html or args.svg:
        _check_drawing("svg")
    if args.png:
        _check_drawing("png")


def _check_drawing(kind: Literal["png", "svg"]) -> None:
    """Draw an empty plot, to find a missing or broken matplotlib before measuring."""
    from lightning_forge_profiling.crossover.curves import OperationCurves  # noqa: PLC0415  (start fast)

    try:
        from lightning_forge_profiling.crossover.plot import LIGHT, draw_operation  # noqa: PLC0415

        draw_operation(OperationCurves(name="", meaning="", curves=()), LIGHT, kind)
    except Exception as error:  # a broken installation can raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        why = "is not installed" if missing else f"fails here ({type(error).__name__}: {error})"
        raise ConfigurationError(
            f"drawing needs matplotlib, which {why}: pip install 'lightning-forge-profiling[plots]', "
            "or write --json here and draw --from it elsewhere"
        ) from error


def _read(path: Path) -> "CrossoverResult":
    from lightning_forge_profiling.crossover import curves  # noqa: PLC0415  (start fast)

    if path != _DASH:
        return curves.read_crossover(path)
    if sys.stdin is None:
        raise ConfigurationError("--from - reads standard input, which is closed")
    return curves.parse_crossover(sys.stdin.buffer.read(), "standard input")


def _measured(args: argparse.Namespace) -> "CrossoverResult":
    from lightning_forge_profiling.crossover import curves, sweep  # noqa: PLC0415  (loads torch)

    names, sizes = args.ops or OPERATIONS, args.sizes or _sizes(_SIZES)
    dtype, max_time_s = args.dtype or DTYPES[0], args.max_time or _MAX_TIME_S
    gpu = sweep.find_gpu()
    total = len(names) * len(sizes)
    numbers = iter(range(1, total + 1))
    with Progress(after_s=0) as progress:
        operations = sweep.measure(
            {name: sweep.OPERATIONS[name] for name in names},
            sizes,
            curves.WAYS if gpu else curves.WAYS[:1],
            sweep.OperationTimer(dtype, gpu, max_time_s),
            longest_us=max_time_s * 1e6,
            progress=lambda name, size: progress(f"{name} {size} ({next(numbers)} of {total})"),
        )
    return curves.CrossoverResult(setting=sweep.setting(dtype, gpu), operations=operations, schema_version=1)


def _hand_over(args: argparse.Namespace, result: "CrossoverResult") -> None:
    """Write and print what was asked for, the numbers first. A failure of one does not keep the others back."""
    from lightning_forge_profiling.crossover.curves import crossover_json, print_crossover  # noqa: PLC0415

    written, failed = [], []

    def write(path: Path, content: bytes) -> None:
        try:
            write_output(path, content)
            written.append(path)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")

    if args.json and args.json != _DASH:
        write(args.json, crossover_json(result))
    try:
        if args.json == _DASH:
            write_json(crossover_json(result))
        else:
            print_crossover(result)
        sys.stdout.flush()
    finally:  # the reader of a pipe may close it early
        for path, content in _drawn(args, result):
            write(path, content)
    if args.json != _DASH:
        for path in written:
            say(f"written    {path}")
    if failed:
        raise OSError("; ".join(failed))


def _drawn(args: argparse.Namespace, result: "CrossoverResult") -> Iterator[tuple[Path, bytes]]:
    """The page and the plots that were asked for."""
    if args.html:
        from lightning_forge_profiling.crossover.plot import crossover_page  # noqa: PLC0415  (loads matplotlib)

        yield args.html, crossover_page(result).encode(errors="replace")
    if args.png or args.svg:
        from lightning_forge_profiling.crossover.plot import LIGHT, draw_result  # noqa: PLC0415  (loads matplotlib)

        if args.png:
            yield args.png, draw_result(result, LIGHT, "png")
        if args.svg:
            yield args.svg, draw_result(result, LIGHT, "svg")

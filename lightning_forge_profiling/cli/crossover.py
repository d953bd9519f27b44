"""`forge-profiling crossover`."""

import argparse
import sys
from pathlib import Path

from lightning_forge_profiling.cli.commands import DTYPES, MAX_TIME_S, SIZES
from lightning_forge_profiling.cli.shared import (
    DASH,
    OPERATIONS,
    Progress,
    refuse_bad_outputs,
    say,
    write_json,
    write_output,
)
from lightning_forge_profiling.cli.shared import sizes as sizes_of
from lightning_forge_profiling.crossover import curves
from lightning_forge_profiling.errors import ConfigurationError


def crossover(args: argparse.Namespace) -> int:
    """Measure, or show what was measured."""
    _refuse_early(args)
    result = _measured(args) if args.source is None else _read(args.source)
    _hand_over(args, result)
    return 0


def _refuse_early(args: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes of measuring."""
    asked = (args.ops, args.sizes, args.dtype, args.max_time)
    if args.source is not None and any(value is not None for value in asked):
        raise ConfigurationError("--from measures nothing: leave out --ops, --sizes, --dtype and --max-time")
    json = None if args.json == DASH else args.json
    sources = [] if args.source in {None, DASH} else [("--from", args.source)]
    refuse_bad_outputs({"--json": json, "--html": args.html}, sources)
    if args.html:
        _check_drawing()


def _check_drawing() -> None:
    """Draw an empty plot, to find a missing or broken matplotlib before measuring."""
    try:
        from lightning_forge_profiling.crossover.plot import LIGHT, draw_operation  # noqa: PLC0415

        draw_operation(curves.OperationCurves(name="", meaning="", curves=()), LIGHT)
    except Exception as error:  # a broken installation can raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        why = "is not installed" if missing else f"fails here ({type(error).__name__}: {error})"
        raise ConfigurationError(
            f"drawing needs matplotlib, which {why}: pip install 'lightning-forge-profiling[plots]', "
            "or write --json here and draw --from it elsewhere"
        ) from error


def _read(path: Path) -> curves.CrossoverResult:
    if path != DASH:
        return curves.read_crossover(path)
    if sys.stdin is None:
        raise ConfigurationError("--from - reads standard input, which is closed")
    return curves.parse_crossover(sys.stdin.buffer.read(), "standard input")


def _measured(args: argparse.Namespace) -> curves.CrossoverResult:
    from lightning_forge_profiling.crossover import sweep  # noqa: PLC0415  (loads torch)

    names, sizes = args.ops or OPERATIONS, args.sizes or sizes_of(SIZES)
    dtype, max_time_s = args.dtype or DTYPES[0], args.max_time or MAX_TIME_S
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


def _hand_over(args: argparse.Namespace, result: curves.CrossoverResult) -> None:
    """Write and print what was asked for, the numbers first. A failure of one does not keep the others back."""
    written, failed = [], []

    def write(path: Path, content: bytes) -> None:
        try:
            write_output(path, content)
            written.append(path)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")

    if args.json and args.json != DASH:
        write(args.json, curves.crossover_json(result))
    try:
        if args.json == DASH:
            write_json(curves.crossover_json(result))
        else:
            curves.print_crossover(result)
        sys.stdout.flush()
    finally:  # the reader of a pipe may close it early
        if args.html:
            from lightning_forge_profiling.crossover.plot import crossover_page  # noqa: PLC0415  (loads matplotlib)

            write(args.html, crossover_page(result).encode(errors="replace"))
    if args.json != DASH:
        for path in written:
            say(f"written    {path}")
    if failed:
        raise OSError("; ".join(failed))

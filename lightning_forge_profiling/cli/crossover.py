"""`forge-profiling crossover`."""

import argparse

from lightning_forge_profiling.cli.commands import DTYPES, MAX_TIME_S, SIZES
from lightning_forge_profiling.cli.shared import OPERATIONS, Progress, write_as_json
from lightning_forge_profiling.cli.shared import sizes as sizes_of
from lightning_forge_profiling.crossover import curves
from lightning_forge_profiling.errors import ConfigurationError


def crossover(args: argparse.Namespace) -> int:
    """Measure, or show what was measured."""
    if args.source is not None and any(
        value is not None for value in (args.ops, args.sizes, args.dtype, args.max_time)
    ):
        raise ConfigurationError("--from measures nothing: leave out --ops, --sizes, --dtype and --max-time")
    result = _measured(args) if args.source is None else curves.read_crossover(args.source)
    if args.format == "json":
        write_as_json(result.to_dict())
    else:
        curves.print_crossover(result)
    return 0


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

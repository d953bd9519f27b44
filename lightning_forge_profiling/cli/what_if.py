"""`forge-profiling what-if`: how long a step would take with something changed, and what would bound it then."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.shared import Progress, at_least, checked, number, positive, say, warn, write_as_json
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import SUMMARY_JSON

if TYPE_CHECKING:
    from lightning_forge_profiling.analysis.fixes import Change
    from lightning_forge_profiling.what_if import Prediction

_GRAPHS = ("forward", "backward", "optimizer")
_SCALED = 0.99  # of the recorded step
_WITHOUT = ("syncs", "reads", "allocations", "data", "pageable")

_EXAMPLES = """\
examples:
  forge-profiling what-if rank0.trace.json.gz --without syncs
  forge-profiling what-if lightning_logs/ --drop aten::item --drop aten::nonzero
  forge-profiling what-if lightning_logs/ --graphs forward,backward
  forge-profiling what-if lightning_logs/ --equal-ranks --overlap-comm
  forge-profiling what-if lightning_logs/ --scale matmul=0.5 --json | jq .after_ms
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "what-if",
        help="predict the step of a trace with something changed, and what would bound it then",
        description="Play the recorded steps of a trace again with something changed: how long would a step take,\n"
        "and what would bound it? Needs GPU work. Several changes are made together.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a trace (JSON or gzip) or a folder with one per rank")
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="without this operator or named range, and the work that it launches; may be repeated",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=_WITHOUT,
        help="without waits for the GPU, without operators that wait for it (.item(), .cpu()), without cudaMalloc and "
        "cudaFree, without waits for data, or without pageable memory (pinned instead); may be repeated",
    )
    parser.add_argument(
        "--graphs",
        type=_regions,
        default=(),
        metavar="A,B",
        help=f"with the launches of these regions as one, as by CUDA graphs: {','.join(_GRAPHS)}",
    )
    parser.add_argument(
        "--scale",
        action="append",
        type=_scale,
        default=[],
        metavar="KIND=X",
        help="kernels of a kind or category (matmul, comm, elementwise, ...) take X times as long; may be repeated",
    )
    parser.add_argument("--bf16", action="store_true", help="in bf16 autocast instead of float32, by the GPU's peaks")
    parser.add_argument("--fuse", action="store_true", help="element-wise kernels, copies and fills are fused")
    parser.add_argument("--overlap-comm", action="store_true", help="nothing waits for communication")
    parser.add_argument("--equal-ranks", action="store_true", help="each rank is as fast as the fastest")
    parser.add_argument("--rank", type=at_least(0), metavar="N", help="only this rank")
    parser.add_argument(
        "--live-ms",
        type=positive,
        metavar="MS",
        help="the step without recording, which slows the host (default: what summary.json beside the trace says)",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")
    parser.set_defaults(run=_run)


def _regions(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    return checked(text, names, set(names) <= {*_GRAPHS}, f"some of {','.join(_GRAPHS)}")


def _scale(text: str) -> tuple[str, float]:
    kind, _, factor = text.partition("=")
    value = number(factor)
    return checked(
        text, (kind, value), bool(kind) and 0 <= value < math.inf, "KIND=X with a number of at least 0, as matmul=0.5"
    )


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.what_if import predict  # noqa: PLC0415  (imports NumPy)

    changes = dict(_changes(args))
    if args.equal_ranks:
        changes["equal ranks"] = lambda steps: steps
    if not changes:
        raise ConfigurationError(
            "nothing is changed: name what, such as --without syncs, --graphs forward,backward or --scale matmul=0.5"
        )
    with Progress() as progress:
        progress(f"playing {args.path}")
        live_ms = _live_ms(args.path) if args.live_ms is None else args.live_ms
        found = predict(
            args.path, list(changes.values()), equal_ranks=args.equal_ranks, rank=args.rank, live_ms=live_ms
        )
    if args.json:
        write_as_json(_as_json(found, list(changes)))
    else:
        for line in _lines(found, list(changes)):
            say(line)
    return 0


def _live_ms(path: Path) -> float | None:
    """The mean step of the run, if its measurements lie beside the traces."""
    from lightning_forge_profiling.json_layout import read_summary  # noqa: PLC0415

    summary = find_traces(path)[0][0].parent / SUMMARY_JSON
    try:
        run = read_summary(summary).run if summary.is_file() else None
    except (OSError, ValueError) as exc:  # written by another program, or by another version of this one
        warn(f"{summary} cannot be read, so the steps are played as recorded: {exc}")
        return None
    return None if run is None else run.timing.step_ms.mean


def _changes(args: argparse.Namespace) -> "Iterator[tuple[str, Change]]":
    from lightning_forge_profiling.analysis import fixes  # noqa: PLC0415  (imports NumPy)

    kinds = {
        "syncs": fixes.without_syncs,
        "reads": fixes.without_reads,
        "allocations": fixes.without_allocations,
        "data": fixes.without_region("data"),
        "pageable": fixes.from_pinned_memory,
    }
    words = {"data": "waits for data", "pageable": "pageable memory"}
    for name in args.drop:
        yield f"without {name}", fixes.without_operators(name)
    for name in args.without:
        yield f"without {words.get(name, name)}", kinds[name]
    if args.graphs:
        yield f"{', '.join(args.graphs)} as CUDA graphs", fixes.as_graphs(*args.graphs)
    for kind, factor in args.scale:
        if [each for each, _ in args.scale].count(kind) > 1:
            raise ConfigurationError(f"--scale {kind} is given twice")
        yield f"{kind} x {factor:g}", fixes.scaled([kind], factor)
    if args.bf16:
        yield "in bf16", fixes.in_bf16
    if args.fuse:
        yield "kernels fused", fixes.fused
    if args.overlap_comm:
        yield "communication overlapped", fixes.overlapped


def _as_json(found: "Prediction", changes: list[str]) -> dict[str, object]:
    return {
        "changes": changes,
        "steps": found.steps,
        "ranks": found.ranks,
        "recorded_ms": found.recorded_ms,
        "replayed_ms": found.replayed_ms,
        "live_ms": found.live_ms,
        "hosts": found.hosts,
        "before_ms": found.before_ms,
        "error_pct": found.error_pct,
        "after_ms": found.after_ms,
        "low_ms": found.low_ms,
        "high_ms": found.high_ms,
        "verdict": None if found.analysis is None else found.analysis.verdict,
        "verdict_text": _verdict(found),
        "notes": found.notes,
        "source": found.source,
        "recorded_steps": found.numbers,
    }


def _verdict(found: "Prediction") -> str:
    """What would bound the step then, without advice: it may be what has just been done."""
    if found.analysis is None:
        return "not known: what communication hides behind once nothing waits for it is not in the trace"
    first = next((one for one in found.analysis.findings if one.code == found.analysis.verdict), None)
    return found.analysis.verdict_text if first is None else f"{first.code}: {first.title}"


def _live(found: "Prediction") -> str:
    """How the steps are played that recording slowed."""
    if len(found.hosts) > 1:
        return (
            "the GPU sets the pace, which hides how fast the host is without recording: played with "
            f"{max(found.hosts):g} to {min(found.hosts):g} of its recorded time"
        )
    if found.live_ms is None:
        return "unknown, so the host is played as recorded, which slows it: give --live-ms"
    live = f"{found.live_ms:.2f} ms a step without recording"
    if found.before_ms < _SCALED * found.replayed_ms:
        return f"{live}: the host is played as much faster"
    if found.live_ms >= _SCALED * found.replayed_ms:
        return f"{live}, no less than recorded: played as recorded"
    return f"{live}, which a faster host does not explain: played as recorded"


def _lines(found: "Prediction", changes: list[str]) -> "Iterator[str]":
    saved_ms = found.before_ms - found.after_ms
    ranks = "" if found.ranks == 1 else f" on each of {found.ranks} ranks"
    numbers = f"step {found.numbers[0]}" if found.steps == 1 else f"steps {found.numbers[0]} to {found.numbers[-1]}"
    yield f"trace      {found.source}, {numbers}"
    replayed = f"played again unchanged {found.replayed_ms:.2f} ms"
    yield f"recorded   {found.recorded_ms:.2f} ms a step, mean of {found.steps}{ranks}; {replayed}"
    yield f"live       {_live(found)}"
    yield f"changed    {'; '.join(changes)}"
    for note in found.notes:
        yield f"note       {note}"
    why = "by the scatter of the steps and by the host" if len(found.hosts) > 1 else "by the scatter of the steps"
    scatter = f" ({found.low_ms:.2f} to {found.high_ms:.2f} {why})" if found.steps > 1 else ""
    yield (
        f"then       {found.after_ms:.2f} ms{scatter} instead of {found.before_ms:.2f}, {abs(saved_ms):.2f} ms "
        f"{'less' if saved_ms >= 0 else 'more'} ({abs(100 * saved_ms / found.before_ms):.0f} %)"
    )
    yield f"and then   {_verdict(found)}"

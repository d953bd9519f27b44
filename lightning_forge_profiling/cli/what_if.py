"""`forge-profiling what-if`: a step of a trace, predicted with changes."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_forge_profiling.analysis import fixes
from lightning_forge_profiling.cli.shared import Progress, say, warn, write_as_json
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.json_layout import read_summary
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import SUMMARY_JSON
from lightning_forge_profiling.what_if import Prediction, predict

_SCALED = 0.99  # of the recorded step
_WITHOUT = {
    "syncs": ("syncs", fixes.without_syncs),
    "reads": ("reads", fixes.without_reads),
    "allocations": ("allocations", fixes.without_allocations),
    "data": ("waits for data", fixes.without_region("data")),
    "pageable": ("pageable memory", fixes.from_pinned_memory),
}
_FLAGS = {
    "bf16": ("in bf16", fixes.in_bf16),
    "fuse": ("kernels fused", fixes.fused),
    "overlap_comm": ("communication overlapped", fixes.overlapped),
    "equal_ranks": ("equal ranks", lambda steps: steps),
}


def what_if(args: argparse.Namespace) -> int:
    """Play the steps again."""
    changes = dict(_changes(args))
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
        figures = {name: getattr(found, name) for name in found.__slots__ if name != "analysis"}
        verdict = None if found.analysis is None else found.analysis.verdict
        write_as_json({"changes": list(changes), **figures, "verdict": verdict, "verdict_text": _verdict(found)})
    else:
        for line in _lines(found, changes):
            say(line)
    return 0


def _live_ms(path: Path) -> float | None:
    """The mean step of the run, if its measurements lie beside the traces."""
    summary = find_traces(path)[0][0].parent / SUMMARY_JSON
    try:
        run = read_summary(summary).run if summary.is_file() else None
    except (OSError, ValueError) as exc:  # written by another program, or by another version of this one
        warn(f"{summary} cannot be read, so the steps are played as recorded: {exc}")
        return None
    return None if run is None else run.timing.step_ms.mean


def _changes(args: argparse.Namespace) -> Iterator[tuple[str, fixes.Change]]:
    """What is changed, in words, in the order in which it is."""
    for name in args.drop:
        yield f"without {name}", fixes.without_operators(name)
    for name in args.without:
        words, change = _WITHOUT[name]
        yield f"without {words}", change
    if args.graphs:
        yield f"{', '.join(args.graphs)} as CUDA graphs", fixes.as_graphs(*args.graphs)
    for kind, factor in args.scale:
        if [each for each, _ in args.scale].count(kind) > 1:
            raise ConfigurationError(f"--scale {kind} is given twice")
        yield f"{kind} x {factor:g}", fixes.scaled([kind], factor)
    yield from (change for flag, change in _FLAGS.items() if getattr(args, flag))


def _lines(found: Prediction, changes: Iterable[str]) -> Iterator[str]:
    saved_ms = found.before_ms - found.after_ms
    ranks = "" if found.ranks == 1 else f" on each of {found.ranks} ranks"
    first, last = found.recorded_steps[0], found.recorded_steps[-1]
    yield f"trace      {found.source}, {f'step {first}' if found.steps == 1 else f'steps {first} to {last}'}"
    replayed = f"played again unchanged {found.replayed_ms:.2f} ms"
    yield f"recorded   {found.recorded_ms:.2f} ms a step, mean of {found.steps}{ranks}; {replayed}"
    yield f"live       {_live(found)}"
    yield f"changed    {'; '.join(changes)}"
    yield from (f"note       {note}" for note in found.notes)
    why = f"by the scatter of the steps{' and by the host' if len(found.hosts) > 1 else ''}"
    scatter = f" ({found.low_ms:.2f} to {found.high_ms:.2f} {why})" if found.steps > 1 else ""
    yield (
        f"then       {found.after_ms:.2f} ms{scatter} instead of {found.before_ms:.2f}, {abs(saved_ms):.2f} ms "
        f"{'less' if saved_ms >= 0 else 'more'} ({abs(100 * saved_ms / found.before_ms):.0f} %)"
    )
    yield f"and then   {_verdict(found)}"


def _live(found: Prediction) -> str:
    """How the steps are played that recording slowed."""
    if len(found.hosts) > 1:
        return (
            "the GPU sets the pace, which hides how fast the host is without recording: played with "
            f"{max(found.hosts):g} to {min(found.hosts):g} of its recorded time"
        )
    if found.live_ms is None:
        return "unknown, so the host is played as recorded, which slows it: give --live-ms"
    how = ", which a faster host does not explain: played as recorded"
    if found.before_ms < _SCALED * found.replayed_ms:
        how = ": the host is played as much faster"
    elif found.live_ms >= _SCALED * found.replayed_ms:
        how = ", no less than recorded: played as recorded"
    return f"{found.live_ms:.2f} ms a step without recording{how}"


def _verdict(found: Prediction) -> str:
    """What would bound the step then, without advice: it may be what has just been done."""
    if found.analysis is None:
        return "not known: what communication hides behind once nothing waits for it is not in the trace"
    first = next((one for one in found.analysis.findings if one.code == found.analysis.verdict), None)
    return found.analysis.verdict_text if first is None else f"{first.code}: {first.title}"

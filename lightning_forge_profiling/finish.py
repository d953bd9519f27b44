"""The child process of a recorded window: compresses the trace, copies it for TensorBoard and analyses it.

One process per rank, without torch, started once the raw trace has been exported. While training goes on it works at
the lowest priority, and only if a core is free, otherwise once training is over: there is then something to read on its
standard input, or its parent is gone. It may outlive the training, which does not wait for it after an exception.
"""

import argparse
import contextlib
import gzip
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.host import cpu_times, free_cores
from lightning_forge_profiling.kineto.chunks import COMPRESS_LEVEL
from lightning_forge_profiling.kineto.copies import write_plugin_copy
from lightning_forge_profiling.names import plugin_name, rank_summary_path, trace_name
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.safe_files import discard_with_folders, make_own_folder, open_regular, whole_file

if TYPE_CHECKING:
    from lightning_forge_profiling.schema import Analysis

OTHERS_WAIT_S = 15.0
LOOK_S = 1.0
SHORTEST_LOOK_S = 0.25
LONGEST_LOOK_S = 60.0  # the cores are watched longer each time that none was free
# Of a free core, some time goes to the rest of the system. With one of two cores free, the steps beside the analysis
# took 1.01 times as long as later ones in ten runs (0.91 to 1.06), without it 1.015 (0.91 to 1.10).
FREE_CORES = 0.9
# once training is over, work that gets less of a core than this at the lowest priority is begun again at the usual
STARVES_BELOW = 0.5
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: to be tried again
PART = ".part"
_NICE = 10  # a ninth of the usual weight


def main(argv: Sequence[str] | None = None) -> int:
    """Finish one rank's trace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("raw", type=Path)
    parser.add_argument("final", type=Path)
    parser.add_argument("--training", type=int, help="the process that trains; without, none does any more")
    parser.add_argument("--now", action="store_true", help="do not wait until a core is free")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0], help="those that record this window")
    parser.add_argument("--here", type=int, nargs="+", default=[0], help="those of them that write to this folder")
    parser.add_argument("--plugin", type=Path)
    parser.add_argument("--analyze", action="store_true")
    parser.add_argument("--record", type=Path, help="the record of the run that goes on, whose measurements count, too")
    args = parser.parse_args(argv)
    if args.training is None:
        return _finish(args, 0.0)
    if not hasattr(os, "fork"):  # Windows: at once, beside the training
        return _finish(args, OTHERS_WAIT_S)
    code = beside_training(lambda: _finish(args, inf), args.training, now=args.now)
    return _finish(args, _wait_s()) if code is None else code


def _wait_s() -> float:
    """How long other ranks are waited for: training, if it was not killed, knows whether one has not come before."""
    said = os.read(sys.stdin.fileno(), 32) if select.select([sys.stdin], [], [], 0.0)[0] else b""
    return 0.0 if said == b"alone" else OTHERS_WAIT_S


def beside_training(work: Callable[[], int], training: int, *, now: bool = False) -> int | None:
    """Work in a process at the lowest priority once a core is free; None if it is still to be done after training.

    With `now`, somebody waits for it: it begins at once, at a low priority that gets a tenth of a busy core.
    """
    if not (now or _core_is_free(training)):
        return None
    worker = get_context("fork").Process(target=_at_low_priority, args=(work, now))
    worker.start()
    over = False
    while True:
        before_s = _cpu_s(worker.pid)
        ready = connection.wait([worker.sentinel] if over else [worker.sentinel, sys.stdin.fileno()], LOOK_S)
        if worker.sentinel in ready:
            break
        if over and _cpu_s(worker.pid) - before_s < STARVES_BELOW * LOOK_S:
            worker.terminate()
            worker.join(LOOK_S)
            worker.kill()
            break
        over = over or bool(ready) or os.getppid() != training
    worker.join()
    if worker.exitcode is not None and 0 <= worker.exitcode != INTERRUPTED:
        return worker.exitcode
    if not over:  # it was killed, as where memory ran out
        _is_over(training, inf)
    return None


def _core_is_free(training: int) -> bool:
    """Wait until a core is free; False once training is over."""
    look_s, before = SHORTEST_LOOK_S, cpu_times()
    while not _is_over(training, look_s):
        now = cpu_times()
        if free_cores(before, now) >= FREE_CORES:
            return True
        look_s, before = min(2 * look_s, LONGEST_LOOK_S), now
    return False


def _is_over(training: int, wait_s: float) -> bool:
    """Whether training is over, or will be within some seconds."""
    deadline = time.monotonic() + wait_s
    while os.getppid() == training:
        left_s = deadline - time.monotonic()
        if select.select([sys.stdin], [], [], min(LOOK_S, max(left_s, 0.0)))[0]:
            return True
        if left_s <= 0:
            return False
    return True


def _cpu_s(process: int | None) -> float:
    return cpu_times((process or 0,)).processes_s.get(process or 0, (0.0, 0.0))[0]


def _at_low_priority(work: Callable[[], int], now: bool) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))  # an exception, so that temporary files go
    os.nice(_NICE if now else 19)
    if not now and hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    sys.exit(work())


def _finish(args: argparse.Namespace, wait_s: float) -> int:
    """Finish one rank's trace; if this was interrupted before, finish the rest."""
    deadline = time.monotonic() + wait_s
    try:
        if args.raw.exists() or not args.final.exists():
            _trace_files(args, wait_s)
    except Exception as exc:
        what = "TensorBoard's copy of the trace" if args.final.exists() else "the trace"
        _say(f"{what} could not be written: {type(exc).__name__}: {exc}")
        if args.plugin is not None:
            _part(args.plugin).unlink(missing_ok=True)
        discard_with_folders(args.raw)
        return 1
    discard_with_folders(args.raw)
    if args.analyze:
        try:
            analyze(args.final, args.ranks, deadline - time.monotonic(), args.record, args.here)
        except Exception as exc:
            _say(f"the trace could not be analysed: {type(exc).__name__}: {exc}")
            return 1
    return 0


def _trace_files(args: argparse.Namespace, wait_s: float) -> None:
    with (
        open_regular(args.raw) as source,
        whole_file(args.final) as file,
        gzip.open(file, "wb", compresslevel=COMPRESS_LEVEL) as target,
    ):
        shutil.copyfileobj(source, target, length=1 << 20)
    if args.plugin is not None:
        make_own_folder(args.plugin.parent)
        write_plugin_copy(args.raw, _part(args.plugin))
        publish(args.plugin, args.here, wait_s)


def _say(problem: str) -> None:
    with contextlib.suppress(OSError):  # the training process may have ended
        sys.stderr.write(plain(problem) + "\n")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def publish(own: Path, ranks: Sequence[int], wait_s: float) -> None:
    """Give all copies in a folder their final names together: the plugin reads it once and never shows later ones."""
    finals = [own.with_name(plugin_name(rank)) for rank in ranks]
    deadline = time.monotonic() + wait_s
    while not all(_part(final).exists() or final.exists() for final in finals):
        if not (_part(own).exists() or own.exists()):  # it was removed, usually with the folder
            return
        if finals[0].exists():  # the first rank has given up waiting for this one
            finals = [own]
        elif own != finals[0]:
            return
        elif time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    for final in finals:
        with contextlib.suppress(FileNotFoundError):  # published by another rank, or never written
            _part(final).replace(final)


def analyze(
    own: Path, ranks: Sequence[int], wait_s: float, record: Path | None = None, here: Sequence[int] = ()
) -> None:
    """Analyse a rank's trace; the first rank then waits for what others leave here, and writes the reports of all."""
    # imported here, so that compressing does not wait for them
    from lightning_forge_profiling import pipeline  # noqa: PLC0415
    from lightning_forge_profiling.diagnosis.ranks import MOST_SHOWN  # noqa: PLC0415
    from lightning_forge_profiling.report.page import write_reports  # noqa: PLC0415

    if len(ranks) > 1:
        pipeline.write_rank_results(own)
    if own.name != trace_name(ranks[0]):
        return
    others = [rank_summary_path(own.with_name(trace_name(rank))) for rank in here or ranks if rank != ranks[0]]
    deadline = time.monotonic() + wait_s
    # if its own trace has been removed, there is nothing to wait for
    while own.exists() and not all(other.exists() for other in others) and time.monotonic() < deadline:
        time.sleep(0.05)
    # of few ranks, the trace of one that is too slow itself is analysed here
    many, processes = len(ranks) > MOST_SHOWN, 1 if wait_s == inf else None
    result = pipeline.analyze(own.parent, processes=processes, reduce=many, expected=ranks, with_run=False)
    analysis = result.analysis if record is None or many else _with_run(result.analysis, record)
    write_reports(analysis, result.timelines, own.parent)


def _with_run(analysis: "Analysis", record: Path) -> "Analysis":
    """The analysis combined with the measurements of the run so far, as the ranks wrote them last."""
    from lightning_forge_profiling.diagnosis.combine import combine  # noqa: PLC0415
    from lightning_forge_profiling.record.reader import RecordError, read_run  # noqa: PLC0415
    from lightning_forge_profiling.report.run_status import totals  # noqa: PLC0415

    try:
        _, state = totals(read_run(record))
    except (RecordError, OSError):
        return analysis
    so_far = None if state is None else state.report.analysis
    return combine(analysis, None if so_far is None else so_far.run)

"""The child process of a recorded window: compresses the trace, copies it for TensorBoard and analyses it.

One process per rank, beside the training, at low priority and without torch. It starts with the profiler and waits for
a line on standard input, which says whether the raw trace has been exported. It may outlive the training, which does
not wait for it after an exception.
"""

import argparse
import contextlib
import gzip
import os
import select
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_forge_profiling.kineto.bytes import COMPRESS_LEVEL
from lightning_forge_profiling.kineto.tensorboard_copy import write_plugin_copy
from lightning_forge_profiling.names import plugin_name, trace_name
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.safe_files import discard_with_folders, make_own_folder, open_regular, whole_file

OTHERS_WAIT_S = 15.0
LOOK_S = 1.0
PART = ".part"


def main(argv: Sequence[str] | None = None) -> int:
    """Finish one rank's trace.

    Args:
        argv: path of the raw trace, path of the compressed one, id of the training process, the ranks that record, path
            of TensorBoard's copy, and whether to analyse the traces of all ranks.

    Returns:
        0, or 1 after one line on stderr.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("raw", type=Path)
    parser.add_argument("final", type=Path)
    parser.add_argument("--training", type=int, required=True)
    parser.add_argument("--ranks", type=lambda text: [int(rank) for rank in text.split(",")], default=[0])
    parser.add_argument("--plugin", type=Path)
    parser.add_argument("--analyze", action="store_true")
    args = parser.parse_args(argv)
    os.nice(10)
    order = _order(args.training)
    if order not in {"go", "alone"}:  # nothing was recorded, or the training process is gone
        discard_with_folders(args.raw)
        return 0
    wait_s = 0.0 if order == "alone" else OTHERS_WAIT_S
    try:
        _compress(args.raw, args.final)
        if args.plugin is not None:
            _copy_for_plugin(args.raw, args.plugin)
            publish(args.plugin, args.ranks, wait_s)
    except Exception as exc:
        what = "TensorBoard's copy of the trace" if args.final.exists() else "the trace"
        _say(f"{what} could not be written: {type(exc).__name__}: {exc}")
        if args.plugin is not None:
            _part(args.plugin).unlink(missing_ok=True)
        return 1
    finally:
        discard_with_folders(args.raw)
    if args.analyze:
        try:
            analyze(args.final, args.ranks, wait_s)
        except Exception as exc:
            _say(f"the trace could not be analysed: {type(exc).__name__}: {exc}")
            return 1
    return 0


def _order(training: int) -> str:
    """The line from the training process, which is the parent; "" once that is gone.

    End of file on the pipe does not show that: forked processes, such as a DataLoader's workers, hold the other end
    open too.
    """
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        if os.getppid() != training:
            return ""
    return sys.stdin.readline().strip()


def _say(problem: str) -> None:
    with contextlib.suppress(OSError):  # the training process may have ended
        sys.stderr.write(plain(problem) + "\n")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _compress(raw: Path, final: Path) -> None:
    with (
        open_regular(raw) as source,
        whole_file(final) as file,
        gzip.open(file, "wb", compresslevel=COMPRESS_LEVEL) as target,
    ):
        shutil.copyfileobj(source, target, length=1 << 20)


def _copy_for_plugin(raw: Path, plugin: Path) -> None:
    make_own_folder(plugin.parent)
    write_plugin_copy(raw, _part(plugin))


def publish(own: Path, ranks: Sequence[int], wait_s: float) -> None:
    """Give the copies of all ranks their final names together.

    The plugin reads a folder once, so a copy that appears later is never shown. The first rank waits for the others; a
    rank that is later than that publishes its own copy.

    Args:
        own: final path of this rank's copy, which is beside it with the suffix `.part`.
        ranks: the ranks that record.
        wait_s: time that the first rank waits for the others.
    """
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
        try:
            _part(final).replace(final)
        except FileNotFoundError:
            continue  # published by another rank, or never written


def analyze(own: Path, ranks: Sequence[int], wait_s: float) -> None:
    """Analyse the traces of all ranks and write the reports beside them.

    Args:
        own: the trace of the first rank.
        ranks: the ranks that record.
        wait_s: time to wait for the traces of other ranks. The reports list those that are missing then.
    """
    # imported here, so that compressing does not wait for them
    from lightning_forge_profiling import pipeline  # noqa: PLC0415
    from lightning_forge_profiling.report.files import write_reports  # noqa: PLC0415

    traces = {rank: own.with_name(trace_name(rank)) for rank in ranks}
    deadline = time.monotonic() + wait_s
    # if its own trace has been removed, there is nothing to wait for
    while own.exists() and not all(trace.exists() for trace in traces.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    missing = [
        f"the trace of rank {rank} did not arrive in time" for rank, trace in traces.items() if not trace.exists()
    ]
    result = pipeline.analyze(own.parent)
    analysis = replace(result.analysis, warnings=(*result.analysis.warnings, *missing))
    write_reports(analysis, result.timelines, own.parent)

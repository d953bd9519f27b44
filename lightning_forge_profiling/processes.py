"""Work in several processes, of which it is known which task one died of."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Python 3.14 would import all anew in each process, and start one more that outlives them
_SYSTEM: Any = get_context("fork" if sys.platform == "linux" else None)


class WorkerDiedError(Exception):
    """A process ended without a result."""

    def __init__(self, task: int, how: str) -> None:
        super().__init__(f"task {task}: the process {how}")
        self.task, self.how = task, how


def run_in_processes(work: Callable[[T], R], tasks: Sequence[T], processes: int) -> list[R]:
    """Call a function for each task, so many at a time, each in one of as many processes; none is left afterwards."""
    results: dict[int, R] = {}
    doing: dict[Connection, int] = {}
    coming, workers = iter(range(len(tasks))), dict(_worker(work, tasks) for _ in range(min(processes, len(tasks))))
    try:
        ready = [*workers]
        while True:
            for connection in ready:
                if (task := next(coming, None)) is not None:
                    with suppress(OSError):  # it is gone, as its result will tell
                        connection.send(task)
                    doing[connection] = task
            if not doing:
                return [results[task] for task in range(len(tasks))]
            ready = [connection for connection in wait(list(doing)) if isinstance(connection, Connection)]
            for connection in ready:
                task = doing.pop(connection)
                results[task] = _result(connection, task, workers[connection])
    finally:
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()


def _worker(work: Callable[[T], R], tasks: Sequence[T]) -> tuple[Connection, BaseProcess]:
    ours, its = Pipe()
    with its:  # closed in this process, so that our end sees the end of the other
        process = _SYSTEM.Process(target=_serve, args=(its, ours, work, tasks), daemon=True)
        _start(process)
    return ours, process


def _start(process: BaseProcess) -> None:
    """Start a process with Ctrl-C blocked, which would else end it with a traceback before it ignores Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        process.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(pid: int) -> None:
    """End a process at once. Raises OSError if there is none."""
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # either ends it at once on Windows


def kill_group(pid: int) -> None:
    """`kill` for a process that began a session, and those that it started; Windows has no such groups."""
    if hasattr(os, "killpg"):
        os.killpg(pid, signal.SIGKILL)
    else:
        kill(pid)


def _serve(connection: Connection, parents: Connection, work: Callable[[T], R], tasks: Sequence[T]) -> None:
    """Do the tasks whose numbers are sent, until the parent's end is closed."""
    parents.close()  # what this process has of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which kills this process
    outcome: tuple[R | Exception, str]
    with suppress(OSError, EOFError):  # the parent is gone
        while True:
            task = connection.recv()
            try:
                outcome = work(tasks[task]), ""
            except Exception as exc:
                outcome = exc, traceback.format_exc()  # pickling drops the traceback
            connection.send(outcome)


def _result(connection: Connection, task: int, process: BaseProcess) -> Any:
    try:
        outcome, raised = connection.recv()
    except (EOFError, OSError):  # the process ended before or while sending
        process.join()
        raise WorkerDiedError(task, _how_ended(process.exitcode or 0)) from None
    if raised:
        outcome.add_note(raised)
        raise outcome
    return outcome


def _how_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"

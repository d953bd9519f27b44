"""Work in processes of their own: one for each task, so that what one of them dies of is known."""

import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class WorkerDiedError(Exception):
    """A process ended without a result."""

    def __init__(self, task: int, how: str) -> None:
        super().__init__(f"task {task}: the process {how}")
        self.task, self.how = task, how


def run_in_processes(work: Callable[[T], R], tasks: Sequence[T], processes: int) -> list[R]:
    """Call a function for each task, each call in a separate process, of which none is left afterwards."""
    results: dict[int, R] = {}
    running: dict[Connection, tuple[int, Process]] = {}
    coming = iter(range(len(tasks)))
    try:
        while len(results) < len(tasks):
            while len(running) < processes and (task := next(coming, None)) is not None:
                receiver, sender = Pipe(duplex=False)
                with sender:  # closed in this process, so that the receiver sees the end of the other
                    process = Process(target=_call, args=(sender, work, tasks[task]), daemon=True)
                    _start(process)
                running[receiver] = task, process
            for receiver in set(running).intersection(wait(list(running))):
                task, process = running[receiver]
                results[task] = _result(receiver, task, process)
                del running[receiver]
    finally:
        for receiver, (_, process) in running.items():
            process.kill()
            process.join()
            receiver.close()
    return [results[task] for task in range(len(tasks))]


def _start(process: Process) -> None:
    """Start a process with Ctrl-C blocked, which would else end it with a traceback before it ignores Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        process.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(sender: Connection, work: Callable[[T], R], task: T) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which kills this process
    outcome: tuple[R | Exception, str]
    try:
        outcome = work(task), ""
    except Exception as exc:
        outcome = exc, traceback.format_exc()  # pickling drops the traceback
    with suppress(BrokenPipeError):  # the parent is gone
        sender.send(outcome)


def _result(receiver: Connection, task: int, process: Process) -> Any:
    try:
        outcome, raised = receiver.recv()
    except (EOFError, OSError):  # the process ended before or while sending
        process.join()
        raise WorkerDiedError(task, _how_ended(process.exitcode or 0)) from None
    process.join()
    receiver.close()
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

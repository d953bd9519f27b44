"""Stacks of threads as lists of lines, innermost first: which line is the user's, and what a stack waits in.

They come from Python, or from `faulthandler`, whose handler of a signal works where a call in C holds the interpreter
lock and no thread of the process can run Python.
"""

import dis
import faulthandler
import os
import re
import signal
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from platform import machine
from types import CodeType, FrameType
from typing import Final, Literal, NamedTuple

from lightning_forge_profiling.host import ProcessState, call_under_way, catches, default_signal
from lightning_forge_profiling.safe_files import open_regular, read_at_most

_PACKAGE: Final = str(Path(__file__).parent.parent)
_LIBRARIES: Final = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy")
_TYPED: Final = ("<stdin>", "<ipython")  # code of the user's that has no file
# the frames around these are the script's: the call of `fit`, or of a plain loop's worker
_OUTERMOST: Final = ("pytorch/trainer/trainer.py", "utils/data/_utils/worker.py")
_MOST: Final = 20_000  # characters of all threads' stacks
_LONGEST: Final = 300  # characters of a place
_LIMIT: Final = 1 << 18  # of what is read of faulthandler's: at most 100 threads with 100 lines each

Kind = Literal["", "debugger", "compile", "subprocess", "loader", "collective"]

# what code waits in. A compiled module runs inside `_dynamo/eval_frame.py`, which is therefore no sign of compilation.
_KINDS: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("debugger", re.compile(r"/(bdb|pdb)\.py$|/(pydevd|debugpy|_pydevd_bundle|_pydev_bundle)/")),
    (
        "compile",
        re.compile(
            r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile)|utils/cpp_extension)\.py$"
            r"|/triton/(compiler/|runtime/autotuner\.py$)"
        ),
    ),
    ("subprocess", re.compile(r"/subprocess\.py$")),
    ("loader", re.compile(r"/torch/utils/data/dataloader\.py$")),
    ("collective", re.compile(r"/torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives)\.py$")),
)
_LONG: Final = re.compile(r"evaluation_loop|checkpoint")
# where a backward pass is in C++, and with it the collectives of DDP
_BACKWARD: Final = "/torch/autograd/graph.py"


class Line(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


class Innermost(NamedTuple):
    """What a stack ends in."""

    place: str  # the innermost line of the user's code, `collate at data.py:31`; "" for none
    depth: int  # how many lines are further in
    waits: bool  # whether those are of a collective


@cache
def kind_of(file: str) -> Kind:
    """What code of a file waits for; "" for the rest."""
    return next((kind for kind, pattern in _KINDS if pattern.search(file)), "")


@cache
def library_folders() -> tuple[str, ...]:
    """Folders of code that is not the user's: the standard library, installed packages, and those below wherever."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), _PACKAGE}
    modules = (sys.modules.get(name) for name in _LIBRARIES)
    folders |= {str(Path(module.__file__).parent) for module in modules if module is not None and module.__file__}
    return tuple(sorted(f"{path}/" for path in folders))


def is_users(file: str) -> bool:
    """Whether code of a file is the user's."""
    return not file.startswith(library_folders()) and (file[:1] != "<" or file.startswith(_TYPED))


def shown_file(file: str) -> str:
    """A file's path below the working directory, or its name."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a stack, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def lines_of(frame: FrameType) -> list[Line]:
    """The lines of a stack."""
    return [Line(each.f_code.co_filename, each.f_lineno or 0, each.f_code.co_qualname) for each in frames_of(frame)]


def innermost(lines: Sequence[Line]) -> Innermost:
    """What a stack ends in."""
    depth, place = len(lines), ""
    for index, line in enumerate(lines):
        if line.file.endswith(_OUTERMOST):
            depth = index
            break
        if is_users(line.file):
            depth, place = index, f"{line.function} at {shown_file(line.file)}:{line.line}"[-_LONGEST:]
            break
    inside = lines[:depth]
    waits = any(kind_of(line.file) == "collective" for line in inside) or bool(
        inside and inside[0].file.endswith(_BACKWARD)
    )
    return Innermost(place, depth, waits)


def is_in_step(lines: Sequence[Line]) -> bool:
    """Whether a stack is within a step of Lightning's training loop, and in nothing there that may take long."""
    files = [line.file for line in lines]
    long = any(kind_of(file) in {"compile", "subprocess", "debugger"} or _LONG.search(file) for file in files)
    return not long and any(file.endswith("loops/training_epoch_loop.py") for file in files)


def called(code: CodeType, instruction: int) -> str:
    """The function that an instruction calls; "" if it calls none, or it cannot be told which."""
    loaded: dict[tuple[int | None, int | None], str] = {}
    at = None
    for each in dis.get_instructions(code):
        if each.offset > instruction or each.positions is None:
            break
        at = each.positions.lineno, each.positions.col_offset
        if each.opname.startswith("LOAD_") and isinstance(each.argval, str):
            loaded[at] = each.argval  # of `file.buffer.read(1)` all begin in the same place, and the last is `read`
        elif each.offset == instruction and not each.opname.startswith("CALL"):
            return ""
    return loaded.get(at, "") if at is not None else ""


def parse_dump(text: str, thread: int) -> list[Line]:
    """The lines of a thread in what faulthandler wrote last; [] if it is not there."""
    _, found, rest = text.rpartition(f"hread 0x{thread:016x}")
    own = re.split(r"\n(?:Current t|T)hread 0x", rest)[0] if found else ""
    return [
        Line(file, int(line), name)
        for file, line, name in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own, re.MULTILINE)
    ]


# system calls that go on after a signal, by the machine's name: a `sleep` or `poll` in C would end before its time
_RESUMED: Final[Mapping[str, Container[int]]] = {
    # read, write, readv, writev, recvfrom, recvmsg, sendto, sendmsg, wait4, fcntl, flock, futex, openat, open
    "x86_64": {0, 1, 19, 20, 45, 47, 44, 46, 61, 72, 73, 202, 257, 2},
    "aarch64": {63, 64, 65, 66, 207, 212, 206, 211, 260, 25, 32, 98, 56},
}


class StacksFile:
    """The file that the stacks of this process are written to: by Python, or by faulthandler upon a signal.

    Processes that are forked from here on have the handler too. No method raises.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self.signal = 0  # that has all stacks written; 0 if there is none
        with suppress(OSError, AttributeError, RuntimeError):  # a folder on another host; a system without such signals
            self._file = path.open("ab", buffering=0)
            # the highest numbers are the least used ones
            chosen = default_signal(range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 1, -1))
            if chosen is not None:
                faulthandler.register(chosen, file=self._file, all_threads=True, chain=False)
                self.signal = chosen

    def write(self, title: str) -> None:
        """Write the stacks of all threads."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n"
        for ident, frame in sys._current_frames().items():  # noqa: SLF001  (the public way to another thread's stack)
            text += f"\nThread 0x{ident:016x} {names.get(ident, '')} (most recent call first):\n"
            text += "".join(f'  File "{line.file}", line {line.line} in {line.function}\n' for line in lines_of(frame))
        self._append(text[:_MOST] + "\n")

    def ask_child(self, title: str, pid: int, state: ProcessState) -> int | None:
        """Have a forked process that waits write its stacks here; returns where they will begin, None if it cannot."""
        resumed = call_under_way(pid) in _RESUMED.get(machine(), ())
        if not (resumed and state.letter == "S" and state.parent == os.getpid() and self.signal):
            return None
        self._append(f"{title}\n")
        with suppress(OSError):
            start = self._path.stat().st_size
            if catches(pid, self.signal):
                os.kill(pid, self.signal)
                return start
        return None

    def since(self, start: int) -> str:
        """What was written from a position on."""
        return read_stacks(self._path, start)

    def close(self) -> None:
        """Undo the handler, and remove the file if it is empty."""
        if self.signal and signal.getsignal(self.signal) == signal.SIG_DFL:  # else somebody has replaced the handler
            faulthandler.unregister(self.signal)
        self.signal, file, self._file = 0, self._file, None
        if file is not None:
            with file, suppress(OSError):
                if not os.fstat(file.fileno()).st_size:
                    self._path.unlink()

    def _append(self, text: str) -> None:
        with suppress(OSError):  # a full disk
            if self._file is not None:
                self._file.write(text.encode(errors="replace"))


def read_stacks(path: Path, start: int) -> str:
    """What was written to a file of stacks from a position on; "" if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(start)
        return read_at_most(file, _LIMIT).decode(errors="replace")
    return ""

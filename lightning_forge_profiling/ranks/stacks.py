"""Stacks of threads as lists of lines, innermost first: which line is the user's, and what a stack waits in.

They come from Python, or from `faulthandler`, whose handler of a signal works where a call in C holds the interpreter
lock. It is only asked of a thread that waits in the kernel, and reads the frames of that thread alone, on it: other
threads may run, and reading their frames without the lock can crash the process.
"""

import ctypes
import dis
import faulthandler
import linecache
import os
import re
import signal
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, Literal, NamedTuple

from lightning_forge_profiling.host import catches, default_signal, wait_channel
from lightning_forge_profiling.names import OTHERS_CODE

_PACKAGE: Final = str(Path(__file__).parent.parent)
_LIBRARIES: Final = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy")
# the frames around these are the script's: the call of `fit`, or of a plain loop's worker
TRAINER: Final = ("/pytorch/trainer/trainer.py", "/pytorch_lightning/trainer/trainer.py")
_OUTERMOST: Final = (*TRAINER, "utils/data/_utils/worker.py")
_MOST: Final = 20_000  # characters of all threads' stacks
_LONGEST: Final = 300  # characters of a place
_LIMIT: Final = 1 << 18  # of what is read of faulthandler's: at most 100 lines

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
    return not file.startswith(library_folders()) and OTHERS_CODE.search(file) is None


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
    """The function that an instruction calls; "" if it calls none, or it cannot be told which.

    A condition calls `bool` of its value, which for a tensor waits for the GPU.
    """
    loaded: dict[tuple[int | None, int | None], str] = {}
    at = None
    for each in dis.get_instructions(code):
        if each.offset > instruction or each.positions is None:
            break
        at = each.positions.lineno, each.positions.col_offset
        if each.opname.startswith("LOAD_") and isinstance(each.argval, str):
            loaded[at] = each.argval  # of `file.buffer.read(1)` all begin in the same place, and the last is `read`
        elif each.offset == instruction and not each.opname.startswith(("CALL", "PRECALL")):  # Python 3.11 has both
            return "bool" if "JUMP_IF" in each.opname or each.opname == "TO_BOOL" else ""
    return loaded.get(at, "") if at is not None else ""


def is_in_loop(code: CodeType, instruction: int) -> bool:
    """Whether an instruction is in a loop of its function, or in a comprehension."""
    jumps = (each for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname)
    return any(each.argval <= instruction <= each.offset for each in jumps)


def line_at(code: CodeType, instruction: int) -> int:
    """The line of an instruction; of the jump back in a loop that ends in a branch, which has none, the loop's."""
    lines = [position[0] for position in code.co_positions()]
    at = instruction // 2
    if at < len(lines) and lines[at] is None:
        jumps = (each.argval for each in dis.get_instructions(code) if each.offset == instruction)
        at = next((target // 2 for target in jumps if isinstance(target, int)), at)
    return next((line for line in reversed(lines[: at + 1]) if line is not None), 0)


def call_at(code: CodeType, instruction: int) -> str:
    """The source of the expression that an instruction evaluates, as `self.auc.compute()`; "" if it is unknown."""
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    line, last_line, column, end = positions
    text = linecache.getline(code.co_filename, line or 0).encode()[:-1]  # columns count bytes
    if column is None or not text:
        return ""
    cut = text[column:end] if line == last_line else text[column:] + b" ..."
    return cut.decode(errors="replace")[:_LONGEST]


def library_name(code: CodeType) -> str:
    """A library's function as `torchmetrics.metric.Metric.forward`."""
    inside = max((folder for folder in library_folders() if code.co_filename.startswith(folder)), key=len, default="")
    path = code.co_filename.removeprefix(inside).removesuffix(".py").removesuffix("/__init__")
    package = f"{Path(inside).name}." if Path(inside).name in _LIBRARIES else ""
    return f"{package}{path.replace('/', '.')}.{code.co_qualname}"


def parse_dump(text: str) -> list[Line]:
    """The lines of the stack that faulthandler wrote last; [] for none. It writes a line in pieces."""
    return [
        Line(file, int(line), name)
        for file, line, name in re.findall(
            r'^  File "(.*)", line (\d+) in (.*)\n', text.rpartition("Stack (")[2], re.MULTILINE
        )
    ]


# where the kernel lets a thread wait that goes on after a signal: in a `sleep` or `poll`, it would end before its time.
# They are of locks, pipes, child processes, sockets and terminals.
_RESUMED: Final = ("futex_", "pipe_", "anon_pipe_", "wait_for_partner", "do_wait", "wait_woken", "unix_stream_")


def ask_thread(pid: int, thread: int, number: int, memory: int) -> int | None:
    """Have a thread of another process write its stack; returns where that will begin, None if it cannot.

    It can only while it waits: then its frames do not change, whatever the other threads do.
    """
    if memory >= 0 and wait_channel(pid, thread).startswith(_RESUMED) and catches(pid, number):
        with suppress(OSError, AttributeError):  # such as a C library without `tgkill`
            start = os.fstat(memory).st_size
            ctypes.CDLL(None).tgkill(pid, thread, number)
            return start
    return None


class StacksFile:
    """Writes the stacks of all threads to a file that is there only once they are written. No method raises.

    Upon a signal faulthandler writes that of the thread which gets it to memory, which a forked process shares and
    another one may be given.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.memory = -1  # what faulthandler writes to; -1 if it does not
        self.signal = 0  # upon which it does
        with suppress(OSError, AttributeError, RuntimeError):  # such as a system without such signals
            # the highest numbers are the least used ones
            chosen = default_signal(range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 1, -1))
            if chosen is not None:
                self.memory = os.memfd_create("forge-stacks")
                faulthandler.register(chosen, file=self.memory, all_threads=False, chain=False)
                self.signal = chosen

    def write(self, title: str) -> None:
        """Write the stacks of all threads."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = ""
        for ident, frame in sys._current_frames().items():  # noqa: SLF001  (the public way to another thread's stack)
            text += f"Thread 0x{ident:016x} {names.get(ident, '')} (most recent call first):\n"
            text += "".join(f'  File "{line.file}", line {line.line} in {line.function}\n' for line in lines_of(frame))
            text += "\n"
        append_stacks(self._path, title, text)

    def ask_child(self, pid: int) -> int | None:
        """Have a forked process write the stack of its main thread; returns where it will begin, None if it cannot."""
        return ask_thread(pid, pid, self.signal, self.memory)

    def child_lines(self, title: str, start: int) -> list[Line]:
        """The stack of a forked process, which is appended to the file; [] for none yet."""
        text = read_dump(self.memory, start)
        if lines := parse_dump(text):
            append_stacks(self._path, title, text)
        return lines

    def close(self) -> None:
        """Undo the handler."""
        if self.signal and signal.getsignal(self.signal) == signal.SIG_DFL:  # else somebody has replaced it
            faulthandler.unregister(self.signal)
        if self.memory >= 0:
            os.close(self.memory)
        self.signal, self.memory = 0, -1


def append_stacks(path: Path, title: str, text: str) -> None:
    """Append stacks to a file, as far as it can be written."""
    with suppress(OSError), path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n\n{text[:_MOST]}\n")


def read_dump(memory: int, start: int) -> str:
    """What faulthandler has written from a position on; "" if nothing."""
    with suppress(OSError):
        return os.pread(memory, _LIMIT, start).decode(errors="replace")
    return ""

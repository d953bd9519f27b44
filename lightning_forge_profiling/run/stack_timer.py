"""Shows a thread's stack to a function some times a second, where it can by a signal in that thread.

A thread beside it sees it only where it lets go of the interpreter lock: of pure Python that takes 0.5, 2 or 10 ms of
a step it saw 0, 0 and 18 % at 50 Hz, and 10 % of a call in C that took 77 % of a fit. A timer's signal is handled in
the thread itself, between two instructions: 95, 98 and 100 %, and 97 % (Python 3.11, 2026-11-26).

Each 20 ms are looked at once, at a random instant (stratified sampling). At equal distances looks keep step with the
training: a call in C, as backward is, holds one up until it ends, and the next, 20 ms later, misses what comes in
between in each step. A hook of 8 ms after a call of 13 ms was seen in 3 of 300 steps.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random
from time import perf_counter_ns, thread_time_ns
from types import FrameType
from typing import Any, Final, Protocol

from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.torch_versions import hide_from_dynamo, outside_dynamo

_log = plain_logger(__name__)

PERIOD_NS: Final = 20_000_000
_SHORTEST_NS: Final = 100_000  # sooner, a signal comes while the one before is still handled

# one that nobody notices: it is ignored where it has no handler, as in a new program, and nothing else sends it. The
# number is Linux's, which alone has timers of a thread.
SIGNAL: Final = getattr(signal, "SIGURG", 23)
_MONOTONIC: Final = 1  # of timer_create: CLOCK_MONOTONIC
_TO_THREAD: Final = 4  # SIGEV_THREAD_ID

Look = Callable[[FrameType], None]


class Looks:
    """When to look next, and how much time a look stands for: each period is looked at once, at a random instant."""

    def __init__(self) -> None:
        self.due_ns = self.ends_ns = 0  # of the present period
        self._period_ns = 0
        self._random = Random()  # noqa: S311  (not for secrets; the user's own generators stay as they are)

    def plan(self, now_ns: int, period_ns: int) -> int:
        """Choose the next look, in how many nanoseconds, after this one or the end of its period."""
        begins_ns = max(now_ns, self.ends_ns)
        self.due_ns = begins_ns + int(self._random.random() * period_ns)
        self.ends_ns, self._period_ns = begins_ns + period_ns, period_ns
        return max(self.due_ns - now_ns, _SHORTEST_NS)

    def stands_for_ns(self, now_ns: int) -> int:
        """How much time a look now stands for: its period, and what has passed since that ended."""
        return self._period_ns + max(now_ns - self.ends_ns, 0)


class StackTimer(Protocol):
    """Calls a function with the innermost frame of the thread that created this, once in each 20 ms."""

    looks: Looks

    def start(self) -> None:
        """Begin."""

    def pause(self, *, on: bool) -> None:
        """Whether to leave the thread alone for now."""

    def late_ns(self, now_ns: int) -> int:
        """How long ago the thread was woken to be looked at; 0 if it was not."""

    def stop(self) -> None:
        """End, and restore what was changed."""


SWITCH: Final = "FORGE_PROFILING_STACKS"
"""Environment variable that switches the looking off, with the value `off`."""


def stack_timer(look: Look) -> StackTimer | None:
    """The one that this thread can have: by a signal, else by a thread; None where it is switched off."""
    if os.environ.get(SWITCH) == "off":
        return None
    return SignalTimer(look) if signals_are_free() else LookingThread(look)


def signals_are_free() -> bool:
    """Whether this thread can be sent a timer's signal that nobody else handles."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(SIGNAL)  # None: installed by a library in C
    ours = isinstance(handler, _Handler) and not handler.is_in_use()
    if not ours and handler not in {signal.SIG_DFL, signal.SIG_IGN}:
        return False
    # an event loop, as asyncio's or Jupyter's, is woken by each signal that has a handler
    wakeup = signal.set_wakeup_fd(-1)
    if wakeup >= 0:
        signal.set_wakeup_fd(wakeup)
    return wakeup < 0


class _Handler:
    """Handles the signal, and never raises. Lightning saves it among its own and restores it when it is not wanted."""

    def __init__(self, look: Look, again: Callable[[FrameType], None]) -> None:
        self.look: Look | None = look
        self._again = again  # called after each look, with what was looked at
        self._pid = os.getpid()
        self._hidden = False

    def is_in_use(self) -> bool:
        """Whether its timer runs, which a forked process does not inherit."""
        return self.look is not None and self._pid == os.getpid()

    def __call__(self, _: int, frame: FrameType | None) -> None:
        look = self.look
        if look is None or frame is None or self._pid != os.getpid():
            return
        try:
            if not self._hidden and hide_from_dynamo(_Handler.__call__.__code__, callees=True):
                self._hidden, self.look = True, outside_dynamo(look)
            look(frame)
            self._again(frame)
        except Exception as exc:
            self.look = None
            _log.warning("The stack of this thread is not sampled any more: %s: %s", type(exc).__name__, exc)


# a thread that has stood in one instruction for long is looked at more seldom, by this share of that time and at most
# `_SELDOM_NS`. It is woken for each look, and what a hang is known by is that nothing wakes it.
_OF_STANDING: Final = 1 / 16
_SELDOM_NS: Final = 250_000_000
_STANDS: Final = 0.1  # the largest share of the time that a thread which stands uses a core for


class SignalTimer:
    """Has the kernel send this thread a signal, looks in the handler, and only then asks for the next one.

    So a thread in a call of C gets one signal, however long that takes.
    """

    def __init__(self, look: Look) -> None:
        self._handler = _Handler(look, self._ask_again)
        self._before: Any = signal.SIG_DFL
        self._timer: ctypes.c_void_p | None = None
        self._libc, self._times = ctypes.CDLL(None), (ctypes.c_long * 4)()
        self.looks = Looks()
        self._paused = False
        self._place: tuple[int, int] = 0, 0
        self._since_ns = self._used_ns = self._looked_ns = 0

    def start(self) -> None:
        """Begin. Does nothing where the system has no such timer."""
        before = signal.getsignal(SIGNAL)
        self._before = signal.SIG_DFL if isinstance(before, _Handler) else before
        signal.signal(SIGNAL, self._handler)
        event, timer = (ctypes.c_int * 16)(), ctypes.c_void_p()
        event[2], event[3], event[4] = SIGNAL, _TO_THREAD, threading.get_native_id()
        with suppress(AttributeError, OSError):  # such as a C library without it
            if self._libc.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
                self._timer = timer
        self.pause(on=False)

    def pause(self, *, on: bool) -> None:
        """Whether to leave the thread alone for now."""
        self._paused, self.looks.ends_ns = on, 0
        keep_restarting()
        self._ask(0 if on else PERIOD_NS)

    def _ask(self, period_ns: int) -> None:
        """Ask for the next signal; 0 for none."""
        if self._timer is not None:
            after_ns = self.looks.plan(perf_counter_ns(), period_ns) if period_ns else 0
            self._times[2], self._times[3] = divmod(after_ns, 10**9)
            self._libc.timer_settime(self._timer, 0, ctypes.byref(self._times), None)

    def _ask_again(self, frame: FrameType) -> None:
        if self._paused:
            return
        now_ns, used_ns = perf_counter_ns(), thread_time_ns()
        place = id(frame.f_code), frame.f_lasti
        if place != self._place or used_ns - self._used_ns > _STANDS * (now_ns - self._looked_ns):
            self._place, self._since_ns = place, now_ns
        self._used_ns, self._looked_ns = used_ns, now_ns
        keep_restarting()
        self._ask(min(max(PERIOD_NS, int(_OF_STANDING * (now_ns - self._since_ns))), _SELDOM_NS))

    def late_ns(self, now_ns: int) -> int:
        """How long ago the signal was sent."""
        return max(now_ns - self.looks.due_ns, 0)

    def stop(self) -> None:
        """Delete the timer and restore the handler."""
        if self._timer is not None:
            self._libc.timer_delete(self._timer)
            self._timer = None
        self._handler.look = None
        in_main = threading.current_thread() is threading.main_thread()  # others may not
        if in_main and signal.getsignal(SIGNAL) is self._handler:
            signal.signal(SIGNAL, self._before)


def keep_restarting() -> None:
    """Let a system call go on that the signal interrupts. Lightning registers all handlers anew, which undoes it."""
    signal.siginterrupt(SIGNAL, False)  # noqa: FBT003  (the function has no keyword)


class LookingThread:
    """Looks from a thread: up to 5 ms late, and only where the other one lets go of the interpreter lock."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._seen = threading.get_ident()
        self._paused = False
        self.looks = Looks()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-stacks", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def pause(self, *, on: bool) -> None:
        """Whether to leave the thread alone for now."""
        self._paused = on

    def late_ns(self, now_ns: int) -> int:  # noqa: ARG002  (the other one wakes it)
        """0: it does not wake the thread."""
        return 0

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.looks.plan(perf_counter_ns(), PERIOD_NS) / 1e9):
                frame = sys._current_frames().get(self._seen)  # noqa: SLF001  (the public way to its stack)
                if frame is not None and not self._paused:
                    self._look(frame)
                del frame  # its locals are the user's
        except Exception as exc:
            _log.warning("The stack of a thread is not sampled any more: %s: %s", type(exc).__name__, exc)

"""Whether training stood still in a step: its process was stopped, or the thread that watches training saw a hang."""

import os
import sys
from collections.abc import Mapping
from math import inf
from threading import Event, get_native_id
from time import perf_counter_ns
from typing import Final, NamedTuple

from lightning_forge_profiling.host import thread_counts
from lightning_forge_profiling.ranks.standing import patient_part
from lightning_forge_profiling.timing.ledger import LedgerClock

_LEAST_S: Final = 2.0  # twice as long as the thread that watches sleeps
_OF_POLLS: Final = 0.25  # a thread that waits for the interpreter lock polls it once a switch interval


class Standstill(NamedTuple):
    """A time in which training stood still."""

    seconds: float  # at most
    parts: Mapping[str, int]  # nanoseconds by part of the ledger before it
    why: str
    step: int | None = None  # that of a hang
    began_ns: int = 0  # of a stop, to take it once
    certain: bool = True  # or only if the step never ends


class Standstills:
    """Entered by the thread that watches training, and taken by the training thread at the end of a long step."""

    def __init__(self, ledger: LedgerClock) -> None:
        self._ledger = ledger
        self._sleep: tuple[int, int, float, int, Mapping[str, int]] | None = None
        self._latest: Standstill | None = None
        self._taken_ns = -1

    def sleep(self, wake: Event, seconds: float) -> None:
        """Sleep in the thread that watches training, which a stop of the process makes longer."""
        thread = get_native_id()
        if counts := thread_counts(os.getpid(), thread):
            self._sleep = perf_counter_ns(), thread, counts.used_s, counts.times, self._ledger.peek()
        wake.wait(seconds)
        self._see_stop()
        self._sleep = None

    def _see_stop(self) -> None:
        """For either thread: after a stop, the training thread may be the first to run."""
        if (sleep := self._sleep) is None or (slept_s := (perf_counter_ns() - sleep[0]) / 1e9) < _LEAST_S:
            return
        began_ns, thread, used_s, times, parts = sleep
        counts, most_polls = thread_counts(os.getpid(), thread), _OF_POLLS * slept_s / sys.getswitchinterval()
        # else it waited for a core, or for the interpreter lock, which a call in C held
        if counts and counts.used_s - used_s < slept_s / 4 and counts.times - times < most_polls:
            self._latest = Standstill(slept_s, parts, "the process was stopped", began_ns=began_ns)

    def hang(self, step: int, seconds: float, why: str, *, others_end: bool = False, certain: bool = True) -> None:
        """Training stands in a step since so many seconds, and may until the next look."""
        known = self._latest
        if not certain and known is not None and known.step is None:  # a stop is known for sure
            return
        if known is None or known.step != step:
            known = Standstill(seconds, self._ledger.peek(), why, step)
        # all of a step's part is a hang, but a validation run may have gone on for long before
        most_s = seconds + _LEAST_S if patient_part(self._ledger.open_parts()) else inf
        # what was said before ranks ended tells why, as of a hang that Ctrl-C ends on one rank after the other
        self._latest = Standstill(most_s, known.parts, known.why if others_end else why, step, certain=certain)

    def take(self, step: int, *, ends: bool) -> Standstill | None:
        """That of a step which took a second or more, and ends or does not, since the fit ends."""
        self._see_stop()
        found, self._latest = self._latest, None
        if (
            found is None
            or (ends and not found.certain)
            or found.step not in {None, step}
            or found.began_ns == self._taken_ns
        ):
            return None
        self._taken_ns = found.began_ns or self._taken_ns
        return found

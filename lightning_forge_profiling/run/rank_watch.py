"""The thread that tells the other ranks how this one does, hears them on rank 0, and notices stalls."""

import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.rank_status import ranks_status
from lightning_forge_profiling.host import resident_bytes
from lightning_forge_profiling.names import EXCLUDED
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.ranks.agreement import Follower, Leader, Slowness
from lightning_forge_profiling.ranks.channel import Channel, open_channel
from lightning_forge_profiling.ranks.hangs import HangWatch
from lightning_forge_profiling.ranks.stalls import Progress
from lightning_forge_profiling.record.files import (
    decode_plan,
    decode_pulse,
    encode_message,
    later,
    read_plan,
    take_request,
    write_heard,
    write_plan,
    write_pulse,
)
from lightning_forge_profiling.report.ranks import straggler_words
from lightning_forge_profiling.run.fit_window import FitWindow
from lightning_forge_profiling.run.rank_work import LiveWork
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import (
    Ended,
    Hang,
    LastPulse,
    LateRank,
    Pulse,
    RanksStatus,
    WindowAnswer,
    WindowPlan,
    WindowRequest,
)

_log = plain_logger(__name__)

PERIOD_S: Final = 1.0
_CLOSE_S: Final = 2.0
_HEARING_PART: Final = 100  # of a rank's time, what hearing the others takes of its thread
_GIB: Final = 2**30

Note = Callable[[str, str, float], None]  # takes kind, text and seconds of an event


_LEAST_FREE: Final = 2 * 2**30  # bytes on the disk of the traces


class WindowAgreement:
    """Called about once a second by the thread that talks to the other ranks."""

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        training: Training,
        window: FitWindow,
        step_timer: StepTimer,
        note: Callable[[str, str], None],
    ) -> None:
        self.answer = WindowAnswer()
        rank = training.facts.rank
        self._folder, self._rank, self._window, self._step_timer, self._note = folder, rank, window, step_timer, note
        window.record = folder
        self._leader = Leader(
            run, training.facts.world_size, training.pauses(), training.ahead().of_fit, window.named_steps()
        )
        self._follower = Follower(run, rank, refusal=self._refusal, arm=window.arm)
        self._slowness = Slowness() if window.when_slow else None

    def hear(self, channel: Channel | None) -> None:
        """Read the latest plan, and answer it."""
        plan = self._leader.plan if self._rank == 0 else self._announced(channel)
        self.answer = self._follower.hear(plan, self.answer, self._step_timer.step)
        if plan is not None and plan.number == self.answer.number and plan.state == "agreed":
            self.answer = self._window.answer_to(plan, self.answer)

    def lead(self, channel: Channel | None, pulses: Mapping[int, Pulse], status: RanksStatus) -> None:
        """On rank 0: take a request, and tell the others of a plan that has changed."""
        request = take_request(self._folder) if self._leader.is_free else None  # a further one waits in the folder
        if request is None and self._slowness is not None and self._leader.is_free:
            request = self._noticed(self._slowness, status)
        if request is not None:
            self._leader.ask(request)
        if self._leader.look(time.monotonic(), pulses, status) and self._leader.plan is not None:
            self._tell(channel, self._leader.plan)

    def _tell(self, channel: Channel | None, plan: WindowPlan) -> None:
        if plan.state in {"agreed", "recorded"}:
            plan = replace(plan, folder=str(self._window.folder_of(plan)), analyzed=self._window.analyzes)
        if channel is not None:
            channel.announce(encode_message(plan))
        with suppress(OSError):
            write_plan(self._folder, plan)
        if plan.state == "refused":
            self._note("window", f"no steps are recorded: {plan.text}")
        elif plan.state == "agreed":
            who = "all ranks" if not plan.ranks else f"ranks {', '.join(map(str, plan.ranks))}"
            why = f" ({plan.text})" if plan.text else ""
            self._note("window", f"{who} will record steps {plan.start} to {plan.start + plan.steps - 1}{why}")

    def _announced(self, channel: Channel | None) -> WindowPlan | None:
        message = None if channel is None else channel.announced()
        if message is None:
            return read_plan(self._folder)
        try:
            return decode_plan(message)
        except ValueError:
            return None

    def _noticed(self, slowness: Slowness, status: RanksStatus) -> WindowRequest | None:
        timer, spent = self._step_timer, self._step_timer.ledger.peek()
        slowest = timer.totals.slowest
        why = slowness.look(
            time.perf_counter(),
            timer.step,
            sum(ns for part, ns in spent.items() if part.partition("/")[0] in EXCLUDED) / 1e9,
            (slowest[0].step, slowest[0].ms) if slowest else (0, 0.0),
            status.straggler,
        )
        return WindowRequest(id=secrets.token_hex(8), why=why) if why else None

    def _refusal(self) -> str:
        folder = self._window.folder
        with suppress(OSError):
            existing = next(each for each in (folder, *folder.parents) if each.exists())
            if shutil.disk_usage(existing).free < _LEAST_FREE:
                return f"the disk of {folder} has less than {_LEAST_FREE // 2**30} GiB left"
        return self._window.refusal()


class Pulses:
    """Makes this rank's pulses."""

    def __init__(
        self,
        first: Pulse,
        step_timer: StepTimer,
        hangs: HangWatch,
        *,
        work: LiveWork,
        sensors: Callable[[], Mapping[str, float]],
    ) -> None:
        self._first, self._step_timer, self._hangs = first, step_timer, hangs
        self._work, self._sensors = work, sensors
        self._number = 0
        self._cpu: tuple[float, float] | None = None

    def make(self, ended: Ended, answer: WindowAnswer) -> Pulse:
        """The pulse of now."""
        number, self._number = self._number, self._number + 1
        ledger, memory = self._step_timer.ledger, resident_bytes()
        progress = Progress(step=self._step_timer.step, parts=ledger.open_parts(), changed_ns=ledger.changed_ns)
        stall, silent = self._hangs.look(progress, ended=bool(ended))
        no_step_s, place = self._hangs.where
        return replace(
            self._first,
            number=number,
            at=time.time(),
            step=progress.step,
            part=next(reversed(progress.parts), ""),
            no_step_s=no_step_s,
            place=place,
            ended=ended,
            work=self._work.latest(),
            cpu_pct=self._cpu_pct(),
            memory_gib=None if memory is None else memory / _GIB,
            sensors=dict(self._sensors()),
            stall=stall,
            silent=silent,
            answer=answer,
        )

    def _cpu_pct(self) -> float | None:
        before, self._cpu = self._cpu, (time.perf_counter(), time.process_time())
        if before is None or self._cpu[0] <= before[0]:
            return None
        return 100 * (self._cpu[1] - before[1]) / (self._cpu[0] - before[0])


class RankWatch:
    """Publishes this rank's pulse once a second. No method waits for another rank, and no failure reaches training."""

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        rank: int,
        world_size: int,
        step_timer: StepTimer,
        work: LiveWork,
        sensors: Callable[[], Mapping[str, float]],
        note: Note,
        hangs: HangWatch,
        windows: WindowAgreement | None = None,
    ) -> None:
        self.status: RanksStatus | None = None  # of all ranks, on rank 0
        self._folder, self._note = folder, note
        self._first = Pulse(
            run=run,
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            number=0,
            restarts=_restarts(os.environ),
            at=0.0,
        )
        self._pulses = Pulses(self._first, step_timer, hangs, work=work, sensors=sensors)
        self._standstills, self._hangs, self._windows = step_timer.standstills, hangs, windows
        self._heard: dict[int, LastPulse] = {}
        self._was_stalled = False
        self._ended: Ended = ""
        self._wake = threading.Event()
        self._channel: Channel | None = None
        self._hear_at = 0.0
        self._thread = threading.Thread(target=self._run, name="forge-ranks", daemon=True)

    def start(self) -> None:
        """Begin to publish, as training begins."""
        first = self._first
        if first.world_size > 1:
            self._channel = open_channel(self._folder, first.run, first.rank, first.world_size)
        self._thread.start()

    def close(self, ended: Ended) -> bool:
        """Publish how the fit ended, and end the thread; returns whether it has ended."""
        self._ended = ended
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S / 2)
            if self._thread.is_alive() and self._channel is not None:
                self._channel.interrupt()
                self._thread.join(_CLOSE_S / 2)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            try:
                while not self._ended:
                    self._beat()
                    self._standstills.sleep(self._wake, PERIOD_S)
                self._beat()
            finally:
                if self._channel is not None:
                    self._channel.close()
        except Exception as exc:
            _log.debug("The ranks are no longer compared live.", exc_info=exc)

    def _beat(self) -> None:
        if self._windows is not None and not self._ended:
            self._windows.hear(self._channel)
        pulse = self._pulses.make(self._ended, WindowAnswer() if self._windows is None else self._windows.answer)
        if self._channel is not None:
            self._channel.send(encode_message(pulse))
        stalled = pulse.stall is not None or bool(pulse.silent) or (self._channel is None and pulse.no_step_s > 0)
        # also at the end, when rank 0 may have stopped listening
        if stalled or self._was_stalled or (pulse.ended and pulse.rank != 0):
            with suppress(OSError):  # such as a folder that is on another host
                write_pulse(self._folder, pulse)
        self._was_stalled = stalled
        if pulse.rank == 0:  # it alone notes what becomes of the ranks, so that a hang is one event
            self._hear(pulse)
        stall = pulse.stall
        if stall is not None and not (stall.waits and self._others_move()):  # a hang is no step's time
            own = {pulse.rank: LastPulse(pulse=pulse, at=pulse.at)}
            status = self.status or ranks_status(own, pulse.world_size, pulse.at)
            why = "training stood still" if status.hang is None else status.hang.where
            end = any(one.state in {"failed", "finished", "gone"} for one in status.ranks)
            self._standstills.hang(pulse.step, stall.seconds, why, others_end=end)
        elif stall is None and (at_end := self._hangs.at_end)[0]:
            why = f"training stood still{at_end[1] and f' in {at_end[1]}'}"
            self._standstills.hang(pulse.step, at_end[0], why, certain=False)

    def _others_move(self) -> bool:
        """Whether this rank, which hears all others, knows of no hang: it waits for one in validation or the like."""
        return self._channel is not None and self.status is not None and not self.status.hang

    def _hear(self, own: Pulse) -> None:
        """Hear the other ranks, but not so often that many of them would take more than a hundredth of a core."""
        if time.monotonic() < self._hear_at and not own.ended:
            return
        began_s, now = time.thread_time(), time.time()
        for pulse in [own, *_decoded(() if self._channel is None else self._channel.receive())]:
            if pulse.run == own.run and pulse.rank < own.world_size:
                self._heard[pulse.rank] = later(self._heard.get(pulse.rank), pulse, now)
        status = ranks_status(self._heard, own.world_size, now)
        self._tell(status)
        if self._channel is not None:
            with suppress(OSError):
                write_heard(self._folder, self._heard.values())
        if self._windows is not None:
            self._windows.lead(self._channel, {rank: one.pulse for rank, one in self._heard.items()}, status)
        self._hear_at = time.monotonic() + _HEARING_PART * (time.thread_time() - began_s)

    def _tell(self, status: RanksStatus) -> None:
        """Keep the status, and note what is new in it."""
        before = self.status or RanksStatus()
        known, now = _undated(before.hang), _undated(status.hang)
        if now and known != now and known.startswith(now):  # who waited is heard to move before whom it waited for
            status, now = replace(status, hang=before.hang), known
        self.status = status
        if status.straggler is not None and _changed(before.straggler, status.straggler):
            self._note("straggler", straggler_words(status.straggler), 0.0)
        if self._ended:
            return
        if status.hang is not None and now != known:
            self._note("hang", status.hang.where, 0.0)
        elif status.hang is None and before.hang is not None:
            self._note("hang", f"{known}; the ranks move again", before.hang.seconds)


def _decoded(messages: Iterable[bytes]) -> Iterator[Pulse]:
    for message in messages:
        try:
            yield decode_pulse(message)
        except ValueError as exc:
            _log.debug("The message of a rank cannot be read: %s", exc)


def _undated(hang: Hang | None) -> str:
    """What is known of a hang, without for how long: the place may become known later. "" for none."""
    return "" if hang is None else re.sub(r" for \d+ s", "", hang.where)


def _restarts(environment: Mapping[str, str]) -> int:
    """How often `torchrun`, or Slurm's requeue, has started this run anew."""
    counts = (environment.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return sum(int(count) for count in counts if re.fullmatch(r"\d{1,9}", count))


def _changed(before: LateRank | None, after: LateRank) -> bool:
    return before is None or (before.rank, before.cause) != (after.rank, after.cause)

"""Windows that a live run is asked for, on one rank: who asks, what the ranks agree on, and the steps that follow."""

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.callbacks.fit_window import FitWindow
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.names import EXCLUDED
from lightning_forge_profiling.ranks.agreement import Follower, Leader, Slowness
from lightning_forge_profiling.ranks.channel import Channel
from lightning_forge_profiling.record.windows import decode_plan, encode_plan, read_plan, take_request, write_plan
from lightning_forge_profiling.schema import Pulse, RanksStatus, WindowAnswer, WindowPlan, WindowRequest

_LEAST_FREE: Final = 2 * 2**30  # bytes on the disk of the traces


class WindowAgreement:
    """Called about once a second by the thread that talks to the other ranks."""

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        rank: int,
        world_size: int,
        window: FitWindow,
        step_timer: StepTimer,
        note: Callable[[str, str], None],
    ) -> None:
        self.answer = WindowAnswer()
        self._folder, self._rank, self._window, self._step_timer, self._note = folder, rank, window, step_timer, note
        window.record = folder
        self._leader = Leader(run, world_size, window.pause_before, window.steps_ahead, window.named_steps)
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
            channel.announce(encode_plan(plan))
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

"""The base class of both callbacks: one step timer for the two of them, driven by the first in the Trainer's list."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Any, Final

import torch

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.accumulation import AccumulationCycles
from lightning_forge_profiling.callbacks.batch_counts import FlopsPerBatch, WorkCounter
from lightning_forge_profiling.callbacks.boundary_profiler import StandIn
from lightning_forge_profiling.callbacks.cpu_account import CpuAccount
from lightning_forge_profiling.callbacks.guard import guarded
from lightning_forge_profiling.callbacks.ledger_parts import (
    LedgerParts,
    SetUpParts,
    hook_parts,
    set_up_parts,
    tear_down,
)
from lightning_forge_profiling.callbacks.lightning_api import Callback, LightningModule, Trainer
from lightning_forge_profiling.callbacks.plain_steps import PlainSteps
from lightning_forge_profiling.callbacks.run_report import leave_figures, run_report
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.host import process_age_s
from lightning_forge_profiling.names import PROFILER, REGIONS, STARTUP_PROCESS
from lightning_forge_profiling.record.histogram import bucket
from lightning_forge_profiling.report.run_output import print_run
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.budget import DEFAULT_SHARE, TimingBudget
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.ledger import Ledger, LedgerClock
from lightning_forge_profiling.timing.rates import StepWork
from lightning_forge_profiling.timing.region import RegionSink, set_region_sink
from lightning_forge_profiling.timing.run_totals import RunSummary
from lightning_forge_profiling.timing.utilization import Compute

DEFAULT_WARMUP_STEPS = 10
"""Compilation, autotuning and lazy initialization happen in the first step or two, the allocator's pools settle within
a few, and a loader with four workers has eight batches ready at the start that it will never have again."""

_MANUAL_HOOKS = ("on_before_backward", "on_after_backward")


_SET_UP: Final = "startup/fit"
_TEAR_DOWN: Final = "teardown"

_fits = count()
"""Counts the fits of this process."""


def _run_began_ns() -> int:
    """When the run began: with its process, or with this fit if the process is interactive or has had another fit."""
    first = next(_fits) == 0 and not hasattr(sys, "ps1") and "ipykernel" not in sys.modules
    age_s = process_age_s() if first else None
    return perf_counter_ns() - int((age_s or 0.0) * 1e9)


def _are_twins(one: "TimedCallback", other: "TimedCallback") -> bool:
    return isinstance(one, type(other)) or isinstance(other, type(one))


def _taking_part(callbacks: Iterable[Callback]) -> "tuple[TimedCallback, ...]":
    """The enabled callbacks of this package: of each kind those of the script, else the first that `run` added.

    A script that gives one list to two Trainers has what was added to the first in the second, too.
    """
    ours = [callback for callback in callbacks if isinstance(callback, TimedCallback) and callback.enabled]
    chosen = [callback for callback in ours if not callback.added]
    for callback in ours:
        if callback.added and not any(_are_twins(callback, other) for other in chosen):
            chosen.append(callback)
    return tuple(callback for callback in ours if callback in chosen)


class TimedCallback(Callback):
    """Drives the step timer that the callbacks of this package share within one Trainer.

    The first of them in the Trainer's list leads: it creates the step timer, wraps the Trainer's profiler while the
    training loop runs, and ends the steps. The last one prints the table.
    """

    warmup_steps: int | None = None
    regions: Collection[str] = REGIONS
    batch_size_fn: Callable[[Any], int] | None = None
    tokens_fn: Callable[[Any], int] | None = None
    flops_per_batch: FlopsPerBatch = None
    overhead: float | None = DEFAULT_SHARE
    record: bool = False
    enabled: bool = True
    added: bool = False
    """Whether `forge-profiling run` added it: then it gives way to others of its kind, and refuses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._analysis: Analysis | None = None
        self._ledger: Ledger | None = None
        self._let_go()

    def _let_go(self) -> None:
        """Drop every reference to a fit but its results. Stops nothing that is running: copies use it, too."""
        self._peers: tuple[TimedCallback, ...] = ()
        self._step_timer: StepTimer | None = None
        self._stand_in: StandIn | None = None
        self._previous_sink: RegionSink | None = None
        self._cycles: AccumulationCycles | None = None
        self._counter: WorkCounter | None = None
        self._ledger_clock: LedgerClock | None = None
        self._ledger_parts: LedgerParts | None = None
        self._set_up_parts: SetUpParts | None = None
        self._hook_parts: Mapping[str, str] = {}
        self._cpu: CpuAccount | None = None
        self._watched: tuple[lightning_api.WatchedLoop, ...] = ()
        self._plain_steps: PlainSteps | None = None
        self._kind_of_step = (False, True)
        self._continues_from = 0
        self._failed = False
        for name in lightning_api.BATCH_HOOKS:
            self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the results: a copy takes no part in a running fit."""
        idle = object.__new__(type(self))
        idle.__dict__.update(self.__dict__)
        idle._let_go()
        return {name: value for name, value in idle.__dict__.items() if name not in lightning_api.LOGGING_ATTRIBUTES}

    def analysis(self) -> Analysis | None:
        """The verdict on the last fit, with the findings and figures behind it.

        Returns:
            On rank 0 after a fit, the analysis of its steady steps, and of the trace if one was analysed; None before,
            on other ranks, and if there is neither.
        """
        return self._analysis

    def ledger(self) -> Ledger | None:
        """Where the wall time of the fit went, up to now or of the last fit: parts that sum to it.

        Returns:
            The seconds of each part on this rank; None before a fit.
        """
        clock = self._peers[0]._ledger_clock if self._peers else None  # noqa: SLF001  (one of us)
        return self._ledger if clock is None else clock.read()

    @property
    def counts_flops(self) -> bool:
        """Whether the FLOPs per batch are given, by an argument or by the module."""
        return bool(self._peers and (counter := self._peers[0]._counter) and counter.counts_flops)  # noqa: SLF001

    # -- what the subclasses add ---------------------------------------------------------------------------------

    @property
    def records_step(self) -> bool:
        """Whether the profiler records the current step."""
        return False

    def trace_report(self) -> TraceReport | None:
        """The report on the recorded window; None for a callback that records none."""
        return None

    def prepare(self, trainer: Trainer) -> None:
        """Called in `setup`, once the step timer exists. May raise ConfigurationError."""

    def begin(self, trainer: Trainer) -> None:
        """The training loop begins."""

    def after_step(self, trainer: Trainer) -> None:
        """Called once the step timer has ended a step."""

    def idle_steps(self, trainer: Trainer) -> int:
        """How many of the next steps need no call of `after_step`."""
        return sys.maxsize

    def skip_steps(self, steps: int) -> None:
        """This many steps have ended without a call of `after_step`."""

    def before_other_steps(self) -> None:
        """Called before a step that is the first, or first not, to be a warm-up step or `profiled`."""

    def end(self, trainer: Trainer, *, interrupted: bool) -> None:
        """The training loop has ended."""

    def failing(self, exception: BaseException) -> None:
        """Called first when the run fails, before anything is closed."""

    def finish(self, *, interrupted: bool) -> None:
        """Called at the end of the fit, before the table is printed."""

    def compute(
        self, trainer: Trainer, run: RunSummary, trace: TraceReport | None, recorded: Analysis | None
    ) -> tuple[Compute, ...]:
        """Called on rank 0 before the table: the compute rates that this callback knows.

        Args:
            trainer: of the fit.
            run: the run's totals.
            trace: the report on the window.
            recorded: the analysis of the window.
        """
        return ()

    def copy_files(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Called on every rank once its files are complete, before the table: copy them to a remote folder."""

    def publish_result(self, trainer: Trainer, analysis: Analysis, *, interrupted: bool) -> None:
        """Called on rank 0 once the table is printed."""

    def concluded(self, trainer: Trainer, report: RunReport | None, *, interrupted: bool) -> None:
        """Called last, on every rank; must not raise.

        Args:
            trainer: of the fit.
            report: the content of the table, also on ranks that print none; None if there is none.
            interrupted: whether the fit ended by an exception.
        """

    def pause(self) -> None:
        """Validation begins, which is no part of a step."""

    def resume(self) -> None:
        """Validation has ended."""

    def telemetry(self, run: RunSummary) -> TelemetrySummary | str | None:
        """Called on rank 0 before the table: the GPU's telemetry, or why there is none; None if not asked for."""
        return None

    # -- hooks ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the other callbacks of this package, and refuse what cannot work."""
        if stage != "fit" or not self.enabled:
            return
        for watched in self._watched:
            watched.release()
        self._abandon(trainer)
        self.concluded(trainer, None, interrupted=True)
        self._let_go()
        self._analysis = self._ledger = None
        peers = _taking_part(trainer.callbacks)
        if self not in peers:
            return
        twins = [peer for peer in peers if _are_twins(peer, self)]
        if len(twins) > 1:
            raise ConfigurationError(f"The Trainer has {len(twins)} {type(self).__name__} callbacks; pass one.")
        self._peers = peers
        if self._leads:
            warmup = [peer.warmup_steps for peer in peers if peer.warmup_steps is not None]
            overhead = next((peer.overhead for peer in peers if peer.overhead != DEFAULT_SHARE), DEFAULT_SHARE)
            self._ledger_clock = LedgerClock(_run_began_ns(), STARTUP_PROCESS)
            self._ledger_clock.turn_to(_SET_UP)
            self._step_timer = StepTimer(
                CUDATimerCollection((), device=trainer.strategy.root_device),
                regions=set.intersection(*(set(peer.regions) for peer in peers)),
                warmup_steps=max(warmup, default=DEFAULT_WARMUP_STEPS),
                budget=TimingBudget(overhead),
                ledger=self._ledger_clock,
                bucket=bucket if any(peer.record for peer in peers) else None,
            )
            self._watched = (
                lightning_api.WatchedLoop(trainer.fit_loop, failed=partial(self._loop_failed, trainer)),
                lightning_api.WatchedLoop(trainer.fit_loop.epoch_loop.val_loop, begins=self._enter_validation),
            )
        else:
            self._step_timer = peers[0]._step_timer  # noqa: SLF001  (one of us)
        self.prepare(trainer)
        if peers[-1] is self:  # from here on none of us looks at the user's profiler
            peers[0]._watch_set_up(trainer, pl_module)  # noqa: SLF001  (one of us)

    @guarded
    def _watch_set_up(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._step_timer is not None  # noqa: S101  (setup made both)
        assert self._ledger_clock is not None  # noqa: S101
        parts = set_up_parts(hook_parts(trainer, module, self._peers))
        self._set_up_parts = SetUpParts(self._ledger_clock, self._step_timer, trainer, parts)

    @guarded
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the Trainer's profiler and start the first step."""
        step_timer = self._step_timer
        assert step_timer is not None  # noqa: S101
        if self._leads:
            self._continues_from = int(trainer.global_step)
            self._cycles = AccumulationCycles(lightning_api.step_progress(trainer, pl_module).updates.completed)
            self._counter = self._work_counter(pl_module)
            self._plain_steps = PlainSteps(step_timer, self._counter, self._cycles)
            self._leave_set_up()
            self._hook_parts = hook_parts(trainer, pl_module, self._peers)
            self._cpu = cpu = CpuAccount(partial(lightning_api.worker_processes, trainer))
            actions = lightning_api.actions(trainer, pl_module)._replace(fetch=(cpu.fetch_begins, cpu.fetch_ends))
            self._stand_in = StandIn(step_timer, actions, self._hook_parts)
            self._stand_in.take_place(trainer)
            self._previous_sink = set_region_sink(step_timer)
            if self._ledger_clock is not None:
                self._ledger_parts = LedgerParts(self._ledger_clock, trainer, self._warming_up)
            step_timer.start()
        self._skip_hooks(manual=not pl_module.automatic_optimization)
        self.begin(trainer)

    @guarded
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Begins `backward` in manual optimization; in automatic optimization the Trainer's profiler announces it."""
        if self._leads and self._step_timer is not None and not pl_module.automatic_optimization:
            self._step_timer.forward_in_closure()
            self._step_timer.enter("backward")

    @guarded
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends `backward` in manual optimization."""
        if self._leads and self._step_timer is not None and not pl_module.automatic_optimization:
            self._step_timer.exit("backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step. Only the leader has this hook: each further one costs Lightning some microseconds per batch."""
        plain = self._plain_steps
        if self._step_timer is None or (plain is not None and plain.end(batch)):
            return
        began_ns = perf_counter_ns()
        before = [] if plain is None else plain.take()
        self._end_step(trainer, pl_module, batch, before, began_ns)
        for peer in self._peers:
            peer._step_ended(trainer, len(before))  # noqa: SLF001  (one of us)
        kind = self.profiled, self._step_timer.step < self._step_timer.warmup_steps
        if kind != self._kind_of_step:
            self._kind_of_step = kind
            for peer in self._peers:
                peer._other_steps_come()  # noqa: SLF001  (one of us)
        self._account(counts=not any(kind))
        if plain is not None and not self._failed:
            plain.expect(trainer, pl_module, min(peer.idle_steps(trainer) for peer in self._peers))

    @guarded
    def _account(self, *, counts: bool) -> None:
        if self._cpu is not None and self._cpu.due(counts=counts):
            with self.own_work():
                self._cpu.read(counts=counts)

    def _enter_validation(self) -> None:
        self._account(counts=False)
        if self._step_timer is not None:
            self._step_timer.enter_validation()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the sanity check in the ledger."""
        if self._ledger_clock is not None:
            self._ledger_clock.enter("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the sanity check."""
        if self._ledger_clock is not None:
            self._ledger_clock.exit("sanity_check")

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the step."""
        if self._step_timer is not None and self._stand_in is not None:
            self._stand_in.follow(trainer)
            self._step_timer.enter_validation()  # a profiler that was assigned just now has not seen it begin
        self.pause()

    @guarded
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        if self._stand_in is not None:
            self._stand_in.follow(trainer)
        self.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The training loop has ended."""
        self._end(trainer, interrupted=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the run: no other hook will be called. A failure of the training loop itself is handled already."""
        self.come_down(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the fit, or whatever else the Trainer ran."""
        self._close(trainer, interrupted=False)

    def come_down(self, trainer: Trainer, exception: BaseException) -> None:
        """Close a failing run without waiting for anything: other ranks may be elsewhere."""
        self._note(exception)
        self._end(trainer, interrupted=True)
        self._close(trainer, interrupted=True)

    # -- the rest ------------------------------------------------------------------------------------------------

    @property
    def profiled(self) -> bool:
        """Whether any of the callbacks records the current step."""
        return self._peers[0].records_step or self._peers[-1].records_step  # one of each kind at most

    @property
    def _leads(self) -> bool:
        return bool(self._peers) and self._peers[0] is self

    def _in_profiler(self) -> AbstractContextManager[None]:
        clock = self._peers[0]._ledger_clock if self._peers else None  # noqa: SLF001  (one of us)
        return nullcontext() if clock is None else clock.inside(PROFILER)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Around rows and lines of the record: the time counts to the profiler, and to no step."""
        step_timer = self._step_timer
        if step_timer is None or not step_timer.active:
            with self._in_profiler():
                yield
            return
        began_ns = perf_counter_ns()
        step_timer.enter(PROFILER)
        try:
            yield
        finally:
            step_timer.exit(PROFILER)
            step_timer.totals.add_rows((perf_counter_ns() - began_ns) / 1e3)

    def _warming_up(self) -> bool:
        return self._step_timer is not None and self._step_timer.step < self._step_timer.warmup_steps

    def _skip_hooks(self, *, manual: bool) -> None:
        """Switch off the per-batch hooks that do nothing in this callback."""
        for name in lightning_api.BATCH_HOOKS:
            ours, theirs = getattr(type(self), name), getattr(Callback, name)
            idle = not self._leads or (name in _MANUAL_HOOKS and not manual)
            lightning_api.set_hook(
                self, name, on=ours is not theirs and not (idle and ours is getattr(TimedCallback, name))
            )

    def _loop_failed(self, trainer: Trainer, exception: BaseException) -> None:
        if self._step_timer is not None and self._step_timer.began:  # it is ours, and not a tuner's before it
            for peer in self._peers:
                peer.come_down(trainer, exception)

    @guarded
    def _end_step(
        self, trainer: Trainer, module: LightningModule, batch: Any, before: Sequence[StepWork], began_ns: int
    ) -> None:
        step_timer, stand_in = self._step_timer, self._stand_in
        if step_timer is not None and stand_in is not None:
            step_timer.end_step(
                self._work(trainer, module, batch, step_timer.step),
                before,
                recorded=self.profiled,
                ends_epoch=lightning_api.ends_epoch(trainer),
                saw_all=stand_in.saw_step(trainer, trained=batch is not None),
                began_ns=began_ns,
            )
            if self._ledger_parts is not None:
                self._ledger_parts.end_step()

    @guarded
    def _step_ended(self, trainer: Trainer, skipped: int) -> None:
        if skipped:
            self.skip_steps(skipped)
        self.after_step(trainer)

    @guarded
    def _other_steps_come(self) -> None:
        self.before_other_steps()

    @guarded
    def _note(self, exception: BaseException) -> None:
        self.failing(exception)

    @guarded
    def _end(self, trainer: Trainer, *, interrupted: bool) -> None:
        for name in lightning_api.BATCH_HOOKS:
            self.__dict__.pop(name, None)
        self._step_back(trainer, wait=not interrupted)
        with self._in_profiler():
            self.end(trainer, interrupted=interrupted)
        if self._peers[-1] is self and not interrupted and self._step_timer is not None:
            leave_figures(trainer, self._step_timer, self._peers, self.ledger())

    def _leave_set_up(self) -> None:
        """Restore what was replaced in `setup`."""
        watching, self._set_up_parts = self._set_up_parts, None
        if watching is not None:
            watching.close()

    def _step_back(self, trainer: Trainer, *, wait: bool) -> None:
        """Stop timing, and restore what the leader replaced when the training loop began."""
        self._leave_set_up()
        standing, self._stand_in = self._stand_in, None
        if standing is None or self._step_timer is None:
            return
        standing.leave(trainer)
        if self._cpu is not None:
            self._cpu.read(counts=False)
        before = [] if self._plain_steps is None else self._plain_steps.take()
        for peer in self._peers:
            peer.skip_steps(len(before))
        set_region_sink(self._previous_sink)
        if self._ledger_parts is not None:
            self._ledger_parts.close()
        try:
            self._step_timer.finish(before, wait=wait)  # last: Ctrl-C may end the wait
        finally:
            if self._ledger_clock is not None:
                self._ledger_clock.turn_to(_TEAR_DOWN)
        if wait:  # no hooks follow an exception
            tear_down(self._step_timer, trainer, self._hook_parts)

    @guarded
    def _abandon(self, trainer: Trainer) -> None:
        """Close a fit that ended without calling any hook."""
        self._step_back(trainer, wait=False)
        self.finish(interrupted=True)

    def _close(self, trainer: Trainer, *, interrupted: bool) -> None:
        for watched in self._watched:
            watched.release()
        self._watched = ()
        self._conclude(trainer, interrupted=interrupted)
        for name in lightning_api.LOGGING_ATTRIBUTES:
            self.__dict__.pop(name, None)

    @guarded
    def _conclude(self, trainer: Trainer, *, interrupted: bool) -> None:
        self._leave_set_up()
        StandIn.leave(trainer)  # again: who kept ours may have assigned it since
        with self._in_profiler():
            self._finish(trainer, interrupted=interrupted)

    def _finish(self, trainer: Trainer, *, interrupted: bool) -> None:
        self.finish(interrupted=interrupted)
        step_timer, peers, self._step_timer = self._step_timer, self._peers, None
        if peers[-1:] != (self,):
            return
        report = None
        try:
            report = self._final_report(trainer, step_timer, interrupted=interrupted)
            if report is not None and trainer.is_global_zero:
                self._show(trainer, report, interrupted=interrupted)
        finally:
            ledger = self.ledger()
            for peer in peers:
                peer.concluded(trainer, report, interrupted=interrupted)
                peer._let_go()  # noqa: SLF001  (one of us)
                peer._ledger = ledger  # noqa: SLF001  (one of us)

    def _final_report(self, trainer: Trainer, step_timer: StepTimer | None, *, interrupted: bool) -> RunReport | None:
        peers = self._peers
        if step_timer is None:
            return None
        if not step_timer.began or not (trainer.is_global_zero or any(peer.record for peer in peers)):
            for peer in peers:
                peer.copy_files(trainer, interrupted=interrupted)
            return None
        return run_report(
            trainer,
            step_timer,
            peers,
            ledger=self.ledger(),
            continues_from=peers[0]._continues_from,  # noqa: SLF001  (one of us)
            cpu=peers[0]._cpu,  # noqa: SLF001  (one of us)
            interrupted=interrupted,
        )

    def _show(self, trainer: Trainer, report: RunReport, *, interrupted: bool) -> None:
        peers = self._peers
        # standard output belongs to a script that knows nothing of us
        print_run(report, Screen(sys.stderr, wrap=True) if all(peer.added for peer in peers) else None)
        for peer in peers:
            peer._analysis = report.analysis  # noqa: SLF001  (one of us)
            if report.analysis is not None:
                peer.publish_result(trainer, report.analysis, interrupted=interrupted)

    def _work_counter(self, module: LightningModule) -> WorkCounter:
        first, last = self._peers[0], self._peers[-1]  # one of each kind at most
        flops = last.flops_per_batch if first.flops_per_batch is None else first.flops_per_batch
        return WorkCounter(first.batch_size_fn or last.batch_size_fn, first.tokens_fn or last.tokens_fn, flops, module)

    def _work(self, trainer: Trainer, module: LightningModule, batch: Any, step: int) -> StepWork:
        assert self._counter is not None  # noqa: S101  (on_train_start made both)
        assert self._cycles is not None  # noqa: S101
        _, updates, each_changes = lightning_api.step_progress(trainer, module)
        changed, ends_cycle = self._cycles.after_batch(updates.completed, step, each_changes=each_changes)
        return self._counter.count(batch, trainer, optimizer_steps=int(changed), ends_cycle=ends_cycle)

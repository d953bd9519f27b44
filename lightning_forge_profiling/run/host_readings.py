"""What is read of the host while a fit trains: CPU times, stacks of the training thread and of a worker, switches."""

from typing import Any

from msgspec.structs import replace

from lightning_forge_profiling.run.batches import UNSEEN
from lightning_forge_profiling.run.cpu_account import AUTOGRAD, CpuAccount
from lightning_forge_profiling.run.run_settings import find_switches, padding_pct
from lightning_forge_profiling.run.stack_sampler import PlaceTimes, StackSampler, begin_sampling, end_sampling
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.run.worker_stacks import WorkerStacks
from lightning_forge_profiling.schema import VALIDATION_WORKER_LINES, WORKER_LINES, CpuUse, SampledLine, Switches


class HostReadings:
    """Reads the host between steps, and hands over what it found."""

    def __init__(self, step_timer: StepTimer) -> None:
        self._step_timer = step_timer
        self._cpu: CpuAccount | None = None
        self.sampler: StackSampler | None = None
        self._times = PlaceTimes()  # what it has sampled, which stays when it ends
        self._is_plain = False
        self.workers, self.validation_workers = WorkerStacks(), WorkerStacks(validation=True)
        self.switches: Switches | None = None
        self._knows_padding = False

    def sample_stacks(self) -> None:
        """Sample this thread's stack from here to the end of the fit."""
        self.sampler = begin_sampling(self._step_timer.ledger.innermost)
        self._times = self.sampler.times

    def is_plain_loop(self) -> None:
        """The loop is the script's own, so that stacks do not show the regions of a step."""
        self._is_plain = True
        if self.sampler is not None:
            self.sampler.region = self._step_timer.regions.under_way

    def end_stacks(self) -> None:
        """The fit is over, or its set-up has failed and nothing may follow."""
        sampler, self.sampler = self.sampler, None
        if sampler is not None:
            end_sampling(sampler)

    def begin(self, training: Training) -> None:
        """Training begins."""
        of_step = AUTOGRAD if self._step_timer.timers.on_device else ""
        self._cpu = cpu = CpuAccount(training.worker_processes, threads=of_step)
        cpu.watch_thread()
        if (sampler := self.sampler) is not None:
            cpu.woken_ns = lambda: sampler.woken_ns
        followers = self._step_timer.regions.followers
        followers.region_ends, followers.stood_still = cpu.turn, cpu.skip
        followers.loader_starts, followers.loader_started = self.workers.watch, self.workers.release

    def look_up_switches(self, training: Training, batch: Any, *, recording: bool) -> None:
        """Find them, once: after the first step, as the user's hooks may set them before it.

        And the padding of the first batch that is known: a plain loop's first step has none.
        """
        known = batch is not None and batch is not UNSEEN
        if self.switches is not None and (self._knows_padding or not known):
            return
        with self._step_timer.profiler_overhead():
            switches = self.switches or find_switches(training, recording=recording)
            self.switches = replace(switches, padding_pct=padding_pct(batch))
        self._knows_padding = known

    def between_steps(self, now_s: float, *, counts: bool) -> None:
        """Read what is due by `time.perf_counter`; `counts` is of the step that comes."""
        cpu = self._cpu
        if self.sampler is not None:
            self.sampler.counts, self.sampler.paces = counts, not self._step_timer.host_is_ahead
        if cpu is None or not cpu.due(now_s, counts=counts):
            return
        with self._step_timer.profiler_overhead():
            cpu.read(counts=counts)

    def recording_begins(self, *, stacks: bool) -> None:
        """A profiler starts, with Python stacks or without: the CPU time of that is not the steps'."""
        self.pause()
        if stacks and self.sampler is not None:
            self.sampler.pause(on=True)

    def recording_ends(self) -> None:
        """It has ended."""
        if self.sampler is not None:
            self.sampler.pause(on=False)

    def pause(self) -> None:
        """Validation begins, whose CPU time is not the steps'."""
        if self._cpu is not None and self._cpu.due(0.0, counts=False):
            with self._step_timer.profiler_overhead():
                self._cpu.read(counts=False)

    def resume(self) -> None:
        """Validation has ended: what follows, such as a wait for ranks that still validate, is of the next step."""
        if self._cpu is not None:
            with self._step_timer.profiler_overhead():
                self._cpu.read(counts=True)

    def end(self) -> None:
        """Training has ended."""
        if self.sampler is not None:
            self.sampler.counts = False
        if self._cpu is not None:
            self._step_timer.regions.followers.region_ends = None
            try:
                self._cpu.read(counts=False)
            finally:
                self._cpu.close()

    def lines(self) -> dict[str, tuple[SampledLine, ...]]:
        """The lines of the user's code in which most samples of each part are."""
        lines = self._times.lines(loops=not self._is_plain)
        of_workers = {WORKER_LINES: self.workers.lines(), VALIDATION_WORKER_LINES: self.validation_workers.lines()}
        return {**lines, **{part: found for part, found in of_workers.items() if found}}

    def cpu_so_far(self, ranks: int) -> CpuUse | None:
        """The mean use of the cores so far, without intervals, as `cpu_use` has them; for any thread."""
        return None if self._cpu is None else self._cpu.use(ranks, brief=True)

    def cpu_use(self, ranks: int) -> CpuUse | None:
        """The mean use of the cores, on which there are so many ranks, over the steps that counted; None if unknown."""
        use = None if self._cpu is None else self._cpu.use(ranks)
        if use is None or self.sampler is None or self.sampler.lock is None:
            return use
        gil, thread = self.sampler.lock.share()
        return replace(use, gil=gil, gil_thread=thread)

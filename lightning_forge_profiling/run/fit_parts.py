"""What watches one fit: the parts that `Run` drives, and that the report reads."""

from dataclasses import dataclass

from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.fit_settings import FitSettings
from lightning_forge_profiling.run.fit_steps import FitSteps
from lightning_forge_profiling.run.fit_window import FitWindow
from lightning_forge_profiling.run.host_readings import HostReadings
from lightning_forge_profiling.run.memory_watch import MemoryWatch
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training, WatchedWaits
from lightning_forge_profiling.schema import Recompilation, TraceReport


@dataclass(eq=False, repr=False)
class FitParts:
    """The parts, of which some come later or never."""

    training: Training
    settings: FitSettings
    step_timer: StepTimer
    readings: HostReadings
    log: FitLog | None = None
    window: FitWindow | None = None
    fit_steps: FitSteps | None = None  # what ends the steps, once training has begun
    waits: WatchedWaits | None = None  # for other ranks; None for a single one

    @property
    def memory(self) -> MemoryWatch | None:
        """What watches PyTorch's allocator; None without a GPU."""
        return None if self.fit_steps is None else self.fit_steps.events.memory

    def trace(self) -> TraceReport | None:
        """The report on the window; None without one."""
        return None if self.window is None else self.window.report()

    def metrics(self) -> dict[str, float]:
        """The metrics of memory and of `torch.compile` as they are now."""
        return {} if self.fit_steps is None else self.fit_steps.events.metrics()

    def recompilations(self) -> tuple[Recompilation, ...]:
        """What `torch.compile` compiled again."""
        return () if self.fit_steps is None else self.fit_steps.events.recompilations()

"""`ForgeProfilerCallback`: records a window of steps with `torch.profiler`."""

from collections.abc import Collection, Sequence
from os import PathLike
from typing import Any, Literal

from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.profiler.config import STEADY_STEPS, ProfilingConfig
from lightning_forge_profiling.run.fit_settings import RecordingSettings
from lightning_forge_profiling.run.run import Run
from lightning_forge_profiling.schema import TraceReport


class ForgeProfilerCallback(TimedCallback):
    """Records training batches `[start_step, end_step)` of a fit with `torch.profiler`, analyses them, times all steps.

    Without arguments these are steps of a steady run: after the warm-up of `ThroughputCallback` and after twice the
    batches that the loader's workers prefetch, but begun by step 100 and by a third of the run. On an NVIDIA GPU six
    are recorded without operators, which slow the host, and two with operators, which explain the six. The figures are
    of the six. Elsewhere, and `with_stack`, six have operators.

    Batches are counted from 0 at the start of this fit, also after resuming from a checkpoint. The step before the
    window is the profiler's warm-up and is not recorded. Each rank writes `rankN.trace.json.gz` into one folder per
    window, for Perfetto and HTA, and a copy in `tensorboard/` for TensorBoard's profiler tab. A process beside the
    training analyses the traces of all ranks and writes `summary.json`, `summary.md` and `report.html` into the folder.
    At the end of fit rank 0 prints the verdict of trace and run together, and where the time of a step goes, over the
    steps after the first ten (`ThroughputCallback` may set another number).

    Args:
        start_step: the first recorded step, and each step has operators; None to wait until the run is steady. 0
            records without a warm-up step.
        end_step: the first step after the window; None for six steps.
        trace_dir: the folder of the windows' folders; None for `profiler_traces` in the logger's folder (TensorBoard's,
            if there are several), or in `default_root_dir` without a logger.
        enabled: False makes the callback do nothing; the same on all ranks, of which `ranks` chooses those that record.
        regions: which of `data`, `transfer`, `forward`, `backward` and `optimizer` to time; the others' time goes to
            `other`, which is always there.
        activities: what to record, of `"cpu"`, `"cuda"`, `"xpu"`, `"mtia"`; None for the CPU and the accelerator that
            the Trainer uses.
        record_shapes: record the input shapes of operators, from which FLOPs are counted.
        profile_memory: record allocations; None on an accelerator if each step has operators: it slows light ones.
        with_stack: record Python stacks; slows the recorded steps.
        with_flops: let PyTorch estimate FLOPs for its own tables. The exported trace does not contain them; the reports
            count FLOPs from the shapes.
        tensorboard: also write the copy for TensorBoard's profiler plugin.
        analyze: also analyse the traces and write the reports.
        ranks: the global ranks that record, or `"all"`. Every rank needs the callback nonetheless.
        every: also record a window of as many steps each so many steps after the first.
        when: `"slow"` also records three steps whenever the run has become slower: a step took three times the usual
            time, steps have been 10 % longer for ten seconds, or a rank has become late. Needs `ThroughputCallback`.
        memory_snapshot: also write PyTorch's memory snapshot, `rankN.memory.pickle` for https://pytorch.org/memory_viz:
            a step number for that step, `"oom"` for when the fit runs out of memory; the latter records allocations
            throughout.

    Raises:
        ConfigurationError: an empty or negative window, or an end without a start, an unknown region or activity, a
            `trace_dir` that is no path, or bad `ranks` or `memory_snapshot`; in `setup`, a second callback of this
            class, a `trace_dir` that cannot be written, or no activity that can be recorded on this machine.

    Examples:
        >>> callback = ForgeProfilerCallback(start_step=5, end_step=8)
        >>> ForgeProfilerCallback(start_step=8, end_step=8)
        Traceback (most recent call last):
        ...
        lightning_forge_profiling.errors.ConfigurationError: end_step must be greater than start_step: ...
    """

    settings: RecordingSettings

    def __init__(
        self,
        start_step: int | None = None,
        end_step: int | None = None,
        *,
        trace_dir: str | PathLike[str] | None = None,
        enabled: bool = True,
        regions: Collection[str] = REGIONS,
        activities: Sequence[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool | None = None,
        with_stack: bool = False,
        with_flops: bool = False,
        tensorboard: bool = True,
        analyze: bool = True,
        ranks: Literal["all"] | Sequence[int] = "all",
        every: int | None = None,
        when: Literal["slow"] | None = None,
        memory_snapshot: Literal["oom"] | int | None = None,
    ) -> None:
        if enabled and start_step is None and end_step is not None:
            raise ConfigurationError(f"end_step={end_step} needs a start_step; without both, the window is found.")
        if end_step is None and isinstance(start_step, int):
            end_step = start_step + STEADY_STEPS
        config = ProfilingConfig(
            enable=enabled,
            **({} if start_step is None else {"start_step": start_step, "end_step": end_step or 0}),
            trace_dir="profiler_traces" if trace_dir is None else trace_dir,
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            tensorboard=tensorboard,
            analyze=analyze,
        )
        super().__init__(
            RecordingSettings(
                config=config,
                window=config.window if enabled and start_step is not None else None,
                default_dir=trace_dir is None,
                regions=regions,
                ranks=ranks,
                every=every,
                when=when,
                memory_snapshot=memory_snapshot,
            )
        )

    def trace_report(self) -> TraceReport | None:
        """The report on this rank's window; None before a fit.

        Returns:
            Its status, the recorded steps, the paths, and how long training was blocked.
        """
        return self.fit_results.trace if self.run is None else self.run.trace()

    def join(self, run: Run) -> None:
        """Agree on a folder with the other ranks and refuse one that cannot be written."""
        run.add_window()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note that the batch is trained on and not skipped."""
        if self.run is not None:
            self.run.begin_step()

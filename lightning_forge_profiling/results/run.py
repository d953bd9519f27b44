"""What a run had to work with and how it used it: cores, loader, optimizer, switches; spans and slow steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareInterval:
    """A part's share of the step, in percent, with its 95 % interval by a bootstrap of blocks of consecutive steps.

    Attributes:
        pct: the part's time over the steps' time.
        low_pct: lower end of the interval.
        high_pct: upper end of the interval.
        typical_pct: the median over blocks of at least eight steps, which a few slow ones do not move; None for fewer
            than eight such blocks.
    """

    pct: float
    low_pct: float
    high_pct: float
    typical_pct: float | None = None


OTHERS: Final = 0.2  # cores that the rest of a system uses without being busy, and the resolution of the accounting


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """Step time on the CPU in four parts, which sum to the step.

    Attributes:
        data_ms_per_step: in the data loader.
        optimizer_ms_per_step: in the optimizer's update, with clipping and `zero_grad` if the callbacks marked them.
        operators_ms_per_step: in other PyTorch operators, on training threads.
        python_ms_per_step: the rest: Python between operators, the training loop, callbacks; no communication.
        costliest_ms_per_step: self time of the top operators outside data loader and optimizer, at most three, by name.
        optimizer: class of the optimizer; "" if unknown.
        update: implementation of its update: operators for each parameter (`loop`), for lists of them (`foreach`), or
            one for all (`fused`); "" if unknown.
        update_calls_per_step: operator calls in the update.
        item_calls_per_step: values of tensors read in Python outside data loader and optimizer, as by `.item()`.
        item_ms_per_step: time in these operators.
        operator_threads: number of threads that called operators, without the intra-op threads.
        intra_op_threads: number of threads that one operator may use; None if unknown.
        usable_cores: number of cores that the process may use; None if unknown or shared with other ranks.
    """

    data_ms_per_step: float
    optimizer_ms_per_step: float
    operators_ms_per_step: float
    python_ms_per_step: float
    costliest_ms_per_step: Mapping[str, float]
    optimizer: str
    update: Literal["", "loop", "foreach", "fused"]
    update_calls_per_step: float
    operator_threads: int
    intra_op_threads: int | None
    usable_cores: int | None
    item_calls_per_step: float = 0.0
    item_ms_per_step: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCpu:
    """What the training thread did in a region of the steps that were split, hooks and loggers included.

    Attributes:
        used_pct: percentage of the region's host time in which it was on a core.
        waits_pct: in which it could run and waited for a core.
        blocked_pct: the rest, in which it waited for something else. Other threads may have computed then.
    """

    used_pct: float
    waits_pct: float
    blocked_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Use of the cores over the counted steps of a run, by the kernel's accounting.

    Attributes:
        cores: cores that this rank may use: its affinity or its container's quota, divided by the ranks on the host.
        used: cores that the training process used, on average.
        idle: of these cores, how many no process used, on average; None if unknown.
        threads: number of threads that one operator may use.
        loader_busy_pct: of the time that making batches took, the share in which a core worked on them or was waited
            for, in the loader's workers or else in the training thread. In the rest the loader waits, as for a disk or
            a network. None if unknown.
        workers: cores that the loader's workers used or waited for, on average.
        waits_pct: share of the counted time in which a thread that carries the step waited for a core: the training
            thread, autograd's, or a helper of operators, whichever waited longest; None if unknown.
        waits: its interval; None for fewer than five readings.
        throttled_pct: share of the time in which a CPU quota stopped the control group, summed over its cores, at most
            100.
        throttled_periods: in how many periods of the quota it did.
        stolen_pct: share of the cores' time that the hypervisor gave to other machines.
        pressure_pct: share of the time in which some process of the system waited for a core.
        switches_per_s: how often per second the training thread had to leave its core.
        missing: sources of these figures that the system does not have.
        regions: what the training thread did, by built-in region.
        gil: share of the counted time in which training waited for the interpreter lock; None if unknown.
        gil_thread: name of the Python thread that used most CPU time meanwhile; "" if unknown.
    """

    cores: float
    used: float
    idle: float | None = None
    threads: int = 1
    loader_busy_pct: float | None = None
    workers: float = 0.0
    waits_pct: float | None = None
    waits: ShareInterval | None = None
    throttled_pct: float = 0.0
    throttled_periods: int = 0
    stolen_pct: float = 0.0
    pressure_pct: float = 0.0
    switches_per_s: float = 0.0
    missing: tuple[str, ...] = ()
    regions: Mapping[str, RegionCpu] = field(default_factory=dict)
    gil: ShareInterval | None = None
    gil_thread: str = ""

    @property
    def contended(self) -> bool | None:
        """Whether other processes use these cores too, or the process and its loader use all of them."""
        return None if self.idle is None else self.cores - self.used - self.idle > OTHERS

    def blocked_pct(self, region: str) -> float:
        """Share of a region's time in which the training thread neither computed nor waited for a core."""
        return self.regions[region].blocked_pct if region in self.regions else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The first optimizer of a fit.

    Attributes:
        kind: its class, such as `AdamW`.
        fused: whether it was created with `fused=True`.
        tensors: number of parameter tensors that it updates.
        elements: number of elements of all of them.
        median_elements: median number of elements of a tensor.
        manual: whether the module calls it by itself (manual optimization).
    """

    kind: str
    fused: bool
    tensors: int
    elements: int
    median_elements: int
    manual: bool = False


WORKER_LINES: Final = "data/worker"  # the part of the step that a loader worker's lines are listed under


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLine:
    """A line of the user's code, with its share of the samples of one part of the step.

    Attributes:
        file: its file, relative to the working directory if it is below it.
        line: number of the line.
        function: name of the function.
        pct: share of the sampled time of that part in which this was the innermost line of the user's code.
        waiting_pct: share of this line's time in which the thread used no core.
    """

    file: str
    line: int
    function: str
    pct: float
    waiting_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of the DataLoader that a fit trains from or validates on, and the cores it may use.

    Attributes:
        kind: its class, such as `DataLoader`.
        loaders: number of loaders; if several, the settings are of all of them together.
        num_workers: number of worker processes; None if it is not a `torch.utils.data.DataLoader`.
        persistent_workers: whether the workers are kept between epochs.
        pin_memory: whether batches are copied to pinned memory.
        prefetch_factor: batches that each worker prefetches; None without workers.
        batch_size: samples per batch; None if a batch sampler or the dataset decides.
        sampler: class of the sampler.
        iterable: whether the dataset is an `IterableDataset`.
        cores: cores that this rank's process may use.
        ranks_on_host: ranks that share these cores.
        accumulate_grad_batches: batches per optimizer step.
        batches: batches of a validation; None if unknown, and of the loader that the fit trains from.
    """

    kind: str = ""
    loaders: int = 1
    num_workers: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None
    batch_size: int | None = None
    sampler: str = ""
    iterable: bool = False
    cores: int = 1
    ranks_on_host: int = 1
    accumulate_grad_batches: int = 1
    batches: int | None = None

    @property
    def most_workers(self) -> int:
        """Number of workers that this rank's share of the cores allows; PyTorch warns of more."""
        return max(self.cores // max(self.ranks_on_host, 1), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """One of the slowest counted steps of a run.

    Attributes:
        step: its number, counted from 0 at the start of the fit.
        ms: its time; `step_ms.p50` of the run is the median beside it.
        end_s: when the host ended it, in seconds since the run began; None if unknown.
        parts_ms: parts of the ledger that took 0.1 ms or more of it on the host, such as `callback/NAME.hook`, the
            largest first.
        regions_ms: its time by built-in region; empty if its regions were not timed.
    """

    step: int
    ms: float
    end_s: float | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    regions_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompilation:
    """What `torch.compile` compiled again during a fit, by function and line.

    Attributes:
        kind: `recompiled`; `graph break`: what follows the line is compiled by itself; or `recorded again`, as a CUDA
            graph.
        function: name of the function.
        file: its file.
        line: its first line; of a graph break the line after which the graph ends.
        reason: PyTorch's reason for the latest time: the guard that failed; "" for a graph break, or if unknown.
        times: how often.
        seconds: what all of these compilations took.
        last_step: the latest step in which it happened.
        given_up: whether it has reached `recompile_limit`: where no compiled version fits, it runs uncompiled.
    """

    kind: Literal["recompiled", "graph break", "recorded again"]
    function: str
    file: str
    line: int
    reason: str
    times: int
    seconds: float
    last_step: int
    given_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Settings of PyTorch and of the process on rank 0, looked up once, after the first step.

    Attributes:
        anomaly_detection: whether autograd checks each gradient and keeps a stack for each operator.
        launch_blocking: whether `CUDA_LAUNCH_BLOCKING` makes the host wait for each kernel; False without a GPU.
        tracer: what the training thread calls for each line or call: a debugger, a coverage tool, a profiler; "" for
            nothing.
        profiler: whether a torch profiler other than this package's was running.
        deterministic: `algorithms` for `torch.use_deterministic_algorithms`, `cudnn` for cuDNN's alone, "" for neither.
        distributed_debug: `TORCH_DISTRIBUTED_DEBUG` if the run has several processes: `INFO` or `DETAIL`; "" if off.
        float64_pct: share of the trainable parameters that are float64.
        tf32_off: whether matrix products are float32 on a GPU that has TF32, and do not use it.
        pin_memory_unused: whether the DataLoader is asked to pin memory where there is no GPU.
    """

    anomaly_detection: bool = False
    launch_blocking: bool = False
    tracer: str = ""
    profiler: bool = False
    deterministic: Literal["", "algorithms", "cudnn"] = ""
    distributed_debug: str = ""
    float64_pct: float = 0.0
    tf32_off: bool = False
    pin_memory_unused: bool = False

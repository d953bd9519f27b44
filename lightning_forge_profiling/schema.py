"""Every type that is stored or shown: of `summary.json`, the record, the ranks' messages and the pages.

Names end in the unit. Percentages are of the step unless the name says otherwise. `gc=False` is for types of numbers
and strings that are made often: garbage collections then have fewer objects to visit.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from lightning_forge_profiling.names import (
    BEFORE_FIT,
    MFU,
    PROFILER,
    TFLOPS,
    per_second,
    region_ms,
    wholes,
)


class ShownInNotebook:
    """Base class of the results that notebooks show as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # the package's `__init__` names the module that makes it, imported when one is shown: results know no reports
        renderer = vars(sys.modules[__name__.partition(".")[0]])["NOTEBOOK_RENDERER"]
        return str(import_module(renderer).html_of(self))


class TelemetrySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Sensor readings over a whole run, warm-up and validation included, as columns of equal length.

    Attributes:
        seconds: time since training began; the middle of a point that merges several samples.
        samples_per_point: samples merged into one point; the last may have fewer.
        values: mean by name, such as `power_w`; None for a point without the reading. Readings that the device lacks
            are left out.
        lowest: minimum within each point; only of readings that vary within a point.
        highest: maximum within each point; likewise.
        throttled_by_pct: share of the samples with a reduced clock, by reason; None if unknown.
        counted_pct: share of the samples that the means of the summary include: none of warm-up, validation or steps
            under the profiler.
    """

    seconds: tuple[float, ...] = ()
    samples_per_point: int = 1
    values: Mapping[str, tuple[float | None, ...]] = {}
    lowest: Mapping[str, tuple[float | None, ...]] = {}
    highest: Mapping[str, tuple[float | None, ...]] = {}
    throttled_by_pct: Mapping[str, tuple[float | None, ...]] = {}
    counted_pct: tuple[float, ...] = ()


class TelemetrySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of a rank over the counted steps. None if the driver does not report a value.

    Attributes:
        device: name of the GPU.
        is_mig: whether it is a MIG slice; power, temperature, clocks and throttling are then those of the whole GPU.
        samples: number of samples.
        utilization_pct: mean share of the time in which any kernel runs.
        memory_utilization_pct: mean share of the time in which memory is read or written.
        memory_peak_gib: peak memory of all processes and the driver.
        memory_own_peak_gib: peak memory of this process.
        memory_total_gib: memory of the GPU.
        power_w: mean power.
        power_limit_w: power limit in force.
        temperature_peak_c: peak temperature.
        sm_mhz: mean SM clock.
        sm_peak_mhz: peak SM clock.
        throttled_pct: share of the samples with a reduced clock.
        throttled_by_pct: the same by reason.
        joules_per_sample: energy of the board per training sample of this device.
        joules: energy of the board during the fit, warm-up and validation included.
        allocated_peak_gib: peak memory allocated by PyTorch's tensors.
        alloc_retries: times that PyTorch's allocator ran out of memory, freed its cached blocks and tried again.
        device_allocs_per_step: calls of `cudaMalloc` (or `cuMemMap`) per step.
        series: the samples over time.
    """

    device: str
    is_mig: bool = False
    samples: int = 0
    utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    memory_peak_gib: float | None = None
    memory_own_peak_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_peak_c: float | None = None
    sm_mhz: float | None = None
    sm_peak_mhz: float | None = None
    throttled_pct: float | None = None
    throttled_by_pct: Mapping[str, float] = {}
    joules_per_sample: float | None = None
    joules: float | None = None
    allocated_peak_gib: float | None = None
    alloc_retries: int | None = None
    device_allocs_per_step: float | None = None
    series: TelemetrySeries = TelemetrySeries()


Status = Literal["waiting", "recording", "written", "not reached", "skipped", "failed"]


class TraceReport(msgspec.Struct, frozen=True):
    """Outcome of one window on one rank.

    Attributes:
        status: `waiting` and `recording` during the run, then `written`, `not reached` (the run ended before the
            window), `skipped` (another profiler was active) or `failed`.
        message: the reason for `skipped` and `failed`, or a remark.
        steps: steps that were recorded, whole or in part.
        path: the trace; None unless written.
        plugin_path: the copy for TensorBoard; None unless written.
        stall_ms: time that the end of the window held up the training loop.
        start_stall_ms: time that the start of the profiler held it up.
        attached: why CUPTI stays attached to the process after the window, which slows kernel launches, and the fix;
            "" if it does not.
        summary_path: `summary.json` of all ranks, on the lowest recording rank; None without an analysis.
        report_path: `report.html` likewise.
        memory_path: PyTorch's memory snapshot; None unless written.
        memory_message: why there is no snapshot, if one was requested and due.
        pending: whether the run failed before trace, copy and reports were complete; a process beside it finishes
            them.
        url: the remote folder that the files were copied to; "" if they were not.
    """

    status: Status = "waiting"
    message: str = ""
    steps: tuple[int, ...] = ()
    path: Path | None = None
    plugin_path: Path | None = None
    stall_ms: float = 0.0
    start_stall_ms: float = 0.0
    attached: str = ""
    summary_path: Path | None = None
    report_path: Path | None = None
    memory_path: Path | None = None
    memory_message: str = ""
    pending: bool = False
    url: str = ""


GIB: Final = 2**30
MIB: Final = 2**20
KIB: Final = 2**10

Category: TypeAlias = Literal[
    "parameters", "gradients", "optimizer", "buffers", "other tensors", "activations", "host", "workers"
]


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's model keeps on its GPU, once its optimizer has stepped. A storage counts once.

    Attributes:
        parameters_bytes: of parameters.
        gradients_bytes: of gradients that are kept to the end of a batch.
        optimizer_bytes: of the optimizers' state.
        buffers_bytes: of buffers.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.buffers_bytes


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True):
    """PyTorch's allocator over a run, read between steps, as columns of equal length. It begins after the warm-up.

    Attributes:
        seconds: time since the run began, as in the ledger.
        steps: number of the step.
        kept_gib: tensors that are kept from one step to the next.
        peak_gib: the most that tensors took so far.
        reserved_gib: what the allocator holds, its free blocks included.
    """

    seconds: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    kept_gib: tuple[float, ...] = ()
    peak_gib: tuple[float, ...] = ()
    reserved_gib: tuple[float, ...] = ()


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A container of the user's that gets longer from step to step.

    Attributes:
        name: of the attribute or global, as in the code: `self.losses`.
        kind: its class, such as `list`.
        owner: the class, or for a global the module, that it belongs to.
        entries: number of its entries at the end.
        per_step: how many come on top in each step.
        holds: `graphs` for tensors with the graphs that computed them, `tensors` for others; "" for other objects.
        where: the line that adds to it, as `train.py:9 training_step`; "" if unknown.
    """

    name: str
    kind: str
    owner: str
    entries: int
    per_step: float
    holds: Literal["graphs", "tensors", ""] = ""
    where: str = ""


class MemoryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that grows steadily from step to step.

    Attributes:
        category: what grows: a part of the model, `other tensors` that are kept from one step to the next, or
            `activations`, which a step frees at its end; `host` for the process's memory beside the GPU,
            `workers` for that of the loader's workers.
        bytes_per_step: by how much.
        from_step: the first of the steps by which it is known.
        to_step: the last of them.
        full_step: the step in which the memory will be full, if it goes on; None if unknown.
        holder: what keeps it; None if unknown.
        kernel_ms: milliseconds per step of the training thread in the kernel, which hands the host's memory out; None
            if unknown.
    """

    category: Category
    bytes_per_step: float
    from_step: int
    to_step: int
    full_step: int | None
    holder: Holder | None = None
    kernel_ms: float | None = None


class RunMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What fills a rank's GPU.

    Attributes:
        model: what the model keeps.
        limit_gib: what PyTorch may use of the GPU's memory: all but what other processes and the driver had when the
            curve began.
        curve: the allocator over the run.
        growth: what grows; None if nothing does.
        peak_known: whether the peak is known; else the process had a higher one before, and the curve's is a bound.
        samples_per_step: mean number of samples of a batch; None if unknown.
        tokens_per_step: mean number of its tokens; None if they are not counted.
    """

    model: ModelMemory
    limit_gib: float
    curve: MemoryCurve = MemoryCurve()
    growth: MemoryGrowth | None = None
    peak_known: bool = True
    samples_per_step: float | None = None
    tokens_per_step: float | None = None


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One row of spans, in order of their start.

    Attributes:
        name: `host: regions`, `stream 7`, `communication`, ...
        group: `host`, `path` for the critical path, `stream` or `comm`.
        start_us: when each span begins, in microseconds from the timeline's start.
        duration_us: duration of each span.
        name_index: position of its name in `Timeline.names`.
        kind_index: position of its kind in `Timeline.kinds`.
    """

    name: str
    group: str
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    name_index: tuple[int, ...]
    kind_index: tuple[int, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded window of one rank.

    Attributes:
        rank: the global rank.
        length_us: length of the window.
        steps: number, begin and end of each step's window on the GPU, in microseconds.
        left_out: begin and end of time that belongs to no step, such as validation and checkpoints.
        names: names of spans.
        kinds: kinds of spans: kernel kinds (`matmul`, ...), `region` for those of the host.
        lanes: the rows, host first.
        omitted: number of spans left out, the shortest, because there were too many.
    """

    rank: int
    length_us: float
    steps: tuple[tuple[int, float, float], ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    lanes: tuple[Lane, ...]
    omitted: int = 0
    left_out: tuple[tuple[float, float], ...] = ()


MOST_STEPS: Final = 100
"""Most steps of a window that is asked for: a trace grows with each."""

_Whole = Annotated[int, Meta(ge=0, le=10**15)]
_Sum = Annotated[float, Meta(ge=0, le=1e24)]
_Steps = Annotated[int, Meta(ge=1, le=MOST_STEPS)]
_BothParts = Annotated[int, Meta(ge=1, le=2 * MOST_STEPS)]
MOST_TEXT: Final = 500
"""Most characters of what a rank says of a window."""

_Text = Annotated[str, Meta(max_length=MOST_TEXT)]
_Id = Annotated[str, Meta(max_length=100)]
Ranks = Literal["all", "slow"]
PlanState = Literal["planned", "agreed", "recorded", "refused"]


class WindowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a live run is asked to record.

    Attributes:
        schema_version: version of this layout.
        id: names the request.
        steps: how many steps.
        ranks: `all`, or `slow` for the straggler, a median rank and rank 0.
        why: who asks, or what was noticed; "" for a person.
    """

    schema_version: Literal[1] = 1
    id: _Id
    steps: _Steps = 3
    ranks: Ranks = "all"
    why: _Text = ""


class WindowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others of the latest window that was asked for.

    Attributes:
        schema_version: version of this layout.
        run: id of the run.
        number: number of the plan, counted from 1; a plan that some rank could not keep is followed by another one.
        request: id of the request.
        state: `planned` until every rank has said that it can keep it, then `agreed`; `recorded` when the ranks are
            past it; `refused` if there will be no window.
        start: the first recorded step.
        steps: how many steps.
        light: how many of them, the first, are recorded without operators.
        ranks: the global ranks that record; none for all.
        folder: the folder of its traces, on the machine of rank 0; "" before it is agreed.
        analyzed: whether a report will be written beside them.
        text: why it was refused, or what else there is to say.
    """

    schema_version: Literal[1] = 1
    run: _Id
    number: _Whole
    request: _Id
    state: PlanState
    start: _Whole = 0
    steps: _BothParts = 3
    light: _Whole = 0
    ranks: tuple[_Whole, ...] = ()
    folder: Annotated[str, Meta(max_length=4096)] = ""
    analyzed: bool = True
    text: _Text = ""


class WindowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of the latest plan that it has read.

    Attributes:
        number: number of the plan; 0 before the first.
        keeps: whether it can begin the recording in time.
        text: why not, or why it did not record.
    """

    number: _Whole = 0
    keeps: bool = False
    text: _Text = ""


class ShareInterval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part's share of the step, in percent, with its 95 % interval by a bootstrap of blocks of consecutive steps.

    Attributes:
        pct: the part's time over the steps' time.
        low_pct: lower end of the interval.
        high_pct: upper end of the interval.
    """

    pct: float
    low_pct: float
    high_pct: float


OTHERS: Final = 0.2  # cores that the rest of a system uses without being busy, and the resolution of the accounting


class CpuTime(msgspec.Struct, frozen=True, kw_only=True):
    """Step time on the CPU in five parts, which sum to the step.

    Attributes:
        data_ms_per_step: in the data loader.
        optimizer_ms_per_step: in the optimizer's update, with clipping and `zero_grad` if the callbacks marked them.
        operators_ms_per_step: in other PyTorch operators, on training threads.
        python_ms_per_step: the rest: Python between operators, the training loop, callbacks.
        exchange_ms_per_step: in which gloo, MPI or UCC exchange with other ranks beside none of the others, waits for
            them included.
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
    exchange_ms_per_step: float = 0.0


class RegionCpu(msgspec.Struct, frozen=True, kw_only=True):
    """What the training thread did in a region of the steps that were split, hooks and loggers included.

    Attributes:
        used_pct: percentage of the region's host time in which it was on a core.
        waits_pct: in which it could run and waited for a core.
        blocked_pct: the rest, in which it waited for something else. Other threads may have computed then.
        longer_pct: what the two steps with most of that have more of it than the third: a machine interrupts some.
    """

    used_pct: float
    waits_pct: float
    blocked_pct: float
    longer_pct: float = 0.0


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the cores over the counted steps of a run, by the kernel's accounting.

    Attributes:
        cores: cores that this rank may use: its affinity or its container's quota, divided by the ranks on the host.
        used: cores that the training process used, on average.
        idle: of these cores, how many no process used, on average; None if unknown.
        threads: number of threads that one operator may use.
        loader_busy_pct: of the time that making batches took, the share in which a core worked on them or was waited
            for, in the loader's workers or else in the training thread. In the rest the loader waits, as for a disk or
            a network. None if unknown.
        validation_busy_pct: the same of the batches that this process fetches to validate on.
        workers: cores that the processes which this one started used, on average: the loader's workers and others, also
            those that have ended.
        batch_ms: how long a batch took to make in the loader's first worker; None without workers, and on Windows.
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
    validation_busy_pct: float | None = None
    workers: float = 0.0
    batch_ms: float | None = None
    waits_pct: float | None = None
    waits: ShareInterval | None = None
    throttled_pct: float = 0.0
    throttled_periods: int = 0
    stolen_pct: float = 0.0
    pressure_pct: float = 0.0
    switches_per_s: float = 0.0
    missing: tuple[str, ...] = ()
    regions: Mapping[str, RegionCpu] = {}
    gil: ShareInterval | None = None
    gil_thread: str = ""

    @property
    def contended(self) -> bool | None:
        """Whether other processes use these cores too, or the process and its loader use all of them."""
        return None if self.idle is None else self.cores - self.used - self.idle > OTHERS

    def blocked_pct(self, region: str) -> float:
        """Share of a region's time in which the training thread neither computed nor waited for a core."""
        return self.regions[region].blocked_pct if region in self.regions else 0.0


class DenseEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """An `Embedding` or `EmbeddingBag` of at least a million elements whose gradient is dense.

    Attributes:
        name: its name in the module, such as `encoder.table`.
        rows: number of its rows.
        width: number of elements of a row.
        used_pct: share of the rows with a gradient after the first step, by up to 4,096 rows spread over the table.
    """

    name: str
    rows: int
    width: int
    used_pct: float


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first optimizer of a fit.

    Attributes:
        kind: its class, such as `AdamW`.
        fused: whether it was created with `fused=True`.
        tensors: number of parameter tensors that it updates.
        elements: number of elements of all of them.
        median_elements: median number of elements of a tensor.
        groups: number of parameter groups.
        manual: whether the module calls it by itself (manual optimization).
    """

    kind: str
    fused: bool
    tensors: int
    elements: int
    median_elements: int
    groups: int = 1
    manual: bool = False


# the parts that the lines of a loader's worker are listed under, of the training loader and the one to validate on
WORKER_LINES: Final = "data/worker"
VALIDATION_WORKER_LINES: Final = "validation/worker"


class SampledLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of the user's code, with its share of the samples of one part of the step.

    Attributes:
        file: its file, relative to the working directory if it is below it; "" where the Trainer runs none of the
            user's code.
        line: number of the line; 0 for none.
        function: name of the function; that of the library which the Trainer calls, if there is no file.
        pct: share of the sampled time of that part in which this was the innermost line of the user's code.
        waiting_pct: share of this line's time in which the thread used no core.
        call: the expression in it that takes most of the time, as `self.auc.compute()`; "" if unknown.
        callee: the function that is called there, as `torchmetrics.metric.Metric.forward`, or `item` of one in C; ""
            for none.
        in_loop: whether that is in a loop of the function, or in a comprehension.
        samples: number of samples, each of 20 ms.
    """

    file: str
    line: int
    function: str
    pct: float
    waiting_pct: float | None = None
    call: str = ""
    callee: str = ""
    in_loop: bool = False
    samples: int = 0


class LoaderSettings(msgspec.Struct, frozen=True, kw_only=True):
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
        unsplit: whether the dataset is an `IterableDataset` of the user's that does not ask which worker it is in, so
            that each worker yields all samples.
        cores: cores that this rank's process may use.
        ranks_on_host: ranks that share these cores.
        accumulate_grad_batches: batches per optimizer step.
        batches: batches of a validation; None if unknown, and of the loader that the fit trains from.
        batch_ms: how long one of those takes to make in its first worker; None without one. `CpuUse` has training's.
    """

    kind: str = ""
    loaders: int = 1
    num_workers: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None
    batch_size: int | None = None
    sampler: str = ""
    unsplit: bool = False
    cores: int = 1
    ranks_on_host: int = 1
    accumulate_grad_batches: int = 1
    batches: int | None = None
    batch_ms: float | None = None

    @property
    def most_workers(self) -> int:
        """Number of workers that this rank's share of the cores allows; PyTorch warns of more."""
        return max(self.cores // max(self.ranks_on_host, 1), 1)


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
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
    parts_ms: Mapping[str, float] = {}
    regions_ms: Mapping[str, float] = {}


class Recompilation(msgspec.Struct, frozen=True, kw_only=True):
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


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of PyTorch and of the process on rank 0, looked up once, after the first step.

    Attributes:
        anomaly_detection: whether autograd checks each gradient and keeps a stack for each operator.
        launch_blocking: whether `CUDA_LAUNCH_BLOCKING` makes the host wait for each kernel; False without a GPU.
        tracer: what the training thread calls for each line or call: a debugger, a coverage tool, a profiler; "" for
            nothing.
        profiler: whether a torch profiler other than this package's was running.
        deterministic: `algorithms` for `torch.use_deterministic_algorithms`, `cudnn` for cuDNN's alone, "" for neither.
        distributed_debug: `TORCH_DISTRIBUTED_DEBUG` if the run has several processes: `INFO` or `DETAIL`; "" if off.
        float64_pct: share of the parameters that are float64.
        tf32_off: whether matrix products are float32 on a GPU that has TF32, and do not use it.
        pin_memory_unused: whether the DataLoader is asked to pin memory where there is no GPU.
        embedding: the largest embedding with a dense gradient; None without one.
        checkpointing: class of a module that computes its activations again in backward, by the switches of
            transformers and timm; "" for none.
        eager_attention: class of a module of transformers whose attention is several operators; "" for none.
        unused_parameters: whether DDP looks for unused parameters in each step.
        not_updated: the part of the module with most of the parameters that have gradients and are in no optimizer; ""
            for none.
        not_updated_pct: their share of all parameters with gradients, by elements.
        padding_pct: share of the positions of a batch that are padding, by its `attention_mask` or by the number that
            all rows of integers end in; 0 without such rows.
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
    embedding: DenseEmbedding | None = None
    checkpointing: str = ""
    eager_attention: str = ""
    unused_parameters: bool = False
    not_updated: str = ""
    not_updated_pct: float = 0.0
    padding_pct: float = 0.0


class SyncCause(msgspec.Struct, frozen=True, kw_only=True):
    """Synchronizing calls with the same cause.

    Attributes:
        cause: `.item()`, `torch.cuda.synchronize()`, `nonzero() or a boolean mask`, ...
        where: the innermost function outside torch and Lightning, with its file and first line; "" without stacks.
        lightning: whether Lightning's own loop makes the call, which the user cannot remove.
        per_step: calls per step.
        host_ms_per_step: host time in them.
    """

    cause: str
    where: str
    lightning: bool
    per_step: float
    host_ms_per_step: float


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Launches, synchronizations and allocations, and the idle time of the GPU that they cause.

    Attributes:
        device_syncs_per_step: calls that wait for the GPU, without those of Lightning's loop.
        lightning_syncs_per_step: calls that wait for the GPU in Lightning's loop.
        idle_after_sync_ms_per_step: GPU idle time caused by syncs: whole gaps that begin during a sync, and of other
            gaps the time in syncs. Lightning's are left out.
        idle_after_allocator_ms_per_step: likewise for cudaMalloc, cudaFree and the like.
        idle_launching_ms_per_step: the rest of the GPU idle time caused by Python and launches, without gaps of more
            than 5 ms, in which the host does other work, but for those before a CUDA graph or in an update.
        launches_per_step: kernel and graph launches.
        graph_launches_per_step: launches of CUDA graphs alone.
        cuda_mallocs_per_step: allocations by the driver.
        cuda_frees_per_step: frees by the driver.
        h2d_bytes_per_step: bytes copied to the device.
        data_wait_ms_per_step: host time in the data loader, whether or not the GPU was busy.
        data_loader: class of PyTorch's iterator, `_SingleProcessDataLoaderIter` if num_workers is 0; "" for other
            loaders.
        syncs: synchronizing calls by cause, most frequent first.
    """

    device_syncs_per_step: float
    lightning_syncs_per_step: float
    idle_after_sync_ms_per_step: float
    idle_after_allocator_ms_per_step: float
    idle_launching_ms_per_step: float
    launches_per_step: float
    cuda_mallocs_per_step: float
    cuda_frees_per_step: float
    h2d_bytes_per_step: float
    data_wait_ms_per_step: float
    data_loader: str
    syncs: tuple[SyncCause, ...]
    graph_launches_per_step: float = 0.0


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of matrix products, convolutions and attention, counted from the recorded input shapes.

    Attributes:
        per_step: floating-point operations per step; a multiply-add is two.
        model_per_step: those that the model requires: without recomputation by activation checkpointing and without
            the optimizer's products; None if compiled code hides which they are.
        counted_pct: share of the time of matmul, convolution and attention kernels whose operators were counted.
        matmul_tflops: counted operations over the time of the kernels they launched.
        busy_tflops: counted operations over the GPU's busy time.
        step_tflops: counted operations over the step time.
        dtype: data type of most of the FLOPs.
        peak_tflops: dense peak of the device for that dtype; None for a device that is not in the table.
        matmul_pct_of_peak: `matmul_tflops` in percent of the peak; None without a peak.
        busy_pct_of_peak: `busy_tflops` in percent of the peak; None without a peak.
        uncounted: operators that launch such kernels but whose FLOPs are unknown.
    """

    per_step: float
    model_per_step: float | None
    counted_pct: float
    matmul_tflops: float
    busy_tflops: float
    step_tflops: float
    dtype: str
    peak_tflops: float | None
    matmul_pct_of_peak: float | None
    busy_pct_of_peak: float | None
    uncounted: tuple[str, ...]

    @property
    def recomputed_pct(self) -> float:
        """Share of the operations that the model does not ask for: recomputed activations, the optimizer's own."""
        return 0.0 if self.model_per_step is None else 100 * (1 - self.model_per_step / self.per_step)


class PythonCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One function in the tree of calls, with all of its calls from the same stack.

    Attributes:
        caller: position of the calling function in `PythonFunctions.tree`; -1 for the outermost.
        name: the function; of a built-in one without the address of its object.
        where: its file and first line, `train.py:26`; "" for built-in functions and for modules.
        kind: `user`, `library` (Python, torch, Lightning, installed packages) or `profiler` (this package).
        ms_per_step: time in it and in what it calls.
        self_ms_per_step: time in it alone. What its callees in the tree leave beside that is in functions left out.
        calls_per_step: number of calls.
    """

    caller: int
    name: str
    where: str
    kind: Literal["user", "library", "profiler"]
    ms_per_step: float
    self_ms_per_step: float
    calls_per_step: float


class UserFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the user, from all stacks.

    Attributes:
        where: the function, its file and first line, as `train.py:26 call_reward_server`.
        ms_per_step: time in it and in what it calls.
        own_ms_per_step: the part outside other functions of the user, library functions that it calls included.
        calls_per_step: number of calls.
    """

    where: str
    ms_per_step: float
    own_ms_per_step: float
    calls_per_step: float


class SpentIn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Time of one kind, and the innermost function of the user that holds at least half of it.

    Attributes:
        where: the function, its file and first line.
        ms_per_step: the part in it and in what it calls.
        of_ms_per_step: all time of the kind.
    """

    where: str
    ms_per_step: float
    of_ms_per_step: float


class PythonFunctions(msgspec.Struct, frozen=True, kw_only=True):
    """Python functions on the thread that marks the steps.

    Recording a stack adds time to each call, so functions that make many calls are overstated.

    Attributes:
        tree: calls by stack, callers first, from the innermost function that contains whole steps; at most 200, the
            longest.
        users: functions of the user, by their own time; at most ten.
        spent: by kind of time the function that holds it: `data` (in the data loader), `python` (without a GPU, outside
            operators, data loader and optimizer), `forward` and `backward` (the part of `python` in them), `launching`
            (the GPU waits for Python and launches), `waiting` (it waits for the host). Kinds without such a function
            are left out.
    """

    tree: tuple[PythonCall, ...]
    users: tuple[UserFunction, ...] = ()
    spent: Mapping[str, SpentIn] = {}


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One PyTorch operator.

    Attributes:
        name: its name.
        calls_per_step: calls per step.
        host_ms_per_step: total host time, child operators included.
        self_host_ms_per_step: host time without child operators.
        device_ms_per_step: time of the GPU work launched in it, child operators included.
        self_device_ms_per_step: time of the GPU work it launched itself; sums over operators without double counting.
        allocated_bytes_per_step: device memory allocated less freed, child operators included; None if memory was not
            recorded.
        input_shapes: input shapes, most expensive first; empty if not recorded.
    """

    name: str
    calls_per_step: float
    host_ms_per_step: float
    self_host_ms_per_step: float
    device_ms_per_step: float
    self_device_ms_per_step: float
    allocated_bytes_per_step: float | None
    input_shapes: tuple[str, ...]


class ModuleTime(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The modules of one place of the model, with all in them: of equal layers in a list those of all of them.

    Attributes:
        name: their path, as `blocks.*.attn`.
        kind: their class; "" of a container that is not called itself.
        calls_per_step: calls per step.
        forward_ms_per_step: time of the GPU work launched in them; without a GPU the host's.
        backward_ms_per_step: the same of their backward pass, which autograd's sequence numbers show.
        pct: share of both in the step.
    """

    name: str
    kind: str
    calls_per_step: float
    forward_ms_per_step: float
    backward_ms_per_step: float
    pct: float


class Kernel(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One kernel.

    Attributes:
        name: its name as in the trace.
        kind: the kind of its work, as in `RankSummary.kinds`.
        category: its category, one of `CATEGORIES`.
        calls_per_step: launches per step.
        ms_per_step: sum of its durations.
        mean_us: mean duration of one launch.
        pct: share of the step.
    """

    name: str
    kind: str
    category: str
    calls_per_step: float
    ms_per_step: float
    mean_us: float
    pct: float


CATEGORIES: Final = ("matmul", "comm", "memory", "other")
"""The four coarse parts of a GPU's busy time. Convolution and attention are `other`, as `kinds` shows them."""

IDLE_CAUSES: Final = ("data", "launch", "allocator", "sync", "copy", "python", "gpu")
"""What the GPU waits for, see `RankSummary.idle`."""


class Share(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A time per step and its share of the step.

    Attributes:
        ms_per_step: the time, mean over the counted steps.
        pct: its share of the step.
    """

    ms_per_step: float
    pct: float


class Kind(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The kernels of one kind: `matmul`, `attention`, `elementwise`, ...

    Attributes:
        category: its category, one of `CATEGORIES`.
        ms_per_step: its part of the busy time; the kinds sum to the busy time.
        pct: share of the step.
        calls_per_step: kernels, copies or fills per step.
    """

    category: str
    ms_per_step: float
    pct: float
    calls_per_step: float


class Distribution(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Distribution of a time over the steps, in milliseconds.

    Attributes:
        mean: arithmetic mean.
        p50: median.
        min: the shortest.
        max: the longest.
        p95: 95th percentile, interpolated between neighbours; None for fewer than 20 steps.
    """

    mean: float = 0.0
    p50: float = 0.0
    min: float = 0.0
    max: float = 0.0
    p95: float | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded step.

    Attributes:
        number: the N of `ProfilerStep#N`; 0 if the trace marks no steps.
        ms: length of its window on the GPU, without validation and checkpoints.
        host_ms: length of its range on the host, without validation and checkpoints.
        busy_ms: busy time of the GPU in the window.
        categories_ms: the busy time by category; the categories sum to `busy_ms`.
        whole: False for a step that the recording or the file cuts off.
        counted: whether the figures and findings include this step.
        light: True for a step recorded without operators. Those of other steps, with the same launches, explain it.
        captures: True for a step in which a CUDA graph is captured or instantiated: its launches run nothing.
    """

    number: int
    ms: float
    host_ms: float
    busy_ms: float
    categories_ms: Mapping[str, float]
    whole: bool
    counted: bool = True
    light: bool = False
    captures: bool = False


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Busy and idle time of the GPU.

    Attributes:
        busy_ms_per_step: time in which a kernel, copy or fill runs.
        busy_pct: its share of the step.
        idle_ms_per_step: the rest of the step.
        idle_pct: its share of the step.
        kernels_per_step: kernels per step, without copies and fills.
    """

    busy_ms_per_step: float
    busy_pct: float
    idle_ms_per_step: float
    idle_pct: float
    kernels_per_step: float


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """Communication, total and exposed.

    Attributes:
        ms_per_step: time in which a communication kernel runs.
        exposed_ms_per_step: the part of it in which no other kernel runs.
        holds_up_ms_per_step: the part of that in which the next kernel waits, or the host in a synchronizing call. The
            rest, in which the host is yet to launch that kernel, would be idle without communication.
        hidden_pct: share of `ms_per_step` in which another kernel runs too; 0 without communication.
        exposed_pct: exposed communication in percent of the step.
    """

    ms_per_step: float
    exposed_ms_per_step: float
    holds_up_ms_per_step: float
    hidden_pct: float
    exposed_pct: float


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """Copies in one direction.

    Attributes:
        direction: `HtoD`, `DtoH`, `DtoD`, `PtoP`, ...
        memory: host memory, `pageable` or `pinned`; "" if unknown or if no host memory is involved.
        calls_per_step: copies per step.
        ms_per_step: sum of their durations.
        bytes_per_step: bytes copied.
        gb_per_s: bandwidth; 0 if the trace does not record bytes.
        exposed_ms_per_step: time in which the GPU does nothing but such copies.
    """

    direction: str
    memory: str
    calls_per_step: float
    ms_per_step: float
    bytes_per_step: float
    gb_per_s: float
    exposed_ms_per_step: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of PyTorch's caching allocator, as recorded by `profile_memory`.

    Attributes:
        peak_allocated_bytes: most that tensors took at a time.
        peak_reserved_bytes: most that the allocator had of the device at a time.
        allocations_per_step: pieces of memory handed out per step.
        frees_per_step: pieces given back per step.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocations_per_step: float
    frees_per_step: float


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A named part of the training step and the GPU work launched in it.

    Attributes:
        name: `forward`, `backward`, `optimizer`, ..., or the name of a custom region.
        user: whether it is a custom region. Those overlap the built-in ones and each other.
        calls_per_step: times entered; 0 if inferred from operators, in a trace without the callbacks' marks.
        host_ms_per_step: time on the host.
        gpu_ms_per_step: busy time of the GPU work launched in it.
        idle_ms_per_step: idle time of the GPU before that work, as far as the host causes it.
        pct: the busy time in percent of the step.
        launches_per_step: kernel and graph launches in it.
    """

    name: str
    user: bool
    calls_per_step: float
    host_ms_per_step: float
    gpu_ms_per_step: float
    idle_ms_per_step: float
    pct: float
    launches_per_step: float


class IdlePart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Idle time of the GPU during one activity of the host.

    Attributes:
        launched: whether the next GPU work was already launched, so that the host did not delay it.
        activity: the innermost runtime call, operator or annotated range; "" for Python outside of any.
        operator: the operator around a runtime call; "" without one.
        thread: id of the host thread; "" if unknown.
        following: the GPU work that ended most of this time.
        ms_per_step: milliseconds per step.
    """

    launched: bool
    activity: str
    operator: str
    thread: str
    following: str
    ms_per_step: float


_SAME_STEP: Final = 0.02


def hosts_of(step_ms: Sequence[float], live_ms: float) -> list[int]:
    """Positions of hosts that are faster than recorded, the first, and with which a step takes as long as a live one.

    Several where the GPU sets the pace, so that the step does not show how fast the host is.
    """
    return [place for place, ms in enumerate(step_ms) if place and abs(ms / live_ms - 1) <= _SAME_STEP]


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Steps as they would be with a fix: the recorded ones, played again.

    Attributes:
        host: for each entry of the others what the host takes of its recorded time, from 1 down: recording slows it.
        step_ms: the step without any fix.
        after_ms: the step with the fix of each finding, by its code.
        uncertain_pct: how far steps that are played unchanged are from the recorded ones, and what these scatter.
    """

    host: tuple[float, ...]
    step_ms: tuple[float, ...]
    after_ms: Mapping[str, tuple[float, ...]]
    uncertain_pct: float


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded window of one rank.

    Attributes:
        rank: the global rank; a free number if the trace has none.
        file: name of its trace file.
        device: name of the GPU; "" if the trace has none.
        steps: number of recorded steps that the figures are over; `per_step` says which.
        step_ms: step time on the GPU.
        gpu: busy and idle time.
        categories: the busy time by category; the categories sum to it.
        kinds: the same in more detail. Where kernels overlap, the time counts once: to matmul, else to other
            computation, copies, communication. So overlapped communication counts to the computation that hides it.
        idle: the idle time by host activity: `data` in the data loader, `launch` in a launch of 0.1 ms or more,
            `allocator` in cudaMalloc or cudaFree, `sync` waiting for the GPU, `copy` copying, `python` anything else;
            `gpu` if the next kernel was already launched; in a process with several GPUs, `others` while they work.
        idle_parts: the idle time by runtime call, operator or annotated range on the host, longest first.
        comm: communication, total and exposed.
        copies: copies by direction and memory.
        host: launches, syncs, allocations.
        cpu: where the step time goes on the CPU; None if a GPU was used or no operators were recorded.
        memory: device memory; None if it was not recorded.
        regions: host and GPU time by region.
        operators: the most expensive operators, in the chosen order.
        top_kernels: the most expensive kernels.
        flops: FLOPs and compute rates; None if they cannot be counted.
        flops_note: why FLOPs cannot be counted; "" if they are.
        per_step: all recorded steps.
        unlinked_pct: share of the GPU time whose launch is not in the trace.
        warnings: what could not be read or was left out.
        loader: settings of the DataLoader; None if the trace has none.
        python: Python functions of the steps; None if no stacks were recorded.
        cut_off: whether its file is cut off, so that its steps may be incomplete.
        unseen: what a device did that is not in the trace or is not analysed, in words; "" if there is nothing.
        modules: the modules of the model that take at least 1 % of the step, each before those in it; empty if their
            calls were not recorded.
        replay: what fixes would leave of a step; None where none was looked for, or the steps cannot be played again.
    """

    rank: int
    file: str
    device: str
    steps: int
    step_ms: Distribution
    gpu: Gpu
    categories: Mapping[str, Share]
    kinds: Mapping[str, Kind]
    idle: Mapping[str, Share]
    comm: Communication
    copies: tuple[Copies, ...]
    host: Host
    memory: Memory | None
    regions: tuple[Region, ...]
    operators: tuple[Operator, ...]
    top_kernels: tuple[Kernel, ...]
    flops: Flops | None
    flops_note: str
    per_step: tuple[Step, ...]
    unlinked_pct: float
    warnings: tuple[str, ...]
    idle_parts: tuple[IdlePart, ...] = ()
    loader: LoaderSettings | None = None
    cpu: CpuTime | None = None
    python: PythonFunctions | None = None
    cut_off: bool = False
    unseen: str = ""
    modules: tuple[ModuleTime, ...] = ()
    replay: Replay | None = None


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time saved by the fix of a finding.

    Attributes:
        ms_per_step: milliseconds per step; of a finding on the whole run, spread over its steps.
        pct: the same in percent of the step.
        at_most: whether it is what is saved if all of the cause goes; else the expected value.
        text: the same as a sentence.
        low_pct: lower end of the interval of `pct`, by changes that were made (docs/measured.md, "Fixes") and by the
            number of samples of a line; None where neither is known.
        high_pct: its upper end.
    """

    ms_per_step: float
    pct: float
    at_most: bool
    text: str
    low_pct: float | None = None
    high_pct: float | None = None


SCHEMA_VERSION: Final = 2

NOTHING_STANDS_OUT: Final = "nothing stands out"
NO_VERDICT: Final = "no verdict"


class RankWait(msgspec.Struct, frozen=True, kw_only=True):
    """Time that one rank waits for the others in collectives.

    Attributes:
        rank: the global rank.
        comm_ms_per_step: time in collectives that were matched over the ranks.
        wait_ms_per_step: the part of it beyond the shortest duration of each collective on any rank.
    """

    rank: int
    comm_ms_per_step: float
    wait_ms_per_step: float


class Collective(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One kind of collective in one process group, matched over the ranks.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: name of the process group.
        calls_per_step: calls per step.
        megabytes_per_step: input of one rank; 0 if the trace does not record it.
        cost_ms_per_step: shortest duration over the ranks, summed: the communication itself.
        wait_ms_per_step: time beyond that, mean over the ranks: waiting for the last rank to join.
    """

    name: str
    group: str
    calls_per_step: float
    megabytes_per_step: float
    cost_ms_per_step: float
    wait_ms_per_step: float


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of lost time, with its evidence and the fix.

    Attributes:
        code: stable identifier, such as `input-bound`.
        share_pct: cost in percent of the step, or of the fit (see `of`); of a trace's finding the mean over the ranks.
        rank: the rank it applies to; None for all.
        source: `trace` for the recorded window, `run` for the regions of the whole run.
        title: one sentence with the key numbers.
        evidence: the numbers behind it; names end in the unit.
        advice: the fix, with the name of the setting.
        saves: predicted saving of the fix; None if unknown or without a fix.
        of: what `share_pct` is a share of: the `step`, the wall time of the `run` from the start of the fit, or the
            `memory`, for a finding that costs no time; `times` for a setting that all times include, without a
            known cost.
        low_pct: lower end of the 95 % interval of `share_pct` by the run's own steps; None if unknown.
        high_pct: upper end of it.
        fix: the fix as code or as a command to copy; "" where the advice is all there is.
    """

    code: str
    share_pct: float
    rank: int | None
    source: Literal["trace", "run"]
    title: str
    evidence: Mapping[str, float | str]
    advice: str
    saves: Saving | None = None
    of: Literal["step", "run", "memory", "times"] = "step"
    low_pct: float | None = None
    high_pct: float | None = None
    fix: str = ""

    @property
    def whole(self) -> str:
        """What `share_pct` is a share of, in words."""
        return {"step": "the step", "run": "the fit", "memory": "the memory", "times": "all times"}[self.of]

    def share(self, decimals: int = 0) -> str:
        """`share_pct` in words, as `17 % of the step`; `all times` where there is no number."""
        return self.whole if self.of == "times" else f"{self.share_pct:.{decimals}f} % of {self.whole}"

    @property
    def remedy(self) -> str:
        """The advice, followed by its predicted saving."""
        return self.advice if self.saves is None else f"{self.advice} {self.saves.text}"


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of thumb that applies; weaker than a finding.

    Attributes:
        code: code of the rule.
        rank: the rank that it applies to.
        text: what to look at, in a sentence.
    """

    code: str
    rank: int
    text: str


class RunRegion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Time of one region over the counted steps of a run.

    Attributes:
        device_ms: mean per step on the GPU's timeline; of the host without a GPU.
        host_ms: mean per step on the host.
        error_ms: half the width of the 95 % interval of `device_ms`, from not timing the region in each step.
        p50_ms: median of what `device_ms` is the mean of, over the latest 1024 steps whose regions were timed; None if
            unknown.
        p95_ms: 95th percentile of the same; None for fewer than 20 steps.
    """

    device_ms: float
    host_ms: float
    error_ms: float = 0.0
    p50_ms: float | None = None
    p95_ms: float | None = None


class RunCompute(msgspec.Struct, frozen=True, kw_only=True):
    """Compute rate of one device over the counted steps, and the peak that it is relative to.

    Attributes:
        kind: `mfu` counts the operations that the model requires, `hfu` those that the device executed.
        tflops: 10¹² operations per second of one device; None if unknown, for the reason in `peak_source`.
        dtype: data type of the peak.
        device: the device that the peak is of.
        peak_tflops: peak of the device; None if unknown.
        peak_source: where the peak is from, or why it is unknown.
        pct_of_peak: MFU or HFU in percent; None without a peak.
        note: caveat of the FLOP count; "" without one.
    """

    kind: Literal["mfu", "hfu"]
    tflops: float | None
    dtype: str
    device: str
    peak_tflops: float | None
    peak_source: str
    pct_of_peak: float | None
    note: str = ""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one rank went by its own clock, for a comparison with the other ranks.

    Attributes:
        rank: the global rank.
        host: name of its machine.
        steps: number of counted steps.
        step_ms: mean step time.
        leaves_ms: self time per step: of regions, and of hooks and loggers by their part of the ledger, which sum to
            the step. Device time on a GPU. Parts outside of the step are per step of the fit.
        error_ms: half of the 95 % interval of its own work, which may be of few steps; 0 if unknown.
        on_device: whether times are device times.
        outside: the leaves outside of the step, such as `validation`.
        cpu: use of the cores by the rank; None if unknown.
        exposed_ms: by leaf, communication and waiting that nothing hides, by the rank's own events; None if that was
            not measured.
        unmeasured: leaves that may have further waits, which its events do not cover.
        unmeasured_because: why there are such leaves, or nothing was measured; "" if its events cover all waits.
        waits_ms: by leaf, the part in which the rank waits for other ranks; {} if that was not measured, and if no
            other rank is known.
        starved_pct: share of the steps in which the GPU waited for the host; None if unknown.
        sm_mhz: mean clock of its GPU; None if unknown.
        throttled_pct: share of the time in which that was lowered; None if unknown.
        clock_ms: how far the clock of its machine is ahead of that of rank 0's, in milliseconds; None if unknown, and
            on the same machine.
        clock_error_ms: largest error of that.
        lines: where its training thread was in each leaf, most samples first; {} if it was not sampled.
        excess_ms: by number of a step, of the latest 64 whose regions were timed, how much longer than usual its own
            work took; 0 for about as long. {} if they are too few, or the rank is alone.
        excess_leaf: the leaf that most of that is in; "" if there is none.
    """

    rank: int
    host: str
    steps: int
    step_ms: float
    leaves_ms: Mapping[str, float]
    error_ms: float = 0.0
    on_device: bool = False
    outside: tuple[str, ...] = ()
    cpu: CpuUse | None = None
    exposed_ms: Mapping[str, float] | None = None
    unmeasured: tuple[str, ...] = ()
    unmeasured_because: str = ""
    waits_ms: Mapping[str, float] = {}
    starved_pct: float | None = None
    sm_mhz: float | None = None
    throttled_pct: float | None = None
    clock_ms: float | None = None
    clock_error_ms: float | None = None
    lines: Mapping[str, tuple[SampledLine, ...]] = {}
    excess_ms: Mapping[int, float] = {}
    excess_leaf: str = ""

    @property
    def step_leaves_ms(self) -> dict[str, float]:
        """The leaves of the step without waits for other ranks and for what they exchange: its own work."""
        exposed = self.exposed_ms or {}
        return {
            leaf: max(ms - exposed.get(leaf, 0.0), 0.0)
            for leaf, ms in self.leaves_ms.items()
            if leaf not in self.outside
        }

    @property
    def waited_ms(self) -> float:
        """Those waits per step."""
        return sum((self.exposed_ms or {}).values())

    def own_ms(self, leaf: str | None = None) -> float:
        """Time of a leaf without waits for other ranks; of all leaves in which those are measured without a leaf."""
        if leaf is None:
            return sum(self.own_ms(leaf) for leaf in self.leaves_ms if leaf not in self.unmeasured)
        return self.leaves_ms.get(leaf, 0.0) - self.waits_ms.get(leaf, 0.0)


class WindowEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Step time after the recorded window, compared with before it.

    Attributes:
        steps_before: number of steps compared before the window.
        steps_after: number of steps compared after it.
        before_ms: median step time before.
        after_ms: median step time after.
        change_pct: increase of the median.
        low_pct: lower end of its 95 % interval.
        high_pct: upper end of its 95 % interval.
    """

    steps_before: int
    steps_after: int
    before_ms: float
    after_ms: float
    change_pct: float
    low_pct: float
    high_pct: float


class StepDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Step time that still drifted when the warm-up ended.

    Attributes:
        first_ms: median of the first counted steps.
        steady_ms: median of the later ones.
        until_step: number of the step from which it was steady; None if it was not by the middle of the steps compared,
            the first 512 that count.
    """

    first_ms: float
    steady_ms: float
    until_step: int | None


class PartGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Time per step of a part of the step that grows over a run, at the pace that the rest of the step has on average.

    Attributes:
        first_ms: median of the first fifth of the run's blocks of steps.
        last_ms: median of the last fifth.
    """

    first_ms: float
    last_ms: float


class WorkerRestarts(msgspec.Struct, frozen=True, kw_only=True):
    """Restarts of the DataLoader's workers between epochs, each until its first batch arrives.

    Attributes:
        count: number of restarts in the counted steps.
        workers: processes restarted each time.
        device_ms: GPU wait for them per step, part of the region `data`; host time without a GPU.
        host_ms: host time per step.
    """

    count: int
    workers: int
    device_ms: float
    host_ms: float


class Span(msgspec.Struct, frozen=True, gc=False):
    """When a part of the ledger took place, with what ran inside it.

    Attributes:
        part: the part of the ledger; `epoch` or `window`, the recorded one, are no parts.
        start_s: when it began, in seconds since the run began.
        end_s: when it ended. Of over 128 spans of one part, those near each other are merged into one.
        seconds: time in it; of a merged span less than `end_s - start_s`.
        count: number of spans merged into it; 1 for one that stands for itself.
        step: number of the step under way when it ended; None before the first.
    """

    part: str
    start_s: float
    end_s: float
    seconds: float
    count: int = 1
    step: int | None = None


class RunLedger(msgspec.Struct, ShownInNotebook, frozen=True, kw_only=True):
    """Where the wall time of the whole run went, on rank 0: parts that sum to it.

    Attributes:
        wall_s: the whole run in seconds, to the end of the fit: from the start of the process, or of the fit if the
            process is interactive or had another fit before.
        parts: seconds by part, the largest first; each without the parts inside it. `startup/imports`,
            `startup/script`, `startup/process` (those two in one), `startup/trainer`, `startup/fit`,
            `startup/module.hook`, `startup/callback.NAME.hook`, `startup/restore`, `startup/compile`,
            `startup/first_step`, `sanity_check`, `steps`, `hang` (steps in which training stood still), `data_loader`
            (iterators and workers), `validation`, `validation/loader` (the loader's iterator, and with workers the wait
            for their first batch), `validation/data`, `validation/transfer`, `validation/step`, `validation/metrics`
            (computing what was logged), `checkpoint`, `checkpoint/write`, `callback/NAME.hook`, `module/hook`,
            `datamodule/hook`, `logger/NAME`, `compile`, `gc/generation_2`, `gc/generation_0_1`, `profiler` (this
            package), `teardown`.
        unexplained_s: `wall_s` less the sum of the parts.
        counts: how often each part was entered.
        first_s: seconds of the first time of each part, which may include one-time work.
        counted_s: of the parts inside a step's regions, seconds in the steps that count; None in files of older
            versions.
        long_steps: in how few of these steps nearly all of a part's time is, if it took 0.1 ms or more at once in each;
            of times within an octave all are counted.
        goodput: productive step time as a fraction of `fit_s`: `steps`, and on a GPU training during hooks.
        spans: when parts of 1 ms and more took place, the epochs and the recorded window, by their beginning.
    """

    wall_s: float
    parts: Mapping[str, float]
    unexplained_s: float
    counts: Mapping[str, int]
    first_s: Mapping[str, float] = {}
    counted_s: Mapping[str, float] | None = None
    long_steps: Mapping[str, int] = {}
    goodput: float | None = None
    spans: tuple[Span, ...] = ()

    @property
    def fit_s(self) -> float:
        """Seconds of the fit, without what was before it and without this package's own time."""
        return self.wall_s - sum(self.parts.get(part, 0.0) for part in (*BEFORE_FIT, PROFILER))

    @property
    def wholes(self) -> dict[str, float]:
        """Seconds by part, a checkpoint with writing it and a validation with what it consists of in one."""
        return wholes(self.parts)

    @property
    def fit_pct(self) -> dict[str, float]:
        """Parts of the fit in percent of it; the unexplained time is part of the whole."""
        parts = {name: s for name, s in self.wholes.items() if name not in BEFORE_FIT}
        whole_s = sum(parts.values()) + self.unexplained_s
        return {name: 100 * s / whole_s for name, s in parts.items()} if whole_s > 0 else {}


class LeftOutSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a fit that its figures leave out, and why; and time between batches that is no part of a step.

    Attributes:
        warmup: number of warm-up steps.
        recorded: number of steps in which the profiler ran.
        stalled: number of steps in which training stood still.
        untimed: number of steps in which something could not be timed.
        stalls: a sentence for each of the latest steps in which training stood still, also for one that did not end.
        excluded_ms: time between batches, by `validation`, `checkpoint`, `profiler`.
        recorded_tokens: tokens of each step in which the profiler ran, by its number, where they are counted.
    """

    warmup: int = 0
    recorded: int = 0
    stalled: int = 0
    untimed: int = 0
    stalls: tuple[str, ...] = ()
    excluded_ms: Mapping[str, float] = {}
    recorded_tokens: Mapping[int, float] = {}


class EndToEnd(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of a fit by the wall clock.

    Attributes:
        samples: samples of all steps on this rank; None if unknown.
        first_step_s: from the start of fit to the end of its first step; None without one.
        wall_s: from the start of fit to the end of training.
    """

    samples: float | None = None
    first_step_s: float | None = None
    wall_s: float = 0.0


class RunTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Times and amounts of the counted steps of a run, or of some of them, on one rank; without a trace.

    Attributes:
        steps: number of counted steps.
        on_device: whether device times are measured on a GPU; False on a CPU.
        step_ms: device time of the steps, with percentiles over the latest 4096; all 0 without a step.
        host_step_ms: mean host time of a step.
        regions: `data`, `transfer`, `forward`, `backward`, `optimizer` as far as they were timed apart, `other` and
            custom regions, by name. Where some steps were timed as a whole, they are estimated from the others (see
            `timing.estimate`). With what is unknown the built-in ones sum to the step; their medians do not.
        user_regions: names of the custom regions, in order of first appearance.
        waits_ms: device time per step in which the rank waits for others and for what they exchange, by its place.
        split_steps: number of steps whose regions were timed.
        atypical: whether the regions of most steps are estimated from steps unlike them, because there are no others.
        optimizer_steps: in how many of the steps the weights changed.
        samples: their samples on this rank; None if unknown.
        tokens: their tokens; None if not counted.
        flops: their floating-point operations; None if unknown.
        all_steps: number of all steps of the fit, those that do not count included; None if unknown.
        only_warmup: whether the fit had warm-up steps only, of which these are all but the very first.
        left_out: the steps that do not count.
        end_to_end: all steps by the wall clock.
        typical_mean_ms: mean step time if each step took the median of its kind: with or without an optimizer update.
            None if unknown.
        unknown_ms: what long steps take more than the others, per step, if none of them had its regions timed: it is in
            no region.
        unknown_steps: how many those are.
        gpu_starved_pct: share of the steps in which the GPU had finished all but the optimizer's update when the host
            finished the batch: it had nothing queued. None if not measured.
        overhead_us: host time per step that this package takes; None without a step.
        intervals: share of each region and of the ledger's parts inside the step with its interval, by name; empty for
            fewer than five blocks of steps.
        slowest: the five slowest counted steps, the slowest first.
        drift: how the step time still drifted at the end of the warm-up; None if it did not, or if fewer than 100 steps
            count.
        grows: of regions and of the ledger's parts inside the step those that take longer and longer, by name; none in
            fewer than 12 blocks of steps.
        window_effect: step time after the recorded window compared with before; None with fewer than 20 steps on a
            side.
        worker_restarts: restarts of the DataLoader's workers; None with persistent workers or none.
    """

    steps: int = 0
    on_device: bool = False
    step_ms: Distribution = Distribution()
    host_step_ms: float = 0.0
    regions: Mapping[str, RunRegion] = {}
    user_regions: tuple[str, ...] = ()
    waits_ms: Mapping[str, float] = {}
    split_steps: int = 0
    atypical: bool = False
    optimizer_steps: int = 0
    samples: float | None = None
    tokens: float | None = None
    flops: float | None = None
    all_steps: int | None = None
    only_warmup: bool = False
    left_out: LeftOutSteps = LeftOutSteps()
    end_to_end: EndToEnd = EndToEnd()
    typical_mean_ms: float | None = None
    unknown_ms: float = 0.0
    unknown_steps: int = 0
    gpu_starved_pct: float | None = None
    overhead_us: float | None = None
    intervals: Mapping[str, ShareInterval] = {}
    slowest: tuple[SlowStep, ...] = ()
    drift: StepDrift | None = None
    grows: Mapping[str, PartGrowth] = {}
    window_effect: WindowEffect | None = None
    worker_restarts: WorkerRestarts | None = None

    @property
    def is_evidence(self) -> bool:
        """Whether steps count: else these are of the warm-up, and say nothing about the run."""
        return self.steps > 0 and not self.only_warmup

    @property
    def total_ms(self) -> float:
        """Device time of the steps."""
        return self.steps * self.step_ms.mean

    def per_second(self, amount: float | None) -> float | None:
        """`amount` per second of the steps' device time; None if unknown, or if no time passed."""
        return None if amount is None or self.total_ms <= 0 else amount / self.total_ms * 1e3

    def metrics(
        self, *, replicas: int = 1, devices_per_batch: int = 1, peak_flops: float | None = None
    ) -> dict[str, float]:
        """Rates and times of the steps as metrics."""
        metrics = self._rates(replicas, devices_per_batch, peak_flops)
        times = {"step": (self.step_ms.mean, self.host_step_ms)}
        if not self.atypical:
            times |= {name: (region.device_ms, region.host_ms) for name, region in self.regions.items()}
        for region, (ms, host_ms) in times.items():
            metrics[region_ms(region)] = ms
            if self.on_device:
                metrics[f"time_host/{region}_ms"] = host_ms
        if self.regions and not self.atypical and self.unknown_ms > 0:
            metrics[region_ms("unknown")] = self.unknown_ms
        if self.overhead_us is not None:
            metrics["profiling/overhead_us"] = self.overhead_us
        return metrics

    def _rates(self, replicas: int, devices_per_batch: int, peak_flops: float | None) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name in ("samples", "tokens", "steps", "optimizer_steps"):
            rate = self.per_second(getattr(self, name))
            if rate is not None:
                # every replica works on its own samples; the steps are the same steps
                of_device = name in {"samples", "tokens"}
                metrics[per_second(name)] = rate * (replicas if of_device else 1)
                if of_device and replicas * devices_per_batch > 1:
                    metrics[per_second(name, device=True)] = rate
        flops_per_second = self.per_second(self.flops)
        if flops_per_second is not None:
            metrics[TFLOPS] = flops_per_second / devices_per_batch / 1e12
            if peak_flops is not None:
                metrics[MFU] = flops_per_second / devices_per_batch / peak_flops
        return metrics


class RunMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine of one rank did over a run.

    Attributes:
        cpu: use of the cores on rank 0; None if unknown, as after less than half a second of counted steps.
        telemetry: readings of the GPU's sensors; None without any.
        no_telemetry: why there are none; "" if there are, or if they were not asked for.
        compute: compute rates; empty if unknown.
        growth: host memory of the process and its loader's workers that grows; None if it does not.
    """

    cpu: CpuUse | None = None
    telemetry: TelemetrySummary | None = None
    no_telemetry: str = ""
    compute: tuple[RunCompute, ...] = ()
    growth: MemoryGrowth | None = None


class RunRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that measured a run, and the others beside it.

    Attributes:
        rank: the rank whose times these are.
        world_size: number of training processes.
        works: the work of each rank, this one included, as far as they are known; empty for a single rank.
    """

    rank: int = 0
    world_size: int = 1
    works: tuple[RankWork, ...] = ()


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a run trains with, as they are on rank 0.

    Attributes:
        loader: settings of the DataLoader on rank 0; None if unknown.
        validation_loader: settings of the DataLoader that the fit validates on; None if unknown or without validation.
        optimizer: the optimizer and its parameter tensors on rank 0; None if unknown.
        switches: switches that slow a run down, on rank 0; None if unknown.
        trainer: what trains: a Lightning Trainer, Hugging Face's, or a loop of the script's own.
        device: kind of device that it trains on, such as `cpu`, `cuda` or `mps`; "" if unknown.
    """

    loader: LoaderSettings | None = None
    validation_loader: LoaderSettings | None = None
    optimizer: OptimizerSettings | None = None
    switches: Switches | None = None
    trainer: Literal["lightning", "transformers", "loop"] = "lightning"
    device: str = ""


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the callbacks over a whole run, without a trace.

    Attributes:
        timing: times of the steps.
        machine: what the machine did.
        ranks: which rank measured it, and the work of all.
        settings: of loaders, optimizer and PyTorch.
        ledger: wall time of the whole run by parts; None if unknown.
        lines: where the training thread was in each region or part of the ledger, by samples of its stack during some
            seconds of the run, most samples first; empty if it was not sampled, as where the GPU is behind.
        memory: what fills the GPU; None on a CPU, or if it was not looked up.
        recompilations: what `torch.compile` compiled again, at most five, what took most time first.
        continues_from: the optimizer step from which this fit continues, as one that is resumed from a checkpoint; 0
            for a fit from the beginning. The ledger and all figures are of this fit alone.
    """

    timing: RunTiming
    machine: RunMachine = RunMachine()
    ranks: RunRanks = RunRanks()
    settings: RunSettings = RunSettings()
    ledger: RunLedger | None = None
    lines: Mapping[str, tuple[SampledLine, ...]] = {}
    memory: RunMemory | None = None
    recompilations: tuple[Recompilation, ...] = ()
    continues_from: int = 0


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the Trainer's loggers calls the run.

    Attributes:
        logger: class of the logger, such as `WandbLogger`.
        name: its name: the project of W&B, the id of MLflow's experiment, the folder of TensorBoard; "" without one.
        version: the run in it: the id of W&B's or MLflow's run, the number of TensorBoard's version; "" without one.
    """

    logger: str
    name: str
    version: str


class Analysis(msgspec.Struct, ShownInNotebook, frozen=True, kw_only=True):
    """Verdict, findings and figures of a trace, a run, or both.

    Attributes:
        schema_version: version of this layout.
        source: the analysed file or folder, or the name of the run.
        verdict: code of the first finding that is certain, `nothing stands out`, or `no verdict` if the files are cut
            off and have no whole step.
        verdict_text: the verdict in one or two sentences, with numbers and advice.
        findings: causes of lost time: of the machine, then what can be removed, then the work itself, each by what
            the fit would lose without it.
        findings_note: the recorded steps that the figures leave out, and why; "" for none.
        hints: rules of thumb that apply.
        ranks: one entry per rank, by number; of more than 16 ranks those that stand out, rank 0 and a typical one.
            Empty for a run without a trace.
        all_ranks: number of ranks that all figures are over.
        missing: the other ranks that recorded, whose traces are not here.
        spread: distribution over all of them of the mean milliseconds per step: `step`, `busy`, `idle` and `comm` of
            the GPU, and `waits` for other ranks.
        collectives: communication matched over the ranks, most expensive first; empty for a single rank.
        rank_waits: time that each rank waits for the others; empty for a single rank.
        run: measurements over the whole run; None for a trace alone.
        differences: where the trace and the whole run disagree.
        cut_off: for each rank whose file is cut off, where it ends and which of its steps are whole.
        warnings: what could not be read, of all files.
        tracked: what the Trainer's loggers call the run; empty for a trace alone.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    source: str
    verdict: str
    verdict_text: str
    findings: tuple[Finding, ...]
    findings_note: str = ""
    hints: tuple[Hint, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    all_ranks: int = 0
    missing: tuple[int, ...] = ()
    spread: Mapping[str, Distribution] = {}
    collectives: tuple[Collective, ...] = ()
    rank_waits: tuple[RankWait, ...] = ()
    run: RunEvidence | None = None
    differences: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tracked: tuple[TrackedRun, ...] = ()


class StepGroup(msgspec.Struct, omit_defaults=True):
    """Times of steps of one kind by one clock, in milliseconds, as sums that only grow.

    Attributes:
        split: number of steps whose regions were timed.
        ms: their time.
        squares: the sum of the squares of their times.
        unsplit: number of steps that were timed as a whole.
        unsplit_ms: their time.
        regions: of the split steps by region, custom ones included: the sum of its times, of their squares, and of
            their products with the step's time.
    """

    split: _Whole = 0
    ms: _Sum = 0.0
    squares: _Sum = 0.0
    unsplit: _Whole = 0
    unsplit_ms: _Sum = 0.0
    regions: dict[str, Annotated[list[_Sum], Meta(min_length=3, max_length=3)]] = {}


class StepCounters(msgspec.Struct, omit_defaults=True):
    """Sums over counted steps that only grow.

    Attributes:
        steps: number of steps.
        optimizer_steps: number of steps that changed the weights.
        samples: samples on this rank, as far as they are known.
        no_samples: number of steps whose samples are unknown.
        tokens: tokens likewise.
        no_tokens: number of steps whose tokens were not counted.
        flops: floating-point operations likewise.
        no_flops: number of steps whose operations are unknown.
        starved: number of steps at whose end the GPU waited for the host.
        asked: number of steps of which that is known.
        loader_starts: number of steps in which the loop created a new iterator of its loader.
        between_ms: device time of that, of the wait for its first batch, and of the ends of iterators of unknown
            length; it is in no group.
        between_host_ms: host time of the same.
        timing_us: host time in microseconds that timing took inside the steps.
        log_entries_us: host time in microseconds that log entries and the record took between the steps.
        groups: device times, host times without a GPU, by kind: `changing` the weights or `accumulating` gradients,
            each followed by `/8` and the like for steps longer than so many medians; `forced` for steps that had to be
            split, as the first after a validation run, and stand for no others.
        host_groups: host times likewise.
        steps_us: histogram of the steps' times: number of steps by bucket (see `timing.counters`).
    """

    steps: _Whole = 0
    optimizer_steps: _Whole = 0
    samples: _Sum = 0.0
    no_samples: _Whole = 0
    tokens: _Sum = 0.0
    no_tokens: _Whole = 0
    flops: _Sum = 0.0
    no_flops: _Whole = 0
    starved: _Whole = 0
    asked: _Whole = 0
    loader_starts: _Whole = 0
    between_ms: _Sum = 0.0
    between_host_ms: _Sum = 0.0
    timing_us: _Sum = 0.0
    log_entries_us: _Sum = 0.0
    groups: dict[str, StepGroup] = {}
    host_groups: dict[str, StepGroup] = {}
    steps_us: dict[Annotated[int, Meta(ge=0, le=2000)], _Whole] = {}


class LoopRates(msgspec.Struct, frozen=True):
    """Sums over runs of a loop without training on this rank, by the host's clock, and the rates that follow.

    The first batch of each loader in a run does not count: workers start, and libraries are loaded.

    Attributes:
        loop: `validation`, `test` or `predict`.
        runs: how many runs.
        steps: how many batches count.
        seconds: wall time from the end of each loader's first batch to that of its last, or to the end of the run,
            hooks and metrics included.
        samples: samples of the batches that count; None if unknown.
        tokens: their tokens; None if not counted.
        replicas: data-parallel replicas, each with samples of its own.
        inside_s: of these seconds, those in `data`, `transfer` and `step`.
    """

    loop: str
    runs: int = 0
    steps: int = 0
    seconds: float = 0.0
    samples: float | None = 0.0
    tokens: float | None = 0.0
    replicas: int = 1
    inside_s: Mapping[str, float] = {}

    def plus(self, other: "LoopRates") -> "LoopRates":
        """The sums over the runs of both."""
        return replace(
            other,
            runs=self.runs + other.runs,
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            inside_s={name: s + self.inside_s.get(name, 0.0) for name, s in other.inside_s.items()},
            samples=None if self.samples is None or other.samples is None else self.samples + other.samples,
            tokens=None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    def per_second(self) -> dict[str, float]:
        """Samples, tokens and steps per second of the whole job, as far as they are known."""
        if not self.steps or self.seconds <= 0:
            return {}
        amounts = {"samples": self.samples, "tokens": self.tokens}
        rates = {unit: amount * self.replicas / self.seconds for unit, amount in amounts.items() if amount is not None}
        return {**rates, "steps": self.steps / self.seconds}

    def metrics(self) -> dict[str, float]:
        """The rates as metrics, `throughput/LOOP/NAME_per_sec`, and `time/LOOP/NAME_ms` per batch."""
        times = {region_ms(name, loop=self.loop): 1e3 * s / self.steps for name, s in self.inside_s.items()}
        return {per_second(unit, loop=self.loop): rate for unit, rate in self.per_second().items()} | times


class RunReport(msgspec.Struct, frozen=True):
    """What is known at the end of a run.

    Attributes:
        run: what was measured on this rank.
        trace: what became of the recorded window, None without one.
        device: what it trained on, in words.
        replicas: data-parallel replicas.
        log_folder: where TensorBoard should look, None without a logger.
        analysis: of the steps that count and of the trace, None where there is neither.
        loops: what the validation runs did.
        model: the class of the module; "" if unknown.
    """

    run: RunEvidence
    trace: TraceReport | None
    device: str
    replicas: int
    log_folder: Path | None
    analysis: Analysis | None = None
    loops: tuple[LoopRates, ...] = ()
    model: str = ""


_Seconds = Annotated[float, Meta(ge=0, le=1e11)]
Ended = Literal["", "finished", "failed"]


RECORD_VERSION: Final = 2  # of the layout of a record's lines
_SetSeconds = Annotated[float, Meta(ge=-1e11, le=1e11, description="how far the machine's clock was set by then.")]


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="begin"):
    """What runs where, and its settings. Contains no environment variables.

    Attributes:
        schema_version: version of this layout.
        run: id of the run, the same on all ranks.
        rank: the global rank.
        world_size: number of training processes.
        segment: number of the file, counted from 0.
        at: start of the fit.
        versions: versions of Python, torch, lightning and this package, by name.
        host: name of the machine.
        device: the training device, such as `cuda:0 (NVIDIA H200)`.
        gpu: UUID of the GPU that it trains on; "" if unknown, and without one.
        settings: settings of the Trainer: `precision`, `strategy`, `devices`, `max_steps`, `log_every_n_steps`, ...;
            `train_batches` is the number of training batches of an epoch.
        batches: number of steps that the fit will have, by `max_steps` and `max_epochs`; None if unlimited or unknown.
        first_epoch: number of the epoch that it begins in.
        first_batch: number of the batch of that epoch that it begins with.
        loader: settings of the training DataLoader; None if unknown.
        argv: name of the script and of its options, without their values.
        commit: git commit of the working directory; "" if there is none.
        restored_from: checkpoint that the run resumed from; "" for none.
        continues: record of the run that wrote the checkpoint; "" if unknown.
    """

    schema_version: Literal[2] = RECORD_VERSION
    run: str
    rank: _Whole
    world_size: Annotated[int, Meta(ge=1, le=10**9)]
    segment: _Whole = 0
    at: _Seconds
    versions: Mapping[str, str]
    host: str
    device: str
    gpu: str = ""
    settings: Mapping[str, str | int | float | bool | None]
    batches: _Whole | None = None
    first_epoch: _Whole = 0
    first_batch: _Whole = 0
    loader: LoaderSettings | None = None
    argv: tuple[str, ...] = ()
    commit: str = ""
    restored_from: str = ""
    continues: str = ""


class _Timed(msgspec.Struct, frozen=True, kw_only=True, tag_field="line"):
    at: _Seconds
    set_s: _SetSeconds = 0.0


class IntervalLine(_Timed, frozen=True, kw_only=True, tag="interval"):
    """The steps since the previous interval.

    Attributes:
        at: end of the interval.
        step: number of the step after its last one, counted from 0 at the start of the fit.
        logger_step: x-axis value of the log entry.
        counters: its counted steps: neither warm-up nor recorded. Without custom regions; host times of a GPU's steps
            only.
        ledger_s: wall time since the previous interval by part of the ledger, in seconds.
        metrics: latest logged rates and telemetry, by name.
    """

    step: _Whole
    logger_step: _Whole
    counters: StepCounters
    ledger_s: Mapping[str, _Seconds] = {}
    metrics: Mapping[str, float] = {}

    @property
    def counted(self) -> int:
        """Number of its counted steps."""
        return self.counters.steps


class EventLine(_Timed, frozen=True, kw_only=True, gc=False, tag="event"):
    """A single event, such as a checkpoint.

    Attributes:
        at: end of the event.
        step: number of the current step.
        kind: `validation`, `checkpoint`, `epoch`, `window`, `slow-step`, `recompilation`, `graph-break`, ...
        text: one sentence.
        seconds: duration; 0 for an instant.
    """

    step: _Whole
    kind: str
    text: str = ""
    seconds: _Seconds = 0.0


class State(_Timed, frozen=True, kw_only=True, tag="state"):
    """Totals of the run so far: the content of the table at the end of a fit, and the metrics.

    Attributes:
        at: time of the totals.
        step: number of the current step.
        report: content of the table.
        metrics: logged metrics over all counted steps, by name.
        counters: all counted steps, as in an interval.
        blocks: at the end of the run, the same in up to 64 blocks of as many step numbers each; empty before.
    """

    step: _Whole
    report: RunReport
    metrics: Mapping[str, float]
    counters: StepCounters = msgspec.field(default_factory=StepCounters)
    blocks: tuple[StepCounters, ...] = ()


class End(_Timed, frozen=True, kw_only=True, tag="end"):
    """End of the run; a `state` precedes it.

    Attributes:
        at: end of the fit.
        step: number of steps.
        outcome: `finished`, or `failed` after an exception.
        exception: type and message of the exception; "" without one.
    """

    step: _Whole
    outcome: Literal["finished", "failed"]
    exception: str = ""


Line = Begin | IntervalLine | EventLine | State | End


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is that has ended no step for long, while nothing in it moves.

    Attributes:
        seconds: time since its last sign of progress.
        place: the innermost line of the user's code, `collate at data.py:31`; "" if unknown.
        call: the function that does not return, `all_reduce`, `input`, `read`; "" if unknown.
        waits: whether it waits for other ranks, in a collective.
        collective: the collective that it has entered and not completed, `all_reduce`; "" if unknown.
        number: the number of that collective in its process group.
        group: the process group of that collective.
        shape: the sizes of its inputs.
        entered: by process group, the number of the last collective that it entered.
        worker: the worker of the data loader that it waits for, `loader worker 2 (pid 1234)`; "" if it waits for none.
            `place` is then the worker's.
    """

    seconds: _Seconds
    place: _Text = ""
    call: _Text = ""
    waits: bool = False
    collective: _Text = ""
    number: _Whole = 0
    group: _Text = ""
    shape: _Text = ""
    entered: Mapping[str, _Whole] = {}
    worker: _Text = ""


class SilentRank(msgspec.Struct, frozen=True, kw_only=True):
    """What the system says of a process on the same machine whose rank publishes nothing any more.

    Attributes:
        rank: the global rank.
        pid: its process id.
        process: `gone`, `stopped` as by SIGSTOP, `blocked` if its training thread has used no core for too long, else
            `running`: a call may compute for long and hold Python's interpreter lock.
        seconds: for how long it has published nothing.
        place: the innermost line of the user's code, as in `Stall`; "" if unknown.
        waits: whether that line waits for other ranks, in a collective.
    """

    rank: _Whole
    pid: _Whole
    process: Literal["gone", "stopped", "blocked", "running"]
    seconds: _Seconds
    place: _Text = ""
    waits: bool = False


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's state, about 1 KB.

    Attributes:
        schema_version: version of this layout.
        run: id of the run, the same on all ranks.
        rank: the global rank.
        world_size: number of training processes.
        host: name of the machine.
        pid: process id.
        number: number of this message, counted from 0 when the process began the fit.
        restarts: how often the launcher had started the run anew by then.
        at: when it was written, Unix time in seconds by the machine's clock.
        step: number of steps that ended.
        part: the part of the ledger that is open, such as `steps`, `validation`, `checkpoint/write`.
        no_step_s: for how long no step has ended; 0 below 30 s.
        place: the innermost line of the user's code then; "" if unknown.
        ended: whether and how the fit ended.
        work: the rank's work over its latest steps; None before enough of them.
        cpu_pct: use of the cores by the process since the previous message, in percent of one core; None if unknown.
        memory_gib: resident memory of the process; None if unknown.
        sensors: the latest readings of its GPU, by name, such as `sm_mhz`; {} without one.
        stall: where it is stalled; None while it moves.
        silent: ranks of the same machine that publish nothing any more.
        answer: what it says of the latest plan of a window.
    """

    schema_version: Literal[1] = 1
    run: Annotated[str, Meta(max_length=100)]
    rank: _Whole
    world_size: Annotated[int, Meta(ge=1, le=10**9)]
    host: _Text
    pid: _Whole
    number: _Whole
    restarts: _Whole = 0
    at: _Seconds
    step: _Whole = 0
    part: _Text = ""
    no_step_s: _Seconds = 0.0
    place: _Text = ""
    ended: Ended = ""
    work: RankWork | None = None
    cpu_pct: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    memory_gib: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    sensors: Mapping[str, float] = {}
    stall: Stall | None = None
    silent: tuple[SilentRank, ...] = ()
    answer: WindowAnswer = WindowAnswer()


class LastPulse(msgspec.Struct, frozen=True, kw_only=True):
    """The latest pulse of a rank, and when it came.

    Attributes:
        pulse: the pulse.
        at: when it first was there, Unix time in seconds by the reader's clock.
        restarts: how often the rank began anew while rank 0 listened.
    """

    pulse: Pulse
    at: _Seconds
    restarts: _Whole = 0


RankState = Literal[
    "live", "late", "stalled", "waits", "gone", "stopped", "silent", "finished", "failed", "interrupted", "missing"
]


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rank as it is now.

    Attributes:
        rank: the global rank.
        host: name of its machine; "" if it was never heard.
        pid: its process id; 0 if it was never heard.
        state: `live`; `late` if its latest pulse is old, and `silent` if it is very old; `stalled` or `waits` for
            another rank; `gone` if its process has ended, `stopped` if it was stopped; how its fit ended; `missing` if
            it was never heard.
        age_s: age of its latest pulse, in seconds, when rank 0 last listened.
        step: number of steps that ended.
        own_ms: its own work per step; None if unknown.
        waits_ms: per step, for other ranks and for what they exchange; None if unknown.
        cause: the part of its step that is longer than the others'; "" for none.
        restarts: how often it began anew, alone or with the whole run.
        sensors: the latest readings of its GPU.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: RankState = "missing"
    age_s: float = 0.0
    step: int = 0
    own_ms: float | None = None
    waits_ms: float | None = None
    cause: str = ""
    restarts: int = 0
    sensors: Mapping[str, float] = {}


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the others wait for.

    Attributes:
        rank: the global rank.
        cause: the part of its step that is longer than the others'.
        ms: how long the others wait for it, per step.
    """

    rank: int
    cause: str
    ms: float


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks have come to a standstill.

    Attributes:
        rank: the rank that the others wait for; None if it is not one.
        where: what is known, in a sentence.
        seconds: for how long.
    """

    rank: int | None
    where: str
    seconds: float


class RanksStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks as they are now.

    Attributes:
        ranks: by rank, also those that were never heard.
        straggler: the rank that the others wait for; None if there is none.
        unmeasured: why it is not known which rank is late, although the ranks differ; "" if it is.
        hang: where they stand; None while they move.
        where: where the ranks are that have ended no step for long, whether they move or not; "" for none.
        spread_ms: largest own work per step less the smallest; None if unknown.
        exposed_comm_ms: mean over the ranks of communication and waiting that nothing hides, per step; None if unknown.
    """

    ranks: tuple[RankStatus, ...] = ()
    straggler: LateRank | None = None
    unmeasured: str = ""
    hang: Hang | None = None
    where: str = ""
    spread_ms: float | None = None
    exposed_comm_ms: float | None = None


class RunStatus(msgspec.Struct, frozen=True):
    """Status of a run or of one rank.

    Attributes:
        outcome: `running`; `finished`, `failed` or, by Ctrl-C, `interrupted`; `silent` without a new line for long.
        step: number of steps up to the last line.
        began: start of the fit, Unix time in seconds.
        at: time of the last line, Unix time in seconds.
        text: the status in words.
    """

    outcome: Literal["running", "finished", "failed", "interrupted", "silent"]
    step: int
    began: float
    at: float
    text: str

    @property
    def ended(self) -> bool:
        """Whether the last line is its end."""
        return self.outcome in {"finished", "failed", "interrupted"}


class RunProgress(msgspec.Struct, frozen=True):
    """How far a run is.

    Attributes:
        step: number of steps so far.
        steps: number of steps of the whole fit; None if unlimited or unknown.
        epoch: number of the current epoch, counted from 1; None if unknown.
        epochs: number of the last epoch; None if unlimited.
        left_s: estimate of the time left; None if unknown.
    """

    step: int
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    left_s: float | None = None


class RunEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of the GPUs of a run. A GPU that several ranks share counts once.

    Attributes:
        joules: energy during the fits, warm-up and validation included.
        joules_per_sample: energy of all GPUs per sample of the counted steps; None if a GPU's is unknown.
        samples: number of these samples, on all ranks.
        gpus: number of GPUs.
        ranks: number of ranks whose GPU's energy is known.
        world_size: number of ranks.
        fits: number of fits: this one, and those before it that it continues.
        missing: record of a fit before it that cannot be read; "" if there is none.
    """

    joules: float
    joules_per_sample: float | None
    samples: float
    gpus: int
    ranks: int
    world_size: int
    fits: int = 1
    missing: str = ""


class RecordSummary(RunStatus, frozen=True, kw_only=True):
    """Content of `show --json`: the status, and what is known of the run.

    Attributes:
        run: id of the run, the same on all ranks.
        record: folder of the record.
        metrics: over all counted steps up to the latest totals; {} before the first.
        analysis: as in `summary.json`; None before the first totals.
        ranks: all ranks.
        progress: how far it is.
        energy: of the GPUs of all ranks and of the fits that it continues; None if unknown.
        problems: what could not be read.
    """

    run: str
    record: str
    metrics: Mapping[str, float]
    analysis: Analysis | None
    ranks: RanksStatus
    progress: RunProgress
    energy: RunEnergy | None
    problems: tuple[str, ...]


UNKNOWN_RANK: Final = -1


class CollectiveCall(msgspec.Struct, frozen=True, gc=False):
    """A collective as its communication kernel describes it.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: name of the process group.
        elements: number of elements in one rank's input.
        dtype: its data type, as PyTorch spells it.
    """

    name: str
    group: str
    elements: int
    dtype: str


class RankCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one rank's counted steps as columns, in the order they were launched.

    Attributes:
        steps: number of counted steps.
        calls: the different collectives.
        call: position of each one's description in `calls`.
        sequence: its number in its process group.
        start_ns: begin of its kernel on the rank's clock, nanoseconds from `RankResult.base_ns`.
        end_ns: end of its kernel.
        step: position of its step, if only a stream stands for its process group; else -1.
    """

    steps: int
    calls: tuple[CollectiveCall, ...]
    call: tuple[int, ...]
    sequence: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    step: tuple[int, ...]


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that was analysed, so that it can be recognized.

    Attributes:
        name: name of the file.
        bytes: its size.
        blake2b: digest of its content.
    """

    name: str
    bytes: int
    blake2b: str


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The analysis of one rank's traces, without the other ranks.

    Attributes:
        schema_version: version of this layout.
        package: version of this package, whose figures these are.
        rank: the global rank; -1 if the trace has none.
        world_size: number of ranks of the run; None if unknown.
        base_ns: Unix time in nanoseconds that the times of `collectives` count from; None if unknown.
        traces: the files.
        cut_off: where the files are cut off; "" for complete ones.
        summary: the figures.
        collectives: the collectives, to be matched with those of other ranks.
        timeline: the timeline of the reports.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    package: str
    rank: int
    world_size: int | None
    base_ns: int | None
    traces: tuple[TraceFile, ...]
    cut_off: str
    summary: RankSummary
    collectives: RankCollectives
    timeline: Timeline


# -- comparisons of two sides of runs, traces or benchmark results -----------------------------------------------------

Outcome: TypeAlias = Literal["faster", "same", "slower", "too noisy", "too short"]


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that runs must share for their step times to be comparable."""

    device: str
    world_size: int
    precision: str = ""
    batch_size: int | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ratio of the second side to the first.

    Attributes:
        low: lower end of the 95 % interval; None if unknown.
        high: upper end of it.
        log_error: standard error of the logarithm.
        scatter: standard deviation of the logarithm between equal runs, measured or assumed.
        paired: whether it is from the differences between runs made in turns.
    """

    ratio: float
    low: float | None = None
    high: float | None = None
    log_error: float | None = None
    scatter: float | None = None
    paired: bool = False


class ComparedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric on both sides: a row of the comparison.

    Attributes:
        a: geometric mean over the runs before; None if no run has it.
        b: the same of the runs now.
        pct: change in percent; None unless all runs have the metric, as `ratio` and `outcome`.
        outcome: what the interval says of the limit.
        differs: whether the sides differ beyond chance; of several regions together.
        share_pct: of the step, or of the wall time; 100 if it is no part.
        more_is_better: whether it is a rate.
    """

    name: str
    unit: str
    a: float | None
    b: float | None
    pct: float | None = None
    ratio: Ratio | None = None
    outcome: Outcome | None = None
    differs: bool = False
    share_pct: float = 100.0
    more_is_better: bool = False


class ComparedAmount(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown without a test: a part of the ledger, a finding, a kernel. Means over the runs.

    Attributes:
        pct: change in percent; None where there was none before.
        per: what `a` and `b` are of: the `step`, the `run`, or `1,000 steps`.
        a_calls: number of calls before.
        b_calls: number of calls now.
    """

    name: str
    a: float
    b: float
    pct: float | None
    per: str
    a_calls: float = 0.0
    b_calls: float = 0.0


class FixedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that costs at most half as much now, and what its fix was predicted to save. Means over the runs.

    Attributes:
        part: the region that it is of, or its own code.
        before_ms: its cost before, of each step.
        now_ms: its cost now.
        predicted_ms: the predicted saving.
        at_most: whether the prediction is of all of the cause going.
        step_ms: how much shorter the step is, by all that changed.
    """

    code: str
    part: str
    before_ms: float
    now_ms: float
    predicted_ms: float
    at_most: bool
    step_ms: float


class ComparedSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: a run, or several repeats.

    Attributes:
        steps: number of counted steps of each run.
        verdict: the most frequent one; "" without any.
        verdicts: number of runs by verdict.
        wall_s: mean wall time with the start-up; 0 if unknown.
    """

    sources: tuple[str, ...]
    steps: tuple[int, ...]
    conditions: Conditions
    commits: tuple[str, ...]
    verdict: str
    verdicts: Mapping[str, int]
    wall_s: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from `a` to `b`.

    Attributes:
        headline: what changed most, in a sentence.
        rows: names of the metrics that are shown; all of them with `--verbose`.
        metrics: all metrics, by name.
        ledger: seconds; the largest change first, as in all that follow.
        findings: percent; of those whose cost changed with the step, a region or the run.
        idle: milliseconds per step by cause, as in all that follow.
        verdict: what became of the verdict.
        differs: conditions in which the runs differ, one sentence each.
        doubts: what makes the runs hard to compare: unfinished, on a busy machine, on different hosts.
        notes: settings that differ, and the like.
        assumed_scatter_pct: scatter between equal runs; None with repeats, which measure it.
        followed: whether the runs were made one after the other; None if the scatter was given.
    """

    kind: str
    a: ComparedSide
    b: ComparedSide
    headline: str
    rows: tuple[str, ...]
    metrics: Mapping[str, ComparedMetric]
    ledger: tuple[ComparedAmount, ...] = ()
    findings: tuple[ComparedAmount, ...] = ()
    fixed: tuple[FixedFinding, ...] = ()
    gpu: tuple[ComparedAmount, ...] = ()
    idle: tuple[ComparedAmount, ...] = ()
    kinds: tuple[ComparedAmount, ...] = ()
    kernels: tuple[ComparedAmount, ...] = ()
    verdict: str = ""
    differs: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed_scatter_pct: float | None = None
    followed: bool | None = False


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison says of one metric and a limit.

    Attributes:
        missing: what would decide it; "" if it is decided.
        needed_runs: number of runs a side that would; None if unknown, or over 100.
    """

    metric: str
    limit_pct: float | None
    outcome: Outcome
    text: str
    missing: str = ""
    needed_runs: int | None = None


# -- `forge-profiling try` -------------------------------------------------------------------------------------------


class TrialLoader(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader of a trial.

    Attributes:
        place: file and line of the script that build it; "" if unknown.
        validates: whether the fit validates on it.
        fixed: why its number of workers must stay; "" where it may change.
        draws: whether a sample of its dataset draws random numbers, or it is unknown.
        changed: whether this trial has changed its number of workers.
    """

    place: str
    validates: bool = False
    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None
    fixed: str = ""
    draws: bool = True
    changed: bool = False


class TrialFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial's process found and did, which decides what can be changed.

    Attributes:
        trainer: file and line of the script that build the Trainer; "" if unknown.
        fit: those that call `fit`.
        built: those of the module's `__init__`.
        optimized: those of its `configure_optimizers`.
        settings: arguments of the Trainer and settings of PyTorch, as they took effect.
        model: class of the module.
        device: type of the device, such as `cuda`.
        bf16: whether the device multiplies bfloat16 matrices in hardware.
        cores: cores that this rank's process may use.
        threads: threads of PyTorch on the CPU.
        loaders: those that the fit trains from and validates on.
        has: what the module has: `conv2d`, `compiled`, `eager_attention`, `checkpointing`, `unused_parameters`,
            `dropout`, `cudnn_deterministic`.
        embedding: name of the largest dense embedding that can have sparse gradients; "" for none.
        child: name of the module's direct child that has nearly all parameters; "" for none.
        optimizers: class of each optimizer, followed by `fused` or `foreach` if it is.
        losses: losses of the first steps, exactly as they were.
        steps: training steps that were made.
        validation_first_s: seconds of a validation up to the end of its first batch; 0 without one.
        validation_batch_s: seconds of each further batch.
        validation_batches: batches of a whole validation.
        validation_every: training batches between two of them; 0 if unknown.
        problems: changes that could not be applied, and why.
    """

    trainer: str = ""
    fit: str = ""
    built: str = ""
    optimized: str = ""
    settings: Mapping[str, str | int | float | bool | None] = {}
    model: str = ""
    device: str = "cpu"
    bf16: bool = False
    cores: int = 1
    threads: int = 1
    loaders: tuple[TrialLoader, ...] = ()
    has: tuple[str, ...] = ()
    embedding: str = ""
    child: str = ""
    optimizers: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    steps: int = 0
    validation_first_s: float = 0.0
    validation_batch_s: float = 0.0
    validation_batches: int = 0
    validation_every: int = 0
    problems: tuple[str, ...] = ()


class TriedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was tried, and what came of it.

    Attributes:
        name: a stable identifier.
        code: the code to write.
        places: files and lines to write it in.
        cause: the finding that it was tried for; "" for none.
        state: what came of it; `dropped` was kept at first.
        text: the comparison, or why it failed.
        losses: how the first losses compare with those of what it was compared with.
        before_ms: the step of what it was compared with, in milliseconds; None if unknown.
        after_ms: the step with it.
        ratio: the second over the first.
        predicted: what its finding said the fix would save of each step; None if nothing was said.
        on_top_of: names of the changes that were kept before.
        runs: number of pairs of runs, in turns.
    """

    name: str
    code: str
    places: tuple[str, ...] = ()
    cause: str = ""
    state: Literal["kept", "left out", "dropped", "failed", "not applied"]
    text: str
    losses: str = ""
    before_ms: float | None = None
    after_ms: float | None = None
    ratio: Ratio | None = None
    predicted: Saving | None = None
    on_top_of: tuple[str, ...] = ()
    runs: int = 0


class TryResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one `forge-profiling try`, as `try.json` has it.

    Attributes:
        schema_version: version of this layout.
        script: the script or module, without its arguments.
        arguments: a digest of its arguments.
        model: class of the module.
        host: name of the machine.
        device: type of the device that it trains on.
        at: Unix time of the start.
        verdict: code of the verdict on the baseline.
        baseline: the step without changes, in words.
        tried: the changes, in the order in which they were tried.
        not_tried: why others were not, by code.
        by_hand: findings whose change cannot be made from outside, with what to do.
        before_ms: step of the baseline in milliseconds; None if nothing was kept.
        after_ms: step with all that was kept.
        ratio: the second over the first.
        seconds: what it took.
        starts: how many times the script was started.
        ended: why it ended before all was tried; "" if it did not.
    """

    schema_version: Literal[1] = 1
    script: str
    arguments: str = ""
    model: str = ""
    host: str = ""
    device: str = ""
    at: _Seconds = 0.0
    verdict: str = ""
    baseline: str = ""
    tried: tuple[TriedChange, ...] = ()
    not_tried: Mapping[str, str] = {}
    by_hand: Mapping[str, str] = {}
    before_ms: float | None = None
    after_ms: float | None = None
    ratio: Ratio | None = None
    seconds: float = 0.0
    starts: int = 0
    ended: str = ""

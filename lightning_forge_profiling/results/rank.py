"""The figures of one rank: busy and idle time, kernels, regions, communication, memory.

Names end in the unit. Percentages are of the step unless the name says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lightning_forge_profiling.results.run import CpuTime, LoaderSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCause:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Launches, synchronizations and allocations, and the idle time of the GPU that they cause.

    Attributes:
        device_syncs_per_step: calls that wait for the GPU, without those of Lightning's loop.
        lightning_syncs_per_step: calls that wait for the GPU in Lightning's loop.
        idle_after_sync_ms_per_step: GPU idle time caused by syncs: whole gaps that begin during a sync, and of other
            gaps the time in syncs. Lightning's are left out.
        idle_after_allocator_ms_per_step: likewise for cudaMalloc, cudaFree and the like.
        idle_launching_ms_per_step: the rest of the GPU idle time caused by Python and launches.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentIn:
    """Time of one kind, and the innermost function of the user that holds at least half of it.

    Attributes:
        where: the function, its file and first line.
        ms_per_step: the part in it and in what it calls.
        of_ms_per_step: all time of the kind.
    """

    where: str
    ms_per_step: float
    of_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFunctions:
    """Python functions on the thread that marks the steps.

    Recording a stack adds time to each call, so functions that make many calls are overstated.

    Attributes:
        tree: calls by stack, callers first, from the innermost function that contains whole steps; at most 200, the
            longest.
        users: functions of the user, by their own time; at most ten.
        spent: by kind of time the function that holds it: `data` (in the data loader), `python` (without a GPU, outside
            operators, data loader and optimizer), `forward` and `backward` (the part of `python` in them), `launching`
            (the GPU waits for Python and launches). Kinds without such a function are left out.
    """

    tree: tuple[PythonCall, ...]
    users: tuple[UserFunction, ...] = ()
    spent: Mapping[str, SpentIn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A time per step and its share of the step."""

    ms_per_step: float
    pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distribution of a time over the steps, in milliseconds.

    Attributes:
        mean: arithmetic mean.
        p50: median.
        min: the shortest.
        max: the longest.
        p95: 95th percentile; None for fewer than 20 steps.
    """

    mean: float
    p50: float
    min: float
    max: float
    p95: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
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
    """

    number: int
    ms: float
    host_ms: float
    busy_ms: float
    categories_ms: Mapping[str, float]
    whole: bool
    counted: bool = True
    light: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Busy and idle time of the GPU."""

    busy_ms_per_step: float
    busy_pct: float
    idle_ms_per_step: float
    idle_pct: float
    kernels_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Device memory of PyTorch's caching allocator, as recorded by `profile_memory`."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocations_per_step: float
    frees_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePart:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
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
            `gpu` if the next kernel was already launched.
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
    replay: Replay | None = None

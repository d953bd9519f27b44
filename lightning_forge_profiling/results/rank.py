"""The figures of one rank: busy and idle time, kernels, regions, communication, memory.

Names end in the unit. Percentages are of the step unless the name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.results.cpu import CpuTime
from lightning_forge_profiling.results.flops import Flops
from lightning_forge_profiling.results.host import Host
from lightning_forge_profiling.results.loader_settings import LoaderSettings
from lightning_forge_profiling.results.python_functions import PythonFunctions
from lightning_forge_profiling.results.table_rows import Kernel, Operator

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
    """

    number: int
    ms: float
    host_ms: float
    busy_ms: float
    categories_ms: Mapping[str, float]
    whole: bool
    counted: bool = True


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
        hidden_pct: share of `ms_per_step` in which another kernel runs too; 0 without communication.
        exposed_pct: exposed communication in percent of the step.
    """

    ms_per_step: float
    exposed_ms_per_step: float
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

"""What an analysis finds on one rank, as plain data.

Times are milliseconds or microseconds as the name says, percentages are of the step unless the name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.results.cpu import CpuTime
from lightning_forge_profiling.results.flops import Flops
from lightning_forge_profiling.results.host import Host
from lightning_forge_profiling.results.loader_settings import LoaderSettings
from lightning_forge_profiling.results.table_rows import Kernel, Operator

__all__ = [
    "CATEGORIES",
    "IDLE_CAUSES",
    "Communication",
    "Copies",
    "Distribution",
    "Gpu",
    "IdlePart",
    "Kind",
    "Memory",
    "RankSummary",
    "Region",
    "Share",
    "Step",
]

CATEGORIES: Final = ("matmul", "comm", "memory", "other")
"""The four coarse parts of a GPU's busy time. Convolution and attention are `other`, as `kinds` shows them."""

IDLE_CAUSES: Final = ("data", "launch", "allocator", "sync", "copy", "python", "gpu")
"""What kept the GPU waiting, see `RankSummary.idle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A time per step and its share of the step."""

    ms_per_step: float
    pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kernels of one kind: `matmul`, `attention`, `elementwise`, ...

    Attributes:
        category: which of `CATEGORIES` it belongs to.
        ms_per_step: its part of the busy time; the parts of all kinds sum to it.
        pct: share of the step.
        calls_per_step: launches, copies or sets.
    """

    category: str
    ms_per_step: float
    pct: float
    calls_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How a time is spread over the steps, in milliseconds."""

    mean: float
    p50: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One recorded step.

    Attributes:
        number: the N of its `ProfilerStep#N`, or its position where the trace has no steps.
        ms: length of its window on the GPU, without validation and checkpoints.
        host_ms: length of its span on the host, likewise without them.
        busy_ms: how much of the window the GPU was busy.
        categories_ms: the busy time by category; it sums to `busy_ms`.
        whole: False for a step that the recording or the file cuts off.
        counted: whether the rank's figures and findings are over this step too.
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
    """How busy the GPU was."""

    busy_ms_per_step: float
    busy_pct: float
    idle_ms_per_step: float
    idle_pct: float
    kernels_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication kernels.

    Attributes:
        ms_per_step: their union.
        exposed_ms_per_step: the part of it in which no other kernel ran.
        hidden_pct: share of `ms_per_step` in which another kernel ran too; 0 without communication.
        exposed_pct: the exposed part's share of the step.
    """

    ms_per_step: float
    exposed_ms_per_step: float
    hidden_pct: float
    exposed_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of one direction.

    Attributes:
        direction: `HtoD`, `DtoH`, `DtoD`, `PtoP`, ...
        memory: of the host's side, `pageable` or `pinned`; "" where there is none or the trace does not say.
        calls_per_step: how many.
        ms_per_step: the sum of their durations.
        bytes_per_step: how much.
        gb_per_s: bytes over time; 0 where a trace gives no bytes.
        exposed_ms_per_step: how long the GPU did nothing but such copies.
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
    """PyTorch's allocator on the device, where `profile_memory` recorded it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocations_per_step: float
    frees_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A named stretch of the host's program and the GPU work launched in it.

    Attributes:
        name: `forward`, `backward`, `optimizer`, ..., or the user's.
        user: whether it is the user's own. Those lie over the others and may overlap each other.
        calls_per_step: how often it was entered; 0 where it is inferred from operators, in a trace without our marks.
        host_ms_per_step: time on the host.
        gpu_ms_per_step: busy time of what it launched.
        idle_ms_per_step: idle time of the GPU before work that it launched, as far as the host is its cause.
        pct: the busy time's share of the step.
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
        launched: whether the next GPU work had been launched by then, so that it was not the host that delayed it.
        activity: the runtime call, or else the operator or the annotated range, that the host was in; "" in Python
            outside of all of them.
        operator: the operator around a call, "" without.
        thread: the id of the thread that launched the next work; "" where it is not known.
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
    """One rank's window.

    Attributes:
        rank: its number; the position of the file where the trace does not say.
        file: the name of its file.
        device: the GPU's name, "" where the trace has none.
        steps: how many of the recorded steps the figures are over, `per_step` says which.
        step_ms: their windows.
        gpu: busy and idle.
        categories: the busy time by `CATEGORIES`; they sum to it.
        kinds: the same, finer. Where kernels overlap an instant counts to one: matmul, the other computation, copies,
            communication, in this order; so hidden communication counts to what hides it.
        idle: the idle time by what the host did (`IDLE_CAUSES`): in the data loader, in a launch of 0.1 ms or more, in
            cudaMalloc or cudaFree, waiting for the GPU, copying, in Python; `gpu`: the next kernel was launched.
        idle_parts: the same by the call, operator or range that the host was in, the longest first.
        comm: communication.
        copies: by direction and memory.
        host: launches, syncs, allocations.
        cpu: what the step is made of on the CPU; None where a GPU was used, or no operators were recorded.
        memory: PyTorch's allocator, None where it was not recorded.
        regions: GPU work by region.
        operators: the costliest operators, by the order that was asked for.
        top_kernels: the costliest kernels.
        flops: None where there is nothing to count; `flops_note` says why.
        flops_note: why there are no FLOPs, "" where there are.
        per_step: all recorded steps one by one.
        unlinked_pct: share of the GPU time whose launch is not in the trace.
        warnings: what could not be read or was left out.
        loader: the settings of the loader; None where the trace does not say.
        cut_off: whether its file ends too early, and its figures are of steps that may lack something.
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
    cut_off: bool = False

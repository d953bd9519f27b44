"""Host activity that delays the GPU, per step."""

from dataclasses import dataclass


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

"""Host activity that delays the GPU, per step."""

from dataclasses import dataclass

__all__ = ["Host", "SyncCause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCause:
    """Calls in which the host waited for the GPU, by what made them.

    Attributes:
        cause: `.item()`, `blocking copy to the host`, `torch.cuda.synchronize()`, ...
        where: the innermost function outside of torch and Lightning, with its file and first line; "" without stacks.
        lightning: whether Lightning's own loop makes the call, which the user cannot remove.
        per_step: how often.
        host_ms_per_step: how long the host waited in them.
    """

    cause: str
    where: str
    lightning: bool
    per_step: float
    host_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host activity that delays the GPU.

    Attributes:
        device_syncs_per_step: calls that wait for the GPU, without Lightning's own.
        lightning_syncs_per_step: those of Lightning's own loop.
        idle_after_sync_ms_per_step: idle time of the GPU in gaps that waited for the host and began while it was in an
            operator with such a call, or as far as it was in one; without Lightning's own.
        idle_after_allocator_ms_per_step: likewise for cudaMalloc, cudaFree and the like.
        idle_launching_ms_per_step: what remains of the idle time for which Python and launches are the cause.
        launches_per_step: kernel and graph launches.
        graph_launches_per_step: launches of CUDA graphs alone.
        cuda_mallocs_per_step: device allocations that reached the driver.
        cuda_frees_per_step: likewise frees.
        h2d_bytes_per_step: bytes copied to the device.
        data_wait_ms_per_step: how long the host was in the data loader, whether or not the GPU was busy meanwhile.
        data_loader: PyTorch's iterator, `_SingleProcessDataLoaderIter` where num_workers is 0; "" for other loaders.
        syncs: the sync calls by cause, most frequent first.
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

"""Fields of a trace that are safe to share, as lists; any other field is left out.

An allowlist, because programs that profile add command lines, environments and names of hosts.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_forge_profiling.names import METADATA_KEY

Fields = Mapping[str, "Fields | None"]
"""The fields of an object to keep, each with the fields of the objects in it; None if it holds no objects."""

_DEVICE: Final = (
    "id", "name", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor",
    "regsPerBlock", "regsPerMultiprocessor", "warpSize", "sharedMemPerBlock", "sharedMemPerMultiprocessor",
    "sharedMemPerBlockOptin", "maxSharedMemoryPerMultiProcessor", "numSms",
)  # fmt: skip
_DISTRIBUTED: Final = ("backend", "rank", "world_size", "pg_count", "nccl_version")
_GROUP: Final = ("pg_name", "pg_desc", "backend_config", "pg_size", "ranks")
_ABOUT: Final = (
    "rank", "world_size", "intra_op_threads", "usable_cores", "start_step", "end_step", "recorded_steps",
    "libraries",
)  # fmt: skip
_LOADER: Final = (
    "kind", "loaders", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "batch_size", "sampler",
    "iterable", "cores", "ranks_on_host", "accumulate_grad_batches", "batches",
)  # fmt: skip
_SETTINGS: Final = (
    "schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "record_shapes", "profile_memory", "with_stack",
    "with_modules", "with_flops", "cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version",
    "hip_driver_version", "roctracer_version",
)  # fmt: skip

HEADER: Final[Fields] = {
    **dict.fromkeys(_SETTINGS),
    "deviceProperties": dict.fromkeys(_DEVICE),
    "distributedInfo": {**dict.fromkeys(_DISTRIBUTED), "pg_config": dict.fromkeys(_GROUP)},
    METADATA_KEY: {**dict.fromkeys(_ABOUT), "loader": dict.fromkeys(_LOADER)},
}
"""Fields of the trace itself."""

ARGUMENTS: Final[Fields] = dict.fromkeys((
    "External id", "external id", "correlation", "device", "stream", "context", "queued", "bytes", "cbid", "kind",
    "memory bandwidth (GB/s)", "registers per thread", "shared memory", "blocks per SM", "warps per SM", "grid",
    "block", "est. achieved occupancy %", "graph id", "graph node id", "Record function id", "Sequence number",
    "Fwd thread id", "Ev Idx", "Concrete Inputs", "Input type", "Input Strides", "Input Dims", "Input dims",
    "Output dims", "Collective name", "dtype", "In msg nelems", "Out msg nelems", "In split size", "Out split size",
    "Group size", "Process Group Name", "Process Group Description", "Process Group Ranks", "Rank", "Src Rank",
    "Dst Rank", "Seq", "Total Reserved", "Total Allocated", "Bytes", "Addr", "Device Id", "Device Type", "Device",
    "finished", "scope", "Op count", "Trace iteration", "Python id", "Python parent id", "Python module id",
    "kernel_backend", "kernel_name", "kernel_kwargs", "kernel_hash", "num_warps", "num_stages", "wait_on_stream",
    "wait_on_cuda_event_record_corr_id",
))  # fmt: skip
"""Fields of an event's `args`."""


def shareable(value: Any, fields: Fields | None, clean: Callable[[str], str]) -> Any:
    """The shareable part of a JSON value.

    Example:
        >>> shareable({"rank": 0, "host": "node17"}, {"rank": None}, str.upper)
        {'rank': 0}
        >>> shareable(["a", 1, {"host": "node17"}], None, str.upper)
        ['A', 1, None]
    """
    match value:
        case str():
            return clean(value) if fields is None else None
        case list():
            return [shareable(element, fields, clean) for element in value]
        case dict():
            known = {key: shareable(value[key], fields[key], clean) for key in value if key in fields} if fields else {}
            return {key: kept for key, kept in known.items() if kept is not None} or None
    return value

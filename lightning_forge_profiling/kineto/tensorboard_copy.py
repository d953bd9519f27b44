"""A copy of a trace that TensorBoard's profiler plugin reads correctly.

torch-tb-profiler 0.4.3, the last release, does not know the categories of current PyTorch. The copy uses the old ones
and leaves out events that the plugin would miscount; docs/tensorboard.md lists the changes and their effects.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import COMPRESS_LEVEL, unpacked
from lightning_forge_profiling.names import FETCH_MARK
from lightning_forge_profiling.safe_files import whole_file

_RENAMED = {
    "cuda_runtime": msgspec.Raw(b'"Runtime"'),
    "cuda_driver": msgspec.Raw(b'"Runtime"'),
    "user_annotation": msgspec.Raw(b'"cpu_op"'),
    # Not fwdbwd: with `forward_backward` events beside recorded modules, the plugin loses operators or fails to load.
}
_DROPPED = "gpu_user_annotation"  # a ProfilerStep# among them would count as another step

# The plugin recognizes data loading only by the name of torch's DataLoader. The fetch that the callbacks mark covers
# every other loader too. It may contain torch's range: the plugin counts overlapping ranges once.
_FETCH_IN_PLUGIN = msgspec.Raw(f'"enumerate(DataLoader)#{FETCH_MARK}.__next__"'.encode())


class _Event(msgspec.Struct):
    """The fields that decide how an event is copied."""

    cat: str | None = None
    name: str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode  # values stay as they were written
_decode_events = msgspec.json.Decoder(list[msgspec.Raw]).decode


def write_plugin_copy(source: Path, target: Path) -> None:
    """Write the copy of a trace for TensorBoard's profiler plugin.

    `target` appears complete or not at all, because the plugin reads the files of a run only once. The plugin lists it
    as a worker of the run if its name ends in `.pt.trace.json.gz`.
    """
    problems: list[str] = []
    trace = b"".join(unpacked(source, problems))
    if problems:
        raise TraceError(f"{source}: not a trace: {problems[0]}")
    try:
        with whole_file(target) as file, gzip.open(file, "wb", compresslevel=COMPRESS_LEVEL) as copy:
            copy.writelines(plugin_trace(trace))
    except TraceError as exc:
        raise TraceError(f"{source}: {exc}") from exc


def plugin_trace(trace: bytes) -> Iterator[bytes]:
    """Rewrite a trace for TensorBoard's profiler plugin."""
    try:
        fields = _decode_fields(trace)
        if "traceEvents" not in fields:
            raise TraceError("not a trace: it has no traceEvents")
        events = _decode_events(fields["traceEvents"])
        for position, (key, value) in enumerate(fields.items()):
            yield b"," if position else b"{"
            yield msgspec.json.encode(key) + b":"
            if key == "traceEvents":
                yield from _event_list(events)
            else:
                yield bytes(value)
        yield b"}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise TraceError(f"not a trace: {exc}") from exc


def _event_list(events: list[msgspec.Raw]) -> Iterator[bytes]:
    separator = b"[\n"
    for text in events:
        event = _decode_event(text)
        if event.cat == _DROPPED:
            continue
        yield separator
        yield _rewritten(text, event) if event.cat in _RENAMED else bytes(text)
        separator = b",\n"
    yield b"\n]" if separator == b",\n" else b"[]"


def _rewritten(text: msgspec.Raw, event: _Event) -> bytes:
    fields = _decode_fields(text)
    fields["cat"] = _RENAMED[event.cat or ""]
    if event.name == FETCH_MARK:
        fields["name"] = _FETCH_IN_PLUGIN
    return msgspec.json.encode(fields)

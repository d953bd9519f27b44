"""Copies of a trace: one to share, without users, hosts, paths and process ids, and one for TensorBoard's plugin."""

import contextlib
import getpass
import gzip
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import COMPRESS_LEVEL, EXPORT_IT, TraceText
from lightning_forge_profiling.names import FETCH_MARK, METADATA_KEY, MODULE_MARK
from lightning_forge_profiling.safe_files import whole_file

_REMOVED: Final = "…"

_FRAME: Final = re.compile(r"(?P<file>.+?\.pyx?)(?P<line>\(\d+\): .*)", re.DOTALL)  # as the profiler names functions
_INSTALLED: Final = re.compile(r".*(?:(?:site|dist)-packages|lib/python3[\w.]*)/", re.DOTALL)
_OUTSIDE: Final = re.compile(r"/|~|[A-Za-z]:|(?:home|Users)/")
_FILE_NAME: Final = re.compile(r"[\w+-][\w.+-]*\.\w{1,10}")

# A path continues after a space if a separator follows before the next space: /home/a b/c.py.
_PATH: Final = r"""[^\s"'`,;:<>|(){}\[\]]*(?:\ [^\s/\\]*[/\\][^\s"'`,;:<>|(){}\[\]]*)*"""
_ROOT: Final = r"(?:(?<![\w./\\])~?/(?![\s/])|(?<!\w)[A-Za-z]:[/\\]|\\\\)"
_PATHS: Final = re.compile(rf"(?:(?<='){_ROOT}[^']*(?=')|(?<=\"){_ROOT}[^\"]*(?=\")|{_ROOT}{_PATH})", re.VERBOSE)
_ADDRESSES: Final = re.compile(
    r"(?<![\w.+-])[\w.+-]*(?:://\S+|@[\w.-]+)"  # an address, or a user on a host
    r"|(?:\b(?:GPU|MIG)-)?\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b"  # on the PCI bus
    r"|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"
    r"|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])",
    re.IGNORECASE,
)

_HOME: Final = re.compile(r"(?:[/\\](?:home|Users)[/\\]+|torchinductor_)([\w.-]+)")
_SHORTEST: Final = 3
# Shared accounts, and words that a trace is unreadable without.
_NOT_IDENTITIES: Final = frozenset({
    "root", "user", "users", "admin", "home", "shared", "public", "ubuntu", "runner", "jovyan", "localhost", "python",
    "torch", "cuda", "gpu", "nccl", "aten", "data", "transfer", "forward", "backward", "optimizer", "other", "train",
    "training", "step", "model", "module", "kernel", "forge",
})  # fmt: skip


def identities_in(text: str) -> set[str]:
    """Users whose home folder or cache a text names."""
    return set(_HOME.findall(text))


def redaction(identities: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that removes users, hosts, paths and addresses from names.

    Of an absolute path the file name stays, of a file in an installed package the path below `site-packages/`. Web,
    mail, network and device addresses, UUIDs and the given identities are removed.
    """
    words = {
        re.escape(word)
        for word in identities
        if len(word) >= _SHORTEST and not word.isdecimal() and word.lower() not in _NOT_IDENTITIES
    }
    # the longest first: node17.cluster before node17
    any_word = "|".join(sorted(words, key=lambda word: (-len(word), word))) or "(?!)"
    identity = re.compile(rf"(?<![^\W_])(?:{any_word})(?![^\W_])", re.IGNORECASE)

    @cache
    def redacted(text: str) -> str:
        if frame := _FRAME.fullmatch(text):
            file = frame["file"].replace("\\", "/")
            if installed := _INSTALLED.match(file):
                file = file[installed.end() :]
            elif _OUTSIDE.match(file):
                file = file.rpartition("/")[2]
            text = file + frame["line"]
        return identity.sub(_REMOVED, _PATHS.sub(_file_name, _ADDRESSES.sub(_REMOVED, text)))

    return redacted


def _file_name(path: re.Match[str]) -> str:
    """The last part of a path if it looks like a file name; a folder's name is removed."""
    name = re.split(r"[/\\]", path[0])[-1]
    return name if _FILE_NAME.fullmatch(name) else _REMOVED


# The fields of an object to keep, each with the fields of the objects in it; None if it holds no objects.
Fields = Mapping[str, "Fields | None"]

_DEVICE: Final = (
    "id", "name", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor",
    "regsPerBlock", "regsPerMultiprocessor", "warpSize", "sharedMemPerBlock", "sharedMemPerMultiprocessor",
    "sharedMemPerBlockOptin", "maxSharedMemoryPerMultiProcessor", "numSms",
)  # fmt: skip
_DISTRIBUTED: Final = ("backend", "rank", "world_size", "pg_count", "nccl_version")
_GROUP: Final = ("pg_name", "pg_desc", "backend_config", "pg_size", "ranks")
_ABOUT: Final = (
    "rank", "world_size", "intra_op_threads", "usable_cores", "start_step", "end_step", "recorded_steps",
    "libraries", "light_steps",
)  # fmt: skip
_LOADER: Final = (
    "kind", "loaders", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "batch_size", "sampler",
    "unsplit", "cores", "ranks_on_host", "accumulate_grad_batches", "batches",
)  # fmt: skip
_SETTINGS: Final = (
    "schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "record_shapes", "profile_memory", "with_stack",
    "with_modules", "with_flops", "cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version",
    "hip_driver_version", "roctracer_version",
)  # fmt: skip

# Fields of the trace itself.
HEADER: Final[Fields] = {
    **dict.fromkeys(_SETTINGS),
    "deviceProperties": dict.fromkeys(_DEVICE),
    "distributedInfo": {**dict.fromkeys(_DISTRIBUTED), "pg_config": dict.fromkeys(_GROUP)},
    METADATA_KEY: {**dict.fromkeys(_ABOUT), "loader": dict.fromkeys(_LOADER)},
}
# Fields of an event's `args`.
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


def shareable(value: Any, fields: Fields | None, clean: Callable[[str], str]) -> Any:
    """The shareable part of a JSON value."""
    match value:
        case str():
            return clean(value) if fields is None else None
        case list():
            return [shareable(element, fields, clean) for element in value]
        case dict():
            known = {key: shareable(value[key], fields[key], clean) for key in value if key in fields} if fields else {}
            return {key: kept for key, kept in known.items() if kept is not None} or None
    return value


_TEXTS: Final = ("ph", "cat", "name", "bp", "s")
_NUMBERS: Final = ("ts", "dur", "id")
_NUMBER: Final = re.compile(rb'"?(?:0x[\da-fA-F]+|-?\d[\d.eE+-]*)"?')
_NUMBERS_ONLY: Final = re.compile(rb"[-+\d.eE\s,\[\]]*")
# Events whose process is a device and whose thread is a stream.
_OF_GPU: Final = frozenset({
    "kernel", "Kernel", "concurrent_kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", "gpu_user_annotation",
    "cuda_sync",
})  # fmt: skip

_FIRST_ID: Final = 1001
_LARGEST_ORDINAL: Final = 99  # up to here it may be a device or a stream; in a container also a process
_LABELS: Final = re.compile(r"CPU|GPU \d+")
_STREAM: Final = re.compile(r"stream [\d ]+")
_THREAD: Final = re.compile(r" \((?:pt_\w+|python[\d.]*)\)")
_WORKER: Final = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json(?:\.gz)?")  # HOST_PID.TIME: tensorboard_trace_handler's
_NAMES_SOMEBODY: Final = re.compile(r"host|node|user|login", re.IGNORECASE)


class _Place(msgspec.Struct):
    """Process and thread of an event, or device and stream."""

    ph: Any = None
    cat: Any = None
    pid: Any = None
    tid: Any = None


_Fields = dict[str, msgspec.Raw]
_decode_place = msgspec.json.Decoder(_Place).decode
_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_texts = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _objects(text: bytes) -> list[msgspec.Raw]:
    """The events of a list; other values are left out, as where a trace is analysed."""
    text.decode()  # broken UTF-8 would stay in `msgspec.Raw`
    return [value for value in _decode_texts(text) if bytes(value).startswith(b"{")]


def write_anonymous_copy(source: Path, target: Path) -> tuple[str, ...]:
    """Write a copy of a trace without names of hosts and users, paths, identifiers of devices, and process ids.

    Times, shapes and the names of operators, kernels, modules, functions and regions are kept; `HEADER` and `ARGUMENTS`
    list all fields that are, and `redaction` what is removed from names. `target` appears complete or not at all.
    """
    plan = _Plan(source)
    # gzip would add the file's name and the time
    with whole_file(target) as file, gzip.GzipFile("", "wb", COMPRESS_LEVEL, file, mtime=0) as packed:
        packed.writelines(_copy(source, plan))
    return plan.problems


class _Plan:
    """What to replace in a trace, from a first pass over all of it."""

    def __init__(self, source: Path) -> None:
        self._identities = _identities_here() | identities_in(str(source.absolute()))
        if worker := _WORKER.fullmatch(source.name):
            self._identities.add(worker[1])
        self.ids: dict[int, int] = {}  # the replacement of each process and thread id of the host
        text = TraceText(source, self._collect_identities)
        for places in text.events():
            for place in places:
                self._number(place)
        self.header = {key: msgspec.json.decode(value) for key, value in text.header.items()}
        for key, value in _texts("", self.header):
            self._identities |= identities_in(value)
            if _NAMES_SOMEBODY.search(key):
                self._identities |= {value, value.partition(".")[0]}
        self.redact = redaction(self._identities)
        self.problems = tuple(text.problems)

    def _collect_identities(self, text: bytes) -> list[_Place]:
        self._identities |= identities_in(text.decode(errors="replace"))
        return [_decode_place(event) for event in _objects(text)]

    def _number(self, place: _Place) -> None:
        if place.ph == "X" and isinstance(place.cat, str) and place.cat not in _OF_GPU:
            for value in (place.pid, place.tid):
                number = _whole(value)
                if number is not None and number > _LARGEST_ORDINAL:
                    self.ids.setdefault(number, _FIRST_ID + len(self.ids))


def _identities_here() -> set[str]:
    """This user and host, which may have recorded the trace."""
    host = socket.gethostname()
    identities = {host, host.partition(".")[0]}
    for name in (getpass.getuser, lambda: Path.home().name):
        with contextlib.suppress(OSError, KeyError, ImportError, RuntimeError):  # no account, as in containers
            identities.add(name())
    return identities


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every string in a value, with the key that it is under."""
    match value:
        case str():
            yield key, value
        case list():
            for element in value:
                yield from _texts(key, element)
        case dict():
            for inner, element in value.items():
                yield from _texts(inner, element)


def _copy(source: Path, plan: _Plan) -> Iterator[bytes]:
    """The text of the copy, piece by piece."""
    header = shareable(plan.header, HEADER, plan.redact) or {}
    yield json.dumps({**header, "traceEvents": []}).removesuffix("]}").encode()  # with the spaces that HTA looks for
    separator = b"\n"
    for events in TraceText(source, _objects).events():
        for fields in events:
            event = _event(_decode_fields(fields), plan)
            if event:
                yield separator + msgspec.json.encode(event)
                separator = b",\n"
    yield b"\n]}\n"


def _event(fields: _Fields, plan: _Plan) -> dict[str, Any]:
    """The shareable part of an event; empty if there is none."""
    event: dict[str, Any] = {}
    for key in _TEXTS:
        if key in fields and isinstance(text := msgspec.json.decode(fields[key]), str):
            event[key] = plan.redact(text)
    for key in _NUMBERS:
        if key in fields and _NUMBER.fullmatch(fields[key]):
            event[key] = fields[key]  # verbatim: a float cannot hold nanoseconds since 1970
    for key in ("pid", "tid"):
        if key in fields:
            value = msgspec.json.decode(fields[key])
            number = _whole(value)
            event[key] = shareable(value, None, plan.redact) if number is None else plan.ids.get(number, number)
    arguments = _decode_fields(fields["args"]) if bytes(fields.get("args", b"")).startswith(b"{") else {}
    if event.get("ph") == "M":
        metadata = _metadata(event, arguments, plan)
        return {**event, "args": metadata} if metadata else {}
    if kept := {key: _argument(value, plan) for key, value in arguments.items() if key in ARGUMENTS}:
        event["args"] = kept
    return event


def _argument(value: msgspec.Raw, plan: _Plan) -> msgspec.Raw:
    """The shareable part of an argument. Numbers stay verbatim, because reports show shapes as they were written."""
    if _NUMBERS_ONLY.fullmatch(value):
        return value
    return msgspec.Raw(json.dumps(shareable(msgspec.json.decode(value), None, plan.redact)).encode())


def _metadata(event: Mapping[str, Any], arguments: _Fields, plan: _Plan) -> dict[str, Any]:
    """The shareable arguments of a metadata event. Process names are command lines, thread names can be anything."""
    name, labels, index = (msgspec.json.decode(arguments.get(key, b'""')) for key in ("name", "labels", "sort_index"))
    match event.get("name"):
        case "process_name":
            return {"name": "python"}
        case "process_labels" if _LABELS.fullmatch(str(labels)):
            return {"labels": labels}
        case "process_sort_index" | "thread_sort_index" if isinstance(index, int):
            return {"sort_index": plan.ids.get(index, index)}
        case "thread_name" if _STREAM.fullmatch(str(name)):
            return {"name": name}
        case "thread_name":
            kind = _THREAD.search(str(name))
            return {"name": f"thread {event.get('tid')}{kind[0] if kind else ''}"}
    return {}


def _whole(value: Any) -> int | None:
    """A whole number, in quotes or not."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_RENAMED = {
    "cuda_runtime": msgspec.Raw(b'"Runtime"'),
    "cuda_driver": msgspec.Raw(b'"Runtime"'),
    "user_annotation": msgspec.Raw(b'"cpu_op"'),
    # Not fwdbwd: with `forward_backward` events beside recorded modules, the plugin loses operators or fails to load.
}
_ARROWS = ("s", "t", "f")
# A ProfilerStep# among these would count as another step. Calls of modules would be operators.
_DROPPED = "gpu_user_annotation"

# The plugin recognizes data loading only by the name of torch's DataLoader. The fetch that the callbacks mark covers
# every other loader too. It may contain torch's range: the plugin counts overlapping ranges once.
_FETCH_IN_PLUGIN = msgspec.Raw(f'"enumerate(DataLoader)#{FETCH_MARK}.__next__"'.encode())


class _Event(msgspec.Struct):
    """The fields that decide how an event is copied."""

    ph: Any = None
    cat: Any = None
    name: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _with_kinds(text: bytes) -> list[tuple[_Event, msgspec.Raw]]:
    return [(_decode_event(event), event) for event in _objects(text)]


def write_plugin_copy(source: Path, target: Path) -> tuple[str, ...]:
    """Write the copy of a trace for TensorBoard's profiler plugin; returns what could not be read.

    torch-tb-profiler 0.4.3, the last release, does not know the categories of current PyTorch. The copy uses the old
    ones and leaves out events that the plugin would miscount; docs/commands.md lists the changes and their effects.
    `target` appears complete or not at all, because the plugin reads the files of a run only once. The plugin lists it
    as a worker of the run if its name ends in `.pt.trace.json.gz`.
    """
    text = TraceText(source, _with_kinds)
    with whole_file(target) as file, gzip.open(file, "wb", compresslevel=COMPRESS_LEVEL) as copy:
        copy.writelines(_plugin_trace(text))
    return tuple(text.problems)


def _plugin_trace(text: TraceText[tuple[_Event, msgspec.Raw]]) -> Iterator[bytes]:
    pieces = text.events()
    first = next(pieces)
    before = dict(text.header)
    yield b"{" + b"".join(_field(key, value) + b"," for key, value in before.items()) + b'"traceEvents":['
    separator, of_any_kind = b"\n", False
    for about, event in chain(first, chain.from_iterable(pieces)):
        of_any_kind = of_any_kind or bool(about.cat and about.ph not in _ARROWS)
        if about.cat == _DROPPED or str(about.name).startswith(MODULE_MARK):
            continue
        yield separator
        separator = b",\n"
        if kind := _RENAMED.get(str(about.cat)):
            fields = _decode_fields(event) | {"cat": kind}
            yield msgspec.json.encode(fields | {"name": _FETCH_IN_PLUGIN} if about.name == FETCH_MARK else fields)
        else:
            yield bytes(event)
    if not of_any_kind:
        raise TraceError(f"{text.path}: none of its events has a kind (cat); {EXPORT_IT}")
    yield b"\n]" + b"".join(b"," + _field(key, value) for key, value in text.header.items() if key not in before)
    yield b"}"


def _field(key: str, value: msgspec.Raw) -> bytes:
    return msgspec.json.encode(key) + b":" + bytes(value)

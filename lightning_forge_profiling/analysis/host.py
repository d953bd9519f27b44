"""What the host does in the recorded steps: Python functions and synchronizations, by the user's line."""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals, Nesting, take
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.steps import WAITS, named
from lightning_forge_profiling.kineto.trace import Ints, Spans, Trace
from lightning_forge_profiling.names import OTHERS_CODE
from lightning_forge_profiling.schema import PythonCall, PythonFunctions, SpentIn, SyncCause, UserFunction

_MOST_CALLS: Final = 200
_MOST_USERS: Final = 10
_SHORTEST: Final = 0.001  # of a step: shorter calls are left out of the tree
_HOLDS: Final = 0.5  # a function is named for a time if it holds so much of it

_FRAME: Final = re.compile(r"(?P<file>.+\.pyx?|<.+?>)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
_OBJECT: Final = re.compile(r"<built-in (?:function|method) (\w+)(?: of (.+?)(?: object)?(?: at 0x[0-9a-f]+)?)?>")
_OURS: Final = "lightning_forge_profiling"
# Packages that are a library wherever they are installed; a trace of this package names the others.
_LIBRARIES: Final = frozenset({
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics", "numpy",
    _OURS,
})  # fmt: skip
# Further ones that are widely used and unlikely to be the name of a user's own folder: the profiler removes the path to
# `site-packages`, and other traces do not name what is installed.
_INSTALLED: Final = frozenset({
    "PIL", "accelerate", "albumentations", "apex", "av", "bitsandbytes", "click", "cv2", "dask", "deepspeed",
    "diffusers", "einops", "fire", "flash_attn", "fsspec", "functorch", "h5py", "huggingface_hub", "hydra", "jaxtyping",
    "jsonargparse", "keras", "kornia", "mlflow", "monai", "omegaconf", "pandas", "peft", "pyarrow", "ray", "rich",
    "safetensors", "scipy", "sentence_transformers", "skimage", "sklearn", "tensorboard", "timm", "tokenizers",
    "torch_geometric", "torchao", "torchaudio", "torchdata", "torchtext", "torchvision", "tqdm", "transformer_engine",
    "transformers", "triton", "trl", "typer", "wandb", "webdataset", "xformers",
})  # fmt: skip

_Kind = Literal["user", "library", "profiler"]


def python_functions(recording: Recording, spent: Mapping[str, Intervals]) -> PythonFunctions | None:
    """The Python functions of the recorded steps."""
    trace, steps = recording.trace, recording.steps
    frames = _of_steps(recording)
    if not len(frames):
        return None
    nesting = Nesting(frames)
    # the functions that contain a whole step: the script, the Trainer and its loops
    first = np.searchsorted(steps.host_start, frames.start, side="left")
    around: NDArray[np.bool_] = np.append(steps.host_end, np.iinfo(np.int64).max)[first] <= frames.end
    users = np.array([kind_of(name, trace.libraries) == "user" for name in trace.names], bool)[frames.name] & ~around
    total = steps.host.spans.within(frames.start, frames.end)
    once = users & ~nesting.in_namesake()  # of the user's those that are in no other call of the same function
    holders = {kind: _holder(recording, frames.at(once), spans & steps.host.spans) for kind, spans in spent.items()}
    return PythonFunctions(
        tree=_tree(recording, frames, nesting, total, around),
        users=_users(recording, frames, nesting, total, users=users, once=once),
        spent={kind: held for kind, held in holders.items() if held is not None},
    )


def kind_of(frame: str, libraries: frozenset[str]) -> _Kind:
    """Whether a function is the user's, a library's or this package's."""
    match = _FRAME.fullmatch(frame)
    if match is None or OTHERS_CODE.search(match["file"]):
        return "library"
    folders = match["file"].replace("\\", "/").split("/")
    if _OURS in folders[:-1]:
        return "profiler"
    # the profiler writes paths relative to the folder of sys.path that they are in
    top = folders[0].removesuffix(".py")
    known = top in sys.stdlib_module_names or top in _INSTALLED or top in libraries
    return "library" if known or not _LIBRARIES.isdisjoint(folders[:-1]) else "user"


def users_line(frame: str, libraries: frozenset[str]) -> str:
    """A function of the user after its file and first line; "" for any other."""
    if kind_of(frame, libraries) != "user":
        return ""
    name, where = _label(frame)
    return f"{where} {name}"


def _label(frame: str) -> tuple[str, str]:
    """Name and place of a function, without the address of an object."""
    match = _FRAME.fullmatch(frame)
    if match is not None:
        return match["function"], f"{match['file']}:{match['line']}"
    built_in = _OBJECT.fullmatch(frame)
    if built_in is None:
        return frame, ""
    owner = (built_in[2] or "").rpartition(".")[2]
    return (built_in[1] if owner in {"", "type"} else f"{owner}.{built_in[1]}"), ""


def _of_steps(recording: Recording) -> Spans:
    """The functions on the thread that marks the steps, or else on that with most of them, in the steps."""
    trace, frames = recording.trace, recording.trace.frames
    marks = recording.steps.marks
    thread = trace.annotations.thread[marks[0]] if len(marks) else np.bincount(frames.thread, minlength=1).argmax()
    inside = recording.steps.host.spans.within(frames.start, frames.end) > 0
    return frames.at((frames.thread == thread) & inside)


def _tree(
    recording: Recording, frames: Spans, nesting: Nesting, total: Ints, around: NDArray[np.bool_]
) -> tuple[PythonCall, ...]:
    """The tree of calls. Of the functions that contain whole steps, which all stacks share, the innermost is kept."""
    trace, steps = recording.trace, recording.steps
    parent = nesting.parent
    skipped = around & np.isin(np.arange(len(frames)), parent[around])
    own = total - np.bincount(parent[parent >= 0], total[parent >= 0], len(frames)).astype(np.int64)
    labels = {
        name: (*_label(trace.names[name]), kind_of(trace.names[name], trace.libraries))
        for name in np.unique(frames.name).tolist()
    }
    node_of: dict[tuple[int, str, str, _Kind], int] = {}  # by caller and label
    node = [-1] * (len(frames) + 1)
    columns = (parent, frames.name, skipped)
    for row, (caller, name, skip) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        above = node[caller]
        node[row] = above if skip else node_of.setdefault((above, *labels[name]), len(node_of))
    summed = np.array(node[:-1])[~skipped]
    total, own, calls = (
        np.bincount(summed, values[~skipped], len(node_of)).astype(np.int64)
        for values in (total, own, steps.host.at(frames.start) >= 0)
    )
    # a caller takes as long as its callee at least, and comes before it
    longest = np.argsort(-total, kind="stable")[:_MOST_CALLS]
    kept = np.sort(longest[total[longest] >= _SHORTEST * int(steps.host.length().sum())]).tolist()
    new = {at: position for position, at in enumerate(kept)} | {-1: -1}
    nodes = list(node_of)
    return tuple(
        PythonCall(
            caller=new[nodes[at][0]],
            name=nodes[at][1],
            where=nodes[at][2],
            kind=nodes[at][3],
            ms_per_step=steps.mean_ms(total[at]),
            self_ms_per_step=steps.mean_ms(max(own[at], 0)),
            calls_per_step=int(calls[at]) / len(steps),
        )
        for at in kept
    )


def _users(
    recording: Recording,
    frames: Spans,
    nesting: Nesting,
    total: Ints,
    *,
    users: NDArray[np.bool_],
    once: NDArray[np.bool_],
) -> tuple[UserFunction, ...]:
    """The user's functions, the one with the most own time first."""
    trace, steps = recording.trace, recording.steps
    name = frames.name
    above = take(nesting.innermost(users), nesting.parent)  # the user's function around each
    inner = users & (above >= 0)
    own = total - np.bincount(above[inner], total[inner], len(total)).astype(np.int64)
    own_ns = np.bincount(name[users], own[users], len(trace.names))
    total_ns = np.bincount(name[once], total[once], len(trace.names))
    calls = np.bincount(name[users & (steps.host.at(frames.start) >= 0)], minlength=len(trace.names))
    return tuple(
        UserFunction(
            where=users_line(trace.names[each], trace.libraries),
            ms_per_step=steps.mean_ms(total_ns[each]),
            own_ms_per_step=steps.mean_ms(own_ns[each]),
            calls_per_step=int(calls[each]) / len(steps),
        )
        for each in np.argsort(-own_ns, kind="stable")[:_MOST_USERS].tolist()
        if own_ns[each] > 0
    )


def _holder(recording: Recording, frames: Spans, spans: Intervals) -> SpentIn | None:
    """The innermost function of the user that holds at least half of a time; None without one."""
    if not spans.total or not len(frames):
        return None
    names, first, number = np.unique(frames.name, return_index=True, return_inverse=True)
    within = np.bincount(number, spans.within(frames.start, frames.end))
    holders = np.flatnonzero(within >= _HOLDS * spans.total).tolist()
    if not holders:
        return None
    # an inner function holds no more than the one around it, and is entered later
    held = min(holders, key=lambda row: (within[row], -first[row]))
    return SpentIn(
        where=users_line(recording.trace.names[names[held]], recording.trace.libraries),
        ms_per_step=recording.steps.mean_ms(within[held]),
        of_ms_per_step=recording.steps.mean_ms(spans.total),
    )


_COPY: Final = "a blocking copy (.to(), .cpu(), .tolist(), torch.tensor(device=...))"
# The first cause with an operator anywhere around the call is taken: most specific first.
_CAUSES: Final = {
    "a truth test of a tensor (`if tensor:`)": ("aten::is_nonzero",),
    "nonzero() or a boolean mask": ("aten::nonzero",),
    "masked_select()": ("aten::masked_select",),
    "unique()": ("aten::_unique2", "aten::unique_consecutive"),
    "repeat_interleave() without output_size": ("aten::repeat_interleave",),
    "torch.equal()": ("aten::equal",),
    "bincount()": ("aten::bincount",),
    ".item()": ("aten::item", "aten::_local_scalar_dense"),
    "pin_memory()": ("aten::pin_memory", "aten::_pin_memory"),
    _COPY: ("aten::_to_copy", "aten::copy_"),
}
_CALLS: Final = (
    (re.compile(r"(?:cuda|hip)Device.*|cuCtx.*|(?:cuda|hip)Thread.*"), "torch.cuda.synchronize()"),
    (re.compile(r"(?:cuda|hip|cu)Stream.*"), "stream.synchronize()"),
    (re.compile(r"(?:cuda|hip|cu)Event.*"), "event.synchronize()"),
    (re.compile(r".*Memcpy.*"), _COPY),
)

# Before every batch on several devices, Lightning checks whether any rank received a SIGTERM
# (`_TrainingEpochLoop._broadcast_sigterm_tensor`): torch.tensor(device=...), a broadcast, .item().
_SIGTERM_CHECK: Final = ("aten::to", "c10d::broadcast_", "aten::item")
_BETWEEN: Final = re.compile(r"aten::lift_fresh|(?:aten::)?detach_|aten::empty(?:_strided)?")


def sync_causes(recording: Recording) -> tuple[SyncCause, ...]:
    """Causes of the synchronizing calls in the recorded steps, most frequent first."""
    trace, steps = recording.trace, recording.steps
    waits = np.flatnonzero(named(trace, trace.calls, WAITS))
    waits = waits[steps.host.at(trace.calls.start[waits]) >= 0]
    if not len(waits):
        return ()
    operators, around = trace.operators, recording.links.call_operator[waits]
    number = {name: number for number, names in enumerate(_CAUSES.values()) for name in names}
    specific = np.array([number.get(name, len(_CAUSES)) for name in trace.names])[operators.name]
    specific = np.append(recording.nesting.least_around(specific), len(_CAUSES))[around]
    operator = take(operators.name, around)
    frames = Nesting(trace.frames)
    of_user = frames.innermost(named(trace, trace.frames, lambda frame: users_line(frame, trace.libraries)))
    inside = frames.enclosing(trace.calls.start[waits], trace.calls.thread[waits])
    frame = take(trace.frames.name, take(of_user, inside))  # of the innermost function outside PyTorch and Lightning
    by_lightning = is_lightning_call(recording)[waits]
    duration = (trace.calls.end - trace.calls.start)[waits]

    cause_of = cache(partial(_cause, trace))
    line_of = cache(lambda frame: users_line(trace.names[frame], trace.libraries) if frame >= 0 else "")
    durations_of: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    columns = (trace.calls.name[waits], specific, operator, frame, by_lightning, duration)
    for *call, name, lightning, spent in zip(*(column.tolist() for column in columns), strict=True):
        durations_of[cause_of(*call), line_of(name), lightning].append(spent)
    causes = [
        SyncCause(
            cause=cause,
            where=where,
            lightning=lightning,
            per_step=len(durations) / len(steps),
            host_ms_per_step=steps.mean_ms(sum(durations)),
        )
        for (cause, where, lightning), durations in durations_of.items()
    ]
    return tuple(sorted(causes, key=lambda cause: (-cause.per_step, cause.cause, cause.where)))


def is_lightning_call(recording: Recording) -> NDArray[np.bool_]:
    """Mask of the rows of `Trace.calls` that Lightning's own loop makes."""
    trace, operators = recording.trace, recording.trace.operators
    rows = np.flatnonzero((recording.nesting.parent < 0) & ~named(trace, operators, _BETWEEN))
    rows = rows[np.argsort(operators.thread[rows], kind="stable")]
    to, broadcast, item = (named(trace, operators, re.compile(name))[rows] for name in _SIGTERM_CHECK)
    thread = operators.thread[rows]
    first = np.flatnonzero(to[:-2] & broadcast[1:-1] & item[2:] & (thread[:-2] == thread[2:]))
    own = rows[np.concatenate((first, first + 2))]
    outermost = recording.nesting.outermost(np.ones(len(operators), bool))
    return np.isin(take(outermost, recording.links.call_operator), own)


def _cause(trace: Trace, call: int, specific: int, operator: int) -> str:
    """The cause of a call: the most specific operator around it, else its own name and the innermost operator."""
    if specific < len(_CAUSES):
        return tuple(_CAUSES)[specific]
    name = trace.names[call]
    cause = next((cause for pattern, cause in _CALLS if pattern.fullmatch(name)), name)
    return f"{cause} in {trace.names[operator]}" if operator >= 0 else cause

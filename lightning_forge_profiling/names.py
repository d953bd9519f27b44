"""Every name that is written to disk, logged, or put into a trace, once."""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

REGIONS: Final = ("data", "transfer", "forward", "backward", "optimizer", "other")
"""The built-in regions. By self time they tile a step: their sum is the step."""

EXCLUDED: Final = ("validation", "checkpoint", "profiler")
"""What happens between the batches of a fit but is no part of a step. `profiler` is this package's own: starting,
stopping and exporting a trace, and its rows for the loggers and the record."""

WHOLE: Final = "step"
"""A step of which only the end is timed, in one piece."""

LOADER_START: Final = "loader start"
"""The part of `data` between two epochs: the loop makes its loader's iterator anew, which ends workers and starts
others, and waits for the first batch."""

LOADER_END: Final = "loader end"
"""The part of `data` at the end of an iterator of unknown length: the fetch that finds out, which may end workers."""

BETWEEN_EPOCHS: Final = (LOADER_START, LOADER_END)

RESERVED: Final = frozenset((*REGIONS, *EXCLUDED, *BETWEEN_EPOCHS, WHOLE))

PROFILER: Final = "profiler"
"""The part of the ledger for this package's own work: recording a window, timing steps, rows, the record."""

STEPS: Final = "steps"
"""The part of the ledger for the training loop, without the other parts."""

SET_UP: Final = "startup/fit"
"""The part of the ledger from `trainer.fit` to the training loop, without the hooks in it."""

FIRST_STEP: Final = "startup/first_step"
"""The part of the ledger for the training loop up to the end of its first step: libraries are loaded, buffers made."""

HANG: Final = "hang"
"""The part of the ledger for the time in which training stood still, in whatever part that was."""

DATA_LOADER: Final = "data_loader"
"""The part of the ledger for the ends and the beginnings of a loader's iterator, with its workers."""

GC_FULL: Final = "gc/generation_2"
GC_YOUNG: Final = "gc/generation_0_1"
"""The parts of the ledger that are Python's garbage collection: of all objects, and of the younger generations."""

COMPILE: Final = "compile"
"""The part of the ledger for what `torch.compile` compiles after the warm-up."""

CHECKPOINT_WRITE: Final = "checkpoint/write"
"""The part of the ledger from a checkpoint's state to its file, as far as it blocks."""

VALIDATION: Final = "validation"
VALIDATION_LOADER: Final = "validation/loader"
VALIDATION_DATA: Final = "validation/data"
VALIDATION_TRANSFER: Final = "validation/transfer"
VALIDATION_STEP: Final = "validation/step"
VALIDATION_METRICS: Final = "validation/metrics"
"""The parts of the ledger inside a validation run: creating the loader's iterator and, with workers, until its first
batch; fetching the other batches; moving them to the device; `validation_step`; computing what was logged at its end.
"""

EPOCH: Final = "epoch"
WINDOW: Final = "window"
"""Spans of the ledger that are no parts: a training epoch, and the recorded window."""

SELF_LOG: Final = "logger/self.log"
"""The part of the ledger for `self.log` in `training_step`."""

EPOCH_METRICS: Final = "logger/epoch_metrics"
"""The part of the ledger for computing what was logged in an epoch, metrics included, at its end."""

STARTUP: Final = "startup"
"""What the names of the parts of the ledger before the first step begin with."""
STARTUP_IMPORTS: Final = "startup/imports"
"""The part of the ledger from the start of the process until the top of the script has imported this package, which
imports torch and Lightning."""
STARTUP_SCRIPT: Final = "startup/script"
"""The part of the ledger from there to the construction of the callbacks: later imports, data, the model."""
STARTUP_PROCESS: Final = "startup/process"
"""Those two parts in one, if it is not known where the imports end."""
STARTUP_TRAINER: Final = "startup/trainer"
"""The part of the ledger from the construction of the callbacks, and so of the Trainer, to the beginning of the fit."""
BEFORE_FIT: Final = (STARTUP_IMPORTS, STARTUP_SCRIPT, STARTUP_PROCESS, STARTUP_TRAINER)

_KINDS: Final = {"callback": "callbacks", "module": "hooks", "datamodule": "hooks", "logger": "loggers"}

COUNTING: Final = ("batch_size_fn", "tokens_fn", "flops_per_batch")
"""The user's functions of a batch."""


def function_part(name: str, loop: str = "") -> str:
    """The part of the ledger for one of the user's functions of a batch, in training or in another loop."""
    return f"callback/ThroughputCallback.{name}{f' in {loop}' if loop else ''}"


_HOOK_REGIONS: Final = {
    **dict.fromkeys(("on_train_batch_start", "on_train_batch_end", "lr_scheduler_step"), "other"),
    "train_dataloader": "data",
    **dict.fromkeys(("on_train_epoch_start", "on_train_epoch_end"), "other"),
    **dict.fromkeys(("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"), "transfer"),
    **dict.fromkeys(("on_before_backward", "on_after_backward"), "backward"),
    **dict.fromkeys(("on_before_zero_grad", "optimizer_zero_grad"), "optimizer"),
    **dict.fromkeys(("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"), "optimizer"),
    **dict.fromkeys(("log", "log_metrics"), "forward"),  # in `training_step`; in a hook they are part of that
    **dict.fromkeys(COUNTING, "other"),
    "finalize": "",  # at the end of a fit
}


@cache
def whole_part(part: str) -> str:
    """The part of the ledger that one lies inside, with which it is one event: of a checkpoint or a validation run.

    Examples:
        >>> whole_part("checkpoint/write"), whole_part("validation/data"), whole_part("callback/EMA.on_train_start")
        ('checkpoint', 'validation', 'callback/EMA.on_train_start')
    """
    first = part.partition("/")[0]
    return first if first in EXCLUDED else part


def wholes(parts: Mapping[str, float]) -> dict[str, float]:
    """The seconds by part of a ledger, those inside another added to it."""
    sums = dict.fromkeys(map(whole_part, parts), 0.0)
    for part, seconds in parts.items():
        sums[whole_part(part)] += seconds
    return sums


LOGGED_KINDS: Final = (
    *("steps", "validation", "checkpoint", "data_loader", "callbacks", "hooks", "loggers", "compile", "gc"),
    *("profiler", "startup", "other"),
)
"""Kinds of parts that are logged; the sanity check is in `startup`, what is left in `other`."""


@cache
def part_kind(part: str) -> str:
    """What a part of the ledger is one of: `callbacks`, `hooks`, `loggers`, `startup`, or itself.

    Examples:
        >>> part_kind("callback/EMA.on_train_batch_end"), part_kind("startup/fit"), part_kind("validation")
        ('callbacks', 'startup', 'validation')
    """
    first = part.partition("/")[0]
    return _KINDS.get(first, first)


@cache
def hook_region(part: str) -> str:
    """The region that contains a part of the ledger: a hook within a step, or a logger; "" for any other part.

    Examples:
        >>> hook_region("module/on_before_optimizer_step"), hook_region("logger/CSVLogger"), hook_region("validation")
        ('optimizer', 'other', '')
    """
    kind = part_kind(part)
    if kind not in {"callbacks", "hooks", "loggers"}:
        return ""
    return _HOOK_REGIONS.get(re.split(r"[./]", part)[-1], "other" if kind == "loggers" else "")


MARK_PREFIX: Final = "forge."
"""A region's `record_function` range in a trace is this and the region's name."""

MODULE_MARK: Final = "nn.Module "
"""The range of a call of a module in a trace is this, its path in the model, and its class in brackets."""

FETCH_MARK: Final = f"{MARK_PREFIX}data"

_DOCS: Final = "https://lightning-forge-profiling.readthedocs.io/en/latest"
_OWN_PAGE: Final = (
    *("input-bound", "worker-restarts", "transfer-bound", "sync-bound", "launch-bound", "allocator-churn"),
    *("between-regions", "slow-launches", "slow-optimizer", "communication-bound", "straggler", "compute-bound"),
    *("slow-call", "python-bound", "memory-bandwidth-bound", "gpu-idle", "memory-near-limit", "distorted-times"),
    "growth",
)
_SHARED_PAGES: Final = {
    "blocked": ("blocked-forward", "blocked-backward", "blocked-optimizer"),
    "busy-machine": ("cpu-starved", "cpu-throttled", "gil-held"),
    "outside-the-step": (
        *("checkpoint-bound", "validation-bound", "slow-callback", "slow-hook", "slow-logger", "loader-startup"),
        *("gc-bound", "compile-bound", "startup-bound"),
    ),
}
FINDING_PAGES: Final = {
    **{code: code for code in _OWN_PAGE},
    **{code: page for page, codes in _SHARED_PAGES.items() for code in codes},
}
"""The page of the docs of each code of a finding, in `docs/findings/`."""


def docs_url(code: str) -> str:
    """The address of the docs on a code of a finding; "" for any other text.

    Examples:
        >>> docs_url("gil-held"), docs_url("nothing stands out")
        ('https://lightning-forge-profiling.readthedocs.io/en/latest/findings/busy-machine/', '')
    """
    return f"{_DOCS}/findings/{FINDING_PAGES[code]}/" if code in FINDING_PAGES else ""


METADATA_KEY: Final = "forge_profiling"
"""The field of a trace's header that holds our metadata."""

SUMMARY_JSON: Final = "summary.json"
SUMMARY_MARKDOWN: Final = "summary.md"
_TRACE_ENDING: Final = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$")
RANK_SUMMARY: Final = ".summary.json"
"""The end of the name of what the analysis of one rank leaves for that of all."""
REPORT_HTML: Final = "report.html"
TENSORBOARD_FOLDER: Final = "tensorboard"
"""The subfolder of TensorBoard's copies, out of the way of tools that read every file of the trace's folder."""


def trace_name(rank: int) -> str:
    """A rank's trace. The name must not match the plugin's pattern, `*.pt.trace.json.gz`."""
    return f"rank{rank}.trace.json.gz"


def plugin_name(rank: int) -> str:
    """The copy of a rank's trace for TensorBoard's plugin."""
    return f"rank{rank}.pt.trace.json.gz"


def rank_summary_path(trace: Path) -> Path:
    """What the analysis of one rank leaves: `rank3.summary.json` for `rank3.trace.json.gz`."""
    return trace.with_name(_TRACE_ENDING.sub("", trace.name) + RANK_SUMMARY)


def memory_path(folder: Path, rank: int) -> Path:
    """A rank's memory snapshot."""
    return folder / f"rank{rank}.memory.pickle"


def raw_folder(folder: Path, rank: int) -> Path:
    """The hidden folder that a rank exports its raw trace to. Whoever creates it owns the window's folder."""
    return folder / f".rank{rank}.raw"


RECORD_FOLDER: Final = "forge_record"
"""The folder of a run's record, in its log folder; further runs in the same place have `forge_record.2` and so on."""


def record_name(rank: int) -> str:
    """A rank's record. Its rotated segments are beside it: `rankN.1.jsonl`, `rankN.2.jsonl`, ..."""
    return f"rank{rank}.jsonl"


def segment_name(rank: int, number: int) -> str:
    """A rotated segment of a rank's record, counted from 1."""
    return f"rank{rank}.{number}.jsonl"


def record_part(name: str) -> tuple[int, int | None] | None:
    """Rank and segment of a file of a record by its name; no segment for the newest, None for another file.

    Examples:
        >>> record_part("rank3.jsonl"), record_part("rank3.12.jsonl"), record_part("rank03.jsonl")
        ((3, None), (3, 12), None)
    """
    match = re.fullmatch(r"rank(0|[1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,17}))?\.jsonl", name)
    return (int(match[1]), int(match[2]) if match[2] else None) if match else None


RANKS_JSON: Final = "ranks.json"
"""What rank 0 last heard of all ranks, in the record's folder."""


WINDOW_REQUEST: Final = "window_request.json"
"""By which a live run is asked to record steps, in the record's folder."""

WINDOW_PLAN: Final = "window_plan.json"
"""What became of that."""


def pulse_name(rank: int | str) -> str:
    """What a rank last said of itself, where rank 0 does not hear it."""
    return f"rank{rank}.pulse.json"


def stacks_name(rank: int) -> str:
    """The stacks of all threads of a rank that is stalled, in the record's folder."""
    return f"rank{rank}.stacks.txt"


OWN_WORK: Final = "own work"
"""The name of a step without its waits for other ranks, beside those of its regions."""

SIGTERM_LEAF: Final = "sigterm broadcast"
"""The part of a step in which Lightning's loop broadcasts to all ranks whether to stop, before each fetch."""

WAIT_PREFIX: Final = "wait/"
"""What the intervals begin with in which a rank waits for others, and for what they exchange; the leaf follows."""

RANKS_SLOWEST: Final = "ranks/slowest"
RANKS_SPREAD_MS: Final = "ranks/spread_ms"
RANKS_EXPOSED_COMM_MS: Final = "ranks/exposed_comm_ms"

GOODPUT: Final = "run/goodput"
STEP_MS: Final = "time/step_ms"
MFU: Final = "throughput/mfu"
TFLOPS: Final = "throughput/tflops_per_device"
PEAK_TFLOPS: Final = "throughput/peak_tflops"


def part_pct(kind: str) -> str:
    """The metric for what parts of the ledger of one kind are of the run's wall time."""
    return f"run/{kind}_pct"


def region_ms(region: str, *, loop: str = "") -> str:
    """The metric for a region's time per step, of training or of another loop."""
    return f"time/{loop}/{region}_ms" if loop else f"time/{region}_ms"


def per_second(unit: str, *, device: bool = False, loop: str = "") -> str:
    """The metric for a rate: `samples`, `tokens`, `steps`, ... per second, of all devices or of one."""
    of = "device/" if device else f"{loop}/" if loop else ""
    return f"throughput/{of}{unit}_per_sec"


_SWITCH: Final = "FORGE_PROFILING"
SWITCHED_OFF: Final = f"{_SWITCH}=0"


def switched_off() -> bool:
    """Whether the environment variable `FORGE_PROFILING` is 0."""
    return os.environ.get(_SWITCH) == "0"


# Files of code that the user did not write: installed packages and the standard library, what `torch.compile` generates
# (its cache may lie anywhere, and names files by their hash), and text that is compiled in memory.
OTHERS_CODE: Final = re.compile(
    r"(?:^|[/\\])(?:(?:site|dist)-packages|lib[/\\]python3[\w.]*|[Pp]ython3[\w.]*[/\\]Lib|torchinductor[^/\\]*)[/\\]"
    r"|(?:^|[/\\])[a-z2-7]{2}[/\\]c[a-z2-7]{51}\.py$"
    r"|^<(?!ipython|stdin>)"
)

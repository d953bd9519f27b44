"""Mistakes that users make: how to know one, what is wrong with it, and what to write instead.

To add one, add a `Mistake`: nothing else has to change. `calls.py` finds them in the sampled lines of a run, or in its
settings.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_forge_profiling.diagnosis.rule import BACKWARD_TO_FORWARD, RunTimes
from lightning_forge_profiling.names import REGIONS, VALIDATION_DATA, VALIDATION_STEP, VALIDATION_TRANSFER
from lightning_forge_profiling.schema import WORKER_LINES, Operator, RunEvidence, SampledLine

# hooks and steps of each batch: at an epoch's end the same call is right
_EACH_BATCH: Final = re.compile(r"(_step|forward|_batch_\w+|zero_grad|_backward|_clipping)$|\.<locals>\.")


def _is_of_each_batch(part: str, function: str) -> bool:
    """Whether a part of the fit comes with each batch, or else a function in it."""
    in_loop = part in {*REGIONS, VALIDATION_DATA, VALIDATION_TRANSFER, VALIDATION_STEP}
    return in_loop or _EACH_BATCH.search(part) is not None or _EACH_BATCH.search(function) is not None


class Setting(NamedTuple):
    """A setting that costs time in each step."""

    place: str  # what it is of, before what is wrong with it
    shares: Mapping[str, float]  # by region how much of it


_WAITS_PCT: Final = 50.0


@dataclass(frozen=True, slots=True)
class Mistake:
    """A call or a setting that costs time for nothing, or for what another one does in less."""

    name: str  # a stable identifier
    # a regular expression that matches the whole name of the called function, as of `SampledLine.callee`; "" for none
    callee: str
    wrong: str  # what is wrong with it, after the call and its line
    instead: str  # what to write
    fix: str = ""  # the same as code to copy
    each_batch: bool = True  # whether it is a mistake only in what is done for each batch
    in_loop: bool = False  # whether it is one only in a loop: a single such call may be what has to be done
    within: str = ""  # a regular expression of the parts of the fit in which it is one; "" for all
    call: str = ""  # a regular expression that the source of the call begins with; "" for any
    small: bool = False  # whether it is one only of operators so small that fewer and larger ones do the same in less
    backward: bool = False  # whether that share of the backward pass is its too
    left: str = ""  # what a fix leaves of its time, so that all of it is a bound; "" for nothing
    # where the run has it, of one that is no call; with the operators that were recorded
    setting: Callable[[RunEvidence, Sequence[Operator]], Setting | None] | None = None

    def is_in(self, part: str, line: SampledLine, *, small: bool = False) -> bool:
        """Whether a sampled line of a part of the fit is this mistake; `small` says whether the operators are."""
        return (
            bool(self.callee)
            and (not self.small or (small and (line.waiting_pct or 0.0) < _WAITS_PCT))
            and re.match(self.call, line.call) is not None
            and re.fullmatch(self.callee, line.callee or ("" if line.file else line.function)) is not None
            and (not self.each_batch or _is_of_each_batch(part, line.function))
            and (line.in_loop or not self.in_loop)
            and re.match(self.within, part) is not None
        )


_FEW_ROWS_PCT: Final = 10.0  # a sparse gradient keeps an index for each row, and its update is no fused one


def _dense_embedding(run: RunEvidence, recorded: Sequence[Operator]) -> Setting | None:
    """A large embedding of which a step uses few rows, while all of them are filled and updated.

    Of the update that is what the table is of all elements. Of backward it is what was recorded of its operator, and
    else what the rest of the model does not explain.
    """
    switches, optimizer = run.settings.switches, run.settings.optimizer
    table = None if switches is None else switches.embedding
    if table is None or optimizer is None or table.used_pct > _FEW_ROWS_PCT:
        return None
    if run.timing.on_device and run.ranks.world_size > 1:  # NCCL averages no sparse gradients
        return None
    part, times = min(table.rows * table.width / optimizer.elements, 1.0), RunTimes.of(run)
    forward_ms, backward_ms = (times.region(name).device_ms for name in ("forward", "backward"))
    filled = next((each for each in recorded if each.name == "aten::embedding_dense_backward"), None)
    if filled is None:
        fills_ms = part * max(backward_ms - BACKWARD_TO_FORWARD * forward_ms, 0.0)
    else:
        fills_ms = filled.device_ms_per_step if run.timing.on_device else filled.host_ms_per_step
    of_backward = min(fills_ms / backward_ms, 1.0) if backward_ms else 0.0
    place = f"the gradient of self.{table.name}, of whose {table.rows:,} rows a step uses {table.used_pct:.2g} %"
    return Setting(place, {"optimizer": part, "backward": of_backward})


_MEMORY_LEFT: Final = 0.5  # without checkpointing activations take more, and how much is not known


def _checkpointing(run: RunEvidence, _: Sequence[Operator]) -> Setting | None:
    """Activations that are computed again in backward, with memory to spare, which take as long as forward."""
    module, gpu = "" if run.settings.switches is None else run.settings.switches.checkpointing, run.machine.telemetry
    total_gib = None if gpu is None else gpu.memory_total_gib
    left = not run.timing.on_device if gpu is None or not total_gib else 1 - (gpu.memory_peak_gib or 0.0) / total_gib
    forward_ms, backward_ms = (RunTimes.of(run).region(name).device_ms for name in ("forward", "backward"))
    if not module or left < _MEMORY_LEFT or not backward_ms:
        return None
    return Setting(f"activation checkpointing of {module}", {"backward": min(forward_ms / backward_ms, 1.0)})


_IN_DATASET: Final = f"data$|{WORKER_LINES}$|validation(/data|/loader|/worker)?$"

_IN_STEP: Final = r"(forward|backward|optimizer|other)$|(callback|module)/"
_AT_ONCE: Final = (
    "Where one item does not need the one before, do all in one call: of stacked tensors, with an index (bincount, "
    "index_add_, scatter_add_), or of a list (torch._foreach_mul_)."
)

CATALOGUE: Final = (
    Mistake(
        "metric-in-step",
        r"torchmetrics\.(metric\.Metric\.(forward|_wrap_compute.*)|collections\.MetricCollection\.(forward|compute.*))",
        "a metric is computed for each batch, from all that it keeps",
        "Update it in the step, compute it once at the epoch's end: self.auc.update(...) in the step, and "
        "self.log(name, self.auc) or compute() and reset() in the epoch's last hook. One that keeps all predictions "
        "(thresholds=None) takes longer with each batch until it is reset.",
        fix="metric.update(...) in the step; metric.compute(); metric.reset() at the epoch's end",
        left="update() and one compute() an epoch",
    ),
    Mistake(
        "functional-metric-in-step",
        r"(torchmetrics\.functional|sklearn\.metrics)\..*",
        "a metric is computed for each batch",
        "Compute it every n steps, or collect what it needs and compute it once at the epoch's end.",
        left="the few that stay",
    ),
    Mistake(
        "hyperparameters",
        r"(lightning\.pytorch|pytorch_lightning)\.(loggers\.utilities\._log_hyperparams|core\.mixins\.hparams_mixin\..*)",
        "saving and logging the hyperparameters copies, compares and writes all that save_hyperparameters() was given",
        "Leave out large arguments: a dataset, a frame, a list of samples, a model.",
        fix='self.save_hyperparameters(ignore=["series"])  # the names of the large arguments',
        each_batch=False,
        left="the small ones",
    ),
    Mistake(
        "frame-per-sample",
        r"(pandas|polars|pyarrow)\..*",
        "a table is searched for each sample",
        "Convert it once, in the dataset's __init__, to a NumPy array or a tensor, with the rows of each sample "
        "together, and index that: a row of an array takes a microsecond, a query of a frame hundreds. More workers "
        "only spread the same work.",
        each_batch=False,
        within=_IN_DATASET,
        left="indexing the array",
    ),
    Mistake(
        "converted-per-sample",
        r"(torch\.)?(tensor|as_tensor|FloatTensor|LongTensor)|array|asarray",
        "each sample is converted from Python objects, or copied",
        "Convert all of them once, in the dataset's __init__, to an array or a tensor, and index that; of an array "
        "take torch.from_numpy, which copies nothing.",
        each_batch=False,
        within=_IN_DATASET,
        left="indexing it",
    ),
    # reading a value from a GPU is none of these: the time in the call is not its cost, as the GPU works meanwhile. It
    # costs the GPU's idle time after it, which a trace shows (`sync-bound`).
    Mistake(
        "norm-per-parameter",
        r"norm|torch\._tensor\.Tensor\.norm|torch\.functional\.norm|linalg_vector_norm|vector_norm",
        "a norm is computed for each parameter by itself",
        "Compute all in one call, and read no value of them: torch.nn.utils.get_total_norm(gradients), or what "
        "torch.nn.utils.clip_grad_norm_ returns.",
        in_loop=True,
        fix="torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])",
        left="that call",
    ),
    Mistake(
        "average-per-parameter",
        r"lerp_|copy_|mul_|add_|lerp",
        "weights are averaged or copied parameter by parameter",
        "Update all of them in one call, as by torch._foreach_lerp_ or Lightning's WeightAveraging callback, or every "
        "n steps.",
        in_loop=True,
        fix="torch._foreach_lerp_(averages, list(self.parameters()), 1 - decay)",
        within=r"(callback|module)/|other$",
        left="that call",
    ),
    Mistake(
        "loop-over-time",
        r"torch\.nn\.modules\.rnn\.(LSTM|GRU|RNN)Cell\.forward",
        "a recurrent cell is called for each time step",
        "Call nn.LSTM, nn.GRU or nn.RNN once for the whole sequence: one call of cuDNN in place of a loop in Python.",
        in_loop=True,
        backward=True,
        left="that call",
    ),
    Mistake(
        "logged-each-batch",
        r"(torch\.utils\.tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune|clearml)\..*",
        "it is sent to a logger for each batch",
        "Do it every n steps.",
        fix="if self.global_step % 100 == 0:  # around that line",
        left="every n-th",
    ),
    Mistake(
        "copies",
        r"copy\.deepcopy|deepcopy",
        "objects are copied for each batch",
        "Copy what changes alone, or once before training.",
    ),
    Mistake(
        "collects",
        r"collect|torch\.cuda\.memory\.empty_cache|empty_cache",
        "it stops training for each batch, and frees nothing that PyTorch would not use again",
        "Leave it out, or call it once an epoch.",
    ),
    # a loop over layers calls what it loops over, and not the same module again
    Mistake(
        "module-per-item",
        r".*\.forward",
        "a module is called for one item at a time, in operators so small that calling is most of their time",
        _AT_ONCE,
        in_loop=True,
        call=r"\w+(\.\w+)+\(",
        within=_IN_STEP,
        small=True,
        backward=True,
        left="one call for all items",
    ),
    Mistake(
        "item-by-item",
        r"(torch\.(?!optim|autograd|.*\.(forward|backward)$).*|[^.]*)",
        "a loop does one item at a time, in calls so small that calling is most of their time",
        _AT_ONCE,
        in_loop=True,
        within=_IN_STEP,
        small=True,
        left="one call for all items",
    ),
    Mistake(
        "activation-checkpointing",
        "",
        "backward computes forward again, and at least half of the memory is never used",
        "Switch it off, or checkpoint fewer layers.",
        fix="model.gradient_checkpointing_disable()  # of timm: model.set_grad_checkpointing(False)",
        setting=_checkpointing,
    ),
    # what takes sparse gradients: tried with torch 2.13 (2026-11-28); NCCL: pytorch/pytorch#22400
    Mistake(
        "dense-embedding",
        "",
        "it is dense, so that backward fills and the optimizer updates all of them",
        "Use nn.Embedding(..., sparse=True) with SparseAdam, Adagrad or SGD without weight decay, fused or clipping by "
        "norm, which take no sparse gradients; Adam for the other parameters is then a second optimizer (manual "
        "optimization). DDP averages sparse gradients by Gloo alone.",
        fix="nn.Embedding(..., sparse=True)  # with SGD, Adagrad or SparseAdam, and without clipping by norm",
        left="the rows that are used",
        setting=_dense_embedding,
    ),
)
"""The mistakes that are known, the most specific first."""


class Made(NamedTuple):
    """A mistake that was made, in one part of the fit."""

    mistake: Mistake
    part: str
    share: float  # of the part's time
    place: str  # the call and its line, as `self.auc.compute() at model.py:41`, or the setting
    line: SampledLine | None = None  # of a call


def mistakes_in(run: RunEvidence, recorded: Sequence[Operator] = ()) -> Iterator[Made]:
    """Each sampled line and each setting of a run that is a mistake, by part of the fit.

    Args:
        run: the run.
        recorded: operators of some of its steps, if a trace has them.
    """
    small = _are_small(recorded)
    for part, lines in run.lines.items():
        for line in lines:
            found = next((mistake for mistake in CATALOGUE if mistake.is_in(part, line, small=small)), None)
            if found is not None:
                parts = (part, "backward") if found.backward and part == "forward" else (part,)
                yield from (Made(found, each, line.pct / 100, place_of(line), line) for each in parts)
    for mistake in CATALOGUE:
        setting = None if mistake.setting is None else mistake.setting(run, recorded)
        if setting is not None:
            yield from (Made(mistake, part, share, setting.place) for part, share in setting.shares.items())


# the host takes 3 to 20 us to call an operator, whatever it computes
_SMALL_US: Final = 20.0


def _are_small(recorded: Sequence[Operator]) -> bool:
    """Whether the host's own time in the operators is mostly that of calling them."""
    calls = sum(each.calls_per_step for each in recorded)
    return calls > 0 and 1e3 * sum(each.self_host_ms_per_step for each in recorded) < _SMALL_US * calls


_LONGEST: Final = 60


def place_of(line: SampledLine) -> str:
    """The call and its line, as `self.auc.compute() at model.py:41`; else the line and its function."""
    if not line.file:
        return line.function.rpartition(".")[2]
    call, at = line.call, f"{line.file}:{line.line}"
    if len(call) > _LONGEST or call.endswith("..."):
        call = f"{call.partition('(')[0]}(...)"
    is_call = (line.callee or "(" in call) and len(call) <= _LONGEST and not call.startswith(("for ", "with "))
    return f"{call} at {at}" if is_call else f"{at} {line.function}"

"""Calls that users make by mistake: how to know one, what is wrong with it, and what to write instead.

To add one, add a `Mistake`: nothing else has to change. `calls.py` finds them among the sampled lines of a run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.schema import WORKER_LINES, RunEvidence, SampledLine

# hooks and steps of each batch: at an epoch's end the same call is right
_EACH_BATCH: Final = re.compile(r"(_step|forward|_batch_\w+|zero_grad|_backward|_clipping)$|\.<locals>\.")


def _is_of_each_batch(part: str, function: str) -> bool:
    """Whether a part of the fit comes with each batch, or else a function in it."""
    return part in REGIONS or _EACH_BATCH.search(part) is not None or _EACH_BATCH.search(function) is not None


@dataclass(frozen=True, slots=True)
class Mistake:
    """A call that costs time for nothing, or for what another call does in less."""

    name: str  # a stable identifier
    callee: str  # a regular expression that matches the whole name of the called function, as of `SampledLine.callee`
    wrong: str  # what is wrong with it, after the call and its line
    instead: str  # what to write
    fix: str = ""  # the same as code to copy
    each_batch: bool = True  # whether it is a mistake only in what is done for each batch
    in_loop: bool = False  # whether it is one only in a loop: a single such call may be what has to be done
    within: str = ""  # a regular expression of the parts of the fit in which it is one; "" for all
    left: str = ""  # what a fix leaves of its time, so that all of it is a bound; "" for nothing

    def is_in(self, part: str, line: SampledLine) -> bool:
        """Whether a sampled line of a part of the fit is this mistake."""
        return (
            re.fullmatch(self.callee, line.callee or line.function) is not None
            and (not self.each_batch or _is_of_each_batch(part, line.function))
            and (line.in_loop or not self.in_loop)
            and re.match(self.within, part) is not None
        )


_IN_DATASET: Final = f"data$|{WORKER_LINES}$|validation"

CATALOGUE: Final = (
    Mistake(
        "metric-in-step",
        r"torchmetrics\.(metric\.Metric\.(forward|_wrap_compute.*)|collections\.MetricCollection\.(forward|compute.*))",
        "a metric is computed for each batch, from all that it keeps",
        "Update it in the step, compute it once at the epoch's end: self.auc.update(...) in the step, and "
        "self.log(name, self.auc) or compute() and reset() in the epoch's last hook. One that keeps all predictions "
        "(thresholds=None) takes longer with each batch until it is reset.",
        fix="metric.update(...) in the step; metric.compute(); metric.reset() in on_train_epoch_end",
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
        left="that call",
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
)
"""The calls that are known, the most specific first."""


def mistakes_in(run: RunEvidence) -> Iterator[tuple[Mistake, str, SampledLine]]:
    """Each sampled line of a run that is a mistake, with the part of the fit that it is in."""
    for part, lines in run.lines.items():
        for line in lines:
            found = next((mistake for mistake in CATALOGUE if mistake.is_in(part, line)), None)
            if found is not None:
                yield found, part, line

"""Mistakes that users make: how to know one, what is wrong with it, and what to write instead.

To add one, add a `Mistake`: nothing else has to change. `calls.py` finds them in the sampled lines of a run, or by a
function of `setting.py`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_forge_profiling.diagnosis.setting import (
    Setting,
    are_differentiated,
    are_small,
    attention,
    batch_of_objects,
    checkpointing,
    dense_embedding,
    float64,
    not_updated,
    padding,
    small_batches,
)
from lightning_forge_profiling.names import (
    GC_FULL,
    REGIONS,
    VALIDATION_DATA,
    VALIDATION_STEP,
    VALIDATION_TRANSFER,
)
from lightning_forge_profiling.schema import VALIDATION_WORKER_LINES, WORKER_LINES, Operator, RunEvidence, SampledLine

# hooks and steps of each batch: at an epoch's end the same call is right
_EACH_BATCH: Final = re.compile(r"(_step|forward|_batch_\w+|zero_grad|_backward|_clipping)$|\.<locals>\.")


_OF_EACH_BATCH: Final = frozenset(
    {*REGIONS, WORKER_LINES, VALIDATION_DATA, VALIDATION_TRANSFER, VALIDATION_STEP, VALIDATION_WORKER_LINES}
)


def _is_of_each_batch(part: str, function: str) -> bool:
    """Whether a part of the fit comes with each batch, or else a function in it."""
    in_loop = part in _OF_EACH_BATCH
    return in_loop or _EACH_BATCH.search(part) is not None or _EACH_BATCH.search(function) is not None


_WAITS_PCT: Final = 50.0
_MOST: Final = 50.0
_COMPREHENSIONS: Final = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")  # of their own up to Python 3.11


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
    function: str = ""  # one that the name of the function which makes it begins with
    small: bool = False  # whether it is one only of operators so small that fewer and larger ones do the same in less
    also: str = ""  # another part that is its too: as much of backward as of forward, or all of the collections
    least_pct: float = 0.0  # of the part's time that a line has to have
    comprehension: bool = False  # whether it is one only in a comprehension, where no item needs the one before
    left: str = ""  # what a fix leaves of its time, after "less": all of it is a bound then; "" for nothing
    predicted: bool = True  # whether what a fix saves is known: its time, or at most that
    explains: str = ""  # the code of a finding, in a trace or of the fit, that goes with it
    syncs: bool = False  # whether it reads values of the GPU itself, with no line of the user's that does
    # where the run has it, of one that is no call; with the operators that were recorded
    setting: Callable[[RunEvidence, Sequence[Operator]], Setting | None] | None = None

    def is_in(self, part: str, line: SampledLine, *, small: bool = False) -> bool:
        """Whether a sampled line of a part of the fit is this mistake; `small` says whether the operators are."""
        return (
            bool(self.callee)
            and (not self.small or (small and (line.waiting_pct or 0.0) < _WAITS_PCT))
            and re.match(self.call, line.call) is not None
            and re.match(self.function, line.function) is not None
            and re.fullmatch(self.callee, line.callee or ("" if line.file else line.function)) is not None
            and (not self.each_batch or _is_of_each_batch(part, line.function))
            and (line.in_loop or not self.in_loop)
            and line.pct >= self.least_pct
            and (not self.comprehension or line.function.endswith(_COMPREHENSIONS))
            and re.match(self.within, part) is not None
        )


_IN_DATASET: Final = f"data$|{WORKER_LINES}$|validation(/data|/loader|/worker)?$"

_OF_ONE: Final = r"(?!.*\.(__iter__|__getitems__)$)"  # those are of all samples, of a batch

_IN_STEP: Final = r"(forward|backward|optimizer|other)$|(callback|module)/"
# functions in C, and packages of functions, that are no part of a model as a rule
_BESIDE_MODELS: Final = (
    r"rand\w*|normal_?|standard_normal|choice|permutation|shuffle|uniform_?|arange|linspace|zeros|ones|full|median|"
    r"nanmedian|quantile|unique\w*|bincount|hist\w*|multinomial|tril\w*|triu\w*|combinations|cartesian_prod|loads|dumps|"
    r"findall|finditer"
)
_FUNCTIONS_OF: Final = (
    r"numpy|scipy|pandas|polars|sklearn|skimage|cv2|PIL|librosa|torchvision\.transforms|networkx|shapely|rdkit|re|json|copy|"
    r"random|itertools|collections"
)
_AT_ONCE: Final = (
    "Where one item does not need the one before, do all in one call: of the whole batch, of stacked tensors, with an "
    "index (bincount, index_add_, scatter_add_), or of a list (torch._foreach_mul_); a recurrence over time in one of "
    "nn.GRU, nn.LSTM or nn.RNN. What is only looked at or written down need not come in each step."
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
        syncs=True,
    ),
    Mistake(
        "functional-metric-in-step",
        r"(torchmetrics\.functional|sklearn\.(metrics|utils\._param_validation))\..*",  # which checks its arguments
        "a metric is computed for each batch",
        "Compute it every n steps, or collect what it needs and compute it once at the epoch's end.",
        left="the few that stay",
        syncs=True,
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
        "listed-per-sample",
        r"glob\..*|(<frozen os>|os)\.walk|listdir|scandir|"
        r"pathlib\..*\.(r?glob|iterdir|walk|__lt__|_from_parsed_string)(\.<locals>.*)?",
        "a folder is listed for each sample",
        "List it once, in the dataset's __init__.",
        fix="self.files = sorted(glob.glob(pattern))  # in __init__",
        each_batch=False,
        within=_IN_DATASET,
        function=_OF_ONE,
    ),
    Mistake(
        "opened-per-sample",
        r"(zipfile\.ZipFile|h5py\..*File)\.__init__|connect",
        "a file or a database of many samples is opened for each of them",
        "Open it once in each worker, at its first sample: an open file cannot be sent to workers.",
        fix="if self.file is None: self.file = zipfile.ZipFile(self.path)  # in __getitem__",
        each_batch=False,
        within=_IN_DATASET,
        function=_OF_ONE,
        left="reading the sample",
    ),
    Mistake(
        "query-per-sample",
        r"execute(many)?|fetch(one|all|many)",
        "a database is asked for each sample",
        "Give the columns that the query compares an index (CREATE INDEX), or ask once for the rows of a batch, in "
        "__getitems__(indices).",
        each_batch=False,
        within=_IN_DATASET,
        function=_OF_ONE,
        left="the query with an index",
    ),
    Mistake(
        "parsed-per-sample",
        r"(json|csv|yaml|xml|ast|torch\.serialization)\..*|numpy\.lib\.(npyio|_npyio_impl)\..*|loads|literal_eval",
        "each sample is read and parsed anew",
        "Parse all of them once, in the dataset's __init__ or by a script before training, into one array or tensor, "
        "which can be mapped if it is larger than the memory. More workers only spread the same work.",
        fix='numpy.save("all.npy", rows)  # once; in __init__: self.rows = numpy.load("all.npy", mmap_mode="r")',
        each_batch=False,
        within=_IN_DATASET,
        left="indexing the array",
    ),
    Mistake(
        "collated",
        r"torch\.utils\.data\._utils\.collate\..*",
        "most of loading goes into making batches of samples",
        "Return tensors or arrays from the dataset: of lists each position becomes a tensor of its own, of dicts each "
        "field. Or give it __getitems__(indices), and there index whole tensors, as self.x[indices].",
        each_batch=False,
        within=_IN_DATASET,
        least_pct=_MOST,
        left="stacking one tensor for each field",
    ),
    Mistake(
        "all-samples-per-sample",
        r"(torch\._tensor\.Tensor\.|numpy\..*\.)?_?(mean|std|var|nanmean|nanstd|median|quantile|percentile|sort|argsort|"
        r"unique|histogram|bincount)",
        "most of loading goes into it, sample by sample",
        "What is the same for all samples, as their mean, compute once, in the dataset's __init__; what each has of "
        "its own for all of them at once, there or ahead of time.",
        each_batch=False,
        within=_IN_DATASET,
        least_pct=_MOST,
        left="indexing the result",
    ),
    Mistake(
        "ordered-per-batch",
        r"choice",
        "without replacement it orders all that it draws from, for each batch or sample",
        "Draw numbers in place of an order: random.sample(range(n), k) or numpy.random.default_rng().choice(n, k, "
        "replace=False) for k that differ, torch.randint(n, (k,)) for any.",
        fix="random.sample(range(n), k)",
        call=r"(?!.*\bp\s*=)(np|numpy)\.random\.choice\(.*\breplace\s*=\s*False",
        function=_OF_ONE,
        left="drawing the numbers",
    ),
    Mistake(
        "converted-per-sample",
        r"(torch\.)?(tensor|as_tensor|FloatTensor|LongTensor)|array|asarray",
        "each sample is converted from Python objects, or copied",
        "Convert all of them once, in the dataset's __init__, to an array or a tensor, and index that; of an array "
        "take torch.from_numpy, which copies nothing. What is only known in the step is cheaper as one array than as a "
        "list of numbers.",
        each_batch=False,
        within=rf"{_IN_DATASET}|(forward|backward|optimizer|other)$|(callback|module)/.*_batch_",
        left="indexing it",
    ),
    # reading a value from a GPU once a step is none of these: the time in the call is not its cost, as the GPU works
    # meanwhile. It costs the GPU's idle time after it, which a trace shows (`sync-bound`).
    Mistake(
        "check-per-parameter",
        r"isnan|isinf|isfinite",
        "each parameter is checked by itself, and the host reads each answer",
        "Check one number, which is not finite if any gradient is not, every n steps: "
        "torch.nn.utils.get_total_norm(gradients), or what torch.nn.utils.clip_grad_norm_ returns.",
        in_loop=True,
        within=_IN_STEP,
        fix="torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]).isfinite()",
        left="what that call takes",
        explains="sync-bound",
    ),
    Mistake(
        "norm-per-parameter",
        r"norm|torch\._tensor\.Tensor\.norm|torch\.functional\.norm|linalg_vector_norm|vector_norm",
        "a norm is computed for each parameter by itself",
        "Compute all in one call, and read no value of them: torch.nn.utils.get_total_norm(gradients), or what "
        "torch.nn.utils.clip_grad_norm_ returns.",
        in_loop=True,
        fix="torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])",
        left="what that call takes",
        explains="sync-bound",
    ),
    Mistake(
        "clipped-per-parameter",
        r"torch\.nn\.utils\.clip_grad\..*",
        "gradients are clipped parameter by parameter",
        "Clip all parameters in one call, as Trainer(gradient_clip_val=...) does. clip_grad_norm_ then limits the norm "
        "of all gradients together; clip_grad_value_ gives what it gave.",
        in_loop=True,
        call=r"(?!.*param(eter)?s)",  # those of a group, or of one of several models
        within=_IN_STEP,
        fix="torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)",
        left="what that call takes",
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
        left="what that call takes",
    ),
    Mistake(
        "loop-over-time",
        r"torch\.nn\.modules\.rnn\.(LSTM|GRU|RNN)Cell\.forward",
        "a recurrent cell is called for each time step",
        "Call nn.LSTM, nn.GRU or nn.RNN once for the whole sequence: one call of cuDNN in place of a loop in Python.",
        in_loop=True,
        also="backward",
        left="what that call takes",
    ),
    Mistake(
        "logged-each-batch",
        r"(torch\.utils\.tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune|clearml)\..*",
        "it is sent to a logger for each batch",
        "Do it every n steps.",
        fix="if self.global_step % 100 == 0:  # around that line",
        left="that of each n-th step",
    ),
    Mistake(
        "loader-in-step",
        r"torch\.utils\.data\.dataloader\..*",
        "a loader is read anew for each batch: its sampler orders all samples again, and any workers start anew",
        "Keep the iterator, and make a new one only where it ends (StopIteration). Or return all loaders from "
        "train_dataloader() as a dict: each batch is then a dict of one batch of each.",
        fix="batch = next(self.batches)  # self.batches = iter(loader) in on_train_start, and at StopIteration",
        call=r".*\bnext\(\s*iter\(",
        within=_IN_STEP,
        left="reading a batch",
    ),
    Mistake(
        "all-concatenated",
        r"(torch\.|numpy\..*\.)?_?(cat|concat|concatenate|vstack|hstack|append)",
        "it copies what all earlier batches have left, for each batch again",
        "Append each batch's to a list, and concatenate the list once, where it is used.",
        fix="self.outputs.append(output)  # and torch.cat(self.outputs) at the epoch's end",
        call=r".*\b(cat|concat\w*|[vh]stack|append)\([\[(]?\s*(self|module|pl_module)\.\w+\s*,",
        # not in training, where what the model keeps is a part of its input, or a queue of so many
        function=r".*\.(on_\w+|(validation|test|predict)_step|update)$",
        left="one copy of all",
    ),
    Mistake(
        "synced-to-disk",
        r"fsync|fdatasync",
        "it waits each time until the disk has written",
        "Leave it to the system, or do it once an epoch: what is flushed but not synced is lost only in a crash of the "
        "machine, not in one of the program.",
        left="the few that stay",
    ),
    Mistake(
        "copies",
        r"copy\.deepcopy|deepcopy",
        "objects are copied for each batch",
        "Copy what changes alone, or once before training. An average of weights is updated in place: "
        "torch._foreach_lerp_, or Lightning's WeightAveraging.",
    ),
    Mistake(
        "empties-cache",
        r"torch\.cuda\.memory\.empty_cache|empty_cache",
        "it waits for the GPU, and frees memory that the next step allocates again by cudaMalloc",
        "Leave it out, or call it once an epoch: PyTorch uses what it has cached.",
        explains="allocator-churn",
    ),
    Mistake(
        "collects",
        r"collect",
        "it stops training for each batch, and frees nothing that Python would not free by itself",
        "Leave it out, or call it once an epoch.",
        call=r"(?!.*collect\((generation=)?[01]\))",
        also=GC_FULL,
        explains="gc-bound",
    ),
    # a loop over layers calls what it loops over, and not the same module again
    Mistake(
        "module-per-item",
        r".*\.forward|torch\.nn\.functional\..*",
        "it is called for one item at a time, in operators so small that calling is most of their time",
        _AT_ONCE,
        in_loop=True,
        call=r"\w+(\.\w+)+\(",
        within=_IN_STEP,
        small=True,
        also="backward",
        left="one call for all items",
    ),
    Mistake(
        "item-by-item",
        r"(torch\.(?!optim|autograd|nn\.(modules|utils)\.|utils\.data\.|.*\.(forward|backward)$).*|[^.]*)",
        "a loop does one item at a time, in calls so small that calling is most of their time",
        _AT_ONCE,
        in_loop=True,
        within=_IN_STEP,
        small=True,
        also="backward",
        left="one call for all items",
    ),
    Mistake(
        "modules-side-by-side",
        r".*\.forward",
        "modules are called one after the other, in operators so small that calling is most of their time",
        "Modules of the same kind are one: a Linear with all their outputs, or their stacked parameters in one product "
        "(torch.func.stack_module_state with torch.vmap).",
        in_loop=True,
        call=r"\w+\(",
        within=r"forward$",
        small=True,
        comprehension=True,
        also="backward",
        least_pct=_MOST,
        left="one call for all of them",
    ),
    Mistake(
        "one-hot",
        r"(torch\.nn\.functional\.)?one_hot|float|to|type|half|bfloat16|double",  # of what one_hot returns
        "it fills rows of zeros, to be read again for one element of each",
        "Index in place of multiplying: nn.Embedding in place of a Linear of one-hot rows, "
        "nn.functional.cross_entropy(logits, indices) in place of one-hot targets, gather() in place of a product and "
        "a sum.",
        call=r".*\bone_hot\(",
    ),
    # without a graph of its own it is no part of the loss, and with the graph kept backward comes besides
    Mistake(
        "gradients-again",
        r"torch\.autograd\.(functional\..*|grad)",
        "gradients are computed besides those of backward",
        "To look at them each n-th step is enough; those of several losses take one call for their sum.",
        fix="if self.global_step % 100 == 0:  # around that line",
        call=r"(?!.*create_graph=True).*retain_graph=True",
        left="that of each n-th step",
    ),
    Mistake(
        "factorization",
        r"(torch\.)?(_?linalg\w*\.)?(inv|inverse|pinv|svd|svdvals|eig|eigh|eigvals|eigvalsh|qr|cholesky|det|slogdet|logdet|"
        r"matrix_rank|matrix_exp|matrix_power|lu|lu_factor|cond)",
        "a matrix of the module is factored, which takes as long as many products with it",
        "Do it once, in __init__, unless the matrix is trained, and keep the result by register_buffer(). Of one that "
        "is trained, torch.linalg.solve() takes the place of a product with an inverse, a step of power iteration that "
        "of a spectral norm (torch.nn.utils.parametrizations.spectral_norm).",
        fix='self.register_buffer("inverse", torch.linalg.inv(matrix))  # in __init__',
        call=r".*\(self\.[\w.]+[,)]",
        within="forward$",
        left="what a trained matrix needs",
    ),
    Mistake(
        "norm-by-svd",
        r"(torch\.functional\.)?(linalg_)?(matrix_)?norm",
        "this norm of a matrix is computed from all of its singular values",
        "A step of power iteration, with the vector of the last step, gives the largest one: "
        "torch.nn.utils.parametrizations.spectral_norm. The norm of all elements (Frobenius) needs none.",
        fix="torch.nn.utils.parametrizations.spectral_norm(layer)",
        call=r".*\bmatrix_norm\([^,]*,\s*(ord\s*=\s*)?-?2\b|.*['\"]nuc['\"]",
        within=_IN_STEP,
        also="backward",
        left="a product or two",
    ),
    Mistake(
        "distribution-checked",
        r"torch\.distributions\..*\.__init__",
        "it checks its arguments each time, for which a GPU has to finish its queued work; MultivariateNormal also "
        "factors its covariance",
        "torch.distributions.Distribution.set_default_validate_args(False) once it trains without errors. Give "
        "MultivariateNormal scale_tril, which needs no factorization, in place of covariance_matrix.",
        fix="torch.distributions.Distribution.set_default_validate_args(False)",
        within=_IN_STEP,
        left="making it without checks",
    ),
    Mistake(
        "identity",
        r"(torch\.)?eye",
        "it fills a matrix of zeros, of which few elements count",
        "Index in place of multiplying rows of it: nn.Embedding, gather(). What is a mask, or added to a diagonal, "
        "create once (register_buffer()), or write tensor.diagonal().add_(value).",
        left="what takes its place",
    ),
    Mistake(
        "float64",
        "",
        "operators move twice the bytes that float32 has, and compute at half its speed or less",
        'Leave out Trainer(precision="64-true"), .double() and torch.set_default_dtype(torch.float64), and convert '
        "NumPy arrays, which are float64, to float32.",
        setting=float64,
    ),
    Mistake(
        "batch-of-objects",
        "",
        "Lightning looks for tensors in each list, dict and number of it",
        "Make tensors of the samples in the dataset or in collate_fn, so that a batch is a few objects: of Python "
        "numbers in lists each one is looked at.",
        setting=batch_of_objects,
    ),
    Mistake(
        "padding",
        "",
        "the model computes them for nothing",
        'Pad to the longest sample of each batch, in collate_fn, in place of all to one length (padding="max_length"), '
        "and put samples of like length in a batch: group_by_length=True, or a sampler of your own.",
        fix="pad_sequence(samples, batch_first=True)  # in collate_fn; or DataCollatorWithPadding(tokenizer)",
        left="what the samples of a batch differ by",
        setting=padding,
    ),
    Mistake(
        "not-updated",
        "",
        "backward computes them, and adds to them, for nothing",
        "Call requires_grad_(False) on what is not trained, in __init__, and its forward in torch.no_grad() where "
        "nothing before it is trained. Give the optimizer what is.",
        fix="self.teacher.requires_grad_(False)  # in __init__, of the module that is named",
        left="the gradients of its inputs, where something before it is trained",
        setting=not_updated,
    ),
    Mistake(
        "attention",
        "",
        "the weights of all pairs are written and read again several times",
        "Use one operator that keeps no weights: need_weights=False in calls of nn.MultiheadAttention, "
        'nn.functional.scaled_dot_product_attention in your own code, attn_implementation="sdpa" for a model of '
        "transformers. Where the weights are looked at, ask for them in a few steps.",
        left="that operator, which computes the same products",
        setting=attention,
    ),
    Mistake(
        "small-batches",
        "",
        "each batch is so small that calling the operators is most of its time",
        "Make the batches larger, as far as the memory goes, and accumulate over fewer of them: an update is then of "
        "the same samples. BatchNorm, and a loss that is no mean over equally many terms, make a difference.",
        fix="DataLoader(..., batch_size=N)  # and 1/N of accumulate_grad_batches",
        predicted=False,  # the loop around each batch goes too, and larger batches may take longer
        setting=small_batches,
    ),
    Mistake(
        "activation-checkpointing",
        "",
        "backward computes forward again, and at least half of the memory is never used",
        "Switch it off, call the modules themselves, or checkpoint fewer of them.",
        fix="model.gradient_checkpointing_disable()  # timm: set_grad_checkpointing(False); by hand: layer(x)",
        setting=checkpointing,
    ),
    Mistake(
        "most-of-forward",
        rf"{_BESIDE_MODELS}|({_FUNCTIONS_OF})\..*",
        "it takes most of forward, and is no module of the model",
        "Move what does not change from batch to batch to __init__ (tensors by register_buffer()), what depends on the "
        "samples alone to the dataset, and what is only looked at to each n-th step.",
        within="forward$",
        least_pct=_MOST,
        left="what has to be done for each batch",
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
        setting=dense_embedding,
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
    small, differentiated = are_small(run, recorded), are_differentiated(run, recorded)
    collections = False  # whether they have their cause
    for part, line in ((part, line) for part, lines in run.lines.items() for line in lines):
        found = next((mistake for mistake in CATALOGUE if mistake.is_in(part, line, small=small)), None)
        if found is None:
            continue
        made = Made(found, part, line.pct / 100, place_of(line), line)
        yield made
        if found.also == "backward" and part == "forward" and differentiated:
            yield made._replace(part="backward")
        elif found.also == GC_FULL and part not in REGIONS and not collections:  # the time of a region has them in it
            collections = True
            yield made._replace(part=GC_FULL, share=1.0)
    yield from _settings_in(run, recorded)


def _settings_in(run: RunEvidence, recorded: Sequence[Operator]) -> Iterator[Made]:
    for mistake in CATALOGUE:
        setting = None if mistake.setting is None else mistake.setting(run, recorded)
        if setting is not None:
            lines = run.lines.get("forward", ()) if setting.callee else ()
            place = next((place_of(line) for line in lines if line.callee.endswith(setting.callee)), setting.place)
            yield from (Made(mistake, part, share, place) for part, share in setting.shares.items())


# calls after which the host has to wait for the GPU: those whose value it needs
_READS: Final = re.compile(r"\.(item|cpu|numpy|tolist|nonzero)\(|\b(float|int|bool|print)\(|\.to\(.cpu")
_READERS: Final = frozenset({"item", "cpu", "numpy", "tolist", "nonzero"})


def reads(line: SampledLine) -> bool:
    """Whether a line is a call for a value that the GPU has to compute first."""
    return line.callee in _READERS or _READS.search(line.call) is not None


_LONGEST: Final = 60


def place_of(line: SampledLine) -> str:
    """The call and its line, as `self.auc.compute() at model.py:41`; else the line and its function."""
    if not line.file:
        return line.function.rpartition(".")[2]
    call, at = line.call, f"{line.file}:{line.line}"
    if len(call) > _LONGEST or call.endswith("..."):
        call = f"{name}(...)" if (name := call.partition("(")[0]) else ""
    is_call = call and (line.callee or "(" in call) and len(call) <= _LONGEST and not call.startswith(("for ", "with "))
    return f"{call} at {at}" if is_call else f"{at} {line.function}"

"""Everything that the callbacks use of Lightning beyond its documented interface."""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, reduce, wraps
from importlib import import_module
from importlib.util import find_spec
from operator import truediv
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from lightning_forge_profiling.callbacks.folders import Folder, folder_of
from lightning_forge_profiling.flops.precision import dtype_name, parameter_dtype
from lightning_forge_profiling.results.analysis import TrackedRun

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    # `lightning.pytorch` and `pytorch_lightning` are two packages with the same contents, and each one's Trainer and
    # command line accept its own callbacks only. Which one the user will import is not known here, so ours descend
    # from both where both are installed.
    _homes = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)]
    _classes = [import_module("lightning.pytorch" if name == "lightning" else name).Callback for name in _homes]
    Callback = _classes[0] if len(_classes) == 1 else type("Callback", tuple(_classes), {})
    LightningModule = Any

# Any: the Trainer's class does not declare most of its attributes, and there are two such classes
Trainer: TypeAlias = Any

__all__ = [
    "LOGGING_ATTRIBUTES",
    "MANUAL_HOOKS",
    "Actions",
    "BatchSource",
    "Callback",
    "LightningModule",
    "StepProgress",
    "TimedMethod",
    "TimedRows",
    "Trainer",
    "WatchedLoop",
    "actions",
    "batch_source",
    "batches_per_row",
    "compute_dtype",
    "device_name",
    "devices_per_batch",
    "ends_epoch",
    "evaluation_source",
    "implemented_hooks",
    "is_accumulating",
    "is_own_action",
    "is_pass_through",
    "is_trial_run",
    "last_logger_step",
    "logger_folder",
    "logger_step",
    "logs_now",
    "may_be_last",
    "replicas",
    "run_folder",
    "set_hook",
    "show_in_progress_bar",
    "step_progress",
    "timed_finalize",
    "timed_last_teardown",
    "timed_logging",
    "timed_originals",
    "timed_restoring",
    "timed_rows",
    "timed_values",
    "tracked_runs",
    "training_loaders",
    "uses_pytorch_profiler",
    "validation_loaders",
    "worker_processes",
]


MANUAL_HOOKS = ("on_before_backward", "on_after_backward")
"""The hooks of ours that only manual optimization needs: elsewhere the Trainer's profiler announces backward."""


LOGGING_ATTRIBUTES = ("log", "log_dict")
"""What Lightning sets on each callback at the start of a run, bound to the module, and never removes."""


class Actions(NamedTuple):
    """The names of the actions that Lightning announces to `trainer.profiler`, by what they delimit."""

    regions: Mapping[str, str] = MappingProxyType({})
    """Each is one region, from its beginning to its end."""
    saves: Collection[str] = ()
    """Save a checkpoint."""
    state_collected: Collection[str] = ()
    """The last action of such a save before its file is written."""
    may_save: Collection[str] = ()
    """Hooks of callbacks that save checkpoints and then remove older ones."""
    loader_starts: Collection[str] = ()
    """After each of them the loop creates its loader or the loader's iterator."""
    loader_started: Collection[str] = ()
    """The first action after that which is not a region."""
    epochs: Collection[str] = ()
    """Each is one training epoch, from its beginning to its end."""
    validation_begins: Collection[str] = ()
    validation_ends: Collection[str] = ()
    fetched: Callable[[], object] = bool
    """Called when a fetch is about to end."""


_STACK_REGIONS = {
    ("loops", "__next__"): "data",
    ("strategies", "batch_to_device"): "transfer",
    ("strategies", "training_step"): "forward",
    ("strategies", "backward"): "backward",
    ("strategies", "optimizer_step"): "optimizer",
    ("_utils", "fetch"): "data",  # in a loader's worker
}


def stack_region(file: str, function: str) -> str | None:
    """The region whose outermost function in Lightning's code this is; "" for one of validation, None for no such."""
    within = re.split(r"/pytorch/|/utils/data/", file)[-1]
    if within == "loops/evaluation_loop.py":
        return ""
    return _STACK_REGIONS.get((within.partition("/")[0], function))


def has_unsized_loader(trainer: Trainer) -> bool:
    """Whether only a fetch finds out that the training loader has no more batches."""
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    return fetcher is not None and fetcher.length is None


def has_exhausted_loader(trainer: Trainer) -> bool:
    """Whether the fetch that is about to end has found that."""
    return has_unsized_loader(trainer) and trainer.fit_loop._data_fetcher.done  # noqa: SLF001


def actions(trainer: Trainer, module: LightningModule) -> Actions:
    """The action names of this run."""
    of_module, of_strategy = (
        f"[LightningModule]{type(module).__name__}.",
        f"[Strategy]{type(trainer.strategy).__name__}.",
    )
    of_data = f"[LightningDataModule]{type(trainer.datamodule).__name__}."
    return Actions(
        regions={
            "[_TrainingEpochLoop].train_dataloader_next": "data",
            f"{of_strategy}batch_to_device": "transfer",
            **{
                f"{of}on_before_batch_transfer": "transfer"
                for of, owner in ((of_module, module), (of_data, trainer.datamodule))
                if "on_before_batch_transfer" in implemented_hooks(owner)
            },
            f"{of_strategy}training_step": "forward",
            f"{of_strategy}backward": "backward",
            f"{of_module}optimizer_step": "optimizer",
            "optimizer_step": "optimizer",  # manual optimization
        },
        saves=("save_checkpoint",),
        state_collected=(f"{of_module}on_save_checkpoint",),
        may_save=tuple(
            f"[Callback]{callback.state_key}.{hook}"
            for callback in trainer.checkpoint_callbacks
            for hook in ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")
        ),
        # an epoch begins with the loader's iterator; with reload_dataloaders_every_n_epochs another is made before
        epochs=("run_training_epoch",),
        loader_starts=("run_training_epoch", f"{of_module}train_dataloader", f"{of_data}train_dataloader"),
        loader_started=(f"[Callback]{trainer.callbacks[0].state_key}.on_train_epoch_start",),
        # the second where gradients go on being accumulated, which the first would delete
        validation_begins=(f"{of_module}on_validation_model_zero_grad", f"{of_module}on_validation_model_eval"),
        validation_ends=(f"{of_strategy}on_validation_end",),
    )


_WITHOUT_EFFECT = tuple(
    f"{package}.{module}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module in ("callbacks.callback", "core.hooks", "core.module", "core.datamodule")
)
"""The modules of the hooks that Lightning calls on whoever does not implement them."""


def implemented_hooks(owner: object) -> list[str]:
    """The hooks that a callback, a module or a data module implements itself, on its class or on the object."""
    classes = type(owner).__mro__
    hooks = {name for base in classes if base.__module__ in _WITHOUT_EFFECT for name in vars(base)}
    own = {name for base in classes if base.__module__ not in _WITHOUT_EFFECT for name in vars(base)}
    own |= vars(owner).keys() if hasattr(owner, "__dict__") else set()
    return sorted(name for name in hooks & own if not name.startswith("_"))


class TimedMethod:
    """Wraps a method of one of Lightning's objects, which has no hook around it."""

    def __init__(
        self,
        owner: Any,
        name: str,
        around: Callable[[], AbstractContextManager[None]],
        when: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        self._owner, self._name, self._around, self._when = owner, name, around, when
        if hasattr(type(owner), name) and name not in vars(owner):
            setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        method = getattr(type(self._owner), self._name)
        if not self._when(*args, **kwargs):
            return method(self._owner, *args, **kwargs)
        with self._around():
            return method(self._owner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the object has its own method."""
        return getattr, (self._owner, self._name)  # of the class: the copy has no attribute yet

    def release(self) -> None:
        """Restore the object's own method."""
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)


def timed_logging(trainer: Trainer, around: Callable[[], AbstractContextManager[None]]) -> TimedMethod:
    """Wraps the Trainer's own way to give a row to its loggers, `self.log` and the end of an epoch included."""
    return TimedMethod(trainer._logger_connector, "log_metrics", around)  # noqa: SLF001


class TimedRows:
    """Wraps a method of a logger's class, as that for a row, which a module may call itself.

    The class's, because a logger may be copied during a fit, or refuse attributes.
    """

    def __init__(self, owner: Any, name: str, around: Callable[[Any], AbstractContextManager[None]]) -> None:
        self.around: Callable[[Any], AbstractContextManager[None]] = around
        original, mine = getattr(owner, name), weakref.ref(self)  # the class outlives the fit

        @wraps(original)
        def method(logger: Any, *args: Any, **kwargs: Any) -> Any:
            timed = mine()
            with nullcontext() if timed is None else timed.around(logger):
                return original(logger, *args, **kwargs)

        setattr(owner, name, method)
        self._restore = weakref.finalize(self, _restore_rows, owner, name, original, method)  # or if a fit is abandoned

    def release(self) -> None:
        """Restore the class's own method; let calls through if somebody else has wrapped ours since."""
        self.around = nullcontext
        self._restore()


def _restore_rows(owner: Any, name: str, original: object, ours: object) -> None:
    if getattr(owner, name) is ours:
        setattr(owner, name, original)


def timed_rows(trainer: Trainer, around: Callable[[str], AbstractContextManager[None]]) -> list[TimedRows]:
    """Wraps how the fit's loggers take a row."""
    return _timed_loggers(trainer, "log_metrics", around)


def timed_finalize(trainer: Trainer, around: Callable[[str], AbstractContextManager[None]]) -> list[TimedRows]:
    """Wraps how the fit's loggers end, where they upload and close files."""
    return _timed_loggers(trainer, "finalize", around)


def _timed_loggers(
    trainer: Trainer, name: str, around: Callable[[str], AbstractContextManager[None]]
) -> list[TimedRows]:
    loggers = tuple(trainer.loggers)

    def of_fit(logger: Any) -> AbstractContextManager[None]:
        known = any(logger is one for one in loggers)
        return around(f"logger/{type(logger).__name__}.{name}") if known else nullcontext()

    owners = (
        next((base for base in type(logger).__mro__ if isinstance(vars(base).get(name), FunctionType)), None)
        for logger in loggers
    )
    return [TimedRows(owner, name, of_fit) for owner in dict.fromkeys(owners) if owner is not None]


def timed_last_teardown(trainer: Trainer, over: Callable[[], object]) -> TimedMethod:
    """Calls `over` when Lightning has done all it does in a fit that has failed."""

    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        finally:
            over()

    return TimedMethod(trainer._signal_connector, "teardown", around)  # noqa: SLF001


def timed_values(
    trainer: Trainer,
    log: Callable[[], AbstractContextManager[None]],
    epoch: Callable[[], AbstractContextManager[None]],
) -> tuple[TimedMethod, TimedMethod]:
    """Wraps how the training loop takes what `self.log` gives it, and how it computes that at an epoch's end."""
    results = trainer.fit_loop.epoch_loop._results  # noqa: SLF001

    def is_eager(*_: Any, **__: Any) -> bool:
        return not torch.compiler.is_compiling()

    return (
        TimedMethod(results, "log", log, is_eager),
        TimedMethod(results, "metrics", epoch, lambda on_step: not on_step),
    )


def timed_originals(
    trainer: Trainer, module: LightningModule, around: Callable[[str], AbstractContextManager[None]]
) -> list[TimedMethod]:
    """Wraps what a module's own hook calls to do Lightning's work: the update with its closure, and the clipping."""
    originals = {
        "optimizer_step": (trainer.strategy, "optimizer_step"),
        "configure_gradient_clipping": (trainer.precision_plugin, "clip_gradients"),
    }
    hooks = implemented_hooks(module)
    return [TimedMethod(*original, partial(around, hook)) for hook, original in originals.items() if hook in hooks]


def timed_restoring(
    trainer: Trainer, around: Callable[[], AbstractContextManager[None]]
) -> tuple[TimedMethod, TimedMethod]:
    """Wraps the Trainer's ways to restore a checkpoint: weights and callbacks, then loops and optimizers."""
    connector = trainer._checkpoint_connector  # noqa: SLF001

    def restores(path: object = None, *_: Any, **__: Any) -> bool:
        return bool(path or connector._loaded_checkpoint)  # noqa: SLF001

    return (
        TimedMethod(connector, "_restore_modules_and_callbacks", around, restores),
        TimedMethod(connector, "restore_training_state", around, restores),
    )


def is_own_action(name: str) -> bool:
    """Whether Lightning itself announces this action in every batch; other names are the user's."""
    return name[:1] == "[" or name == "run_training_batch"


def is_pass_through(profiler: object) -> bool:
    """Whether a profiler is Lightning's placeholder for none."""
    return type(profiler).__name__ == "PassThroughProfiler"


def set_hook(callback: Any, name: str, *, on: bool) -> None:
    """Switch a hook of a callback on or off: Lightning skips one that is not callable.

    Each hook that it calls costs a context manager, a call and two formatted strings per batch.
    """
    if on:
        callback.__dict__.pop(name, None)
    else:
        callback.__dict__[name] = None


def show_in_progress_bar(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Show metrics in the progress bar."""
    trainer.progress_bar_metrics.update(metrics)


class WatchedLoop:
    """Wraps the `run` of one of Lightning's loops, to be called when it begins and when an exception ends it.

    Lightning calls the hook `on_exception` only in the process that launched the ranks, not in spawned or forked ones,
    and not on a callback behind one whose own `on_exception` raises. And validation during gradient accumulation
    announces nothing before it has started its loader's workers.
    """

    def __init__(
        self,
        loop: Any,
        *,
        begins: Callable[[], object] | None = None,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._loop, self._begins, self._failed = loop, begins, failed
        self._run = loop.__dict__.get("run")  # somebody else's; the loop's own could not always be pickled
        loop.run = self

    def __call__(self) -> Any:
        """Run the loop."""
        if self._begins is not None:
            self._begins()
        try:
            return type(self._loop).run(self._loop) if self._run is None else self._run()
        except BaseException as exc:
            if self._failed is not None:
                self._failed(exc)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the loop has its own `run`."""
        return getattr, (self._loop, "run")  # of the class: the copy has no attribute yet

    def release(self) -> None:
        """Restore the loop's own `run`."""
        if self._loop.__dict__.get("run") is self:
            del self._loop.run
            if self._run is not None:
                self._loop.run = self._run


def is_accumulating(trainer: Trainer) -> bool:
    """Whether gradient accumulation continues after this batch."""
    return bool(trainer.fit_loop._should_accumulate())  # noqa: SLF001


def batches_per_row(trainer: Trainer, every_n_steps: int | None) -> int:
    """How many batches there are from one `logs_now` to the next."""
    interval = trainer.log_every_n_steps if every_n_steps is None else every_n_steps
    return int(interval * trainer.accumulate_grad_batches)


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the batch that has just ended is its epoch's last."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)  # `trainer.is_last_batch`, in fewer calls


class StepProgress(NamedTuple):
    """The loop's own progress counters; they keep counting with it."""

    batches: Any
    """Its `is_last_batch` tells whether the batch that has just ended is the epoch's last, its `total.ready` is the
    number of the batch under way, which counts on over epochs and also where a batch is skipped."""
    updates: Any
    """Its `completed` is the number of optimizer steps, as `trainer.global_step`."""


def step_progress(trainer: Trainer, module: LightningModule) -> StepProgress:
    """The progress counters of the training loop."""
    loop = trainer.fit_loop.epoch_loop
    if module.automatic_optimization:
        return StepProgress(loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step.total)
    return StepProgress(loop.batch_progress, loop.manual_optimization.optim_step_progress.total)


def logger_step(trainer: Trainer) -> int:
    """The x-axis of `self.log` during a training batch."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001


def last_logger_step(trainer: Trainer) -> int:
    """The x-axis of `self.log` in the last training batch, once the training loop has ended."""
    return max(logger_step(trainer) - 1, 0)


def logs_now(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Whether Lightning would log at the end of this batch, at its own interval or at `every_n_steps`."""
    interval = trainer.log_every_n_steps if every_n_steps is None else every_n_steps
    return bool(interval) and not (logger_step(trainer) + 1) % interval and not is_accumulating(trainer)


def may_be_last(trainer: Trainer) -> bool:
    """Whether the batch that has just ended may have been the fit's last."""
    if (
        trainer.should_stop
        or trainer.received_sigterm
        or (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps)
    ):
        return True
    last_epoch = trainer.max_epochs not in {None, -1} and trainer.current_epoch + 1 >= trainer.max_epochs
    return bool(trainer.is_last_batch and last_epoch)


class BatchSource(NamedTuple):
    """The loaders that a training batch comes from."""

    loaders: Sequence[Any]
    """All training loaders, mostly one DataLoader."""
    ends_epoch: bool = False
    """Whether the batch is the last of its epoch."""
    fetched_by_module: bool = False
    """Whether `training_step` fetches by itself from a `dataloader_iter`."""
    one_a_step: bool = True
    """Whether it is all that its step fetched, as always where Lightning does the fetching."""


def batch_source(trainer: Trainer) -> BatchSource:
    """The loaders that the batch that has just ended comes from."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    fetcher = loop._data_fetcher  # noqa: SLF001
    own = type(fetcher).__name__ == "_DataLoaderIterDataFetcher"
    return BatchSource(
        loop._combined_loader.flattened,  # noqa: SLF001
        ends_epoch(trainer),
        own,
        not own or fetcher.fetched == progress.current.ready,
    )


def evaluation_source(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> BatchSource:
    """The loaders that a batch of validation, test or prediction comes from."""
    loop = trainer._active_loop  # noqa: SLF001
    loaders, fetcher = loop._combined_loader.flattened, loop._data_fetcher  # noqa: SLF001
    if loop._combined_loader._mode == "sequential":  # noqa: SLF001
        loaders = loaders[dataloader_idx : dataloader_idx + 1]
    own = type(fetcher).__name__ == "_DataLoaderIterDataFetcher"
    one_a_step = not own or fetcher.fetched == loop.batch_progress.current.ready
    return BatchSource(loaders, batch_idx + 1 >= loop.max_batches[dataloader_idx], own, one_a_step)


def training_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders of this fit, mostly one DataLoader; empty before the training loop has set them up."""
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001
    return [] if combined is None else list(combined.flattened)


def validation_loaders(trainer: Trainer) -> list[Any]:
    """The validation loaders of this fit; empty before the first validation has set them up."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader  # noqa: SLF001
    return [] if combined is None else list(combined.flattened)


def worker_processes(trainer: Trainer) -> list[int]:
    """Process ids of the training loaders' workers that are running."""
    iterators = getattr(getattr(trainer.fit_loop._combined_loader, "_iterator", None), "iterators", ())  # noqa: SLF001
    return [worker.pid for iterator in iterators for worker in getattr(iterator, "_workers", ()) if worker.pid]


def replicas(trainer: Trainer) -> int:
    """The number of data-parallel replicas; tensor-parallel ranks share one."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return max(int(sampler.get("num_replicas", 1)), 1) if sampler else 1


def devices_per_batch(trainer: Trainer) -> int:
    """How many ranks share a batch, as tensor-parallel ones do."""
    return max(int(trainer.world_size) // replicas(trainer), 1)


def compute_dtype(trainer: Trainer) -> str:
    """The type that this run's matrix products compute in, once its strategy has set the model up.

    It is autocast's type, else the type that FSDP casts parameters to, else the parameters' own. A `torch.autocast` in
    the module itself is not visible here.
    """
    plugin = trainer.precision_plugin
    precision = str(plugin.precision)
    if precision.startswith("transformer-engine"):
        return "fp8"
    if precision in _MIXED:
        return _MIXED[precision]
    model = trainer.strategy.model
    if (sharded := _sharded_dtype(model)) is not None:
        return sharded
    if precision in _TRUE:
        return _TRUE[precision]
    if isinstance(dtype := getattr(plugin, "dtype", None), torch.dtype):  # bitsandbytes: what it dequantizes to
        return dtype_name(dtype) or "fp32"
    return parameter_dtype(model)  # at "32-true" Lightning leaves them as the module made them


_MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_TRUE = {"bf16-true": "bf16", "16-true": "fp16", "64-true": "fp64"}


def _sharded_dtype(model: nn.Module) -> str | None:
    """The type that FSDP 1 or 2 casts the parameters of most of its units to; None if it casts none."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415  (slow to import)

    units: Counter[torch.dtype] = Counter()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            policy = part._get_fsdp_state()._mp_policy  # noqa: SLF001
        elif isinstance(part, FullyShardedDataParallel):
            policy = part.mixed_precision
        else:
            continue
        if policy.param_dtype is not None:
            units[policy.param_dtype] += 1
    return dtype_name(units.most_common(1)[0][0]) if units else None


def uses_pytorch_profiler(trainer: Trainer) -> bool:
    """Whether the Trainer's own profiler is `torch.profiler` already."""
    return any(base.__name__ == "PyTorchProfiler" for base in type(trainer.profiler).__mro__)


def is_trial_run(trainer: Trainer) -> bool:
    """Whether this fit is not the real one: `fast_dev_run`."""
    return bool(trainer.fast_dev_run)


def device_name(trainer: Trainer) -> str:
    """The device that the run trains on, in words."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def run_folder(trainer: Trainer) -> Folder:
    """The folder of this run and of no other: of TensorBoard's logger, else of the Trainer's first logger with one.

    A logger without a folder for each run has the one that Lightning puts its checkpoints into, so that the files of a
    run lie together and outside of what belongs to the tracker. Without a logger it is the Trainer's default folder.

    This is a collective: call it on every rank.
    """
    found = logger_folder(trainer) or folder_of(trainer.default_root_dir) if trainer.is_global_zero else None
    folder: Folder = trainer.strategy.broadcast(found)
    return folder


def logger_folder(trainer: Trainer) -> Folder | None:
    """The folder of this run that its loggers give it; None without a logger. For rank 0; no collective."""
    loggers = sorted(trainer.loggers, key=_is_tensorboard, reverse=True)  # stable: the others stay in their order
    return next(filter(None, (_folder(logger, trainer.default_root_dir) for logger in loggers)), None)


def _folder(logger: Any, root: str) -> Folder | None:
    try:
        if own := getattr(logger, "log_dir", None):
            return folder_of(own)
        run, saved = tracked_run(logger), logger.save_dir
        version = f"version_{run.version}" if isinstance(logger.version, int) else run.version
        if not (saved or run.name or version):
            return None
        return reduce(truediv, filter(None, (run.name, version)), folder_of(saved or root))
    except Exception:  # a server's, which may be gone by the end of the fit
        return None


def tracked_runs(trainer: Trainer) -> tuple[TrackedRun, ...]:
    """What each logger calls this run. For rank 0."""
    runs = []
    for logger in trainer.loggers:
        with suppress(Exception):  # a server's, as above
            runs.append(tracked_run(logger))
    return tuple(runs)


def tracked_run(logger: Any) -> TrackedRun:
    """What a logger calls this run."""
    name, version = ("" if said is None else str(said) for said in (logger.name, logger.version))
    return TrackedRun(logger=type(logger).__name__, name=name, version=version)


def _is_tensorboard(logger: Any) -> bool:
    return any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__)

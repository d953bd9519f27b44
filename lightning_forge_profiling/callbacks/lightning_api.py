"""What the callbacks use of Lightning's Trainer and module beyond its documented interface."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn

from lightning_forge_profiling.flops.precision import dtype_name, parameter_dtype
from lightning_forge_profiling.names import VALIDATION_DATA, VALIDATION_STEP, VALIDATION_TRANSFER
from lightning_forge_profiling.run.training import BatchSource

PACKAGES: Final = ("pytorch_lightning", "lightning.pytorch")

if TYPE_CHECKING:
    import lightning.pytorch
    import lightning.pytorch.profilers

    Callback = lightning.pytorch.Callback
    PassThroughProfiler = lightning.pytorch.profilers.PassThroughProfiler
    LightningModule: TypeAlias = lightning.pytorch.LightningModule
else:
    # `lightning.pytorch` and `pytorch_lightning` are two packages with the same contents, and each one's Trainer and
    # command line accept its own callbacks only. Ours descend from what is imported, since the other was 221 of the
    # 581 ms that importing ours took (`-X importtime`, two CPU cores, 2026-11-27). Where neither is imported they
    # descend from both: which one the user will import is not known then.
    def _is_installed(home: str) -> bool:
        return find_spec(home.partition(".")[0]) is not None

    _imported = [home for home in PACKAGES if home in sys.modules]
    # Each of them, when imported, makes Lightning's messages its own: the logger that they go to, by which users
    # silence them. They stay with the one that is imported already, or else with `lightning`, the last here.
    _messages = sys.modules.get("lightning_utilities.core.rank_zero")
    _before = dict(vars(_messages)) if _messages and _imported else {}
    _homes = [import_module(home) for home in _imported or filter(_is_installed, PACKAGES)]
    if _messages:
        vars(_messages).update(_before)

    Callback = type("Callback", tuple(home.Callback for home in _homes), {})
    PassThroughProfiler = type("PassThroughProfiler", tuple(home.profilers.PassThroughProfiler for home in _homes), {})
    LightningModule = Any


def accept_late_imports() -> None:
    """Have our callbacks and profiler descend from the package that was imported since, too."""
    for package in PACKAGES:
        home = sys.modules.get(package)
        if home is not None and hasattr(home, "Callback") and not issubclass(Callback, home.Callback):
            Callback.__bases__ += (home.Callback,)
            PassThroughProfiler.__bases__ += (home.profilers.PassThroughProfiler,)


# Any: the Trainer's class does not declare most of its attributes, and there are two such classes
Trainer: TypeAlias = Any


class Actions(NamedTuple):
    """The names of the actions that Lightning announces to `trainer.profiler`, by what they delimit."""

    regions: Mapping[str, str] = MappingProxyType({})  # each is one region, from its beginning to its end
    saves: Collection[str] = ()  # save a checkpoint
    state_collected: Collection[str] = ()  # the last action of such a save before its file is written
    may_save: Collection[str] = ()  # hooks of callbacks that save checkpoints and then remove older ones
    loader_starts: Collection[str] = ()  # after each of them the loop creates its loader or the loader's iterator
    loader_started: Collection[str] = ()  # the first action after that which is not a region
    epochs: Collection[str] = ()  # each is one training epoch, from its beginning to its end
    validation_begins: Collection[str] = ()
    validation_fetches: Collection[str] = ()
    validation_ends: Collection[str] = ()
    fetched: Callable[[], object] = lambda: None  # called when a fetch is about to end
    fetches_to_validate: Callable[[], object] = lambda: None  # called when a fetch of validation begins


def actions(trainer: Trainer, module: LightningModule) -> Actions:
    """The action names of this run."""
    of_module = f"[LightningModule]{type(module).__name__}."
    of_strategy = f"[Strategy]{type(trainer.strategy).__name__}."
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
            f"{of_strategy}validation_step": VALIDATION_STEP,
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
        validation_fetches=("[_EvaluationLoop].val_next",),
        validation_ends=(f"{of_strategy}on_validation_end",),
    )


def evaluation_parts(trainer: Trainer, loop: str) -> dict[str, str]:
    """The parts of the ledger that actions of a loop without training are, by their names: those of a validation."""
    of_strategy = f"[Strategy]{type(trainer.strategy).__name__}."
    kind, prefix = ("_PredictionLoop", loop) if loop == "predict" else ("_EvaluationLoop", loop.removesuffix("idation"))
    return {
        f"[{kind}].{prefix}_next": VALIDATION_DATA,
        f"{of_strategy}batch_to_device": VALIDATION_TRANSFER,
        f"{of_strategy}{loop}_step": VALIDATION_STEP,
    }


# the modules of the hooks that Lightning calls on whoever does not implement them
_WITHOUT_EFFECT = tuple(
    f"{package}.{module}"
    for package in PACKAGES
    for module in ("callbacks.callback", "core.hooks", "core.module", "core.datamodule")
)


def implemented_hooks(owner: object) -> list[str]:
    """The hooks that a callback, a module or a data module implements itself, on its class or on the object."""
    hooks: set[str] = set()
    own = set(getattr(owner, "__dict__", ()))
    for base in type(owner).__mro__:
        (hooks if base.__module__ in _WITHOUT_EFFECT else own).update(vars(base))
    return sorted(name for name in hooks & own if not name.startswith("_"))


def logger_step(trainer: Trainer) -> int:
    """The x-axis of `self.log` during a training batch."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001


def replicas(trainer: Trainer) -> int:
    """The number of data-parallel replicas; tensor-parallel ranks share one."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return max(int(sampler.get("num_replicas", 1)), 1) if sampler else 1


def compute_dtype(trainer: Trainer) -> str:
    """The type that matrix products compute in: autocast's, else what FSDP casts to, else the parameters' own."""
    # a `torch.autocast` in the module itself is not visible here
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


def batch_source(trainer: Trainer) -> BatchSource:
    """The loaders that the batch that has just ended comes from."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    fetcher, loaders = loop._data_fetcher, loop._combined_loader.flattened  # noqa: SLF001
    return BatchSource(loaders, _one_a_step(fetcher, progress), same=not _is_the_module(fetcher))


def _is_the_module(fetcher: Any) -> bool:
    """Whether the module fetches by itself, from a `dataloader_iter`."""
    return type(fetcher).__name__ == "_DataLoaderIterDataFetcher"


def _one_a_step(fetcher: Any, progress: Any) -> bool:
    """Whether as many batches were fetched as steps began."""
    return not _is_the_module(fetcher) or fetcher.fetched == progress.current.ready


def evaluation_source(trainer: Trainer, dataloader_idx: int) -> BatchSource:
    """The loaders that a batch of validation, test or prediction comes from."""
    loop = trainer._active_loop  # noqa: SLF001
    loaders = loop._combined_loader.flattened  # noqa: SLF001
    if loop._combined_loader._mode == "sequential":  # noqa: SLF001
        loaders = loaders[dataloader_idx : dataloader_idx + 1]
    return BatchSource(loaders, _one_a_step(loop._data_fetcher, loop.batch_progress))  # noqa: SLF001

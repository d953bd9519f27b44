"""Settings that an analysis gives advice on: of the loaders, of the optimizer, and switches that slow a run down."""

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from math import ceil, isfinite
from statistics import median
from types import CodeType
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32, has_tf32
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.plain_text import name_of
from lightning_forge_profiling.profiler.collector import records_each_step
from lightning_forge_profiling.ranks.stacks import is_users
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.run.worker_batches import batch_ms
from lightning_forge_profiling.schema import DenseEmbedding, LoaderSettings, OptimizerSettings, Switches


def restarted_workers(training: Training) -> int:
    """How many worker processes the training loaders stop and start between epochs."""
    loaders = [each for each in training.loaders() if isinstance(each, DataLoader)]
    return sum(loader.num_workers for loader in loaders if not loader.persistent_workers)


def optimizer_settings(training: Training) -> OptimizerSettings | None:
    """The first optimizer of a fit; None without one."""
    optimizer = next((getattr(each, "optimizer", each) for each in training.optimizers), None)
    groups = getattr(optimizer, "param_groups", ())
    sizes = [tensor.numel() for group in groups for tensor in group["params"]]
    if not sizes:
        return None
    return OptimizerSettings(
        kind=name_of(optimizer),
        fused=all(bool(group.get("fused")) for group in groups),
        tensors=len(sizes),
        elements=sum(sizes),
        median_elements=int(median(sizes)),
        groups=len(groups),
        manual=not training.automatic,
    )


def loader_settings(training: Training, *, validation: bool = False) -> LoaderSettings | None:
    """The settings of the training loaders as Lightning set them up, with this rank's sampler."""
    loaders = training.loaders(validation=validation)
    if not loaders:
        return None
    of_fit: dict[str, Any] = {
        "kind": name_of(loaders[0]),
        "loaders": len(loaders),
        "cores": usable_cores(),
        "ranks_on_host": training.facts.ranks_on_host,
        "accumulate_grad_batches": training.accumulated,
        "batch_ms": batch_ms(validation=True) if validation else None,
        "batches": int(batches) if validation and isfinite(batches := training.validation_batches()) else None,
    }
    known = [each for each in loaders if isinstance(each, DataLoader)]
    if len(known) < len(loaders):
        return LoaderSettings(**of_fit)
    first, with_workers = known[0], [each for each in known if each.num_workers]
    return LoaderSettings(
        **of_fit,
        num_workers=sum(int(each.num_workers) for each in known),  # which may be NumPy's
        persistent_workers=bool(with_workers) and all(each.persistent_workers for each in with_workers),
        pin_memory=all(each.pin_memory for each in known),
        prefetch_factor=min((int(each.prefetch_factor or 0) for each in with_workers), default=None),
        batch_size=_batch_size(first),
        sampler=_sampler(first),
        unsplit=any(each.worker_init_fn is None and is_unsplit(each.dataset) for each in known),
    )


def is_unsplit(dataset: object) -> bool:
    """Whether each worker would yield all samples. What libraries have splits itself, as `datasets` does."""
    if not isinstance(dataset, IterableDataset):
        return False
    iterates = inspect.unwrap(type(dataset).__iter__)
    code = getattr(iterates, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return False
    methods = [each for kind in type(dataset).__mro__ for each in vars(kind).values()]
    called = [getattr(iterates, "__globals__", {}).get(name) for name in _names(iterates)]
    return not any("get_worker_info" in _names(each) for each in (*methods, *called))


def _names(function: object) -> set[str]:
    """The globals and attributes that the code of a function names."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    inner = () if code is None else (code, *(each for each in code.co_consts if isinstance(each, CodeType)))
    return {name for each in inner for name in each.co_names}


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _sampler(loader: DataLoader[Any]) -> str:
    """The class that chooses the samples: the user's own batch sampler, else the loader's sampler."""
    own = loader.batch_sampler is not None and not isinstance(loader.batch_sampler, BatchSampler)
    return name_of(loader.batch_sampler if own else loader.sampler)


def find_switches(training: Training, *, recording: bool) -> Switches:
    """The switches as they are now, but for the padding of batches. Call it on the training thread."""
    device, loader = training.facts.device, loader_settings(training)
    not_updated, not_updated_pct = _not_updated(training)
    return Switches(
        anomaly_detection=torch.is_anomaly_enabled(),
        launch_blocking=device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"},
        tracer="" if recording else _tracer(),
        profiler=not recording and (training.profiler_taken() or records_each_step()),
        deterministic=_deterministic(device),
        distributed_debug=_distributed_debug(training),
        float64_pct=_float64_pct(training),
        tf32_off=_tf32_off(training, device),
        pin_memory_unused=loader is not None and loader.pin_memory and not torch.accelerator.is_available(),
        embedding=_dense_embedding(training),
        checkpointing=_first_module(training, _is_checkpointed),
        eager_attention=_first_module(training, _is_eager),
        unused_parameters=getattr(training.model, "find_unused_parameters", False) is True,
        not_updated=not_updated,
        not_updated_pct=not_updated_pct,
    )


_FEWEST_POSITIONS: Final = 8


def padding_pct(batch: Any) -> float:
    """The share of the positions of a batch's rows that are padding; 0 for no such rows.

    By the attention mask that tokenizers make, of the shape of `input_ids`; without one, in rows of integers of
    different lengths, by the number that all of them end in. Each row has positions that count, all of them together.
    With pictures or sound besides, the text is a small part of the model or its target; with the rows' lengths, the
    model may pack them.
    """
    try:
        named = {**batch} if isinstance(batch, Mapping) else {}
        parts = [*named.values()] or (batch if isinstance(batch, (list, tuple)) else [batch])
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        mask, ids = named.get("attention_mask"), named.get("input_ids")
        if any(part.dim() > 2 for part in tensors):  # noqa: PLR2004
            return 0.0
        if mask is None:
            rows = [part for part in tensors if part.dim() == 2 and part.dtype in {torch.int64, torch.int32}]  # noqa: PLR2004
            ids = max(rows, key=lambda part: part.shape[1])
            counts = ids.ne(ids[0, -1])
            lengths = counts.sum(1)
            known = ids.shape[1] >= _FEWEST_POSITIONS and not counts[:, -1].any() and bool(lengths.ne(lengths[0]).any())
            for part in tensors:
                wide = part.dim() == 2 and part.is_floating_point() and part.shape[1] >= ids.shape[1]  # noqa: PLR2004
                known &= not wide and not (part.shape == lengths.shape and bool(part.eq(lengths).all()))
        else:
            counts = mask.ne(0)
            known = type(mask) is torch.Tensor and not mask.is_floating_point() and mask.shape == ids.shape  # type: ignore[union-attr]
        usual = known and counts.any(1).all() & (counts.diff(dim=1).sum(1) <= 1).all()
        return 100 * (1 - counts.float().mean()).item() if usual else 0.0
    except Exception:  # whatever a batch of the user's raises
        return 0.0


def _not_updated(training: Training) -> tuple[str, float]:
    """The part of the module with most of the parameters that have gradients for nothing, and how much they are.

    A part of which an optimizer has some has copies of the others in it, as with mixed precision of its own. Tables are
    left out: their gradients are of a few rows.
    """
    own = [each for each in vars(training.module).values() if isinstance(each, torch.optim.Optimizer)]
    optimizers = [*own, *(getattr(each, "optimizer", each) for each in training.optimizers)]
    groups = chain.from_iterable(getattr(each, "param_groups", ()) for each in optimizers)
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    tables = {id(each.weight) for each in training.module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    elements, trained = Counter[str](), set()
    for name, parameter in training.module.named_parameters():
        part = name.partition(".")[0]
        if parameter.grad is not None and id(parameter) not in tables:
            elements[part] += parameter.numel()
            trained |= {part} if id(parameter) in updated else set()
    idle = Counter({part: size for part, size in elements.items() if part not in trained})
    if not trained or not idle:
        return "", 0.0
    return idle.most_common(1)[0][0], 100 * idle.total() / elements.total()


def _first_module(training: Training, has: Callable[[nn.Module], bool]) -> str:
    """The class of the outermost module of the fit that has something; "" for none."""
    return next((type(module).__name__ for module in training.module.modules() if has(module)), "")


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether the switch of transformers (5.24) or of timm (1.0.31) is on."""
    return any(vars(module).get(name) is True for name in ("gradient_checkpointing", "grad_checkpointing"))


def _is_eager(module: nn.Module) -> bool:
    """Whether a model of transformers computes attention by matrix products and a softmax."""
    return getattr(vars(module).get("config"), "_attn_implementation", "") == "eager"


_LARGE: Final = 1_000_000  # elements: filling and updating fewer takes well under a millisecond
_LOOKED_AT: Final = 4096  # rows


def _dense_embedding(training: Training) -> DenseEmbedding | None:
    """The largest embedding whose gradient is a dense tensor."""
    found = [
        (name, module.weight)
        for name, module in training.module.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.numel() >= _LARGE
    ]
    for name, weight in sorted(found, key=lambda each: -each[1].numel()):
        gradient = weight.grad
        # none, sparse, or in parts on several ranks, where looking at it would be a collective
        if type(gradient) is not torch.Tensor or gradient.layout != torch.strided or gradient.shape != weight.shape:
            continue
        some = gradient[:: ceil(len(gradient) / _LOOKED_AT)]
        used = some.ne(0).any(dim=1).float().mean().item()
        return DenseEmbedding(name=name, rows=len(weight), width=weight.shape[1], used_pct=100 * used)
    return None


def _tracer() -> str:
    """What Python calls on this thread for each line or call; "" for nothing."""
    for tracer in (sys.gettrace(), sys.getprofile()):
        if tracer is not None:
            kind = tracer if hasattr(tracer, "__qualname__") else type(tracer)
            return name_of(f"{kind.__module__}.{kind.__qualname__}")
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return next((str(tool) for tool in tools if tool), "")


def _deterministic(device: torch.device) -> Literal["", "algorithms", "cudnn"]:
    if torch.are_deterministic_algorithms_enabled():
        return "algorithms"
    cudnn = torch.backends.cudnn
    return "cudnn" if device.type == "cuda" and cudnn.deterministic and not cudnn.benchmark else ""


def _distributed_debug(training: Training) -> str:
    if training.facts.world_size == 1 or not torch.distributed.is_available():
        return ""
    level = torch.distributed.get_debug_level().name  # type: ignore[attr-defined]
    return "" if level == "OFF" else str(level)


def _float64_pct(training: Training) -> float:
    parameters = [*training.module.parameters()]
    doubles = sum(parameter.numel() for parameter in parameters if parameter.dtype == torch.float64)
    return 100 * doubles / sum(parameter.numel() for parameter in parameters) if doubles else 0.0


def _tf32_off(training: Training, device: torch.device) -> bool:
    fp32 = has_tf32(device) and training.dtype() == "fp32"
    return fp32 and not fp32_runs_as_tf32(training.model)

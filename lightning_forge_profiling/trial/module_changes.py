"""Changes of a module, its optimizers and PyTorch's settings within a trial's process, and what there is to change.

To add one, add a row to `_CHANGES`. All of it runs with torch loaded, and imports none.
"""

import inspect
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from lightning_forge_profiling.host import usable_cores

_NEARLY_ALL: Final = 0.9
_LARGE: Final = 100_000  # rows of an embedding, for which sparse gradients may gain
_BF16_SINCE: Final = 8  # compute capability: Ampere


class _Fit(NamedTuple):
    """What a change is made to."""

    trainer: Any
    module: Any
    value: Any

    @property
    def torch(self) -> Any:
        return sys.modules["torch"]

    def switch(self, name: str, *value: Any) -> None:
        """Call a method of each module that has it; raises LookupError if none has."""
        having = [each for each in self.module.modules() if hasattr(each, name)]
        if not having:
            raise LookupError(f"no module has {name}()")
        for each in having:
            getattr(each, name)(*value)


def _not_deterministic(fit: _Fit) -> None:
    fit.torch.use_deterministic_algorithms(mode=False)
    fit.torch.backends.cudnn.deterministic = False


def _not_checkpointed(fit: _Fit) -> None:
    with suppress(LookupError):
        fit.switch("gradient_checkpointing_disable")
        return
    fit.switch("set_grad_checkpointing", False)  # noqa: FBT003  (timm's)


def _channels_last(fit: _Fit) -> None:
    if all(each.dim() != 4 for each in fit.module.parameters()):  # noqa: PLR2004
        raise LookupError("no parameter has the four dimensions of a convolution")
    fit.module.to(memory_format=fit.torch.channels_last)


def _update(fit: _Fit) -> None:
    """Optimizers with `fused` or `foreach`."""
    for group in (group for optimizer in fit.trainer.optimizers for group in optimizer.param_groups):
        group.update({"fused": False, "foreach": False, fit.value: True})


def _clip_foreach(fit: _Fit) -> None:
    utils = fit.torch.nn.utils
    clip = utils.clip_grad_norm_
    utils.clip_grad_norm_ = lambda *args, **kwargs: clip(*args, **{**kwargs, "foreach": True})


_CHANGES: Final[dict[str, tuple[str, Callable[[_Fit], object]]]] = {  # by name the hook, and what is done
    "matmul_precision": ("setup", lambda fit: fit.torch.set_float32_matmul_precision(fit.value)),
    "threads": ("setup", lambda fit: fit.torch.set_num_threads(fit.value)),
    "channels_last": ("setup", _channels_last),
    "compile_child": ("setup", lambda fit: fit.module.get_submodule(fit.value).compile()),
    "sparse": ("setup", lambda fit: setattr(fit.module.get_submodule(fit.value), "sparse", True)),
    "sdpa": ("setup", lambda fit: fit.switch("set_attn_implementation", "sdpa")),
    "not_checkpointed": ("setup", _not_checkpointed),
    "not_deterministic": ("setup", _not_deterministic),
    "all_used": ("setup", lambda fit: fit.trainer.strategy._ddp_kwargs.update(find_unused_parameters=False)),  # noqa: SLF001
    "update": ("on_train_start", _update),
    "clip_foreach": ("on_train_start", _clip_foreach),
}


def change(name: str, hook: str, trainer: Any, module: Any, value: Any) -> str:
    """Make a change in the hook that it belongs to; why it could not be made, or ""."""
    of, make = _CHANGES.get(name, ("", None))
    try:
        if make is not None and of == hook:
            make(_Fit(trainer, module, value))
    except (AttributeError, LookupError) as exc:
        return str(exc)
    return ""


def facts(trainer: Any, module: Any, made: str, fixed: Callable[[Any], str]) -> dict[str, Any]:
    """What there is to change, as `schema.TrialFacts` describes it."""
    torch, device = sys.modules["torch"], trainer.strategy.root_device.type
    clipping = trainer.gradient_clip_algorithm
    return {
        "settings": {
            "precision": str(trainer.precision),
            "detect_anomaly": torch.is_anomaly_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "clipped": bool(trainer.gradient_clip_val),
            "clips": bool(trainer.gradient_clip_val) and str(getattr(clipping, "value", clipping) or "norm") == "norm",
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
        "model": type(module).__name__,
        "device": device,
        "bf16": _has_bf16(torch, device),
        "cores": max(usable_cores() // max(trainer.num_devices, 1), 1),
        "threads": torch.get_num_threads(),
        "loaders": [*_loaders(trainer, made, fixed)],
        "has": sorted({name for each in module.modules() for name in _of_module(torch, each)} | {*_of_fit(trainer)}),
        "embedding": _embedding(trainer, module),
        "child": _child(module),
        "built": _written(type(module).__init__),
        "optimized": _written(type(module).configure_optimizers),
        "optimizers": [*map(_optimizer, trainer.optimizers)],
    }


def _written(function: Any) -> str:
    """File and line of a function of the script; "" for one without code in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{os.path.abspath(code.co_filename)}:{code.co_firstlineno}"  # noqa: PTH100


def _child(module: Any) -> str:
    """The direct child with nearly all parameters, which users compile by itself."""
    sizes = {name: sum(each.numel() for each in child.parameters()) for name, child in module.named_children()}
    name = max(sizes, key=sizes.__getitem__, default="")
    calls = name and "forward" in vars(type(module.get_submodule(name)))  # which a ModuleList has not
    return name if calls and sizes[name] >= _NEARLY_ALL * sum(sizes.values()) > 0 else ""


def _has_bf16(torch: Any, device: str) -> bool:
    if device == "cuda":
        return bool(torch.cuda.get_device_capability()[0] >= _BF16_SINCE)
    with suppress(Exception):  # names that differ between versions
        return device == "cpu" and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # noqa: SLF001
    return False


def _loaders(trainer: Any, made: str, fixed: Callable[[Any], str]) -> Iterator[dict[str, Any]]:
    for loop, validates in ((trainer.fit_loop, False), (trainer.fit_loop.epoch_loop.val_loop, True)):
        combined = getattr(loop, "_combined_loader", None)
        for each in () if combined is None else combined.flattened:
            if hasattr(each, "num_workers"):
                changes, place = getattr(each, made, ({}, ""))
                yield {
                    "place": place,
                    "validates": validates,
                    "num_workers": int(each.num_workers),
                    "persistent_workers": bool(each.persistent_workers),
                    "pin_memory": bool(each.pin_memory),
                    "prefetch_factor": each.prefetch_factor,
                    "fixed": fixed(each.dataset),
                    # with workers, a file that the dataset opens in each of them would be opened before they are forked
                    "draws": bool(each.num_workers) or _draws(each.dataset),
                    "changed": "num_workers" in changes,
                }


def _draws(dataset: Any) -> bool:
    """Whether a sample of a dataset draws random numbers, as far as one shows."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    states = (torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())
    before = repr((states[0].tolist(), states[1], states[2]))
    try:
        repeats = pickle.dumps(dataset[0]) == pickle.dumps(dataset[0])
    except Exception:  # one without such an index, and whatever the script's code raises
        return True
    after = (torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numpy is not None:
        numpy.random.set_state(states[2])
    return not repeats or repr((after[0].tolist(), after[1], after[2])) != before


def _of_module(torch: Any, module: Any) -> Iterator[str]:
    if isinstance(module, torch.nn.Conv2d):
        yield "conv2d"
    if any("dropout" in name and isinstance(p, float) and p > 0 for name, p in vars(module).items()) or (
        isinstance(module, torch.nn.Dropout) and module.p > 0
    ):
        yield "dropout"
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) == "eager" and hasattr(module, "set_attn_implementation"):
        yield "eager_attention"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        yield "compiled"
    if any(vars(module).get(name) is True for name in ("gradient_checkpointing", "grad_checkpointing")):
        yield "checkpointing"


def _of_fit(trainer: Any) -> Iterator[str]:
    if sys.modules["torch"].backends.cudnn.deterministic:
        yield "cudnn_deterministic"
    if getattr(trainer.lightning_module, "_compiler_ctx", None):
        yield "compiled"
    if getattr(trainer.model, "find_unused_parameters", False) is True:
        yield "unused_parameters"


def _embedding(trainer: Any, module: Any) -> str:
    """The largest dense embedding, if all that updates it takes sparse gradients."""
    plain = len(trainer.optimizers) == 1 and not trainer.gradient_clip_val and trainer.world_size == 1
    if not plain or not _takes_sparse(trainer.optimizers[0]):
        return ""
    kind = sys.modules["torch"].nn.Embedding
    found = [(each.num_embeddings, name) for name, each in module.named_modules() if type(each) is kind]
    rows, name = max(found, default=(0, ""))
    return name if rows >= _LARGE and not module.get_submodule(name).sparse else ""


def _takes_sparse(optimizer: Any) -> bool:
    kind, unfit = type(optimizer).__name__, ("weight_decay", "momentum", "fused", "maximize")
    plain = not any(group.get(name) for group in optimizer.param_groups for name in unfit)
    return kind == "SparseAdam" or (kind == "SGD" and plain)


def _optimizer(optimizer: Any) -> str:
    on = [name for name in ("fused", "foreach") if any(group.get(name) for group in optimizer.param_groups)]
    takes = [f"takes-{name}" for name in ("fused", "foreach") if name in optimizer.defaults]
    return " ".join((type(optimizer).__name__, *on, *takes))

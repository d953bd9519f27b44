"""A fit of Lightning's Trainer, for what watches it: answers from the Trainer, and what is put around its methods."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import ceil, isfinite
from typing import Any, Final

from torch import nn

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler, ProfilerProxy
from lightning_forge_profiling.callbacks.lightning_api import (
    LightningModule,
    Trainer,
    batch_source,
    implemented_hooks,
    logger_step,
    replicas,
)
from lightning_forge_profiling.callbacks.rank_waits import RankWaits
from lightning_forge_profiling.callbacks.wrapped_methods import (
    WrappedMethod,
    announce_saves,
    watch_failure,
    watch_validation,
    wrap_last_teardown,
    wrap_logger_method,
    wrap_logging,
    wrap_originals,
    wrap_restoring,
    wrap_self_log,
)
from lightning_forge_profiling.names import EPOCH_METRICS, SELF_LOG, VALIDATION_METRICS
from lightning_forge_profiling.plain_text import name_of
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import (
    BatchesAhead,
    BatchSource,
    Ending,
    Facts,
    Parts,
    StepProgress,
    T,
    Training,
    Watching,
)
from lightning_forge_profiling.timing.ledger import LedgerClock

# attributes of the Trainer that are recorded
RECORDED: Final = (
    *("precision", "accumulate_grad_batches", "max_steps", "max_epochs", "log_every_n_steps", "gradient_clip_val"),
    *("gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch", "limit_train_batches"),
    *("limit_val_batches", "reload_dataloaders_every_n_epochs", "num_nodes"),
)


def hook_parts(trainer: Trainer, module: LightningModule, own: Collection[object]) -> dict[str, str]:
    """The parts for the hooks that callbacks, module and data module implement, by Lightning's name of the action."""
    parts, kinds = {}, {type(one) for one in own}  # one that is inactive beside them has the same actions
    for callback in trainer.callbacks:
        mine = type(callback) in kinds
        for hook in implemented_hooks(callback):
            action = f"[Callback]{callback.state_key}.{hook}"
            if not mine:
                parts[action] = f"callback/{name_of(callback)}.{hook}"
            elif "train_batch" not in hook:  # those the step timer measures
                parts[action] = "profiler"
    for kind, owner in ("LightningModule", module), ("LightningDataModule", trainer.datamodule):
        for hook in implemented_hooks(owner):
            parts[f"[{kind}]{type(owner).__name__}.{hook}"] = f"{kind.removeprefix('Lightning').lower()}/{hook}"
    scheduler = f"[LightningModule]{type(module).__name__}.lr_scheduler_step"  # Lightning's own steps the scheduler
    return {**parts, scheduler: "module/lr_scheduler_step"}


class LightningTraining(Training):
    """A fit of a Trainer with callbacks of this package."""

    def __init__(self, trainer: Trainer, module: LightningModule, callbacks: Sequence[object]) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self.module: Any = module
        self.facts = Facts(
            rank=int(trainer.global_rank),
            world_size=int(trainer.world_size),
            ranks_on_host=max(int(trainer.num_devices), 1),
            replicas=replicas(trainer),
            device=trainer.strategy.root_device,
            folder=trainer.default_root_dir,
            is_trial=bool(trainer.fast_dev_run),
        )

    @property
    def model(self) -> nn.Module:
        """The module as the strategy has wrapped it."""
        model: nn.Module = self._trainer.strategy.model
        return model

    @property
    def model_name(self) -> str:
        """The module's class."""
        return name_of(self.module)

    @property
    def automatic(self) -> bool:
        """Whether it is automatic optimization."""
        return bool(self.module.automatic_optimization)

    def objects(self) -> Iterator[tuple[str, Any]]:
        """The modules, callbacks, data module and datasets, and the modules of Python that they are from."""
        trainer = self._trainer
        for name, module in self.module.named_modules():
            if not type(module).__module__.startswith("torch.nn."):  # those keep nothing, and there are many
                yield f"self.{name}".rstrip("."), module
        callbacks = [each for each in trainer.callbacks if each not in self._callbacks]
        for each in callbacks:
            yield name_of(each), each
        if trainer.datamodule is not None:
            yield "datamodule", trainer.datamodule
        for dataset in (getattr(loader, "dataset", None) for loader in self.loaders()):
            if hasattr(dataset, "__dict__"):
                yield "dataset", dataset
        scripts = {type(each).__module__ for each in (self.module, *callbacks)} | {"__main__"}
        yield from (("", sys.modules[name]) for name in scripts & sys.modules.keys())

    @property
    def optimizers(self) -> Sequence[Any]:
        """The Trainer's optimizers."""
        optimizers: Sequence[Any] = self._trainer.optimizers
        return optimizers

    @property
    def loggers(self) -> Sequence[Any]:
        """The Trainer's loggers."""
        loggers: Sequence[Any] = self._trainer.loggers
        return loggers

    @property
    def checkpoint(self) -> str:
        """The checkpoint that the fit continues from."""
        return str(self._trainer.ckpt_path or "")

    @property
    def updates(self) -> int:
        """The global step."""
        return int(self._trainer.global_step)

    @property
    def accumulated(self) -> int:
        """Batches to an update, which a callback may change."""
        accumulated: int = self._trainer.accumulate_grad_batches
        return accumulated

    def described(self) -> Mapping[str, Any]:
        """The Trainer's settings."""
        trainer, strategy = self._trainer, self._trainer.strategy
        backend = os.environ.get("PL_TORCH_DISTRIBUTED_BACKEND") or getattr(strategy, "process_group_backend", None)
        return {
            "accelerator": name_of(trainer.accelerator),
            "strategy": name_of(strategy),
            "devices": int(trainer.num_devices),
            "backend": backend,
            **{name: getattr(trainer, name, None) for name in RECORDED},
            "sync_batchnorm": bool(getattr(strategy, "_layer_sync", None)),
        }

    def dtype(self) -> str:
        """The type that matrix products compute in."""
        return lightning_api.compute_dtype(self._trainer)

    def profiler_taken(self) -> bool:
        """Whether the Trainer's own profiler is `torch.profiler` already."""
        profiler = self._trainer.profiler.__class__  # not type(), which is this package's own once it has wrapped it
        return any(base.__name__ == "PyTorchProfiler" for base in profiler.__mro__)

    def broadcast(self, value: T) -> T:
        """The value of rank 0: a collective."""
        agreed: T = self._trainer.strategy.broadcast(value)
        return agreed

    # -- loaders -------------------------------------------------------------------------------------------------

    def loaders(self, *, validation: bool = False) -> Sequence[Any]:
        """The loaders for training or validation, of another loop outside of a fit; empty before it has set them up."""
        fit_loop = self._trainer.fit_loop
        loop = fit_loop.epoch_loop.val_loop if validation else fit_loop
        if self._trainer.state.fn != "fit":
            loop = self._trainer._active_loop  # noqa: SLF001
        return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)  # noqa: SLF001

    def validation_batches(self) -> float:
        """Batches of a validation run."""
        return float(sum(self._trainer.num_val_batches))

    def iterators(self) -> Sequence[Any]:
        """The iterators of the training loaders."""
        loaders = self._trainer.fit_loop._combined_loader  # noqa: SLF001
        iterators: Sequence[Any] = getattr(getattr(loaders, "_iterator", None), "iterators", ())
        return iterators

    def batch_source(self) -> BatchSource:
        """The loaders that the batch that has just ended comes from."""
        return batch_source(self._trainer)

    def has_unsized_loader(self) -> bool:
        """Whether only a fetch finds out that the training loader has no more batches."""
        fetcher = self._trainer.fit_loop._data_fetcher  # noqa: SLF001
        return fetcher is not None and fetcher.length is None

    # -- steps ---------------------------------------------------------------------------------------------------

    def progress(self) -> StepProgress:
        """The progress counters of the training loop."""
        loop = self._trainer.fit_loop.epoch_loop
        if self.automatic:
            return StepProgress(loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step.total)
        return StepProgress(loop.batch_progress, loop.manual_optimization.optim_step_progress.total)

    def ahead(self) -> BatchesAhead:
        """The batches that a fit will train, as far as that is known when it begins."""
        trainer = self._trainer
        batches, epoch = trainer.num_training_batches, int(trainer.current_epoch)
        of_epoch = int(batches) if isfinite(batches) else None
        done = int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        batch = done if of_epoch is None or done < of_epoch else 0  # one that is complete, as in its last checkpoint
        limits: list[int] = []
        if of_epoch is not None and trainer.max_epochs not in {None, -1}:
            limits.append((trainer.max_epochs - epoch) * of_epoch - batch)
        if trainer.max_steps != -1 and self.automatic and len(trainer.optimizers) == 1:
            updates = int(trainer.max_steps - trainer.global_step)
            limits.append(_batches_of(updates, self.accumulated, of_epoch, batch))
        return BatchesAhead(max(min(limits), 0) if limits else None, of_epoch, epoch, batch)

    def pauses(self) -> Callable[[int], bool]:
        """Whether validation, the end of an epoch or a checkpoint comes before a step, as far as the settings tell."""
        trainer, ahead = self._trainer, self.ahead()
        validates = getattr(trainer, "val_check_batch", None)
        by_epoch = getattr(trainer, "check_val_every_n_epoch", 1)
        every = int(validates) if validates and isfinite(validates) else 0
        before = int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        saves = [getattr(each, "_every_n_train_steps", 0) for each in getattr(trainer, "checkpoint_callbacks", ())]
        updates, accumulated = self.updates, max(self.accumulated, 1)

        def before_step(step: int) -> bool:
            of_epoch = (ahead.batch + step) % ahead.of_epoch if ahead.of_epoch else ahead.batch + step
            validated = before + step if by_epoch is None else of_epoch
            update, rest = divmod(step, accumulated)
            return (
                (bool(ahead.of_epoch) and of_epoch == 0)
                or (every > 0 and validated % every == 0)
                or (rest == 0 and any(each and (updates + update) % each == 0 for each in saves))
            )

        return before_step

    def may_be_last(self) -> bool:
        """Whether the batch that has just ended may have been the fit's last."""
        trainer = self._trainer
        last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        last_epoch = trainer.max_epochs not in {None, -1} and trainer.current_epoch + 1 >= trainer.max_epochs
        ends = trainer.should_stop or trainer.received_sigterm or last_step
        return bool(ends or (trainer.is_last_batch and last_epoch))

    def logs_now(self, every_n_steps: int | None) -> bool:
        """Whether Lightning would log at the end of this batch, at its own interval or at `every_n_steps`."""
        return super().logs_now(every_n_steps) and not self._trainer.fit_loop._should_accumulate()  # noqa: SLF001

    def log_interval(self, every_n_steps: int | None) -> int:
        """The Trainer's, or another one."""
        return int(self._trainer.log_every_n_steps if every_n_steps is None else every_n_steps)

    def logger_step(self) -> int:
        """The x-axis of `self.log` during a training batch."""
        return logger_step(self._trainer)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the progress bar."""
        # the public property computes all others, at an epoch's end by collectives
        self._trainer._logger_connector._progress_bar_metrics.update(metrics)  # noqa: SLF001

    # -- what is put around it -----------------------------------------------------------------------------------

    def watch(
        self,
        failed: Callable[[BaseException], object],
        validation: Callable[[], AbstractContextManager[None]],
    ) -> Sequence[Watching]:
        """Call `failed` when an exception ends the training loop, and enter `validation` around a validation run."""
        return watch_failure(self._trainer.fit_loop, failed), watch_validation(self._trainer, validation)

    def time_set_up(self, ledger: LedgerClock, failed: Callable[[], object]) -> "SetUpParts":
        """Enter the hooks before the training loop into the ledger; call `failed` if one raises."""
        return SetUpParts(ledger, self._trainer, self.module, self._callbacks, failed=failed)

    def time_calls(self, parts: Parts) -> Sequence[Watching]:
        """Enter the loggers' calls, `self.log` and Lightning's own work in the module's hooks into the ledger."""
        trainer, computed = self._trainer, [-1]  # the epoch whose metrics were computed

        def in_epoch_metrics() -> AbstractContextManager[None]:
            """Compute what was logged in an epoch; further calls in the same epoch get the same values."""
            before, computed[0] = computed[0], trainer.current_epoch
            return parts.inside(EPOCH_METRICS, ("callback/", "module/"), counts=before != computed[0])

        in_validation_metrics = partial(parts.inside, VALIDATION_METRICS, ("validation", "callback/", "module/"))
        names = " and ".join(dict.fromkeys(map(name_of, trainer.loggers)))
        return [
            wrap_logging(trainer, partial(parts.inside, f"logger/{names}", ("",))),
            *wrap_logger_method(trainer, "log_metrics", parts.inside),
            *wrap_self_log(trainer, partial(parts.inside, SELF_LOG), in_epoch_metrics, in_validation_metrics),
            *wrap_originals(trainer, self.module, parts.outside_hook),
            *announce_saves(trainer),
        ]

    def time_steps(self, step_timer: StepTimer) -> ProfilerProxy:
        """Announce the boundaries of regions to the step timer."""
        trainer = self._trainer

        def fetched() -> None:
            if self.has_unsized_loader() and trainer.fit_loop._data_fetcher.done:  # noqa: SLF001
                step_timer.regions.loader_ended()

        def fetches_to_validate() -> None:
            if step_timer.regions.validating:
                workers = any(getattr(loader, "num_workers", 0) for loader in self.loaders(validation=True))
                fetcher = trainer._active_loop._data_fetcher  # noqa: SLF001
                step_timer.regions.begin_validation_fetch(workers=workers, ends=fetcher is not None and fetcher.done)

        actions = lightning_api.actions(trainer, self.module)._replace(
            fetched=fetched, fetches_to_validate=fetches_to_validate
        )
        proxy = ProfilerProxy(trainer, step_timer, actions, hook_parts(trainer, self.module, self._callbacks))
        proxy.install()
        return proxy

    def time_waits(self, step_timer: StepTimer) -> RankWaits | None:
        """Measure waits for other ranks."""
        return RankWaits(self._trainer, step_timer) if self.facts.world_size > 1 else None

    def time_ending(self, ledger: LedgerClock, over: Callable[[], object]) -> "TearDown":
        """Enter what follows the training loop into the ledger; call `over` when the Trainer has done it all."""
        return TearDown(ledger, self._trainer, hook_parts(self._trainer, self.module, self._callbacks), over)


def _batches_of(updates: int, accumulated: int, of_epoch: int | None, batch: int) -> int:
    """Batches until so many updates; the last batch of an epoch makes one, too."""
    if not of_epoch:
        return updates * accumulated
    first = of_epoch - batch  # until the end of the epoch
    if updates <= (updates_of_first := ceil(first / accumulated)):
        return min(updates * accumulated, first)
    epochs, rest = divmod(updates - updates_of_first, ceil(of_epoch / accumulated))
    return first + epochs * of_epoch + rest * accumulated


# hooks between the beginning of a fit and the training loop, which are called once or twice
_OF_SET_UP: Final = (
    *("prepare_data", "setup", "configure_model", "configure_sharded_model", "configure_optimizers"),
    *("on_load_checkpoint", "on_fit_start", "val_dataloader"),
)
# hooks of the training loop, of which the first is called before it, too
_BEFORE_THE_LOOP: Final = ("train_dataloader", "on_train_start")


def set_up_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts for the hooks of the set-up, by the name that Lightning announces."""
    of_set_up = {}
    for action, part in parts.items():
        hook = action.rpartition(".")[2]
        if hook in _OF_SET_UP:
            of_set_up[action] = part if part == "profiler" else f"startup/{part.replace('/', '.', 1)}"
        elif hook in _BEFORE_THE_LOOP:
            of_set_up[action] = part
    return of_set_up


class SetUpParts:
    """Enters the hooks of a fit's set-up into the ledger, until the training loop."""

    def __init__(
        self,
        ledger: LedgerClock,
        trainer: Trainer,
        module: LightningModule,
        own: Collection[object],
        *,
        restores: bool = True,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        ProfilerProxy.uninstall(trainer)
        self.ledger, self._trainer, self._failed = ledger, trainer, failed
        self._methods: tuple[WrappedMethod, ...] = ()
        parts = set_up_parts(hook_parts(trainer, module, own))
        trainer.profiler = BoundaryProfiler(trainer.profiler, None, parts=parts, ledger=ledger, raised=self._fail)
        around = partial(ledger.inside, "startup/restore")
        if restores:
            self._methods = wrap_restoring(trainer, around)

    def _fail(self) -> None:
        """A hook has raised: no hook of this package's may follow."""
        self.release()
        self._failed()

    def release(self) -> None:
        """Restore everything."""
        for method in self._methods:
            method.release()
        ProfilerProxy.uninstall(self._trainer)


class TearDown(Ending):
    """Enters what follows the training loop into the ledger: hooks, and the loggers' `finalize`."""

    def __init__(
        self, ledger: LedgerClock, trainer: Trainer, parts: Mapping[str, str], over: Callable[[], object]
    ) -> None:
        self._ledger, self._trainer, self._over = ledger, trainer, over
        self._parts = {**parts, "save_checkpoint": "checkpoint"}
        self._last: WrappedMethod | None = None
        self._failed: Callable[[], object] | None = None
        self.install()
        self._loggers = wrap_logger_method(trainer, "finalize", self._in_logger)

    def install(self) -> None:
        """Wrap the Trainer's profiler, also if a hook has assigned another."""
        trainer = self._trainer
        ProfilerProxy.uninstall(trainer)
        trainer.profiler = BoundaryProfiler(
            trainer.profiler, None, parts=self._parts, ledger=self._ledger, over=self._over, raised=self._raised
        )

    def follow_failure(self, over: Callable[[], object]) -> None:
        """Call `over` at the end of a fit that fails: after `on_exception`, `finalize` and the strategy's teardown."""
        self._failed = over
        self._last = wrap_last_teardown(self._trainer, over)

    @contextmanager
    def _in_logger(self, part: str) -> Iterator[None]:
        try:
            with self._ledger.inside(part):
                yield
        except BaseException:
            self._raised()
            raise

    def _raised(self) -> None:
        """A hook or a logger has raised: in a fit that has failed already, nothing else follows."""
        if self._failed is not None:
            self._failed()

    def release(self) -> None:
        """Restore everything."""
        for method in self._loggers:
            method.release()
        if self._last is not None:
            self._last.release()
        ProfilerProxy.uninstall(self._trainer)

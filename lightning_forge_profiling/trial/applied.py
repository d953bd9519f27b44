"""A trial in the process of the script: makes its changes where they take effect, ends after its steps, leaves nothing.

`at_start` calls `begin` before the script. Nothing here imports torch or Lightning: hooks run when the script has.
"""

import functools
import inspect
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType, ModuleType
from typing import Any, Final

from lightning_forge_profiling.import_hook import after_import
from lightning_forge_profiling.trial import ablated, module_changes

RESULT: Final = "facts.json"
_MADE: Final = "_forge_try"  # attribute of a loader: the change that was made, and where it was built
_LOSSES: Final = 8
_FEWEST: Final = 20  # steps that count, where the time is over
_VALIDATION_BATCHES: Final = 30
_VALIDATIONS: Final = 2
_LONGEST_S: Final = 60.0  # for the validations of a trial
_WITH_WORKERS: Final = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")


def begin(options: str) -> None:
    """Prepare this process for the trial that `forge-profiling try` describes in JSON."""
    trial = _Trial(json.loads(options))
    random.seed(trial.seed)
    if call := os.environ.get(ablated.ABLATED):
        ablated.install(call)
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "numpy": lambda module: module.random.seed(trial.seed),
        "torch": lambda module: module.manual_seed(trial.seed),
        "torch.utils.data.dataloader": trial.patch_loaders,
        "lightning.pytorch.trainer.trainer": trial.patch_trainer,
        "pytorch_lightning.trainer.trainer": trial.patch_trainer,
    }
    after_import(hooks)


class _Trial:
    """What is to be done in this process, and what came of it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.seed = options, int(options["seed"])
        self.folder = Path(options["folder"])
        self.specs: list[dict[str, Any]] = options["specs"]
        self.facts: dict[str, Any] = {"problems": []}
        self.made: set[str] = set()  # changes of loaders that have been made
        self.losses: list[Any] = []
        self.limit: float = 1.0  # of the script's validation batches
        self.every_n_epoch = 1  # it validates
        self.saves: tuple[type, ...] = ()  # callbacks that a trial does without

    def given(self, of: str) -> Iterator[Mapping[str, Any]]:
        """What the changes set of a kind: `loader`, `trainer` or `module`."""
        return (spec[of] for spec in self.specs if of in spec)

    def problem(self, text: str) -> None:
        """Note that a change could not be applied."""
        if text and text not in self.facts["problems"]:
            self.facts["problems"].append(text)

    # -- loaders -------------------------------------------------------------------------------------------------

    def patch_loaders(self, module: ModuleType) -> None:
        """Change the loaders that the script builds from here on. A copy by Lightning is changed as its original."""
        kind, init = module.DataLoader, module.DataLoader.__init__
        signature = inspect.signature(init)

        @functools.wraps(init)
        def changed(loader: Any, *args: Any, **kwargs: Any) -> None:
            original, place = _origin(loader)
            bound = signature.bind(loader, *args, **kwargs).arguments
            given = {name: value for name, value in bound.items() if name not in {"self", "kwargs"}}
            if original is not None:
                changes, place = getattr(original, _MADE, ({}, ""))
            else:
                changes = self._of_loader(place, given.get("dataset"))
            given.update(changes)
            if changes and not given.get("num_workers"):
                given = {name: value for name, value in given.items() if name not in _WITH_WORKERS}
            init(loader, **given)
            object.__setattr__(loader, _MADE, (changes, place))

        kind.__init__ = changed

    def _of_loader(self, place: str, dataset: Any) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for spec in self.given("loader"):
            if spec["places"] and place not in spec["places"]:
                continue
            if "num_workers" in spec["set"] and (why := _fixed(dataset)):
                self.problem(f"the loader at {place} keeps its workers: {why}")
                continue
            changes.update(spec["set"])
            self.made.add(json.dumps(spec["set"]))
        return changes

    # -- the Trainer ---------------------------------------------------------------------------------------------

    def patch_trainer(self, module: ModuleType) -> None:
        """Have each Trainer that the script builds make this trial."""
        kind = module.Trainer
        callback = type("Trial", (_Progress, module.Callback), {})
        init, fit = kind.__init__, kind.fit

        @functools.wraps(init)
        def changed(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.facts["trainer"] = _place(sys._getframe(1))  # noqa: SLF001  (where the script calls it)
            init(trainer, *args, **self._of_trainer(kwargs, module))
            trainer.callbacks.insert(0, callback(self))

        @functools.wraps(fit)
        def fit_and_end(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            self.facts["fit"] = _place(sys._getframe(1))  # noqa: SLF001
            for spec in self.given("module"):
                if "compile" in spec and hasattr(model, "_orig_mod"):
                    self.problem("the module is compiled already")
                elif "compile" in spec:
                    model = sys.modules["torch"].compile(model, **spec["compile"])
            self.every_n_epoch = trainer.check_val_every_n_epoch or 1
            if trainer.check_val_every_n_epoch and self.options["validates"]:
                trainer.check_val_every_n_epoch = 1
            fit(trainer, model, *args, **kwargs)
            if "steps" in self.facts:  # a tuner's fit may make none
                self.end(trainer)

        def save_below(
            trainer: Any, filepath: Any, *args: Any, **kwargs: Any
        ) -> None:  # as tuners do, to load it again
            if Path(filepath).absolute().is_relative_to(self.folder):
                save(trainer, filepath, *args, **kwargs)

        save, self.saves = kind.save_checkpoint, (module.Checkpoint, module.EarlyStopping)
        kind.__init__, kind.fit, kind.save_checkpoint = changed, fit_and_end, save_below

    def _of_trainer(self, kwargs: dict[str, Any], module: ModuleType) -> dict[str, Any]:
        """The arguments of a Trainer that leaves nothing, with the changes of this trial."""
        callbacks, loggers = (_listed(kwargs.get(name)) for name in ("callbacks", "logger"))
        self.limit = 1.0 if kwargs.get("limit_val_batches") is None else kwargs["limit_val_batches"]
        limit = min(self.limit, _VALIDATION_BATCHES) if isinstance(self.limit, int) else _VALIDATION_BATCHES
        limit = limit if self.limit else 0
        no_loggers = [_no_logger(module.Logger, str(self.folder)) for _ in loggers or [True]]
        harmless = {
            "callbacks": [each for each in callbacks if not isinstance(each, self.saves)],
            "enable_checkpointing": False,
            "logger": not kwargs.get("barebones") and no_loggers,
            "default_root_dir": str(self.folder),
            "num_sanity_val_steps": 0,
            "limit_val_batches": limit if self.options["validates"] else 0,
        }
        changes = {name: value for spec in self.given("trainer") for name, value in spec.items()}
        return {**kwargs, **harmless, **changes}

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, trainer: Any) -> None:
        """Write what was found and leave the process: nothing of the script follows."""
        for spec in self.given("loader"):
            if json.dumps(spec["set"]) not in self.made:
                self.problem("no loader was built at " + " or ".join(spec["places"]))
        ours = (each.run for each in trainer.callbacks if getattr(each, "run", None) and hasattr(each, "fit_results"))
        run = next(ours, None)
        if run is not None:
            run.finish()
        if (call := os.environ.get(ablated.ABLATED)) and not ablated.left_out:
            self.problem(f"the file of {call} was not run")
        elif call and trainer.world_size > 1 and ablated.left_out == "the script":  # ranks may be started without us
            self.problem(f"{call} is left out on rank 0 alone: move it to a file that the script imports")
        if trainer.global_rank == 0:
            self.facts["losses"] = [float(each) for each in self.losses]
            part = self.folder / f".{RESULT}"
            part.write_text(json.dumps(self.facts), encoding="utf-8")
            part.replace(self.folder / RESULT)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given] if given not in (None, True, False) else []


def _place(frame: FrameType | None) -> str:
    """File and line of the innermost frame of the script, as torch and Lightning are none."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in {"lightning", "pytorch_lightning", "lightning_fabric", "torch", "lightning_forge_profiling"}:
            return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH100  (each loader)
        frame = frame.f_back
    return ""


def _origin(loader: Any) -> tuple[Any, str]:
    """The loader that Lightning copies, or None and the place where the script builds it."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        local, package = frame.f_locals, frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "_reinstantiate_wrapped_cls" and package.startswith(("lightning", "pytorch_l")):
            return local.get("orig_object"), ""
        if local.get("self") is not loader and local.get("obj") is not loader:  # no constructor of a subclass
            return None, _place(frame)
        frame = frame.f_back
    return None, ""


def _fixed(dataset: Any) -> str:
    """Why a loader of this dataset must keep its number of workers; "" if it may change."""
    from lightning_forge_profiling.run.run_settings import is_unsplit  # noqa: PLC0415  (loads torch)

    if is_unsplit(dataset):
        return "each worker of its IterableDataset would yield all samples"
    held = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
    held = [part for each in held for part in (each if isinstance(each, (list, tuple)) else [each])]
    return "its dataset has tensors on the GPU" if any(getattr(each, "is_cuda", False) for each in held) else ""


class _Nothing:
    """Whatever a script asks of a tracker."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    __getitem__ = __enter__ = __call__

    def __exit__(self, *_: object) -> None:
        pass

    __setitem__ = __exit__


def _no_logger(base: type, folder: str) -> Any:
    """A logger that writes nothing, and of which a script may use whatever a tracker has."""
    members = {
        "experiment": _Nothing(),
        **dict.fromkeys(("name", "version"), ""),
        **dict.fromkeys(("save_dir", "log_dir", "root_dir"), folder),
        **dict.fromkeys(("log_metrics", "log_hyperparams"), lambda *_, **__: None),
        "__getattr__": lambda logger, name: getattr(logger.experiment, name),
    }
    return type("NoLogger", (base,), members)()


class _Progress:
    """How far a trial is: it counts steps and times a validation."""

    def __init__(self, trial: _Trial) -> None:
        self._trial = trial
        self._steps = self._batches = self._validations = 0
        self._from_s = self._validated_s = self._first_s = 0.0

    def setup(self, trainer: Any, pl_module: Any, **_: Any) -> None:
        """Do without what saves and stops, and change the module once the script has built all of it."""
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, self._trial.saves)]
        set_up = trainer.strategy.setup

        def changed(trainer: Any) -> None:
            self._change("setup", trainer, pl_module)
            set_up(trainer)

        trainer.strategy.setup = changed

    def _change(self, hook: str, trainer: Any, module: Any) -> None:
        for name, value in (each for spec in self._trial.given("module") for each in spec.items()):
            self._trial.problem(module_changes.change(name, hook, trainer, module, value))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Change the optimizers, have it validate early, and look at what there is."""
        trial, options = self._trial, self._trial.options
        self._change("on_train_start", trainer, pl_module)
        for each in trainer.lr_scheduler_configs:
            each.strict = False  # what they monitor may be of a validation
        if options["validates"] and trainer.enable_validation:
            every = trainer.val_check_batch or 0  # none where it goes by time
            trial.facts["validation_every"] = _whole(every) * trial.every_n_epoch
            trainer.val_check_batch = min(every or options["steps"], options["warmup"] + _FEWEST)
            trainer._val_check_time_interval = None  # noqa: SLF001
        trial.facts.update(module_changes.facts(trainer, pl_module, _MADE, _fixed))

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        """Keep the loss, and end the trial if it has enough steps."""
        trial, options, now = self._trial, self._trial.options, monotonic()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:  # as of manual optimization
            loss = next(iter(trainer.callback_metrics.values()), None)
        if len(trial.losses) < _LOSSES and loss is not None and hasattr(loss, "detach"):
            trial.losses.append(loss.detach().float().mean().clone())
        self._steps += 1
        trial.facts["steps"], counted = self._steps, self._steps - options["warmup"]
        if counted <= 0:
            self._from_s = now
        enough = counted > options["steps"] and now - self._from_s >= options["least_s"]
        late = counted > _FEWEST and now - self._from_s >= options["limit_s"]
        validated = not trainer.enable_validation or self._validations >= _VALIDATIONS
        validated = validated or now - self._from_s >= _LONGEST_S
        # the clocks of ranks differ: rank 0 ends, and who started them ends the others
        if trainer.global_rank == 0 and (enough or late) and validated:
            trial.end(trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Time a validation."""
        self._validated_s, self._batches = monotonic(), 0

    def on_validation_batch_end(self, *_: Any) -> None:
        """Time its first batch apart, for which workers are started."""
        self._batches += 1
        if self._batches == 1:
            self._first_s = monotonic()

    def on_validation_end(self, trainer: Any, _: Any) -> None:
        """Keep its times: those of the latest, since the first may compile and start workers that stay."""
        self._validations += 1
        if self._batches:
            batch_s = (monotonic() - self._first_s) / max(self._batches - 1, 1)
            first_s, batches = self._first_s - self._validated_s, _all_batches(trainer, self._trial.limit)
            self._trial.facts.update(validation_first_s=first_s, validation_batch_s=batch_s, validation_batches=batches)

    def on_train_end(self, trainer: Any, _: Any) -> None:
        """End a trial whose script has fewer steps than it asks for."""
        self._trial.end(trainer)


def _whole(number: float) -> int:
    return int(number) if number < 1 << 40 else 0


def _all_batches(trainer: Any, limit: float) -> int:
    """The batches of a whole validation, with the script's limit in place of this trial's."""
    total = 0
    with suppress(Exception):  # loaders without a length
        lengths = [len(each) for each in trainer.fit_loop.epoch_loop.val_loop._combined_loader.flattened]  # noqa: SLF001
        total = sum(min(each, limit) if isinstance(limit, int) else int(each * limit) for each in lengths)
    return total or sum(map(_whole, trainer.num_val_batches))

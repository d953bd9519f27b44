"""Lightning's entry points for callbacks of a new Trainer or Fabric. Add none unless `forge-profiling run` started it.

Lightning imports this module in every script of the environment, so it imports only the standard library.
"""

import os
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

RUN_OPTIONS: Final = "FORGE_PROFILING_RUN"
"""Environment variable set by `run`: a JSON object with the arguments of each callback, by class name."""

TRIAL_OPTIONS: Final = "FORGE_PROFILING_TRIAL"
"""Environment variable set by `try`: a JSON object that describes the trial of this process."""

_NO_FIT: Final = "no Trainer was fitted, so nothing was profiled"
_NO_STEP: Final = (
    "no step of the Fabric loop was announced, so nothing was profiled. Put each step in `with forge.step():` (import "
    'lightning_forge_profiling as forge), or call fabric.call("on_train_batch_start") and '
    'fabric.call("on_train_batch_end") around it'
)

_seen: Final[set[str]] = set()  # "Fabric" if the script has made one


def callbacks() -> list[Any]:
    """Callbacks for one Trainer.

    Examples:
        >>> callbacks()
        []
    """
    import sys  # noqa: PLC0415  (every script of the environment imports this module)

    if (api := sys.modules.get("lightning_forge_profiling.callbacks.lightning_api")) is not None:
        api.accept_late_imports()  # this Trainer's package may be newer than ours
    options = os.environ.get(RUN_OPTIONS)
    if not options:
        return []
    import json  # noqa: PLC0415  (every script of the environment imports this module)

    from lightning_forge_profiling.callbacks.forge_profiler import ForgeProfilerCallback  # noqa: PLC0415  (loads torch)
    from lightning_forge_profiling.callbacks.throughput import ThroughputCallback  # noqa: PLC0415
    from lightning_forge_profiling.plain_text import once, plain_logger  # noqa: PLC0415

    kinds: dict[str, Any] = {kind.__name__: kind for kind in (ForgeProfilerCallback, ThroughputCallback)}
    try:
        added = [kinds[name](**arguments) for name, arguments in json.loads(options).items()]
    except Exception as exc:
        message = "Nothing will be profiled: the options of `forge-profiling run` in %r: %s"
        plain_logger(__name__).warning(message, options, exc)
        return []
    _watch_exit()
    for package in ("lightning.fabric", "lightning_fabric"):  # else it says so for each Trainer
        once(f"{package}.utilities.registry", "from entry point 'forge_profiling'")
    for callback in added:
        callback.settings = callback.settings.under_run()
    return added


def fabric_callbacks() -> list[object]:
    """The callback for one Fabric, which profiles a loop that calls `on_train_batch_start` and `on_train_batch_end`.

    Examples:
        >>> fabric_callbacks()
        []
    """
    added = callbacks()
    if not added:
        return []
    from lightning_forge_profiling.callbacks.plain_loop import LoopProfiling  # noqa: PLC0415  (loads torch)

    _seen.add("Fabric")
    return [LoopProfiling(added=added)]


def sample_stack() -> None:
    """Sample the stack of the script's thread from here on, for the fits that come."""
    from lightning_forge_profiling.run.stack_sampler import sample_from_start  # noqa: PLC0415

    sample_from_start()


def watch_hugging_face() -> None:
    """Profile the trainings of Hugging Face's `Trainer`, if the script imports it."""
    from lightning_forge_profiling.import_hook import after_import  # noqa: PLC0415

    def add(module: Any) -> None:
        from lightning_forge_profiling.plain_text import plain_logger  # noqa: PLC0415

        try:
            from lightning_forge_profiling.hugging_face import add_to_trainers  # noqa: PLC0415  (loads torch)

            add_to_trainers(module, callbacks)
        except Exception as exc:  # the script comes first
            plain_logger(__name__).warning("Hugging Face's Trainers are not profiled: %s: %s", type(exc).__name__, exc)

    if os.environ.get(RUN_OPTIONS):
        after_import({"transformers.trainer": add})


def begin_trial() -> bool:
    """Prepare the process for the trial that `forge-profiling try` started it for; whether it did."""
    options = os.environ.get(TRIAL_OPTIONS)
    if options:
        from lightning_forge_profiling.trial import applied  # noqa: PLC0415  (a process of `run` makes none)

        applied.begin(options)
    return bool(options)


def is_first_rank() -> bool:
    """Whether this process is rank 0 of a launcher, or there is no launcher."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


@cache
def _watch_exit() -> None:
    import atexit  # noqa: PLC0415

    atexit.register(say_what_was_fitted, os.getpid())


@cache
def say_what_was_fitted(pid: int) -> None:
    """Print the overview of the fits of process `pid` to standard error, or that there was none; once, and there."""
    import sys  # noqa: PLC0415  (every script of the environment imports this module)

    if pid != os.getpid() or not os.environ.get(RUN_OPTIONS) or not is_first_rank() or sys.stderr is None:
        return
    known = sys.modules.get("lightning_forge_profiling.run.fit_results")
    lines: Iterable[str] = [_NO_STEP if "Fabric" in _seen else _NO_FIT]
    if known is not None and known.FITS.begun:
        lines = known.FITS.overview()
    elif hasattr(sys, "last_value") or _children_may_have_fitted():
        lines = []
    sys.stderr.writelines(f"forge-profiling: {line}\n" for line in lines)


def _children_may_have_fitted() -> bool:
    """Whether child processes may be the ranks, as those of `ddp_spawn`."""
    if "Fabric" in _seen:  # for such ranks it chooses a port in this process, which is none of them
        return "MASTER_PORT" in os.environ and "LOCAL_RANK" not in os.environ
    return os.times().children_user > 0

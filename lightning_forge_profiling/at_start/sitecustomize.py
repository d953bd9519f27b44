"""Python imports this before a script that `forge-profiling run` starts, which may build no Trainer: it is told so.

Search path and environment are then as without it, and another `sitecustomize` is imported as it would be.
"""
# ruff: noqa: INP001  (a folder of the search path, no package)

import atexit
import os
import sys
from importlib import import_module


def _restore() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (at the start of every such script)
    sys.path[:] = [path for path in sys.path if path != here]
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != here]
    if any(others):
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def _import_other() -> None:
    ours = sys.modules.pop(__name__)
    try:
        import_module(__name__)  # that of the environment
    except ImportError as exc:
        if exc.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


def _sample() -> None:
    try:
        from lightning_forge_profiling import entry_point  # noqa: PLC0415

        entry_point.sample_stack()
        entry_point.watch_hugging_face()
    except Exception as exc:  # the script comes first
        sys.stderr.write(f"forge-profiling: the script is not sampled before its first fit: {exc}\n")


def _begin_trial() -> None:
    try:
        from lightning_forge_profiling import entry_point  # noqa: PLC0415

        if entry_point.begin_trial():
            here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))  # for ranks
    except BaseException as exc:  # a script that is no trial would train, and save what it has learned
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        sys.stderr.flush()
        os._exit(1)


def _say(pid: int) -> None:
    from lightning_forge_profiling import entry_point  # noqa: PLC0415  (when the script has ended)

    entry_point.say_what_was_fitted(pid)


if __name__ == "sitecustomize":  # and nobody looks at this file
    _restore()
    _sample()
    _begin_trial()
    atexit.register(_say, os.getpid())
    _import_other()

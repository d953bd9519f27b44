"""Starts the script for one trial and reads what it left: its record, its facts, or why it failed."""

import getpass
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path
from time import monotonic
from typing import Any, Final

import msgspec

from lightning_forge_profiling.comparison.source import Source, record_source
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.processes import kill, kill_group
from lightning_forge_profiling.record.reader import read_run, records_at
from lightning_forge_profiling.safe_files import read_regular
from lightning_forge_profiling.schema import Analysis, TrialFacts
from lightning_forge_profiling.timing.bootstrap import Estimate
from lightning_forge_profiling.trial.applied import RESULT
from lightning_forge_profiling.trial.changes import Change

STEPS: Final = 80  # steps that count in a trial, at least for so many seconds and at most for
_LEAST_S, _LIMIT_S = 2.0, 8.0
_DIAGNOSED_S, _DIAGNOSED_LIMIT_S = 4.0, 20.0  # of a run whose lines are sampled and some of whose steps are recorded
_WARMUP: Final = 10
_PREFETCHED: Final = 2  # batches that a worker has ready by default
_GRACE_S: Final = 2.0  # for the process to leave once its result is there
_QUIET: Final = {  # switches trackers off
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
}
_LOG: Final = "output.txt"
_MOST_CHARACTERS: Final = 120
_TAIL_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Measured:
    """One trial: what was measured, or why it failed."""

    source: Source | None
    facts: TrialFacts
    folder: Path
    seconds: float
    failure: str = ""  # "" if there is a measurement
    analysis: Analysis | None = None


@dataclass(slots=True)
class Trials:
    """Makes trials of one script, one after another.

    Args:
        command: what starts the script, with its arguments.
        folder: where each trial gets a folder.
        variables: the environment that has a process profiled with the options of the callbacks, and make a trial.
        limit_s: seconds that one process may take.
        validates: whether validation is made and counts.
        temporary: for temporary files, which processes that are ended leave; None for the usual folder.
    """

    command: Sequence[str]
    folder: Path
    variables: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, str]]
    limit_s: float = 600.0
    validates: bool = True
    temporary: Path | None = None
    starts: int = 0
    _waits: int = _WARMUP + 8

    def measure(self, changes: Sequence[Change], *, diagnosis: bool = False) -> Measured:
        """Start the script with some changes, and read what it measured.

        Args:
            changes: what to change; none for the baseline.
            diagnosis: whether the run is also to tell what bounds it, for which it is longer, with some steps recorded.
        """
        names = [*(["diagnosis"] if diagnosis else []), *(each.name for each in changes)]
        name = "-".join(names) or "baseline"
        folder = self.folder / f"{self.starts:02}-{name}"[:100]
        folder.mkdir(parents=True)
        self.starts += 1
        began = monotonic()
        code = self._start(folder, changes, diagnosis=diagnosis)
        seconds = monotonic() - began
        facts = _facts(folder)
        if facts is None:
            return Measured(None, TrialFacts(), folder, seconds, _failure(folder / _LOG, code))
        if facts.problems:
            return Measured(None, facts, folder, seconds, f"could not be applied: {'; '.join(facts.problems)}")
        prefetched = [each.num_workers * (each.prefetch_factor or _PREFETCHED) for each in facts.loaders]
        self._waits = max(self._waits, _WARMUP + max(prefetched, default=0))
        try:
            record = read_run(records_at(folder)[0])
            source = record_source(record)
        except ForgeProfilingError as exc:
            return Measured(None, facts, folder, seconds, str(exc))
        state = record.ranks[0].state
        analysis = None if state is None else state.report.analysis
        return Measured(with_validation(source, facts), facts, folder, seconds, analysis=analysis)

    def _start(self, folder: Path, changes: Sequence[Change], *, diagnosis: bool) -> int | None:
        """The exit code of the script; None if it took too long."""
        with (folder / _LOG).open("wb") as output:
            process = subprocess.Popen(
                [*self.command],
                env=self._environment(folder, changes, diagnosis=diagnosis),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return _wait(process, folder / RESULT, self.limit_s)
            finally:
                started = _descendants(process.pid)  # a launcher's ranks are in groups of their own
                with suppress(ProcessLookupError, PermissionError):  # it has ended, on Windows
                    kill_group(process.pid)
                process.wait()
                for pid in started:
                    with suppress(ProcessLookupError, PermissionError):
                        kill(pid)

    def _environment(self, folder: Path, changes: Sequence[Change], *, diagnosis: bool) -> dict[str, str]:
        more = sum(each.spec.get("loader", {}).get("set", {}).get("num_workers", 0) for each in changes)
        warmup = max(self._waits, _WARMUP + _PREFETCHED * more)
        specs = [each.spec for each in changes]
        trial = {
            "folder": str(folder),
            "seed": 1,
            "warmup": warmup,
            "steps": STEPS,
            "least_s": _DIAGNOSED_S if diagnosis else _LEAST_S,
            "limit_s": _DIAGNOSED_LIMIT_S if diagnosis else _LIMIT_S,
            "validates": self.validates,
            "specs": specs,
        }
        options: dict[str, Any] = {"ThroughputCallback": {"warmup_steps": warmup}}
        if diagnosis:
            options["ForgeProfilerCallback"] = {}
        port = str(_free_port())
        return {
            **os.environ,
            **({} if self.temporary is None else _temporary(self.temporary)),
            **_QUIET,
            "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
            "MASTER_PORT": port,
            "PET_MASTER_PORT": port,  # of torchrun
            **{name: value for spec in specs for name, value in spec.get("environment", {}).items()},
            **self.variables(options, trial),
        }


def _temporary(folder: Path) -> dict[str, str]:
    """The environment with another folder for temporary files, but with the usual one for compiled kernels."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": cache}


def _descendants(pid: int) -> list[int]:
    """All processes below one, where `/proc` tells."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            children[int(read_regular(path).rpartition(b")")[2].split()[1])].append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.pop(each, [])
    return found[1:]


def _wait(process: "subprocess.Popen[bytes]", result: Path, limit_s: float) -> int | None:
    """Wait until the process has left; once it has a result, not for long: other ranks may wait for rank 0."""
    until = monotonic() + limit_s
    while monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.5)
        if result.exists():
            until = min(until, monotonic() + _GRACE_S)
    return None


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _facts(folder: Path) -> TrialFacts | None:
    try:
        return msgspec.json.decode(read_regular(folder / RESULT), type=TrialFacts)
    except (OSError, ValueError):
        return None


def _failure(log: Path, code: int | None) -> str:
    """Why a script has left no result: its last line, as that of a traceback."""
    if code is None:
        return "it took too long"
    with suppress(OSError):
        lines = read_regular(log)[-_TAIL_BYTES:].decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith("forge-profiling: ")]
        if code and said:
            raised = [line for line in said if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
            return (raised or said)[-1][:_MOST_CHARACTERS]
    return "it ended before a Trainer had made a step" if not code else f"it ended with exit code {code}"


def with_validation(source: Source, facts: TrialFacts) -> Source:
    """The run with each step's share of a whole validation in it, if the trial validated.

    Args:
        source: the run, whose step in milliseconds has no validation.
        facts: the times of a validation in seconds.
    """
    share_ms = validation_ms(facts)
    if not share_ms:
        return source
    step = source.metrics["step"]
    value = step.value + share_ms
    error = None
    if step.log_error is not None:  # of a validation's few batches some 5 % are assumed
        error = hypot(step.log_error * step.value, 0.05 * share_ms) / value
    return replace(source, metrics={"step": Estimate(value=value, log_error=error, blocks=step.blocks)})


def validation_ms(facts: TrialFacts) -> float:
    """Milliseconds of validation for each training batch; 0 if none was made or it is unknown how often it comes."""
    if not (facts.validation_first_s and facts.validation_every):
        return 0.0
    whole_s = facts.validation_first_s + facts.validation_batch_s * max(facts.validation_batches - 1, 0)
    return 1e3 * whole_s / facts.validation_every


def python(*, module: bool) -> list[str]:
    """The interpreter, as it runs here, up to the script."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *options, *(["-m"] if module else [])]

"""What to record, as plain data, and the folders that traces are written to."""

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile
from typing import Final

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import TENSORBOARD_FOLDER, plugin_name, raw_folder, trace_name
from lightning_forge_profiling.safe_files import make_own_folder


class Phase(Enum):
    """The profiler's phase in a step."""

    WAIT = "wait"
    WARMUP = "warm-up"
    RECORD = "record"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The half-open range of steps `[start_step, end_step)` that is recorded, after one warm-up step.

    The profiler runs in the warm-up step, but its events are dropped: they contain the cost of starting it. A window
    that starts at step 0 has no warm-up step. Its first `light` steps are recorded without operators, which slow the
    host: the steps after them have operators, and explain what the light ones did.
    """

    start_step: int
    end_step: int
    light: int = 0

    def __post_init__(self) -> None:
        for name in ("start_step", "end_step"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigurationError(f"{name} must be an integer, got {value!r}.")
            if value < 0:
                raise ConfigurationError(f"{name} must not be negative, got {value}.")
        if self.end_step <= self.start_step:
            raise ConfigurationError(
                f"end_step must be greater than start_step: [{self.start_step}, {self.end_step}) records nothing. "
                f"end_step={self.start_step + 1} records the one step {self.start_step}."
            )

    @property
    def steps(self) -> int:
        """How many steps are recorded."""
        return self.end_step - self.start_step

    def later(self, steps: int) -> "StepWindow":
        """The window so many steps later."""
        return replace(self, start_step=self.start_step + steps, end_step=self.end_step + steps)

    def is_light(self, step: int) -> bool:
        """Whether a step is recorded without operators."""
        return self.start_step <= step < self.start_step + self.light

    def phase(self, step: int) -> Phase:
        """The phase of `step`."""
        if step >= self.end_step:
            return Phase.DONE
        if step >= self.start_step:
            return Phase.RECORD
        return Phase.WARMUP if step == self.start_step - 1 else Phase.WAIT

    def __str__(self) -> str:
        last = self.end_step - 1
        return f"step {last}" if self.steps == 1 else f"steps {self.start_step}-{last}"


_LATEST_START: Final = 100
STEADY_STEPS: Final = 6  # the fewest for an interval, for which the first recorded step does not count
NAMED_STEPS: Final = 2  # with operators, after the light ones: a step that differs from most has another one beside it
_MOST_WORKERS: Final = 8  # with more, a round of all of them is too long to be recorded


def steady_window(
    of_fit: int | None,
    of_epoch: int | None = None,
    batch: int = 0,
    *,
    warmup_steps: int,
    workers: int = 0,
    prefetched: int = 0,
    named: int = 0,
) -> StepWindow:
    """Where a run is likely to be steady, by its settings: at least six steps, by step 100 and a third of it.

    They come after the warm-up, and after the batches that the loader's workers have prefetched by the first step. If
    the workers deliver the share r of what training could take, these last for `prefetched / (1 - r)` steps: after
    twice their number a run that waits for data in more than half of its time does so in the window. The workers
    begin together, and so deliver together: a long step for the first of their batches, then short ones. So the steps
    that count are whole rounds of up to eight workers.

    Args:
        of_fit: the number of steps of the run; None if unknown.
        of_epoch: batches of an epoch; None if unknown. Between two epochs there are validation and new workers, so the
            window comes before if it does not lie within one.
        batch: the batch of its epoch that step 0 is.
        warmup_steps: steps that are not counted either.
        workers: processes of the loader.
        prefetched: batches that they hold ready, `num_workers * prefetch_factor`.
        named: how many steps with operators follow those, which are then light; 0 for operators in every step.

    Examples:
        >>> str(steady_window(2000, warmup_steps=10, workers=4, prefetched=8))
        'steps 26-34'
        >>> str(steady_window(30, warmup_steps=10, prefetched=16))
        'steps 10-15'
        >>> steady_window(2000, warmup_steps=10, named=2)
        StepWindow(start_step=10, end_step=18, light=6)
    """
    round_of = workers if 0 < workers <= _MOST_WORKERS else 1
    light = 1 + round_of * -(-(STEADY_STEPS - 1) // round_of)
    steps = light + named
    start = min(warmup_steps + 2 * prefetched, _LATEST_START)
    if of_fit is not None:
        start = min(start, max(of_fit // 3, 2))  # so that a step is left without the profiler
    if of_epoch:
        crossing = steps - (of_epoch - (batch + start) % of_epoch)
        if 0 < crossing <= start - warmup_steps:
            start -= crossing
    end = start + steps
    if of_fit is not None and end > of_fit:  # too short for two parts
        return StepWindow(start, max(of_fit, start + 1))
    return StepWindow(start, end, light if named else 0)


ACTIVITIES: Final = ("cpu", "cuda", "xpu", "mtia")  # names of `torch.profiler.ProfilerActivity`, in lower case


@dataclass(frozen=True, slots=True)
class ProfilingConfig:
    """What `build_profiler` records, and where to.

    It is checked when it is created, but only if enabled: a configuration file may have a disabled section that would
    not work.

    Args:
        enable: False records nothing.
        start_step: the first recorded step, counted from 0.
        end_step: the first step after the window.
        trace_dir: the folder for traces; each window gets a folder of its own in it.
        activities: what to record, of `"cpu"`, `"cuda"`, `"xpu"`, `"mtia"`; None records the CPU and the accelerator
            that is there.
        record_shapes: record the input shapes of operators, from which FLOPs are counted.
        profile_memory: record allocations; None for a window of an accelerator that has operators in every step. It
            would slow light steps, and on the CPU it adds nothing to the reports and makes PyTorch warn.
        with_stack: record Python stacks; slows the recorded steps.
        with_flops: let PyTorch estimate FLOPs for its own tables. The exported trace does not contain them; the reports
            count FLOPs from the shapes.
        tensorboard: also write a copy for TensorBoard's profiler plugin.
        analyze: also analyse the trace, and write `summary.json`, `summary.md` and `report.html` beside it.

    Raises:
        ConfigurationError: enabled, and the window is empty or negative, an activity unknown, or `trace_dir` empty or
            no path.

    Examples:
        >>> ProfilingConfig(enable=True, start_step=5, end_step=8).window.steps
        3
    """

    enable: bool = False
    start_step: int = 5
    end_step: int = 8
    trace_dir: str | PathLike[str] = "profiler_traces"
    activities: Sequence[str] | None = None
    record_shapes: bool = True
    profile_memory: bool | None = None
    with_stack: bool = False
    with_flops: bool = False
    tensorboard: bool = True
    analyze: bool = True

    def __post_init__(self) -> None:
        if not self.enable:
            return
        _ = self.window
        if not isinstance(self.trace_dir, str | PathLike):
            raise ConfigurationError(f"trace_dir must be a path, got {self.trace_dir!r}.")
        if not fspath(self.trace_dir):
            raise ConfigurationError('trace_dir must not be empty; the default is "profiler_traces".')
        if self.activities is not None:
            if isinstance(self.activities, str | bytes) or not isinstance(self.activities, Collection):
                raise ConfigurationError(f"activities must be a list of names or None, got {self.activities!r}.")
            unknown = [activity for activity in self.activities if activity not in ACTIVITIES]
            if unknown or not self.activities:
                raise ConfigurationError(
                    f"activities must name some of {', '.join(ACTIVITIES)}, got {list(self.activities)!r}; "
                    "None records the CPU and the accelerator that is there."
                )

    @property
    def window(self) -> StepWindow:
        """The steps to record."""
        return StepWindow(self.start_step, self.end_step)


def local_folder(name: str | os.PathLike[str]) -> Path | None:
    """The absolute path of a folder that a user names, as `~/runs` or `file:///runs`; None for one that is remote."""
    text = re.sub(r"^(file|local):(//)?(?=/)|^(file|local)://", "", os.fspath(name))
    return None if "://" in text else Path(text).expanduser().absolute()


def required_local_folder(name: str | os.PathLike[str]) -> Path:
    """The same where nothing is copied to a remote place, of a folder that can be written to."""
    folder = local_folder(name)
    if folder is None:
        raise ConfigurationError(
            f"trace_dir {os.fspath(name)!r} is not on this machine. Give a local folder, and copy it afterwards."
        )
    if problem := writable_folder_problem(folder):
        raise ConfigurationError(problem)
    return folder


def trace_path(folder: Path, rank: int) -> Path:
    """A rank's trace in the window's folder."""
    return folder / trace_name(rank)


def plugin_path(folder: Path, rank: int) -> Path:
    """The copy for TensorBoard's plugin."""
    return folder / TENSORBOARD_FOLDER / plugin_name(rank)


def claim(folders: Iterable[Path], rank: int) -> Path:
    """Claim the first folder that belongs to this user and has no trace of this rank."""
    why = FileExistsError("no folder is available for the trace")
    for folder in map(Path.absolute, folders):
        folder.parent.mkdir(parents=True, exist_ok=True)
        private = raw_folder(folder, rank)
        try:
            make_own_folder(folder)
            private.mkdir(mode=0o700)
        except FileExistsError as exc:
            why = exc
            continue
        if not trace_path(folder, rank).exists():
            return private / f"{token_hex(8)}.json"
        private.rmdir()
        why = FileExistsError(f"{folder} already holds a trace of rank {rank}")
    raise why


def window_folder(raw: Path) -> Path:
    """The claimed folder of a path that `claim` returned."""
    return raw.parents[1]


def numbered_folders(first: Path) -> Iterator[Path]:
    """`first`, `first.2`, `first.3`, ..."""
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}.{number}")


def writable_folder_problem(folder: Path) -> str:
    """Why a folder, which may not exist yet, cannot be written to; "" if it can. Creates nothing."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    advice = "Give trace_dir a folder that can be written to."
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a broken link"
        return f"trace_dir {str(folder)!r}: {str(existing)!r} is {what}. {advice}"
    try:
        TemporaryFile(dir=existing).close()
    except OSError as exc:
        return f"trace_dir {str(folder)!r}: {str(existing)!r} is not writable ({exc.strerror}). {advice}"
    return ""

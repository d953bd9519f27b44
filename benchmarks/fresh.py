"""Runs contenders as fresh processes in turns, and sums up what they report."""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

ROOT = Path(__file__).parents[1]
ENDS_S = 10.0

Outcomes = Mapping[str, Sequence["Outcome"]]
"""By contender, one outcome a turn."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process to start.

    Attributes:
        command: the program and its arguments.
        environment: variables to set; None removes one.
        timeout_s: after this many seconds the process is ended.
    """

    command: Sequence[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last JSON object a child printed, or None and what went wrong."""

    result: dict[str, Any] | None
    problem: str = ""


class StepEnds(Callback):
    """Host time at the end of each batch, and how fast the host is there.

    A shared machine's pace drifts by ten percent within one run. So a fixed piece of Python runs after each batch, in
    no step's time: what it takes tells the machine's pace. First in the Trainer's list this is ahead of what other
    callbacks do.
    """

    ROUNDS = 2000

    def __init__(self) -> None:
        self.ns: list[int] = []
        self.began: list[int] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Stamp the end of a batch."""
        self.ns.append(time.perf_counter_ns())
        counts: dict[int, list[int]] = {}
        for number in range(self.ROUNDS):
            counts.setdefault(number & 63, []).append(number)
        self.began.append(time.perf_counter_ns())

    def median_ms(self, first: int, end: int) -> float:
        """Median of the steps [first, end), each from the end of the one before to its own; `first` is at least 1."""
        return statistics.median((self.ns[step] - self.began[step - 1]) / 1e6 for step in range(first, end))

    def pace_ms(self, first: int, end: int) -> float:
        """Median of what the fixed piece of Python took after each of these steps."""
        return statistics.median((self.began[step] - self.ns[step]) / 1e6 for step in range(first, end))


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module with this Python."""
    return (sys.executable, "-m", name, *arguments)


def on_device(model: Callable[[], L.LightningModule]) -> L.LightningModule:
    """Build a model on the GPU, where there is one: a large one's random weights take the CPU a second or two."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return model()


def answer(**result: Any) -> None:
    """Report from a child: one line of JSON, with the machine it ran on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = f"{device}, torch {torch.__version__}, Lightning {L.__version__}"
    print(json.dumps({**result, "machine": machine}), flush=True)


def run(child: Child) -> Outcome:
    """Start a child and wait for it. It finds what this process finds, and the repository's modules."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    extended = {**os.environ, "PYTHONPATH": paths, **child.environment}
    environment = {name: value for name, value in extended.items() if value is not None}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a grandchild may outlive a pipe's reader
        process = subprocess.Popen(
            child.command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code: int | None = process.wait(child.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        printed, errors = _lines(out), _lines(err)
    result = _last_object(printed)
    if code == 0 and result is not None:
        return Outcome(result)
    if code is None:
        what = f"timed out after {child.timeout_s:.0f} s"
    else:
        what = f"crashed (exit code {code})" if code else "printed no result (exit code 0)"
    print("\n".join(errors[-30:]), file=sys.stderr, flush=True)
    return Outcome(None, f"{what}: {errors[-1].strip() if errors else 'nothing on stderr'}")


def in_turns(children: Mapping[str, Child], turns: int) -> dict[str, list[Outcome]]:
    """Run all children once a turn, every other turn in reverse order; progress goes to stderr."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in children}
    for turn in range(turns):
        for name in reversed(children) if turn % 2 else children:
            began = time.perf_counter()
            outcome = run(children[name])
            outcomes[name].append(outcome)
            spent = f"{time.perf_counter() - began:.0f} s"
            found = outcome.problem or json.dumps(outcome.result)  # a run that is cut off leaves its figures
            print(f"turn {turn + 1}, {name}: {spent}, {found}", file=sys.stderr, flush=True)
    return outcomes


def results(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Those of the children that ended well."""
    return [outcome.result for outcome in outcomes if outcome.result is not None]


def paired(
    mine: Sequence[Outcome], base: Sequence[Outcome], compare: Callable[[dict[str, Any], dict[str, Any]], float]
) -> list[float]:
    """One comparison for each turn in which both contenders ended well."""
    pairs = [(m.result, b.result) for m, b in zip(mine, base, strict=True)]
    return [compare(m, b) for m, b in pairs if m is not None and b is not None]


def middle(values: Sequence[float], form: str = ".3f") -> str:
    """The median as text, "-" without values."""
    return f"{statistics.median(values):{form}}" if values else "-"


def spread(values: Sequence[float], form: str = ".4f") -> str:
    """The median and the extremes as text, "-" without values."""
    return f"{middle(values, form)} ({min(values):{form}} to {max(values):{form}})" if values else "-"


def print_table(title: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]], outcomes: Outcomes) -> None:
    """Print the machine, a Markdown table with a row for each contender, and all problems.

    Args:
        title: what was measured.
        heads: the columns' heads; the first is that of the contenders.
        rows: by contender, the other cells.
        outcomes: by contender, what its children ended with. Where none ended well, the problem takes the row.
    """
    machine = next((result["machine"] for turns in outcomes.values() for result in results(turns)), "no results")
    print(f"\n{title}; {machine}\n\n| {' | '.join(heads)} |\n| --- |{' ---: |' * (len(heads) - 1)}")
    for name, cells in rows.items():
        turns = outcomes[name]
        shown = cells if results(turns) else [turns[-1].problem.split(":")[0], *["-"] * (len(cells) - 1)]
        print(f"| {' | '.join((name, *shown))} |")
    for name, turns in outcomes.items():
        for number, outcome in enumerate(turns, 1):
            if outcome.problem:
                print(f"{name}, turn {number}: {outcome.problem}")
    sys.stdout.flush()


def failed(outcomes: Outcomes) -> bool:
    """Whether any child ended badly."""
    return any(outcome.problem for turns in outcomes.values() for outcome in turns)


def keys(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of some of the known keys, in their own order."""
    known = list(known)

    def parse(text: str) -> list[str]:
        asked = text.split(",")
        unknown = set(asked) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
        return [key for key in known if key in asked]

    return parse


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_S)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _last_object(lines: Sequence[str]) -> dict[str, Any] | None:
    for line in reversed(lines):  # a launcher may print more after it
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None

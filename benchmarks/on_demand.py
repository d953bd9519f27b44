"""Whether all ranks record the same steps each time that a live run is asked, and what that does to it.

DDP runs on the CPU, or on GPUs where there are any, are asked for a window at random times, twenty times each. Then the
median step after the last window is compared with that of a run that was never asked, in turns; so is the longest step
that is not beside a window. What a window holds training up for is what the steps from the one before it to that after
it take more than usual.

    python -m benchmarks.on_demand --ranks 4 --requests 200
"""

import argparse
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.workloads import SmallKernels, silenced, trainer
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.record.files import read_plan, write_request
from lightning_forge_profiling.run.fit_window import MOST_WINDOWS
from lightning_forge_profiling.schema import WindowPlan, WindowRequest

_LIMIT_S: Final = 120.0
_AFTER_STEPS: Final = 300
_EARLY: Final = 50  # steps with the window of the settings, and what comes once
_SETTLES_S: Final = 10.0  # the last window's traces are compressed beside training


class _Ends(L.Callback):
    """Keeps the times of the latest steps, and ends the run when there is a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times_ms = folder, list[float]()
        self._before = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Note the step's time."""
        now = time.perf_counter()
        self.times_ms.append(1e3 * (now - self._before))
        self._before = now
        if trainer.global_step % 100 == 0 and (self.folder / "stop").exists():
            trainer.should_stop = True


def train(folder: Path, ranks: int) -> None:
    """Train on some ranks until there is a file `stop`, and write rank 0's times of the steps from step 1 on."""
    silenced()
    ends = _Ends(folder)
    profiler = ForgeProfilerCallback(analyze=False, tensorboard=False)
    callbacks = [profiler, ThroughputCallback(), ends]
    cuda = torch.cuda.is_available()
    options = {"devices": ranks, "accelerator": "gpu" if cuda else "cpu", "strategy": "ddp" if ranks > 1 else "auto"}
    fit = trainer(str(folder), -1, callbacks=callbacks, max_epochs=-1, enable_checkpointing=False, **options)
    fit.fit(SmallKernels(layers=4), DataLoader(torch.randn(100_000, 1, 64), batch_size=None))
    if fit.is_global_zero:
        (folder / "writing").write_text(json.dumps(ends.times_ms[1:]))  # the first is from before the first step
        (folder / "writing").rename(folder / "times")


@contextmanager
def running(ranks: int) -> Iterator[tuple[Path, Path]]:
    """A run in processes of its own, with its folder and that of its record; it ends with the context."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        port = str(random.randrange(20_000, 30_000))  # noqa: S311
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.on_demand", "--ranks", str(ranks), "--train", root],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        )
        try:
            wanted = "ranks.json" if ranks > 1 else "rank0.jsonl"
            _until(lambda: [*folder.rglob(wanted)], process)
            yield folder, next(folder.rglob("rank0.jsonl")).parent
            (folder / "stop").touch()
            process.wait(_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _recorded(folder: Path, ranks: int) -> bool:
    """Whether the window of the settings is over, in which a request would be refused."""
    written = {path.parent for path in folder.rglob(".rank*.raw/*.json")}  # which are compressed where a core is free
    return len(written) + len([*folder.rglob("rank*.trace.json.gz")]) >= ranks


def _until(condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> bool:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            return False
        time.sleep(0.1)
    return True


def ask(record: Path, number: int, chance: random.Random) -> WindowPlan | None:
    """Ask once, and wait until the window is over."""
    time.sleep(chance.uniform(0.0, 3.0))
    request = WindowRequest(id=str(number), steps=chance.randint(1, 4))
    write_request(record, request)

    def answer() -> WindowPlan | None:
        plan = read_plan(record)
        over = plan is not None and plan.request == request.id and plan.state in {"recorded", "refused"}
        return plan if over else None

    _until(answer)
    return answer()


def are_there(plan: WindowPlan, ranks: int) -> bool:
    """Whether each rank has left a trace of exactly the planned steps in the folder of the window."""
    wanted = {f"rank{rank}.trace.json.gz" for rank in range(ranks)}
    found = {path.name: path for path in Path(plan.folder).glob("rank*.trace.json.gz")}
    steps = [f'"ProfilerStep#{step}"' for step in range(plan.start, plan.start + plan.steps)]
    texts = [gzip.open(path, "rt").read() for path in found.values()]  # noqa: SIM115
    return {*found} == wanted and all({*re.findall(r'"ProfilerStep#\d+"', text)} == {*steps} for text in texts)


def main() -> None:
    """Ask runs, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.ranks)
        return
    chance = random.Random(1)  # noqa: S311
    same = asked = 0
    ratios, longest, held_ms = list[float](), list[str](), list[float]()
    most = MOST_WINDOWS - 1  # the first is that of the settings
    while asked < args.requests:
        plans = []
        with running(args.ranks) as (folder, record):
            _until(partial(_recorded, folder, args.ranks))
            for _ in range(min(most, args.requests - asked)):
                asked += 1
                plan = ask(record, asked, chance)
                good = plan is not None and plan.state == "recorded" and not plan.text
                good = good and plan is not None and _until(partial(are_there, plan, args.ranks))
                same += good
                plans += [plan] if plan is not None and plan.state == "recorded" else []
                print(f"request {asked}: {'the same steps on all ranks' if good else plan}", flush=True)
            time.sleep(_SETTLES_S)
            asked_ms = times_of(folder)
        with running(args.ranks) as (folder, _):
            time.sleep(2 * _SETTLES_S)
            never_ms = times_of(folder)
        usual, beside = median(asked_ms), {step for plan in plans for step in around(plan)}
        apart = [ms for step, ms in enumerate(asked_ms, start=1) if step not in beside and step > _EARLY]
        ratios.append(median(asked_ms[-_AFTER_STEPS:]) / median(never_ms[-_AFTER_STEPS:]))
        longest.append(f"{max(apart):.0f} and {max(never_ms[_EARLY:]):.0f}")
        held_ms += [sum(asked_ms[step - 1] - usual for step in around(plan)) for plan in plans]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{asked} asked, {same} the same on all {args.ranks} ranks; step after, of one never asked: {shown}")
        print(f"longest step apart from windows, and of a run never asked, ms: {', '.join(longest)}")
        print(f"a window holds training up for {median(held_ms):.0f} ms, {max(held_ms):.0f} at most", flush=True)


def times_of(folder: Path) -> list[float]:
    """End a run, and read its steps' times."""
    (folder / "stop").touch()
    _until((folder / "times").exists)
    return [float(ms) for ms in json.loads((folder / "times").read_text())]


def around(plan: WindowPlan) -> range:
    """The steps that a window may hold up: those before, in and after it."""
    return range(plan.start - 2, plan.start + plan.steps + 2)


if __name__ == "__main__":
    main()

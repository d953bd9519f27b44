"""What stack samples see of planted calls, and what looking costs a step in which Python sets the pace.

python -m benchmarks.stack_samplers

Each fit has calls of one kind and length planted in eight places, timed by clocks of their own: the share of that time
which the samples have. Then, in turns of 100 steps of one fit: looking, and not.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter, perf_counter_ns
from typing import Any, ClassVar

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.run.stack_sampler import StackSampler

TEXT = json.dumps(list(range(2000)))
MATRIX = torch.rand(64, 64)
TURN, SETTLED, TURNS = 100, 5, 40


def counts() -> None:
    """Pure Python, some 20 us."""
    for _ in range(600):
        pass


KINDS: dict[str, Callable[[], object]] = {
    "Python": counts,
    "a call in C": lambda: json.loads(TEXT),
    "operators": lambda: MATRIX @ MATRIX,
}
LENGTHS_MS = 0.5, 2.0, 10.0

spent_s: Counter[str] = Counter()


def plant(place: str, kind: str, ms: float) -> None:
    """Spend so long in calls of a kind, and note how long it was."""
    began = perf_counter()
    call = KINDS[kind]
    while 1e3 * (perf_counter() - began) < ms:
        call()
    spent_s[place] += perf_counter() - began


class Data(Dataset[torch.Tensor]):
    """One sample a batch."""

    def __init__(self, kind: str, ms: float, steps: int) -> None:
        self.planted, self.steps = (kind, ms), steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        plant("a sample", *self.planted)
        return torch.rand(8)


class Planted(L.LightningModule):
    """Spends its time in planted calls."""

    def __init__(self, kind: str, ms: float) -> None:
        super().__init__()
        self.layer, self.planted = torch.nn.Linear(8, 1), (kind, ms)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """In the step."""
        plant("training_step", *self.planted)
        return self.layer(batch).mean()

    def validation_step(self, _: torch.Tensor) -> None:
        """In validation."""
        plant("validation_step", *self.planted)

    def on_before_optimizer_step(self, _: Any) -> None:
        """In a hook of the module."""
        plant("on_before_optimizer_step", *self.planted)

    def on_train_epoch_end(self) -> None:
        """In a hook that comes seldom, and then takes long."""
        plant("on_train_epoch_end", self.planted[0], 50 * self.planted[1])

    def setup(self, stage: str) -> None:  # noqa: ARG002  (Lightning passes it by name)
        """In the set-up."""
        plant("setup", self.planted[0], 50 * self.planted[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The simplest one."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Hook(L.Callback):
    """A callback of the user's."""

    def __init__(self, kind: str, ms: float) -> None:
        self.planted = kind, ms

    def on_train_batch_end(self, *_: Any) -> None:
        """In each step."""
        plant("a callback", *self.planted)


class Seen(StackSampler):
    """Adds up what is seen in the caller of `plant`."""

    by_place: ClassVar[Counter[str]] = Counter()

    def _look(self, frame: Any) -> None:
        before = self._thread._at[0] if self._thread is not None else 0  # noqa: SLF001
        super()._look(frame)
        while frame is not None:
            if frame.f_code is plant.__code__:
                self.by_place[frame.f_locals["place"]] += perf_counter_ns() - before
            frame = frame.f_back


def fit(*callbacks: L.Callback, model: L.LightningModule, data: Dataset[Any], collate: Any = default_collate) -> None:
    """Train on the CPU, and print nothing."""
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), num_sanity_val_steps=0, **quiet)
    trainer.fit(model, DataLoader(data, 1, collate_fn=collate), DataLoader(data, 1))


def seen() -> None:
    """Print a table of the shares that were seen."""
    from lightning_forge_profiling.run import stack_sampler  # noqa: PLC0415

    stack_sampler.StackSampler = Seen  # type: ignore[misc]
    for kind in KINDS:
        for ms in LENGTHS_MS:
            spent_s.clear()
            Seen.by_place = Counter()

            def collate(samples: Any, kind: str = kind, ms: float = ms) -> Any:
                plant("collate", kind, ms)
                return default_collate(samples)

            steps = min(600, int(1500 / ms))
            callbacks = [ThroughputCallback(record=False), Hook(kind, ms)]
            fit(*callbacks, model=Planted(kind, ms), data=Data(kind, ms, steps), collate=collate)
            shares = {place: Seen.by_place[place] / 1e9 / took_s for place, took_s in spent_s.items()}
            shown = ", ".join(f"{place} {100 * share:.0f}" for place, share in shares.items())
            sys.stdout.write(f"{kind}, {ms:g} ms: {shown} %\n")


class Turns(L.Callback):
    """Looks for 100 steps, and not for 100, and times the steps of each."""

    def __init__(self, throughput: ThroughputCallback) -> None:
        self.times: tuple[list[float], list[float]] = [], []
        self._throughput, self._steps, self._ended = throughput, 0, 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        """Time the step."""
        now, turn = perf_counter(), self._steps // TURN % 2
        if self._steps % TURN >= SETTLED:
            self.times[turn].append(1e3 * (now - self._ended))
        self._steps += 1
        run = self._throughput.run
        if self._steps % TURN == 0 and run is not None and run.readings.sampler is not None:
            run.readings.sampler.pause(on=self._steps // TURN % 2 == 1)
        self._ended = perf_counter()


def cost() -> None:
    """Print what looking costs."""
    throughput = ThroughputCallback(record=False)
    turns = Turns(throughput)
    fit(throughput, turns, model=Planted("Python", 0.2), data=Data("Python", 0.2, TURN * TURNS))
    pairs = []
    size = TURN - SETTLED
    for at in range(size, min(map(len, turns.times)), size):
        on, off = (median(times[at : at + size]) for times in turns.times)
        pairs.append(100 * (on / off - 1))
    low, middle, high = quantiles(pairs, n=4)
    step_ms = median(turns.times[1])
    sys.stdout.write(f"a step of {step_ms:.2f} ms: {middle:+.2f} % (quartiles {low:+.2f} to {high:+.2f})\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    seen()
    cost()

"""What sampling the training thread's stack costs a step in which Python sets the pace, by two kinds of sampler.

pip install pyinstrument; python -m benchmarks.stack_samplers

In turns of 100 steps of one run: no sampler, a thread that looks 100 times a second (as `run/stack_sampler.py`
does 50 times), and pyinstrument's, which runs in the training thread at calls and returns.
"""

import logging
import sys
import threading
import warnings
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import lightning as L
import torch
from pyinstrument.low_level.stat_profile import setstatprofile  # type: ignore[import-not-found, unused-ignore]
from torch.nn import functional as F

PERIOD_S = 0.01
TURN = 100
SETTLED = 5
STEPS = 3000


def depth(frame: Any, *_: Any) -> int:
    """Walk a stack."""
    frames = 0
    while frame is not None:
        frame, frames = frame.f_back, frames + 1
    return frames


class Turns(L.Callback):
    """Switches from one sampler to the next, and times the steps of each."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"none": [], "in the thread": [], "beside it": []}
        self._kinds = list(self.times)
        self._steps = 0
        self._ended: float | None = None
        self._sampled = threading.get_ident()
        self._stop = threading.Event()

    def on_train_batch_end(self, *_: Any) -> None:
        """Time the step."""
        now, kind = perf_counter(), self._kinds[self._steps // TURN % 3]
        if self._ended is not None and self._steps % TURN >= SETTLED:
            self.times[kind].append(1e3 * (now - self._ended))
        self._steps += 1
        if self._steps % TURN == 0:
            self.stop()
            self._start(self._kinds[self._steps // TURN % 3])
        self._ended = perf_counter()

    def stop(self) -> None:
        """End every sampler."""
        setstatprofile(None)
        self._stop.set()

    def _start(self, kind: str) -> None:
        if kind == "in the thread":
            setstatprofile(depth, PERIOD_S)
        if kind == "beside it":
            self._stop = stop = threading.Event()
            threading.Thread(target=self._look, args=(stop,), daemon=True).start()

    def _look(self, stop: threading.Event) -> None:
        while not stop.wait(PERIOD_S):
            depth(sys._current_frames()[self._sampled])  # noqa: SLF001


class Deep(L.LightningModule):
    """Twenty small layers: a step of many calls."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(20)]
        self.body = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))

    def training_step(self, batch: Any) -> Any:
        """The loss."""
        return F.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def main() -> None:
    """Print a line for each sampler."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    turns, batch = Turns(), (torch.rand(8, 64), torch.zeros(8, dtype=torch.long))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[turns], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Deep(), loader)
    turns.stop()
    without = median(turns.times["none"])
    for kind, times in turns.times.items():
        low, _, high = quantiles(times, n=4)
        more_pct = 100 * (median(times) / without - 1)
        sys.stdout.write(f"{kind:14} {median(times):.3f} ms ({low:.3f} to {high:.3f}), {more_pct:+.1f} %\n")


if __name__ == "__main__":
    main()

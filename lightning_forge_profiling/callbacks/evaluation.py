"""Counts the batches of validation, test and prediction, and logs the rates of each run of such a loop."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.batch_counts import BatchCounter
from lightning_forge_profiling.callbacks.guard import guarded, guarded_end
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loggers import Loggers
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.rates import LoopRates


class EvaluationLoops:
    """Counts what such loops of a Trainer do, from its set-up to its teardown. Reads the host's clock only."""

    called = "Timing validation, test and prediction"

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None,
        tokens_fn: Callable[[Any], float] | None,
        ledger: LedgerClock | None = None,
    ) -> None:
        self._failed = False
        self._counter_of = partial(BatchCounter, batch_size_fn, tokens_fn, ledger)
        self._counters: dict[tuple[str, int], BatchCounter] = {}
        self._run: LoopRates | None = None
        self._loader: int | None = None
        self._since_ns = self._ns = self._steps = 0
        self._samples: float | None = 0.0
        self._tokens: float | None = 0.0
        self._loggers = Loggers()
        self._sums: dict[str, LoopRates] = {}

    @property
    def sums(self) -> Mapping[str, LoopRates]:
        """The sums over the runs that have ended, by loop."""
        return self._sums

    @guarded
    def begin(self, loop: str, trainer: Trainer) -> None:
        """A run of a loop begins; the sanity check does not count."""
        self._run = self._loader = None
        self._ns = self._steps = 0
        self._samples = self._tokens = 0.0
        if not trainer.sanity_checking:
            self._run = LoopRates(loop, runs=1, replicas=lightning_api.replicas(trainer))

    @guarded
    def end_batch(self, trainer: Trainer, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Count a batch, but for the first of each loader."""
        if self._run is None:
            return
        now_ns, key = perf_counter_ns(), (self._run.loop, dataloader_idx)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._counter_of(loop=self._run.loop)
        samples = counter.samples(batch, partial(lightning_api.evaluation_source, trainer, batch_idx, dataloader_idx))
        tokens = counter.tokens(batch)
        if dataloader_idx == self._loader:
            self._ns += now_ns - self._since_ns
            self._steps += 1
            self._samples = None if samples is None or self._samples is None else self._samples + samples
            self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        self._loader = dataloader_idx
        self._since_ns = perf_counter_ns()  # counting is no part of the loop

    @guarded
    def end(self, trainer: Trainer) -> None:
        """A run has ended: log its rates."""
        run, self._run = self._run, None
        if run is None or not self._steps:
            return
        seconds = (self._ns + perf_counter_ns() - self._since_ns) / 1e9
        run = replace(run, steps=self._steps, seconds=seconds, samples=self._samples, tokens=self._tokens)
        before = self._sums.get(run.loop)
        self._sums[run.loop] = run if before is None else before.plus(run)
        if trainer.is_global_zero:
            self._loggers.log(trainer.loggers, run.metrics(), lightning_api.logger_step(trainer))

    @guarded_end
    def close(self) -> None:
        """Warn of rows that were lost."""
        self._loggers.close()

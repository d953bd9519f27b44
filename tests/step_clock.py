"""A made-up host clock for the steps of a real fit."""

from functools import partial

from lightning_forge_profiling.run import fit_steps, run
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.events import HostEventSource


class StepClock:
    """Goes on by what it is told, and by a microsecond each time that it is read. The ledger keeps the host's."""

    def __init__(self, monkeypatch):
        self.ns = 0
        monkeypatch.setattr(fit_steps, "perf_counter_ns", self)
        monkeypatch.setattr(run, "CUDATimerCollection", self._timers)
        monkeypatch.setattr(run, "StepTimer", partial(StepTimer, clock_ns=self))

    def __call__(self):
        self.ns += 1000
        return self.ns

    def pass_time(self, ms):
        self.ns += int(ms * 1e6)

    def _timers(self, regions, device):
        return CUDATimerCollection(regions, events=HostEventSource(self), clock_ns=self)

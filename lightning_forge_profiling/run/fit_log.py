"""What `ThroughputCallback` logs of a fit, and when: rates, GPU telemetry, FLOP/s."""

from collections.abc import Callable, Mapping
from math import inf
from time import perf_counter
from typing import Final

import torch

from lightning_forge_profiling.guard import Guarded, guarded, guarded_end
from lightning_forge_profiling.names import (
    MFU,
    PEAK_TFLOPS,
    RANKS_EXPOSED_COMM_MS,
    RANKS_SLOWEST,
    RANKS_SPREAD_MS,
    STEP_MS,
    per_second,
)
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import exit_timeout_s
from lightning_forge_profiling.run.batches import WorkCounter
from lightning_forge_profiling.run.compute_rate import ComputeRate, recorded_metrics
from lightning_forge_profiling.run.fit_record import FitRecord, Live
from lightning_forge_profiling.run.fit_settings import FitSettings, ThroughputSettings
from lightning_forge_profiling.run.loggers import PUBLISH_S, Loggers, Result, publish
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.telemetry import RunTelemetry, run_telemetry
from lightning_forge_profiling.run.training import Training, last_logger_step
from lightning_forge_profiling.schema import (
    Analysis,
    LoopRates,
    RanksStatus,
    RunCompute,
    RunReport,
    RunTiming,
    TelemetrySummary,
    TraceReport,
)
from lightning_forge_profiling.timing.ledger import ledger_metrics

_log = plain_logger(__name__)

_UNASKED: Final = ThroughputSettings()


class FitLog(Guarded):
    """Logs metrics, reads the GPU's sensors and finds the device's peak of one fit."""

    called = "ThroughputCallback"

    def __init__(
        self,
        training: Training,
        settings: FitSettings,
        step_timer: StepTimer,
        *,
        loop_rates: Callable[[], Mapping[str, LoopRates]],
        metrics: Callable[[], dict[str, float]],
    ) -> None:
        self._training, self._settings = training, settings.throughput or _UNASKED
        self._rate = ComputeRate(training, self._settings, alone=len(settings.callbacks) == 1)
        self._loop_rates, self._further_metrics = loop_rates, metrics
        self._step_timer = step_timer
        self._summary: dict[str, float] = {}
        self._logged_at = -1
        self._of_gpu: dict[str, float] = {}
        self._log_due_s, self._shares_s = 0.0, -inf
        self._due_from(perf_counter())
        self._telemetry: RunTelemetry | None = None
        self._no_telemetry = ""
        self._loggers = Loggers()
        keeps = settings.keeps_record and not training.facts.is_trial and not settings.timing_only
        self.record = FitRecord(training, step_timer, keeps=keeps)

    def summary(self) -> dict[str, float]:
        """The metrics over all steps that count, up to now or, once they have ended, of the fit; {} before any."""
        metrics = dict(self._summary)
        if self._step_timer.regions.active:
            self._step_timer.deliver()
            metrics = self._run_metrics(self._step_timer.totals.steady())
        for rates in self.loops:
            metrics |= rates.metrics()
        return metrics

    @property
    def loops(self) -> tuple[LoopRates, ...]:
        """What the validation runs so far did; empty before the first."""
        return tuple(self._loop_rates().values())

    @guarded
    def begin(
        self,
        counter: WorkCounter,
        *,
        report: Callable[[], RunReport],
        live: Live,
    ) -> None:
        """Start the record, start to read the GPU's sensors, and find what the run's rate is compared with."""
        self.record.begin(live, report=report, metrics=self.summary, sensors=self._sensors)
        # other ranks' sensors are in their records alone
        if self._settings.telemetry_period_s is not None and (
            self._training.facts.is_zero or self.record.path is not None
        ):
            self._start_telemetry(self._training.facts.device, self._settings.telemetry_period_s)
        self._rate.begin(counter)

    def _sensors(self) -> dict[str, float]:
        return {} if self._telemetry is None else self._telemetry.latest()

    def _start_telemetry(self, device: torch.device, period_s: float) -> None:
        if device.type != "cuda":
            return
        try:
            self._telemetry = run_telemetry(device, period_s)
            self._telemetry.start()
        except Exception as exc:
            self._no_telemetry = f"{type(exc).__name__}: {exc}"
            _log.debug("", exc_info=exc)

    @guarded
    def end_step(self) -> None:
        """Log, when it is time to."""
        now_s = perf_counter()
        logs = now_s >= self._log_due_s and self._training.logs_now(self._settings.log_every_n_steps)
        if logs or now_s >= self.record.due_s:
            with self._step_timer.profiler_overhead():
                if logs:
                    self._step_timer.deliver()
                    self._log(self._step_timer.totals.take(), self._training.logger_step())
                self.record.state()

    def _due_from(self, now_s: float) -> None:
        """Set when the next entry is due: at the Trainer's interval after a pause, at an own interval at any step."""
        own = self._settings.log_every_n_steps is not None
        self._log_due_s = -inf if own else now_s + self._settings.log_period_s

    @property
    def due_s(self) -> float:
        """From when on `end_step` has something to do, by `time.perf_counter`."""
        return min(self._log_due_s, self.record.due_s)

    @guarded
    def other_steps_come(self, *, recording: bool, trace: TraceReport | None) -> None:
        """Sample what counts: neither the warm-up nor steps in which the profiler runs."""
        if self._telemetry is not None and self._step_timer.step == self._step_timer.warmup_steps:
            self._telemetry.restart()
        if recording:
            self.pause()
        else:
            self.resume()
        self.record.window_changed(trace)

    @guarded
    def pause(self) -> None:
        """Validation is not what the steps' telemetry is of."""
        if self._telemetry is not None:
            self._telemetry.pause()

    @guarded
    def resume(self) -> None:
        """The steps go on."""
        if self._telemetry is not None:
            self._telemetry.resume()

    @guarded_end
    def failing(self, exception: BaseException) -> None:
        """Put the exception on record."""
        self.record.failing(exception)

    @guarded_end
    def end(self) -> None:
        """Log the steps since the last log entry, unless they are few; a run that logged nothing logs what it has."""
        if self._telemetry is not None:
            self._telemetry.stop()
        timing, rates = self._step_timer.timing(), self._step_timer.totals.take()
        step = last_logger_step(self._training)
        fewest = self._training.log_interval(self._settings.log_every_n_steps) * self._training.accumulated / 2
        if self._logged_at < 0:
            rates = rates if rates.steps else timing
        elif step <= self._logged_at or rates.steps < fewest:
            rates = RunTiming()
        self._log(rates, step)
        self._summary = self._run_metrics(timing)
        self.record.loop_ended()

    @guarded_end
    def finish(self) -> None:
        """Nothing is left running, whatever became of the rest."""
        self.record.close_ranks()
        self._loggers.close()
        if self._telemetry is not None:
            self._telemetry.stop()

    @guarded_end
    def publish(self, analysis: Analysis, trace: TraceReport | None, *, interrupted: bool) -> None:
        """Give the result to the loggers that hold more than scalars."""
        if self._settings.publish and self._settings.of_script:
            result = Result(
                analysis,
                self.summary(),
                step=last_logger_step(self._training),
                trace=trace.url or str(trace.path.parent) if trace is not None and trace.path is not None else "",
                reports=trace.report_path.parent if trace is not None and trace.report_path is not None else None,
            )
            publish(
                self._training.loggers,
                result,
                limit_s=exit_timeout_s(self._training.facts.world_size) if interrupted else PUBLISH_S,
            )

    def telemetry(self, run: RunTiming) -> tuple[TelemetrySummary | None, str]:
        """What the GPU's sensors said over the steps that count, and why nothing; "" if not asked for."""
        if self._telemetry is None:
            return None, self._no_telemetry
        summary = self._telemetry.summary(run.per_second(run.samples), 0 if run.only_warmup else run.steps)
        if summary is not None:
            return summary, ""
        return None, self._telemetry.sampler.problem or "the run was over before the first sample"

    def compute(self, run: RunTiming, trace: TraceReport | None, recorded: Analysis | None) -> tuple[RunCompute, ...]:
        """How fast the run computed, by what its batches asked for and by what its recorded steps carried out."""
        of_window = self._rate.of_window(
            run, trace, recorded.ranks[0] if recorded is not None and recorded.ranks else None
        )
        metrics = recorded_metrics(of_window)
        self._summary |= metrics
        if MFU in metrics and of_window[0].peak_tflops is not None:
            metrics[PEAK_TFLOPS] = of_window[0].peak_tflops
        if metrics and self._settings.of_script:
            self._loggers.log(self._training.loggers, metrics, last_logger_step(self._training))
            self._loggers.close()
        return self._rate.of_run(run, of_window)

    def _run_metrics(self, steady: RunTiming) -> dict[str, float]:
        if not steady.steps:
            return {}
        metrics = self._rate.metrics(steady)
        if self._telemetry is not None:
            metrics |= self._telemetry.run_metrics(steady.per_second(steady.samples))
        return metrics | ledger_metrics(self._step_timer.ledger.read_parts(), steady)

    def _log(self, rates: RunTiming, step: int) -> None:
        self._rate.look_again()
        if not rates.steps:
            return
        step_timer, now_s = self._step_timer, perf_counter()
        self._due_from(now_s)
        metrics = self._rate.metrics(rates)
        if now_s - self._shares_s >= self._settings.shares_period_s or not step_timer.regions.active:
            self._shares_s = now_s
            metrics |= ledger_metrics(step_timer.ledger.read_parts(), step_timer.totals.steady())
        if self._telemetry is not None:
            of_gpu = self._telemetry.metrics(rates.samples, rates.total_ms)
            self._of_gpu = of_gpu or self._of_gpu
            metrics |= of_gpu
        metrics |= rank_metrics(self.record.status) | self._further_metrics()
        self._logged_at = step
        if self._settings.prog_bar:
            shown = (per_second("samples"), per_second("steps"))
            rate = next((name for name in shown if name in metrics), STEP_MS)
            self._training.show({name: metrics[name] for name in (rate, STEP_MS)})
        metrics |= self._rate.new_peak(metrics)
        if self._training.facts.is_zero and self._settings.of_script:
            self._loggers.log(self._training.loggers, metrics, step)
        self.record.log_entry(self._of_gpu | metrics, step)


def rank_metrics(status: RanksStatus | None) -> dict[str, float]:
    """The metrics of all ranks as they are now; what is unknown is left out."""
    if status is None:
        return {}
    own_ms = {one.rank: one.own_ms for one in status.ranks if one.own_ms is not None}
    slowest = max(own_ms, key=own_ms.__getitem__) if len(own_ms) == len(status.ranks) > 1 else None
    metrics = {
        RANKS_SLOWEST: slowest,
        RANKS_SPREAD_MS: status.spread_ms,
        RANKS_EXPOSED_COMM_MS: status.exposed_comm_ms,
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}

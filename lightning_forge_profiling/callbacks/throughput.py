"""`ThroughputCallback`: logs throughput and the time of each region of a step."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any, Final

import torch

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.arguments import (
    refuse_unless_between,
    refuse_unless_function,
    refuse_unless_integer,
    refuse_unless_operations,
)
from lightning_forge_profiling.callbacks.device_peak import run_peak
from lightning_forge_profiling.callbacks.folders import UPLOAD_S, finished_files, upload
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loggers import Loggers
from lightning_forge_profiling.callbacks.run_begin import RecordPlace, claim_place
from lightning_forge_profiling.callbacks.run_record import RunRecord
from lightning_forge_profiling.callbacks.run_report import publish_run, report_so_far, trace_of
from lightning_forge_profiling.callbacks.telemetry_schedule import RunTelemetry, run_telemetry
from lightning_forge_profiling.callbacks.timed_callback import DEFAULT_WARMUP_STEPS, TimedCallback
from lightning_forge_profiling.callbacks.window_flops import (
    GIVE_FLOPS,
    GIVE_PEAK,
    recorded_compute,
    recorded_metrics,
    with_advice,
    with_problem,
)
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.measured_peak import MeasuredPeak
from lightning_forge_profiling.gpu.telemetry import DEFAULT_PERIOD_S
from lightning_forge_profiling.names import MFU, MFU_MEASURED, PEAK_TFLOPS, STEP_MS, TFLOPS, per_second
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.timeouts import patience_s
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.budget import DEFAULT_SHARE
from lightning_forge_profiling.timing.goodput import run_metrics
from lightning_forge_profiling.timing.rates import Rates
from lightning_forge_profiling.timing.run_totals import RunSummary
from lightning_forge_profiling.timing.utilization import Compute, Peak

_log = plain_logger(__name__)

_SHORTEST_PERIOD_S: Final = 0.01
"""NVML needs 1 ms or more per sample; a shorter period adds cost, not information."""

_LOWEST_SHARE: Final = 1e-6


class ThroughputCallback(TimedCallback):
    """Logs samples, tokens and steps per second and milliseconds per region, without waiting for the GPU.

    Logged are `throughput/NAME_per_sec` for the whole job, `throughput/device/NAME_per_sec` for one of several devices,
    `time/REGION_ms` and, on a GPU, `time_host/REGION_ms`; with known FLOPs per batch `throughput/tflops_per_device`,
    and with a known peak `throughput/mfu`, a fraction; `run/goodput`, a fraction, and `run/KIND_pct`, what steps,
    validation, checkpoints, ... took of the run's wall time up to then, at most every ten seconds; at most once a
    second `gpu/...` for the GPU of rank 0. Rates are over device time between events, host time without a GPU. Warm-up
    steps, recorded steps, validation and checkpoints do not count.

    A row covers the accumulation cycles that have completed since the row before; on a GPU the last step or two come
    with the next row. Samples and tokens of rank 0 are multiplied by the number of data-parallel replicas, which is an
    estimate if ranks have uneven batches. At the end of fit rank 0 prints the verdict, what bounds the run and what to
    change first, with the times behind it.

    Args:
        warmup_steps: steps at the start of a fit that do not count: compilation, autotuning, the allocator's first
            blocks, and the batches that a loader had prefetched.
        batch_size_fn: returns the samples in a batch; None infers them from the DataLoader's `batch_size` and the
            batches.
        tokens_fn: returns the tokens in a batch; None logs no tokens. Neither function should return a tensor on the
            GPU.
        log_every_n_steps: how often to log; None for the Trainer's `log_every_n_steps`, but at most once a second, and
            once at the end of a shorter fit.
        prog_bar: also show samples/s (or steps/s) and the step's time in the progress bar.
        flops_per_batch: floating-point operations of one batch, forward and backward (`count_flops` counts them): a
            number, or a function of the batch; None reads the module's `flops_per_batch` attribute after each batch, if
            there is one, or else takes the FLOPs of the window that `ForgeProfilerCallback` records. Devices that share
            a batch share its FLOPs.
        peak_flops: peak FLOP/s of one device; None looks it up by the device and the type that the run computes in.
        measured_peak: the result of `measure_peak`; the rate is then also logged relative to it, as
            `throughput/mfu_measured`.
        telemetry_period_s: seconds between samples of the GPU's sensors, at least 0.01; None for no telemetry.
        overhead: the share of a step that timing may cost, 0.005 for half a percent. If splitting every step into
            regions would cost more, only some steps are split, spread evenly: `time/REGION_ms` is then estimated from
            those, while the step's time and all rates are over every step. None splits every step.
        record: write the run's record, `forge_record/` in the log folder: rates, totals and events as they come, to be
            read while it runs and after a crash.
        publish: also give the result at the end of fit to the Trainer's loggers that hold more than scalars:
            TensorBoard, W&B, MLflow, Comet.

    Raises:
        ConfigurationError: a negative or non-integer number of steps, a function that cannot be called, FLOPs that are
            not a positive number, a period below 0.01 s, or an `overhead` outside of (0, 1); in `setup`, a second
            callback of this class.

    Example:
        >>> callback = ThroughputCallback(warmup_steps=20, tokens_fn=lambda batch: batch["input_ids"].numel())
        >>> callback.summary()
        {}
    """

    row_period_s = 1.0
    """Rows at the Trainer's own interval come at most this often: TensorBoard alone takes 0.6 ms for one."""
    shares_period_s = 10.0
    """Rows have the shares of the run at most this often, and the first and the last one."""

    def __init__(
        self,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        batch_size_fn: Callable[[Any], int] | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        log_every_n_steps: int | None = None,
        prog_bar: bool = False,
        *,
        flops_per_batch: float | Callable[[Any], float] | None = None,
        peak_flops: float | None = None,
        measured_peak: MeasuredPeak | None = None,
        telemetry_period_s: float | None = DEFAULT_PERIOD_S,
        overhead: float | None = DEFAULT_SHARE,
        record: bool = True,
        publish: bool = True,
    ) -> None:
        super().__init__()
        refuse_unless_integer("warmup_steps", warmup_steps)
        refuse_unless_integer("log_every_n_steps", 0 if log_every_n_steps is None else log_every_n_steps)
        refuse_unless_function("batch_size_fn", batch_size_fn)
        refuse_unless_function("tokens_fn", tokens_fn)
        if not callable(flops_per_batch):
            refuse_unless_operations("flops_per_batch", flops_per_batch)
        refuse_unless_operations("peak_flops", peak_flops)
        if measured_peak is not None and not isinstance(measured_peak, MeasuredPeak):
            raise ConfigurationError(
                f"measured_peak takes what measure_peak() returns, got {measured_peak!r}; a number goes to peak_flops."
            )
        refuse_unless_between(
            _SHORTEST_PERIOD_S,
            telemetry_period_s,
            inf,
            f"telemetry_period_s must be a number of seconds from {_SHORTEST_PERIOD_S} on, or None for no telemetry",
        )
        refuse_unless_between(
            _LOWEST_SHARE,
            overhead,
            1,
            "overhead must be a share of the step between 0 and 1, as 0.005 for half a percent, or None to split every "
            "step into regions",
        )
        self.overhead = overhead
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn
        self.tokens_fn = tokens_fn
        self.log_every_n_steps = log_every_n_steps
        self.prog_bar = prog_bar
        self.flops_per_batch = flops_per_batch
        self.peak_flops = peak_flops
        self.measured_peak = measured_peak
        self.telemetry_period_s = telemetry_period_s
        self.record = record
        self.publish = publish
        self._summary: dict[str, float] = {}
        self._replicas = self._devices_per_batch = 1
        self._peak: Peak | None = None
        self._sought_peak = self._logged_peak = self._advised = False
        self._logged_at = -1
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._of_gpu: dict[str, float] = {}
        self._row_s, self._row_step, self._step_s = perf_counter(), 0, inf
        self._shares_s = -inf

    def _let_go(self) -> None:
        super()._let_go()
        self._telemetry: RunTelemetry | None = None
        self._no_telemetry = ""
        self._loggers = Loggers()
        self._place: RecordPlace | None = None
        self._run_record: RunRecord | None = None

    def summary(self) -> dict[str, float]:
        """The metrics over all steps that count, of the run under way or else the last one; {} before any.

        Returns:
            The logged names and their values on this process (with `ddp_spawn`, they stay in the spawned
            process).
        """
        if self._step_timer is not None and self._step_timer.active:
            self._step_timer.deliver()
            return self._run_metrics(self._step_timer.totals.steady())
        return dict(self._summary)

    def prepare(self, trainer: Trainer) -> None:
        """Forget the last fit, and agree with the other ranks on a folder for the record."""
        self._replicas, self._devices_per_batch = (
            lightning_api.replicas(trainer),
            lightning_api.devices_per_batch(trainer),
        )
        self._summary = {}
        self._peak = None
        self._sought_peak = self._logged_peak = self._advised = False
        self._logged_at = -1
        self._forget_rows()
        if self.record and not lightning_api.is_trial_run(trainer):
            self._place = claim_place(trainer)

    def begin(self, trainer: Trainer) -> None:
        """Start the record, start to read the GPU's sensors, and find what the run's rate is compared with."""
        if self._place is not None:
            self._start_record(trainer, self._place)
        if self.telemetry_period_s is not None and trainer.is_global_zero:
            self._start_telemetry(trainer.strategy.root_device, self.telemetry_period_s)
        if self._may_count or self._compares:
            self._find_peak(trainer)

    def _start_record(self, trainer: Trainer, place: RecordPlace) -> None:
        step_timer, peers = self._step_timer, self._peers
        clock = peers[0]._ledger_clock  # noqa: SLF001  (one of us)
        assert step_timer is not None  # noqa: S101
        assert clock is not None  # noqa: S101
        try:
            self._run_record = RunRecord(
                trainer,
                place,
                step_timer,
                report=lambda: report_so_far(
                    trainer,
                    step_timer,
                    peers,
                    ledger=self.ledger(),
                    continues_from=peers[0]._continues_from,  # noqa: SLF001  (one of us)
                    cpu=peers[0]._cpu,  # noqa: SLF001  (one of us)
                ),
                metrics=self.summary,
                ledger=clock,
            )
        except Exception as exc:
            _log.warning("This run will have no record: %s: %s", type(exc).__name__, exc)
            _log.debug("", exc_info=exc)

    @property
    def _compares(self) -> bool:
        """Whether the user gave something to compare a rate with."""
        return self.peak_flops is not None or self.measured_peak is not None

    @property
    def _may_count(self) -> bool:
        """Whether operations are counted, or the other callback's window may tell them."""
        return self.counts_flops or len(self._peers) > 1

    def _start_telemetry(self, device: torch.device, period_s: float) -> None:
        if device.type != "cuda":
            return
        try:
            self._telemetry = run_telemetry(device, period_s)
            self._telemetry.start()
        except Exception as exc:
            self._no_telemetry = f"{type(exc).__name__}: {exc}"
            _log.debug("", exc_info=exc)

    def _find_peak(self, trainer: Trainer) -> None:
        self._sought_peak = True
        try:
            self._peak = peak = run_peak(trainer, self.peak_flops, asks_power=self._may_count)
        except Exception as exc:
            _log.warning("No MFU: the device's peak could not be looked up: %s: %s", type(exc).__name__, exc)
            return
        if not trainer.is_global_zero or not self.counts_flops:
            return
        measured = self.measured_peak
        if measured is not None and self._reached(peak) is None:
            _log.warning("measured_peak is of %s and this run computes in %s: not used.", measured.dtype, peak.dtype)
        if peak.flops is not None:
            _log.info("MFU is of %s.", peak)
        elif peak.device != "cpu":
            self._advised = True
            _log.warning("No MFU: %s; %s.", peak.source, GIVE_PEAK.format(peak.dtype))

    def after_step(self, trainer: Trainer) -> None:
        """Log, when it is time to."""
        record, logs = self._run_record, lightning_api.logs_now(trainer, self.log_every_n_steps) and self._row_due()
        if logs or (record is not None and record.state_due()):
            with self.own_work():
                if logs and self._step_timer is not None:
                    self._step_timer.deliver()
                    self._log(trainer, self._step_timer.totals.take(), lightning_api.logger_step(trainer))
                if record is not None and record.state_due():
                    record.state()

    def _row_due(self) -> bool:
        """Whether enough time has passed for a row at the Trainer's own interval."""
        return self.log_every_n_steps is not None or perf_counter() - self._row_s >= self.row_period_s

    def idle_steps(self, trainer: Trainer) -> int:
        """Until the next row, if the steps go on as since the last one."""
        until_log = lightning_api.batches_until_log(trainer, self.log_every_n_steps)
        if self.log_every_n_steps is not None or self._step_timer is None:
            return until_log
        passed_s, steps = perf_counter() - self._row_s, self._step_timer.step - self._row_step
        step_s = passed_s / steps if steps else self._step_s
        return max(until_log, int((self.row_period_s - passed_s) / step_s))

    def before_other_steps(self) -> None:
        """Sample what counts: neither the warm-up nor steps in which the profiler runs."""
        if self._telemetry is not None and self._step_timer is not None:
            if self._step_timer.step == self._step_timer.warmup_steps:
                self._telemetry.restart()
            if self.profiled:
                self._telemetry.pause()
            else:
                self._telemetry.resume()
        if self._run_record is not None:
            self._run_record.window(trace_of(self._peers))

    def failing(self, exception: BaseException) -> None:
        """Put the exception on record."""
        if self._run_record is not None:
            self._run_record.failing(exception)

    def end(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Log the steps since the last row, unless they are few: else a run that logged nothing logs what it has."""
        if self._telemetry is not None:
            self._telemetry.stop()
        if self._step_timer is not None:
            run, rates = self._step_timer.summary(), self._step_timer.totals.take()
            step = lightning_api.last_logger_step(trainer)
            fewest = lightning_api.batches_per_row(trainer, self.log_every_n_steps) / 2
            if self._logged_at < 0:
                rates = rates if rates.steps else run.steady
            elif step <= self._logged_at or rates.steps < fewest:
                rates = Rates()
            self._log(trainer, rates, step)
            self._summary = self._run_metrics(run.steady)
        if self._run_record is not None:
            self._run_record.loop_ended()

    def finish(self, *, interrupted: bool) -> None:
        """Nothing is left running, whatever became of the rest."""
        self._loggers.close()
        if self._telemetry is not None:
            self._telemetry.stop()

    def concluded(self, trainer: Trainer, report: RunReport | None, *, interrupted: bool) -> None:
        """Close the record, and copy it to a remote folder; one that never began leaves no folder."""
        record, self._run_record = self._run_record, None
        place, self._place = self._place, None
        if record is not None:
            record.close(report)
            if place is not None and place.url:
                files = finished_files(place.folder, trainer.global_rank, others=False)
                limit_s = patience_s(trainer.world_size) if interrupted else UPLOAD_S
                upload(place.folder, place.url, files, limit_s=limit_s)
        elif place is not None:
            with suppress(OSError):
                place.folder.rmdir()

    def publish_result(self, trainer: Trainer, analysis: Analysis, *, interrupted: bool) -> None:
        """Give the result to the loggers that hold more than scalars."""
        if self.publish:
            publish_run(trainer, analysis, self._summary, self._peers, interrupted=interrupted)

    def pause(self) -> None:
        """Validation is not what the steps' telemetry is of."""
        if self._telemetry is not None:
            self._telemetry.pause()

    def resume(self) -> None:
        """The steps go on."""
        if self._telemetry is not None and not self.profiled:
            self._telemetry.resume()

    def telemetry(self, run: RunSummary) -> TelemetrySummary | str | None:
        """What the GPU's sensors said over the steps that count, or why nothing."""
        if self._telemetry is None:
            return self._no_telemetry or None
        rates = run.steady
        found = self._telemetry.summary(rates.per_second(rates.samples), 0 if run.only_warmup else rates.steps)
        return found or self._telemetry.problem or "the run was over before the first sample"

    def compute(
        self, trainer: Trainer, run: RunSummary, trace: TraceReport | None, recorded: Analysis | None
    ) -> tuple[Compute, ...]:
        """How fast the run computed, by what its batches asked for and by what its recorded steps carried out."""
        peak = self._peak
        if peak is None:
            return ()
        rate = run.steady.per_second(run.steady.flops) if self.counts_flops else None
        found: tuple[Compute, ...] = ()
        if rate is not None:
            by_batches = rate / lightning_api.devices_per_batch(trainer)
            found = (Compute("mfu", by_batches, peak, reached=self._reached(peak)),)
        if trace is not None and recorded is not None and recorded.ranks:
            of_window = recorded_compute(
                run,
                recorded.ranks[0],
                trace.steps,
                peak,
                peak_is_given=self.peak_flops is not None,
                reached=self._reached,
                model_is_counted=rate is not None,
            )
            self._log_recorded(trainer, of_window)
            found += of_window
        counter = self._peers[0]._counter  # noqa: SLF001  (one of us)
        problem = counter.flops_problem if counter is not None and rate is None else ""
        expected = self._compares and not self.counts_flops and bool(run.steady.steps)
        found = with_problem(found, peak, problem or (GIVE_FLOPS if expected and not found else ""))
        return found if peak.device == "cpu" or self._advised else with_advice(found)

    def _reached(self, peak: Peak) -> float | None:
        """What the device was measured to reach in the type that a peak is of."""
        measured = self.measured_peak
        return measured.flops if measured is not None and measured.dtype == peak.dtype else None

    def _log_recorded(self, trainer: Trainer, recorded: Sequence[Compute]) -> None:
        metrics = recorded_metrics(recorded)
        self._summary |= metrics
        if MFU in metrics and recorded[0].peak.flops is not None:
            metrics[PEAK_TFLOPS] = recorded[0].peak.flops / 1e12
        if metrics:
            self._loggers.log(trainer.loggers, metrics, lightning_api.last_logger_step(trainer))
            self._loggers.close()

    def _metrics(self, rates: Rates) -> dict[str, float]:
        on_device = self._step_timer is not None and self._step_timer.timers.on_device
        metrics = rates.metrics(
            replicas=self._replicas,
            on_device=on_device,
            devices_per_batch=self._devices_per_batch,
            peak_flops=None if self._peak is None else self._peak.flops,
        )
        reached = None if self._peak is None else self._reached(self._peak)
        if reached is not None and TFLOPS in metrics:
            metrics[MFU_MEASURED] = metrics[TFLOPS] * 1e12 / reached
        return metrics

    def _run_metrics(self, steady: Rates) -> dict[str, float]:
        if not steady.steps:
            return {}
        metrics = self._metrics(steady)
        if self._telemetry is not None:
            metrics |= self._telemetry.run_metrics(steady.per_second(steady.samples))
        return metrics | self._ledger_metrics(steady)

    def _ledger_metrics(self, steady: Rates) -> dict[str, float]:
        clock, step_timer = self._peers[0]._ledger_clock, self._step_timer  # noqa: SLF001  (one of us)
        if clock is None or step_timer is None:
            return {}
        return run_metrics(clock.read_parts(), steady if step_timer.timers.on_device else None)

    def _log(self, trainer: Trainer, rates: Rates, step: int) -> None:
        if self.counts_flops and not self._sought_peak:  # the module knows its FLOPs per batch after its first step
            self._find_peak(trainer)
        if not rates.steps or self._step_timer is None:
            return
        step_timer, now_s = self._step_timer, perf_counter()
        self._step_s = (now_s - self._row_s) / max(step_timer.step - self._row_step, 1)
        self._row_s, self._row_step = now_s, step_timer.step
        metrics = self._metrics(rates)
        if now_s - self._shares_s >= self.shares_period_s or not step_timer.active:
            self._shares_s = now_s
            metrics |= self._ledger_metrics(step_timer.totals.steady())
        if self._telemetry is not None:
            of_gpu = self._telemetry.metrics(rates.samples, rates.total_ms)
            self._of_gpu = of_gpu or self._of_gpu
            metrics |= of_gpu
        self._logged_at = step
        if self.prog_bar:
            shown = (per_second("samples"), per_second("steps"))
            rate = next((name for name in shown if name in metrics), STEP_MS)
            lightning_api.show_in_progress_bar(trainer, {name: metrics[name] for name in (rate, STEP_MS)})
        if MFU in metrics and not self._logged_peak and self._peak is not None and self._peak.flops:
            self._logged_peak = True
            metrics[PEAK_TFLOPS] = self._peak.flops / 1e12
        if trainer.is_global_zero:
            self._loggers.log(trainer.loggers, metrics, step)
        if self._run_record is not None:
            self._run_record.row(self._of_gpu | metrics, step)

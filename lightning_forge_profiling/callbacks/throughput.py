"""`ThroughputCallback`: logs throughput and the time of each region of a step."""

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any, Final, Literal

from msgspec.structs import replace

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler, ProfilerProxy
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer, evaluation_source
from lightning_forge_profiling.callbacks.lightning_training import LightningTraining
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback, active_callbacks
from lightning_forge_profiling.diagnosis.loader import LoaderWait, loader_advice
from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.gpu.telemetry import DEFAULT_PERIOD_S
from lightning_forge_profiling.guard import Guarded, guarded, guarded_end
from lightning_forge_profiling.names import VALIDATION_DATA, VALIDATION_STEP, VALIDATION_TRANSFER
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.batches import BatchCounter
from lightning_forge_profiling.run.fit_settings import DEFAULT_WARMUP_STEPS, RecordingSettings, ThroughputSettings
from lightning_forge_profiling.run.loggers import Loggers
from lightning_forge_profiling.run.run import Run
from lightning_forge_profiling.run.run_settings import loader_settings
from lightning_forge_profiling.schema import LoopRates
from lightning_forge_profiling.timing.completed_steps import DEFAULT_SHARE
from lightning_forge_profiling.timing.counters import added
from lightning_forge_profiling.timing.ledger import LedgerClock

_log = plain_logger(__name__)


class ThroughputCallback(TimedCallback):
    """Logs samples, tokens and steps per second and milliseconds per region, without waiting for the GPU.

    Logged are `throughput/NAME_per_sec` for the whole job, `throughput/device/NAME_per_sec` for one of several devices,
    `time/REGION_ms` and, on a GPU, `time_host/REGION_ms`; with known FLOPs per batch `throughput/tflops_per_device`,
    and with a known peak `throughput/mfu`, a fraction; `run/goodput`, a fraction, and `run/KIND_pct`, what steps,
    validation, checkpoints, ... took of the run's wall time up to then, at most every ten seconds; at most once a
    second `gpu/...` for the GPU of rank 0. Rates are over device time between events, host time without a GPU. Warm-up
    steps, recorded steps, validation and checkpoints do not count.

    At the end of each validation, test and prediction their own rates are logged, `throughput/LOOP/NAME_per_sec` for
    `validation`, `test` and `predict`: wall time, without the first batch of each loader. `time/LOOP/NAME_ms` is what a
    batch takes in `data` (the wait for the loader), `transfer` and `step`, by the host's clock.

    An entry covers the accumulation cycles that have completed since the one before; on a GPU the last step or two come
    with the next. Samples and tokens of rank 0 are multiplied by the number of data-parallel replicas, which is an
    estimate if ranks have uneven batches. At the end of fit rank 0 prints the verdict, what bounds the run and what to
    change first, with the times behind it.

    Args:
        warmup_steps: steps at the start of a fit that do not count: compilation, autotuning, the allocator's first
            blocks, and the batches that a loader had prefetched.
        batch_size_fn: returns the samples in a batch; None takes the first dimension of its first tensor, or the
            DataLoader's `batch_size` where these differ in the first batch.
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
        telemetry_period_s: seconds between samples of the GPU's sensors, at least 0.01; None for no telemetry.
        overhead: the share of a step that timing may cost, 0.005 for half a percent. If splitting every step into
            regions would cost more, only some steps are split, spread evenly: `time/REGION_ms` is then estimated from
            those, while the step's time and all rates are over every step. None splits every step.
        record: write the run's record, `forge_record/` in the log folder: rates, totals and events as they come, to be
            read while it runs and after a crash.
        window: `"on-demand"` to record steps when `forge-profiling trace` asks for them, without a
            `ForgeProfilerCallback`, which can be asked anyway. Nothing is recorded until then.
        publish: also give the result at the end of fit to the Trainer's loggers that hold more than scalars:
            TensorBoard, W&B, MLflow, Comet.

    Raises:
        ConfigurationError: a negative or non-integer number of steps, a function that cannot be called, FLOPs that are
            not a positive number, a period below 0.01 s, an unknown `window`, or an `overhead` outside of (0, 1); in
            `setup`, a second callback of this class.

    Examples:
        >>> callback = ThroughputCallback(warmup_steps=20, tokens_fn=lambda batch: batch["input_ids"].numel())
        >>> callback.summary()
        {}
    """

    settings: ThroughputSettings
    _loops: "EvaluationLoops | None" = None  # of the run that the Trainer is in

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
        telemetry_period_s: float | None = DEFAULT_PERIOD_S,
        overhead: float | None = DEFAULT_SHARE,
        record: bool = True,
        window: Literal["on-demand"] | None = None,
        publish: bool = True,
    ) -> None:
        super().__init__(
            ThroughputSettings(
                warmup_steps=warmup_steps,
                batch_size_fn=batch_size_fn,
                tokens_fn=tokens_fn,
                log_every_n_steps=log_every_n_steps,
                prog_bar=prog_bar,
                flops_per_batch=flops_per_batch,
                peak_flops=peak_flops,
                telemetry_period_s=telemetry_period_s,
                overhead=overhead,
                record=record,
                window=window,
                publish=publish,
            )
        )
        self._loop_rates: dict[str, LoopRates] = {}

    def summary(self) -> dict[str, float]:
        """The metrics over all steps that count, of the run under way or else the last one; {} before any.

        Returns:
            The logged names and their values on this process (with `ddp_spawn`, they stay in the spawned
            process): of the last fit with its validation runs, and of `validate`, `test` and `predict` after it.
        """
        log = None if self.run is None else self.run.log
        metrics = dict(self.fit_results.summary) if log is None else log.summary()
        for rates in self.loop_rates().values():
            metrics |= rates.metrics()
        return metrics

    def loop_rates(self) -> dict[str, LoopRates]:
        """What validation, test and prediction did since the last fit began, by loop."""
        return self._loop_rates | ({} if self._loops is None else self._loops.sums)

    def join(self, run: Run) -> None:
        """Agree with the other ranks on a folder for the record."""
        self._leave_loops()
        self._loop_rates = {}
        run.add_log(self.loop_rates)
        if not any(isinstance(settings, RecordingSettings) for settings in run.settings.callbacks):
            run.add_window()  # one that a live run may be asked for

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find or make the run of a fit, and count the batches of the loops without training."""
        super().setup(trainer, pl_module, stage)
        self._leave_loops()
        if any(self is one for one in active_callbacks(trainer.callbacks)):
            self._loop_rates = {} if stage == "fit" else self._loop_rates
            ledger = None if self.run is None else self.run.ledger
            self._loops = EvaluationLoops(self.settings, ledger)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the fit, or whatever else the Trainer ran."""
        super().teardown(trainer, pl_module, stage)
        self._leave_loops()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the run: no other hook will be called."""
        super().on_exception(trainer, pl_module, exception)
        self._leave_loops()

    def _leave_loops(self) -> None:
        """Keep the rates, and nothing else of the run."""
        self._loop_rates = self.loop_rates()
        loops, self._loops = self._loops, None
        if loops is not None:
            loops.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the step, and count its batches."""
        super().on_validation_start(trainer, pl_module)
        self._loop_begins("validation", trainer)

    def on_validation_batch_end(  # noqa: PLR0917  (Lightning calls it like that)
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        if self._loops is not None:
            self._loops.end_batch(trainer, batch, dataloader_idx)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the rate of the validation. Training goes on."""
        self._loop_ends(trainer)
        super().on_validation_end(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the batches of the test."""
        self._loop_begins("test", trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the rates."""
        self._loop_ends(trainer)

    on_predict_end = on_test_end

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the batches of the prediction."""
        self._loop_begins("predict", trainer)

    def _loop_begins(self, loop: str, trainer: Trainer) -> None:
        if self._loops is not None:
            self._loops.begin(loop, trainer)

    def _loop_ends(self, trainer: Trainer) -> None:
        if self._loops is not None:
            self._loops.end(trainer)


_WAITS_S: Final = 1.0
_WAITS: Final = 0.5  # of a loop's time


def _say_if_it_waits(run: LoopRates, training: LightningTraining) -> None:
    """Log what to do about the loader of a loop outside of a fit that mostly waits for it."""
    if run.inside_s["data"] < max(_WAITS_S, _WAITS * run.seconds):
        return
    settings = loader_settings(training, validation=True)
    wait_ms, batch_ms = (1e3 * seconds / run.steps for seconds in (run.inside_s["data"], run.seconds))
    wait = LoaderWait(
        host_ms=wait_ms,
        exposed_ms=wait_ms,
        step_ms=batch_ms,
        on_gpu=training.facts.device.type == "cuda",
        settings=settings and replace(settings, batch_ms=None),  # which is of a fit's validation
    )
    waits = f"{in_ms(wait_ms)} of each {in_ms(batch_ms)} batch"
    _log.warning("%s waits %s for its loader. %s", run.loop, waits, loader_advice(wait)[0])


_INSIDE: Final = {"data": VALIDATION_DATA, "transfer": VALIDATION_TRANSFER, "step": VALIDATION_STEP}


class EvaluationLoops(Guarded):
    """Counts what such loops of a Trainer do, from its set-up to its teardown. Reads the host's clock only.

    Args:
        settings: of the callback.
        ledger: that of the fit; None outside of one, where the loop's actions are entered into one of its own.
    """

    called = "Timing validation, test and prediction"

    def __init__(self, settings: ThroughputSettings, ledger: LedgerClock | None = None) -> None:
        self._logs, self._of_fit = settings.of_script, ledger
        self._parts = ledger or LedgerClock(0)
        self._parts_before: Mapping[str, int] = {}
        self._trainer: Trainer | None = None  # whose profiler is wrapped
        self._counter_of = partial(BatchCounter, settings.batch_size_fn, settings.tokens_fn, ledger)
        self._counters: dict[tuple[str, int], BatchCounter] = {}
        self._run: LoopRates | None = None
        self._loader: int | None = None
        self._since_ns = self._ns = 0
        self._loggers = Loggers()
        self.sums: dict[str, LoopRates] = {}  # over the runs that have ended, by loop

    @guarded
    def begin(self, loop: str, trainer: Trainer) -> None:
        """A run of a loop begins; the sanity check does not count."""
        self._run = self._loader = None
        self._ns = 0
        if not trainer.sanity_checking:
            self._run = LoopRates(
                loop, runs=1, replicas=lightning_api.replicas(trainer), inside_s=dict.fromkeys(_INSIDE, 0.0)
            )
            self._parts_before = self._parts.peek()
            if self._of_fit is None and self._trainer is None:
                parts = lightning_api.evaluation_parts(trainer, loop)
                trainer.profiler = BoundaryProfiler(trainer.profiler, None, parts=parts, ledger=self._parts)
                self._trainer = trainer

    @guarded
    def end_batch(self, trainer: Trainer, batch: Any, dataloader_idx: int) -> None:
        """Count a batch, but for the first of each loader."""
        run = self._run
        if run is None:
            return
        now_ns, key = perf_counter_ns(), (run.loop, dataloader_idx)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._counter_of(loop=run.loop)
        samples = counter.samples(batch, evaluation_source, trainer, dataloader_idx)
        tokens = counter.tokens(batch)
        before_ns, parts_ns = self._parts_before, self._parts.peek()
        self._parts_before = parts_ns
        if dataloader_idx == self._loader:
            took_s = {name: (parts_ns.get(part, 0) - before_ns.get(part, 0)) / 1e9 for name, part in _INSIDE.items()}
            self._ns += now_ns - self._since_ns
            self._run = replace(
                run,
                steps=run.steps + 1,
                samples=added(run.samples, samples),
                tokens=added(run.tokens, tokens),
                inside_s={name: s + took_s[name] for name, s in run.inside_s.items()},
            )
        self._loader = dataloader_idx
        self._since_ns = perf_counter_ns()  # counting is no part of the loop

    @guarded
    def end(self, trainer: Trainer) -> None:
        """A run has ended: log its rates."""
        run, self._run = self._run, None
        self._leave_profiler()
        if run is None or not run.steps:
            return
        run = replace(run, seconds=(self._ns + perf_counter_ns() - self._since_ns) / 1e9)
        self.sums[run.loop] = self.sums[run.loop].plus(run) if run.loop in self.sums else run
        if self._of_fit is None and trainer.is_global_zero:
            _say_if_it_waits(run, LightningTraining(trainer, trainer.lightning_module, ()))
        if trainer.is_global_zero and self._logs:
            self._loggers.log(trainer.loggers, run.metrics(), lightning_api.logger_step(trainer))

    @guarded_end
    def close(self) -> None:
        """Warn of entries that were lost."""
        self._leave_profiler()
        self._loggers.close()

    def _leave_profiler(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            ProfilerProxy.uninstall(trainer)

"""The content of `summary.json`, from which all reports are made: verdict, findings, figures.

Names end in the unit. Percentages are of the step unless the name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from lightning_forge_profiling.names import OWN_WORK
from lightning_forge_profiling.notebook import ShownInNotebook
from lightning_forge_profiling.results.memory import RunMemory
from lightning_forge_profiling.results.rank import Distribution, RankSummary
from lightning_forge_profiling.results.run import (
    CpuUse,
    LoaderSettings,
    OptimizerSettings,
    Recompilation,
    SampledLine,
    ShareInterval,
    SlowStep,
    Switches,
)
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.timing.spans import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Predicted time saved by the fix of a finding.

    Attributes:
        ms_per_step: milliseconds per step; of a finding on the whole run, spread over its steps.
        pct: the same in percent of the step.
        at_most: whether it is an upper bound; else the expected value.
        text: the same as a sentence.
        low_pct: lower end of the interval of `pct`; None where the steps were not played again.
        high_pct: its upper end.
    """

    ms_per_step: float
    pct: float
    at_most: bool
    text: str
    low_pct: float | None = None
    high_pct: float | None = None


SCHEMA_VERSION: Final = 1

NOTHING_STANDS_OUT: Final = "nothing stands out"
NO_VERDICT: Final = "no verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWait:
    """Time that one rank waits for the others in collectives.

    Attributes:
        rank: the global rank.
        comm_ms_per_step: time in collectives that were matched over the ranks.
        wait_ms_per_step: the part of it beyond the shortest duration of each collective on any rank.
    """

    rank: int
    comm_ms_per_step: float
    wait_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective in one process group, matched over the ranks.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: name of the process group.
        calls_per_step: calls per step.
        megabytes_per_step: input of one rank; 0 if the trace does not record it.
        cost_ms_per_step: shortest duration over the ranks, summed: the communication itself.
        wait_ms_per_step: time beyond that, mean over the ranks: waiting for the last rank to join.
    """

    name: str
    group: str
    calls_per_step: float
    megabytes_per_step: float
    cost_ms_per_step: float
    wait_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause of lost time, with its evidence and the fix.

    Attributes:
        code: stable identifier, such as `input-bound`.
        share_pct: cost in percent of the step, or of the fit (see `of`); of a trace's finding the mean over the ranks.
        rank: the rank it applies to; None for all.
        source: `trace` for the recorded window, `run` for the regions of the whole run.
        title: one sentence with the key numbers.
        evidence: the numbers behind it; names end in the unit.
        advice: the fix, with the name of the setting.
        saves: predicted saving of the fix; None if unknown or without a fix.
        of: what `share_pct` is a share of: the `step`, the wall time of the `run` from the start of the fit, or the
            GPU's `memory`, for a finding that costs no time.
        low_pct: lower end of the 95 % interval of `share_pct` by the run's own steps; None if unknown.
        high_pct: upper end of it.
        typical_pct: the share in typical steps, as the median over blocks of them; None if unknown.
        fix: the fix as code or as a command to copy; "" where the advice is all there is.
    """

    code: str
    share_pct: float
    rank: int | None
    source: Literal["trace", "run"]
    title: str
    evidence: Mapping[str, float | str]
    advice: str
    saves: Saving | None = None
    of: Literal["step", "run", "memory"] = "step"
    low_pct: float | None = None
    high_pct: float | None = None
    typical_pct: float | None = None
    fix: str = ""

    @property
    def whole(self) -> str:
        """What `share_pct` is a share of, in words."""
        return {"step": "the step", "run": "the fit", "memory": "the GPU's memory"}[self.of]

    @property
    def remedy(self) -> str:
        """The advice, followed by its predicted saving."""
        return self.advice if self.saves is None else f"{self.advice} {self.saves.text}"

    @property
    def saved_pct(self) -> tuple[float, float] | None:
        """The interval of `saves.pct`: its own, or as wide in proportion as that of the share; None if unknown."""
        if self.saves is not None and self.saves.low_pct is not None and self.saves.high_pct is not None:
            return self.saves.low_pct, self.saves.high_pct
        if self.saves is None or self.low_pct is None or self.high_pct is None or self.share_pct <= 0:
            return None
        scale = self.saves.pct / self.share_pct
        return scale * self.low_pct, min(scale * self.high_pct, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A rule of thumb that applies; weaker than a finding."""

    code: str
    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRegion:
    """Time of one region over the counted steps of a run.

    Attributes:
        device_ms: mean per step on the GPU's timeline; of the host without a GPU.
        host_ms: mean per step on the host.
        p50_ms: median of what `device_ms` is the mean of, over the latest 1024 steps whose regions were timed; None if
            unknown.
        p95_ms: 95th percentile of the same; None for fewer than 20 steps.
    """

    device_ms: float
    host_ms: float
    p50_ms: float | None = None
    p95_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCompute:
    """Compute rate of one device over the counted steps, and the peak that it is relative to.

    Attributes:
        kind: `mfu` counts the operations that the model requires, `hfu` those that the device executed.
        tflops: 10¹² operations per second of one device; None if unknown, for the reason in `peak_source`.
        dtype: data type of the peak.
        device: the device that the peak is of.
        peak_tflops: peak of the device; None if unknown.
        peak_source: where the peak is from, or why it is unknown.
        pct_of_peak: MFU or HFU in percent; None without a peak.
        measured_tflops: rate that `measure_peak` reached on the device; None if it was not measured.
        pct_of_measured: the rate in percent of that.
        note: caveat of the FLOP count; "" without one.
    """

    kind: Literal["mfu", "hfu"]
    tflops: float | None
    dtype: str
    device: str
    peak_tflops: float | None
    peak_source: str
    pct_of_peak: float | None
    measured_tflops: float | None = None
    pct_of_measured: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Where the time of one rank went by its own clock, for a comparison with the other ranks.

    Attributes:
        rank: the global rank.
        host: name of its machine.
        steps: number of counted steps.
        step_ms: mean step time.
        leaves_ms: self time per step: of regions, and of hooks and loggers by their part of the ledger, which sum to
            the step. Device time on a GPU. Parts outside of the step are per step of the fit.
        errors_ms: half of the 95 % intervals of the regions' means, which may be of few steps, and of `own work` where
            waits are measured; {} if unknown.
        on_device: whether times are device times.
        outside: the leaves outside of the step, such as `validation`.
        cpu: use of the cores by the rank; None if unknown.
        exposed_ms: by leaf, communication and waiting that nothing hides, by the rank's own events; None if that was
            not measured.
        unmeasured: leaves that may have further waits, which its events do not cover.
        waits_ms: by leaf, the part in which the rank waits for other ranks; {} if no other rank is known.
        starved_pct: share of the steps in which the GPU waited for the host; None if unknown.
        sm_mhz: mean clock of its GPU; None if unknown.
        throttled_pct: share of the time in which that was lowered; None if unknown.
        clock_ms: how far the clock of its machine is ahead of that of rank 0's, in milliseconds; None if unknown, and
            on the same machine.
        clock_error_ms: largest error of that.
        lines: where its training thread was in each leaf, most samples first; {} if it was not sampled.
    """

    rank: int
    host: str
    steps: int
    step_ms: float
    leaves_ms: Mapping[str, float]
    errors_ms: Mapping[str, float] = field(default_factory=dict)
    on_device: bool = False
    outside: tuple[str, ...] = ()
    cpu: CpuUse | None = None
    exposed_ms: Mapping[str, float] | None = None
    unmeasured: tuple[str, ...] = ()
    waits_ms: Mapping[str, float] = field(default_factory=dict)
    starved_pct: float | None = None
    sm_mhz: float | None = None
    throttled_pct: float | None = None
    clock_ms: float | None = None
    clock_error_ms: float | None = None
    lines: Mapping[str, tuple[SampledLine, ...]] = field(default_factory=dict)

    @property
    def error_ms(self) -> float:
        """Half of the 95 % interval of the rank's own work, from those of its regions."""
        if OWN_WORK in self.errors_ms:
            return self.errors_ms[OWN_WORK]
        own = ((leaf, self.own_ms(leaf) / self.leaves_ms[leaf]) for leaf in self.errors_ms if self.leaves_ms.get(leaf))
        return float(sum((self.errors_ms[leaf] * share) ** 2 for leaf, share in own) ** 0.5)

    @property
    def step_leaves_ms(self) -> dict[str, float]:
        """The leaves of the step without waits for other ranks and for what they exchange: its own work."""
        waited = self._waited_ms
        return {
            leaf: max(ms - waited.get(leaf, 0.0), 0.0)
            for leaf, ms in self.leaves_ms.items()
            if leaf not in self.outside
        }

    @property
    def waited_ms(self) -> float:
        """Those waits per step."""
        return sum(self._waited_ms.values())

    @property
    def _waited_ms(self) -> Mapping[str, float]:
        """Those waits by leaf: as measured, or what other ranks' times tell if that is more."""
        measured = self.exposed_ms or {}
        leaves = dict.fromkeys((*measured, *self.waits_ms))
        return {leaf: max(measured.get(leaf, 0.0), self.waits_ms.get(leaf, 0.0)) for leaf in leaves}

    def own_ms(self, leaf: str | None = None) -> float:
        """Milliseconds per step without waiting for other ranks: of one leaf, or of all, those outside included."""
        if leaf is not None:
            return self.leaves_ms.get(leaf, 0.0) - self.waits_ms.get(leaf, 0.0)
        return sum(self.leaves_ms.values()) - sum(self.waits_ms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEffect:
    """Step time after the recorded window, compared with before it.

    Attributes:
        steps_before: number of steps compared before the window.
        steps_after: number of steps compared after it.
        before_ms: median step time before.
        after_ms: median step time after.
        change_pct: increase of the median.
        low_pct: lower end of its 95 % interval.
        high_pct: upper end of its 95 % interval.
    """

    steps_before: int
    steps_after: int
    before_ms: float
    after_ms: float
    change_pct: float
    low_pct: float
    high_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrift:
    """Step time that still drifted when the warm-up ended.

    Attributes:
        first_ms: median of the first counted steps.
        steady_ms: median of the later ones.
        until_step: number of the step from which it was steady; None if it was not by the middle of the steps compared,
            the first 512 that count.
    """

    first_ms: float
    steady_ms: float
    until_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestarts:
    """Restarts of the DataLoader's workers between epochs, each until its first batch arrives.

    Attributes:
        count: number of restarts in the counted steps.
        workers: processes restarted each time.
        device_ms: GPU wait for them per step, part of the region `data`; host time without a GPU.
        host_ms: host time per step.
    """

    count: int
    workers: int
    device_ms: float
    host_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLedger:
    """Where the wall time of the whole run went, on rank 0: parts that sum to it.

    Attributes:
        wall_s: the whole run in seconds, to the end of the fit: from the start of the process, or of the fit if the
            process is interactive or had another fit before.
        parts: seconds by part, the largest first; each without the parts inside it. `startup/imports`,
            `startup/script`, `startup/process` (those two in one), `startup/trainer`, `startup/fit`,
            `startup/module.hook`, `startup/callback.NAME.hook`, `startup/restore`, `startup/compile`,
            `startup/first_step`, `sanity_check`, `steps`, `hang` (steps in which training stood still), `data_loader`
            (iterators and workers), `validation`, `checkpoint`, `checkpoint/write`, `callback/NAME.hook`,
            `module/hook`, `datamodule/hook`, `logger/NAME`, `compile`, `gc/generation_2`, `gc/generation_0_1`,
            `profiler` (this package), `teardown`.
        unexplained_s: `wall_s` less the sum of the parts.
        counts: how often each part was entered.
        first_s: seconds of the first time of each part, which may include one-time work.
        counted_s: of the parts inside a step's regions, seconds in the steps that count; None in files of older
            versions.
        long_steps: in how many of these steps a part took 0.1 ms or more at once, if nearly all its time is in them.
        goodput: productive step time as a fraction of `wall_s` less `profiler`: `steps`, and on a GPU training during
            hooks.
        spans: when parts of 1 ms and more took place, the epochs and the recorded window, by their beginning.
    """

    wall_s: float
    parts: Mapping[str, float]
    unexplained_s: float
    counts: Mapping[str, int]
    first_s: Mapping[str, float] = field(default_factory=dict)
    counted_s: Mapping[str, float] | None = None
    long_steps: Mapping[str, int] = field(default_factory=dict)
    goodput: float | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """Measurements of the callbacks over a whole run, without a trace.

    Attributes:
        steps: number of counted steps.
        on_device: whether device times are measured on a GPU; False on a CPU.
        step_ms: device time of the steps.
        regions: `data`, `transfer`, `forward`, `backward`, `optimizer` as far as they were timed apart, `other` and
            custom regions, by name.
        user_regions: names of the custom regions.
        gpu_starved_pct: share of the steps in which the GPU had finished all but the optimizer's update when the host
            finished the batch; None if not measured.
        world_size: number of training processes.
        telemetry: readings of the GPU's sensors; None without any.
        compute: compute rates; empty if unknown.
        split_steps: number of steps whose regions were timed, from which the others are estimated; None for all.
        overhead_us: host time that timing adds to a step.
        window_effect: step time after the recorded window compared with before; None with fewer than 20 steps on a
            side.
        rank: the rank whose times these are.
        ranks: the work of each rank, this one included, as far as they are known; empty for a single rank.
        worker_restarts: restarts of the DataLoader's workers; None with persistent workers or none.
        typical_mean_ms: mean step time if each step took the median of its kind: with or without an optimizer update.
            None if unknown.
        unknown_ms: what long steps take more than the others, per step, if none of them had its regions timed: it is in
            `other`, and nobody knows what it was.
        unknown_steps: how many those are.
        loader: settings of the DataLoader on rank 0; None if unknown.
        ledger: wall time of the whole run by parts; None if unknown.
        all_steps: number of all steps of the fit, those that do not count included; None if unknown.
        drift: how the step time still drifted at the end of the warm-up; None if it did not, or if fewer than 100 steps
            count.
        continues_from: the optimizer step from which this fit continues, as one that is resumed from a checkpoint; 0
            for a fit from the beginning. The ledger and all figures are of this fit alone.
        slowest: the five slowest counted steps, the slowest first.
        validation_loader: settings of the DataLoader that the fit validates on; None if unknown or without validation.
        optimizer: the optimizer and its parameter tensors on rank 0; None if unknown.
        cpu: use of the cores on rank 0; None if unknown, as after less than half a second of counted steps.
        intervals: share of each region and of the ledger's parts inside the step with its interval, by name; empty for
            fewer than five blocks of steps.
        lines: where the training thread was in each region or part of the ledger, by samples of its stack during some
            seconds of the run, most samples first; empty if it was not sampled, as where the GPU is behind.
        switches: switches that slow a run down, on rank 0; None if unknown.
        memory: what fills the GPU; None on a CPU, or if it was not looked up.
        recompilations: what `torch.compile` compiled again, at most five, what took most time first.
    """

    steps: int
    on_device: bool
    step_ms: Distribution
    regions: Mapping[str, RunRegion]
    user_regions: tuple[str, ...] = ()
    gpu_starved_pct: float | None = None
    world_size: int = 1
    telemetry: TelemetrySummary | None = None
    compute: tuple[RunCompute, ...] = ()
    split_steps: int | None = None
    overhead_us: float | None = None
    window_effect: WindowEffect | None = None
    rank: int = 0
    ranks: tuple[RankWork, ...] = ()
    worker_restarts: WorkerRestarts | None = None
    typical_mean_ms: float | None = None
    unknown_ms: float = 0.0
    unknown_steps: int = 0
    loader: LoaderSettings | None = None
    ledger: RunLedger | None = None
    all_steps: int | None = None
    drift: StepDrift | None = None
    continues_from: int = 0
    slowest: tuple[SlowStep, ...] = ()
    validation_loader: LoaderSettings | None = None
    optimizer: OptimizerSettings | None = None
    cpu: CpuUse | None = None
    intervals: Mapping[str, ShareInterval] = field(default_factory=dict)
    lines: Mapping[str, tuple[SampledLine, ...]] = field(default_factory=dict)
    switches: Switches | None = None
    memory: RunMemory | None = None
    recompilations: tuple[Recompilation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What one of the Trainer's loggers calls the run.

    Attributes:
        logger: class of the logger, such as `WandbLogger`.
        name: its name: the project of W&B, the id of MLflow's experiment, the folder of TensorBoard; "" without one.
        version: the run in it: the id of W&B's or MLflow's run, the number of TensorBoard's version; "" without one.
    """

    logger: str
    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis(ShownInNotebook):
    """Verdict, findings and figures of a trace, a run, or both.

    Attributes:
        schema_version: version of this layout.
        source: the analysed file or folder, or the name of the run.
        verdict: code of the finding whose fix gains most, `nothing stands out`, or `no verdict` if the files are cut
            off and have no whole step.
        verdict_text: the verdict in one or two sentences, with numbers and advice.
        findings: causes of lost time, largest gain first.
        findings_note: the recorded steps that the figures leave out, and why; "" for none.
        hints: rules of thumb that apply.
        ranks: one entry per rank, by number; of more than 16 ranks those that stand out, rank 0 and a typical one.
            Empty for a run without a trace.
        all_ranks: number of ranks that all figures are over.
        missing: the other ranks that recorded, whose traces are not here.
        spread: distribution over all of them of the mean milliseconds per step: `step`, `busy`, `idle` and `comm` of
            the GPU, and `waits` for other ranks.
        collectives: communication matched over the ranks, most expensive first; empty for a single rank.
        rank_waits: time that each rank waits for the others; empty for a single rank.
        run: measurements over the whole run; None for a trace alone.
        differences: where the trace and the whole run disagree.
        cut_off: for each rank whose file is cut off, where it ends and which of its steps are whole.
        warnings: what could not be read, of all files.
        tracked: what the Trainer's loggers call the run; empty for a trace alone.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    source: str
    verdict: str
    verdict_text: str
    findings: tuple[Finding, ...]
    findings_note: str = ""
    hints: tuple[Hint, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    all_ranks: int = 0
    missing: tuple[int, ...] = ()
    spread: Mapping[str, Distribution] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    rank_waits: tuple[RankWait, ...] = ()
    run: RunEvidence | None = None
    differences: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tracked: tuple[TrackedRun, ...] = ()

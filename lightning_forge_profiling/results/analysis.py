"""What an analysis finds, as plain data: the content of `summary.json`, from which all reports are made.

Times are milliseconds or microseconds as the name says, percentages are of the step unless the name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from lightning_forge_profiling.results.loader_settings import LoaderSettings
from lightning_forge_profiling.results.rank import Distribution, RankSummary
from lightning_forge_profiling.results.saving import Saving
from lightning_forge_profiling.results.telemetry import TelemetrySummary

__all__ = [
    "NOTHING_STANDS_OUT",
    "NO_VERDICT",
    "Analysis",
    "Collective",
    "Finding",
    "Hint",
    "RankClock",
    "RankWait",
    "RunEvidence",
    "RunRegion",
    "WindowEffect",
    "WorkerRestarts",
]

NOTHING_STANDS_OUT: Final = "nothing stands out"
NO_VERDICT: Final = "no verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWait:
    """How long one rank waited for others in collectives.

    Attributes:
        rank: its number.
        comm_ms_per_step: durations of its matched collectives.
        wait_ms_per_step: what they took longer than on the rank where they were shortest.
    """

    rank: int
    comm_ms_per_step: float
    wait_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective in one process group, matched over the ranks.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: the process group's name.
        calls_per_step: how often.
        megabytes_per_step: input of one rank, 0 where the trace does not say.
        cost_ms_per_step: the shortest duration over the ranks, summed: what the communication itself takes.
        wait_ms_per_step: mean over the ranks of what it took longer: waiting for the last to join.
    """

    name: str
    group: str
    calls_per_step: float
    megabytes_per_step: float
    cost_ms_per_step: float
    wait_ms_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause of lost time, with its evidence and what to do.

    Attributes:
        code: stable, as `input-bound`.
        share_pct: what it costs, in percent of the step; from the trace the mean over the ranks.
        rank: the rank it was found on, None where it holds for all of them.
        source: the recorded `trace`, or the regions of the whole `run`.
        title: one sentence with the numbers that matter.
        evidence: the numbers, each named with its unit.
        advice: what to change, naming the setting.
        saves: what that is predicted to save; None if unknown, or where there is no fix.
    """

    code: str
    share_pct: float
    rank: int | None
    source: Literal["trace", "run"]
    title: str
    evidence: Mapping[str, float | str]
    advice: str
    saves: Saving | None = None

    @property
    def remedy(self) -> str:
        """The advice, and what it saves."""
        return self.advice if self.saves is None else f"{self.advice} {self.saves.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A rule of thumb that applies: less than a finding, worth a look."""

    code: str
    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRegion:
    """One region over the steps of a whole run that count.

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
    """How fast a device computed over the steps that count, and what that is a fraction of.

    Attributes:
        kind: `mfu` by the operations that the model asks for, `hfu` by those that the device carried out.
        tflops: 10¹² operations a second of one device; None where nobody can tell, for the reason in `peak_source`.
        dtype: what the peak is of.
        device: whose peak it is.
        peak_tflops: what the device could do; None where that is unknown.
        peak_source: where that is from, or why it is unknown.
        pct_of_peak: MFU or HFU in percent; None without a peak.
        measured_tflops: what the device was measured to reach; None where nobody measured.
        pct_of_measured: the rate in percent of that.
        note: what to know about the count, "" for nothing.
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
class RankClock:
    """One rank's steps by its own host's clock, without a profiler.

    Attributes:
        rank: its number.
        step_ms: mean of the steps.
        host_ms: how long its host works on a step: from the fetch to the end of the batch.
        between_ms: the rest, from the end of a batch to the next fetch. In a run of several processes Lightning
            synchronizes them there, so that the ranks whose hosts are early wait for the one whose host is late.
    """

    rank: int
    step_ms: float
    host_ms: float
    between_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEffect:
    """The pace of a run after its recorded window, against that before it.

    Attributes:
        steps_before: how many steps before the window were compared.
        steps_after: how many after it.
        before_ms: median of the steps before.
        after_ms: median of the steps after.
        change_pct: how much longer a step is after the window.
        low_pct: lower end of the 95 % interval of that.
        high_pct: upper end.
    """

    steps_before: int
    steps_after: int
    before_ms: float
    after_ms: float
    change_pct: float
    low_pct: float
    high_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestarts:
    """Ends and starts of the DataLoader's workers between epochs, each until its first batch is there.

    Attributes:
        count: how many there were in the steps.
        workers: how many processes ended and started each time.
        device_ms: what the GPU waited for it, per step; host time without a GPU. It is part of the region `data`.
        host_ms: host time of it, per step.
    """

    count: int
    workers: int
    device_ms: float
    host_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """What the callbacks measured over a whole run, without any trace.

    Attributes:
        steps: how many steps it is over.
        on_device: whether device times are the GPU's; False on a CPU.
        step_ms: device time of the steps.
        regions: those of `data`, `transfer`, `forward`, `backward`, `optimizer` that are told apart, `other` and the
            user's, by name.
        user_regions: which of them are the user's.
        drained_pct: in how many of the steps the GPU had finished all but the optimizer's update when the host
            finished the batch; None where nobody asked it.
        world_size: how many processes trained.
        telemetry: what the GPU's sensors said, None where nothing did.
        compute: how fast a device computed; empty where nobody can tell.
        split_steps: in how many of the steps the regions were timed; they are estimated from those. None for all.
        overhead_us: what timing took of a step on the host.
        window_effect: whether the recorded window left the run slower; None without 20 steps on each side of it.
        clocks: each rank's own clock, where several ranks recorded a window; empty otherwise.
        worker_restarts: ends and starts of the loader's workers; None where it keeps them, or has none.
        like_ms: what the mean step would take if each took the median time of those like it: that change the weights,
            or that only accumulate gradients. None if unknown.
        loader: the settings of the loader on rank 0; None if unknown.
    """

    steps: int
    on_device: bool
    step_ms: Distribution
    regions: Mapping[str, RunRegion]
    user_regions: tuple[str, ...] = ()
    drained_pct: float | None = None
    world_size: int = 1
    telemetry: TelemetrySummary | None = None
    compute: tuple[RunCompute, ...] = ()
    split_steps: int | None = None
    overhead_us: float | None = None
    window_effect: WindowEffect | None = None
    clocks: tuple[RankClock, ...] = ()
    worker_restarts: WorkerRestarts | None = None
    like_ms: float | None = None
    loader: LoaderSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Everything: the content of `summary.json`.

    Attributes:
        schema_version: version of this layout.
        source: the file or folder that was analysed, or the run's name.
        verdict: the code of the finding whose fix gains most, `NOTHING_STANDS_OUT`, or `NO_VERDICT` for files that
            are cut off and show no whole step.
        verdict_text: the verdict in one or two sentences, with its numbers and advice.
        findings: the one that gains most first.
        findings_note: which steps the findings are over, where that is not all of them.
        hints: rules of thumb that apply.
        ranks: one entry a rank, by number; empty where there was only a run.
        collectives: communication matched over the ranks, the costliest first; empty for a single rank.
        rank_waits: who waits for whom; empty for a single rank.
        run: what was measured over the whole run, None for a trace alone.
        differences: where the trace and the whole run tell different stories.
        cut_off: for each rank with a file that is cut off, where it ends and which of its steps are whole.
        warnings: what could not be read, of any file.
    """

    schema_version: Literal[1] = 1
    source: str
    verdict: str
    verdict_text: str
    findings: tuple[Finding, ...]
    findings_note: str = ""
    hints: tuple[Hint, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    collectives: tuple[Collective, ...] = ()
    rank_waits: tuple[RankWait, ...] = ()
    run: RunEvidence | None = None
    differences: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

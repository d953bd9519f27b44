"""Data that runs are compared by: a run's intervals as columns, its conditions, ledger and findings."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that runs must share for their step times to be comparable.

    Attributes:
        device: the training device, such as `cuda:0 (NVIDIA H200)`.
        world_size: number of training processes.
        precision: precision of the Trainer; "" if unknown.
        batch_size: samples per batch of one rank; None if unknown.
    """

    device: str
    world_size: int
    precision: str = ""
    batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamples:
    """One run on rank 0. Columns have an entry for each interval that has counted steps.

    Attributes:
        source: folder of the record.
        run: id of the run.
        conditions: its conditions.
        host: name of the machine.
        commit: git commit of the code; "" if unknown.
        versions: versions of the software, by name.
        settings: settings of the Trainer and of the training DataLoader, by name.
        ended: `finished`, `failed`, or `unfinished` for a run that is still going on or was killed.
        steps: number of steps so far, including those that do not count.
        counted: number of counted steps.
        step_ms: their time, summed.
        region_ms: the part of it in each region; None for an interval without regions.
        samples: samples in the counted steps; None if unknown.
        tokens: tokens in the counted steps; None if not counted.
        steps_us: histogram of their times: number of steps by bucket. Bucket b ends at `bucket_ratio`^b microseconds.
        bucket_ratio: upper over lower edge of a bucket.
        gpu: means of the GPU's sensors and of the allocator's figures over the run, by logged name.
        ledger_s: seconds of the run so far, by part of the ledger; empty if unknown.
        verdict: code of the verdict; "" for none.
        findings: share of each finding in percent, by code.
        of_run: codes of the findings whose share is of the run, not of the step.
        problems: what could not be read.
    """

    source: str
    run: str
    conditions: Conditions
    host: str = ""
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    ended: str = "finished"
    steps: int
    counted: tuple[int, ...]
    step_ms: tuple[float, ...]
    region_ms: Mapping[str, tuple[float | None, ...]]
    samples: tuple[float, ...] | None = None
    tokens: tuple[float, ...] | None = None
    steps_us: tuple[Mapping[int, int], ...] = ()
    bucket_ratio: float = 1.0
    gpu: Mapping[str, float] = field(default_factory=dict)
    ledger_s: Mapping[str, float] = field(default_factory=dict)
    verdict: str = ""
    findings: Mapping[str, float] = field(default_factory=dict)
    of_run: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()

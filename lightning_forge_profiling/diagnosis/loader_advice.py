"""What to change in a loader that training waits for, by its settings and the machine's cores."""

from dataclasses import dataclass
from math import ceil
from typing import Final

from lightning_forge_profiling.diagnosis.rule import MEASURE, Evidence, in_ms
from lightning_forge_profiling.results.run import OTHERS, CpuUse, LoaderSettings

_HANDED_OVER_MS: Final = 1.0
"""A DataLoader's worker needs 0.5 ms to hand a batch of one tensor over, however cheap it is to make (torch 2.13,
two cores, `python -m benchmarks.handover`): where a batch takes little longer to make, workers gain little."""

_MOST_TRIED: Final = 16
"""More workers than this are rarely the answer to a loader that loads in the training process."""

_WAITS_BELOW_PCT: Final = 50.0
"""A loader that keeps a core busy for less of its time mostly waits, and its workers may outnumber the cores: with a
dataset that waits, steps got faster with up to four on two cores (`python -m docs.measure_fixes --cpu workers`)."""

_FOUND: Final = 0.25
"""Cores that workers get even where none is free, since the scheduler prefers processes that mostly wait. Not so beside
a training thread that waits for further threads: with two threads steps took 1.5 times as long there."""

_CHEAPER: Final = "make a sample cheaper (decode and augment less, ahead of time, or on the GPU)"
_CHEAPER_ON_CPU: Final = "make a sample cheaper (decode and augment less, or ahead of time)"
_SHARES_OUT: Final = " An IterableDataset must split its samples among the workers (torch.utils.data.get_worker_info)."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWait:
    """How long training waits for its loader.

    Attributes:
        host_ms: what the host waits per step.
        exposed_ms: the part of it for which the GPU waits too; all of it without a GPU.
        step_ms: the mean step.
        on_gpu: whether training is on a GPU, to which batches are copied.
        in_process: whether the loader is known to work in the training process; None if unknown.
        pinned: whether batches are known to be in pinned memory.
        cpu: use of the cores; None if unknown, as from a trace alone.
    """

    host_ms: float
    exposed_ms: float
    step_ms: float
    on_gpu: bool
    in_process: bool | None = None
    pinned: bool = False
    cpu: CpuUse | None = None

    @property
    def rest_ms(self) -> float:
        """What a step takes without the wait."""
        return max(self.step_ms - self.exposed_ms, 1e-6)


def loader_advice(wait: LoaderWait, settings: LoaderSettings | None) -> str:
    """What to change so that training waits less for its loader: nothing that is set already.

    Example:
        >>> cpu = CpuUse(cores=8, used=1, idle=7, loader_busy_pct=98)
        >>> wait = LoaderWait(host_ms=25, exposed_ms=25, step_ms=40, on_gpu=True, cpu=cpu)
        >>> settings = LoaderSettings(kind="DataLoader", num_workers=0, pin_memory=True, cores=8)
        >>> loader_advice(wait, settings).partition(". ")[2]
        'Loading keeps a core busy for 98 % of the time, and 7.0 of the 8 usable cores are free: try num_workers=4...'
    """
    if wait.host_ms < _HANDED_OVER_MS:
        return _small_batches(wait, settings)
    if settings is None:
        return _without_settings(wait)
    if settings.num_workers is None:
        return (
            f"The loader is of type {settings.kind}, not a torch.utils.data.DataLoader: {_cheaper(wait)}, or measure a "
            f"DataLoader with workers, or batches that a thread fetches ahead: {MEASURE}."
        )
    return _workers(wait, settings, settings.num_workers)


def only_bounded(wait: LoaderWait, settings: LoaderSettings | None) -> bool:
    """Whether workers may leave a part of the wait: on a CPU, whose cores they take, and where they cannot keep up."""
    if not wait.on_gpu or wait.host_ms < _HANDED_OVER_MS:
        return True
    if settings is None:
        return False
    return settings.num_workers is None or _keeps_up(wait, settings.num_workers) > settings.most_workers


def loader_evidence(settings: LoaderSettings | None) -> Evidence:
    """The settings as a finding's evidence; empty where they are not known."""
    if settings is None:
        return {}
    evidence: Evidence = {"loader": settings.kind}
    if settings.num_workers is not None:
        evidence |= {
            "num_workers": settings.num_workers,
            "persistent_workers": str(settings.persistent_workers),
            "pin_memory": str(settings.pin_memory),
            "prefetch_factor": "None" if settings.prefetch_factor is None else settings.prefetch_factor,
            "batch_size": "None" if settings.batch_size is None else settings.batch_size,
            "sampler": settings.sampler,
        }
    return evidence | {
        "usable_cores": settings.cores,
        "ranks_on_host": settings.ranks_on_host,
        "accumulate_grad_batches": settings.accumulate_grad_batches,
    }


def pin_memory_advice(settings: LoaderSettings | None) -> str:
    """What to do about copies from pageable memory: a sentence without its end."""
    if settings is None or not settings.pin_memory:
        return "Set pin_memory=True in the DataLoader (only from pinned memory is a copy asynchronous)"
    return (
        "The DataLoader has pin_memory=True: look for what is still copied from pageable memory, as a batch "
        "class without a method pin_memory(), or tensors made in on_before_batch_transfer or transfer_batch_to_device"
    )


def accumulating(settings: LoaderSettings | None) -> str:
    """What to add to advice to accumulate gradients: how many batches they are accumulated over today."""
    return "" if settings is None else f" (now {settings.accumulate_grad_batches})"


def _small_batches(wait: LoaderWait, settings: LoaderSettings | None) -> str:
    advice = (
        f"A batch is ready after {in_ms(wait.host_ms)}, and a worker needs about 0.5 ms to hand one over, so workers "
        "gain little: make batches larger or cheaper (index whole tensors instead of collating samples)."
    )
    if settings is not None and settings.accumulate_grad_batches > 1:
        advice += (
            f" Larger batches and a smaller value than accumulate_grad_batches={settings.accumulate_grad_batches} keep "
            "the optimizer step the same."
        )
    return advice


def _without_settings(wait: LoaderWait) -> str:
    """Words that are right whatever the loader's settings are."""
    also = ["persistent_workers=True", *([] if wait.pinned or not wait.on_gpu else ["pin_memory=True"])]
    if wait.in_process:
        settings = _listed([f"num_workers={_wanted_of_none(wait)}", *also])
        tried = f"The DataLoader loads in the training process: measure {settings}"
    else:
        tried = f"Measure the DataLoader with more num_workers than now, with {_listed(also)}"
    return (
        f"{tried} ({MEASURE}), or {_cheaper(wait)}. Workers that compute gain up to one for each core that training "
        "leaves free, all ranks on the host counted; those that wait for a disk or a network may be more."
    )


def _workers(wait: LoaderWait, settings: LoaderSettings, now: int) -> str:
    """What the number of workers should be, by how busy they keep the cores."""
    cpu, cheaper, most = wait.cpu, _cheaper(wait), settings.most_workers
    state = f"{_named(settings)} num_workers={now}" if now else f"{_in_process(settings)} (num_workers=0)"
    keeps_up = _keeps_up(wait, now)
    wanted = max(keeps_up, now + 1) if now else _wanted_of_none(wait)
    also = [] if now else ["persistent_workers=True"]
    if wait.on_gpu and not settings.pin_memory:
        also.append("pin_memory=True")
    shares_out = _SHARES_OUT if settings.iterable else ""
    known = cpu is not None and cpu.idle is not None and cpu.loader_busy_pct is not None
    idle, busy_pct = ((cpu and cpu.idle) or 0.0), ((cpu and cpu.loader_busy_pct) or 0.0)
    waits = busy_pct < _WAITS_BELOW_PCT
    left = max(idle, _FOUND) if known and waits and cpu is not None and cpu.threads == 1 else idle
    affordable = now + int(left * 100 / max(busy_pct, 1.0) + OTHERS) if left > OTHERS else now
    if not known or (waits and affordable == now):
        more = min(wanted, most) if now < most else most if now > most else min(2 * now, max(_MOST_TRIED, now + 1))
        return (
            f"{state} on {_cores(settings)}. Workers gain where a core is free, or where they wait for a disk or a "
            f"network: measure {_listed([f'num_workers={more}', *also])} ({MEASURE}), or {cheaper}.{shares_out}"
        )
    tried = min(wanted, affordable, max(_MOST_TRIED, now), max(2 * now, 4) if waits else most)
    does = f"{'A worker' if now else 'Loading'} keeps a core busy for {busy_pct:.0f} % of the time"
    if tried <= now:
        pinned = " Set pin_memory=True." if wait.on_gpu and not settings.pin_memory else ""
        free = f"and {idle:.1f} of {_cores(settings)} are free: more workers would compete for them"
        return f"{state}. {does}, {free}. {cheaper[0].upper()}{cheaper[1:]}.{pinned}"
    why = "and waits for the rest, as for a disk or a network, so there may be more workers than cores"
    advice = f"{state}. {does} {why}" if waits else f"{state}. {does}, and {idle:.1f} of {_cores(settings)} are free"
    advice += f": try {_listed([f'num_workers={tried}', *also])}."
    if now:
        advice += f" Uneven batches need a larger prefetch_factor than {settings.prefetch_factor} instead."
    if keeps_up > tried:
        advice += f" {keeps_up} would keep up; so also {cheaper}."
    return advice + shares_out


def _keeps_up(wait: LoaderWait, workers: int) -> int:
    """How many workers keep up with the rest of the step.

    Without workers a batch is made in the wait; else each of them takes up to as many steps for one as there are.
    """
    batch_ms = workers * wait.step_ms if workers else wait.host_ms
    return max(ceil(batch_ms / wait.rest_ms), 1)


def _wanted_of_none(wait: LoaderWait) -> int:
    """As many as keep up, and as many again."""
    return min(2 * _keeps_up(wait, 0), _MOST_TRIED)


def _cheaper(wait: LoaderWait) -> str:
    return _CHEAPER if wait.on_gpu else _CHEAPER_ON_CPU


def _cores(settings: LoaderSettings) -> str:
    if settings.ranks_on_host > 1:
        return f"this rank's {settings.most_workers} of {settings.cores} usable cores"
    return "the one usable core" if settings.cores <= 1 else f"the {settings.cores} usable cores"


def _named(settings: LoaderSettings) -> str:
    return f"The {settings.kind} has" if settings.loaders == 1 else f"The {settings.loaders} loaders together have"


def _in_process(settings: LoaderSettings) -> str:
    if settings.loaders == 1:
        return f"The {settings.kind} loads in the training process"
    return f"The {settings.loaders} loaders work in the training process"


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"

"""Training waits for its next batch: `input-bound`, `worker-restarts` and `transfer-bound`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.rule import (
    MEASURE,
    MIN_SHARE_PCT,
    PERSISTENT,
    Case,
    Context,
    Evidence,
    Explanation,
    Rule,
    RuleContext,
    RunTimes,
    in_ms,
    in_s,
    listed,
    of_step,
)
from lightning_forge_profiling.flops.peaks import bus_gb_per_s
from lightning_forge_profiling.schema import OTHERS, CpuUse, Finding, LoaderSettings

# a DataLoader's worker needs 0.5 ms to hand a batch of one tensor over, however cheap it is to make (torch 2.13, two
# cores, `python -m benchmarks.handover`): where a batch takes little longer to make, workers gain little
_HANDED_OVER_MS: Final = 1.0

_MOST_TRIED: Final = 16  # more workers than this are rarely the answer to a loader that loads in the training process

# a loader that keeps a core busy for less of its time mostly waits, and its workers may outnumber the cores: with a
# dataset that waits, steps got faster with up to four on two cores (`python -m docs.measure_fixes --cpu workers`)
_WAITS_BELOW_PCT: Final = 50.0

# cores that workers get even where none is free, since the scheduler prefers processes that mostly wait. Not so beside
# a training thread that waits for further threads: with two threads steps took 1.5 times as long there.
_FOUND: Final = 0.25

_SINGLE_PROCESS: Final = "_SingleProcessDataLoaderIter"

_ALONE: Final = 2.0  # training waits for a batch so many times as long as making it would take

TRY_WORKERS: Final = "try_num_workers"  # in a finding's evidence: the number that its advice says to try or to measure


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWait:
    """How long training waits for its loader, in milliseconds per step."""

    host_ms: float
    exposed_ms: float  # for which the GPU waits too; all of it without a GPU
    step_ms: float
    on_gpu: bool
    in_process: bool | None = None  # None if unknown
    pinned: bool = False  # whether batches are known to be in pinned memory
    hidden: str = ""  # how much of the host's wait the GPU did not wait for
    settings: LoaderSettings | None = None  # None if unknown
    cpu: CpuUse | None = None  # None if unknown, as from a trace alone

    def batch_ms(self, workers: int) -> float:
        """How long a batch takes to make, at the most."""
        # without workers it is made in the wait; else each of them takes up to as many steps for one as there are.
        return workers * self.step_ms if workers else self.host_ms

    def workers_to_keep_up(self, workers: int) -> int:
        """How many workers keep up with the rest of the step."""
        return max(ceil(self.batch_ms(workers) / max(self.step_ms - self.exposed_ms, 1e-6)), 1)

    @property
    def made_ms(self) -> float | None:
        """How long a worker takes to make a batch; None if unknown."""
        if self.settings is not None and self.settings.batch_ms is not None:
            return self.settings.batch_ms
        return None if self.cpu is None else self.cpu.batch_ms

    @property
    def needs_no_workers(self) -> bool:
        """Whether training waits as long for a batch of its workers as making it would take."""
        workers = self.settings is not None and bool(self.settings.num_workers) and not self.settings.unsplit
        return workers and self.made_ms is not None and self.made_ms <= self.exposed_ms

    @property
    def is_faster_alone(self) -> bool:
        """Whether not having workers saves more than a rest that more of them would save, too."""
        return self.needs_no_workers and _ALONE * (self.made_ms or 0.0) <= self.exposed_ms

    def suggest_workers(self) -> int:
        """What to try where there are none: as many as keep up, and as many again."""
        return min(2 * self.workers_to_keep_up(0), _MOST_TRIED)

    @property
    def cheaper(self) -> str:
        """How to make a sample cheaper."""
        on_gpu = "ahead of time, or on the GPU" if self.on_gpu else "or ahead of time"
        return f"make a sample cheaper (decode and augment less, {on_gpu})"


# -- the rules -------------------------------------------------------------------------------------------------------


def _traced_wait(context: RuleContext) -> LoaderWait:
    rank, wait_ms = context.rank, context.rank.host.data_wait_ms_per_step
    exposed_ms = rank.idle["data"].ms_per_step if context.on_gpu else wait_ms  # without a GPU nothing hides the wait
    hidden_pct = 100 * max(1 - exposed_ms / max(wait_ms, exposed_ms, 1e-9), 0)
    return LoaderWait(
        host_ms=wait_ms,
        exposed_ms=exposed_ms,
        step_ms=rank.step_ms.mean,
        on_gpu=context.on_gpu,
        in_process=rank.host.data_loader == _SINGLE_PROCESS,
        pinned=any(copy.direction == "HtoD" and copy.memory == "pinned" for copy in rank.copies),
        hidden=f"{hidden_pct:.0f} %",
        settings=rank.loader,
    )


def _run_wait(run: RunTimes) -> LoaderWait:
    data = run.region("data")  # without restarts
    return LoaderWait(
        host_ms=data.host_ms,
        exposed_ms=data.device_ms,
        step_ms=run.step_ms,
        on_gpu=run.evidence.timing.on_device,
        hidden=in_ms(max(data.host_ms - data.device_ms, 0.0)),
        settings=run.evidence.settings.loader,
        cpu=run.cpu,
    )


def _explain_wait(wait: LoaderWait) -> Explanation:
    takes = f"waits {of_step(wait.exposed_ms, wait.step_ms)} for the data loader"
    title = f"training {takes}"
    if wait.on_gpu:
        title = f"the GPU {takes} (host wait {in_ms(wait.host_ms)}, {wait.hidden} of it hidden)"
    evidence: Evidence = {"exposed_wait_ms_per_step": wait.exposed_ms, "host_wait_ms_per_step": wait.host_ms}
    workers = workers_to_try(wait)
    split = wait.settings is None or not wait.settings.unsplit
    tried: Evidence = {TRY_WORKERS: workers} if split and workers is not None else {}
    return Explanation(title, evidence | loader_evidence(wait.settings) | tried, *loader_advice(wait))


def with_advice_of(finding: Finding, other: Finding) -> Finding:
    """The finding with the advice of another one on the same loader."""
    evidence = {name: value for name, value in finding.evidence.items() if name != TRY_WORKERS}
    if TRY_WORKERS in other.evidence:
        evidence[TRY_WORKERS] = other.evidence[TRY_WORKERS]
    return replace(finding, advice=other.advice, fix=other.fix, evidence=evidence)


def _waits_for_restarts(run: RunTimes) -> bool:
    """Whether all waits for the loader are of one finding: workers that restart, which costs, and are not needed."""
    restarts = run.evidence.timing.worker_restarts
    costs = restarts is not None and 100 * restarts.device_ms >= MIN_SHARE_PCT * run.step_ms
    return costs and _run_wait(run).needs_no_workers


def _restarts_ms(run: RunTimes) -> float:
    restarts = run.evidence.timing.worker_restarts
    if restarts is None:
        return 0.0
    return restarts.device_ms + (_run_wait(run).exposed_ms if _waits_for_restarts(run) else 0.0)


def _restarts_save_ms(run: RunTimes) -> float:
    made_ms = _run_wait(run).made_ms if _waits_for_restarts(run) else None
    return _restarts_ms(run) - (made_ms or 0.0)


def _explain_restarts(run: RunTimes) -> Explanation:
    restarts, all_steps = run.evidence.timing.worker_restarts, run.evidence.timing.steps
    if restarts is None:
        raise ValueError("a run without restarts")
    each_ms = restarts.host_ms * all_steps / restarts.count
    exposed, steps = (in_s(ms * all_steps / 1e3) for ms in (restarts.device_ms, run.step_ms))
    workers, new = (f"{restarts.workers} workers", "new ones") if restarts.workers > 1 else ("worker", "a new one")
    title = (
        f"the DataLoader ends its {workers} and starts {new} each epoch: {in_ms(each_ms)} each time until the first "
        f"batch, {exposed} of the {steps} that {all_steps} steps take"
    )
    advice = (
        "Set persistent_workers=True in the DataLoader: its workers then stay from epoch to epoch. With "
        "Trainer(reload_dataloaders_every_n_epochs=...) they cannot: reload less often, or make epochs longer."
    )
    wait = _run_wait(run)
    if _waits_for_restarts(run):
        title += f"; for each other batch training waits {in_ms(wait.exposed_ms)}"
    elif wait.made_ms is not None:
        advice += f" A batch takes a worker {in_ms(wait.made_ms)} to make."
    return Explanation(
        title,
        {
            "restarts": restarts.count,
            "workers": restarts.workers,
            "restart_ms": each_ms,
            "exposed_wait_ms_per_step": restarts.device_ms,
            "host_wait_ms_per_step": restarts.host_ms,
            **({} if wait.made_ms is None else {"worker_batch_ms": round(wait.made_ms, 3)}),
        },
        *(without_workers(wait) if _waits_for_restarts(run) else (advice, PERSISTENT)),
    )


def without_workers(wait: LoaderWait) -> tuple[str, str]:
    """What to do where a batch is made in the time that getting it from a worker takes."""
    return (
        f"Set num_workers=0: a batch takes {in_ms(wait.made_ms or 0.0)} to make, and getting it from a worker no less."
    ), _loader_fix(["num_workers=0"])


def _traced_copies_ms(context: RuleContext) -> float:
    to_device = sum(copy.exposed_ms_per_step for copy in context.rank.copies if copy.direction == "HtoD")
    return to_device + context.rank.idle["copy"].ms_per_step


def _pinning_saves_ms(context: RuleContext) -> float:
    """All but what the copies take at the speed of the bus."""
    size = sum(copy.bytes_per_step for copy in context.rank.copies if copy.memory == "pageable")
    return _traced_copies_ms(context) - size / bus_gb_per_s(context.rank.device) / 1e6


def _explain_traced_copies(context: RuleContext) -> Explanation:
    copies = [copy for copy in context.rank.copies if copy.direction == "HtoD"]
    main = max(copies, key=lambda copy: copy.exposed_ms_per_step, default=None)
    size = sum(copy.bytes_per_step for copy in copies)
    memory = f"{main.memory} memory" if main and main.memory else "the host"
    rate = main.gb_per_s if main else 0.0
    less = "copy less (uint8 or bf16 with the conversion on the GPU), or copy the next batch while this one is computed"
    advice, fix = f"{less[0].upper()}{less[1:]}.", ""
    if main and main.memory == "pageable":
        advice, fix = f"{pin_memory_advice(context.rank.loader)}; {less}.", _pin_memory_fix(context.rank.loader)
    return Explanation(
        f"copies to the GPU take {context.of_step(_traced_copies_ms(context))} "
        f"({size / 1e6:.1f} MB, mostly from {memory} at {rate:.1f} GB/s)",
        {
            "exposed_copy_ms_per_step": sum(copy.exposed_ms_per_step for copy in copies),
            "copied_bytes_per_step": size,
            "bandwidth_gb_per_s": rate,
            "from": main.memory if main else "",
            **loader_evidence(context.rank.loader),
        },
        advice,
        fix,
    )


def _explain_run_transfer(run: RunTimes) -> Explanation:
    transfer, settings = run.region("transfer"), run.evidence.settings.loader
    less = "less: uint8 or bf16 instead of float32 with the conversion on the GPU"
    how, fix = "blocking, as from pageable memory", _pin_memory_fix(settings)
    advice = f"{pin_memory_advice(settings)}, and copy {less}."
    if transfer.host_ms < transfer.device_ms / 2:
        how, advice, fix = "non-blocking, as from pinned memory", f"Copy {less}, no unused fields.", ""
    evidence: Evidence = {"transfer_ms_per_step": transfer.device_ms, "transfer_host_ms_per_step": transfer.host_ms}
    return Explanation(
        f"moving the batch to the GPU takes {run.of_step(transfer.device_ms)} "
        f"({in_ms(transfer.host_ms)} on the host: {how})",
        evidence | loader_evidence(settings),
        advice,
        fix,
    )


def _waiting(wait_of: Callable[[Context], LoaderWait], cost: Callable[[Context], float] | None = None) -> Case[Context]:
    return Case(
        cost or (lambda source: wait_of(source).exposed_ms),
        lambda source: _explain_wait(wait_of(source)),
        lambda source: _workers_save_ms(wait_of(source)),
        at_most=lambda source: only_bounded(wait_of(source)),
    )


_IN_TRACE: Final = _waiting(_traced_wait)  # with a GPU or without
RULES: Final = (
    Rule(
        "input-bound",
        gpu=_IN_TRACE,
        cpu=_IN_TRACE,
        run=_waiting(_run_wait, lambda run: 0.0 if _waits_for_restarts(run) else run.region("data").device_ms),
    ),
    # only the run shows it: epochs end in few windows, and one restart there would count too much
    Rule("worker-restarts", run=Case(_restarts_ms, _explain_restarts, _restarts_save_ms, at_most=lambda _: False)),
    Rule(
        "transfer-bound",
        gpu=Case(_traced_copies_ms, _explain_traced_copies, _pinning_saves_ms),
        run=Case(lambda run: run.region("transfer").device_ms * run.evidence.timing.on_device, _explain_run_transfer),
    ),
)


# -- advice by the loader's settings and the machine's cores ---------------------------------------------------------


def loader_advice(wait: LoaderWait) -> tuple[str, str]:
    """What to change so that training waits less for its loader, and code for it: nothing that is set already."""
    settings = wait.settings
    if wait.is_faster_alone:
        return without_workers(wait)
    if wait.host_ms < _HANDED_OVER_MS:
        return _small_batches(wait, settings), ""
    if settings is None:
        return _without_settings(wait)
    if settings.num_workers is None:
        return (
            f"The loader is of type {settings.kind}, not a torch.utils.data.DataLoader: {wait.cheaper}, or measure a "
            f"DataLoader with workers, or batches that a thread fetches ahead: {MEASURE}."
        ), ""
    return _workers(wait, settings, settings.num_workers)


def workers_to_try(wait: LoaderWait) -> int | None:
    """The number of workers to try or to measure; None if it is unknown, or another one than now would not gain."""
    settings = wait.settings
    if wait.is_faster_alone or wait.host_ms < _HANDED_OVER_MS:
        return 0 if wait.is_faster_alone else None
    if settings is None:
        return wait.suggest_workers() if wait.in_process else None
    cpu, now, most = wait.cpu, settings.num_workers, settings.most_workers
    if now is None:
        return None
    wanted = max(wait.workers_to_keep_up(now), now + 1) if now else wait.suggest_workers()
    affordable = None if cpu is None else _affordable(cpu, now)
    if cpu is None or affordable is None:
        return min(wanted, most) if now < most else most if now > most else min(2 * now, max(_MOST_TRIED, now + 1))
    tried = min(wanted, affordable, max(_MOST_TRIED, now), max(2 * now, 4) if makes_batches_waiting(cpu) else most)
    # a single one makes batches no faster: without a GPU it overlaps a short rest of the step (see `_workers`)
    least = 1 if wait.on_gpu or makes_batches_waiting(cpu) else 2
    return tried if tried >= max(now + 1, least) else None


def only_bounded(wait: LoaderWait) -> bool:
    """Whether workers may leave a part of the wait: on a CPU, whose cores they take, and where they cannot keep up."""
    if not wait.on_gpu or wait.host_ms < _HANDED_OVER_MS:
        return True
    if wait.settings is None:
        return False
    now = wait.settings.num_workers
    return now is None or wait.workers_to_keep_up(now) > wait.settings.most_workers


def _workers_save_ms(wait: LoaderWait) -> float | None:
    """What the workers to try save, which make batches side by side; all of the wait if there is other advice."""
    if wait.settings is not None and wait.settings.unsplit:
        return None
    tried, now = workers_to_try(wait), None if wait.settings is None else wait.settings.num_workers
    if tried == 0:
        return wait.exposed_ms - (wait.made_ms or 0.0)
    if tried is None or now is None:
        return wait.exposed_ms
    return min(wait.exposed_ms, max(wait.step_ms - wait.batch_ms(now) / tried, 0.0))


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


def _pin_memory_fix(settings: LoaderSettings | None) -> str:
    return "" if settings is not None and settings.pin_memory else _loader_fix(["pin_memory=True"])


def _loader_fix(arguments: Sequence[str]) -> str:
    return f"DataLoader(..., {', '.join(arguments)})"


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


def _without_settings(wait: LoaderWait) -> tuple[str, str]:
    """Words that are right whatever the loader's settings are."""
    also = ["persistent_workers=True", *([] if wait.pinned or not wait.on_gpu else ["pin_memory=True"])]
    if wait.in_process:
        settings = [f"num_workers={wait.suggest_workers()}", *also]
        tried, fix = f"The DataLoader loads in the training process: measure {listed(settings)}", _loader_fix(settings)
    else:
        tried, fix = f"Measure the DataLoader with more num_workers than now, with {listed(also)}", ""
    return (
        f"{tried} ({MEASURE}), or {wait.cheaper}. Workers that compute gain up to one for each core that training "
        "leaves free, all ranks on the host counted; those that wait for a disk or a network may be more."
    ), fix


def _workers(wait: LoaderWait, settings: LoaderSettings, now: int) -> tuple[str, str]:
    """What the number of workers should be, by how busy they keep the cores, and code for it."""
    cpu, cheaper, tried = wait.cpu, wait.cheaper, workers_to_try(wait)
    state, also = _state(settings, now), [] if now else ["persistent_workers=True"]
    pin = wait.on_gpu and not settings.pin_memory
    if pin:
        also.append("pin_memory=True")
    if settings.unsplit:
        split = "Split the dataset by torch.utils.data.get_worker_info() in its __iter__"
        if now:
            return f"{split}: each of the num_workers={now} workers yields all samples. Or {cheaper}.", ""
        then = f", then measure {listed([f'num_workers={tried}', *also])} ({MEASURE})" if tried else ""
        return f"{split} first, else each worker yields all samples{then}. Or {cheaper}.", ""
    if cpu is None or cpu.idle is None or cpu.loader_busy_pct is None or _affordable(cpu, now) is None:
        return (
            f"{state} on {_cores(settings)}. Workers gain where a core is free, or where they wait for a disk or a "
            f"network: measure {listed([f'num_workers={tried}', *also])} ({MEASURE}), or {cheaper}."
        ), _loader_fix([f"num_workers={tried}", *also])
    busy = f"{'A worker' if now else 'Loading'} keeps a core busy for {cpu.loader_busy_pct:.0f} % of the time"
    free = f"and {cpu.idle:.1f} of {_cores(settings)} are free"
    if tried is None:
        pinned = " Set pin_memory=True." if pin else ""
        # pandas in __getitem__: steps with one worker on two idle cores took 1.13 to 1.16 times as long (torch 2.13)
        gains = "more workers would compete for them"
        if not now and _affordable(cpu, now):
            gains = f"one worker may gain or lose, measure num_workers=1 ({MEASURE})"
        fix = _loader_fix(["pin_memory=True"]) if pin else ""
        return f"{cheaper[0].upper()}{cheaper[1:]}. {state}. {busy}, {free}: {gains}.{pinned}", fix
    why = "and waits for the rest, as for a disk or a network, so there may be more workers than cores"
    advice = f"{state}. {busy} {why}" if makes_batches_waiting(cpu) else f"{state}. {busy}, {free}"
    advice += f": try {listed([f'num_workers={tried}', *also])}."
    if now:
        advice += f" Uneven batches need a larger prefetch_factor than {settings.prefetch_factor} instead."
    keeps_up = wait.workers_to_keep_up(now)
    if keeps_up > tried:
        advice += f" {keeps_up} would keep up; so also {cheaper}."
    return advice, _loader_fix([f"num_workers={tried}", *also])


def makes_batches_waiting(cpu: CpuUse) -> bool:
    """Whether the loader mostly waits, as for a disk or a network."""
    return cpu.loader_busy_pct is not None and cpu.loader_busy_pct < _WAITS_BELOW_PCT


def _affordable(cpu: CpuUse, now: int) -> int | None:
    """How many workers find cores; None if that is unknown, as it is for workers that wait where no core is free."""
    if cpu.idle is None or cpu.loader_busy_pct is None:
        return None
    waits = makes_batches_waiting(cpu)
    left = max(cpu.idle, _FOUND) if waits and cpu.threads == 1 else cpu.idle
    affordable = now + int(left * 100 / max(cpu.loader_busy_pct, 1.0) + OTHERS) if left > OTHERS else now
    return None if waits and affordable == now else affordable


def _cores(settings: LoaderSettings) -> str:
    if settings.ranks_on_host > 1:
        return f"this rank's {settings.most_workers} of {settings.cores} usable cores"
    return "the one usable core" if settings.cores <= 1 else f"the {settings.cores} usable cores"


def _state(settings: LoaderSettings, now: int) -> str:
    """The number of workers now, as the beginning of a sentence."""
    if settings.loaders == 1:
        what, loads, has = f"The {settings.kind}", "loads", "has"
    else:
        what, loads, has = f"The {settings.loaders} loaders", "work", "together have"
    return f"{what} {has} num_workers={now}" if now else f"{what} {loads} in the training process (num_workers=0)"

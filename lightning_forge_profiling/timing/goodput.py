"""Goodput: the share of a run's wall time spent training, and the shares of the other kinds of ledger parts."""

from collections import defaultdict

from lightning_forge_profiling.names import GOODPUT, LOGGED_KINDS, PROFILER, STEPS, hook_region, part_kind, part_pct
from lightning_forge_profiling.timing.ledger import Ledger
from lightning_forge_profiling.timing.rates import Rates


def goodput(ledger: Ledger, on_device: Rates | None = None) -> float:
    """Productive step time as a fraction of wall time, less this package's own.

    The ledger's part `steps` is productive: every training batch but the first, warm-up included, without hooks,
    loggers and other parts. On a GPU, training goes on while a hook waits for queued work or runs beside it. So where
    a region's host time exceeds its device time, its hooks are productive up to that excess.

    Example:
        >>> parts = {"steps": 6.0, "validation": 3.0, "callback/Prints.on_train_batch_end": 1.0}
        >>> ledger = Ledger(wall_s=10.0, parts=parts, unexplained_s=0.0, counts={})
        >>> goodput(ledger)
        0.6
        >>> rates = Rates(steps=10, host_ms={"other": 1200.0}, device_ms={"other": 700.0})
        >>> goodput(ledger, rates)
        0.65
    """
    whole_s = ledger.wall_s - ledger.parts.get(PROFILER, 0.0)
    if whole_s <= 0:
        return 0.0
    productive_s = ledger.parts.get(STEPS, 0.0)
    if on_device is not None:
        hooks_s: defaultdict[str, float] = defaultdict(float)
        for part, seconds in ledger.parts.items():
            if region := hook_region(part):
                hooks_s[region] += seconds
        for region, seconds in hooks_s.items():
            ahead_ms = on_device.mean_host_ms(region) - on_device.mean_ms(region)
            productive_s += min(seconds, max(ahead_ms, 0.0) * on_device.steps / 1e3)
    return productive_s / whole_s


def run_metrics(ledger: Ledger, on_device: Rates | None = None) -> dict[str, float]:
    """`run/goodput`, a fraction, and `run/KIND_pct` for each kind of part, which sum to 100.

    Example:
        >>> parts = {"steps": 6.0, "module/a": 2.0, "module/b": 1.0}
        >>> ledger = Ledger(wall_s=10.0, parts=parts, unexplained_s=1.0, counts={})
        >>> {name: value for name, value in run_metrics(ledger).items() if value}
        {'run/goodput': 0.6, 'run/steps_pct': 60.0, 'run/hooks_pct': 30.0, 'run/other_pct': 10.0}
    """
    if ledger.wall_s <= 0:
        return {}
    seconds = dict.fromkeys(LOGGED_KINDS, 0.0)
    for part, took_s in ledger.parts.items():
        kind = part_kind(part)
        seconds["startup" if kind == "sanity_check" else kind if kind in seconds else "other"] += took_s
    seconds["other"] += ledger.unexplained_s
    shares = {part_pct(kind): 100 * took_s / ledger.wall_s for kind, took_s in seconds.items()}
    return {GOODPUT: goodput(ledger, on_device), **shares}

"""Settings that cost time in each step, by a run's settings, its regions and the operators of some recorded steps."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from lightning_forge_profiling.diagnosis.rule import BACKWARD_TO_FORWARD, COMPUTE, RunTimes
from lightning_forge_profiling.names import SELF_LOG, hook_region
from lightning_forge_profiling.schema import Operator, RunEvidence


class Setting(NamedTuple):
    """A setting that costs time in each step."""

    place: str  # what it is of, before what is wrong with it
    shares: Mapping[str, float]  # by region how much of it
    callee: str = ""  # what a function's name ends with whose call is the place, where a line of forward is one


# the host takes 3 to 20 us to call an operator, whatever it computes
_SMALL_US: Final = 20.0


def are_small(run: RunEvidence, recorded: Sequence[Operator]) -> bool:
    """Whether the host's own time in the operators is mostly that of calling them."""
    if run.timing.on_device:  # it is all that, and the kernels are small if the GPU waits for it
        return RunTimes.of(run).host_sets_the_pace
    calls = sum(each.calls_per_step for each in recorded)
    return calls > 0 and 1e3 * sum(each.self_host_ms_per_step for each in recorded) < _SMALL_US * calls


# a loop whose operators have gradients has one function in backward for each 5 to 10 calls, with those in it; one
# without has what the model has
_DIFFERENTIATED: Final = 0.04
_IN_BACKWARD: Final = "autograd::engine::evaluate_function: "


def are_differentiated(run: RunEvidence, recorded: Sequence[Operator]) -> bool:
    """Whether most operators of forward have a function in backward; True where that is unknown."""
    if run.timing.on_device:  # the table is of those that the GPU works most for
        return True
    in_backward = sum(each.calls_per_step for each in recorded if each.name.startswith(_IN_BACKWARD))
    return in_backward >= _DIFFERENTIATED * sum(each.calls_per_step for each in recorded)


def not_updated(run: RunEvidence, _: Sequence[Operator]) -> Setting | None:
    """Parameters that get gradients and are in no optimizer."""
    switches = run.settings.switches
    if switches is None or not switches.not_updated:
        return None
    place = f"gradients of self.{switches.not_updated}, which no optimizer updates"
    return Setting(place, {"backward": switches.not_updated_pct / 100})


_MODEL: Final = ("forward", "backward")
_MUCH_PADDING_PCT: Final = 20.0  # less is left where samples of about one length are put in a batch


def padding(run: RunEvidence, recorded: Sequence[Operator]) -> Setting | None:
    """Positions of a batch that are padding, and the model computes."""
    pct = 0.0 if run.settings.switches is None else run.settings.switches.padding_pct
    if pct < _MUCH_PADDING_PCT or are_small(run, recorded):  # of which shorter ones take as long to call
        return None
    return Setting(f"padding, {pct:.0f} % of the positions of a batch", dict.fromkeys(_MODEL, pct / 100))


_FEW_ROWS_PCT: Final = 10.0  # a sparse gradient keeps an index for each row, and its update is no fused one


def dense_embedding(run: RunEvidence, recorded: Sequence[Operator]) -> Setting | None:
    """A large embedding of which a step uses few rows, while all of them are filled and updated.

    Of the update that is what the table is of all elements. Of backward it is what was recorded of its operator, and
    else what the rest of the model does not explain.
    """
    switches, optimizer = run.settings.switches, run.settings.optimizer
    table = None if switches is None else switches.embedding
    if table is None or optimizer is None or table.used_pct > _FEW_ROWS_PCT:
        return None
    if run.timing.on_device and run.ranks.world_size > 1:  # NCCL averages no sparse gradients
        return None
    part, times = min(table.rows * table.width / optimizer.elements, 1.0), RunTimes.of(run)
    forward_ms, backward_ms = (times.region(name).device_ms for name in ("forward", "backward"))
    filled = next((each for each in recorded if each.name == "aten::embedding_dense_backward"), None)
    if filled is None:
        fills_ms = part * max(backward_ms - BACKWARD_TO_FORWARD * forward_ms, 0.0)
    else:
        fills_ms = filled.device_ms_per_step if run.timing.on_device else filled.host_ms_per_step
    of_backward = min(fills_ms / backward_ms, 1.0) if backward_ms else 0.0
    place = f"the gradient of self.{table.name}, of whose {table.rows:,} rows a step uses {table.used_pct:.2g} %"
    return Setting(place, {"optimizer": part, "backward": of_backward})


# without checkpointing, or in larger batches, activations take more, and how much is not known
_MEMORY_LEFT: Final = 0.5


def _memory_left(run: RunEvidence) -> float:
    """The share of a GPU's memory that was never used: none where that is unknown; all of it without a GPU."""
    gpu = run.machine.telemetry
    if gpu is None or not gpu.memory_total_gib or gpu.memory_peak_gib is None:
        return float(not run.timing.on_device)
    return 1 - gpu.memory_peak_gib / gpu.memory_total_gib


_CHECKPOINT: Final = re.compile(r"(\w+\.)*checkpoint(_sequential)?\(")  # of torch.utils.checkpoint


def checkpointing(run: RunEvidence, _: Sequence[Operator]) -> Setting | None:
    """Activations that are computed again in backward, with memory to spare, which take as long as forward."""
    module = "" if run.settings.switches is None else run.settings.switches.checkpointing
    calls = [] if module else [line for line in run.lines.get("forward", ()) if _CHECKPOINT.match(line.call)]
    of_forward = 1.0 if module else sum(line.pct for line in calls) / 100
    forward_ms, backward_ms = (RunTimes.of(run).region(name).device_ms for name in ("forward", "backward"))
    if not of_forward or _memory_left(run) < _MEMORY_LEFT or not backward_ms:
        return None
    shares = {"backward": min(of_forward * forward_ms / backward_ms, 1.0)}
    return Setting(f"activation checkpointing of {module}", shares, callee=calls[0].callee if calls else "")


_LARGE_US: Final = 50.0  # of an operator, which computes for most of that


def _large_ms(run: RunEvidence, recorded: Sequence[Operator]) -> float | None:
    """What the operators of a step on a CPU take in which they mostly compute; None if unknown."""
    if run.settings.device != "cpu" or not recorded:
        return None
    times = ((each.self_host_ms_per_step, each.calls_per_step) for each in recorded)
    return sum(ms for ms, calls in times if 1e3 * ms >= _LARGE_US * calls)


def _parts_ms(run: RunEvidence, holds: Callable[[str], bool]) -> float:
    """What some parts of the ledger take of a step."""
    if run.ledger is None:
        return 0.0
    counted_s, steps = run.ledger.counted_s, run.timing.steps
    if counted_s is None:
        counted_s, steps = run.ledger.parts, run.timing.all_steps or steps
    return 1e3 * sum(s for part, s in counted_s.items() if holds(part)) / max(steps, 1)


_OF_FLOAT64: Final = 0.5  # what computes takes twice as long as in float32: it moves twice the bytes


def float64(run: RunEvidence, recorded: Sequence[Operator]) -> Setting | None:
    """Parameters in float64 on a CPU, where operators compute for longer than calling them takes."""
    pct, times = 0.0 if run.settings.switches is None else run.settings.switches.float64_pct, RunTimes.of(run)
    large_ms = _large_ms(run, recorded) or 0.0  # those of the loader, if they are in this process, included
    compute_ms = sum(times.region(name).host_ms for name in COMPUTE)
    if not pct or 2 * (large_ms - times.region("data").host_ms) < compute_ms:
        return None
    return Setting("float64 parameters", dict.fromkeys(COMPUTE, _OF_FLOAT64 * pct / 100))


_HARDLY: Final = 0.2


def small_batches(run: RunEvidence, recorded: Sequence[Operator]) -> Setting | None:
    """Gradients of many batches that are accumulated, each so small that calling the operators is most of its time."""
    loader, times = run.settings.loader, RunTimes.of(run)
    if loader is None or loader.accumulate_grad_batches == 1:
        return None
    model_ms = sum(times.region(name).host_ms for name in _MODEL)
    mostly = 2 * model_ms > run.timing.step_ms.mean  # so that it is not what waits for the loader or in a hook
    if not mostly or run.ranks.world_size > 1 or _memory_left(run) < _MEMORY_LEFT:
        return None
    if not run.timing.on_device:
        large_ms, calls_ms = _large_ms(run, recorded), sum(op.self_host_ms_per_step for op in recorded)
        if large_ms is None or large_ms > _HARDLY * model_ms or 2 * calls_ms < model_ms:
            return None
    if not are_small(run, recorded):
        return None
    logs_ms = _parts_ms(run, lambda part: part == SELF_LOG)  # in forward, with a finding of its own
    many, forward_ms = loader.accumulate_grad_batches, times.region("forward").host_ms
    each = 1 - 1 / many
    of = "small batches" if loader.batch_size is None else f"batches of {loader.batch_size}"
    shares = {"forward": each * max(1 - logs_ms / forward_ms, 0.0) if forward_ms else 0.0, "backward": each}
    return Setting(f"accumulate_grad_batches={many} with {of}", shares)


_TENSORS_MS: Final = 0.5  # handing over a batch of a few tensors takes some 0.02 ms


def batch_of_objects(run: RunEvidence, _: Sequence[Operator]) -> Setting | None:
    """Batches of many Python objects, each of which Lightning looks at; on a CPU, where copies take no time."""
    handed_over_ms = RunTimes.of(run).region("transfer").host_ms
    if run.settings.device != "cpu" or run.settings.trainer != "lightning" or run.ledger is None:
        return None
    hooks_ms = _parts_ms(run, lambda part: hook_region(part) == "transfer")
    if handed_over_ms - hooks_ms < _TENSORS_MS:
        return None
    return Setting("handing each batch over", {"transfer": 1 - hooks_ms / handed_over_ms})


_PRODUCTS: Final = frozenset({"aten::bmm", "aten::baddbmm"})
_OF_ATTENTION: Final = re.compile(r"aten::(bmm|baddbmm|_softmax\w*)$|autograd::.*: (Softmax|Bmm|Baddbmm)Backward0$")


def attention(run: RunEvidence, recorded: Sequence[Operator]) -> Setting | None:
    """Attention of several operators, on a CPU: two products for each softmax, four more for each in backward."""
    calls = {each.name: each.calls_per_step for each in recorded}
    softmaxes, products = calls.get("aten::_softmax", 0.0), sum(calls.get(name, 0.0) for name in _PRODUCTS)
    of_each = 2 * softmaxes + 4 * calls.get("aten::_softmax_backward_data", 0.0)
    # with dropout, PyTorch's own attention is the same operators on a CPU (torch 2.13). It takes longer than a softmax:
    # in a table that is cut it is listed, if the softmax is
    drops = calls.get("aten::bernoulli_", 0.0) >= softmaxes
    costliest_first = all(a.self_host_ms_per_step >= b.self_host_ms_per_step for a, b in pairwise(recorded))
    if run.settings.device != "cpu" or not softmaxes or products < of_each or drops or not costliest_first:
        return None
    model_ms = sum(RunTimes.of(run).region(name).host_ms for name in _MODEL)
    took_ms = sum(each.self_host_ms_per_step for each in recorded if _OF_ATTENTION.match(each.name))
    all_ms = max(sum(each.self_host_ms_per_step for each in recorded), model_ms)  # recorded, which takes longer
    if any("scaled_dot_product" in name for name in calls) or not all_ms:
        return None
    shares = dict.fromkeys(_MODEL, took_ms / all_ms)
    return Setting("attention of two products and a softmax", shares, callee="MultiheadAttention.forward")

"""Who makes the host wait for the GPU: what, in which line, and whether it is Lightning itself."""

from pathlib import Path

import pytest

from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import Synthetic

TRACES = Path(__file__).parent / "data" / "traces"


def one_step():
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 90, launched=0)
    return trace


def synchronize(trace, at, *operators, call="cudaStreamSynchronize"):
    """A call that waits 2 ms, within operators from the outside in."""
    for depth, name in enumerate(operators):
        trace.operator(name, at + depth / 10, at + 5 - depth / 10)
    trace.call(call, at + 1, at + 3)


BLOCKING_COPY = "a blocking copy (.to(), .cpu(), .tolist(), torch.tensor(device=...))"


@pytest.mark.parametrize(
    ("operators", "cause"),
    [
        (["aten::item", "aten::_local_scalar_dense"], ".item()"),
        (["aten::to", "aten::_to_copy", "aten::copy_"], BLOCKING_COPY),
        (["aten::nonzero"], "nonzero() or a boolean mask"),
        (["aten::index", "aten::nonzero"], "nonzero() or a boolean mask"),
        (["aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"], "a truth test of a tensor (`if tensor:`)"),
        (["aten::equal", "aten::item"], "torch.equal()"),
        ([], "stream.synchronize()"),
        (["mylib::op"], "stream.synchronize() in mylib::op"),
    ],
)
def test_what_is_around_the_call_names_the_cause(tmp_path, operators, cause):
    trace = one_step()
    synchronize(trace, 10, *operators)
    host = trace.rank(tmp_path).host
    assert [(sync.cause, sync.per_step, sync.host_ms_per_step) for sync in host.syncs] == [(cause, 1, 2)]
    assert host.device_syncs_per_step == 1


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("cudaDeviceSynchronize", "torch.cuda.synchronize()"),
        ("hipDeviceSynchronize", "torch.cuda.synchronize()"),
        ("cudaEventSynchronize", "event.synchronize()"),
        ("hipMemcpyWithStream", BLOCKING_COPY),
    ],
)
def test_calls_that_nothing_is_around_name_themselves(tmp_path, call, cause):
    trace = one_step()
    synchronize(trace, 10, call=call)
    assert [sync.cause for sync in trace.rank(tmp_path).host.syncs] == [cause]


@pytest.mark.parametrize("call", ["cudaStreamWaitEvent", "cudaEventQuery", "cudaMemcpyAsync", "cudaLaunchKernel"])
def test_calls_that_return_at_once_are_no_syncs(tmp_path, call):
    trace = one_step()
    synchronize(trace, 10, call=call)
    assert trace.rank(tmp_path).host.device_syncs_per_step == 0


def test_item_of_a_tensor_on_the_host_is_no_sync(tmp_path):
    trace = one_step()
    trace.operator("aten::item", 10, 11)
    trace.operator("aten::_local_scalar_dense", 10, 11)
    host = trace.rank(tmp_path).host
    assert (host.device_syncs_per_step, host.syncs) == (0, ())


def test_the_most_frequent_cause_comes_first(tmp_path):
    trace = one_step()
    synchronize(trace, 10, "aten::nonzero")
    for at in (20, 30, 40):
        synchronize(trace, at, "aten::item")
    causes = trace.rank(tmp_path).host.syncs
    assert [(sync.cause, sync.per_step) for sync in causes] == [(".item()", 3), ("nonzero() or a boolean mask", 1)]


def test_the_profilers_own_sync_and_those_of_validation_are_in_no_step(tmp_path):
    trace = one_step()
    trace.mark("forge.forward", 0, 30)
    trace.mark("forge.validation", 30, 50)
    synchronize(trace, 35, "aten::item")
    synchronize(trace, 101, call="cudaDeviceSynchronize")
    assert trace.rank(tmp_path).host.syncs == ()


def test_lightnings_own_broadcast_is_counted_apart(tmp_path):
    trace = one_step()
    synchronize(trace, 10, "aten::to", "aten::_to_copy", "aten::copy_")
    trace.operator("aten::lift_fresh", 15.1, 15.2)
    trace.operator("aten::detach_", 15.3, 15.4)
    trace.operator("c10d::broadcast_", 16, 17)
    synchronize(trace, 20, "aten::item", "aten::_local_scalar_dense")
    synchronize(trace, 30, "aten::item", "aten::_local_scalar_dense")
    host = trace.rank(tmp_path).host
    assert (host.device_syncs_per_step, host.lightning_syncs_per_step) == (1, 2)
    assert [(sync.cause, sync.lightning) for sync in host.syncs] == [
        (".item()", True),
        (".item()", False),
        (BLOCKING_COPY, True),
    ]


def test_a_broadcast_of_the_users_is_not_lightnings(tmp_path):
    trace = one_step()
    trace.operator("aten::add", 9, 10)
    trace.operator("c10d::broadcast_", 16, 17)
    synchronize(trace, 20, "aten::item")
    host = trace.rank(tmp_path).host
    assert (host.device_syncs_per_step, host.lightning_syncs_per_step) == (1, 0)


STACK = (
    "train.py(90): <module>",
    "/env/site-packages/lightning/pytorch/trainer/trainer.py(560): fit",
    "/home/me/model.py(33): training_step",
    "/env/site-packages/torch/nn/modules/module.py(1775): _call_impl",
    "<built-in method item of Tensor object at 0x7f>",
)


def test_the_innermost_frame_of_the_users_is_named_where_stacks_were_recorded(tmp_path):
    trace = one_step()
    for depth, name in enumerate(STACK):
        trace.frame(name, 5 + depth / 10, 50 - depth / 10)
    synchronize(trace, 10, "aten::item")
    synchronize(trace, 60, "aten::item")
    assert [sync.where for sync in trace.rank(tmp_path).host.syncs] == ["", "/home/me/model.py:33 training_step"]


def test_a_real_run_without_syncs_has_none():
    """Its AdamW asks tensors on the host for their value, hundreds of times a step."""
    for case in ("compute_bound", "conv_net", "slow_optimizer"):
        host = analyze(TRACES / case).analysis.ranks[0].host
        assert (host.device_syncs_per_step, host.lightning_syncs_per_step) == (0, 0), case


def test_a_real_run_of_two_ranks_has_lightnings_own_two():
    for case in ("ddp", "ddp_comm_bound", "slow_rank_host"):
        for rank in analyze(TRACES / case).analysis.ranks:
            assert (rank.host.device_syncs_per_step, rank.host.lightning_syncs_per_step) == (0, 2), case


def test_planted_syncs_are_all_found():
    """In each of 16 layers `.item()`, `.cpu()` and `nonzero()`, and five times `loss.item()`."""
    host = analyze(TRACES / "sync_item").analysis.ranks[0].host
    per_step = {sync.cause: sync.per_step for sync in host.syncs}
    assert per_step == {".item()": 16 + 5, BLOCKING_COPY: 16, "nonzero() or a boolean mask": 16}


def test_planted_syncs_are_found_where_they_are_written():
    host = analyze(TRACES / "sync_stack").analysis.ranks[0].host
    places = {sync.where.rpartition(" ")[2] for sync in host.syncs}
    assert places == {"training_step", "forward"}
    assert all(sync.where.startswith("tests/scripts/planted.py:") for sync in host.syncs)

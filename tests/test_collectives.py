"""Communication matched over ranks: what it costs, and who waits for whom. One step of 100 ms on each."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import GEMM, NCCL, Synthetic

TRACES = Path(__file__).parent / "data" / "traces"


def stepping(*steps, first=0):
    """A rank that computes in steps of 100 ms, each with the given collectives, one every 20 ms: how long, and what."""
    trace = Synthetic()
    for number, collectives in enumerate(steps):
        begin = first + 100 * number
        trace.step(number, begin, begin + 100)
        trace.kernel(begin, begin + 1, launched=begin, name=GEMM)
        for position, (duration, says) in enumerate(collectives):
            start = begin + 2 + 20 * position
            trace.collective(start, start + duration, launched=start - 0.5, **says)
        trace.kernel(begin + 99, begin + 100, launched=begin + 98)
    return trace


def rank_with(*collectives, begin=0):
    """The same with one step."""
    return stepping(collectives, first=begin)


def reduce(duration, **says):
    return duration, {"name": "allreduce", **says}


def gather(duration, **says):
    return duration, {"name": "_allgather_base", **says}


def analysis_of(folder, *ranks):
    for number, trace in enumerate(ranks):
        trace.write(folder, f"rank{number}.trace.json")
    return analyze(folder).analysis


def costs(analysis):
    return {(one.name, one.group): (one.cost_ms_per_step, one.wait_ms_per_step) for one in analysis.collectives}


def waits(analysis):
    return {wait.rank: pytest.approx(wait.wait_ms_per_step) for wait in analysis.rank_waits}


def test_the_shortest_is_the_true_cost_and_the_rest_is_waiting(tmp_path):
    analysis = analysis_of(tmp_path, rank_with(reduce(10), reduce(3)), rank_with(reduce(4), reduce(9)))
    assert costs(analysis) == {("allreduce", "0"): (4 + 3, (6 + 6) / 2)}
    assert waits(analysis) == {0: 6, 1: 6}
    assert [wait.comm_ms_per_step for wait in analysis.rank_waits] == [13, 13]


def unnamed(*durations, kernel=NCCL, streams=(20,)):
    """A rank of a PyTorch before 2.2, whose kernels alone say what they are."""
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(0, 1, launched=0, name=GEMM)
    for position, duration in enumerate(durations):
        start = 2 + 20 * position
        stream = streams[position % len(streams)]
        trace.kernel(start, start + duration, launched=start - 0.5, name=kernel, stream=stream)
    trace.kernel(99, 100, launched=98)
    return trace


def test_collectives_without_names_are_matched_by_order_kernel_and_stream(tmp_path):
    analysis = analysis_of(tmp_path, unnamed(10, 3), unnamed(4, 9))
    assert costs(analysis) == {("allreduce", "on communication stream 1"): (4 + 3, (6 + 6) / 2)}
    assert waits(analysis) == {0: 6, 1: 6}
    streams = analysis_of(tmp_path, unnamed(10, 3, streams=(20, 24)), unnamed(4, 9, streams=(33, 40)))
    assert {group for _, group in costs(streams)} == {"on communication stream 1", "on communication stream 2"}


@pytest.mark.parametrize(
    "other", [{"durations": (4,)}, {"durations": (4, 9), "kernel": "ncclKernel_AllGather_RING_LL"}]
)
def test_collectives_without_names_are_not_compared_where_they_differ(tmp_path, other):
    analysis = analysis_of(tmp_path, unnamed(10, 3), unnamed(*other.pop("durations"), **other))
    assert analysis.rank_waits == ()
    assert any("not compared" in warning for warning in analysis.warnings)


def test_a_trace_of_one_rank_claims_nothing_about_waiting_for_others(tmp_path):
    trace = unnamed(10, 13)
    trace.call("cudaStreamSynchronize", 1.6, 90)
    (finding,) = [one for one in analysis_of(tmp_path, trace).findings if one.code == "communication-bound"]
    assert "holds the step up for 23.0 ms (including any waits for other ranks" in finding.title
    assert "waiting_for_ranks_ms_per_step" not in finding.evidence


SEND_RECEIVE = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"


def exchanging(*durations, within, steps=2):
    """A rank that exchanges as PyTorch 1.9 records it: the kernel has one name, and the host's range another."""
    trace = Synthetic()
    for step in range(steps):
        begin = 100 * step
        trace.step(step, begin, begin + 100)
        trace.kernel(begin, begin + 1, launched=begin, name=GEMM)
        for position, duration in enumerate(durations):
            start = begin + 2 + 40 * position
            trace.operator(within, start - 0.7, start - 0.3)
            trace.kernel(start, start + duration, launched=start - 0.5, name=SEND_RECEIVE, stream=20)
        trace.kernel(begin + 99, begin + 100, launched=begin + 98)
    return trace


def test_an_all_to_all_of_send_and_receive_kernels_shows_who_never_waits(tmp_path):
    others, last = exchanging(35, 30, within="nccl:all_to_all"), exchanging(5, 6, within="nccl:all_to_all")
    analysis = analysis_of(tmp_path, *[others] * 7, last)
    assert costs(analysis) == {("all_to_all", "on communication stream 1"): (11, pytest.approx((30 + 24) * 7 / 8))}
    assert (analysis.verdict, analysis.findings[0].rank) == ("straggler", 7)
    assert analysis.findings[0].share_pct == pytest.approx(54)


def test_the_first_operator_of_a_trace_may_name_its_collective(tmp_path):
    ranks = [exchanging(ms, within="c10d::alltoall_", steps=1) for ms in (35, 5)]
    assert costs(analysis_of(tmp_path, *ranks)) == {("alltoall_", "on communication stream 1"): (5, 15)}


def test_what_is_sent_from_one_rank_to_another_is_not_compared(tmp_path):
    analysis = analysis_of(tmp_path, exchanging(35, within="nccl:send 0->1"), exchanging(5, within="nccl:recv 1<-0"))
    assert (analysis.rank_waits, analysis.collectives) == ((), ())


def bucketed(backward_ends):
    """A step of 58 ms in which gradients are exchanged in two buckets, the first while backward still computes."""
    trace = Synthetic()
    trace.step(0, 0, 58)
    trace.kernel(0, backward_ends, launched=0)
    trace.collective(15, 30, launched=0.1)
    trace.collective(backward_ends, 56, launched=0.2)
    trace.kernel(56, 58, launched=0.3)
    return trace


def test_a_straggler_costs_all_that_the_others_wait_with_nothing_to_compute(tmp_path):
    """The exchange that computation hides is no reason to take the waiting at the end for partly hidden."""
    analysis = analysis_of(tmp_path, bucketed(backward_ends=45.4), bucketed(backward_ends=55))
    [straggler] = [found for found in analysis.findings if found.code == "straggler"]
    assert (straggler.rank, straggler.saves.ms_per_step) == (1, pytest.approx(9.6))


def test_collectives_have_calls_and_bytes(tmp_path):
    calls = [reduce(1, elements=1_000_000, dtype="BFloat16"), reduce(1, elements=500_000, dtype="Float")]
    (one,) = analysis_of(tmp_path, rank_with(*calls), rank_with(*calls)).collectives
    assert (one.calls_per_step, one.megabytes_per_step) == (2, 2 + 2)


def test_over_several_steps_collectives_are_means_per_step_and_the_costliest_is_first(tmp_path):
    mine = [reduce(10, elements=2_000_000), gather(9), gather(17)], [reduce(6)], [reduce(2)]
    theirs = [reduce(4, elements=2_000_000), gather(12), gather(14)], [reduce(6)], [reduce(8)]
    left_out = [reduce(19), gather(19)]  # the first step, on both
    analysis = analysis_of(tmp_path, stepping(left_out, *mine), stepping(left_out, *theirs))
    gathered, reduced = analysis.collectives
    assert [one.name for one in analysis.collectives] == ["_allgather_base", "allreduce"]
    assert gathered.calls_per_step == pytest.approx(2 / 3)
    assert gathered.cost_ms_per_step == pytest.approx((9 + 14) / 3)
    assert gathered.wait_ms_per_step == pytest.approx((3 + 3) / 2 / 3)
    assert reduced.calls_per_step == pytest.approx(1)
    assert reduced.megabytes_per_step == pytest.approx((2_000_000 + 1000 + 1000) * 4 / 1e6 / 3)
    assert reduced.cost_ms_per_step == pytest.approx((4 + 6 + 2) / 3)
    assert reduced.wait_ms_per_step == pytest.approx((6 + 6) / 2 / 3)
    assert waits(analysis) == {0: pytest.approx((6 + 3) / 3), 1: pytest.approx((3 + 6) / 3)}
    assert [wait.comm_ms_per_step for wait in analysis.rank_waits] == [pytest.approx(44 / 3), pytest.approx(44 / 3)]


def test_collectives_without_names_are_not_compared_where_steps_have_other_numbers_of_them(tmp_path):
    def rank(*durations_of_steps):
        trace = Synthetic()
        for number, durations in enumerate(durations_of_steps):
            begin = 100 * number
            trace.step(number, begin, begin + 100)
            for position, duration in enumerate(durations):
                start = begin + 2 + 20 * position
                trace.kernel(start, start + duration, launched=start - 0.5, name=NCCL, stream=20)
            trace.kernel(begin + 99, begin + 100, launched=begin + 98)
        return trace

    analysis = analysis_of(tmp_path, rank([1], [9, 9], [9]), rank([1], [9], [9, 9]))
    assert (analysis.collectives, analysis.rank_waits) == ((), ())
    assert [warning for warning in analysis.warnings if "not compared" in warning]


def test_the_rank_that_waits_least_while_others_wait_is_the_straggler(tmp_path):
    others = rank_with(reduce(15), reduce(15))
    analysis = analysis_of(tmp_path, others, others, rank_with(reduce(1), reduce(1)), others)
    assert waits(analysis) == {0: 28, 1: 28, 2: 0, 3: 28}
    (straggler,) = [finding for finding in analysis.findings if finding.code == "straggler"]
    assert (straggler.rank, straggler.share_pct) == (2, pytest.approx(28))


def test_ranks_that_wait_for_each_other_by_turns_have_no_straggler(tmp_path):
    analysis = analysis_of(tmp_path, rank_with(reduce(15), reduce(1)), rank_with(reduce(1), reduce(15)))
    assert "straggler" not in {finding.code for finding in analysis.findings}


def test_clocks_that_are_hours_apart_do_not_matter(tmp_path):
    hours = 5 * 3600 * 1000
    apart = analysis_of(tmp_path / "apart", rank_with(reduce(10)), rank_with(reduce(4), begin=hours))
    together = analysis_of(tmp_path / "together", rank_with(reduce(10)), rank_with(reduce(4)))
    assert replace(apart, source="") == replace(together, source="")


def test_the_order_of_launches_counts_and_not_that_of_the_file(tmp_path):
    reversed_file = rank_with(reduce(4), gather(5))
    reversed_file.events.reverse()
    analysis = analysis_of(tmp_path, rank_with(reduce(10), gather(6)), reversed_file)
    assert costs(analysis) == {("allreduce", "0"): (4, 3), ("_allgather_base", "0"): (5, 0.5)}


def test_each_group_is_matched_by_itself(tmp_path):
    one = rank_with(reduce(10, group="dp"), gather(8, group="tp"), gather(7, group="tp"))
    other = rank_with(gather(2, group="tp"), reduce(4, group="dp"), gather(3, group="tp"))
    assert costs(analysis_of(tmp_path, one, other)) == {
        ("allreduce", "dp"): (4, 3),
        ("_allgather_base", "tp"): (5, 5),
    }


def test_ranks_are_compared_within_their_groups(tmp_path):
    pairs = [rank_with(reduce(ms, group=group)) for ms, group in ((9, "a"), (3, "a"), (2, "b"), (12, "b"))]
    analysis = analysis_of(tmp_path, *pairs)
    assert waits(analysis) == {0: 6, 1: 0, 2: 0, 3: 10}


def test_unequal_numbers_of_collectives_are_said_and_not_compared(tmp_path):
    one = rank_with(reduce(10, group="dp"), reduce(9, group="dp"), gather(8, group="tp"))
    other = rank_with(reduce(4, group="dp"), gather(2, group="tp"))
    analysis = analysis_of(tmp_path, one, other)
    assert set(costs(analysis)) == {("_allgather_base", "tp")}
    assert [warning for warning in analysis.warnings if "group dp differ" in warning]


def test_different_collectives_at_one_place_are_said_and_not_compared(tmp_path):
    analysis = analysis_of(tmp_path, rank_with(reduce(10)), rank_with(gather(4)))
    assert (analysis.collectives, analysis.rank_waits) == ((), ())
    assert [warning for warning in analysis.warnings if "group 0 differ" in warning]


@pytest.mark.parametrize("name", ["send", "recv", "sendrecv"])
def test_messages_between_two_ranks_are_left_out(tmp_path, name):
    message = (9, {"name": name})
    analysis = analysis_of(tmp_path, rank_with(message, message, reduce(3)), rank_with(reduce(2)))
    assert set(costs(analysis)) == {("allreduce", "0")}


def test_a_rank_that_shares_no_collective_waits_for_nobody_and_is_waited_for_by_none(tmp_path):
    analysis = analysis_of(tmp_path, rank_with(reduce(10)), rank_with(reduce(4)), rank_with())
    assert waits(analysis) == {0: 6, 1: 0}


def test_a_rank_alone_has_nothing_to_compare(tmp_path):
    analysis = analysis_of(tmp_path, rank_with(reduce(10)))
    assert (analysis.collectives, analysis.rank_waits) == ((), ())
    assert analysis.ranks[0].comm.ms_per_step == 10


@pytest.mark.parametrize(
    ("compute", "exposed", "hidden_pct"), [((30, 60), 20, 0), ((12, 60), 10, 50), ((2, 22), 0, 100), ((8, 13), 15, 25)]
)
def test_communication_is_hidden_where_anything_else_runs(tmp_path, compute, exposed, hidden_pct):
    trace = rank_with(reduce(20))  # from 2 to 22
    trace.kernel(*compute, launched=2, name=GEMM)
    comm = trace.rank(tmp_path).comm
    assert (comm.ms_per_step, comm.exposed_ms_per_step, comm.hidden_pct) == (20, exposed, hidden_pct)
    assert comm.exposed_pct == exposed


@pytest.mark.parametrize(
    ("launched", "starts", "calls", "held_up"),
    [
        (1.5, 22, (), 20),  # the next kernel waits for all of it
        (16, 22, (), 6),  # only from its launch on
        (16, 16.01, (), 0),  # it does not wait
        (30, 30.01, (), 0),  # launched after it, which nothing says that the host waited for
        (30, 30.01, ("cudaStreamSynchronize",), 8),  # it waited from 14 on
    ],
)
def test_communication_holds_a_step_up_only_where_the_host_has_more_for_the_gpu(
    tmp_path, launched, starts, calls, held_up
):
    trace = rank_with(reduce(20))  # from 2 to 22
    for name in calls:
        trace.call(name, 14, 29)
    trace.kernel(starts, 60, launched=launched, name=GEMM)
    comm = trace.rank(tmp_path).comm
    assert comm.exposed_ms_per_step == pytest.approx(min(starts, 22) - 2)
    assert comm.holds_up_ms_per_step == pytest.approx(held_up, abs=0.6), "within the latency of a launch"


@pytest.mark.parametrize("case", ["slow_rank_gpu", "slow_rank_host"])
def test_of_two_real_ranks_the_slow_one_does_not_wait(case):
    analysis = analyze(TRACES / case).analysis
    fast, slow = analysis.rank_waits
    step = analysis.ranks[0].step_ms.mean
    assert slow.wait_ms_per_step < 0.01 * step < 0.3 * step < fast.wait_ms_per_step
    cost = sum(one.cost_ms_per_step for one in analysis.collectives)
    for wait in (fast, slow):
        assert wait.comm_ms_per_step - wait.wait_ms_per_step == pytest.approx(cost)

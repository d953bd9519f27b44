"""Waits of a rank for others, by its own events: in DDP's and FSDP2's steps, and what follows for own work."""

import json
import os
from random import Random

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.ranks import (
    Waits,
    in_turns_ms,
    late_rank,
    not_measured,
    rank_work,
    with_waits,
)
from lightning_forge_profiling.names import GC_FULL, SELF_LOG
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.run.rank_work import late_steps, mean_interval
from lightning_forge_profiling.schema import CpuUse, Distribution, RankWork, RegionCpu, RunLedger, RunRegion
from lightning_forge_profiling.timing.steps import StepTimes
from tests.evidence import made_evidence, with_figures
from tests.outcomes import script
from tests.ports import free_port

SLEEP_MS = 6.0


def measured(folder, *options):
    done = script("rank_waits.py", folder, *options, cwd=folder, env={**os.environ, "MASTER_PORT": str(free_port())})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("MEASURED", 1)[1])


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(("options", "micro_batches"), [((), 1), (("accumulate",), 4)])
def test_the_exposed_part_of_backward_is_that_of_ddps_own_logger(tmp_path, options, micro_batches):
    found = measured(tmp_path, "ddp", *options)
    waiting, late = found["works"]
    exchanged = slice(micro_batches - 1, None, micro_batches)  # DDP's logger knows of these alone, an exchange later
    pairs = [*zip(found["ddp"][micro_batches:], found["timed"], strict=False)][exchanged]
    assert len(pairs) == 64 // micro_batches - 1
    # in a busy machine's step a thread may lose its core between the two readings of a clock
    off_ms = sorted(abs(timed - of_ddp) for of_ddp, timed in pairs[2:])
    assert off_ms[len(off_ms) * 3 // 4] < 0.3, pairs
    assert late["leaves_ms"]["forward"] - late["exposed_ms"]["forward"] > SLEEP_MS
    assert waiting["leaves_ms"]["forward"] > waiting["exposed_ms"]["forward"]
    assert waiting["exposed_ms"]["forward"] > 0, "the buffers of batch norm come from rank 0"
    assert {"sigterm broadcast", "forward", "backward"} == {*waiting["exposed_ms"]}
    assert found["kept"], "torch.distributed.broadcast is as it was"


@pytest.mark.slow
@pytest.mark.real_time
def test_a_module_that_calls_the_strategy_and_patches_torch_trains_on_and_only_its_steps_wait(tmp_path):
    found = measured(tmp_path, "ddp", "own")
    assert found["kept"], "torch.distributed.broadcast is as it was"
    assert found["calls"] == 1, "what the module had put there, and taken away itself, has not been put back"
    late = found["works"][1]
    assert {*late["exposed_ms"]} == {"sigterm broadcast", "backward"}, "a thread waits all the time, and no other leaf"


@pytest.mark.slow
@pytest.mark.real_time
def test_fsdp2_waits_for_parameters_are_no_work(tmp_path):
    waiting, late = measured(tmp_path, "fsdp2")["works"]
    assert late["leaves_ms"]["forward"] - late["exposed_ms"]["forward"] > SLEEP_MS
    assert waiting["waits_ms"]["forward"] > SLEEP_MS / 2, "rank 0 waits longer for what rank 1 sends"


# -- the comparison of ranks -----------------------------------------------------------------------------------------


def slow_rank(folder, *options):
    """What rank 0's record says in the end where rank 1 is slow somewhere."""
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    done = script("slow_rank.py", folder, *options, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    [record] = folder.rglob("forge_record")
    return read_run(record).ranks[0].state.report.analysis


@pytest.mark.slow
@pytest.mark.real_time
def test_who_ends_its_epoch_late_is_late_and_who_waits_in_the_next_one_is_not(tmp_path):
    analysis = slow_rank(tmp_path, "epoch")
    [late] = [found for found in analysis.findings if found.code == "straggler"]
    assert "rank 1: its callback/SlowCallback.on_train_epoch_end" in late.title
    assert "loader-startup" not in {found.code for found in analysis.findings}
    first, second = sorted(analysis.run.ranks.works, key=lambda one: one.rank)
    assert first.leaves_ms.get("data_loader", 0.0) < 1.0
    # half a second at each end of 80 steps, three of which are in the step after it; the last has none
    assert second.leaves_ms["callback/SlowCallback.on_train_epoch_end"] == pytest.approx(3 * 500 / 310, abs=0.5)


@pytest.mark.slow
@pytest.mark.real_time
def test_who_waits_for_anothers_checkpoint_hook_does_not_write_so_long(tmp_path):
    analysis = slow_rank(tmp_path, "checkpoint")
    assert analysis.findings[0].code == "straggler"
    assert "for rank 1: its module/on_save_checkpoint takes 2.0 s" in analysis.findings[0].title
    assert "checkpoint-bound" not in {found.code for found in analysis.findings}


@pytest.mark.slow
@pytest.mark.real_time
def test_who_waits_in_validation_for_another_rank_does_not_work_there(tmp_path):
    analysis = slow_rank(tmp_path, "validation")
    [late] = [found for found in analysis.findings if found.code == "straggler"]
    assert "for rank 1: its validation takes " in late.title
    first, second = sorted(analysis.run.ranks.works, key=lambda one: one.rank)
    assert 80 * first.waits_ms["validation"] == pytest.approx(2000, rel=0.2), "100 batches of 20 ms in 80 steps"
    assert second.own_ms("validation") > 5 * first.own_ms("validation")


@pytest.mark.slow
@pytest.mark.real_time
def test_no_live_step_has_the_wait_for_a_rank_whose_trace_takes_long_to_export(tmp_path):
    run = slow_rank(tmp_path, "export", "window").run
    assert run.timing.all_steps == 80
    assert run.timing.step_ms.max < 400, "rank 1 exports for half a second, and rank 0 waits for it in the step after"


def rank(number, *, exposed, error=0.1, **more):
    """A rank on a GPU with 20 ms of work and 2 ms of communication that nothing hides; and what is given on top."""
    leaves = {"data": 1.0, "transfer": 0.5, "forward": 6.0, "backward": 10.0, "optimizer": 2.0, "other": 0.5}
    leaves["sigterm broadcast"] = exposed.get("sigterm broadcast", 0.0)
    for leaf, ms in more.items():
        leaves[leaf] = leaves.get(leaf, 0.0) + ms
    leaves["backward"] += exposed.get("backward", 0.0)
    return RankWork(
        rank=number,
        host="node0",
        steps=64,
        step_ms=sum(leaves.values()),
        leaves_ms=leaves,
        exposed_ms=exposed,
        error_ms=error,
        on_device=True,
        starved_pct=0.0,
    )


def late_of(works):
    return late_rank(with_waits(works))


def test_the_rank_with_most_work_of_its_own_is_late_and_its_longest_leaf_the_cause():
    early = [rank(number, exposed={"backward": 7.0}) for number in (0, 2, 3)]
    late = late_of([*early, rank(1, exposed={"backward": 2.0}, data=5.0)])
    assert (late.rank, late.cause, late.ms) == (1, "data", pytest.approx(5.0))
    assert late_of(early) is None


def test_waits_by_turns_and_work_that_nobody_waits_for_name_nobody():
    by_turns = [rank(0, exposed={"backward": 4.0, "sigterm broadcast": 0.1}),
                rank(1, exposed={"backward": 2.0, "sigterm broadcast": 2.1})]  # fmt: skip
    assert late_of(by_turns) is None
    assert late_of([rank(0, exposed={"backward": 2.0}), rank(1, exposed={"backward": 2.0}, data=5.0)]) is None


def excess(late, steps=24, ms=12.0):
    """By step what a rank was late by: in those whose number leaves one of some remainders by three."""
    return {step: ms if step % 3 in late else 0.0 for step in range(steps)}


@pytest.mark.parametrize(
    ("late", "waits_ms"),
    [
        (((0,), (1,), (2,)), 8.0),  # each is late by 12 ms in a third of the steps, and waits for both others
        (((0,), (0,), (0,)), 0.0),  # all in the same steps
        (((0, 1, 2), (), ()), 0.0),  # always the same one, which is a straggler
        (((0, 1), (2,), ()), 4.0),  # what goes if the first has its in the steps of the second
        (((), (), ()), 0.0),
    ],
)
def test_ranks_that_are_late_in_turns_wait_as_long_as_they_are_not_late_together(late, waits_ms):
    works = [
        replace(rank(number, exposed={"backward": 10.0}), excess_ms=excess(steps), excess_leaf="forward")
        for number, steps in enumerate(late)
    ]
    assert in_turns_ms(works) == pytest.approx(waits_ms)
    waited = [sum(work.waits_ms.values()) for work in with_waits(works)]
    assert waited == [pytest.approx(waits_ms)] * 3


def test_of_few_steps_in_common_nothing_is_said():
    works = [replace(rank(number, exposed={}), excess_ms=excess((number,), steps=11)) for number in range(3)]
    assert in_turns_ms(works) == 0.0
    apart = [replace(works[0], excess_ms={step + 100: 1.0 for step in range(30)}), *works[1:]]
    assert in_turns_ms(apart) == 0.0


def steps_of(own_ms, waits=lambda step: 0.0):
    return [
        StepTimes(step, {"forward": own_ms(step), "backward": 5.0 + waits(step), "wait/backward": waits(step)})
        for step in range(40)
    ]


def test_a_step_is_late_by_its_own_work_and_not_by_its_wait_for_another_rank():
    found, region = late_steps(steps_of(lambda step: 30.0 if step % 4 == 0 else 10.0 + step % 3 / 10))
    assert region == "forward"
    assert {step for step, ms in found.items() if ms} == {*range(0, 40, 4)}
    assert all(ms == pytest.approx(20, abs=0.5) for ms in found.values() if ms)
    late_ms = (20.0, 20.0, 20.0, 12.0, 20.0, 20.0, 20.0, 0.0, 0.0, 0.0, 0.0)
    _, most = late_steps(steps_of(lambda step: 10.0 + step % 3 / 10 + late_ms[step % len(late_ms)]))
    assert most == region, "also where more than half of the steps are late, by chance"
    found, region = late_steps(steps_of(lambda step: 10.0 + step % 3 / 10, waits=lambda step: 20.0 * (step % 2)))
    assert (region, {*found.values()}) == ("", {0.0})
    assert late_steps(steps_of(lambda _: 10.0)[:11]) == ({}, "")


def test_what_may_be_chance_names_nobody():
    works = [rank(0, exposed={"backward": 7.0}, error=4.0), rank(1, exposed={"backward": 2.0}, data=5.0, error=4.0)]
    assert late_of(works) is None


def test_communication_that_all_have_is_no_wait():
    works = with_waits([rank(0, exposed={"backward": 9.0}), rank(1, exposed={"backward": 5.0}, forward=4.0)])
    assert [dict(work.waits_ms) for work in works] == [{"backward": pytest.approx(4.0)}, {}]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"starved_pct": 0.0}, "forward on the GPU"),
        ({"starved_pct": 100.0}, "forward on the host"),
        ({"sm_mhz": 1200.0}, "forward, at 1200 MHz where the others' GPUs run at 1980"),
        (
            {"cpu": CpuUse(cores=1, used=1, regions={"forward": RegionCpu(used_pct=50, waits_pct=45, blocked_pct=5)})},
            "forward, in which it waits for a core",
        ),
    ],
)
def test_the_cause_says_what_makes_the_leaf_longer(changes, cause):
    early = replace(rank(0, exposed={"backward": 7.0}), sm_mhz=1980.0)
    late = replace(rank(1, exposed={"backward": 2.0}, forward=5.0), sm_mhz=1965.0)
    assert late_of([early, replace(late, **changes)]).cause == cause


SYNC_BATCH_NORM = {"unmeasured": ("forward", "backward"), "unmeasured_because": "SyncBatchNorm waits inside forward"}


def test_of_leaves_that_no_event_covers_nobody_is_blamed_and_the_reason_is_given():
    """With SyncBatchNorm forward has collectives: what a rank takes longer there may be waiting for the other one."""
    works = [
        replace(work, **SYNC_BATCH_NORM) for work in (rank(0, exposed={}, forward=5.0), rank(1, exposed={}, data=5.0))
    ]
    assert late_of(works) is None
    assert not_measured(with_waits(works)) == SYNC_BATCH_NORM["unmeasured_because"]
    alike = [replace(work, **SYNC_BATCH_NORM) for work in (rank(0, exposed={}), rank(1, exposed={}))]
    assert not_measured(with_waits(alike)) == "", "they do not differ"


def test_a_leaf_that_is_covered_is_named_beside_one_that_is_not():
    works = [rank(0, exposed={"backward": 7.0}), rank(1, exposed={"backward": 2.0}, data=5.0)]
    late = late_of([replace(work, **SYNC_BATCH_NORM) for work in works])
    assert (late.rank, late.cause, late.ms) == (1, "data", pytest.approx(5.0))


def test_a_collection_counts_once_and_not_to_the_region_that_it_lies_in():
    """Device events cannot tell collections from the rest of a region: 100 ms of them are in `forward`, too."""
    regions = {"data": 1.0, "transfer": 1.0, "forward": 106.0, "backward": 10.0, "optimizer": 1.0, "other": 1.0}
    evidence = made_evidence(
        steps=64,
        on_device=True,
        step_ms=Distribution(mean=120.0, p50=120.0, min=120.0, max=120.0),
        regions={name: RunRegion(device_ms=ms, host_ms=ms) for name, ms in regions.items()},
        ledger=RunLedger(
            wall_s=0.0, parts={GC_FULL: 6.4}, unexplained_s=0.0, counts={GC_FULL: 64}, counted_s={GC_FULL: 6.4}
        ),
    )
    work = rank_work(evidence, host="node0", waits=Waits({}))
    assert sum(work.leaves_ms.values()) == pytest.approx(120)
    assert max(work.leaves_ms, key=work.leaves_ms.__getitem__) == GC_FULL


def test_what_a_rank_waits_in_self_log_is_the_stragglers_and_no_slow_logger():
    """`self.log(..., sync_dist=True)`, before which rank 1 computes for 100 ms: rank 0 waits for it there."""
    works = [
        replace(rank(0, exposed={SELF_LOG: 100.0}), step_ms=104.0, leaves_ms={"forward": 2.0, SELF_LOG: 101.0}),
        replace(rank(1, exposed={SELF_LOG: 0.5}), step_ms=104.0, leaves_ms={"forward": 102.0, SELF_LOG: 1.5}),
    ]
    parts = {"steps": 0.3, SELF_LOG: 10.1}
    evidence = made_evidence(
        steps=100,
        on_device=False,
        world_size=2,
        step_ms=Distribution(mean=104.0, p50=104.0, min=104.0, max=104.0),
        regions={name: RunRegion(device_ms=ms, host_ms=ms) for name, ms in {"forward": 103.0, "other": 1.0}.items()},
        ledger=RunLedger(wall_s=10.4, parts=parts, unexplained_s=0.0, counts={SELF_LOG: 100}, counted_s=parts),
        works=tuple(works),
    )
    analysis = combine(None, evidence)
    assert analysis.verdict == "straggler"
    assert "slow-logger" not in {finding.code for finding in analysis.findings}
    unsynchronized = with_figures(evidence, works=tuple(replace(work, exposed_ms={}) for work in works))
    assert "slow-logger" in {finding.code for finding in combine(None, unsynchronized).findings}


def test_the_interval_of_a_mean_covers_it_in_95_of_100_series():
    random, covered = Random(0), 0  # noqa: S311
    for _ in range(400):
        interval = mean_interval([random.gauss(10, 2) for _ in range(64)], 20.0)
        covered += interval.low_pct <= 50 <= interval.high_pct
    assert 0.92 <= covered / 400 <= 0.98

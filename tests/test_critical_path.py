"""What the end of the recorded steps waited for, back to their beginning."""

from pathlib import Path

import numpy as np
import pytest

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.kernels import KINDS
from lightning_forge_profiling.analysis.replay import Graph
from lightning_forge_profiling.analysis.timeline import HOST, critical_path
from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import Synthetic
from tests.test_what_if import ranks_of, recorded

TRACES = Path(__file__).parent / "data/traces"


def pieces(path):
    """The path as (milliseconds, name of the work or "host")."""
    steps = recorded(path)
    found = critical_path(steps.recording, steps.graph)
    trace = steps.recording.trace
    names = ["host" if row == HOST else trace.names[trace.gpu.name[row]] for row in found.work.tolist()]
    return list(zip(((found.end - found.start) / 1e6).round(3).tolist(), names, strict=True))


def test_where_the_host_is_late_the_path_is_the_host_s(tmp_path):
    trace = Synthetic()
    for step in range(3):
        trace.step(step, 10 * step, 10 * step + 10)
        trace.kernel(10 * step + 9.1, 10 * step + 9.6, launched=10 * step + 9, name="gemm")
    assert pieces(trace.write(tmp_path)) == [(19.0, "host"), (0.5, "gemm")]  # of the second step and the third


def test_where_the_gpu_is_late_the_path_is_its_work(tmp_path):
    trace = Synthetic()
    for step in range(3):
        trace.step(step, step, step + 1)
        trace.kernel(1 + 10 * step, 6 + 10 * step, launched=step + 0.5, name="gemm")
        trace.kernel(6.001 + 10 * step, 10.999 + 10 * step, launched=step + 0.6, name="softmax")
    path = pieces(trace.write(tmp_path))
    assert [name for _, name in path] == ["gemm", "softmax"] * 2


def test_a_wait_for_the_gpu_joins_both(tmp_path):
    trace = Synthetic()
    for step in range(3):
        start = 10 * step
        trace.step(step, start, start + 10)
        trace.kernel(start + 2.01, start + 6, launched=start + 2, name="gemm")
        trace.call("cudaStreamSynchronize", start + 2.1, start + 6.05)
    lengths, names = zip(*pieces(trace.write(tmp_path)), strict=True)
    assert names == ("host", "gemm", "host", "gemm")
    # 2 ms until the launch, 3.99 of work; from the wait's return over the next step to its launch
    assert lengths == pytest.approx((2.0, 3.99, 5.95, 3.99), abs=0.01)


def test_work_of_another_stream_that_is_waited_for_is_on_the_path():
    [first, _] = ranks_of("slow_rank_gpu")
    found = critical_path(first.recording, first.graph)
    kinds = first.recording.kind[found.work[found.work != HOST]]
    spent = (found.end - found.start)[found.work != HOST]
    comm_ms = spent[kinds == KINDS.index("comm")].sum() / 1e6 / first.graph.steps
    assert comm_ms > 10, "rank 0 waits for rank 1 in an all-reduce"


def test_the_late_host_s_region_is_on_the_path():
    [_, late] = ranks_of("slow_rank_host")  # which computes in Python for 15 ms of each forward
    found = critical_path(late.recording, late.graph)
    host = found.work == HOST
    forward = Intervals.of(found.start[host], found.end[host]) & late.recording.on_host["forward"]
    assert forward.total / 1e6 / late.graph.steps == pytest.approx(15, abs=1.5)


@pytest.mark.parametrize("case", ["compute_bound", "ddp", "sync_item", "cuda_graph", "light_straggler"])
def test_pieces_follow_upon_each_other(case):
    for steps in ranks_of(case):
        found = critical_path(steps.recording, steps.graph)
        assert (found.start[1:] >= found.start[:-1]).all()
        assert (found.end >= found.start).all()
        # what lies between two pieces is the way of a launch to the GPU, or between two kernels
        gaps = np.maximum(found.start[1:] - found.end[:-1], 0)
        assert gaps.sum() < 0.1 * (found.end[-1] - found.start[0])


def test_it_is_a_lane_of_the_timeline_with_regions_and_kernels():
    [timeline] = analyze(TRACES / "sync_item").timelines
    [lane] = [lane for lane in timeline.lanes if lane.group == "path"]
    assert lane.name == "critical path"
    names = {timeline.names[index] for index in lane.name_index}
    kinds = {timeline.kinds[index] for index in lane.kind_index}
    assert {"forge.forward", "forge.backward"} <= names
    assert {"region", "matmul"} <= kinds
    assert list(lane.start_us) == sorted(lane.start_us)


def test_without_gpu_work_there_is_none():
    [timeline] = analyze(TRACES / "cpu_mlp").timelines
    assert "path" not in {lane.group for lane in timeline.lanes}


def test_steps_without_launches_have_an_empty_path(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.operator("aten::mm", 1, 2)
    steps = recorded(trace.write(tmp_path))
    assert len(critical_path(steps.recording, Graph.of(steps.recording))) == 0

"""Training on the CPU: what a step is made of, and a verdict on it."""

from pathlib import Path

import pytest
import torch

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import NOTHING_STANDS_OUT, Distribution, RunRegion
from tests.evidence import made_evidence
from tests.models import Classifier, loader
from tests.synthetic import AUTOGRAD, WORKER, Synthetic

CPU_MLP = Path(__file__).parent / "data" / "traces" / "cpu_mlp"

ALONE = {"world_size": 1, "intra_op_threads": 2, "usable_cores": 8}


def training(*, data=10, forward=20, backward=20, update=30, names=("aten::sqrt", "aten::div"), about=None, steps=3):
    """Steps of 100 ms, in which operators take so many milliseconds of each part, and Python the rest."""
    trace = Synthetic(device="", about=about)
    for number in range(steps):
        at = 100 * number
        trace.step(number, at, at + 100)
        trace.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + data)
        trace.operator("aten::stack", at, at + data)  # in the dataset, and so no operator of the model
        at += data
        trace.operator("aten::linear", at, at + forward, **{"Sequence number": number})
        trace.operator("aten::addmm", at + 1, at + forward - 1)
        at += forward
        trace.operator("autograd::engine::evaluate_function: AddmmBackward0", at, at + backward, AUTOGRAD)
        trace.operator("aten::mm", at, at + backward, AUTOGRAD)
        trace.operator("aten::stack", at, at + backward, WORKER)  # a thread that makes batches
        at += backward
        trace.mark("Optimizer.step#AdamW.step", at, at + update)
        for name in names:
            trace.operator(name, at, at + update / len(names))
            at += update / len(names)
    return trace


def found(analysis):
    return {finding.code: finding for finding in analysis.findings}


def test_the_parts_of_a_step_sum_to_it_and_each_is_what_it_says(tmp_path):
    rank = training().rank(tmp_path)
    cpu = rank.cpu
    assert (cpu.data_ms_per_step, cpu.operators_ms_per_step, cpu.optimizer_ms_per_step) == (10, 40, 30)
    assert cpu.python_ms_per_step == 20
    assert cpu.costliest_ms_per_step == {"aten::mm": 20, "aten::addmm": 18, "aten::linear": 2}
    assert (cpu.optimizer, cpu.update, cpu.update_calls_per_step) == ("AdamW", "loop", 2)
    assert (cpu.operator_threads, cpu.intra_op_threads, cpu.usable_cores) == (3, None, None)


def test_a_real_trace_s_parts_sum_to_the_step():
    [rank] = analyze(CPU_MLP).analysis.ranks
    cpu = rank.cpu
    parts = (cpu.data_ms_per_step, cpu.optimizer_ms_per_step, cpu.operators_ms_per_step, cpu.python_ms_per_step)
    assert sum(parts) == pytest.approx(rank.step_ms.mean)
    regions = {region.name: region.host_ms_per_step for region in rank.regions}
    assert sum(regions.values()) == pytest.approx(rank.step_ms.mean)
    assert (cpu.data_ms_per_step, cpu.optimizer_ms_per_step) == (regions["data"], regions["optimizer"])
    assert (cpu.optimizer, cpu.update, cpu.intra_op_threads, cpu.usable_cores) == ("AdamW", "loop", 1, 2)


@pytest.mark.parametrize(
    ("names", "update", "advice"),
    [
        (("aten::sqrt", "aten::div"), "loop", "Use AdamW(fused=True)"),
        (("aten::_foreach_sqrt", "aten::_foreach_div_"), "foreach", "Use AdamW(fused=True)"),
        (("aten::_fused_adamw_",), "fused", "Update less often"),
    ],
)
def test_an_update_s_advice_follows_from_how_it_is_computed(tmp_path, names, update, advice):
    about = {**ALONE, "intra_op_threads": 1}
    analysis = analyze(training(names=names, about=about).write(tmp_path)).analysis
    assert analysis.ranks[0].cpu.update == update
    slow = found(analysis)["slow-optimizer"]
    assert "AdamW's update takes 30.0 ms of each 100.0 ms step" in slow.title
    assert slow.advice.startswith(advice)
    removable = update != "fused"  # else it is a part of the work, after what can be removed
    assert analysis.verdict == ("slow-optimizer" if removable else "input-bound")


def test_a_fused_update_is_named_only_where_it_takes_much(tmp_path):
    analysis = analyze(training(names=("aten::_fused_adamw_",), update=15).write(tmp_path)).analysis
    assert "slow-optimizer" not in found(analysis)


def test_what_the_operators_take_names_the_costliest_by_their_own_time(tmp_path):
    finding = found(analyze(training().write(tmp_path)).analysis)["compute-bound"]
    assert finding.share_pct == 40
    assert "aten::mm 20 %, aten::addmm 18 %, aten::linear 2 % of the step" in finding.advice
    assert finding.evidence["own_time_per_step"] == "aten::mm 20.0 ms, aten::addmm 18.0 ms, aten::linear 2.00 ms"
    assert finding.evidence["threads_that_run_operators"] == 3


@pytest.mark.parametrize(
    ("about", "advice"),
    [
        (
            ALONE,
            "An operator uses up to 2 of 8 usable cores, and whether the others are free is unknown: measure OMP_",
        ),
        (
            {**ALONE, "intra_op_threads": 16},
            "An operator uses up to 16 threads where there are 8 usable cores: set OMP_NUM_THREADS=8",
        ),
        ({**ALONE, "intra_op_threads": 8}, "Cheaper: "),
        ({**ALONE, "world_size": 4}, "Cheaper: "),  # other ranks may use the cores too
        ({"world_size": "?"}, "The number of threads is unknown: measure OMP_NUM_THREADS=1, 2 and 4"),
        (None, "The number of threads is unknown: measure"),
    ],
)
def test_threads_are_compared_with_cores_where_both_are_known(tmp_path, about, advice):
    text = found(analyze(training(about=about).write(tmp_path)).analysis)["compute-bound"].advice
    assert advice in text
    assert text.startswith(advice[:8])


def test_python_between_operators_is_named(tmp_path):
    analysis = analyze(training(data=1, forward=10, backward=10, update=5).write(tmp_path)).analysis
    assert analysis.verdict == "python-bound"
    assert "74.0 ms of each 100.0 ms step is Python code between operators" in analysis.verdict_text


def test_waiting_for_the_loader_is_still_the_verdict_where_it_takes_most(tmp_path):
    analysis = analyze(training(data=70, forward=10, backward=10, update=5).write(tmp_path)).analysis
    assert analysis.verdict == "input-bound"


def test_a_gpu_that_was_not_recorded_is_not_taken_for_the_cpu(tmp_path):
    launched, allocated = training(), training()
    launched.call("cudaLaunchKernel", 12, 12.1)
    allocated.allocation(12, 1000, allocated=1000, reserved=2000)
    for trace, codes in ((launched, set()), (allocated, {"input-bound"})):
        analysis = analyze(trace.write(tmp_path / f"{len(codes)}")).analysis
        assert analysis.ranks[0].cpu is None
        assert found(analysis).keys() == codes
    assert analyze(tmp_path / "0").analysis.verdict_text.startswith("No verdict: 1 launch has no kernel")


def run(step_ms, *, on_device=False, **regions):
    spread = Distribution(mean=step_ms, p50=step_ms, min=step_ms, max=step_ms)
    found_in = {name: RunRegion(device_ms=ms, host_ms=ms) for name, ms in regions.items()}
    return made_evidence(steps=40, on_device=on_device, step_ms=spread, regions=found_in)


class TestWithTheWholeRun:
    def test_recorded_steps_as_long_as_live_ones_are_taken_as_they_are(self, tmp_path):
        traced = analyze(training().write(tmp_path)).analysis
        both = combine(traced, run(98.0, data=9.0, optimizer=30.0))
        assert {code: round(one.share_pct) for code, one in found(both).items()} == {
            "slow-optimizer": 30, "compute-bound": 40, "python-bound": 20, "input-bound": 9,
        }  # fmt: skip
        assert found(both)["slow-optimizer"].source == "trace", "which knows how the update is computed"
        assert both.verdict == "slow-optimizer"

    def test_an_update_that_takes_less_in_the_run_than_recorded_is_judged_by_the_run(self, tmp_path):
        traced = analyze(training().write(tmp_path)).analysis
        both = combine(traced, run(98.0, data=9.0, optimizer=12.0))
        update = found(both)["slow-optimizer"]
        assert update.title.startswith("AdamW's update takes 12.0 ms of each 98.0 ms live step on the CPU")
        assert update.saves.ms_per_step == pytest.approx(12.0)
        assert both.differences == ("slow-optimizer: 30 % of the recorded steps, 12 % of the run's 40 steps",)
        assert sum(one.share_pct for one in both.findings) <= 100

    def test_what_recording_adds_is_taken_off_python(self, tmp_path):
        traced = analyze(training().write(tmp_path)).analysis
        both = combine(traced, run(85.0, data=10.0, optimizer=25.0))
        assert {code: round(one.share_pct, 1) for code, one in found(both).items()} == {
            "slow-optimizer": 29.4, "compute-bound": 47.1, "python-bound": 5.9, "input-bound": 11.8,
        }  # fmt: skip
        assert sum(one.share_pct for one in both.findings) <= 100
        assert "AdamW's update takes 25.0 ms of each 85.0 ms live step on the CPU" in both.verdict_text
        assert "That saves at most 25.0 ms a step (29 %), if all of it goes." in both.verdict_text
        operators = found(both)["compute-bound"]
        assert operators.title.startswith("the model's operators take at most 40.0 ms of each 85.0 ms live step")
        assert "aten::mm 24 %" in operators.advice
        assert not [one for one in both.findings if "100.0 ms" in one.title], "each sentence is of the live step alone"
        assert any(
            "recording made steps 1.2 times slower (100.00 ms recorded, 85.00 ms not)" in text
            for text in both.differences
        )

    def test_an_update_that_is_slow_in_the_run_alone_is_the_run_s_finding(self, tmp_path):
        traced = analyze(training(update=2).write(tmp_path)).analysis
        both = combine(traced, run(98.0, data=9.0, optimizer=30.0))
        assert found(both)["slow-optimizer"].source == "run"
        assert found(both)["compute-bound"].source == "trace"

    def test_a_run_on_a_gpu_is_not_judged_by_its_host(self, tmp_path):
        both = combine(analyze(training().write(tmp_path)).analysis, run(98.0, on_device=True, data=0.0))
        assert both.findings == ()


def test_a_fit_on_the_cpu_ends_in_a_verdict_and_reports_without_empty_sections(make_trainer, tmp_path):
    class Fused(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)

    make_trainer(ForgeProfilerCallback(start_step=3, end_step=6, trace_dir=tmp_path / "traces")).fit(
        Fused(), loader(32)
    )
    [folder] = (tmp_path / "traces").iterdir()
    analysis = analyze(folder).analysis
    [rank] = analysis.ranks
    assert analysis.verdict != NOTHING_STANDS_OUT
    assert (rank.cpu.optimizer, rank.cpu.update) == ("SGD", "fused")
    assert rank.cpu.intra_op_threads == torch.get_num_threads()
    headings = [line for line in (folder / "summary.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## Time breakdown", "## Efficiency"]
    assert not {"## Copies: rank 0", "## Communication", "## Top kernels: rank 0", "## Regions: rank 0"} & {*headings}
    assert f"intra-op threads: {torch.get_num_threads()}" in (folder / "summary.md").read_text()

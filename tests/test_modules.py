"""Which module of the model the work of forward and backward is of, in steps that are recorded with operators."""

import gc
import gzip
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.diagnosis.verdict import longest_module
from lightning_forge_profiling.kineto.copies import write_plugin_copy
from lightning_forge_profiling.profiler.module_marks import ModuleMarks
from lightning_forge_profiling.schema import ModuleTime
from tests.models import Classifier, loader, quiet_trainer
from tests.synthetic import AUTOGRAD, Synthetic

ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"


def layer(trace, path, at, kind="Block", *, sequence, gpu_ms):
    """A call of 4 ms that launches one kernel in an operator."""
    trace.operator(f"nn.Module {path} ({kind})", at, at + 4)
    trace.operator("aten::linear", at + 1, at + 3, **{"Sequence number": sequence})
    trace.kernel(at + 2, at + 2 + gpu_ms, launched=at + 2)


def backward_of(trace, sequence, at, *, gpu_ms):
    trace.operator(ENGINE, at, at + 4, AUTOGRAD, **{"Sequence number": sequence})
    trace.kernel(at + 2, at + 2 + gpu_ms, launched=at + 2, thread=AUTOGRAD)


def times(rank):
    return {
        one.name: (one.kind, one.calls_per_step, one.forward_ms_per_step, one.backward_ms_per_step, one.pct)
        for one in rank.modules
    }


def test_gpu_work_is_of_the_module_that_launched_it_and_whose_gradients_it_computes(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.operator("nn.Module net (Net)", 5, 40)
    layer(trace, "net.blocks.0", 10, sequence=1, gpu_ms=3)
    layer(trace, "net.blocks.1", 20, sequence=2, gpu_ms=3)
    layer(trace, "net.head", 30, "Linear", sequence=3, gpu_ms=2)
    trace.operator("aten::nll_loss", 42, 44, **{"Sequence number": 4})  # of the training step, and in no module
    for sequence, at in ((4, 50), (3, 60), (2, 70), (1, 80)):
        backward_of(trace, sequence, at, gpu_ms=5)
    trace.kernel(95, 99, launched=95)
    rank = trace.rank(tmp_path)
    assert times(rank) == {
        "net": ("Net", 1, 8, 15, 23),
        "net.blocks.*": ("Block", 2, 6, 10, 16),
        "net.head": ("Linear", 1, 2, 5, 7),
    }
    assert [one.name for one in rank.modules] == ["net", "net.blocks.*", "net.head"]
    assert not [one for one in rank.operators if one.name.startswith("nn.Module")], "they are no operators"
    assert not [one for one in rank.regions if one.user], "nor the user's regions"


def test_a_forward_pass_that_is_made_again_is_of_backward(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    layer(trace, "net", 10, sequence=1, gpu_ms=3)
    trace.operator(ENGINE, 50, 70, AUTOGRAD, **{"Sequence number": 1})
    trace.operator("nn.Module net (Block)", 52, 56, AUTOGRAD)
    trace.operator("aten::linear", 53, 55, AUTOGRAD, **{"Sequence number": 1})
    trace.kernel(54, 57, launched=54, thread=AUTOGRAD)
    trace.kernel(62, 65, launched=62, thread=AUTOGRAD)
    assert times(trace.rank(tmp_path)) == {"net": ("Block", 2, 3, 6, 9)}


def test_layers_of_several_classes_in_one_list_stay_apart(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    for number, kind in enumerate(("Linear", "ReLU", "Linear")):
        layer(trace, f"net.{number}", 10 + 10 * number, kind, sequence=number, gpu_ms=3)
    assert [*times(trace.rank(tmp_path))] == ["net", "net.0", "net.1", "net.2"]


def test_modules_that_take_next_to_nothing_are_left_out(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 1000)
    layer(trace, "net", 10, sequence=1, gpu_ms=3)
    trace.kernel(900, 995, launched=900)
    assert trace.rank(tmp_path).modules == ()


def test_a_trace_without_calls_of_modules_has_no_table(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.operator("aten::linear", 10, 20, **{"Sequence number": 1})
    trace.kernel(12, 15, launched=12)
    assert trace.rank(tmp_path).modules == ()


def module_time(name, pct):
    return ModuleTime(
        name=name, kind="M", calls_per_step=1, forward_ms_per_step=pct / 2, backward_ms_per_step=pct / 2, pct=pct
    )


@pytest.mark.parametrize(
    ("modules", "longest"),
    [
        ([], None),
        ([("net", 60), ("net.blocks.*", 50), ("net.blocks.*.attn", 20), ("net.blocks.*.mlp", 20)], "net.blocks.*"),
        ([("net", 60), ("net.blocks.*", 50), ("net.blocks.*.attn", 45), ("net.head", 8)], "net.blocks.*.attn"),
        ([("net", 60), ("net.a", 30), ("net.b", 30)], "net"),
        ([("blocks.*", 50), ("head", 8)], "blocks.*"),
        ([("a", 30), ("b", 30)], None),
    ],
)
def test_the_longest_module_is_the_innermost_that_holds_most(modules, longest):
    found = longest_module([module_time(*each) for each in modules])
    assert (found and found.name) == longest


# -- a fit -------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Its products take far longer than calling them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if block is self.blocks[0] else block(x)
        return x


class Model(Classifier):
    def __init__(self):
        super().__init__()
        self.net = Wide()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return self.net(x.repeat(64, 32)).square().mean()


def recorded(tmp_path, model=None, **options):
    callback = ForgeProfilerCallback(4, 8, trace_dir=tmp_path, **options)
    quiet_trainer(callback).fit(model or Model(), loader(40))
    return callback


def test_a_fit_says_which_modules_take_its_time(tmp_path, capsys):
    called = nn.Module.__call__
    callback = recorded(tmp_path)
    assert nn.Module.__call__ is called
    analysis = callback.analysis()
    [rank] = analysis.ranks
    by_name = {one.name: one for one in rank.modules}
    assert {"net", "net.blocks.*", "net.blocks.*.0", "net.blocks.*.2"} <= {*by_name}
    assert (by_name["net.blocks.*"].kind, by_name["net.blocks.*"].calls_per_step) == ("Sequential", 4), "one again"
    [backward] = [one for one in rank.regions if one.name == "backward"]
    assert by_name["net"].backward_ms_per_step > 0.76 * backward.host_ms_per_step, "found by sequence numbers"
    both_ms = by_name["net"].forward_ms_per_step + by_name["net"].backward_ms_per_step
    assert both_ms <= rank.step_ms.mean
    [bound] = [one for one in analysis.findings if one.code == "compute-bound"]
    assert "% of the recorded step goes to net.blocks.* (Sequential)" in bound.title
    folder = callback.trace_report().path.parent
    assert "| `net.blocks.*.0` | `Linear` | 4 |" in (folder / "summary.md").read_text()
    assert "net.blocks.*.0" in (folder / "report.html").read_text()


class Fails(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)


def test_an_exception_in_the_window_leaves_no_marks(tmp_path):
    called = nn.Module.__call__
    with pytest.raises(RuntimeError, match="planted"):
        recorded(tmp_path, Fails())
    assert nn.Module.__call__ is called


def test_steps_without_operators_have_no_marks(tmp_path):
    marked = []

    class Looks(Model):
        def training_step(self, batch, batch_idx):
            marked.append(nn.Module.__call__ is not called)
            return super().training_step(batch, batch_idx)

    called = nn.Module.__call__
    recorded(tmp_path, Looks())
    assert [step for step, with_marks in enumerate(marked) if with_marks] == [4, 5, 6, 7]


def test_tensorboard_counts_no_module_as_an_operator(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    layer(trace, "net", 10, sequence=1, gpu_ms=3)
    copy = tmp_path / "rank0.pt.trace.json.gz"
    write_plugin_copy(trace.write(tmp_path), copy)
    names = [event["name"] for event in json.loads(gzip.decompress(copy.read_bytes()))["traceEvents"]]
    assert "aten::linear" in names
    assert not [name for name in names if name.startswith("nn.Module")]


def test_wrappers_of_fsdp_and_checkpointing_are_no_part_of_a_path():
    inner = nn.Linear(2, 2)
    wrapped = nn.ModuleDict({"block": nn.ModuleDict({"_checkpoint_wrapped_module": nn.ModuleDict({"proj": inner})})})
    marks = ModuleMarks(wrapped)
    marks.begin()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            inner(torch.ones(1, 2))
    finally:
        marks.end()
    assert "nn.Module block.proj (Linear)" in {event.name for event in profiler.events()}


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self._checkpoint_wrapped_module = inner

    def forward(self, x):
        return self._checkpoint_wrapped_module(x)


def test_a_wrapper_and_what_it_wraps_are_one_module():
    model = nn.ModuleDict({"block": Wrapper(nn.Linear(2, 2))})
    marks = ModuleMarks(model)
    marks.begin()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            model["block"](torch.ones(1, 2))
    finally:
        marks.end()
    names = [event.name for event in profiler.events() if event.name.startswith("nn.Module")]
    assert names == ["nn.Module block (Linear)"]


def test_a_module_is_not_kept_alive():
    called, module = nn.Module.__call__, nn.Linear(1, 1)
    marks = ModuleMarks(module)
    del module
    gc.collect()
    marks.begin()
    assert nn.Module.__call__ is called, "it is gone"


class Broken(nn.Module):
    """Dynamo compiles it in several pieces, and runs what is between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.slow
@pytest.mark.parametrize("compiled_first", [True, False], ids=["compiled before", "compiled while marked"])
@pytest.mark.parametrize("make", [nn.Sequential, Broken], ids=["one graph", "a graph break"])
def test_torch_compile_neither_compiles_again_nor_other_code(make, compiled_first):
    from torch._dynamo.utils import counters  # noqa: PLC0415  (takes seconds)

    def frames(marked):
        torch._dynamo.reset()
        counters.clear()
        model = make(nn.Linear(8, 8), nn.ReLU()) if make is nn.Sequential else make()
        compiled, marks, found = torch.compile(model, backend="eager"), ModuleMarks(model), []
        for steps in range(3):
            if marked and steps == (1 if compiled_first else 0):
                marks.begin()
            compiled(torch.ones(4, 8))
            marks.end()
            found.append((dict(counters["frames"]), counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        return found

    assert frames(marked=True) == frames(marked=False)

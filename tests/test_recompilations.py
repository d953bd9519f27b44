"""What `torch.compile` compiles again in a fit: function, line and reason."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch._dynamo import callback
from torch._dynamo.utils import get_compilation_metrics

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.ledger_rules import recompiled
from lightning_forge_profiling.report.run_wording import recompiled_lines
from lightning_forge_profiling.run.compilations import Compilations
from tests.models import Classifier, loader

if not hasattr(callback, "CallbackTrigger"):
    pytest.skip("an older torch, as 2.6, does not say what it compiles again, and why", allow_module_level=True)

HERE = Path(__file__)
STEPS = 12


def line_of(code):
    return next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.strip() == code)


def of_shapes(x):
    return (x * 2).sum()


def of_values(x, factor):
    return (x * factor).sum()


def broken(x):
    y = x * 2
    print(end="")  # noqa: T201  (which ends the graph)
    return y.sum()


def branches(x):
    if x.sum().item() > 3:
        return x * 2
    return x * 3


class GraphTree:
    """Announces recordings as `torch._inductor.cudagraph_trees` does, which needs a GPU. Even ids are of backward."""

    def __init__(self):
        self.id_to_mode = Modes()

    def _run(self, number, unexpected_rerecord_reason):
        function_id = SimpleNamespace(id=number)
        self.record_function(function_id)
        return unexpected_rerecord_reason

    def record_function(self, _):
        compile_id = next(one.compile_id for one in get_compilation_metrics() if one.co_name == "of_shapes")
        trigger = callback.CallbackTrigger.CUDAGRAPH_RECORDING
        with callback.callback_handler.install_callbacks(trigger, compile_id):
            pass


class Modes:
    def __getitem__(self, function_id):
        return SimpleNamespace(name="FORWARD" if function_id.id % 2 else "BACKWARD")


class Compiles(Classifier):
    """Compiles one function for each length, one for each of six numbers, and one in two pieces."""

    def __init__(self, *planted, graphs=None):
        super().__init__()
        torch._dynamo.reset()
        self.planted, self.graphs = planted, graphs or {}
        self.of_shapes, self.of_values = (
            torch.compile(one, backend="eager", dynamic=False) for one in (of_shapes, of_values)
        )
        self.broken, self.branches = (torch.compile(one, backend="eager") for one in (broken, branches))
        self.module = torch.compile(torch.nn.Sequential(torch.nn.Linear(3, 3)), backend="eager", dynamic=False)

    def training_step(self, batch):
        if "shapes" in self.planted:
            self.of_shapes(torch.ones(3 + self.global_step % 4))
        if "values" in self.planted:
            self.of_values(torch.ones(4), self.global_step % 6)
        if "modes" in self.planted:
            with torch.set_grad_enabled(self.global_step % 2 == 0):
                self.of_shapes(torch.ones(4))
        if "module" in self.planted:
            self.module(torch.ones(3 + self.global_step % 4, 3))
        if "item" in self.planted:
            self.branches(torch.full((4,), float(self.global_step % 2)))
        if "break" in self.planted:
            self.broken(torch.ones(4))
        if self.global_step in self.graphs:
            GraphTree()._run(*self.graphs[self.global_step])
        return super().training_step(batch)


@pytest.fixture
def fitted(make_trainer):
    def fit(*planted, graphs=None, **options):
        ours = ThroughputCallback(2, **options)
        options = {"logger": False, "enable_checkpointing": False}
        make_trainer(ours, max_steps=STEPS, **options).fit(Compiles(*planted, graphs=graphs), loader(4 * STEPS))
        return ours

    return fit


def test_each_recompilation_has_its_function_line_and_reason(fitted):
    found = {one.function: one for one in fitted("shapes", "values", "break").analysis().run.recompilations}
    shapes, values, rest = found["of_shapes"], found["of_values"], found["broken"]
    assert {Path(one.file) for one in found.values()} == {HERE}
    assert (shapes.kind, shapes.line, shapes.times) == ("recompiled", line_of("def of_shapes(x):"), 3)
    assert shapes.reason == "tensor 'x' size mismatch at index 0. expected 5, actual 6"
    assert (values.kind, values.line, values.times) == ("recompiled", line_of("def of_values(x, factor):"), 5)
    assert values.reason == "factor == 4"
    assert values.last_step == 5
    assert (rest.kind, rest.line, rest.times) == (
        "graph break",
        line_of('print(end="")  # noqa: T201  (which ends the graph)'),
        1,
    )
    assert min(one.seconds for one in found.values()) > 0


def test_the_verdict_names_the_one_that_takes_most(fitted):
    analysis = fitted("values").analysis()
    finding = next(one for one in analysis.findings if one.code == "compile-bound")
    assert f"of_values (test_recompilations.py:{line_of('def of_values(x, factor):')})" in finding.title
    assert "compiled again 5 times, the last time because it was no longer true that factor == 4" in finding.title
    assert finding.evidence["where"] == f"{HERE}:{line_of('def of_values(x, factor):')}"
    assert "pass it as a tensor" in finding.advice


def test_shapes_have_another_advice(fitted):
    finding = next(one for one in fitted("shapes").analysis().findings if one.code == "compile-bound")
    assert "mark_dynamic" in finding.advice


def test_a_function_that_pytorch_compiles_no_more_is_said_to_run_uncompiled(fitted, capsys):
    with torch._dynamo.config.patch(recompile_limit=3):
        [one] = fitted("values").analysis().run.recompilations
    assert (one.function, one.times, one.given_up) == ("of_values", 2, True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "which reached recompile_limit and runs uncompiled where no version fits: compiled again 2 times" in printed


def test_a_function_that_was_never_compiled_again_is_not_said_to_have_been(fitted):
    with torch._dynamo.config.patch(recompile_limit=1):
        [one] = fitted("values", record=True).analysis().run.recompilations
    assert (one.times, one.given_up) == (0, True)
    assert recompiled(one).endswith(": not compiled again, although it was no longer true that factor == 0")


def test_what_pytorch_gives_up_is_in_the_record_while_it_trains(fitted, tmp_path):
    with torch._dynamo.config.patch(recompile_limit=2):
        fitted("values", record=True)
    [record] = tmp_path.rglob("rank0.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    first, second = [line for line in lines if line.get("kind") == "recompilation"]
    assert first["seconds"] > 0
    assert "recompile_limit" in second["text"]


def test_a_mode_that_changes_is_a_reason_of_its_own(fitted):
    [one] = fitted("modes").analysis().run.recompilations
    assert recompiled(one, timed=False).endswith("compiled again once, because grad_mode changed")


def test_a_module_of_pytorch_is_not_named_by_its_wrapper(fitted):
    [one] = fitted("module").analysis().run.recompilations
    assert (one.function, one.file, one.line) == ("a module of torch.nn", "", 0)
    assert recompiled(one).startswith("a module of torch.nn, compiled again 3 times")


def test_the_value_that_a_graph_ended_for_is_named_by_its_line(fitted):
    found = fitted("item").analysis().run.recompilations
    reasons = [one.reason for one in found if one.kind == "recompiled"]
    line = line_of("if x.sum().item() > 3:")
    assert [reason for reason in reasons if f"what line {line} returned" in reason], reasons


def test_the_loggers_get_how_often_something_was_compiled_again(fitted, make_trainer, tmp_path):
    ours = ThroughputCallback(2)
    make_trainer(ours, max_steps=STEPS, enable_checkpointing=False).fit(Compiles("values", "break"), loader(4 * STEPS))
    [metrics] = tmp_path.rglob("metrics.csv")
    known = [row for row in csv.DictReader(metrics.read_text().splitlines()) if row.get("compile/again")]
    assert float(known[-1]["compile/again"]) == 5.0, "a graph break is none"
    assert float(known[-1]["compile/again_s"]) > 0


MOVED = (
    "static input data pointer changed.\ninput name: primals_2. data pointer changed from 1 to 2. input stack trace: x"
)


@pytest.mark.parametrize(
    ("recordings", "times", "why"),
    [
        ({3: (1, None), 4: (2, None)}, 0, ""),
        (
            {3: (1, None), 5: (1, lambda: MOVED), 6: (1, MOVED)},
            2,
            ", the last time because primals_2 has another address",
        ),
        ({3: (1, None), 6: (1, None)}, 1, ""),
        ({3: (1, None), 6: (3, None)}, 1, ", because its inputs have another size"),
    ],
    ids=["once each", "address", "unknown", "size"],
)
def test_a_cuda_graph_that_is_recorded_again_is_named(fitted, recordings, times, why):
    found = fitted("shapes", graphs=recordings).analysis().run.recompilations
    again = [one for one in found if one.kind == "recorded again"]
    assert sum(one.times for one in again) == times
    where = f"of_shapes (test_recompilations.py:{line_of('def of_shapes(x):')})"
    often = "once" if times == 1 else f"{times} times"
    for one in again:
        assert one.seconds > 0
        assert recompiled(one, timed=False) == f"{where}, whose CUDA graph was recorded again {often}{why}"


def test_the_table_and_the_record_say_it(fitted, tmp_path, capsys):
    fitted("values", record=True)
    assert "compile-bound: torch.compile takes" in " ".join(capsys.readouterr().out.split())
    [record] = tmp_path.rglob("rank0.jsonl")
    events = [line for line in record.read_text().splitlines() if '"recompilation"' in line]
    assert len(events) == 5
    assert "factor == 4" in events[-1]
    assert main(["show", str(record)]) == 0
    assert "compile     of_values (test_recompilations.py:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("times", "seconds", "worth"), [(1, 0.5, False), (2, 0.9, False), (3, 0.1, True), (1, 1.0, True)]
)
def test_what_is_compiled_again_often_or_for_a_hundredth_of_the_run_is_worth_a_line(fitted, times, seconds, worth):
    run = fitted("shapes").analysis().run
    one = replace(run.recompilations[0], times=times, seconds=seconds)
    run = replace(run, recompilations=(one,), ledger=replace(run.ledger, wall_s=100.0))
    assert list(recompiled_lines(run)) == ([recompiled(one)] if worth else [])


# -- PyTorch's private metrics -----------------------------------------------------------------------------------------


def compiled(reason="0/0: n == 1", name="f", **more):
    fields = {"co_name": name, "co_filename": "a.py", "co_firstlineno": 3, "recompile_reason": reason}
    return SimpleNamespace(**{**fields, "is_forward": True, "is_runtime": False, "duration_us": 2_000_000, **more})


def test_each_is_read_once_also_when_the_oldest_are_dropped():
    known = [compiled()]
    compilations = Compilations(lambda: tuple(known[-64:]))
    assert compilations.look(1) == [], "what was compiled before the fit"
    for number in range(100):
        known += [compiled(f"0/{number}: n == {number}"), compiled(None), compiled(is_forward=False)]
        [one] = compilations.look(number)
        assert one.reason == f"n == {number}"
    [whole] = compilations.recompilations
    assert (whole.times, whole.seconds, whole.last_step) == (100, 200.0, 99)


@pytest.mark.parametrize("metrics", [[SimpleNamespace()], [None], 3])
def test_metrics_of_another_form_are_left_alone(metrics):
    known = []
    compilations = Compilations(lambda: known or metrics)
    assert compilations.look(1) == []
    known.append(compiled())
    assert compilations.look(2) == []
    assert compilations.recompilations == ()

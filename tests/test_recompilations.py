"""What `torch.compile` compiles again in a fit: function, line and reason."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.callbacks.compilations import Compilations
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.compilations import recompiled
from lightning_forge_profiling.report.run_wording import recompiled_lines
from tests.models import Classifier, loader

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


class Compiles(Classifier):
    """Compiles one function for each length, one for each of six numbers, and one in two pieces."""

    def __init__(self, *planted):
        super().__init__()
        torch._dynamo.reset()
        self.planted = planted
        self.of_shapes, self.of_values = (
            torch.compile(one, backend="eager", dynamic=False) for one in (of_shapes, of_values)
        )
        self.broken = torch.compile(broken, backend="eager")

    def training_step(self, batch):
        if "shapes" in self.planted:
            self.of_shapes(torch.ones(3 + self.global_step % 4))
        if "values" in self.planted:
            self.of_values(torch.ones(4), self.global_step % 6)
        if "break" in self.planted:
            self.broken(torch.ones(4))
        return super().training_step(batch)


@pytest.fixture
def fitted(make_trainer):
    def fit(*planted, **options):
        ours = ThroughputCallback(2, **options)
        options = {"logger": False, "enable_checkpointing": False}
        make_trainer(ours, max_steps=STEPS, **options).fit(Compiles(*planted), loader(4 * STEPS))
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


def test_the_table_and_the_record_say_it(fitted, tmp_path, capsys):
    fitted("values", record=True)
    assert "compile-bound: torch.compile takes" in " ".join(capsys.readouterr().out.split())
    [record] = tmp_path.rglob("rank0.jsonl")
    events = [line for line in record.read_text().splitlines() if '"recompilation"' in line]
    assert len(events) == 5
    assert "factor == 4" in events[-1]
    assert main(["summary", str(record)]) == 0
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

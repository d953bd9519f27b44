"""What a notebook shows: a real kernel runs its cells."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import lightning_forge_profiling as forge
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.report.page import analysis_html, ledger_html
from lightning_forge_profiling.report.wording import evidence
from lightning_forge_profiling.schema import Analysis, Hint, RunLedger
from tests.outcomes import Tags
from tests.samples import sample_analysis

CHECKOUT = Path(__file__).parents[1]
CELLS = (
    f"""
import sys
sys.path.insert(0, {str(CHECKOUT)!r})
import lightning as L
from lightning_forge_profiling import ForgeProfilerCallback
from tests.models import Classifier, every_step, loader
throughput = every_step(warmup_steps=2)
trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[ForgeProfilerCallback(5, 7), throughput],
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Classifier(), loader(80))
""",
    "throughput.analysis()",
    "throughput.ledger()",
    f"from lightning_forge_profiling import analyze; analyze({str(CHECKOUT / 'tests/data/traces/cpu_mlp')!r})",
    "throughput",
    """
import torch
import lightning_forge_profiling as forge
model = torch.nn.Linear(4, 1)
with forge.profile(forge.ThroughputCallback(warmup_steps=2, record=False)) as profile:
    for batch in torch.randn(40, 8, 4):
        with forge.step(samples=len(batch)):
            model(batch).sum().backward()
""",
    "profile",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """For each cell the HTML of its outputs."""
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    NotebookClient(book, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    data = [[output["data"] for output in cell.outputs if "data" in output] for cell in book.cells]
    return [[shown["text/html"] for shown in of_cell if "<table" in shown.get("text/html", "")] for of_cell in data]


@pytest.mark.slow
def test_the_table_at_the_end_of_a_fit_is_one_output(outputs):
    [table] = outputs[0]
    assert len(re.findall(r"Where a step of \w+ goes: ", table)) == 1


@pytest.mark.slow
def test_a_callback_is_the_table_of_its_fit_and_a_plain_loop_is_shown_like_a_fit(outputs):
    assert outputs[4] == outputs[0]
    [table] = outputs[5]
    assert "Where a step goes: " in table
    assert outputs[6] == [table]


def test_before_a_fit_a_callback_is_shown_as_any_object():
    for shown in (ThroughputCallback(), ForgeProfilerCallback(), forge.profile()):
        assert re.fullmatch(r"<lightning_forge_profiling\.[\w.]+ object at 0x\w+>", repr(shown))
        assert shown._repr_html_() is None


@pytest.mark.slow
def test_a_cell_that_ends_with_an_analysis_shows_verdict_findings_and_times(outputs):
    [page] = outputs[1]
    assert re.search(r"<p><b>.+</b></p>", page)
    assert "attention" in Tags(page).text, "the user's own region"
    [of_trace] = outputs[3]
    assert "step ms" in of_trace


@pytest.mark.slow
def test_a_cell_that_ends_with_a_ledger_shows_its_parts(outputs):
    [page] = outputs[2]
    assert "steps" in Tags(page).text
    assert "the run" in Tags(page).text


def test_a_page_has_each_finding_with_its_evidence():
    analysis = sample_analysis()
    text = Tags(analysis_html(analysis)).text
    for found in analysis.findings:
        assert f", {found.share_pct:.1f} % of the step: {found.title}." in text
        assert found.remedy in text
        assert all(f"{name}: {value}" in text for name, value, _ in evidence(found))


def test_names_of_others_add_no_markup():
    names = "<script>alert(1)</script>\x1b[2J"
    analysis = Analysis(
        source=names, verdict="x", verdict_text=names, findings=(), hints=(Hint(code="x", rank=0, text=names),)
    )
    ledger = RunLedger(wall_s=2.0, parts={f"callback/{names}": 1.5}, unexplained_s=0.5, counts={})
    for page in (analysis_html(analysis), ledger_html(ledger)):
        assert "script" not in Tags(page).tags
        assert "alert(1)" in Tags(page).text
        assert "\x1b" not in page

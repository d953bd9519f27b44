"""The documents keep their promises: their Python compiles, their links and targets exist, their examples run."""

import doctest
import importlib
import inspect
import json
import re
import runpy
import textwrap
import tomllib
from pathlib import Path

import pytest

import lightning_forge_profiling
from lightning_forge_profiling import bench, compat, errors, gpu, profiler, report, result_types
from lightning_forge_profiling.diagnosis.calls import SLOW_CALL
from lightning_forge_profiling.diagnosis.findings import RULES
from lightning_forge_profiling.diagnosis.growth import GROWTH
from lightning_forge_profiling.diagnosis.ledger_rules import LEDGER_RULES
from lightning_forge_profiling.diagnosis.machine_rules import MEMORY, UNRELIABLE
from lightning_forge_profiling.names import FINDING_PAGES, docs_url

CHECKOUT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(CHECKOUT.glob("*.md")), *sorted((CHECKOUT / "docs").rglob("*.md"))]
PACKAGE = Path(lightning_forge_profiling.__file__).parent
PUBLIC_MODULES = (lightning_forge_profiling, bench, compat, errors, gpu, profiler, report, result_types)

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n`]*\n(?P<code>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)
INLINE_CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"""\]\(<?([^)\s>]+)|(?:href|src)=["']([^"']+)""")
TARGET = re.compile(r"\bmake ([a-z][\w-]*)")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))


@each_document
def test_its_python_compiles(document):
    text = document.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["language"] in {"python", "py"}:
            line = text.count("\n", 0, block.start("code"))
            # The empty lines make a SyntaxError name the line of the document.
            compile("\n" * line + textwrap.dedent(block["code"]), str(document), "exec")


@each_document
def test_its_links_lead_somewhere(document):
    prose = INLINE_CODE.sub("", BLOCK.sub("", document.read_text(encoding="utf-8")))
    links = [first or second for first, second in LINK.findall(prose)]
    relative = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in relative if not (document.parent / link).exists()] == []


@each_document
def test_its_make_targets_exist(document):
    text = document.read_text(encoding="utf-8")
    # Only in code, where "make" is the program; a block inside the inline pattern's reach is taken out first.
    code = [block["code"] for block in BLOCK.finditer(text)] + INLINE_CODE.findall(BLOCK.sub("", text))
    named = {target for piece in code for target in TARGET.findall(piece)}
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


def test_pre_commit_runs_the_tools_that_make_runs():
    hooks = (CHECKOUT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pinned = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8")
    [ruff] = re.findall(r"/ruff-pre-commit\n *rev: v([\d.]+)", hooks)
    assert f"\nruff=={ruff}\n" in pinned
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    [types] = re.findall(r"^ *entry: \.venv/bin/python (.*)$", hooks, re.MULTILINE)
    assert f"\t$(RUN) {types}\n" in makefile


def test_the_workflows_test_every_python_that_is_claimed():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = (CHECKOUT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert re.search(r"python: (\[.*\])", workflow)[1] == json.dumps(claimed)


def test_the_citation_names_this_version():
    citation = (CHECKOUT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lightning_forge_profiling.__version__}\n" in citation


def test_links_to_the_docs_lead_to_the_site_that_is_built():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    site = project["urls"]["Documentation"]
    assert f"\nsite_url: {site}\n" in (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    assert docs_url("gc-bound") == f"{site}findings/outside-the-step/"
    assert docs_url("made-up") == docs_url("../x") == ""


def test_what_is_quoted_of_the_package_is_what_it_prints():
    quotes = runpy.run_path(str(CHECKOUT / "docs" / "quotes.py"))
    outdated = [page.name for page, text in quotes["renewed"]().items() if page.read_text(encoding="utf-8") != text]
    assert outdated == [], "python docs/quotes.py renews them; read what they then say"


def test_the_diagrams_are_what_their_script_draws():
    drawn = runpy.run_path(str(CHECKOUT / "docs" / "make_diagrams.py"))["drawn"]()
    outdated = [image.name for image, svg in drawn.items() if image.read_text(encoding="utf-8") != svg]
    assert outdated == [], "python docs/make_diagrams.py draws them"


def test_every_finding_has_its_page_with_an_example():
    codes = {*(rule.code for rule in RULES), "straggler", MEMORY, SLOW_CALL, GROWTH, *UNRELIABLE}
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (CHECKOUT / "docs" / "findings").glob("*.md")}
    outside = pages.pop("outside-the-step")
    assert [code for code, _ in LEDGER_RULES.values() if f"| `{code}` |" not in outside] == []
    page_of = {code: FINDING_PAGES[code] for code in codes}
    assert pages.keys() == {*page_of.values()}
    outside_codes = {code for code, _ in LEDGER_RULES.values()}
    assert page_of | dict.fromkeys(outside_codes, "outside-the-step") == FINDING_PAGES
    assert [code for code, page in page_of.items() if f"\n{code}: " not in pages[page]] == []
    index = (CHECKOUT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert [code for code, page in page_of.items() if f"| [`{code}`](findings/{page}.md) |" not in index] == []
    rows = [f"| [`{code}`](findings/outside-the-step.md) |" for code, _ in LEDGER_RULES.values()]
    assert [row for row in rows if row not in index] == []


def test_the_api_page_has_every_public_name():
    page = (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8")
    public = {name: f"{module.__name__}.{name}" for module in reversed(PUBLIC_MODULES) for name in module.__all__}
    assert sorted(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)) == sorted(public.values())


def test_every_type_that_a_public_function_returns_is_public():
    public = {name: getattr(module, name) for module in PUBLIC_MODULES for name in module.__all__}
    annotations = {name: str(f.__annotations__["return"]) for name, f in public.items() if inspect.isfunction(f)}
    returned = {
        (f, kind) for f, text in annotations.items() for kind in re.findall(rf"{PACKAGE.name}[\w.]*\.(\w+)", text)
    }
    assert ("analyze", "AnalysisResult") in returned
    assert ("write_reports", "ReportPaths") in returned
    assert {(function, kind) for function, kind in returned if kind not in public} == set()


def test_the_documents_import_public_names_only():
    package = PACKAGE.name
    homes = {*(module.__name__ for module in PUBLIC_MODULES), f"{package}.crossover"}
    modules = {
        (document.name, module)
        for document in DOCUMENTS
        for block in BLOCK.finditer(document.read_text(encoding="utf-8"))
        for module in re.findall(rf"^ *(?:from|import) ({package}[\w.]*)", block["code"], re.MULTILINE)
    }
    assert {(name, module) for name, module in modules if module not in homes} == set()


@pytest.mark.slow
def test_the_examples_in_docstrings_run():
    attempted = 0
    failing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__main__.py":  # importing it would run it
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        attempted += result.attempted
        if result.failed:
            failing.append(name)
    assert failing == []
    assert attempted > 0

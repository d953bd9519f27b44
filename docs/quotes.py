"""What the documents quote of the package's own output: made anew here, and compared by tests/test_documents.py.

    python docs/quotes.py        # writes it into the documents

In docs/findings/CODE.md the block after `<!-- quote CASE -->` is the finding CODE of the trace tests/data/traces/CASE.
What is between `<!-- quote fields -->` and `<!-- end of quote -->` in docs/summary-json.md is made from the schema.
"""
# ruff: noqa: INP001  (a script, in no package)

import json
import re
import textwrap
from functools import cache, partial
from pathlib import Path

from lightning_forge_profiling.cli.show import schema_json
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import Analysis

DOCS = Path(__file__).resolve().parent
TRACES = DOCS.parent / "tests" / "data" / "traces"

FINDING = re.compile(r"(?<=<!-- quote )(\w+)( -->\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
MADE = re.compile(r"(<!-- quote fields -->\n).*(?=<!-- end of quote -->)", re.DOTALL)


@cache
def analysis(case: str) -> Analysis:
    """What the package finds in a case."""
    return analyze(TRACES / case).analysis


def finding(code: str, quoted: re.Match[str]) -> str:
    """A finding as `summary.json` has it, as text."""
    case = quoted[1]
    [found] = [found for found in analysis(case).findings if found.code == code]
    where = "" if found.rank is None else f" on rank {found.rank}"
    width = max(map(len, found.evidence))
    lines = [
        f"summary.json of tests/data/traces/{case}",
        "",
        f"{code}: {found.share_pct:.1f} % of the step{where}",
        *textwrap.wrap(found.title, 76),
        "",
        *(
            f"{name:<{width}}  {value:,.3f}" if isinstance(value, float) else f"{name:<{width}}  {value}"
            for name, value in found.evidence.items()
        ),
        *(["", found.saves.text] if found.saves else []),
    ]
    return f"{case}{quoted[2]}" + "\n".join(lines) + "\n"


def fields() -> str:
    """Tables of all fields, one for each kind of object."""
    lines = []
    for name, definition in json.loads(schema_json())["$defs"].items():
        lines += [
            f"### {name}",
            "",
            _cell(definition["description"]),
            "",
            "| Field | Type | What it is |",
            "|---|---|---|",
        ]
        lines += [
            f"| `{field}` | {_type(described)} | {_cell(described.get('description', ''))} |"
            for field, described in definition["properties"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("None", "null").replace("|", "\\|")


def _type(described: dict) -> str:
    if "$ref" in described:
        name = described["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in described:
        return " or ".join(map(_type, described["anyOf"]))
    if "enum" in described:
        return " or ".join(f"`{json.dumps(value)}`" for value in described["enum"])
    if described.get("type") == "array":
        return f"array of {_type(described['items'])}"
    if described.get("type") == "object":
        return f"object of {_type(described['additionalProperties'])}"
    return str(described.get("type", "any"))


def renewed() -> dict[Path, str]:
    """Each document that quotes, as it should be."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted((DOCS / "findings").glob("*.md"))}
    texts = {page: FINDING.sub(partial(finding, page.stem), text) for page, text in pages.items()}
    page = DOCS / "summary-json.md"
    texts[page] = MADE.sub(lambda quoted: quoted[1] + fields(), page.read_text(encoding="utf-8"))
    return texts


if __name__ == "__main__":
    for document, text in renewed().items():
        document.write_text(text, encoding="utf-8")

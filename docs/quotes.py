"""What the documents quote of the package's own output: made anew here, and compared by tests/test_documents.py.

    python docs/quotes.py        # writes it into the documents

In docs/findings/CODE.md the block after `<!-- quote CASE -->` is the finding CODE of the trace tests/data/traces/CASE.
In docs/commands.md the block after `<!-- quote COMMAND -->` is what `forge-profiling COMMAND --help` prints.
"""
# ruff: noqa: INP001  (a script, in no package)

import io
import os
import re
import textwrap
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from unittest import mock

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import Analysis

DOCS = Path(__file__).resolve().parent
TRACES = DOCS.parent / "tests" / "data" / "traces"

QUOTE = re.compile(r"(?<=<!-- quote )([\w-]+)( -->\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


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


def help_of(quoted: re.Match[str]) -> str:
    """The help of a command, as on a terminal of 80 columns."""
    with mock.patch.dict(os.environ, COLUMNS="80"), redirect_stdout(io.StringIO()) as printed:
        main([quoted[1], "--help"])
    return f"{quoted[1]}{quoted[2]}{printed.getvalue()}"


def renewed() -> dict[Path, str]:
    """Each document that quotes, as it should be."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted((DOCS / "findings").glob("*.md"))}
    commands = DOCS / "commands.md"
    return {page: QUOTE.sub(partial(finding, page.stem), text) for page, text in pages.items()} | {
        commands: QUOTE.sub(help_of, commands.read_text(encoding="utf-8"))
    }


if __name__ == "__main__":
    for document, text in renewed().items():
        document.write_text(text, encoding="utf-8")

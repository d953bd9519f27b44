"""Run the demo and draw the table it really prints: docs/images/run-table.svg.

    python docs/make_images.py

The numbers are those of this machine and this run. Options are handed on to examples/train_gpt.py.
"""
# ruff: noqa: INP001  (a script, in no package)

import contextlib
import io
import re
import runpy
import sys
import tempfile
from pathlib import Path
from unittest import mock

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from lightning_forge_profiling.callbacks import recording
from lightning_forge_profiling.report.run_table import RunReport, print_run

CHECKOUT = Path(__file__).resolve().parents[1]
IMAGE = CHECKOUT / "docs" / "images" / "run-table.svg"
COLUMNS = 100
# without rich's request for a web font: any monospaced one will do
SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def terminal() -> Console:
    """A console that keeps what is printed to it."""
    return Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")


def main() -> None:
    """Train, and draw what is printed at the end."""
    shown = terminal()

    def draw(report: RunReport) -> None:
        printed = terminal()
        print_run(report, printed)
        for line in Text.from_ansi(printed.export_text(styles=True)).split("\n"):
            line.rstrip()
            # a line longer than the terminal goes on in the next, as in any terminal
            for piece in line.divide(range(COLUMNS, len(line), COLUMNS)):
                shown.print(piece, no_wrap=True, highlight=False)

    demo = CHECKOUT / "examples" / "train_gpt.py"
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.object(recording, "print_run", draw),
        mock.patch.object(sys, "argv", [str(demo), *sys.argv[1:]]),
    ):
        runpy.run_path(str(demo), run_name="__main__")
    IMAGE.parent.mkdir(exist_ok=True)
    shown.save_svg(str(IMAGE), title="make demo", theme=DIMMED_MONOKAI, code_format=SVG, unique_id="run-table")


if __name__ == "__main__":
    main()

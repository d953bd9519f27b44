"""Make the images of the documents from what the package really prints and writes: docs/images.

    python docs/make_images.py            the end table, the console report, parts of report.html
    python docs/make_images.py demo       only of the demo's first run, its end and `watch`: numbers are of this machine
    python docs/make_images.py reports    only the reports, of traces in tests/data; needs Chromium

`docs/make_diagrams.py` draws the diagrams.
"""
# ruff: noqa: INP001  (a script, in no package)

import contextlib
import io
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from lightning_forge_profiling.record.reader import RunRecord, read_run, records_at
from lightning_forge_profiling.report.live_view import print_frame
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.schema import End

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

CHECKOUT = Path(__file__).resolve().parents[1]
IMAGES = CHECKOUT / "docs" / "images"
TRACES = CHECKOUT / "tests" / "data" / "traces"
H200_RUN = CHECKOUT / "tests" / "data" / "telemetry" / "h200.json"
COLUMNS = 80
_FRAMES, _FRAME_LINES = 8, 26  # of the moving picture of `watch`
# without rich's request for a web font: any monospaced one will do
SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def save(print_on: Callable[[Screen], None], name: str, title: str, *, folder: str = "") -> None:
    """Draw a terminal on which something is printed."""
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{name}.svg").write_text(drawn(print_on, name, title, folder=folder), encoding="utf-8")


def drawn(print_on: Callable[[Screen], None], name: str, title: str, *, folder: str = "", lines: int = 0) -> str:
    """The drawing of a terminal. Lines that are too long, as of paths, end in an ellipsis.

    A temporary folder is shown as a user's own; `lines` is the height, 0 for that of the text.
    """
    printed = io.StringIO()
    print_on(Screen(printed, width=COLUMNS, wrap=True, colours=True))
    shown = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    text = printed.getvalue().replace(folder, "/home/me/project") if folder else printed.getvalue()
    shown_lines = list(Text.from_ansi(text).split("\n"))
    for line in [*shown_lines, *[Text()] * (lines - len(shown_lines))]:
        line.truncate(COLUMNS, overflow="ellipsis")
        shown.print(line, no_wrap=True, highlight=False)
    svg = shown.export_svg(title=title, theme=DIMMED_MONOKAI, code_format=SVG, unique_id=name)
    return re.sub(r' clip-path="[^"]*"', "", svg)  # they cut off what reaches below the last line, as underscores do


def watched(record: RunRecord, folder: str) -> None:
    """Draw the frames of `watch` during a run, one after the other."""
    [rank] = record.ranks
    times = [line.at for line in rank.intervals][2:]
    chosen = times[:: max(len(times) // _FRAMES, 1)]
    frames = []
    for number, at in enumerate(chosen):
        until = replace(rank, lines=tuple(line for line in rank.lines if line.at <= at and not isinstance(line, End)))
        then = replace(record, ranks=(until,))
        frames.append(
            drawn(
                partial(print_frame, then, str(record.folder), at + 1),
                f"watch{number}",
                "forge-profiling watch lightning_logs/",
                folder=folder,
                lines=_FRAME_LINES,
            )
        )
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', frames[0])
    assert size is not None  # noqa: S101
    seconds, share = 1.5 * len(frames), 100 / len(frames)
    style = f".frame {{ opacity: 0; animation: shown {seconds}s step-end infinite; }}"
    shown = f"@keyframes shown {{ 0% {{ opacity: 1; }} {share:.3f}% {{ opacity: 0; }} }}"
    delayed = (
        f'<g class="frame" style="animation-delay: {1.5 * number}s">{frame}</g>' for number, frame in enumerate(frames)
    )
    (IMAGES / "watch.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[1]} {size[2]}"><style>{style}{shown}</style>'
        f"{frames[-1]}{''.join(delayed)}</svg>\n",  # the last one lies below, for what plays no animation
        encoding="utf-8",
    )


def demo() -> None:
    """Run the demo, and draw the table of its first training."""
    from lightning_forge_profiling.report.terminal import print_end  # noqa: PLC0415
    from lightning_forge_profiling.run import fit_results  # noqa: PLC0415  (torch, which reports need not)
    from lightning_forge_profiling.schema import RunReport  # noqa: PLC0415

    printed: list[tuple[RunReport, Path | None]] = []

    def keep(report: RunReport, files: Path | None, _: Screen | None) -> None:
        printed.append((report, files))

    script = CHECKOUT / "examples" / "demo.py"
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.object(fit_results, "print_end", keep),
        mock.patch.object(sys, "argv", [str(script)]),
    ):
        runpy.run_path(str(script), run_name="__main__")
        save(lambda screen: print_end(*printed[0], screen), "run-table", "make demo", folder=folder)
        watched(read_run(records_at(Path("demo_runs/before"))[0]), folder)


def console_report(case: str) -> None:
    """Draw what `show` prints of a trace."""
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415
    from lightning_forge_profiling.report.terminal import print_analysis  # noqa: PLC0415

    analysis = analyze(TRACES / case).analysis
    save(lambda screen: print_analysis(analysis, screen, kernels=5), "show", f"forge-profiling show {case}/")


def photograph(browser: "WebDriver", id: str, name: str) -> None:  # noqa: A002  (HTML's name for it)
    """Photograph an element of the page, of which the browser would cut off what is outside of the window."""
    element = browser.find_element("id", id)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.screenshot(str(IMAGES / name))


def browser_reports() -> None:
    """Photograph report.html: the top of one, and the timeline of another at one of its steps."""
    from lightning_forge_profiling.cli.main import main as forge_profiling  # noqa: PLC0415

    sys.path.insert(0, str(CHECKOUT))
    from tests.browser import chromium  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(TRACES), chromium() as browser:
        for case in ("ddp_big_grads", "slow_optimizer"):
            with contextlib.redirect_stdout(io.StringIO()):
                forge_profiling(["view", case, "--save", f"{folder}/{case}.html"])
        browser.set_window_size(1180, 1150)
        browser.get(Path(folder, "ddp_big_grads.html").as_uri())
        browser.execute_script("document.documentElement.style.overflow = 'hidden'")  # no scroll bar
        browser.save_screenshot(str(IMAGES / "report.png"))
        browser.get(Path(folder, "slow_optimizer.html").as_uri())
        browser.execute_script("for (const each of document.querySelectorAll('details.fold')) each.open = true")
        buttons = browser.find_elements("css selector", "#timeline-view .tools button")
        next(button for button in buttons if button.text == "Step 14").click()
        photograph(browser, "timeline-view", "timeline.png")


def telemetry_report() -> None:
    """Photograph the GPU over a run, with the cursor in the part that waits for the data loader."""
    import msgspec  # noqa: PLC0415  (as above)
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415  (for the browser alone)

    from lightning_forge_profiling.diagnosis.combine import combine  # noqa: PLC0415
    from lightning_forge_profiling.report.page import report_page  # noqa: PLC0415
    from lightning_forge_profiling.schema import RunEvidence  # noqa: PLC0415

    sys.path.insert(0, str(CHECKOUT))
    from tests.browser import chromium  # noqa: PLC0415

    run = msgspec.json.decode(H200_RUN.read_bytes(), type=RunEvidence)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        page = Path(folder, "run.html")
        page.write_text(report_page(combine(None, run), []), encoding="utf-8")
        metrics = {"width": 1180, "height": 1600, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(page.as_uri())
        browser.execute_script("for (const each of document.querySelectorAll('details.fold')) each.open = true")
        cursor = browser.find_element("css selector", "#telemetry .scrubber")
        cursor.send_keys(Keys.HOME + 14 * Keys.PAGE_UP + 4 * Keys.ARROW_RIGHT)
        browser.execute_script("arguments[0].style.outline = 'none'", cursor)
        photograph(browser, "telemetry", "telemetry.png")


def main() -> None:
    """Make what is asked for."""
    wanted = sys.argv[1:] or ["demo", "reports"]
    if "demo" in wanted:
        demo()
    if "reports" in wanted:
        console_report("slow_optimizer")
        browser_reports()
        telemetry_report()


if __name__ == "__main__":
    main()

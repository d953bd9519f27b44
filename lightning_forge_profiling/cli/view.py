"""`forge-profiling view`: the HTML report, or a trace in Perfetto, in the browser."""

import argparse
import shutil
import sys
import tempfile
import webbrowser
from contextlib import ExitStack
from html import escape
from pathlib import Path

from lightning_forge_profiling.cli.arguments import port
from lightning_forge_profiling.cli.output import Progress, say, warn
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import REPORT_HTML
from lightning_forge_profiling.safe_files import write_whole

_EXAMPLES = """\
examples:
  forge-profiling view lightning_logs/                   the HTML report in the browser
  forge-profiling view --perfetto rank0.trace.json.gz    the trace at ui.perfetto.dev, which runs in the browser alone

For a trace on a remote machine, forward the port (ssh -L 9001:127.0.0.1:9001 HOST), run there with --no-browser, and
open the printed address here.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "view",
        help="open the HTML report, or the trace in Perfetto",
        description="Open the HTML report in the browser, created now if there is none;\n"
        "or serve a trace once, from this machine only, to ui.perfetto.dev.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="report.html, a trace, or a folder with either")
    parser.add_argument("--perfetto", action="store_true", help="show the trace itself, at https://ui.perfetto.dev")
    parser.add_argument(
        "--port",
        type=port,
        metavar="N",
        default=9001,
        help="port to serve on (default: 9001; the page connects to 9001 only, so another must be forwarded to it)",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address instead of opening it")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.perfetto:
        return _perfetto(_one_trace(args.path), args.port, browser=not args.no_browser)
    with ExitStack() as undo:
        report = _report(args.path, undo).resolve()
        say(f"{report}")
        sys.stdout.flush()
        undo.pop_all()  # the user now knows where it is
    if not args.no_browser and not webbrowser.open(report.as_uri()):
        warn("no browser found; open the file above in one")
    return 0


def _report(path: Path, undo: ExitStack) -> Path:
    """The HTML report at a path; for a trace without one, a new one in a temporary folder, which `undo` removes."""
    if path.suffix == ".html":
        path.stat()
        return path
    # a report written by a run covers the whole run too
    if path.is_dir() and (written := _newest_window(path) / REPORT_HTML).is_file():
        return written
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.report.html import html_report  # noqa: PLC0415

    with Progress() as progress:
        result = analyze(path, progress=progress)
        made = Path(tempfile.mkdtemp(prefix="forge-profiling-")) / REPORT_HTML
        undo.callback(shutil.rmtree, made.parent, ignore_errors=True)
        write_whole(made, html_report(result.analysis, result.timelines).encode(errors="replace"))
    return made


def _newest_window(path: Path) -> Path:
    """The folder itself if it has a report, else the folder of the newest traces below."""
    return path if (path / REPORT_HTML).is_file() else find_traces(path)[0][0].parent


def _one_trace(path: Path) -> Path:
    traces, _ = find_traces(path)
    if len(traces) > 1:
        names = ", ".join(trace.name for trace in traces)
        raise ConfigurationError(f"{path}: {len(traces)} traces, but Perfetto shows one; name one of {names}")
    return traces[0]


def _perfetto(trace: Path, port: int, *, browser: bool) -> int:
    from lightning_forge_profiling.cli.perfetto import TraceServer  # noqa: PLC0415  (start fast)

    with TraceServer(trace, port) as server, tempfile.TemporaryDirectory(prefix="forge-profiling-") as folder:
        say(f"serving {trace} on 127.0.0.1:{server.port} until it has been fetched; Ctrl-C stops")
        say(server.link)
        sys.stdout.flush()
        if browser and not webbrowser.open(_redirect(server.link, Path(folder))):
            warn("no browser found; open the address above in one")
        server.serve_once()
    return 0


def _redirect(link: str, folder: Path) -> str:
    """The address of a page that only this user can read, and that redirects to a link.

    The link contains a secret, and every user of the machine can read a browser's arguments.
    """
    page = folder / "perfetto.html"
    address = escape(link)
    page.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><title>Perfetto</title>'
        f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">{address}</a>\n',
        encoding="utf-8",
    )
    return page.as_uri()

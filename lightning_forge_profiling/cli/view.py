"""`forge-profiling view`: a run or a trace as one web page, in a file or the browser; or a trace in Perfetto."""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, cast

from lightning_forge_profiling.cli.shared import CUT_OFF, say, warn
from lightning_forge_profiling.cli.sources import (
    analyze_place,
    any_at,
    record_or_traces,
    refuse_bad_output,
    warn_of_problems,
)
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import REPORT_HTML
from lightning_forge_profiling.record.reader import read_run, records_at
from lightning_forge_profiling.report.page import record_of, report_page
from lightning_forge_profiling.report.run_page import recorded_window, run_page
from lightning_forge_profiling.safe_files import open_regular, read_regular, write_whole


def view(args: argparse.Namespace) -> int:
    """Open a page, or a trace in Perfetto; or write the page."""
    if args.perfetto:
        return _perfetto(_one_trace(Path(args.path)), browser=not args.no_browser)
    report = None if args.save else _page_that_is_there(Path(args.path))
    if report is not None:
        _point_to(report, browser=not args.no_browser)
        return 0
    name, page, cut_off = _page(args.path, args.save)
    for where in cut_off:
        warn(where)
    if args.save:
        if args.save.exists() and not args.save.is_file():  # a pipe or a device
            args.save.write_bytes(page)
        else:
            write_whole(Path(os.path.realpath(args.save)), page)  # through a link
        say(f"{args.save}: {name}")
    else:
        report = Path(tempfile.mkdtemp(prefix="forge-profiling-")) / REPORT_HTML
        try:
            write_whole(report, page)
            _point_to(report, f"the page is of {name}", browser=not args.no_browser)
        except BaseException:  # the user does not know where it is
            shutil.rmtree(report.parent, ignore_errors=True)
            raise
    return CUT_OFF if cut_off else 0


def _point_to(report: Path, remark: str = "", *, browser: bool) -> None:
    report = report.resolve()
    say(f"{report}")
    sys.stdout.flush()
    if remark:
        warn(remark)
    if browser and not webbrowser.open(report.as_uri()):
        warn("no browser found; open the file above in one")


def _page(place: str, file: Path | None) -> tuple[str, bytes, tuple[str, ...]]:
    """What a page is of, the page, and where the traces end too early; refuses a file that it is made of."""
    found = record_or_traces(place)
    if found is None:
        result, window = analyze_place(place, file)
        name, cut_off = str(window if Path(place).is_dir() else place), result.analysis.cut_off
        page = report_page(result.analysis, result.timelines)
    else:
        (folder, name), cut_off = found, ()
        record = read_run(folder)
        refuse_bad_output(file, (rank.path for rank in record.ranks))
        warn_of_problems(record)
        recorded = recorded_window(record)
        name += f", with {recorded.name}" if recorded else ""
        page = run_page(record, time.time())
    return name, page.encode(errors="replace"), cut_off


def _page_that_is_there(path: Path) -> Path | None:
    """A page that is named; or the newest one below a folder, if it has the newest run."""
    if path.suffix == ".html":
        path.stat()
        return path
    page, records = _newest_page(path), any_at(records_at, path)
    return page if page is not None and (not records or _covers(page, records[0])) else None


def _newest_page(path: Path) -> Path | None:
    """The report in the folder itself, else the one beside the newest traces below it."""
    traces = any_at(lambda folder: find_traces(folder)[0], path) if path.is_dir() else ()
    pages = (path / REPORT_HTML, *(trace.parent / REPORT_HTML for trace in traces[:1]))
    return next((page for page in pages if page.is_file()), None)


def _covers(page: Path, record: Path) -> bool:
    """Whether a page has the run of a record, or a later one."""
    if record in page.parents:
        return False  # `--save` wrote it, perhaps during the run
    return _has_run(page) if record.parent in page.parents else page.stat().st_mtime >= record.stat().st_mtime


def _has_run(page: Path) -> bool:
    """Whether a page shows a run, or is one that another program wrote."""
    try:
        return record_of(read_regular(page).decode()) is not None
    except ValueError:
        return True


def _one_trace(path: Path) -> Path:
    traces, _ = find_traces(path)
    if len(traces) > 1:
        names = ", ".join(trace.name for trace in traces)
        raise ConfigurationError(f"{path}: {len(traces)} traces, but Perfetto shows one; name one of {names}")
    return traces[0]


def _perfetto(trace: Path, *, browser: bool) -> int:
    with TraceServer(trace) as server, tempfile.TemporaryDirectory(prefix="forge-profiling-") as folder:
        say(f"serving {trace} on 127.0.0.1:{server.server_port} until it has been fetched; Ctrl-C stops")
        say(server.link)
        sys.stdout.flush()
        redirect = Path(folder) / "perfetto.html"  # private: every user of the machine can read a browser's arguments
        redirect.write_text(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={server.link}">\n')
        if browser and not webbrowser.open(redirect.as_uri()):
            warn("no browser found; open the address above in one")
        while not server.fetched:
            server.handle_request()
    return 0


_ORIGIN = "https://ui.perfetto.dev"
PORT = 9001  # the only one on 127.0.0.1 that the page's content security policy allows


class TraceServer(ThreadingHTTPServer):  # threads, because browsers open connections that they may never use
    """Serves one file on the loopback interface, only to Perfetto's page, until it has been fetched.

    Perfetto's page loads a trace from the address in its URL, as described at
    https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui. Every user of this machine can connect to the
    port and every web page can send requests to it, so the path contains a secret and the request's origin must be
    Perfetto's.
    """

    timeout = 0.2  # seconds until `handle_request` returns, so that `fetched` is looked at

    def __init__(self, trace: Path) -> None:
        open_regular(trace).close()
        try:
            super().__init__(("127.0.0.1", PORT), _Handler)
        except OSError as exc:
            raise OSError(exc.errno, f"{exc.strerror} (is another trace being served?)", f"port {PORT}") from exc
        self.trace = trace
        self.fetched = False
        # The page shows the name. Browsers and Python encode different characters, so others are replaced.
        self.path = f"/{token_urlsafe(32)}/{re.sub(r'[^A-Za-z0-9.-]+', '_', trace.name)}"
        # to open in a browser; anyone who has it can fetch the trace
        self.link = f"{_ORIGIN}/#!/?url=http://127.0.0.1:9001{self.path}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects; it may retry."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Send the trace."""
        server = cast("TraceServer", self.server)
        if self.path != server.path or self.headers.get_all("Origin") != [_ORIGIN]:
            self.send_error(404)
            return
        with open_regular(server.trace) as file:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", _ORIGIN)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)
        server.fetched = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name for it)
        """Log nothing."""

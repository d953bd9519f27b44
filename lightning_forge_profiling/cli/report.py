"""`forge-profiling report` and `view`: a run or a trace as one web page; the page, or Perfetto, in the browser."""

import argparse
import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from hmac import compare_digest
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, cast

from lightning_forge_profiling.cli.shared import (
    Progress,
    any_at,
    find_record,
    refuse_bad_outputs,
    say,
    warn,
    warn_of_problems,
    write_output,
)
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import REPORT_HTML
from lightning_forge_profiling.record.reader import RecordError, read_run, records_at
from lightning_forge_profiling.report.page import record_of, report_page
from lightning_forge_profiling.report.run_page import run_page
from lightning_forge_profiling.safe_files import open_regular, read_regular, write_whole


def report(args: argparse.Namespace) -> int:
    """Write a page."""
    source = _source_at(args.path)
    file = args.html or source.folder / REPORT_HTML
    refuse_bad_outputs({"--html": file}, [(str(args.path), each) for each in source.files])
    if args.html is None and not source.is_run and file.is_file() and _has_run(file):
        raise ConfigurationError(
            f"{file} shows more than this trace and is not replaced; name another file with --html"
        )
    write_output(file, source.page().encode(errors="replace"))
    say(f"{file}: {source.name}")
    return 0


@dataclass(frozen=True, slots=True)
class _PageSource:
    """What a page is made of: the record of a run, or traces."""

    folder: Path
    name: str  # for messages
    files: tuple[Path, ...]
    page: Callable[[], str]  # makes it
    is_run: bool


def _source_at(path: Path) -> _PageSource:
    """The newest record at a path, or the newest traces if it has no record."""
    try:
        folder, name = find_record(path)
    except RecordError as no_record:
        if path.suffix == ".jsonl":
            raise
        try:
            traces = find_traces(path)[0]
        except TraceError as no_trace:
            raise (TraceError(f"{no_record}; {no_trace}") if path.is_dir() else no_trace) from None
        window = traces[0].parent
        return _PageSource(
            window, str(path if path.is_file() else window), traces, lambda: _page_of_traces(path), is_run=False
        )
    record = read_run(folder)

    def page() -> str:
        warn_of_problems(record)
        return run_page(record, time.time())

    return _PageSource(folder, name, tuple(rank.path for rank in record.ranks), page, is_run=True)


def _page_of_traces(path: Path) -> str:
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415  (loads NumPy)

    with Progress() as progress:
        result = analyze(path, progress=progress)
        return report_page(result.analysis, result.timelines)


def _has_run(page: Path) -> bool:
    """Whether a page shows a run, or is one that another program wrote."""
    try:
        return record_of(read_regular(page).decode()) is not None
    except ValueError:
        return True


def view(args: argparse.Namespace) -> int:
    """Open a page, or a trace in Perfetto."""
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
    """The page at a path, or a new one in a temporary folder, which `undo` removes, if none there has the run."""
    if path.suffix == ".html":
        path.stat()
        return path
    page, records = _newest_page(path), any_at(records_at, path)
    if page is not None and not (records and not _covers(page, records[0])):
        return page
    content = _source_at(path).page()
    made = Path(tempfile.mkdtemp(prefix="forge-profiling-")) / REPORT_HTML
    undo.callback(shutil.rmtree, made.parent, ignore_errors=True)
    write_whole(made, content.encode(errors="replace"))
    return made


def _newest_page(path: Path) -> Path | None:
    """The report in the folder itself, else the one beside the newest traces below it."""
    traces = any_at(lambda folder: find_traces(folder)[0], path) if path.is_dir() else ()
    pages = (path / REPORT_HTML, *(trace.parent / REPORT_HTML for trace in traces[:1]))
    return next((page for page in pages if page.is_file()), None)


def _covers(page: Path, record: Path) -> bool:
    """Whether a page has the run of a record, or a later one."""
    if record in page.parents:
        return False  # `report` wrote it, perhaps during the run
    return _has_run(page) if record.parent in page.parents else page.stat().st_mtime >= record.stat().st_mtime


def _one_trace(path: Path) -> Path:
    traces, _ = find_traces(path)
    if len(traces) > 1:
        names = ", ".join(trace.name for trace in traces)
        raise ConfigurationError(f"{path}: {len(traces)} traces, but Perfetto shows one; name one of {names}")
    return traces[0]


def _perfetto(trace: Path, port: int, *, browser: bool) -> int:
    with TraceServer(trace, port) as server, tempfile.TemporaryDirectory(prefix="forge-profiling-") as folder:
        say(f"serving {trace} on 127.0.0.1:{server.server_port} until it has been fetched; Ctrl-C stops")
        say(server.link)
        sys.stdout.flush()
        if browser and not webbrowser.open(_redirect(server.link, Path(folder))):
            warn("no browser found; open the address above in one")
        server.serve_once()
    return 0


def _redirect(link: str, folder: Path) -> str:
    """A private page that redirects to a link: every user of the machine can read a browser's arguments."""
    page = folder / "perfetto.html"
    address = escape(link)
    page.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><title>Perfetto</title>'
        f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">{address}</a>\n',
        encoding="utf-8",
    )
    return page.as_uri()


_ORIGIN = "https://ui.perfetto.dev"
_PERFETTO_PORT = 9001  # the only port on 127.0.0.1 that the page's content security policy allows
_LOOPBACK = "127.0.0.1"
_CLOSING_S = 10.0  # seconds that a client may keep its connection open after the last byte


class TraceServer(ThreadingHTTPServer):  # threads, because browsers open connections that they may never use
    """Serves one file on the loopback interface, only to Perfetto's page, until it has been fetched.

    Perfetto's page loads a trace from the address in its URL, as described at
    https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui. Every user of this machine can connect to the
    port and every web page can send requests to it, so the path contains a secret and the request's origin must be
    Perfetto's.
    """

    timeout = 0.2  # seconds until `handle_request` returns, so that `serve_once` checks `fetched`

    def __init__(self, trace: Path, port: int) -> None:
        open_regular(trace).close()
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as exc:
            raise OSError(exc.errno, f"{exc.strerror} (is another trace being served?)", f"port {port}") from exc
        self.trace = trace
        self.fetched = False
        # The page shows the name. Browsers and Python encode different characters, so others are replaced.
        self.address_path = f"/{token_urlsafe(32)}/{re.sub(r'[^A-Za-z0-9.-]+', '_', trace.name)}"
        # to open in a browser; anyone who has it can fetch the trace
        self.link = f"{_ORIGIN}/#!/?url=http://{_LOOPBACK}:{_PERFETTO_PORT}{self.address_path}"

    def serve_once(self) -> None:
        """Answer requests until the whole file has been fetched."""
        while not self.fetched:
            self.handle_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects; it may retry."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Send the trace."""
        if not self._is_allowed():
            return
        server = cast("TraceServer", self.server)
        with open_regular(server.trace) as file:
            size = os.fstat(file.fileno()).st_size
            self._send_head(200, {"Content-Type": "application/octet-stream", "Content-Length": str(size)})
            sent = self.connection.sendfile(file)
        server.fetched = sent >= size and self._has_arrived()

    def do_OPTIONS(self) -> None:
        """Answer the preflight request of a browser before it lets a public page connect to this machine."""
        if not self._is_allowed():
            return
        headers = {"Access-Control-Allow-Methods": "GET"}
        if self.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        self._send_head(204, headers)

    def _is_allowed(self) -> bool:
        """Whether the request is from Perfetto's page, opened with the link; otherwise it is refused."""
        path, expected = self.path.encode(), cast("TraceServer", self.server).address_path.encode()
        # The host is checked against DNS rebinding.
        host = self.headers.get("Host", "").partition(":")[0]
        if not compare_digest(path, expected) or host not in {_LOOPBACK, "localhost"}:
            self.send_error(404)
        elif self.headers.get_all("Origin") != [_ORIGIN]:
            self.send_error(403)
        else:
            return True
        return False

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        common = {"Access-Control-Allow-Origin": _ORIGIN, "Vary": "Origin", "Cache-Control": "no-store"}
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _has_arrived(self) -> bool:
        """Whether the client received everything: it closes the connection, where one that disconnects resets it."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError as exc:  # "not connected" is not a ConnectionError in Python
            raise ConnectionError from exc
        self.connection.settimeout(_CLOSING_S)
        with contextlib.suppress(TimeoutError):
            while self.connection.recv(1 << 10):
                pass
        return True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name for it)
        """Log nothing."""

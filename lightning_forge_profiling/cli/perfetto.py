"""A local server that hands one trace to ui.perfetto.dev in this machine's browser."""

import contextlib
import os
import re
import socket
import sys
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Self, cast

from lightning_forge_profiling.safe_files import open_regular

_ORIGIN = "https://ui.perfetto.dev"
_PERFETTO_PORT = 9001  # the only port on 127.0.0.1 that the page's content security policy allows
_LOOPBACK = "127.0.0.1"
_CLOSING_S = 10.0  # seconds that a client may keep its connection open after the last byte


class TraceServer:
    """Serves one file on the loopback interface, only to Perfetto's page, until it has been fetched.

    Perfetto's page loads a trace from the address in its URL, as described at
    https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui. Every user of this machine can connect to the
    port and every web page can send requests to it, so the path contains a secret and the request's origin must be
    Perfetto's. A context manager, which closes the port.
    """

    def __init__(self, trace: Path, port: int) -> None:
        open_regular(trace).close()
        try:
            self._server = _Server(trace, port)
        except OSError as exc:
            raise OSError(exc.errno, f"{exc.strerror} (is another trace being served?)", f"port {port}") from exc
        self.port = self._server.server_port
        self.link = f"{_ORIGIN}/#!/?url=http://{_LOOPBACK}:{_PERFETTO_PORT}{self._server.address_path}"
        """The address to open in a browser. Anyone who has it can fetch the trace."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()

    def serve_once(self) -> None:
        """Answer requests until the whole file has been fetched."""
        while not self._server.fetched:
            self._server.handle_request()


class _Server(ThreadingHTTPServer):  # threads, because browsers open connections that they may never use
    timeout = 0.2  # seconds until `handle_request` returns, so that `serve_once` checks `fetched`

    def __init__(self, trace: Path, port: int) -> None:
        super().__init__((_LOOPBACK, port), _Handler)
        self.trace = trace
        # The page shows the name. Browsers and Python encode different characters, so others are replaced.
        self.address_path = f"/{token_urlsafe(32)}/{re.sub(r'[^A-Za-z0-9.-]+', '_', trace.name)}"
        self.fetched = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects; it may retry."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Send the trace."""
        if not self._is_allowed():
            return
        server = cast("_Server", self.server)
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
        path, expected = self.path.encode(), cast("_Server", self.server).address_path.encode()
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

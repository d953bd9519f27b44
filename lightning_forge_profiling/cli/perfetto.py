"""One trace for ui.perfetto.dev, from this machine to this machine."""

import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import quote

__all__ = ["TraceServer"]

_ORIGIN = "https://ui.perfetto.dev"
_PERFETTO_PORT = 9001  # the only one on 127.0.0.1 that the page's content security policy lets it connect to
_LOOPBACK = "127.0.0.1"


class TraceServer:
    """Serves one file on the loopback interface, to the page of Perfetto alone, until it has been fetched.

    Perfetto's page loads a trace from the address in its own, as described at
    https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui. A context manager, which closes the port.

    Args:
        trace: the file.
        port: where to listen; 0 takes a free one.

    Raises:
        OSError: the file cannot be read or the port is taken.
    """

    def __init__(self, trace: Path, port: int) -> None:
        trace.open("rb").close()
        try:
            self._server = _Server(trace, port)
        except OSError as exc:
            raise OSError(exc.errno, f"{exc.strerror} (is another trace being served?)", f"port {port}") from exc
        self.port = self._server.server_port
        self.link = f"{_ORIGIN}/#!/?url=http://{_LOOPBACK}:{_PERFETTO_PORT}{self._server.address_path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()

    def serve_once(self) -> None:
        """Answer requests until the file has gone out whole."""
        while not self._server.fetched:
            self._server.handle_request()


class _Server(ThreadingHTTPServer):  # threads, for browsers open connections that they may never use
    timeout = 0.2  # seconds until `handle_request` returns, so that `fetched` is seen

    def __init__(self, trace: Path, port: int) -> None:
        super().__init__((_LOOPBACK, port), _Handler)
        self.trace = trace
        self.address_path = f"/{quote(trace.name)}"
        self.fetched = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Go on where a client went away; it may come again."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast("_Server", self.server)
        # The host is checked so that no other site can get here by pointing its own name at this machine.
        host = self.headers.get("Host", "").partition(":")[0]
        if self.path != server.address_path or host not in {_LOOPBACK, "localhost"}:
            self.send_error(404)
            return
        with server.trace.open("rb") as file:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", _ORIGIN)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(server.trace.stat().st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)
        server.fetched = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name for it)
        """Say nothing of each request."""

"""`view --perfetto`: the trace goes to Perfetto's page in this user's browser, once, and to nobody else."""

import http.client
import http.server
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser import chromium, wait_until
from tests.outcomes import HANGS_S
from tests.test_cli import ENVIRONMENT, INPUT_BOUND, TRACES, fails, forge

PERFETTO = "https://ui.perfetto.dev"
LINK = re.compile(re.escape(PERFETTO) + r"/#!/\?url=http://127\.0\.0\.1:9001(/[\w-]{43}/[\w.-]+)\n", re.ASCII)

AT_PORT = """
import sys
from lightning_forge_profiling.cli import main, view
view.PORT = int(sys.argv[1])
sys.exit(main.main(["view", "--perfetto", *sys.argv[2:]]))
"""


def command(*arguments, port=0):
    """The command on another port than that which the page asks for; 0 for a free one."""
    return [sys.executable, "-c", AT_PORT, str(port), *map(os.fspath, arguments)]


class Serving:
    """The command at work on a free port."""

    def __init__(self, trace, *options, **environment):
        self.process = subprocess.Popen(
            command(*options, trace),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **environment},
        )  # fmt: skip
        self.said = self.process.stdout.readline()
        self.port = int(self.said.split("127.0.0.1:")[1].split()[0])
        self.link = self.process.stdout.readline()
        self.path = LINK.fullmatch(self.link)[1]

    def request(self, path=None, method="GET", **headers):
        """The answer to a request that sends these headers, once each, or several times for a list."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS_S)
        headers = {"Host": f"127.0.0.1:{self.port}", "Origin": PERFETTO} | headers
        connection.putrequest(method, self.path if path is None else path, skip_host=True)
        for name, values in headers.items():
            for value in values if isinstance(values, list) else [values]:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.content = answer.read()
        connection.close()
        return answer

    def fetches(self, content):
        """The page gets the trace, and that ends the command."""
        answer = self.request()
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == PERFETTO
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.content == content
        assert self.process.wait(timeout=HANGS_S) == 0
        assert self.process.stderr.read() == ""
        return True


@contextmanager
def serving(trace=INPUT_BOUND, **environment):
    options = () if "BROWSER" in environment else ("--no-browser",)
    server = Serving(trace, *options, **environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def refused(answer):
    """Without the trace, and without leave for a page to read the answer."""
    assert answer.status in {403, 404, 501}
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert len(answer.content) < 1000
    return True


def test_whoever_does_not_know_the_link_gets_nothing_and_does_not_end_it():
    with serving() as server:
        secret, name = server.path[1:].split("/")
        others = ["/", f"/{name}", f"//{name}", f"/{secret}", f"/{secret}/", f"/{secret[:-1]}/{name}", f"/x/../{name}"]
        for path in [*others, server.path.upper(), server.path + "?x", f"/{'A' * 43}/{name}"]:
            assert refused(server.request(path))
        assert server.fetches(INPUT_BOUND.read_bytes())


@pytest.mark.slow
def test_the_link_is_another_each_time():
    with serving() as one, serving() as other:
        assert one.path.split("/")[1] != other.path.split("/")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": []},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://ui.perfetto.dev"},
        {"Origin": "https://ui.perfetto.dev.evil.example"},
        {"Origin": [PERFETTO, "https://evil.example"]},
    ],
)
def test_no_other_page_gets_it_even_with_the_link(headers):
    with serving() as server:
        for method in ("GET", "HEAD", "POST"):
            assert refused(server.request(method=method, **headers))
        assert server.fetches(INPUT_BOUND.read_bytes())


@pytest.mark.slow
def test_a_transfer_that_was_cut_off_does_not_end_it(tmp_path):
    size = 64 << 20  # more than the connection's buffers hold
    trace = tmp_path / "trace.json"
    trace.touch()
    os.truncate(trace, size)
    with serving(trace) as server:
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS_S)
            connection.request("GET", server.path, headers={"Origin": PERFETTO})
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.read(1000)
            answer.close()
            connection.close()
        assert server.fetches(bytes(size))


@pytest.mark.parametrize(
    "name",
    [b"trace (1).json", b"a b%20#?&=.json", b"\xff\xfe.json", "Köln \u202e.json".encode(), b"\x1b[31mred\n.json"],
)
def test_any_name_can_be_served_and_none_steers_the_terminal(name, tmp_path):
    trace = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    trace.write_bytes(b"content")
    with serving(trace) as server:
        assert server.said.startswith(f"serving {tmp_path}/")
        assert server.said.rstrip("\n").isprintable()
        assert urlsplit(f"http://127.0.0.1{server.path}").path == server.path, "nothing that a browser would encode"
        assert server.fetches(b"content")


def test_a_port_that_is_taken_is_said():
    with serving() as server:
        again = command(INPUT_BOUND, port=server.port)
        done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANGS_S, check=False)
        assert fails(done, f"port {server.port}: ")


@pytest.mark.usefixtures("_signals_act")
def test_control_c_ends_it_quietly_with_130():
    with serving() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=HANGS_S) == 130
        assert server.process.stderr.read() == ""


def test_it_shows_one_trace_and_says_which_there_are(tmp_path):
    assert fails(forge("view", "--perfetto", TRACES / "ddp"), "rank0.trace.json.gz, rank1.trace.json.gz")
    assert fails(forge("view", "--perfetto", tmp_path / "none.json"), "none.json: no such file")


@pytest.fixture
def browser_script(tmp_path):
    """A browser that notes what it was asked to open, and its environment."""
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path}/opening\nmv {tmp_path}/opening {tmp_path}/opened\n')
    script.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return {"BROWSER": str(script), "TMPDIR": str(tmp_path / "tmp")}, tmp_path / "opened"


def test_the_link_is_not_among_the_browsers_arguments_which_all_users_can_read(browser_script, tmp_path):
    environment, opened = browser_script
    with serving(INPUT_BOUND, **environment) as server:
        wait_until(opened.exists, "the browser is started")
        address = urlsplit(opened.read_text())
        page = Path(address.path)
        assert address.scheme == "file"
        assert server.link.strip() in page.read_text(encoding="utf-8")
        assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
        assert server.fetches(INPUT_BOUND.read_bytes())
    assert list((tmp_path / "tmp").iterdir()) == []


# --- a real browser --------------------------------------------------------------------------------------------------

PAGE = b"""<!DOCTYPE html><title>loading</title><script>
const url = new URLSearchParams(location.hash.split("?")[1]).get("url");
fetch(url).then((answer) => answer.arrayBuffer()).then(
  (content) => { document.title = `${location.origin} got ${content.byteLength}`; },
  () => { document.title = `${location.origin} was refused`; },
);
</script>"""


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    """The port of a server with a page that fetches the trace named in its address, as Perfetto's does."""
    openssl = shutil.which("openssl")
    if openssl is None:
        if os.environ.get("FORGE_REQUIRE_BROWSER") == "1":
            pytest.fail("openssl is missing: apt-get install openssl")
        pytest.skip("openssl is missing")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=ui.perfetto.dev"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.browser
def test_a_browser_gives_it_to_perfettos_page_and_to_no_other(site, browser_script):
    environment, opened = browser_script
    with serving(INPUT_BOUND, **environment) as server:
        wait_until(opened.exists, "the browser is started")
        names = (f"ui.perfetto.dev:443 127.0.0.1:{site}", f"evil.example:443 127.0.0.1:{site}")
        rules = ",".join(f"MAP {rule}" for rule in (*names, f"127.0.0.1:9001 127.0.0.1:{server.port}"))
        with chromium(f"--host-resolver-rules={rules}", "--ignore-certificate-errors") as browser:
            browser.get(server.link.strip().replace("ui.perfetto.dev", "evil.example"))
            wait_until(lambda: browser.title == "https://evil.example was refused", "another page is refused")
            assert server.process.poll() is None
            browser.get(opened.read_text())
            got = f"{PERFETTO} got {INPUT_BOUND.stat().st_size}"
            wait_until(lambda: browser.title == got, "Perfetto's page has the trace")
        assert server.process.wait(timeout=HANGS_S) == 0

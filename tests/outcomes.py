"""What a user finds after a run: traces, logged scalars, the printed table."""

import csv
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

from lightning_forge_profiling.record.reader import read_run, records_at
from lightning_forge_profiling.report.live_view import print_summary
from lightning_forge_profiling.report.screen import Screen
from tests.ports import free_port

SCRIPTS = Path(__file__).parent / "scripts"
REPORTS = {"summary.json", "summary.md", "report.html"}
HANGS_S = 200
"""What takes so long has come to a standstill. A busy machine may take a minute for what else takes a second."""
PARTITION = ("data", "transfer", "forward", "backward", "optimizer", "other")


def traces(folder, rank=0):
    """The traces of a rank anywhere below a folder, in order of their time."""
    name = f"rank{rank}.trace.json.gz"
    # not `rglob`, which raises where a child process removes a folder meanwhile
    found = [Path(parent, name) for parent, _, files in os.walk(folder) if name in files]
    # a window's folder begins with its time; the folder of the run above it may have a random name
    return sorted(found, key=lambda path: (path.parent.name, path))


def the_trace(folder, rank=0):
    """The content of the one trace of a rank below a folder."""
    [path] = traces(folder, rank)
    return read_trace(path)


def read_trace(path):
    with gzip.open(path) as file:
        return json.load(file)


def spans(trace, category="user_annotation"):
    """Names of the annotated spans (those of any category with None), in order of their start."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and category in {None, e.get("cat")}]
    return [e["name"] for e in sorted(events, key=lambda e: e["ts"])]


def recorded_steps(trace, category="user_annotation"):
    found = spans(trace, category)
    return [int(name.removeprefix("ProfilerStep#")) for name in found if name.startswith("ProfilerStep#")]


def logged(folder, name="throughput/steps_per_sec"):
    """Rows of the one metrics.csv below a folder that have a value for `name`, as numbers."""
    [path] = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if name in row]


def excluded_s(folder, part):
    """Seconds of `validation` or `checkpoint` that are no part of a step, of the one run below a folder."""
    [record] = read_run(records_at(folder)[0]).ranks
    assert record.state is not None
    return record.state.report.run.timing.left_out.excluded_ms[part] / 1e3


def tables(text):
    """How many tables were printed."""
    return len(re.findall(r"^Where a step\b.* goes", text, re.MULTILINE))


def summary_of(folder, of=1):
    """What `forge-profiling show` prints of the newest of so many runs below a folder."""
    path, *others = records_at(folder)
    assert len(others) == of - 1
    text = io.StringIO()
    print_summary(read_run(path), "run", time.time(), Screen(text, width=120))
    return text.getvalue()


def warnings_of(caplog):
    """The package's own warnings."""
    return [r.message for r in caplog.records if r.name.startswith("lightning_forge") and r.levelname == "WARNING"]


class Tags(HTMLParser):
    """The names of the elements of a piece of HTML, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def unwrapped(text):
    """Printed sentences without their line breaks."""
    return " ".join(text.split())


def wait_for_processes_of(folder):
    """Until no process has this folder in its command line."""
    deadline = time.monotonic() + HANGS_S
    while busy := working_on(folder):
        assert time.monotonic() < deadline, busy
        time.sleep(0.05)


def working_on(folder):
    """Processes with this folder in their command line."""
    found = []
    for listing in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = listing.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command:
            found.append(listing.parent.name)
    return found


def script(name, *args, cwd, **options):
    """Run a script as a process of its own."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANGS_S, check=False, **options)


# of a host of its own: another name, and another folder under the same path
HOST = 'hostname "$0" && mount --bind "$1" "$2" && shift 2 && exec "$@"'
NEW_HOST = ("unshare", "--mount", "--uts", *(() if os.geteuid() == 0 else ("--map-root-user",)))


def hosts_can_be_made():
    """Whether this user may have mounts and a host name of its own for a process."""
    command = [*NEW_HOST, "hostname", "host0"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


def two_hosts(name, folder, *args):
    """Run a script as two ranks on each of two hosts with folders of their own: exit codes, rank 0's output, errors."""
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    for path in ("logs", "host0", "host1"):
        (folder / path).mkdir()
    ranks = [
        subprocess.Popen(
            [
                *(*NEW_HOST, "sh", "-c", HOST, f"host{host}", folder / f"host{host}", folder / "logs"),
                *(sys.executable, SCRIPTS / name, folder / "logs", *args),
            ],
            env={**shared, "NODE_RANK": host, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in "01"
        for rank in "01"
    ]
    try:
        said = [process.communicate(timeout=HANGS_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    codes = [process.returncode for process in ranks]
    return codes, said[0][0], "".join(err for _, err in said)


@contextmanager
def two_ranks(name, *args):
    """Both ranks of a script, started here: Lightning's launcher may kill rank 0 before it can say anything."""
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    command = [sys.executable, SCRIPTS / name, *args]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()

"""How long it takes to analyse a large trace and how much memory, beside what others need to do no more than read it.

The large traces are made from a small real one: its events are repeated in Kineto's own layout, with later times, step
numbers and ids of their own. Each contender runs in fresh processes, in turns; quoted are medians, and the best of the
seconds, for whatever else the machine does can only add to them. Linux only.

`--check` compares only `json.load` and the command, and CPU time rather than seconds, which a busy machine changes
more: exit code 1 if it takes more than MOST_OF_JSON_LOAD of it, or more than MOST_MB. Both hold for its default size.

    python -m benchmarks.analysis
    python -m benchmarks.analysis --megabytes 50 --repeats 1
    python -m benchmarks.analysis --check
    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    python -m benchmarks.analysis --with-hta /tmp/hta/bin/python
"""

import argparse
import gzip
import importlib.util
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lightning_forge_profiling.host import processor_name, usable_cores

TRACES = Path(__file__).parents[1] / "tests/data/traces"
SMALL, TINY = TRACES / "compute_bound/rank0.trace.json.gz", TRACES / "launch_bound"
RANKS, RANK_MEGABYTES = 8, 50
WHOLE = "`view --save`"
JSON, ORJSON = "`json.load`", "`orjson.loads`"

# What differs from one repetition to the next. Of a time these are the microseconds; its nanoseconds stay.
SHIFTED = re.compile(r'("ts": |"correlation": |"External id": |"Sequence number": |"id": |ProfilerStep#)(\d+)')
EVENTS = '"traceEvents": ['
PAUSE_US = 1000

TIMED = """
import sys, time
{imports}
path = sys.argv[1]
began = time.perf_counter()
{call}
print(time.perf_counter() - began)
"""
READERS = {
    JSON: ("import json", "json.load(open(path))"),
    ORJSON: ("import orjson", "orjson.loads(open(path, 'rb').read())"),
    "typed msgspec, the whole text": (
        "import msgspec; from lightning_forge_profiling.kineto.reader import TraceEvent as Event",
        "msgspec.json.decode(open(path, 'rb').read(), type=msgspec.defstruct('File', [('traceEvents', list[Event])]))",
    ),
    "`read_trace` (ours)": (
        "from pathlib import Path; from lightning_forge_profiling.kineto.reader import read_trace",
        "read_trace(Path(path))",
    ),
}
# Twice what 692 MB are to take.
MOST_OF_JSON_LOAD = 2 * 0.25
MOST_MB = 2 * 280
CHECK_MEGABYTES = 692

HTA_FILE = ("from hta.common.trace import parse_trace_file", "parse_trace_file(path)")
HTA_FOLDER = (
    "from hta.common.trace import Trace",
    "Trace(trace_dir=path).parse_traces(use_memory_profiling=False)",
)


def grow(target: Path, megabytes: float, rank: int = 0, marked: int | None = None) -> None:
    """Write a trace.

    Args:
        target: where to; compressed where the name ends in .gz.
        megabytes: about how much JSON.
        rank: what it is to say of itself.
        marked: in how many repetitions of the small trace to mark the steps; in all by default.
    """
    with gzip.open(SMALL, "rt") as file:
        text = file.read()
    start, end = text.index(EVENTS) + len(EVENTS), text.rindex("]")
    head, events, tail = text[:start], text[start:end].strip(), text[end:]
    head = head.replace("{", f'{{"distributedInfo": {{"rank": {rank}, "world_size": {RANKS}}},', 1)  # as HTA wants it
    between, keys, numbers = (SHIFTED.split(events)[part::3] for part in range(3))
    values = [int(number) for number in numbers]
    times = [value for key, value in zip(keys, values, strict=True) if key == '"ts": ']
    steps = {value for key, value in zip(keys, values, strict=True) if key == "ProfilerStep#"}
    ids = [value for key, value in zip(keys, values, strict=True) if key not in {'"ts": ', "ProfilerStep#"}]
    strides = dict.fromkeys(keys, max(ids) + 1)
    strides |= {'"ts": ': max(times) - min(times) + PAUSE_US, "ProfilerStep#": len(steps), "Step#": len(steps)}
    with gzip.open(target, "wt") if target.suffix == ".gz" else target.open("w") as out:
        out.write(head)
        for turn in range(max(round(megabytes * 1e6 / len(events)), 1)):
            out.write(",\n" if turn else "\n")
            if turn == marked:
                keys = [key.replace("ProfilerStep#", "Step#") for key in keys]
            for before, key, value in zip(between, keys, values, strict=False):
                out.write(f"{before}{key}{value + strides[key] * turn}")
            out.write(between[-1])
        out.write(tail)


def in_python(reader: tuple[str, str], python: str, path: Path) -> list[str]:
    """The command that prints how long a call takes: the interpreter's start and the imports do not count."""
    imports, call = reader
    return [python, "-c", TIMED.format(imports=imports, call=call), str(path)]


def analyze(path: Path, reports: Path) -> list[str]:
    """The command, which is timed whole, from the interpreter's start to its end."""
    return [
        sys.executable,
        "-m",
        "lightning_forge_profiling",
        "view",
        str(path),
        "--save",
        str(reports / "report.html"),
    ]


@dataclass(frozen=True)
class Run:
    """What one run took.

    Attributes:
        seconds: of the call, or of the whole command.
        cpu_seconds: of the process and those it waited for, from its start to its end.
        largest_mb: peak resident memory of its largest process.
        together_mb: peak of the sum over its processes, looked at every 10 ms; pages that they share count in each.
    """

    seconds: float
    cpu_seconds: float
    largest_mb: float
    together_mb: float


def run(command: list[str]) -> Run:
    """Run a command to its end and watch it."""
    together = 0
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        while not ended:
            together = max(together, resident(process.pid))
            time.sleep(0.01)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read()
        if process.returncode:
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{said}")
    if "-c" in command:  # it has timed the call alone
        seconds = float(said.split()[-1])
    largest = usage.ru_maxrss * 1024 / 1e6
    return Run(seconds, usage.ru_utime + usage.ru_stime, largest, max(largest, together / 1e6))


def resident(pid: int) -> int:
    """Resident bytes of a process and those that it started, as far as they live."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE") + sum(map(resident, children))


def in_turns(commands: Mapping[str, list[str]], repeats: int) -> dict[str, list[Run]]:
    """Run each command so many times, one after the other and the next time backwards."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for turn in range(repeats):
        for name in list(commands) if turn % 2 == 0 else reversed(list(commands)):
            runs[name].append(run(commands[name]))
            print(f"{name}: {runs[name][-1].seconds:.2f} s", file=sys.stderr)
    return runs


def table(title: str, runs: Mapping[str, Iterable[Run]], base: str) -> None:
    """Print medians, the best of the seconds, and this over that of `base`."""
    base_s = min(one.seconds for one in runs[base])
    print(f"\n{title}\n\n| contender | seconds | best | ratio of the best | largest process MB | all processes MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, mine in runs.items():
        seconds = statistics.median(one.seconds for one in mine)
        best = min(one.seconds for one in mine)
        largest = statistics.median(one.largest_mb for one in mine)
        together = statistics.median(one.together_mb for one in mine)
        print(f"| {name} | {seconds:.2f} | {best:.2f} | {best / base_s:.2f} | {largest:.0f} | {together:.0f} |")


def check(megabytes: float, repeats: int) -> int:
    """Whether the command takes little beside `json.load`, as an exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.trace.json"
        with ProcessPoolExecutor(1) as pool:  # a child begins with its parent's peak
            pool.submit(grow, path, megabytes).result()
        commands = {JSON: in_python(READERS[JSON], sys.executable, path), WHOLE: analyze(path, Path(folder))}
        runs = in_turns(commands, repeats)
        size = path.stat().st_size / 1e6
    reference, ours = (min(one.cpu_seconds for one in runs[name]) for name in (JSON, WHOLE))
    largest = min(one.largest_mb for one in runs[WHOLE])
    ratio = ours / reference
    print(f"{size:.0f} MB: {ours:.2f} s of CPU time and {largest:.0f} MB; {JSON} {reference:.2f} s: {ratio:.2f}")
    if ratio > MOST_OF_JSON_LOAD:
        print(f"too slow: more than {MOST_OF_JSON_LOAD} of the CPU time of {JSON}")
    if largest > MOST_MB:
        print(f"too large: more than {MOST_MB} MB")
    return int(ratio > MOST_OF_JSON_LOAD or largest > MOST_MB)


def describe(hta: str) -> None:
    """Print what the figures depend on."""
    packages = ["numpy", "msgspec", *(["orjson"] if importlib.util.find_spec("orjson") else [])]
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    if hta:
        code = "from importlib.metadata import version as v; print('HTA', v('HolisticTraceAnalysis'), 'with pandas', "
        code += "v('pandas'))"
        versions.append(subprocess.run([hta, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    print(f"{processor_name()}, {usable_cores()} cores, load {os.getloadavg()[0]:.1f}; ", end="")
    print(", ".join(versions))


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--with-hta", metavar="PYTHON", default="", help="the interpreter of an environment with HTA")
    parser.add_argument("--check", action="store_true", help="fail if it is slow beside `json.load`, or large")
    args = parser.parse_args()
    describe(args.with_hta)
    if args.check:
        return check(args.megabytes or CHECK_MEGABYTES, args.repeats)
    megabytes = args.megabytes or 519
    orjson = importlib.util.find_spec("orjson")
    with tempfile.TemporaryDirectory() as root:
        reports, folder = Path(root), Path(root) / "ranks"
        raw, packed, few = (reports / name for name in ("all.trace.json", "all.trace.json.gz", "few.trace.json"))
        folder.mkdir()
        # A child begins with its parent's peak, so this process must stay small.
        with ProcessPoolExecutor() as pool:
            made = [pool.submit(grow, path, megabytes) for path in (raw, packed)]
            made.append(pool.submit(grow, few, megabytes, marked=1))
            ranks = [(folder / f"rank{rank}.trace.json.gz", RANK_MEGABYTES, rank) for rank in range(RANKS)]
            made += [pool.submit(grow, *one) for one in ranks]
            for one in made:
                one.result()

        commands = {name: in_python(reader, sys.executable, raw) for name, reader in READERS.items()}
        if not orjson:
            commands.pop(ORJSON)
        commands |= {WHOLE: analyze(raw, reports), f"{WHOLE}, gzip": analyze(packed, reports)}
        if args.with_hta:
            commands["HTA, `parse_trace_file`"] = in_python(HTA_FILE, args.with_hta, raw)
            commands["HTA, the same with 3 steps marked"] = in_python(HTA_FILE, args.with_hta, few)
        sizes = f"{raw.stat().st_size / 1e6:.0f} MB of JSON, {packed.stat().st_size / 1e6:.0f} MB as gzip"
        table(f"One trace, {sizes}:", in_turns(commands, args.repeats), WHOLE)
        if not orjson:
            print("\norjson is not installed, and so left out")

        commands = {WHOLE: analyze(folder, reports)}
        if args.with_hta:
            commands["HTA, `Trace.parse_traces`"] = in_python(HTA_FOLDER, args.with_hta, folder)
        table(f"{RANKS} ranks of {RANK_MEGABYTES} MB, gzip:", in_turns(commands, args.repeats), WHOLE)

        table("A trace of 0.7 MB:", in_turns({WHOLE: analyze(TINY, reports)}, args.repeats), WHOLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long a thousand traces take to analyse: each by itself, on one core and on all, then all of them together.

The traces are made from two real ones of three steps, of which one is of a rank whose GPU is late: that one becomes
rank STRAGGLER, the other all the others, each with a rank and a clock of its own. Each measurement is a process of its
own; memory is the peak of the largest process in it. With `--with-hta`, HolisticTraceAnalysis reads growing
parts of the same set, until one takes longer than its limit.

    python -m benchmarks.thousand_ranks [--ranks 1000] [--folder DIR] [--with-hta /tmp/hta/bin/python]
"""

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_forge_profiling.host import usable_cores

TRACES = Path(__file__).parents[1] / "tests/data/traces/slow_rank_gpu"
STRAGGLER = 417
FEW = 256  # of which the scaling over cores is measured
HTA_LIMIT_S = 600
EACH_RANK = """
import sys
from pathlib import Path
from lightning_forge_profiling.pipeline import write_rank_results
write_rank_results(Path(sys.argv[1]))
"""
HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
"""


def make(folder: Path, ranks: int) -> None:
    """Write the traces."""
    texts = [gzip.decompress((TRACES / f"rank{rank}.trace.json.gz").read_bytes()).decode() for rank in (0, 1)]
    for rank in range(ranks):
        late = rank == STRAGGLER % ranks
        text = re.sub(r'"rank": \d+, "world_size": 2', f'"rank": {rank}, "world_size": {ranks}', texts[late])
        clock = 1_790_857_026_000_000_000 + 1_234_567 * rank
        text = re.sub(r'"baseTimeNanoseconds": \d+', f'"baseTimeNanoseconds": {clock}', text)
        (folder / f"rank{rank}.trace.json.gz").write_bytes(gzip.compress(text.encode(), 1))


def timed(*command: str, limit_s: float | None = None) -> tuple[float, float, str]:
    """Seconds, peak MB of the largest process, and what a command printed; infinite seconds past the limit."""
    code = (
        "import json, resource, subprocess, sys, time\n"
        "began = time.perf_counter()\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "took = time.perf_counter() - began\n"
        "most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024\n"
        "print(json.dumps([took, most, done.returncode, done.stdout, done.stderr[-2000:]]))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=limit_s, check=True
        )
    except subprocess.TimeoutExpired:
        return float("inf"), 0.0, ""
    seconds, megabytes, status, printed, errors = json.loads(done.stdout)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}: {errors}")
    return seconds, megabytes, printed


def part_of(folder: Path, ranks: int, target: Path) -> Path:
    """A folder with links to the first of the traces, which a copy would only double."""
    target.mkdir()
    for rank in range(ranks):
        name = f"rank{rank}.trace.json.gz"
        (target / name).hardlink_to(folder / name)
    return target


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the traces are made, and kept")
    parser.add_argument("--with-hta", metavar="PYTHON", help="the Python of an environment with HolisticTraceAnalysis")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "traces"
        if not folder.is_dir():
            folder.mkdir(parents=True)
            make(folder, args.ranks)
        megabytes = sum(path.stat().st_size for path in folder.glob("*.trace.json.gz")) / 1e6
        print(f"{args.ranks} traces, {megabytes:.0f} MB compressed, {usable_cores()} cores")
        print("| what | seconds | MB |")
        print("|---|---:|---:|")
        few, each = min(FEW, args.ranks), (sys.executable, "-c", EACH_RANK)
        for cores in dict.fromkeys((1, usable_cores())):
            part = part_of(folder, few, Path(temporary) / f"of {cores}")
            pinned = ("taskset", "-c", "0") if cores == 1 else ()
            seconds, most, _ = timed(*pinned, *each, str(part))
            print(f"| each of {few} ranks, {cores} {'core' if cores == 1 else 'cores'} | {seconds:.1f} | {most:.0f} |")
        seconds, most, _ = timed(*each, str(folder))
        print(f"| each of all ranks | {seconds:.1f} | {most:.0f} |")
        results = Path(temporary) / "results"
        results.mkdir()
        for path in folder.glob("*.summary.json"):
            shutil.copy(path, results)
        largest = max(path.stat().st_size for path in results.iterdir())
        page, base = Path(temporary) / "report.html", (sys.executable, "-m", "lightning_forge_profiling")
        seconds, most, _ = timed(*base, "view", str(results), "--save", str(page))
        print(f"| all ranks by these files, with the page | {seconds:.1f} | {most:.0f} |")
        printed = timed(*base, "show", str(results), "--json")[2]
        summary = json.loads(printed)
        late, planted = summary["findings"][0]["rank"], STRAGGLER % args.ranks
        print(
            f"\nverdict {summary['verdict']}, rank {late} (planted: {planted}); at most {largest / 1e3:.0f} kB a rank"
        )
        print(f"page {page.stat().st_size / 1e6:.2f} MB, summary.json {len(printed) / 1e6:.2f} MB")
        if args.with_hta:
            with_hta(args.with_hta, folder, args.ranks, Path(temporary))


def with_hta(python: str, folder: Path, ranks: int, temporary: Path) -> None:
    """The same traces with HolisticTraceAnalysis, more and more of them."""
    print("\n| ranks | HTA, seconds | MB of its largest process |\n|---:|---:|---:|")
    number = 8
    while True:
        number = min(number, ranks)
        began = time.perf_counter()
        part = part_of(folder, number, temporary / f"hta {number}")
        seconds, most, _ = timed(python, "-c", HTA, str(part), limit_s=HTA_LIMIT_S)
        print(f"| {number} | {seconds:.1f} | {most:.0f} |", flush=True)
        if number == ranks or time.perf_counter() - began > HTA_LIMIT_S / 4:
            return
        number *= 4


if __name__ == "__main__":
    main()

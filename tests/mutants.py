"""Changes one file at random places, one change at a time, and lists those that no test notices. Uses cosmic-ray.

    make mutants FILE=lightning_forge_profiling/timing/ledger.py [TESTS="tests/test_ledger.py ..."] [COUNT=30]

Works on a copy of the tracked files. Without TESTS, all quick tests run once with coverage, and the few test files are
taken that together reach every line of the file that any reaches. A change that survives is a missing test, dead code,
or makes no difference; which of them, only a reader can say. With SURVIVORS=0, one is an error. A line whose changes
make no difference (a shortcut) says `# pragma: no mutate`.
"""

import argparse
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parents[1]
# `a | b` to `a << b` says nothing that `a | b` to `a + b` does not: of each place one change, of these kinds
KINDS = re.compile(
    r"core/(NumberReplacer|AddNot|ZeroIteration\w*|Replace(True|False|And|Or|Break|Continue)\w*"
    r"|ReplaceComparisonOperator_\w+|ReplaceBinaryOperator_\w+_(Add|Sub|Mul|Div)|ReplaceUnaryOperator_\w+)"
)
CONFIG = """[cosmic-ray]
module-path = "{module}"
timeout = {timeout}
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""
COVERAGE = """[run]
data_file = {data}
include = {module}
parallel = true
patch = subprocess
disable_warnings = module-not-imported, module-not-measured, no-data-collected
"""
QUICK = "not (slow or real_time or browser or gpu or multi_gpu or programs)"
PARALLEL = ("--numprocesses", "auto", "--dist", "loadfile")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Called where this file is a plugin of pytest: what is covered from now on is by this test file."""
    Coverage.current().switch_context(nodeid.partition("::")[0])  # type: ignore[union-attr]


def tests_of(module: str, copy: Path, among: list[str]) -> list[str]:
    """Test files that reach a module's lines: the fewest that together reach all that any reaches."""
    with tempfile.TemporaryDirectory() as folder:
        settings, data = Path(folder, "coveragerc"), Path(folder, "data")
        settings.write_text(COVERAGE.format(data=data, module=copy / module), encoding="utf-8")
        coverage = [sys.executable, "-m", "coverage"]
        tests = ["-m", QUICK, "-q", "-p", "tests.mutants", "-p", "no:cacheprovider", *PARALLEL, *among]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *tests]
        subprocess.run(command, cwd=copy, check=False, env=environment)  # some tests need what is not tracked
        subprocess.run([*coverage, "combine", "-q", f"--rcfile={settings}"], cwd=copy, check=True, env=environment)
        covered = CoverageData(str(data))
        covered.read()
        found = covered.contexts_by_lineno(str(copy / module))
    reached: dict[str, set[int]] = {}
    for line, files in found.items():
        for file in filter(None, files):  # "" is the import
            reached.setdefault(file, set()).add(line)
    left, chosen = {line for lines in reached.values() for line in lines}, list[str]()
    while left:
        chosen.append(max(sorted(reached), key=lambda file: len(reached[file] & left)))
        left -= reached[chosen[-1]]
    print(f"{len(reached)} test files reach {module}")
    return chosen


def choose(session: Path, lines: list[str], count: int, seed: int) -> int:
    """Leave `count` changes of a file of these lines in the session, each at another place; return how many there are.

    The same ones for the same file and seed: identifiers are random, and say nothing of the order.
    """
    places: dict[tuple[int, int, str], list[str]] = {}
    with sqlite3.connect(session) as database:
        rows = (
            "SELECT job_id, operator_name, start_pos_row, start_pos_col FROM mutation_specs "
            "ORDER BY operator_name, operator_args, occurrence"
        )
        for job, kind, line, column in database.execute(rows).fetchall():
            if KINDS.fullmatch(kind) and "# pragma: no mutate" not in lines[line - 1]:
                places.setdefault((line, column, kind.split("_")[0]), []).append(job)
        draw = random.Random(seed)  # noqa: S311
        kept = [draw.choice(places[place]) for place in draw.sample(sorted(places), min(count, len(places)))]
        for table in "mutation_specs", "work_items":
            database.execute(f"DELETE FROM {table} WHERE job_id NOT IN ({','.join('?' * len(kept))})", kept)  # noqa: S608
    return len(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tests", default="")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="of the tests of one change, in seconds")
    parser.add_argument("--survivors", type=int, default=None, help="more of them are an error")
    parser.add_argument("--among", default="tests", help="where tests are looked for")
    parser.add_argument("--cosmic-ray", default="cosmic-ray", help="the command")
    args = parser.parse_args()
    cosmic_ray = Path(shutil.which(args.cosmic_ray) or parser.error(f"{args.cosmic_ray} is missing")).absolute()
    with tempfile.TemporaryDirectory() as folder:
        copy, config, session = Path(folder, "tree"), Path(folder, "config.toml"), Path(folder, "session.sqlite")
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in tracked.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        tests = args.tests.split() or tests_of(args.file, copy, args.among.split())
        if not tests:
            print(f"No quick test reaches {args.file}: give TESTS.")
            return 2
        text = CONFIG.format(module=args.file, timeout=args.timeout, python=sys.executable, tests=" ".join(tests))
        config.write_text(text, encoding="utf-8")

        def run(*command: object) -> None:
            environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
            subprocess.run([cosmic_ray, *map(str, command)], cwd=copy, check=True, env=environment)

        run("init", config, session)
        lines = (copy / args.file).read_text(encoding="utf-8").splitlines()
        print(
            f"{choose(session, lines, args.count, args.seed)} changes in {args.file}, tests: {' '.join(tests)}",
            flush=True,
        )
        run("exec", config, session)
        with sqlite3.connect(session) as database:
            results = database.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    survivors = [diff for outcome, diff in results if outcome == "SURVIVED"]
    print("\n".join(survivors))
    print(f"{len(results) - len(survivors)} of {len(results)} changes were noticed")
    return int(not results or (args.survivors is not None and len(survivors) > args.survivors))


if __name__ == "__main__":
    sys.exit(main())

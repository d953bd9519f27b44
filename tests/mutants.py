"""Changes one file at random places, one change at a time, and lists those that no test notices. Uses cosmic-ray.

    make mutants FILE=lightning_forge_profiling/timing/ledger.py [TESTS="tests/test_ledger.py ..."] [COUNT=30]

Works on a copy of the tracked files. Without TESTS: the test files that name the module. A change that survives is a
missing test, dead code, or makes no difference; which of them, only a reader can say.
"""

import argparse
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

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


def tests_of(module: str) -> list[str]:
    """The test files that name a module."""
    dotted = module.removesuffix(".py").replace("/", ".")
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(rf"{re.escape(dotted)}\b", path.read_text(encoding="utf-8"))
    )


def choose(session: Path, count: int, seed: int) -> int:
    """Leave `count` changes in the session, each at another place; return how many there are."""
    places: dict[tuple[int, int, str], list[str]] = {}
    with sqlite3.connect(session) as database:
        rows = "SELECT job_id, operator_name, start_pos_row, start_pos_col FROM mutation_specs ORDER BY job_id"
        for job, kind, line, column in database.execute(rows).fetchall():
            if KINDS.fullmatch(kind):
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
    parser.add_argument("--cosmic-ray", default="cosmic-ray", help="the command")
    args = parser.parse_args()
    tests = args.tests.split() or tests_of(args.file)
    if not tests:
        print(f"No test file names {args.file}: give TESTS.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy, config, session = Path(folder, "tree"), Path(folder, "config.toml"), Path(folder, "session.sqlite")
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in tracked.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        text = CONFIG.format(module=args.file, timeout=300.0, python=sys.executable, tests=" ".join(tests))
        config.write_text(text, encoding="utf-8")

        def run(*command: object) -> None:
            environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
            subprocess.run([args.cosmic_ray, *map(str, command)], cwd=copy, check=True, env=environment)

        run("init", config, session)
        print(f"{choose(session, args.count, args.seed)} changes in {args.file}, tests: {' '.join(tests)}", flush=True)
        run("exec", config, session)
        with sqlite3.connect(session) as database:
            results = database.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    survivors = [diff for outcome, diff in results if outcome == "SURVIVED"]
    print("\n".join(survivors))
    print(f"{len(results) - len(survivors)} of {len(results)} changes were noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

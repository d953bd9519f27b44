"""The figures and findings of the golden traces, beside what was kept: `python -m tests.golden.outputs`.

    python -m tests.golden.outputs           # prints what differs
    python -m tests.golden.outputs --keep    # and keeps what is read now

Each difference is to be explained before it is kept.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_forge_profiling.pipeline import analyze

HERE = Path(__file__).parent
TRACES = HERE.parent / "data" / "traces"
TOLERANCE: Final = 1e-6  # of a figure: the same bytes are read each time; a sum may be in another order

_LONGEST: Final = 12  # of a list, such as the steps of a trace


def cases() -> list[str]:
    """All traces, by the names of their folders."""
    return sorted(path.name for path in TRACES.iterdir())


def read(case: str) -> dict[str, Any]:
    """Verdict, findings and figures of a case."""
    analysis = analyze(TRACES / case, processes=1).analysis
    return {
        "verdict": analysis.verdict,
        "findings": [finding.code for finding in analysis.findings],
        "figures": dict(_figures(msgspec.to_builtins(analysis), "")),
    }


def _figures(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """All numbers in a tree, by their path."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield key, float(f"{value:.9g}")
        return
    inside = value.items() if isinstance(value, Mapping) else enumerate(value[:_LONGEST])
    for name, each in inside:
        yield from _figures(each, f"{key}/{name}" if key else str(name))


def kept(case: str) -> dict[str, Any]:
    """What was kept of a case; empty for none."""
    path = _path(case)
    return json.loads(path.read_text()) if path.is_file() else {}


def _path(case: str) -> Path:
    return HERE / "outputs" / f"{case}.json"


def differences(case: str) -> list[str]:
    """What differs from what was kept, a line each."""
    before, now = kept(case), read(case)
    lines = [
        f"{what}: {before.get(what)} before, {now[what]} now"
        for what in ("verdict", "findings")
        if before.get(what) != now[what]
    ]
    old, new = before.get("figures", {}), now["figures"]
    for key in sorted(old.keys() | new.keys()):
        one, other = old.get(key), new.get(key)
        if one is None or other is None or not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-9):
            lines.append(f"{key}: {one} before, {other} now")
    return lines


def main() -> None:
    """Print what differs, and keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="such as ddp; all by default")
    parser.add_argument("--keep", action="store_true", help="keep what is read now")
    arguments = parser.parse_args()
    for case in arguments.cases or cases():
        found = differences(case)
        sys.stdout.writelines(f"{case}: {line}\n" for line in found)
        if found and arguments.keep:
            _path(case).parent.mkdir(exist_ok=True)
            _path(case).write_text(json.dumps(read(case), indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

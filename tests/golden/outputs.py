"""Figures and findings of the golden traces, records and boundaries, beside what was kept.

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

from lightning_forge_profiling.names import RECORD_FOLDER
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.report.live_view import run_summary
from lightning_forge_profiling.schema import Analysis
from tests.golden import boundaries
from tests.golden.verdicts import TRACES, analysis_of

HERE = Path(__file__).parent
RUNS = HERE / "runs"
TOLERANCE: Final = 1e-6  # of a figure: the same bytes are read each time; a sum may be in another order

_LONGEST: Final = 12  # of a list, such as the steps of a trace


def cases() -> list[str]:
    """All of them, by kind and name."""
    traces = [f"traces/{path.name}" for path in TRACES.iterdir()]
    runs = [f"runs/{path.parent.relative_to(RUNS)}" for path in RUNS.rglob(RECORD_FOLDER)]
    return sorted((*traces, *runs, *(f"boundaries/{case}" for case in boundaries.cases())))


def read(case: str) -> dict[str, Any]:
    """Verdict, findings and figures of a case."""
    kind, _, name = case.partition("/")
    return _READ[kind](name)


def _of_trace(name: str) -> dict[str, Any]:
    analysis = analysis_of(TRACES / name)
    return {**_findings(analysis), "figures": dict(_figures(msgspec.to_builtins(analysis), ""))}


def _of_run(name: str) -> dict[str, Any]:
    """What does not depend on the layout of a record: the names of metrics and findings are public."""
    run = run_of(name)
    figures = {
        "metrics": run.metrics,
        "shares": {each.code: each.share_pct for each in run.analysis.findings} if run.analysis else {},
        "saves": {
            each.code: each.saves.ms_per_step for each in run.analysis.findings if each.saves
        } if run.analysis else {},
        "step": run.step,
    }  # fmt: skip
    states = [f"{each.rank} {each.state}" for each in run.ranks.ranks]
    return {**_findings(run.analysis), "said": [run.outcome, *states], "figures": dict(_figures(figures, ""))}


def run_of(name: str) -> Any:
    """What is known of a run a second after the last line of its record."""
    record = read_run(RUNS / name / RECORD_FOLDER)
    return run_summary(record, max(line.at for rank in record.ranks for line in rank.lines) + 1.0)


def _of_boundaries(name: str) -> dict[str, Any]:
    played = {where: boundaries.play(name, on_gpu=where == "gpu") for where in ("host", "gpu")}
    return {"figures": dict(_figures(played, ""))}


_READ: Final = {"traces": _of_trace, "runs": _of_run, "boundaries": _of_boundaries}


def _findings(analysis: Analysis | None) -> dict[str, Any]:
    if analysis is None:
        return {}
    return {"verdict": analysis.verdict, "findings": [finding.code for finding in analysis.findings]}


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
        f"{what}: {before.get(what)} before, {now.get(what)} now"
        for what in ("verdict", "findings", "said")
        if before.get(what) != now.get(what)
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
    parser.add_argument("cases", nargs="*", metavar="CASE", help="such as traces/ddp; all by default")
    parser.add_argument("--keep", action="store_true", help="keep what is read now")
    arguments = parser.parse_args()
    for case in arguments.cases or cases():
        found = differences(case)
        sys.stdout.writelines(f"{case}: {line}\n" for line in found)
        if found and arguments.keep:
            _path(case).parent.mkdir(exist_ok=True, parents=True)
            _path(case).write_text(json.dumps(read(case), indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

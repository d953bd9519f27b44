"""Gives the records below `runs/` the layout of today, once: `python -m tests.golden.convert`.

Layout 1 has sums of times by region, of which part may be estimated. They become those of equal split steps.
"""

import json
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields

from lightning_forge_profiling.names import REGIONS, RESERVED, WAIT_PREFIX, WHOLE, hook_region
from lightning_forge_profiling.schema import RunMachine, RunRanks, RunSettings, RunTiming

RUNS = Path(__file__).parent / "runs"


def converted(line: dict[str, Any]) -> dict[str, Any]:
    """A line of layout 1 in layout 2."""
    if line["line"] == "begin":
        return {**line, "schema_version": 2}
    if line["line"] == "interval":
        return {**line, "counters": _counters(line)}
    if line["line"] == "state":
        run = line["report"]["run"]
        _convert_run(run)
        steady = run["steady"]
        if not run["only_warmup"]:
            line["counters"] = _counters({**steady, "counted": steady["steps"], "steps_us": line.pop("steps_us", {})})
        line["blocks"] = [_counters(block) for block in line.get("blocks", ())]
        _convert_evidence((line["report"].get("analysis") or {}).get("run"))
    return line


def _counters(sums: dict[str, Any]) -> dict[str, Any]:
    steps = sums.pop("counted")
    samples, tokens = sums.pop("samples", None), sums.pop("tokens", None)
    counters = {
        "steps": steps,
        "optimizer_steps": sums.pop("optimizer_steps", 0),
        **({"no_samples": steps} if samples is None else {"samples": samples}),
        **({"no_tokens": steps} if tokens is None else {"tokens": tokens}),
        "steps_us": sums.pop("steps_us", {}),
        "groups": _groups(steps, sums.pop("device_ms")),
    }
    if host_ms := sums.pop("host_ms", None):
        counters["host_groups"] = _groups(steps, host_ms)
    return counters


def _groups(steps: int, ms: dict[str, float]) -> dict[str, Any]:
    if not steps:
        return {}
    times = {name: ms[name] for name in REGIONS if name in ms}
    if WHOLE in ms:
        return {"changing": {"unsplit": steps, "unsplit_ms": ms[WHOLE]}}
    whole = sum(times.values())
    regions = {name: [each, each**2 / steps, each * whole / steps] for name, each in times.items()}
    return {"changing": {"split": steps, "ms": whole, "squares": whole**2 / steps, "regions": regions}}


def _convert_run(run: dict[str, Any]) -> None:
    steady, spread, medians = run["steady"], run["step_ms"], run.pop("region_ms")
    steps = max(steady["steps"], 1)
    spread["mean"] = sum(steady["device_ms"].get(name, 0.0) for name in (*REGIONS, WHOLE)) / steps
    run["typical_mean_ms"] = spread.pop("typical_mean_ms", 0.0)
    if unknown_ms := steady.get("unknown_ms"):
        steady["device_ms"]["other"] -= unknown_ms
    run["regions"] = {
        name: {
            "device_ms": steady["device_ms"].get(name, 0.0) / steps,
            "host_ms": steady["host_ms"].get(name, 0.0) / steps,
            **({f"{key}_ms": value for key, value in medians[name].items()}),
        }
        for name in medians
        if not name.startswith(WAIT_PREFIX)
    }


def _convert_evidence(run: dict[str, Any] | None) -> None:
    if run is not None and run.get("unknown_ms"):
        run["regions"]["other"]["device_ms"] -= run["unknown_ms"]


_RUN_GROUPS: Final[dict[str, type[Struct]]] = {
    "timing": RunTiming,
    "machine": RunMachine,
    "ranks": RunRanks,
    "settings": RunSettings,
}


def in_groups(line: dict[str, Any]) -> dict[str, Any]:
    """A line with the figures of the run's evidence in groups."""
    analysis = line.get("report", {}).get("analysis")
    if analysis is None or not analysis.get("run") or "timing" in analysis["run"]:
        return line
    flat = {"works" if name == "ranks" else name: value for name, value in analysis["run"].items()}
    grouped = {
        group: {field.name: flat.pop(field.name) for field in fields(kind) if field.name in flat}
        for group, kind in _RUN_GROUPS.items()
    }
    analysis = {**analysis, "schema_version": 2, "run": {**grouped, **flat}}
    return {**line, "report": {**line["report"], "analysis": analysis}}


def with_one_timing(line: dict[str, Any]) -> dict[str, Any]:
    """A line whose report and evidence have the same `RunTiming`, where they had a summary each."""
    report = line.get("report", {})
    if "steady" not in report.get("run", {}):
        return line
    old, analysis, on_device = report["run"], report.get("analysis"), report["on_device"]
    steady, evidence = old["steady"], (analysis or {}).get("run") or {}
    known, steps = evidence.get("timing", {}), max(steady.get("steps", 0), 1)
    device_ms, host_ms = steady.get("device_ms", {}), steady.get("host_ms", {})
    in_step_ms = sum(host_ms.get(name, 0.0) for name in (*REGIONS, WHOLE)) + steady.get("unknown_host_ms", 0.0)
    waits = {name.removeprefix(WAIT_PREFIX): name for name in device_ms if name.startswith(WAIT_PREFIX)}
    timing = {
        "on_device": on_device,
        "host_step_ms": in_step_ms / steps,
        "user_regions": [name for name in device_ms if name not in RESERVED and name not in waits.values()],
        "waits_ms": {
            leaf: (host_ms if hook_region(leaf) else device_ms).get(name, 0.0) / steps for leaf, name in waits.items()
        },
        "unknown_ms": steady.get("unknown_ms", 0.0) / steps,
        "overhead_us": (steady.get("timing_us", 0.0) + steady.get("log_entries_us", 0.0)) / steps,
        "all_steps": old["steps"],
        "left_out": {
            "warmup": old["warmup_steps"],
            "recorded": old["recorded_steps"],
            "stalled": old.get("stood_steps", 0),
            "untimed": old["untimed_steps"],
            "stalls": old.get("stood", []),
            "excluded_ms": old["excluded_ms"],
            "recorded_tokens": old.get("recorded_tokens", {}),
        },
        "end_to_end": {"samples": old["samples"], "first_step_s": old["first_step_s"], "wall_s": old["wall_s"]},
        **{name: steady[name] for name in _OF_STEADY if name in steady},
        **{name: old[name] for name in _OF_SUMMARY if name in old},
        **{name: known[name] for name in _OF_EVIDENCE if name in known},
    }
    report = {name: value for name, value in report.items() if name != "on_device"} | {"run": timing}
    if evidence:
        report["analysis"] = {**analysis, "run": {**evidence, "timing": timing}}
    return {**line, "report": report}


_OF_STEADY: Final = (
    *("steps", "split_steps", "atypical", "optimizer_steps", "samples", "tokens", "flops", "unknown_steps"),
)
_OF_SUMMARY: Final = ("step_ms", "regions", "only_warmup", "typical_mean_ms", "gpu_starved_pct")
_OF_EVIDENCE: Final = ("intervals", "slowest", "drift", "window_effect", "worker_restarts")


def with_run_once(line: dict[str, Any]) -> dict[str, Any]:
    """A line in which the run that an analysis is of stands once, with what the report had beside it."""
    report = line.get("report", {})
    if "timing" in report.get("run", {"timing": None}):
        return line
    analysis, gpu, compute = report.get("analysis"), report.pop("gpu", None), report.pop("compute", ())
    evidence = (analysis or {}).get("run") or {}
    run = {
        **evidence,
        "timing": report["run"],
        "machine": {
            **evidence.get("machine", {}),
            "compute": compute,
            **({"no_telemetry": gpu} if isinstance(gpu, str) else {"telemetry": gpu}),
        },
    }
    told = {} if analysis is None else {"analysis": {name: part for name, part in analysis.items() if name != "run"}}
    return {**line, "report": {**report, **told, "run": run}}


def main() -> None:
    """Convert all files that have another layout."""
    for path in RUNS.rglob("*.jsonl"):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        old = lines[0].get("schema_version") == 1
        today = [with_run_once(with_one_timing(in_groups(converted(line) if old else line))) for line in lines]
        if old or today != lines:
            path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in today))


if __name__ == "__main__":
    main()

"""Converts the records below `runs/` from layout 1 to layout 2, once: `python -m tests.golden.convert`."""

import json
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent / "runs"


def converted(line: dict[str, Any]) -> dict[str, Any]:
    """A line of layout 1 in layout 2."""
    if line["line"] == "begin":
        return {**line, "schema_version": 2}
    if line["line"] == "state":
        run = line["report"]["run"]
        steady, spread, medians = run["steady"], run["step_ms"], run.pop("region_ms")
        steps = max(steady["steps"], 1)
        within = ("data", "transfer", "forward", "backward", "optimizer", "other", "step")
        spread["mean"] = sum(steady["device_ms"].get(name, 0.0) for name in within) / steps
        run["typical_mean_ms"] = spread.pop("typical_mean_ms", 0.0)
        run["regions"] = {
            name: {
                "device_ms": steady["device_ms"].get(name, 0.0) / steps,
                "host_ms": steady["host_ms"].get(name, 0.0) / steps,
                **({f"{key}_ms": value for key, value in medians[name].items()}),
            }
            for name in medians
            if not name.startswith("wait/")
        }
    return line


def main() -> None:
    """Convert all files that are of layout 1."""
    for path in RUNS.rglob("*.jsonl"):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        if lines[0].get("schema_version") == 1:
            path.write_text("".join(json.dumps(converted(line), separators=(",", ":")) + "\n" for line in lines))


if __name__ == "__main__":
    main()

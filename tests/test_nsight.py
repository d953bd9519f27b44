"""What NVIDIA Nsight Systems shows of a run, beside our own times of the same steps."""

import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.outcomes import HANGS_S, SCRIPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")]

STEPS = range(15, 35)
REGIONS = ("data", "transfer", "forward", "backward", "optimizer")


def profiled(folder):
    """Train under nsys: the ranges on its timeline, in milliseconds, our times by step and region, and the output."""
    report, database = folder / "run.nsys-rep", folder / "run.sqlite"
    record = ["nsys", "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "-o", report]
    export = ["nsys", "export", "--type", "sqlite", "-o", database, report]
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*record, sys.executable, SCRIPTS / "under_nsight.py", folder],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=True,
    )
    subprocess.run(export, capture_output=True, check=True, timeout=HANGS_S)
    with closing(sqlite3.connect(database)) as timeline:
        texts = "coalesce(text, value) from NVTX_EVENTS left join StringIds on StringIds.id = textId"
        ranges = timeline.execute(f"select start / 1e6, end / 1e6, {texts} where end is not null").fetchall()
    times = {int(step): ms for step, ms in json.loads((folder / "times.json").read_text()).items()}
    return ranges, times, run.stdout + run.stderr


def test_nsight_shows_each_step_and_region_for_as_long_as_we_say(tmp_path):
    ranges, times, printed = profiled(tmp_path)
    assert "Nsight Systems records this process" in printed, "why no window was recorded"
    nsight = {name: [] for name in ("step", *REGIONS)}
    ours = {name: [] for name in nsight}
    for step in STEPS:
        [(start, end)] = [(start, end) for start, end, text in ranges if text == f"step {step}"]
        inside = {
            name: [stop - begin for begin, stop, text in ranges if text == f"forge.{name}" and start <= begin < end]
            for name in REGIONS
        }
        assert all(len(spans) == 1 for spans in inside.values()), inside
        spent = {name: span for name, [span] in inside.items()} | {"step": end - start}
        spent["optimizer"] -= spent["forward"] + spent["backward"]  # which its closure runs
        for name, ms in spent.items():
            nsight[name].append(ms)
            ours[name].append(sum(times[step].values()) if name == "step" else times[step][name])
    medians = {name: (statistics.median(ours[name]), statistics.median(nsight[name])) for name in nsight}
    print(", ".join(f"{name} {mine:.2f} ms, by nsys {theirs:.2f}" for name, (mine, theirs) in medians.items()))
    assert medians["data"][1] > 40, "the loader waits so long"
    for mine, theirs in medians.values():
        assert mine == pytest.approx(theirs, rel=0.02, abs=0.15)

"""Two GPUs with NCCL: DDP and FSDP."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_both_ranks_record_one_window_and_the_rates_add_up(tmp_path, strategy):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/scripts/multi_gpu.py", strategy, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    assert done.stdout.count("Where a step goes") == 1
    traces = sorted(tmp_path.rglob("rank?.trace.json.gz"))
    assert [path.name for path in traces] == ["rank0.trace.json.gz", "rank1.trace.json.gz"]
    assert traces[0].parent == traces[1].parent
    assert len(list((traces[0].parent / "tensorboard").glob("*.pt.trace.json.gz"))) == 2
    for rank, path in enumerate(traces):
        text = gzip.decompress(path.read_bytes()).decode()
        trace = json.loads(text)
        assert f'"rank": {rank}' in text
        assert trace["distributedInfo"]["world_size"] == 2
        names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert {"ProfilerStep#10", "ProfilerStep#11", "ProfilerStep#12", "forge.backward"} <= names
        assert any("nccl" in event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel")
    summary = json.loads(done.stdout.split("SUMMARY", 1)[1])
    assert summary["throughput/samples_per_sec"] == pytest.approx(2 * summary["throughput/device/samples_per_sec"])
    regions = ("data", "transfer", "forward", "backward", "optimizer", "other")
    assert sum(summary[f"time/{name}_ms"] for name in regions) == pytest.approx(summary["time/step_ms"])

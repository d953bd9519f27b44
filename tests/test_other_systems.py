"""Without what Linux alone has, or Unix, a fit is profiled all the same: what is lacking is missing in what is said."""

import json
import re

import pytest

from lightning_forge_profiling.cli.main import main
from tests.outcomes import script


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("system", ["macos", "windows"])
def test_a_fit_without_proc_fork_and_signals_has_verdict_trace_and_record(tmp_path, capsys, system, workers):
    done = script("other_system.py", system, workers, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    found = json.loads(re.search(r"^FOUND (.*)$", done.stdout, re.MULTILINE)[1])
    if not workers:
        assert found["codes"][0] == "input-bound"
        assert "busy time.thread_time()" in found["lines"], "seen by a thread"
    assert "cpu-starved" not in found["codes"], "nothing is known of waits for a core"
    assert len([*tmp_path.rglob("rank0.trace.json.gz")]) == 1
    [record] = tmp_path.rglob("forge_record")
    assert main(["show", str(record)]) == 0
    assert "finished" in capsys.readouterr().out

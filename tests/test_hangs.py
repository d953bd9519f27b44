"""Where ranks stand: planted hangs of real processes, sentences, and a day without any."""

import bdb
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.hangs import find_hang
from lightning_forge_profiling.diagnosis.rank_status import ranks_status
from lightning_forge_profiling.ranks import standing
from lightning_forge_profiling.ranks.flight_recorder import collectives_of
from lightning_forge_profiling.ranks.stacks import called, innermost, lines_of, parse_dump
from lightning_forge_profiling.ranks.standing import Look, Stillness, patient_part
from lightning_forge_profiling.record.pulses import read_heard
from lightning_forge_profiling.record.reader import read_run, records_at
from lightning_forge_profiling.results.pulse import Heard, Pulse, SilentRank, Standing
from tests.models import Classifier, loader, quiet_trainer
from tests.outcomes import HANGS_S, SCRIPTS
from tests.ports import free_port

WITHIN_S = 60
"""Within which a hang is to be known."""

# -- planted hangs ----------------------------------------------------------------------------------------------------

SHORT = "6"
PLANTED = {  # kind and number of ranks: the seconds that are a hang, the rank, and what is said of it
    ("asked", 4): ("real", 1, r"stands in step \d+ since \d+ s: asked at hanging\.py:\d+, in input; ranks 0, 2, 3 wait for it in all_reduce"),
    ("held_lock", 2): ("real", 1, r"held_lock at hanging\.py:\d+, in a call that holds Python's interpreter lock; rank 0 waits"),
    ("skipped", 4): (SHORT, 1, r"ranks 0, 2, 3 wait in all_reduce #1, which rank 1 never entered; rank 1 waits in all_reduce #\d+"),
    ("worker", 2): (SHORT, 1, r"loader worker 0 \(pid \d+\): Deadlocked|__getitem__ at hanging\.py:\d+; rank 0 waits for it"),
    ("stopped", 2): (SHORT, 1, r"rank 1 is stopped, as by SIGSTOP, since .*pid \d+.*; rank 0 waits for it in all_reduce"),
    ("first_stopped", 2): (SHORT, 0, r"rank 0 is stopped, as by SIGSTOP, since .*pid \d+.*; rank 1 waits for it in all_reduce"),
    ("full_pipe", 2): (SHORT, 1, r"full_pipe at hanging\.py:\d+, in write; rank 0 waits for it in all_reduce"),
    ("blocking_read", 2): (SHORT, 1, r"blocking_read at hanging\.py:\d+, in read_text; rank 0 waits for it in all_reduce"),
    ("exited", 2): (SHORT, 1, r"rank 1 is gone since \d+ s \(host .*, pid \d+, last heard in step \d+\)"),
    ("first_exited", 2): (SHORT, 0, r"rank 0 is gone since \d+ s \(host .*, pid \d+, last heard in step \d+\)"),
}  # fmt: skip


@contextmanager
def ranks_of(folder, kind, ranks, limit):
    """The processes of a run that will hang, with an open standard input, in a session of their own."""
    folder.mkdir()
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    command = [sys.executable, SCRIPTS / "hanging.py", folder, str(ranks), kind, limit]
    with (folder / "output").open("w") as output:
        processes = [
            subprocess.Popen(
                command, env={**shared, "LOCAL_RANK": str(rank)}, cwd=folder, start_new_session=True,
                stdin=subprocess.PIPE, stdout=output, stderr=output,
            )
            for rank in range(ranks)
        ]  # fmt: skip
    try:
        yield
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.communicate()


def hang_of(folder, ranks):
    """The hang that the files of a run tell of; None before there are any."""
    first = next(folder.rglob("rank0.jsonl"), None)
    begin = first.read_text().partition("\n")[0] if first is not None else ""
    if not begin:
        return None
    heard = read_heard(first.parent, json.loads(begin)["run"])
    return ranks_status(heard, ranks, time.time()).hang


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.timeout(2 * HANGS_S)
def test_planted_hangs_are_known_by_rank_and_place_within_a_minute(tmp_path):
    found, last, began = {}, {}, time.monotonic()
    with ExitStack() as running:
        for (kind, ranks), (limit, _, _) in PLANTED.items():
            running.enter_context(ranks_of(tmp_path / kind, kind, ranks, limit))
        while len(found) < len(PLANTED) and time.monotonic() < began + HANGS_S:
            time.sleep(0.5)
            for (kind, ranks), (_, rank, where) in PLANTED.items():
                hang = None if kind in found else hang_of(tmp_path / kind, ranks)
                if hang is not None:
                    last[kind] = hang
                    if hang.rank == rank and re.search(where, hang.where):
                        found[kind] = time.time() - (tmp_path / kind / "hangs").stat().st_mtime
    late = {kind: last.get(kind) for kind, _ in PLANTED if found.get(kind, WITHIN_S) >= WITHIN_S}
    assert late == {}, found
    print(found)
    record = next((tmp_path / "asked").rglob("rank0.jsonl")).parent
    assert "asked" in (record / "rank1.stacks.txt").read_text()
    [run] = [read_run(path) for path in records_at(tmp_path / "asked")]
    said = [event.text for event in run.ranks[0].events if event.kind == "hang"]
    assert re.search(PLANTED["asked", 4][2], said[-1])

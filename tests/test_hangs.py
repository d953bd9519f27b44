"""Where ranks stand: planted hangs of real processes, sentences, and a day without any."""

import bdb
import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.rank_status import find_hang, ranks_status
from lightning_forge_profiling.host import ThreadCounts, thread_counts, wait_channel
from lightning_forge_profiling.ranks import stalls
from lightning_forge_profiling.ranks.stacks import StacksFile, called, innermost, lines_of, parse_dump
from lightning_forge_profiling.ranks.stalls import Look, Stillness, collectives_of, patient_part
from lightning_forge_profiling.record.files import decode_pulse, encode_message, read_heard
from lightning_forge_profiling.record.reader import read_run, records_at
from lightning_forge_profiling.report.live_view import print_frame
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.run import step_timer
from lightning_forge_profiling.schema import LastPulse, Pulse, SilentRank, Stall
from tests.models import Classifier, Samples, loader, quiet_trainer
from tests.outcomes import HANGS_S, SCRIPTS, summary_of
from tests.ports import free_port

WITHIN_S = 60
PAUSE_S, STOP_S = 6, 3
"""Within which a hang is to be known."""

# -- planted hangs ----------------------------------------------------------------------------------------------------

SHORT = "6"
LOST = r"for \d+ s \(host \S+, pid \d+, last heard in step \d+\)"
PLANTED = {  # kind and number of ranks: the seconds that are a hang, the rank, and what is said of it
    ("asked", 4): ("real", 1, r"stalled in step \d+ .*: asked at hanging\.py:\d+, in input; ranks 0, 2, 3 wait for it"),
    ("held_lock", 2): ("real", 1, r"held_lock at \S+:\d+, in a call that holds Python's interpreter lock; rank"),
    ("skipped", 4): (SHORT, 1, r"ranks 0, 2, 3 wait in all_reduce #1, which rank 1 never entered; rank 1 waits in"),
    ("worker", 2): (SHORT, 1, r"loader worker 0 \(pid \d+\): \S*__getitem__ at hanging\.py:\d+; rank 0 waits for it"),
    ("stopped", 2): (SHORT, 1, rf"rank 1 has been stopped, as by SIGSTOP, {LOST}; rank 0 waits for it in"),
    ("first_stopped", 2): (SHORT, 0, rf"rank 0 has been stopped, as by SIGSTOP, {LOST}; rank 1 waits for it in"),
    ("full_pipe", 2): (SHORT, 1, r"full_pipe at hanging\.py:\d+, in write; rank 0 waits for it in all_reduce"),
    ("blocking_read", 2): (SHORT, 1, r"blocking_read at hanging\.py:\d+, in read_text; rank 0 waits for it"),
    ("exited", 2): (SHORT, 1, rf"rank 1 has been gone {LOST}"),
    ("first_exited", 2): (SHORT, 0, rf"rank 0 has been gone {LOST}"),
}  # fmt: skip

NCCL = {  # of two ranks; the other one waits in whatever it does last
    kind: (rank, where.replace("ranks 0, 2, 3 wait", "rank 0 waits").replace("in all_reduce", r"in \w+"))
    for (kind, _), (_, rank, where) in PLANTED.items()
} | {
    "skipped": (
        None,
        r"rank 1 waits in \w+ #\d+, which rank 0 never entered; .* all_reduce, skipped at hanging\.py:\d+",
    )
}


@contextmanager
def ranks_of(folder, kind, ranks, limit, device="cpu"):
    """The processes of a run that will hang, with an open standard input, in a session of their own."""
    folder.mkdir()
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    command = [sys.executable, SCRIPTS / "hanging.py", folder, str(ranks), kind, limit, device]
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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def hang_of(folder, ranks):
    """The hang that the files of a run tell of; None before there are any."""
    first = next(folder.rglob("rank0.jsonl"), None)
    begin = first.read_text().partition("\n")[0] if first is not None else ""
    if not begin:
        return None
    heard = read_heard(first.parent, json.loads(begin)["run"])
    return ranks_status(heard, ranks, time.time()).hang


def late_or_wrong(root, planted, meanwhile=lambda: None):
    """By kind, after how many seconds a hang was known by rank and place, if late, and what was said of it last."""
    found, last, began = {}, {}, time.monotonic()
    while len(found) < len(planted) and time.monotonic() < began + HANGS_S:
        time.sleep(0.5)
        meanwhile()
        for kind, (ranks, rank, where) in planted.items():
            hang = None if kind in found else hang_of(root / kind, ranks)
            if hang is not None:
                last[kind] = hang
                if hang.rank == rank and re.search(where, hang.where):
                    found[kind] = time.time() - (root / kind / "hangs").stat().st_mtime
    return {kind: (found.get(kind), last.get(kind)) for kind in planted if found.get(kind, WITHIN_S) >= WITHIN_S}


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.timeout(2 * HANGS_S)
def test_planted_hangs_are_known_by_rank_and_place_within_a_minute(tmp_path):
    def evaluates():
        assert hang_of(tmp_path / "evaluates", 2) is None  # its rank 0 waits for 15 s

    with ExitStack() as running:
        for (kind, ranks), (limit, _, _) in PLANTED.items():
            running.enter_context(ranks_of(tmp_path / kind, kind, ranks, limit))
        running.enter_context(ranks_of(tmp_path / "evaluates", "evaluates", 2, SHORT))
        planted = {kind: (ranks, rank, where) for (kind, ranks), (_, rank, where) in PLANTED.items()}
        assert late_or_wrong(tmp_path, planted, meanwhile=evaluates) == {}
    [waited] = [read_run(path) for path in records_at(tmp_path / "evaluates")]
    ledger = waited.ranks[0].state.report.analysis.run.ledger
    assert ledger.parts.get("hang", 0.0) == 0, "who waits for a rank that works is in no hang"
    record = next((tmp_path / "asked").rglob("rank0.jsonl")).parent
    assert "asked" in (record / "rank1.stacks.txt").read_text()
    by_neighbour = next((tmp_path / "held_lock").rglob("rank1.stacks.txt")).read_text()
    assert re.search(r"rank 1 runs no Python\n[^T]*(.*\n)*.* in held_lock\n", by_neighbour)
    [run] = [read_run(path) for path in records_at(tmp_path / "asked")]
    said = [event.text for event in run.ranks[0].events if event.kind == "hang"]
    assert re.search(PLANTED["asked", 4][2], said[-1])


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.timeout(2 * HANGS_S)
def test_planted_hangs_under_nccl_are_known_by_rank_and_place_within_a_minute(tmp_path):
    """There the other ranks go on until they read a value, for which their GPU would have to finish its collective."""
    with ExitStack() as running:
        for kind in NCCL:
            running.enter_context(ranks_of(tmp_path / kind, kind, 2, SHORT, "gpu"))
        assert late_or_wrong(tmp_path, {kind: (2, *expected) for kind, expected in NCCL.items()}) == {}


@pytest.mark.slow
@pytest.mark.real_time
def test_a_hang_that_is_over_is_one_event(tmp_path):
    with ranks_of(tmp_path / "run", "pauses", 2, SHORT):
        said = until(lambda: summary_of(tmp_path), "finished ") if until_recorded(tmp_path) else ""
    where = (
        r"rank 1 has been stalled in step \d+: pauses at hanging\.py:\d+, in sleep; rank 0 waits for it in all_reduce"
    )
    [event] = re.findall(r"\bhang[,:] .*", said)
    assert re.fullmatch(rf"hang, \d+\.\d s: {where}; the ranks move again", event)


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_first_fetch_is_said_to_be_there(tmp_path):
    with ranks_of(tmp_path / "run", "first_fetch", 2, SHORT):
        where = r"where +no step for \d+ s: .*rank 1 in data_loader, FirstFetch\.__getitem__ at hanging\.py:\d+"
        assert until_recorded(tmp_path)
        said = until(lambda: frame_of(records_at(tmp_path)[0]), where)
    assert re.search(where, said)
    assert "hang " not in said


def until(text, expected):
    """The text once it has what is expected, or as it is when that takes too long."""
    deadline = time.monotonic() + HANGS_S
    while not re.search(expected, said := text()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return said


def until_recorded(folder):
    return until(lambda: " ".join(path.name for path in folder.rglob("rank*.jsonl") if path.stat().st_size), "rank")


def frame_of(path):
    """What `watch` shows of a record."""
    text = StringIO()
    print_frame(read_run(path), "run", time.time(), Screen(text, width=200))
    return text.getvalue()


def ip(*command):
    subprocess.run(["ip", *command], check=True)


def has_hosts():
    """Whether this machine can be two hosts: with networks of their own and, under one path, folders of their own."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return not subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode


@contextmanager
def two_hosts(folder):
    """A rank on each of two hosts, whose folders are `0` and `1`; yields what cuts the network between them."""
    names = [f"forge-{os.getpid()}-{host}" for host in range(2)]
    (folder / "run").mkdir()
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{1 + host}/24", "dev", f"cable{host}")
            for link in ("lo", f"cable{host}"):
                ip("-n", name, "link", "set", link, "up")
            own = folder / str(host)
            own.mkdir()
            shared = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "NODES": "2", "LOCAL_RANK": "0"}
            train = [sys.executable, str(SCRIPTS / "hanging.py"), str(folder / "run"), "1", "cut_off", SHORT, "cpu"]
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"',
                 own, folder / "run", *train],
                env={**os.environ, **shared, "NODE_RANK": str(host), "GLOO_SOCKET_IFNAME": f"cable{host}"},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield lambda: ip("-n", names[1], "link", "set", "cable1", "down")


@pytest.mark.slow
@pytest.mark.skipif(not has_hosts(), reason="needs root, and iproute2")
def test_a_host_that_is_cut_off_says_where_its_ranks_wait(tmp_path):
    with two_hosts(tmp_path) as cut:
        assert until(lambda: " ".join(path.name for path in (tmp_path / "1").iterdir()), "hangs")
        cut()
        where = r"hang +rank 1 has waited in (all_reduce|broadcast) for \d+ s; rank 0 not heard"
        assert re.search(where, until(lambda: summary_of(tmp_path / "1"), where))
        assert re.search(where, frame_of(records_at(tmp_path / "1")[0]))


# -- a fit in this process --------------------------------------------------------------------------------------------


class Pauses(Classifier):
    """Waits once, in a place of its own."""

    def __init__(self, pause):
        super().__init__()
        self.pause = pause

    def once(self, place):
        if self.pause.partition(" ")[0] == place and self.seen >= 3:
            called, self.pause = self.pause.partition(" ")[2], ""
            {"wait": wait, "compute": compute, "debug": debug, "gather": gather, "stop": stop, "hold": hold}[called]()

    def training_step(self, batch):
        time.sleep(0.01)
        self.once("step")
        return super().training_step(batch)

    def on_train_batch_end(self, *_):
        self.once("hook")

    def validation_step(self, batch):
        self.once("validation")

    def on_train_epoch_end(self):
        self.once("epoch")


def wait():
    time.sleep(PAUSE_S)


def compute():
    hashlib.pbkdf2_hmac("sha512", b"", b"", 4_000_000)  # without the interpreter lock


def stop():
    """The process is stopped until a child lets it go on."""
    with subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def hold():
    """A call in C that holds the interpreter lock, and waits."""
    ctypes.PyDLL(None).sleep(STOP_S)


def gather():
    """As NCCL does where another rank does not join a new group: it waits within PyTorch, and keeps a core busy."""
    torch_distributed = {}
    exec(compile("def all_gather(c): c()", torch.distributed.distributed_c10d.__file__, "exec"), torch_distributed)  # noqa: S102
    torch_distributed["all_gather"](partial(hashlib.pbkdf2_hmac, "sha512", b"", b"", 25_000_000))


def debug():
    bdb.Bdb().runcall(wait)


def handled():
    """The real-time signals of this process that have a handler."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text())[1]
    return int(caught, 16) >> (signal.SIGRTMIN - 1)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("pause", "hangs"),
    [
        ("step wait", True),
        ("step compute", False),
        ("step debug", False),
        ("validation wait", False),
        ("epoch wait", False),
        ("none", False),
    ],
)
def test_a_stalled_step_is_on_record_and_a_slow_part_is_not(tmp_path, monkeypatch, capfd, pause, hangs):
    monkeypatch.setattr(stalls, "LEAST_S", 2.0)
    before = handled()
    trainer = quiet_trainer(ThroughputCallback(warmup_steps=1), default_root_dir=tmp_path, limit_val_batches=1)
    trainer.fit(Pauses(pause), loader(300 * 4), loader())
    [path] = records_at(tmp_path)
    said = [event.text for event in read_run(path).ranks[0].events if event.kind == "hang"]
    if hangs:
        where = r"rank 0 has been stalled in step \d+{}: wait at \S*test_hangs.py:\d+, in sleep"
        assert re.fullmatch(where.format(r" for \d+ s"), said[0])
        assert re.fullmatch(where.format("") + "; the ranks move again", said[1])
        assert "in wait" in (path / "rank0.stacks.txt").read_text()
        assert "1 step in which training stood still" in summary_of(tmp_path), "a hang is no step's time"
        note = r"note step \d+ took (\d+)\.\d s: rank 0 has been stalled in step \d+ for \d+ s: wait at"
        printed = " ".join(capfd.readouterr().out.split())  # it is wrapped
        assert int(re.search(note, printed)[1]) == pytest.approx(PAUSE_S, abs=2)
        ledger = read_run(path).ranks[0].state.report.analysis.run.ledger
        assert ledger.parts["steps"] < ledger.wall_s - PAUSE_S, "it was no training"
    else:
        assert said == []
        assert list(path.glob("*.stacks.txt")) == []
    assert handled() == before == 0


@pytest.mark.slow
@pytest.mark.real_time
def test_a_rank_that_waits_in_a_collective_and_keeps_a_core_busy_is_stalled(tmp_path, monkeypatch):
    monkeypatch.setattr(stalls, "LEAST_S", 2.0)
    trainer = quiet_trainer(ThroughputCallback(warmup_steps=1), default_root_dir=tmp_path, limit_val_batches=1)
    trainer.fit(Pauses("step gather"), loader(300 * 4), loader())
    [path] = records_at(tmp_path)
    said = [event.text for event in read_run(path).ranks[0].events if event.kind == "hang"]
    assert re.fullmatch(r"rank 0 waits in \w+", said[0])


class Fetched(Samples):
    def __init__(self, come_to):
        super().__init__()
        self.come_to = come_to

    def __getitem__(self, i):
        self.come_to("fetch")
        return super().__getitem__(i)


class Passes(Classifier):
    """Tells of the phases that it comes to."""

    def __init__(self, come_to):
        super().__init__()
        self.come_to = come_to

    def validation_step(self, batch):
        self.come_to("validation")

    def on_train_epoch_end(self):
        self.come_to("epoch end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "part"),
    [("fetch", "data_loader"), ("validation", "validation/step"), ("epoch end", "module/on_train_epoch_end")],
)
def test_watch_says_where_a_rank_is_and_since_when_in_any_phase(tmp_path, monkeypatch, phase, part):
    monkeypatch.setattr(stalls, "LEAST_S", 1.0)
    deadline, shown, frame = time.monotonic() + HANGS_S, [], ""

    def come_to(other):
        nonlocal frame
        while other == phase and not shown and time.monotonic() < deadline:
            time.sleep(0.1)
            frame = "".join(frame_of(path) for path in tmp_path.rglob("forge_record") if any(path.iterdir()))
            shown.extend(re.findall(r"where +no step for \d+ s: rank 0 in (\S+), \S+ at \S+:\d+\n", frame))

    batches = torch.utils.data.DataLoader(Fetched(come_to), 4)
    trainer = quiet_trainer(ThroughputCallback(warmup_steps=1), default_root_dir=tmp_path, num_sanity_val_steps=0)
    trainer.fit(Passes(come_to), batches, loader(4))
    assert shown == [part], frame
    assert "where " not in frame_of(records_at(tmp_path)[0])


def pauses(folder, pause):
    """A fit that pauses once after some steps: its ledger, and what `summary` prints."""
    trainer = quiet_trainer(ThroughputCallback(warmup_steps=1), default_root_dir=folder, limit_val_batches=1)
    trainer.fit(Pauses(pause), loader(100 * 4), loader())
    [path] = records_at(folder)
    return read_run(path).ranks[0].state.report.analysis.run.ledger, summary_of(folder)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("place", ["step", "hook", "validation"])
def test_the_time_for_which_the_process_was_stopped_is_a_hang_and_its_step_does_not_count(tmp_path, capfd, place):
    ledger, summary = pauses(tmp_path, f"{place} stop")
    assert re.search(r"note +step \d+ took \d+\.\d s: the process was stopped", capfd.readouterr().out)
    assert "the process was stopped" in summary
    assert place == "validation" or "1 step in which training stood still" in summary
    assert ledger.parts["hang"] == pytest.approx(STOP_S, abs=1.5)
    others = {part: s for part, s in ledger.parts.items() if not part.startswith("startup/") and part != "hang"}
    assert max(others.values()) < ledger.wall_s - STOP_S
    assert ledger.parts.get("module/on_train_batch_end", 0.0) < STOP_S / 2
    assert ledger.wholes.get("validation", 0.0) < STOP_S / 2


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("why", ["held lock", "busy machine", "unknown"])
def test_a_long_step_of_a_process_that_was_not_stopped_is_no_hang(tmp_path, monkeypatch, why):
    used = {"busy machine": lambda *_: ThreadCounts(time.perf_counter(), 0), "unknown": lambda *_: None}
    monkeypatch.setattr(step_timer, "thread_counts", used.get(why, thread_counts))
    ledger, summary = pauses(tmp_path, "step hold" if why == "held lock" else "step stop")
    assert "hang" not in ledger.parts
    assert "the process was stopped" not in summary
    assert "stood still" not in summary


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("LEAST_S", r"rank 0 has been stalled in step \d+ for \d+ s:"),
        ("_LEAST_AT_END_S", r"training stood still in .*Hangs.once at"),
    ],
    ids=["after the limit", "before it"],
)
def test_a_fit_that_ends_in_a_hang_has_its_time_and_place_and_no_advice(tmp_path, monkeypatch, capfd, limit, why):
    monkeypatch.setattr(stalls, limit, 2.0)
    interrupts = threading.Timer(PAUSE_S, os.kill, (os.getpid(), signal.SIGINT))

    class Hangs(Pauses):
        def once(self, place):
            if self.seen == 40 and place == "step":
                interrupts.start()
                time.sleep(60)

    callback = ThroughputCallback(warmup_steps=1, log_every_n_steps=2)
    trainer = quiet_trainer(callback, default_root_dir=tmp_path, limit_val_batches=0)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Hangs("step"), loader(300 * 4))
    out, ledger = " ".join(capfd.readouterr().out.split()), callback.ledger()  # lines are wrapped
    assert re.search(r"verdict No verdict: training stood still for \d\.\d s of the fit's \d\.\d s", out)
    assert re.search(r"note step \d+ took \d\.\d s: " + why, out)
    assert "try " not in out
    assert ledger.parts["hang"] == pytest.approx(PAUSE_S, abs=1)
    assert ledger.parts["steps"] < PAUSE_S / 2
    assert re.search(r"whole fit +hang \d\d %", summary_of(tmp_path))


@pytest.mark.slow
@pytest.mark.real_time
def test_the_summary_of_a_run_that_was_killed_in_a_hang_has_its_time_and_no_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(stalls, "LEAST_S", 2.0)

    class Hangs(Pauses):
        def once(self, place):
            if self.seen == 40 and place == "step":
                time.sleep(PAUSE_S)  # what is on the disk by then is what a kill leaves
                shutil.copytree(records_at(tmp_path)[0], tmp_path / "killed" / "forge_record")

    callback = ThroughputCallback(warmup_steps=1, log_every_n_steps=2)
    trainer = quiet_trainer(
        callback, default_root_dir=tmp_path / "run", limit_val_batches=0, logger=CSVLogger(tmp_path)
    )
    trainer.fit(Hangs("step"), loader(60 * 4))
    summary = summary_of(tmp_path / "killed")
    assert re.search(r"hang +rank 0 has been stalled in step \d+ for \d s: \S+once at", summary)
    assert re.search(r"verdict +No verdict: training stood still for \d\.\d s of the fit's", summary)
    assert re.search(r"whole fit +hang \d\d %", summary)
    assert "of the fit was training" not in summary


# -- a simulated day --------------------------------------------------------------------------------------------------


class Day:
    """Looks once a second at a run that is made up."""

    def __init__(self):
        self.stillness, self.now, self.asleep, self.step, self.stack, self.used = Stillness(), 0.0, 0.0, 0, 0, 0.0
        self.alarms = []

    def look(self, part="", seconds=1.0, **counts):
        self.now += seconds
        self.stillness.add(
            Look(
                at_s=self.now, asleep_s=self.asleep, step=self.step, part=part, changes=self.stack, used_s=self.used,
                **counts,
            )
        )  # fmt: skip
        if self.stillness.still_s >= self.stillness.limit_s:
            self.alarms.append((self.now, part))

    def steps(self, seconds, step_s=0.1):
        """Steps that end, in each of which the thread waits for the GPU without a core."""
        until, done = self.now + seconds, self.now
        while self.now < until:
            if self.now + 1 - done >= step_s:
                ended = int((self.now + 1 - done) / step_s)
                self.step, done = self.step + ended, done + ended * step_s
            self.look()

    def still(self, seconds, part="", **counts):
        """Nothing moves."""
        for _ in range(int(seconds)):
            self.look(part, **counts)

    def alive(self, seconds, part=""):
        """The stack is another one now and then."""
        for second in range(int(seconds)):
            self.stack += second % 20 == 0
            self.look(part)

    def computing(self, seconds, part=""):
        """One long call in C."""
        for _ in range(int(seconds)):
            self.used += 0.9
            self.look(part)


def test_a_day_of_healthy_events_has_no_alarm():
    day = Day()
    day.still(500, "startup/first_step")
    day.steps(600)
    for hour in range(22):
        day.steps(1200, step_s=0.1 * (1 + hour))
        day.still(25)  # a slow loader
        day.steps(120)
        day.alive(1500, "validation")
        day.still(500 + 20 * hour, "checkpoint")  # a slow disk
        day.steps(120)
        day.still(400, "compile")
        day.computing(900)
        day.look(seconds=7200.0)  # the process was stopped
        day.still(20)
        day.asleep += 7200.0  # the machine was suspended
        day.still(25)
        day.steps(60)
        for _ in range(60):
            day.look(bytes=int(day.now) << 21)  # a file is read in one call
        day.still(20)
        day.steps(10)
    assert day.now > 86_400
    assert day.alarms == []


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1, 9), max_size=20))
def test_steps_that_take_up_to_nine_times_as_long_as_usual_are_no_alarm(factors):
    day = Day()
    day.still(10, "startup/first_step")
    day.steps(100, step_s=5)
    for factor in factors:
        day.steps(2 * 5 * factor, step_s=5 * factor)
    assert day.alarms == []


def test_steps_of_two_minutes_are_no_alarm_if_the_first_one_took_as_long():
    day = Day()
    day.still(125, "startup/first_step")
    day.step += 1
    day.steps(3600, step_s=120)
    assert day.alarms == []


@pytest.mark.parametrize(("part", "limit_s"), [("", 30), ("validation", 600), ("checkpoint", 600)])
def test_a_hang_is_an_alarm_once_the_limit_of_its_part_is_over(part, limit_s):
    day = Day()
    day.steps(600)
    day.alive(101, part)
    day.still(limit_s - 2, part)
    assert day.alarms == []
    day.still(5, part)
    assert day.alarms


def test_what_took_long_once_may_take_as_long_again():
    day = Day()
    day.steps(100)
    day.still(45)
    day.steps(10)
    before = len(day.alarms)
    day.still(40)
    assert len(day.alarms) == before > 0


def test_a_hook_of_a_step_is_part_of_it_and_an_epochs_end_is_not():
    assert patient_part(("steps", "callback/EMA.on_train_batch_end")) == ""
    assert patient_part(("steps", "callback/EMA.on_train_epoch_end")) == "callback/EMA.on_train_epoch_end"
    assert patient_part(("steps", "validation", "callback/EMA.on_train_batch_end")) == "validation"
    assert patient_part(())


# -- sentences --------------------------------------------------------------------------------------------------------

FOR_IT = "for it in all_reduce"
HELD = "a call that holds Python's interpreter lock"
HEARD = "last heard in step 4711"
MOVES, WAITS = None, Stall(seconds=60, call="all_reduce", waits=True)
SETS_UP = Stall(seconds=60, place="f at a.py:3", call="all_reduce", waits=True, entered={"0": 4710})
STANDS = Stall(seconds=63, place="collate at data.py:31", call="get")


def entered(number, last, *, group="0", name="all_reduce", seconds=60.0, shape="", **others):
    """Waits in a collective, having entered these of the groups."""
    return Stall(
        seconds=seconds, call="wait", waits=True, collective=name, number=number, group=group, shape=shape,
        entered={"0": last, **others},
    )  # fmt: skip


def heard_of(*states, silent=(), ended=(), ages_s=()):
    """What is heard of ranks that stand as given; `silent` is what the last one says of others."""
    heard = {}
    for rank, state in enumerate(states):
        pulse = Pulse(
            run="r", rank=rank, world_size=len(states), host="node7", pid=1000 + rank, number=9, at=100.0, step=4711,
            stall=state, ended=dict(ended).get(rank, ""), silent=tuple(silent) if rank == len(states) - 1 else (),
        )  # fmt: skip
        heard[rank] = LastPulse(pulse=pulse, at=100.0 - dict(ages_s).get(rank, 0))
    return heard


def hang(*states, **more):
    found = find_hang(heard_of(*states, **more), len(states), 100.0)
    return None if found is None else (found.rank, found.where)


def silence(rank, process, **more):
    return SilentRank(rank=rank, pid=1000 + rank, process=process, seconds=42, **more)


@pytest.mark.parametrize(
    ("states", "more", "expected"),
    [
        (
            (WAITS, STANDS, WAITS, WAITS),
            {},
            (
                1,
                (
                    "rank 1 has been stalled in step 4711 for 63 s: collate at data.py:31, in get; "
                    f"ranks 0, 2, 3 wait {FOR_IT}"
                ),
            ),
        ),
        ((MOVES, STANDS), {}, (1, "rank 1 has been stalled in step 4711 for 63 s: collate at data.py:31, in get")),
        ((WAITS, MOVES), {}, None),  # such as a long evaluation on rank 1 alone
        ((MOVES, MOVES), {}, None),
        (
            (entered(4711, 4711), entered(4711, 4711), entered(4700, 4700, name="broadcast")),
            {},
            (
                2,
                "ranks 0, 1 wait in all_reduce #4711, which rank 2 never entered; rank 2 waits in broadcast #4700",
            ),
        ),
        (
            (entered(5, 9, group="1", seconds=61.0, **{"1": 5}), entered(10, 10, **{"1": 4})),
            {},
            # neither entered what the other waits in: either may be the odd one
            (None, "rank 0 waits in all_reduce #5, which rank 1 never entered; rank 1 waits in all_reduce #10"),
        ),
        (
            (SETS_UP, entered(4711, 4711)),
            {},
            # rank 0 sets up a new group, of which there is no entry yet
            (
                None,
                "rank 1 waits in all_reduce #4711, which rank 0 never entered; rank 0 waits in all_reduce, f at a.py:3",
            ),
        ),
        (
            (entered(7, 7, shape="8"), entered(7, 7, shape="8"), entered(7, 7, name="barrier")),
            {},
            (2, "ranks 0, 1 wait in all_reduce #7 (8), where rank 2 entered barrier #7"),
        ),
        ((entered(7, 7), entered(7, 7)), {}, (None, "all ranks wait in all_reduce #7")),
        (
            (WAITS, WAITS, MOVES),
            {"ended": {2: "finished"}},
            (2, f"rank 2 has finished; ranks 0, 1 wait {FOR_IT}"),
        ),
        (
            (WAITS, MOVES, WAITS),
            {"silent": [silence(1, "gone")]},
            (
                1,
                f"rank 1 has been gone for 42 s (host node7, pid 1001, {HEARD}); ranks 0, 2 wait {FOR_IT}",
            ),
        ),
        ((MOVES, MOVES, MOVES), {"silent": [silence(1, "gone")]}, None),  # they may have ended well
        (
            (MOVES, MOVES, WAITS),
            {"silent": [silence(0, "stopped")], "ages_s": {0: 50}},
            (
                0,
                (
                    f"rank 0 has been stopped, as by SIGSTOP, for 50 s (host node7, pid 1000, {HEARD}); "
                    f"rank 2 waits {FOR_IT}"
                ),
            ),
        ),
        ((MOVES, WAITS), {"silent": [silence(0, "stopped")], "ages_s": {0: 3}}, None),  # it has been heard since
        (
            (WAITS, MOVES, WAITS),
            {"silent": [silence(1, "blocked", place="f at a.py:3")], "ages_s": {1: 42}},
            (
                1,
                (
                    f"rank 1, last heard in step 4711, has been stalled for 42 s: f at a.py:3, in {HELD}; "
                    f"ranks 0, 2 wait {FOR_IT}"
                ),
            ),
        ),
        ((MOVES, WAITS), {"silent": [silence(0, "running")], "ages_s": {0: 42}}, None),
        (
            (WAITS, MOVES),
            {"ages_s": {1: 42}},
            (1, f"no sign of life from rank 1 for 42 s (host node7, pid 1001); rank 0 waits {FOR_IT}"),
        ),
        ((MOVES, MOVES), {"ages_s": {1: 42}}, None),
        (
            (STANDS, STANDS),
            {},
            (None, "rank 0 has been stalled in step 4711 for 63 s: collate at data.py:31, in get; so has rank 1"),
        ),
    ],
)
def test_the_rank_that_others_wait_for_is_named_if_it_does_not_move(states, more, expected):
    assert hang(*states, **more) == expected


def test_a_rank_that_was_never_heard_is_named_where_all_others_wait():
    heard = heard_of(WAITS, WAITS)
    assert find_hang(heard, 3, 100.0).where == "rank 2 has not begun to train; ranks 0, 1 wait for it in all_reduce"
    several = find_hang(heard, 4, 100.0)
    assert several.where == "ranks 2, 3 have not begun to train; ranks 0, 1 wait for them in all_reduce"
    alone = find_hang({1: heard[1]}, 3, 100.0)  # what is in the folder of a host that is cut off
    assert (alone.rank, alone.where) == (None, "rank 1 has waited in all_reduce for 60 s; ranks 0, 2 not heard")
    assert find_hang({}, 3, 100.0) is None


def test_a_thousand_ranks_are_counted_and_not_listed():
    found = find_hang(heard_of(STANDS, *[WAITS] * 1023), 1024, 100.0)
    assert found.where.endswith("; ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1,015 more wait for it in all_reduce")


# -- stacks and the Flight Recorder -----------------------------------------------------------------------------------


def test_the_users_innermost_line_and_what_it_calls_are_found():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        thread = threading.Thread(target=lambda: reader.raw.read(1))
        thread.start()
        deadline, call, lines = time.monotonic() + HANGS_S, "", []
        while call != "read" and time.monotonic() < deadline:
            frame = sys._current_frames().get(thread.ident)
            if frame is not None and frame.f_code.co_filename == __file__:
                call, lines = called(frame.f_code, frame.f_lasti), lines_of(frame)
        writer.write(b"x")
        thread.join()
    assert call == "read"
    assert re.fullmatch(
        r".*<lambda> at tests/test_hangs.py:\d+|.*<lambda> at test_hangs.py:\d+", innermost(lines).place
    )


def test_the_latest_stack_of_faulthandler_is_read():
    text = (
        'Stack (most recent call first):\n  File "/a/other.py", line 1 in f\n'
        'Stack (most recent call first):\n  File "/a/data.py", line 31 in collate\n'
        '  File "/x/pytorch/trainer/trainer.py", line 5 in fit\n  File "/a/train.py", line 9 in <module>\n'
    )
    assert innermost(parse_dump(text)) == ("collate at data.py:31", 0, False)
    assert parse_dump("") == []
    waits = text.replace("/a/data.py", torch.distributed.distributed_c10d.__file__)
    assert innermost(parse_dump(waits)) == ("", 1, True)


def runs_python():
    while True:
        json.loads("[1, [2, [3]]]")


def waits_beside_a_thread_that_runs(wait):
    threading.Thread(target=runs_python, daemon=True).start()
    os._exit(0 if wait() else 1)


def sleeps():
    started_s = time.monotonic()
    ctypes.CDLL(None).sleep(5)
    return time.monotonic() - started_s >= 5  # a signal would end it


@pytest.mark.slow
def test_only_a_thread_that_waits_is_asked_for_its_stack_and_goes_on_waiting(tmp_path):
    """Threads beside it run Python: to read their frames without the interpreter lock can crash the process."""
    file, fork = tmp_path / "stacks.txt", multiprocessing.get_context("fork")
    stacks, (reading, writing) = StacksFile(file), os.pipe()
    waits, asleep = (
        fork.Process(target=waits_beside_a_thread_that_runs, args=(wait,))
        for wait in (lambda: os.read(reading, 1) == b"x", sleeps)
    )
    try:
        waits.start()
        asleep.start()
        for process, channel in ((waits, "pipe"), (asleep, "nanosleep")):
            until(partial(wait_channel, process.pid, process.pid), channel)
        starts, lines = [], []
        while "nanosleep" in wait_channel(asleep.pid, asleep.pid):
            time.sleep(0.01)
            assert stacks.ask_child(asleep.pid) is None or "nanosleep" not in wait_channel(asleep.pid, asleep.pid)
            start = stacks.ask_child(waits.pid)
            if start is not None:
                starts.append(start)
            if starts:
                lines = lines or stacks.child_lines("it waits", starts[0])
        os.write(writing, b"x")
        waits.join(HANGS_S)
        asleep.join(HANGS_S)
    finally:
        stacks.close()
        for process in (waits, asleep):
            process.kill()
    assert (waits.exitcode, asleep.exitcode) == (0, 0)
    assert len(starts) > 10
    assert lines[0].function == "<lambda>"
    assert "runs_python" not in file.read_text()


def test_a_collective_of_another_thread_is_not_what_training_waits_in():
    entry = {
        "is_p2p": False, "collective_seq_id": 3, "p2p_seq_id": 0, "process_group": ["0", "default_pg"],
        "retired": False, "state": "scheduled", "profiling_name": "nccl:_all_gather_base", "thread_id": "7",
        "input_sizes": [[4, 2]], "time_created_ns": 5_000_000_000,
    }  # fmt: skip
    done = {**entry, "collective_seq_id": 2, "retired": True}
    pending, known = collectives_of([done, entry], ())
    assert (pending.name, pending.number, pending.shape, pending.since) == ("all_gather_base", 3, "4 x 2", 5.0)
    assert known == {"0": 3}
    assert collectives_of([done, entry], {"7"}).pending is None


def test_a_pulse_of_a_rank_that_stands_is_read_back():
    pulse = heard_of(MOVES, entered(7, 9, shape="4 x 2"), silent=[silence(0, "gone")])[1].pulse
    assert decode_pulse(encode_message(pulse)) == pulse
    assert len(encode_message(pulse)) < 2000
    with pytest.raises(ValueError, match="long"):
        decode_pulse(encode_message(msgspec.structs.replace(pulse, host="x" * 100_000)))

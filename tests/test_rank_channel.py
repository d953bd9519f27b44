"""All ranks reach rank 0 without a collective: in runs of several processes, and where the store fails or is gone."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lightning_forge_profiling.diagnosis.rank_status import ranks_status
from lightning_forge_profiling.names import RANKS_JSON, pulse_name
from lightning_forge_profiling.ranks.channel import Channel, HostFolder, StoreClient, group_store, open_channel
from lightning_forge_profiling.record.files import later, read_heard, write_heard, write_pulse
from lightning_forge_profiling.schema import LastPulse, Pulse, SilentRank
from tests.outcomes import HANGS_S, SCRIPTS
from tests.ports import free_port
from tests.scripts.store_server import serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a store's socket is found in /proc")

PROGRAM = SCRIPTS / "rank_channel.py"
LIMIT_S = 0.5


def pulse(rank, **known):
    return Pulse(
        **{"run": "r", "rank": rank, "world_size": 4, "host": "a", "pid": 10 + rank, "number": 1, "at": 1e9, **known}
    )


# -- the status, by made-up times --------------------------------------------------------------------------------------


def states(heard, now, world_size=4):
    return [one.state for one in ranks_status({one.pulse.rank: one for one in heard}, world_size, now).ranks]


def test_a_rank_is_live_late_or_silent_by_when_rank_0_heard_it_last():
    ages = {0: 0.0, 1: 9.0, 2: 11.0, 3: 31.0}
    heard = [LastPulse(pulse=pulse(rank), at=500.0 - age) for rank, age in ages.items()]
    assert states(heard, 500.0, 5) == ["live", "live", "late", "silent", "missing"]


def test_clocks_of_other_hosts_do_not_count():
    clocks = {0: 0.0, 1: 3600.0, 2: -3600.0}  # an hour ahead, an hour behind
    heard = [LastPulse(pulse=pulse(rank, at=500.0 + 4000 + ahead), at=4500.0) for rank, ahead in clocks.items()]
    assert states(heard, 4501.0, 3) == ["live"] * 3
    assert states([heard[0], LastPulse(pulse=heard[1].pulse, at=4400.0)], 4500.0, 2) == ["live", "silent"]


@pytest.mark.parametrize("behind_s", [5.0, 3600.0])
def test_a_reader_whose_clock_is_behind_still_tells_the_late_from_the_live(behind_s):
    heard = [
        LastPulse(pulse=pulse(0), at=9000.0),
        LastPulse(pulse=pulse(1), at=8960.0),
        LastPulse(pulse=pulse(2), at=8999.0),
    ]
    assert states(heard, 9000.0 - behind_s, 3) == ["live", "silent", "live"]


def test_where_rank_0_has_fallen_silent_those_are_live_that_wrote_files_of_their_own():
    heard = [
        LastPulse(pulse=pulse(0), at=100.0),
        LastPulse(pulse=pulse(1), at=99.0),
        LastPulse(pulse=pulse(2), at=60.0),
    ]
    assert states(heard, 400.0, 3) == ["silent", "silent", "silent"]
    by_file = LastPulse(pulse=pulse(1, number=9), at=395.0)  # it wrote its own file later
    assert states([heard[0], by_file, heard[2]], 400.0, 3) == ["silent", "live", "silent"]


def test_a_rank_that_ended_stays_ended_and_one_that_is_found_gone_is_gone():
    heard = [
        LastPulse(pulse=pulse(0, silent=(SilentRank(rank=3, pid=13, process="gone", seconds=42),)), at=100.0),
        LastPulse(pulse=pulse(1, ended="finished"), at=10.0),
        LastPulse(pulse=pulse(2, ended="failed"), at=10.0),
        LastPulse(pulse=pulse(3), at=60.0),
    ]
    assert states(heard, 100.0) == ["live", "finished", "failed", "gone"]


def test_a_rank_that_never_ended_is_silent_after_the_end_of_rank_0():
    heard = [LastPulse(pulse=pulse(0, ended="finished"), at=100.0), LastPulse(pulse=pulse(1), at=99.0)]
    assert states(heard, 400.0, 2) == ["finished", "silent"]


def test_a_restarted_rank_is_said_to_be_one():
    first, anew = pulse(1, number=40, at=100.0), pulse(1, pid=99, number=0, at=200.0)
    heard = later(later(None, first, 7.0), anew, 8.0)
    assert (heard.pulse.pid, heard.at, heard.restarts) == (99, 8.0, 1)
    assert later(heard, first, 9.0) == heard, "what the process before left behind"
    [_, one] = ranks_status({1: heard}, 2, 8.0).ranks
    assert (one.state, one.restarts, one.pid) == ("live", 1, 99)
    [_, one] = ranks_status({1: LastPulse(pulse=pulse(1, restarts=2), at=8.0)}, 2, 8.0).ranks
    assert one.restarts == 2, "by the launcher, which starts all ranks anew"


def test_only_a_new_pulse_is_a_sign_of_life():
    heard = later(None, pulse(1, number=4), 7.0)
    assert later(heard, pulse(1, number=4), 8.0) == heard
    assert later(heard, pulse(1, number=3), 8.0) == heard, "from a file that an earlier failure left"
    assert later(heard, pulse(1, number=5, at=1.0), 8.0).at == 8.0, "also where its clock was set back"


def test_a_ranks_own_file_counts_where_it_is_newer_by_the_clock_of_rank_0(tmp_path):
    hour = 3600.0  # which the clock of host b is ahead
    of_b = pulse(1, host="b", at=1000.0 + hour)
    write_heard(tmp_path, [LastPulse(pulse=pulse(0, at=1000.0), at=1000.0), LastPulse(pulse=of_b, at=1000.0)])
    write_pulse(tmp_path, pulse(1, host="b", number=2, at=1050.0 + hour))
    write_pulse(tmp_path, pulse(2, run="another"))
    heard = read_heard(tmp_path, "r")
    assert {rank: (one.pulse.number, one.at) for rank, one in heard.items()} == {0: (1, 1000.0), 1: (2, 1050.0)}


# -- a real store in a process of its own ------------------------------------------------------------------------------


@contextmanager
def store_server(port=0):
    """A process that serves until it is killed, forked from one that has imported torch once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(port, theirs))
    process.start()
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def is_stopped(pid):
    """Whether all threads of a process have been stopped."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid))


def wait_until(condition):
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server():
    with store_server() as served:
        yield served


@pytest.fixture
def client(server):
    """Makes clients of the server, which are closed in the end."""
    group = TCPStore("127.0.0.1", server[1], wait_for_workers=False)
    made = []

    def make(limit_s=LIMIT_S, prefix="run"):
        made.append(StoreClient(group, prefix, limit_s=limit_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def stacks(text):
    """How many stacks PyTorch's C++ printed."""
    return text.count("Exception raised from")


@pytest.mark.linux
def test_what_writers_publish_is_read_and_missing_ones_are_not_waited_for(client):
    one, two, reader, other = client(), client(), client(), client(prefix="another")
    assert reader.read() == []
    assert one.publish("1", b"a")
    assert reader.read() == [b"a"]
    assert two.publish("2", "b é".encode())
    assert one.publish("1", b"c")
    assert reader.read() == [b"c", "b é".encode()]
    assert other.read() == []
    reader.clear()
    assert reader.read() == []


@pytest.mark.linux
def test_a_store_that_hangs_is_left_alone_and_used_again_when_it_answers(server, client, capfd):
    process, _ = server
    one = client()
    assert one.publish("1", b"a")
    stop(process)
    began = time.monotonic()
    assert not one.publish("1", b"b")
    assert time.monotonic() - began < HANGS_S
    began = time.thread_time()
    assert not any(one.publish("1", b"b") or one.read() for _ in range(50))
    assert stacks(capfd.readouterr().err) == 1, "of the first"
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: one.publish("1", b"c"))
    assert client().read() == [b"c"]
    assert stacks(capfd.readouterr().err) == 0


@pytest.mark.linux
def test_a_store_that_is_gone_is_never_asked_again(server, client, capfd):
    process, _ = server
    one, two = client(), client()
    assert one.publish("1", b"a")
    assert two.read() == [b"a"]
    process.kill()
    process.join()
    assert not any(one.publish("1", b"b") for _ in range(20))
    assert two.read() is None
    assert stacks(capfd.readouterr().err) == 0


def test_a_store_that_hangs_when_it_is_connected_to_holds_up_nobody(server, client):
    process, _ = server
    one = client()
    stop(process)
    assert not one.publish("1", b"a")
    assert not one.publish("1", b"a")
    wait_until(lambda: not any(thread.name == "forge-ranks-connect" for thread in threading.enumerate()))


@pytest.mark.linux
@pytest.mark.parametrize("connected", [True, False])
def test_a_call_that_hangs_is_ended_by_another_thread(server, client, connected):
    process, _ = server
    one = client(limit_s=HANGS_S)
    if connected:
        assert one.publish("1", b"a")
    stop(process)
    thread = threading.Thread(target=one.publish, args=("1", b"b"))
    thread.start()
    time.sleep(0.1)  # so that it waits, which makes no difference to what has to come
    one.interrupt()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    wait_until(lambda: not any(thread.name == "forge-ranks-connect" for thread in threading.enumerate()))


def test_without_a_process_group_there_are_files(tmp_path):
    assert group_store() is None
    channels = [open_channel(tmp_path, "run", rank, 3) for rank in range(3)]
    for rank, channel in enumerate(channels):
        channel.send(b"%d" % rank)
    assert sorted(channels[0].receive()) == [b"0", b"1", b"2"]
    channels[1].send(b"new")
    assert sorted(channels[0].receive()) == [b"0", b"2", b"new"]


def test_a_folder_that_is_not_there_raises_nothing(tmp_path):
    channel = open_channel(tmp_path / "none", "run", 1, 3)
    channel.send(b"1")
    assert channel.receive() == []
    channel.close()


# -- many ranks --------------------------------------------------------------------------------------------------------


def dead_since(folder, rank, seconds):
    path = folder / pulse_name(rank)
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_the_lowest_rank_of_a_host_that_is_live_passes_on_what_all_have_left(tmp_path):
    folder = tmp_path / "host"
    hosts = {rank: HostFolder(folder, rank) for rank in (64, 65, 66)}
    assert hosts[65].exchange(b"65") == {65: b"65"}
    assert hosts[64].exchange(b"64") == {64: b"64", 65: b"65"}
    assert hosts[65].exchange(b"65.") == {}
    assert hosts[66].exchange(b"66") == {}
    dead_since(folder, 64, 30)
    assert hosts[65].exchange(b"65..") == {64: b"64", 65: b"65..", 66: b"66"}, "what the dead one said last, too"


def test_the_last_message_of_a_rank_that_ends_is_passed_on_and_the_last_rank_leaves_nothing(tmp_path):
    folder = tmp_path / "host"
    hosts = [HostFolder(folder, rank) for rank in range(2)]
    for host in hosts:
        host.exchange(b"1")
    hosts[0].exchange(b"ended")
    hosts[0].close()
    assert hosts[1].exchange(b"2") == {0: b"ended", 1: b"2"}
    hosts[1].close()
    assert not folder.exists()


@pytest.mark.linux
def test_one_connection_carries_a_hosts_many_ranks(tmp_path, client):
    reader, writers, folder = client(), {rank: client() for rank in (1, 2)}, tmp_path / "host"
    channels = {
        rank: Channel(tmp_path, rank, store=store, host=HostFolder(folder, rank), many=True)
        for rank, store in writers.items()
    }
    for _ in range(2):
        for rank, channel in channels.items():
            channel.send(b"message of %d" % rank)
    assert reader.read() == [b"message of 1\nmessage of 2"]
    own = Channel(tmp_path, 0, store=reader, host=None, many=True)
    assert own.receive() == [b"message of 1", b"message of 2"]
    for channel in channels.values():
        channel.close()
    assert not folder.exists()
    assert list(tmp_path.glob("rank*")) == []


# -- real runs ---------------------------------------------------------------------------------------------------------


def started(*command, folder, environment=None):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(processes):
    """The standard output and error of processes, all of which must end well."""
    try:
        texts = [process.communicate(timeout=HANGS_S) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # an agent ends its workers then, and would leave them behind if it was killed
        for process in processes:
            process.wait(HANGS_S)
    for process, (out, err) in zip(processes, texts, strict=True):
        assert process.returncode == 0, out + err
    return "".join(out for out, _ in texts), "".join(err for _, err in texts)


def torchrun(*options, nodes=1, each=2, script, folder, environment=None):
    """Start an agent for each node on this machine."""
    port = free_port()
    shared = ("-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", each, "--master-port", port)
    return [
        started(
            *shared,
            "--master-addr",
            "127.0.0.1",
            "--node-rank",
            node,
            *options,
            PROGRAM,
            folder,
            *script,
            folder=folder,
            environment=environment,
        )
        for node in range(nodes)
    ]


def heard_in(folder):
    """By rank what is known of it last, by the newest record below a folder."""
    path = max(folder.rglob(RANKS_JSON), key=lambda path: path.stat().st_mtime)
    return read_heard(path.parent, json.loads(path.read_text())[0]["pulse"]["run"])


def assert_all_ended(folder, world_size):
    heard = heard_in(folder)
    assert sorted(heard) == list(range(world_size))
    assert {one.pulse.ended for one in heard.values()} == {"finished"}
    assert min(one.pulse.step for one in heard.values()) >= 5


@pytest.mark.slow
def test_two_nodes_with_two_ranks_each(tmp_path):
    # what the workers print, not the agents: where agent 0 ends first, agent 1 logs a stack of its own store (2.13)
    logs = ("--redirects", 2, "--log-dir", tmp_path / "logs")
    out, _ = outputs(torchrun(*logs, nodes=2, script=["nodes=2", "devices=2"], folder=tmp_path))
    assert sorted(re.findall(r"rank (\d) is done", out)) == list("0123")
    printed = [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")]
    assert [stacks(text) for text in printed] == [0, 0, 0, 0]
    assert_all_ended(tmp_path, 4)


@pytest.mark.slow
def test_hosts_that_share_no_folder(tmp_path):
    outputs(torchrun(script=["devices=2", "apart"], folder=tmp_path))
    [path] = tmp_path.rglob(RANKS_JSON)
    assert path.relative_to(tmp_path).parts[0] == "0"
    assert sorted(heard_in(tmp_path)) == [0, 1]


@pytest.mark.slow
def test_an_elastic_restart_has_a_record_with_all_ranks(tmp_path):
    # in the store of the agent, gloo finds the addresses of the processes that died: without our callback, too, 4 of 6
    # runs failed or hung at the restart (PyTorch 2.13). With a store of the workers' own none of 10 did.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    elastic = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", 1)
    script = ["devices=2", "dies"]
    out, _ = outputs(torchrun(*elastic, script=script, folder=tmp_path, environment=own_store))
    assert sorted(re.findall(r"rank (\d) is done", out)) == list("01")
    assert_all_ended(tmp_path, 2)
    assert {one.pulse.restarts for one in heard_in(tmp_path).values()} == {1}
    first, second = sorted(tmp_path.rglob(RANKS_JSON), key=lambda path: path.stat().st_mtime)
    assert first.parent != second.parent


@pytest.mark.slow
def test_spawned_processes(tmp_path):
    """Lightning's FSDP needs GPUs."""
    shared = {"MASTER_PORT": str(free_port())}
    outputs([started(PROGRAM, tmp_path, "strategy=ddp_spawn", "devices=2", folder=tmp_path, environment=shared)])
    assert_all_ended(tmp_path, 2)


@pytest.mark.slow
def test_processes_that_slurm_starts(tmp_path):
    shared = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        started(
            PROGRAM,
            tmp_path,
            "devices=2",
            folder=tmp_path,
            environment={**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
        )
        for rank in "01"
    ]
    outputs(ranks)
    assert_all_ended(tmp_path, 2)
    assert {one.pulse.restarts for one in heard_in(tmp_path).values()} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
def test_a_run_goes_on_by_files_where_the_store_hangs_or_goes_away(tmp_path, sent):
    with store_server(free_port()) as (server, port):
        shared = {
            "TORCHELASTIC_RUN_ID": "by hand",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        options = ("devices=2", f"store={server.pid}", f"signal={sent}")
        ranks = [
            started(
                PROGRAM,
                tmp_path,
                *options,
                folder=tmp_path,
                environment={**shared, "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in "01"
        ]
        out, err = outputs(ranks)
    assert sorted(re.findall(r"rank (\d) is done", out)) == list("01")
    assert stacks(err) <= 2, "one of each rank"
    assert_all_ended(tmp_path, 2)

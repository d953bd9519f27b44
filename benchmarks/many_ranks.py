"""What 1,024 ranks that say once a second how they do cost rank 0 and the store, on the loopback.

Rank 0 listens as in a run: it reads the store, decodes, sums up, writes `ranks.json`, and pauses so that this takes a
hundredth of its time. Two processes play the other ranks, first with a connection for each rank, then with one for each
host of eight, as a run of more than 64 ranks does. CPU is in percent of a core; the store's is that of its thread in
rank 0's process.

    python -m benchmarks.many_ranks [--ranks 1024] [--seconds 30]
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_forge_profiling.diagnosis.rank_status import ranks_status
from lightning_forge_profiling.ranks.channel import StoreClient
from lightning_forge_profiling.record.files import decode_pulse, encode_message, later, write_heard
from lightning_forge_profiling.schema import LastPulse, Pulse, RankWork

RUN, PROCESSES, OF_HOST = "f" * 16, 2, 8
LEAVES = ("data", "transfer", "forward", "backward", "optimizer", "logger/CSVLogger.log_metrics", "gc/generation_2")
SENSORS = ("sm_clock_mhz", "power_w", "temperature_c", "sm_util_pct", "memory_used_gib")


def pulse(rank: int, world_size: int) -> Pulse:
    """A pulse as in a run."""
    work = RankWork(
        rank=rank,
        host=f"node{rank // OF_HOST:04}",
        steps=64,
        step_ms=100.123456789,
        leaves_ms={leaf: 1.123456789 * (at + 1) for at, leaf in enumerate(LEAVES)},
        exposed_ms={"backward": 5.123456789},
        error_ms=0.123456789,
    )
    return Pulse(
        run=RUN,
        rank=rank,
        world_size=world_size,
        host=work.host,
        pid=10_000 + rank,
        number=0,
        at=0.0,
        step=1000,
        part="steps/forward",
        work=work,
        cpu_pct=101.123456789,
        memory_gib=3.123456789,
        sensors=dict.fromkeys(SENSORS, 1234.56789),
    )


def play(port: int, ranks: Sequence[int], world_size: int, share: int, until: float) -> None:
    """Send the pulses of some ranks once a second, `share` of them by one connection; prints how long that took."""
    group = TCPStore("127.0.0.1", port, wait_for_workers=False)
    clients = [(StoreClient(group, RUN), ranks[first : first + share]) for first in range(0, len(ranks), share)]
    number = failed = 0
    longest_s = 0.0
    while (began := time.time()) < until:
        number += 1
        for client, own in clients:
            known = [msgspec.structs.replace(pulse(rank, world_size), number=number, at=began) for rank in own]
            failed += not client.publish(str(own[0]), b"\n".join(map(encode_message, known)))
        if number > 1:  # the first round connects
            longest_s = max(longest_s, time.time() - began)
        time.sleep(max(began + 1.0 - time.time(), 0.0))
    print(
        f"    {len(clients)} connections: {number} rounds, the longest {longest_s:.2f} s, {failed} not sent", flush=True
    )


class Round(NamedTuple):
    """What rank 0 took to hear all once."""

    ranks: int
    cpu_s: float
    wall_s: float


def hear(client: StoreClient, folder: Path, heard: dict[int, LastPulse], world_size: int) -> Round:
    """Hear all ranks, as rank 0 does."""
    began_s, cpu_s, now = time.perf_counter(), time.thread_time(), time.time()
    for joined in client.read() or ():
        for message in joined.split(b"\n"):
            one = decode_pulse(message)
            heard[one.rank] = later(heard.get(one.rank), one, now)
    ranks_status(heard, world_size, now)
    write_heard(folder, heard.values())
    return Round(len(heard), time.thread_time() - cpu_s, time.perf_counter() - began_s)


def measure(world_size: int, share: int, seconds: float) -> None:
    """Print what a run of so many ranks costs, of which `share` have one connection."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    until = time.time() + seconds
    parts = [range(first, world_size, PROCESSES) for first in range(PROCESSES)]
    context = multiprocessing.get_context("spawn")
    players = [
        context.Process(target=play, args=(store.port, list(part), world_size, share, until), daemon=True)
        for part in parts
    ]
    for player in players:
        player.start()
    client, heard, rounds = StoreClient(store, RUN), dict[int, LastPulse](), list[Round]()
    with tempfile.TemporaryDirectory() as folder:
        while not rounds or (rounds[-1].ranks < world_size and time.time() < until):  # until all have connected
            rounds = [hear(client, Path(folder), heard, world_size)]
            time.sleep(1.0)
        began = time.perf_counter(), time.process_time(), time.thread_time(), loopback_bytes()
        while time.time() < until:
            rounds.append(hear(client, Path(folder), heard, world_size))
            time.sleep(max(1.0, 100 * rounds[-1].cpu_s))
        wall_s, all_s, own_s = (
            now - then
            for now, then in zip((time.perf_counter(), time.process_time(), time.thread_time()), began[:3], strict=True)
        )
        sent = (loopback_bytes() - began[3]) / wall_s
    for player in players:
        player.join()
    client.close()
    print(
        f"{world_size} ranks, {len(encode_message(pulse(0, world_size)))} bytes a pulse, {share} of a connection: "
        f"{rounds[-1].ranks} heard\n"
        f"    rank 0 hears all in {1e3 * median(one.cpu_s for one in rounds):.0f} ms of CPU, "
        f"{1e3 * median(one.wall_s for one in rounds):.0f} ms, {len(rounds)} times in {wall_s:.0f} s: "
        f"{100 * own_s / wall_s:.2f} % of a core; the store {100 * (all_s - own_s) / wall_s:.1f} %\n"
        f"    {sent / 1e6:.2f} MB a second over the loopback, with headers",
        flush=True,
    )


def loopback_bytes() -> int:
    """What this machine has sent to itself."""
    [line] = [each for each in Path("/proc/net/dev").read_text().splitlines() if each.strip().startswith("lo:")]
    return int(line.split()[1])


def main() -> None:
    """Measure both ways to connect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    for share in (1, OF_HOST):
        measure(args.ranks, share, args.seconds)


if __name__ == "__main__":
    main()

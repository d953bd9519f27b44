"""The collectives that this process has entered, by PyTorch's Flight Recorder, which records NCCL's and gloo's.

A dump halts Python threads, for 70 to 120 ms in a large run: it is asked for only where a rank stands.
"""

import json
import threading
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

# by backend; a build of PyTorch has those of its backends
_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

_LONGEST: Final = 200  # characters of sizes


class Pending(NamedTuple):
    """A collective that was entered and is not completed."""

    name: str  # such as `all_reduce`
    number: int  # in its process group, from 1
    group: str
    shape: str
    since: float  # Unix time in seconds


class Collectives(NamedTuple):
    """What a process has entered."""

    pending: Pending | None  # the one that was entered first
    entered: dict[str, int]  # the number of the last one, by process group


def read_collectives(training: int) -> Collectives:
    """What this process has entered, without what other Python threads than the training one wait in."""
    others = {str(thread.ident) for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}  # noqa: SLF001
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        with suppress(Exception):  # the layout is PyTorch's own
            dump = getattr(torch._C._distributed_c10d, name)  # noqa: SLF001
            entries += json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]
    collectives = Collectives(None, {})
    with suppress(Exception):
        collectives = collectives_of(entries, others - {str(training)})
        # a group in which nothing was entered has no entry
        whole = min((entry["record_id"] for entry in entries), default=0) == 0
        for group in torch.distributed.distributed_c10d._world.pg_names.values() if whole else ():  # noqa: SLF001
            collectives.entered.setdefault(str(group), 0)
    return collectives


def collectives_of(entries: list[dict[str, Any]], but: Container[str]) -> Collectives:
    """What a process has entered by the entries of a dump, without those of some threads."""
    entered: dict[str, int] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            group = str(entry["process_group"][0])
            entered[group] = max(entered.get(group, 0), int(entry["collective_seq_id"]))
    pending = min(_pending(entries, but), key=lambda one: (one.since, one.number), default=None)
    return Collectives(pending, entered)


def _pending(entries: list[dict[str, Any]], but: Container[str]) -> Iterator[Pending]:
    for entry in entries:
        if not entry["retired"] and entry["state"] != "completed" and entry.get("thread_id") not in but:
            yield Pending(
                name=entry["profiling_name"].rpartition(":")[2].removeprefix("_"),
                number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
                group=str(entry["process_group"][0]),
                shape=", ".join(" x ".join(map(str, sizes)) for sizes in entry["input_sizes"])[:_LONGEST],
                since=entry["time_created_ns"] / 1e9,
            )

"""Train with processes that were started as the ranks; after some steps rank 1 comes to a standstill.

The folder; the number of ranks of a node; the kind of hang, or `evaluates` for a long evaluation on rank 1 alone; the
number of seconds without a movement that is a hang, or `real`; `cpu`, or `gpu` for NCCL.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import distributed

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.ranks import stalls
from tests.models import Classifier, Samples, busy, loader, quiet_trainer

FOLDER, RANKS, KIND, LIMIT, DEVICE = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
RANK = int(os.environ["NODE_RANK"]) * RANKS + int(os.environ["LOCAL_RANK"])
HANGS = (0 if KIND in {"first_stopped", "first_exited"} else 1) == RANK
STEP = 50
LATE = 200  # samples after which a worker stops
lock = threading.Lock()


def now_hanging():
    (FOLDER / "hangs").touch()


def skipped(group):
    if RANK != 1:
        distributed.all_reduce(torch.ones(3, device="cuda" if DEVICE == "gpu" else "cpu"), group=group)
    else:
        now_hanging()


def evaluates():
    busy(15_000)


def held_lock():
    library, semaphore = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    library.sem_wait(semaphore)


def pauses():
    time.sleep(4 * float(LIMIT))


def cut_off():
    """Whoever started it cuts the network."""


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def asked():
    input("continue? ")


def full_pipe():
    _, end = os.pipe()
    os.fdopen(end, "wb").write(bytes(1 << 20))  # which goes on after a signal; `os.write` returns what it has written


def blocking_read():
    fifo = FOLDER / "fifo"
    os.mkfifo(fifo)
    fifo.read_text()


def exited():
    os._exit(0)


class Deadlocked(Samples):
    made = 0

    def __getitem__(self, i):
        self.made += 1
        if HANGS and self.made >= LATE:
            with lock:
                now_hanging()
                lock.acquire()
        return super().__getitem__(i)


class FirstFetch(Samples):
    def __getitem__(self, i):
        if HANGS:
            now_hanging()
            lock.acquire()
            lock.acquire()
        return super().__getitem__(i)


class Hangs(Classifier):
    group = None

    def on_train_start(self):
        self.group = distributed.new_group()

    def training_step(self, batch):
        time.sleep(0.02)
        if self.seen == STEP and KIND == "skipped":
            skipped(self.group)
        elif self.seen == STEP and HANGS and KIND not in {"worker", "first_fetch"}:
            now_hanging()
            globals()[KIND.removeprefix("first_")]()
        return super().training_step(batch)


def main():
    if LIMIT != "real":
        stalls.LEAST_S = float(LIMIT)
    nodes = int(os.environ.get("NODES", "1"))
    options = {"devices": RANKS, "num_nodes": nodes, "accelerator": DEVICE, "strategy": "ddp"}
    if KIND == "pauses":
        options["max_steps"] = 2 * STEP
    trainer = quiet_trainer(ThroughputCallback(warmup_steps=1), **options, default_root_dir=FOLDER, max_epochs=1)
    batches = loader(100_000)
    if KIND == "worker":
        batches = torch.utils.data.DataLoader(Deadlocked(100_000), 4, num_workers=1)
    if KIND == "first_fetch":
        batches = torch.utils.data.DataLoader(FirstFetch(100_000), 4)
    trainer.fit(Hangs(), batches)


if __name__ == "__main__":
    main()

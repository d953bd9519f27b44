"""Train with two processes, each behind the other by turns, and print what was measured of their waits as JSON.

The folder and the kind of the strategy: `ddp`, `fsdp2`; `gpu` for two GPUs. `accumulate` for four micro-batches; `own`
for a module that calls the strategy itself, also in a thread, and replaces `torch.distributed.broadcast` for one call.
DDP's own logger measures the same.
"""

import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.timing.run_totals import RunTotals
from tests.models import loader, quiet_trainer

FOLDER, KIND, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[3:]
WIDTH = 512
OF_DDP = []
BROADCAST = torch.distributed.broadcast
TIMED = {}


def keep(totals, times, *others):
    """Keep what was measured of each step, and enter it."""
    TIMED[times.step] = times.device_ms.get("wait/backward", 0.0)
    add(totals, times, *others)


add, RunTotals.add = RunTotals.add, keep


class Model(L.LightningModule):
    """Layers enough for several buckets; before backward rank 1 sleeps for 6 ms, so that rank 0 waits for it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def configure_model(self):
        if KIND == "fsdp2" and not isinstance(self.head, torch.distributed.fsdp.FSDPModule):
            for layer in [*self.layers, self.head]:
                torch.distributed.fsdp.fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        if self.global_rank == 1:
            time.sleep(0.006)
        return nn.functional.cross_entropy(self.head(self.norm(self.layers(batch[0]))), batch[1])

    def on_train_start(self):
        if KIND == "ddp":
            self.trainer.strategy.model._set_ddp_runtime_logging_sample_rate(1)

    def on_train_batch_end(self, *_):
        if KIND == "ddp":
            logged = self.trainer.strategy.model._get_ddp_logging_data()
            # of the latest backward before this step's, after which DDP exchanged gradients
            exposed_ns = logged.get("backward_comm_time", 0) - logged.get("backward_compute_comm_overlap_time", 0)
            OF_DDP.append(exposed_ns / 1e6)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class OwnCalls(Model):
    """Calls the strategy by itself: a thread waits for others all the time."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.calls = 0

    def on_train_start(self):
        super().on_train_start()
        group = torch.distributed.new_group(backend="gloo")
        self.thread = threading.Thread(target=self.gather, args=(group,))
        self.thread.start()
        torch.distributed.broadcast = self.once

    def once(self, *args, **kwargs):
        self.calls += 1
        torch.distributed.broadcast = BROADCAST
        return BROADCAST(*args, **kwargs)

    def gather(self, group):
        for _ in range(40):
            if self.global_rank == 0:
                time.sleep(0.01)
            self.trainer.strategy.reduce(torch.zeros(1), group=group)

    def on_train_end(self):
        self.thread.join()

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.trainer.strategy.backward(closure_loss=super().training_step(batch), optimizer=None)
        optimizer.step()


if __name__ == "__main__":
    strategy = (
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if KIND == "fsdp2"
        else DDPStrategy(bucket_cap_mb=1)
    )
    model = OwnCalls() if "own" in OPTIONS else Model()
    throughput = ThroughputCallback(overhead=None)
    trainer = quiet_trainer(
        throughput,
        accelerator="gpu" if "gpu" in OPTIONS else "cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=FOLDER,
        accumulate_grad_batches=4 if "accumulate" in OPTIONS else 1,
    )
    trainer.fit(model, loader(64 * 8))
    analysis = throughput.analysis()
    if trainer.is_global_zero:
        works = [
            {"rank": work.rank, "step_ms": work.step_ms, "exposed_ms": work.exposed_ms, "waits_ms": work.waits_ms,
             "leaves_ms": work.leaves_ms}
            for work in analysis.run.ranks.works
        ]  # fmt: skip
        kept = torch.distributed.broadcast is BROADCAST
        calls = getattr(model, "calls", None)
        timed = [*TIMED.values()]
        print("MEASURED", json.dumps({"ddp": OF_DDP, "timed": timed, "works": works, "kept": kept, "calls": calls}))

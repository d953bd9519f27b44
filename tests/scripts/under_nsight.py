"""GPU-bound steps that wait 40 ms each for their loader; the host's time in each region goes to the given folder."""

import json
import sys
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from benchmarks.workloads import GPT, random_tokens, trainer
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.entered_steps import watch

times = {}


class Keep(Callback):
    def on_train_start(self, trainer, module):
        watch(trainer.profiler.step_timer, lambda of, *_: times.__setitem__(of.step, dict(of.host_ms)))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    callbacks = [ForgeProfilerCallback(), ThroughputCallback(), Keep()]
    loader = random_tokens(40, seconds=0.04)
    trainer(str(out), 40, callbacks=callbacks, precision="bf16-true").fit(GPT(), loader)
    (out / "times.json").write_text(json.dumps(times))

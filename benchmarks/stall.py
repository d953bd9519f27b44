"""How long the end of a recorded window holds training up, against the least that it can take.

The least is the collector's stop and a bare `export_chrome_trace` of the same steps, timed in turns with ours.

    python -m benchmarks.stall
"""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.workloads import GPT, random_tokens, trainer
from lightning_forge_profiling import ForgeProfilerCallback

FIRST, LAST, STEPS = 20, 23, 30


class BareProfiler(Callback):
    """`torch.profiler` with the callback's options, stopped and exported by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stall_ms = 0.0
        self.profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Prepare, start or stop."""
        if batch_idx == FIRST - 2:
            self.profiler.prepare_trace()
        elif batch_idx == FIRST - 1:
            self.profiler.start_trace()
        elif batch_idx == LAST - 1:
            began = time.perf_counter()
            self.profiler.stop_trace()
            self.profiler.export_chrome_trace(str(self.path))
            self.stall_ms = (time.perf_counter() - began) * 1e3


def main(repeats: int = 5) -> None:
    """Print the two stalls and their ratio."""
    gpu = torch.cuda.is_available()
    module = GPT() if gpu else GPT(layers=2, width=128, length=64, vocabulary=256)
    loader = random_tokens(100) if gpu else random_tokens(100, batch_size=4, length=64, vocabulary=256)
    precision = "bf16-true" if gpu else "32-true"
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        for _ in range(repeats + 1):
            forge = ForgeProfilerCallback(FIRST, LAST)
            trainer(root, STEPS, callbacks=[forge], precision=precision).fit(module, loader)
            report = forge.trace_report()
            assert report is not None  # noqa: S101
            ours.append(report.stall_ms)
            plain = BareProfiler(Path(root) / "bare.json")
            trainer(root, STEPS, callbacks=[plain], precision=precision).fit(module, loader)
            bare.append(plain.stall_ms)
        size = (Path(root) / "bare.json").stat().st_size / 1e6
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours[1:], bare[1:], strict=True))
    print(f"{LAST - FIRST}-step window, {size:.1f} MB of JSON, medians of {repeats} interleaved repeats")
    print(f"ours {statistics.median(ours[1:]):.1f} ms, bare {statistics.median(bare[1:]):.1f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()

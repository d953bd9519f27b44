"""The verdict that was planted in each recording; needs neither torch nor Lightning."""

from functools import cache
from pathlib import Path
from typing import Final

from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import Analysis

TRACES: Final = Path(__file__).parents[1] / "data" / "traces"
VERDICTS: Final = {
    "input_bound": "input-bound",
    "launch_bound": "launch-bound",
    "sync_bound": "sync-bound",
    "sync_item": "sync-bound",
    "compute_bound": "compute-bound",
    "ddp_comm_bound": "communication-bound",
    "allocator_churn": "allocator-churn",
    "slow_optimizer": "slow-optimizer",
    "pageable_copies": "transfer-bound",
    "pinned_copies": "transfer-bound",
    "elementwise": "memory-bandwidth-bound",
    "input_hidden": "compute-bound",
    "conv_net": "compute-bound",
    "attention_long": "compute-bound",
    "compiled": "compute-bound",
    "validation_inside": "compute-bound",
    "cuda_graph": "launch-bound",
    "slow_rank_gpu": "straggler",
    "slow_rank_host": "straggler",
    "ddp_big_grads": "communication-bound",
    "slow_launches": "slow-launches",
    "gpu_idle": "gpu-idle",
}


@cache
def analysis_of(path: Path) -> Analysis:
    """The analysis of a recording, made once in a process."""
    return analyze(path, processes=1).analysis

"""Analyse the traces of many ranks with Dask, each where a worker is; then all ranks together, here.

    pip install "dask[bag]"
    python with_dask.py runs/gpt/profiler_traces/2026-11-25_steady

The folder is one that all workers see. `Client("scheduler:8786")` of `dask.distributed` spreads the work over
machines; without one it is this machine's cores.
"""

import subprocess
import sys
from pathlib import Path

import dask.bag

from lightning_forge_profiling.pipeline import write_rank_results

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    traces = sorted(folder.glob("rank*.trace.json.gz"))
    done = dask.bag.from_sequence(traces, partition_size=1).map(write_rank_results).compute()  # rankN.summary.json
    print(f"{len(done)} ranks are analysed")
    subprocess.run([sys.executable, "-m", "lightning_forge_profiling", "show", folder], check=True)

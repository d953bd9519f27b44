"""Analyse the traces of many ranks with Dask, each where a worker is; then all ranks together, here.

    pip install "dask[bag]"
    python with_dask.py runs/gpt/profiler_traces/2026-11-25_steady

The folder is one that all workers see; a URL of fsspec does as well, `s3://bucket/window`. `Client("scheduler:8786")`
of `dask.distributed` spreads the work over machines; without one it is this machine's cores.
"""

import subprocess
import sys

import dask.bag
import fsspec


def map_rank(trace: str) -> str:
    """Write `rankN.summary.json` beside a trace, in a process of its own."""
    subprocess.run([sys.executable, "-m", "lightning_forge_profiling", "analyze", trace, "--map"], check=True)
    return trace


if __name__ == "__main__":
    folder = sys.argv[1].rstrip("/")
    traces = [file.full_name for file in fsspec.open_files(f"{folder}/rank*.trace.json.gz")]
    done = dask.bag.from_sequence(traces, partition_size=1).map(map_rank).compute()
    print(f"{len(done)} ranks are analysed")
    subprocess.run([sys.executable, "-m", "lightning_forge_profiling", "analyze", folder, "--reduce"], check=True)

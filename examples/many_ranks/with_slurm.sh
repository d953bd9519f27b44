#!/bin/bash
# Analyse the traces of many ranks as a Slurm array, each where a task runs; then all ranks together.
#
#   bash with_slurm.sh /shared/runs/gpt/profiler_traces/2026-11-25_steady
#
# Each of the array's tasks takes every TASKS-th trace. The folder is one that all nodes see.
set -euo pipefail
folder=$1 tasks=${TASKS:-16}
each=$(sbatch --parsable --job-name=each-rank --array="0-$((tasks - 1))" --cpus-per-task=1 --wrap="
    for trace in \$(ls $folder/rank*.trace.json.gz | awk \"NR % $tasks == \$SLURM_ARRAY_TASK_ID\"); do
        python -c 'import pathlib, sys; from lightning_forge_profiling.pipeline import write_rank_results as write
write(pathlib.Path(sys.argv[1]))' \"\$trace\"
    done")
sbatch --job-name=compare-ranks --dependency="afterok:$each" \
    --wrap="forge-profiling view $folder --save $folder/report.html"

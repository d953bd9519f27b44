"""Energy per sample and of a run: over the GPUs of all ranks, and over the runs that it continues."""

import json
import os
import shutil
import time

import pytest

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.record.reader import read_run
from tests.models import loader
from tests.outcomes import script
from tests.ports import free_port
from tests.record_builder import BATCH, MadeRun
from tests.test_cli import forge
from tests.test_telemetry_callback import PERIOD_S, Waiting, gpu  # noqa: F401  (a fixture)

STEPS = 1200


def energy_line(record):
    """What `summary` and `watch` say, which is the same."""
    said = [
        [line for line in forge(*command, environment={"COLUMNS": "400"}).stdout.splitlines() if "energy " in line]
        for command in (("show", record), ("watch", record, "--once"))
    ]
    assert said[0] == said[1]
    [line] = said[0] or [""]
    return line.removeprefix("energy").strip()


def energy_json(record):
    return json.loads(forge("show", record, "--json").stdout)["energy"]


def made(folder, **changes):
    return MadeRun(**{"outcome": "finished", "began": time.time() - 100, "joules": 5.0, **changes}).write(folder)


@pytest.mark.slow
def test_the_energy_of_all_ranks_is_per_sample_of_all_ranks(tmp_path):
    record = made(tmp_path, ranks=4)
    assert energy_line(record) == "5 J per sample, 384 kJ (0.1 kWh) on 4 GPUs"
    energy = energy_json(record)
    assert energy["joules"] == pytest.approx(4 * 5.0 * BATCH * STEPS)
    assert energy["joules_per_sample"] == pytest.approx(5.0)
    assert energy["samples"] == pytest.approx(4 * BATCH * (STEPS - 5)), "those that count"
    assert (energy["gpus"], energy["ranks"], energy["world_size"], energy["fits"]) == (4, 4, 4, 1)


def test_a_gpu_that_ranks_share_counts_once(tmp_path):
    record = made(tmp_path, ranks=4, gpus=("a", "a", "b", "b"))
    assert energy_line(record) == "2.5 J per sample, 192 kJ on 2 GPUs"


@pytest.mark.slow
def test_ranks_without_a_known_energy_are_said_and_leave_the_sample_unknown(tmp_path):
    record = made(tmp_path, ranks=3)
    (record / "rank1.jsonl").unlink()
    assert energy_line(record) == "192 kJ on 2 GPUs of 2 of 3 ranks"
    assert energy_json(record)["joules_per_sample"] is None


def test_without_a_meter_nothing_is_said(tmp_path):
    record = made(tmp_path, joules=None)
    assert (energy_line(record), energy_json(record)) == ("", None)


@pytest.mark.slow
def test_a_resumed_run_has_the_energy_of_the_runs_before_it(tmp_path):
    first = made(tmp_path / "logs/version_0", joules=8.0, run="first")
    second = made(tmp_path / "logs/version_1", joules=5.0, ranks=2, run="second", continues=str(first))
    third = made(tmp_path / "logs/version_2", joules=5.0, rows=12, run="third", continues=str(second))
    counted = [STEPS - 5, 2 * (STEPS - 5), STEPS / 2 - 5]
    whole = 8.0 * counted[0] + 5.0 * counted[1] + 5.0 * counted[2]
    energy = energy_json(third)
    assert energy["joules"] == pytest.approx(BATCH * STEPS * (8 + 2 * 5 + 5 / 2))
    assert energy["joules_per_sample"] == pytest.approx(whole / sum(counted))
    assert energy["fits"] == 3
    assert energy_line(third) == "5.86 J per sample, 394 kJ (0.1 kWh) on 1 GPU, 3 fits together"
    assert energy_line(second).endswith(" on 2 GPUs, 2 fits together")


@pytest.mark.slow
def test_runs_that_were_moved_together_are_found_and_one_that_is_gone_is_named(tmp_path):
    first = made(tmp_path / "logs/version_0", run="first")
    second = made(tmp_path / "logs/version_1", run="second", continues=str(first))
    alone = energy_json(first)["joules"]
    shutil.move(tmp_path / "logs", tmp_path / "kept")
    moved = tmp_path / "kept/version_1/forge_record"
    assert energy_json(moved)["joules"] == pytest.approx(2 * alone)
    shutil.rmtree(tmp_path / "kept/version_0")
    assert energy_json(moved)["joules"] == pytest.approx(alone)
    assert energy_line(moved) == f"5 J per sample, 96 kJ on 1 GPU, without that of {first}, which is not known"
    assert second != moved


def test_records_that_continue_each_other_in_a_circle_end(tmp_path):
    paths = [tmp_path / f"logs/version_{number}/forge_record" for number in range(2)]
    for number, path in enumerate(paths):
        made(path.parent, run=f"{number}", continues=str(paths[1 - number]))
    assert energy_json(paths[0])["fits"] == 2


def test_a_fit_records_the_energy_of_its_gpu_also_in_warm_up(make_trainer, gpu, tmp_path):  # noqa: F811
    callback = ThroughputCallback(warmup_steps=20, telemetry_period_s=PERIOD_S)
    make_trainer(callback).fit(Waiting(gpu), loader(40))
    [record] = tmp_path.rglob("forge_record")
    used = gpu.boards[0].millijoules / 1e3
    energy = energy_json(record)
    assert 0 < energy["joules"] <= used
    assert energy["joules"] == pytest.approx(used, abs=6.0), "but for the first sample and those after the training"
    summary = read_run(record).ranks[0].state.report.run.machine.telemetry
    assert energy["joules_per_sample"] == pytest.approx(summary.joules_per_sample)
    assert energy_line(record).endswith("on 1 GPU")


@pytest.mark.slow
def test_each_rank_of_a_fit_reads_the_meter_of_its_gpu(tmp_path):
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    done = script("slow_rank.py", tmp_path, "none", "metered", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    energy = energy_json(tmp_path)
    assert (energy["gpus"], energy["ranks"], energy["world_size"]) == (2, 2, 2)
    [folder] = tmp_path.rglob("forge_record")
    of_ranks = [rank.energy for rank in read_run(folder).ranks]
    assert energy["joules"] == pytest.approx(sum(rank.joules for rank in of_ranks))
    assert energy["joules_per_sample"] == pytest.approx(sum(rank.joules_per_sample for rank in of_ranks) / 2)

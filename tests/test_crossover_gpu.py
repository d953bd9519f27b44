"""On a real GPU: what the times of a crossover are made of."""

import json

import pytest
import torch

from lightning_forge_profiling.bench.benchmark import benchmark
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.crossover.sweep import OperationTimer, find_gpu

pytestmark = pytest.mark.gpu


def test_a_call_in_a_stream_takes_its_launch_or_its_kernel_whichever_is_longer():
    timer = OperationTimer("float32", find_gpu(), 0.5)
    for size in (64, 8192):
        times = {way: timer("add", size, way, None).us for way in ("stream", "alone", "copies")}
        matrix = torch.randn(size, size, device="cuda")
        kernel = benchmark(torch.add, matrix, matrix.clone(), flush_l2=False, max_time=0.5)
        print(size, times, kernel)
        assert times["stream"] < times["alone"] < times["copies"]
        if size == 64:
            assert times["stream"] > 1.5 * kernel.median_us
            assert times["stream"] == pytest.approx(kernel.enqueue_us, rel=0.7)
        else:
            assert times["stream"] == pytest.approx(kernel.median_us, rel=0.1)


def test_a_matrix_product_crosses_over(capsys):
    assert main(["crossover", "--ops", "matmul", "--sizes", "32:1024", "--max-time", "0.3", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["gpu"] == torch.cuda.get_device_name()
    stream, alone, copies = (crossover["size"] for crossover in found["operations"][0]["crossovers"])
    print(stream, alone, copies)
    assert 32 <= stream <= alone
    assert copies is None or alone < copies

"""What fills the GPU's memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_forge_profiling.callbacks.model_memory import model_memory
from lightning_forge_profiling.report.run_wording import memory_line
from lightning_forge_profiling.results.analysis import RunEvidence
from lightning_forge_profiling.results.rank import Distribution
from lightning_forge_profiling.results.run import ModelMemory
from lightning_forge_profiling.results.telemetry import TelemetrySummary

FLOAT = 4
GIB = 2**30


class Tied(nn.Module):
    """64 x 32 weights used twice, a frozen layer, and a buffer with a view of it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(requires_grad=False)
        self.register_buffer("whole", torch.zeros(100))
        self.register_buffer("part", self.whole[:10])

    def forward(self, tokens):
        return self.head(self.frozen(self.table(tokens)))


def stepped(optimizer_class, **options):
    model = Tied()
    optimizer = optimizer_class(model.parameters(), **options)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_each_storage_counts_once():
    model, optimizer = stepped(torch.optim.Adam)
    found = model_memory(model, [optimizer], "cpu")
    assert found.parameters_bytes == (64 * 32 + 32 * 32) * FLOAT
    assert found.gradients_bytes == 64 * 32 * FLOAT
    assert found.optimizer_bytes == (2 * 64 * 32 + 1) * FLOAT, "two moments, and the number of steps"
    assert found.buffers_bytes == 100 * FLOAT
    assert found.bytes == sum(
        (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes, found.buffers_bytes)
    )


def test_what_lies_on_another_device_does_not_count():
    model, optimizer = stepped(torch.optim.Adam)
    assert model_memory(model, [optimizer], "cuda").bytes == 0


def test_gradients_that_are_freed_and_an_optimizer_without_state_take_nothing():
    model, optimizer = stepped(torch.optim.SGD, lr=0.1)
    optimizer.zero_grad()
    found = model_memory(model, [optimizer], "cpu")
    assert (found.gradients_bytes, found.optimizer_bytes) == (0, 0)


def test_state_in_lists_and_dictionaries_counts():
    model, optimizer = stepped(torch.optim.SGD, lr=0.1)
    optimizer.state["history"] = {"directions": [torch.zeros(7), (torch.zeros(3),)], "name": "x"}
    assert model_memory(model, [optimizer], "cpu").optimizer_bytes == 10 * FLOAT


# -- in words ----------------------------------------------------------------------------------------------------------


def evidence(*, kept=(10, 10, 20, 0), **telemetry):
    names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")
    kept = ModelMemory(**{name: gib * GIB for name, gib in zip(names, kept, strict=True)})
    gpu = TelemetrySummary(device="GPU", memory_total_gib=80.0, **telemetry)
    step_ms = Distribution(mean=1.0, p50=1.0, min=1.0, max=1.0)
    return RunEvidence(steps=1, on_device=True, step_ms=step_ms, regions={}, telemetry=gpu, model_memory=kept)


def test_the_peak_is_what_the_model_keeps_and_activations():
    run = evidence(allocated_peak_gib=55.0, reserved_gib=60.0, memory_peak_gib=62.0)
    assert memory_line(run) == (
        "peak 55.0 of 80.0 GiB: parameters 10.0, gradients 10.0, optimizer 20.0, activations and temporaries 15.0; "
        # 80 less 2 of the driver and 40 that are kept leave 38 for 15
        "5.00 more cached by the allocator. Out of memory at about 2.5 times this batch"
    )


@pytest.mark.parametrize(
    "unknown", [{"allocated_peak_gib": None}, {"memory_total_gib": None}], ids=lambda unknown: next(iter(unknown))
)
def test_without_readings_nothing_is_said(unknown):
    run = evidence(allocated_peak_gib=55.0)
    assert memory_line(replace(run, telemetry=replace(run.telemetry, **unknown))) == ""
    assert memory_line(replace(run, model_memory=None)) == ""


def test_without_the_gpu_s_whole_use_no_batch_is_predicted():
    assert "Out of memory" not in memory_line(evidence(allocated_peak_gib=55.0, reserved_gib=60.0))


def test_a_model_that_leaves_nearly_all_of_the_memory_has_no_limit_worth_a_word():
    run = evidence(kept=(1, 1, 1, 0), allocated_peak_gib=4.0, reserved_gib=4.0, memory_peak_gib=5.0)
    assert "Out of memory" not in memory_line(run)

"""What the backward pass computes a second time, in traces of real runs."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_forge_profiling.analysis.operators import recomputed
from lightning_forge_profiling.analysis.recording import by_optimizer, prepare
from lightning_forge_profiling.kineto.reader import read_trace
from tests.models import Product

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::convolution"}


class Block(nn.Module):
    """Three products, two of them by square weights, one of those without a bias."""

    def __init__(self):
        super().__init__()
        self.inner, self.square = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.out = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.out(self.square(self.inner(x).relu()).relu())


class Attention(nn.Module):
    """Scores are one product, and the gradient of their softmax is one like it."""

    def forward(self, x):
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def record(step, tmp_path, *, warmup=2):
    """A trace of one call, and what is in it."""
    for _ in range(warmup):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    recording = prepare(read_trace(path))
    names, operators = recording.trace.names, recording.trace.operators
    calls = np.flatnonzero([names[name] in PRODUCTS for name in operators.name.tolist()])
    return recording, calls, [names[name].removeprefix("aten::") for name in operators.name[calls].tolist()]


def counted_again(step, tmp_path):
    """How often each product is computed a second time; None where that cannot be told."""
    recording, calls, names = record(step, tmp_path)
    again = recomputed(recording, calls)
    return None if again is None else Counter(name for name, is_again in zip(names, again, strict=True) if is_again)


def training(module, *inputs):
    def step():
        module(*inputs).sum().backward()

    return step


def rows():
    torch.manual_seed(0)
    return torch.randn(8, 32, requires_grad=True)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


def test_nothing_is_computed_again_without_checkpoints(tmp_path):
    assert counted_again(training(Block(), rows()), tmp_path) == Counter()
    assert counted_again(training(Attention(), torch.randn(2, 8, 8, requires_grad=True)), tmp_path) == Counter()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_computed_again(tmp_path, reentrant):
    block = Block()
    step = training(lambda x: checkpoint(block, x, use_reentrant=reentrant), rows())
    assert counted_again(step, tmp_path) == Counter(mm=2, addmm=1)


def test_a_checkpointed_block_without_gradients_for_its_weights_is_computed_again(tmp_path):
    """As in adapters: each layer has one product in its backward pass, and operations alone would not show it."""
    block = Block().requires_grad_(requires_grad=False)
    step = training(lambda x: checkpoint(block, x, use_reentrant=True), rows())
    assert counted_again(step, tmp_path) == Counter(mm=2, addmm=1)


def test_a_checkpointed_convolution_is_computed_again(tmp_path):
    convolution = nn.Conv2d(3, 4, 3)
    step = training(lambda x: checkpoint(convolution, x, use_reentrant=True), torch.randn(2, 3, 8, 8).requires_grad_())
    assert counted_again(step, tmp_path) == Counter(convolution=1)


class OwnOperators(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(48, 16))

    def forward(self, x):
        return Product.apply(Product.apply(x, self.first).relu(), self.second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_operator_of_the_users_own_is_computed_again_with_all_that_is_in_it(tmp_path, reentrant):
    own = OwnOperators()
    assert counted_again(training(own, rows()), tmp_path) == Counter()
    step = training(lambda x: checkpoint(own, x, use_reentrant=reentrant), rows())
    assert counted_again(step, tmp_path) == Counter(mm=2)


def test_a_checkpoint_within_a_checkpoint_is_computed_again_twice(tmp_path):
    block = Block()
    inner = partial(checkpoint, block, use_reentrant=True)
    step = training(lambda x: checkpoint(inner, x, use_reentrant=True), rows())
    assert counted_again(step, tmp_path) == Counter(mm=4, addmm=2)


class PartlyWithoutGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.learned, self.fixed = nn.Linear(32, 48), nn.Linear(32, 48)

    def forward(self, x):
        with torch.no_grad():
            gate = self.fixed(x)
        return self.learned(x) * gate


def test_a_part_without_gradients_in_a_checkpoint_cannot_be_told(tmp_path):
    module = PartlyWithoutGradients()
    step = training(lambda x: checkpoint(module, x, use_reentrant=False), rows())
    assert counted_again(step, tmp_path) is None


class Tied(nn.Module):
    """Its gradient in the input is made of products like its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16))

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.T


@pytest.mark.parametrize("module", [Block, Tied])
def test_with_a_gradient_penalty_it_cannot_be_told(tmp_path, module):
    """With `create_graph` autograd records the gradients' products, as it does what is computed again."""
    module = module()

    def step():
        x = rows()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    assert counted_again(step, tmp_path) is None


@pytest.mark.slow
def test_without_autograds_engine_in_the_trace_it_cannot_be_told(tmp_path):
    """With compiled autograd the backward pass is one graph."""
    block, x = Block(), rows()

    def step():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            checkpoint(block, x, use_reentrant=False).sum().backward()

    assert counted_again(step, tmp_path) is None


def test_without_a_backward_pass_there_is_nothing_to_tell(tmp_path):
    assert counted_again(torch.no_grad()(lambda: Block()(rows())), tmp_path) == Counter()


@pytest.mark.slow
def test_a_compiled_block_computes_nothing_again(tmp_path):
    block = torch.compile(Block(), backend="aot_eager")
    assert counted_again(training(block, rows()), tmp_path) == Counter()


def test_a_checkpoint_inside_of_compiled_code_cannot_be_told_from_gradients(tmp_path):
    block = Block()
    step = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="aot_eager")
    assert counted_again(training(step, rows()), tmp_path) is None


def test_a_gradient_like_the_forward_pass_cannot_be_told_from_that_in_compiled_code(tmp_path):
    attention = torch.compile(Attention(), backend="aot_eager")
    assert counted_again(training(attention, torch.randn(2, 8, 8, requires_grad=True)), tmp_path) is None


def test_a_checkpoint_around_compiled_code_computes_all_of_it_again(tmp_path):
    block = torch.compile(Block(), backend="aot_eager")
    step = training(lambda x: checkpoint(block, x, use_reentrant=False), rows())
    assert counted_again(step, tmp_path) == Counter(mm=2, addmm=1)


class Orthogonalizing(torch.optim.SGD):
    """As Muon does, multiplies in its step."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim == 2:
                    weight.sub_(weight.grad @ weight.grad.T @ weight.grad, alpha=0.01)


def test_what_an_optimizer_multiplies_is_told_from_what_its_closure_does(tmp_path):
    block, x = Block(), rows()
    optimizer = Orthogonalizing(block.parameters())

    def closure():
        optimizer.zero_grad()
        training(block, x)()

    recording, calls, names = record(lambda: optimizer.step(closure), tmp_path)
    operators = recording.trace.operators
    by_it = by_optimizer(recording.trace, recording.nesting, operators.start[calls], calls)
    assert Counter(name for name, is_its in zip(names, by_it, strict=True) if is_its) == Counter(mm=2 * 3)
    assert len(names) == 2 * 3 + 3 * 3, "and the block's own products are not"

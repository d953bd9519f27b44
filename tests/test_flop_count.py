"""`count_flops`: what one batch costs, against counts by hand, and with nothing changed by it."""

from collections import UserDict
from dataclasses import dataclass

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.count import FlopCount, count_flops
from tests.models import Product

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

B, S, D = 2, 16, 32
PRODUCT = 2 * B * S * D * D  # one square layer


class Attention(nn.Module):
    """Causal self-attention with `heads` heads, without the layer behind it."""

    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(D, 3 * D, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Net(nn.Module):
    """Two square layers with dropout, batch statistics and a tensor that is neither parameter nor buffer."""

    def __init__(self, *, recompute=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        self.norm = nn.BatchNorm1d(D)
        self.kept = [torch.ones(D)]
        self.recompute = recompute

    def forward(self, x):
        if self.recompute is None:
            x = self.layers(x)
        else:
            x = checkpoint(self.layers, x, use_reentrant=self.recompute == "reentrant")
        return self.norm(F.dropout(x.flatten(0, 1), 0.1)) * self.kept[0].to(x.device)


class Lit(L.LightningModule):
    """A module as Lightning trains it."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        x, y = batch
        noise = torch.rand_like(x)
        loss = F.mse_loss(self.net(x + noise), y.flatten(0, 1))
        self.log("loss", loss)
        return {"loss": loss, "extra": x}


def batch(**options):
    return torch.randn(B, S, D, **options), torch.randn(B, S, D, **options)


def test_a_layer_costs_two_operations_per_weight_and_row():
    # nothing in front of the first layer needs a gradient: one product less
    counted = count_flops(Net(), batch()[0])
    assert (counted.forward, counted.backward, counted.recomputed) == (2 * PRODUCT, 3 * PRODUCT, 0)
    assert counted.total == counted.hardware == sum(counted.by_operator.values()) == 5 * PRODUCT
    assert counted.by_operator == {"aten.addmm": 2 * PRODUCT, "aten.mm": 3 * PRODUCT}
    assert counted.uncounted == ()


def test_forward_alone():
    counted = count_flops(Net(), batch()[0], backward=False)
    assert (counted.forward, counted.backward) == (2 * PRODUCT, 0)


def test_frozen_parameters_have_no_backward():
    net = Net()
    net.layers[0].requires_grad_(requires_grad=False)
    assert count_flops(net, batch()[0]).backward == PRODUCT, "the second layer's weight"
    assert count_flops(net.requires_grad_(requires_grad=False), batch()[0]).backward == 0


# the newer kind stops once it has what the backward pass needs: the second layer's input, not its output
@pytest.mark.parametrize(("recompute", "layers"), [("reentrant", 2), ("not reentrant", 1)])
def test_what_checkpointing_computes_again_is_not_the_models(recompute, layers):
    # a reentrant checkpoint needs an input with a gradient
    x = torch.randn(B, S, D, requires_grad=True)
    plain, again = count_flops(Net(), x), count_flops(Net(recompute=recompute), x)
    assert again.total == plain.total == 6 * PRODUCT
    assert again.recomputed == layers * PRODUCT
    assert again.hardware == sum(again.by_operator.values()) == (6 + layers) * PRODUCT


def test_attention_counts_on_a_cpu_as_on_a_gpu():
    counted = count_flops(Attention(), batch()[0])
    product = 2 * B * S * S * D  # all heads together, the masked half too
    assert counted.forward == 3 * PRODUCT + 2 * product
    assert counted.backward == 3 * PRODUCT + 5 * product, "fused attention computes its scores again"
    with sdpa_kernel(SDPBackend.MATH):
        assert count_flops(Attention(), batch()[0]).backward == 3 * PRODUCT + 4 * product


@pytest.mark.parametrize(("layer", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_a_recurrent_layer_counts_as_its_products(layer, gates):
    libraries = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
    counted = count_flops(layer(D, D, batch_first=True), batch()[0])
    assert counted.forward == 2 * gates * PRODUCT
    assert counted.uncounted == ()
    assert (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled) == libraries


def test_a_convolution_agrees_with_pytorch_on_real_tensors():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    x = torch.randn(2, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    assert count_flops(net, x).total == counter.get_total_flops()


@pytest.mark.parametrize(
    ("layer", "dimensions", "stride", "groups"),
    [(nn.Conv1d, 1, 2, 4), (nn.Conv2d, 2, 1, 1), (nn.Conv2d, 2, 2, 8), (nn.Conv3d, 3, 2, 2)],
)
def test_a_grouped_convolution_counts_by_hand(layer, dimensions, stride, groups):
    net = layer(8, 16, 3, stride=stride, padding=1, groups=groups)
    x = torch.randn(2, 8, *[6] * dimensions, requires_grad=True)
    # each of 16 channels at each position of the output sums three numbers in each direction of 8 / groups channels
    product = 2 * 2 * 16 * (6 // stride) ** dimensions * 3**dimensions * 8 // groups
    counted = count_flops(net, x)
    assert (counted.forward, counted.backward) == (product, 2 * product)
    assert count_flops(net, x.detach()).backward == product, "the weight's gradient alone"
    assert count_flops(net.requires_grad_(requires_grad=False), x).backward == product, "the input's alone"


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 2), (1, 8)])
def test_a_transposed_convolution_counts_by_hand(stride, groups):
    net = nn.ConvTranspose2d(8, 16, 3, stride=stride, groups=groups)
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    # each number of the input goes to three by three positions of 16 / groups channels
    product = 2 * x.numel() * 9 * 16 // groups
    counted = count_flops(net, x)
    assert (counted.forward, counted.backward) == (product, 2 * product)


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        y = self.narrow(F.gelu(self.wide(self.depthwise(x).permute(0, 2, 3, 1))))
        return x + y.permute(0, 3, 1, 2)


def test_a_depthwise_convolutions_backward_is_no_full_ones():
    positions, channels = 2 * 14 * 14, 96
    depthwise, pointwise = 2 * positions * channels * 49, 2 * 2 * positions * channels * 4 * channels
    counted = count_flops(ConvNeXtBlock(channels), torch.randn(2, channels, 14, 14))
    assert counted.forward == depthwise + pointwise
    assert counted.backward == depthwise + 2 * pointwise
    assert counted.by_operator["aten.convolution_backward"] == depthwise


class Encodes(nn.Module):
    """A head behind a frozen encoder."""

    def __init__(self, encoder, *, no_grad):
        super().__init__()
        self.encoder = encoder.eval() if no_grad else encoder.requires_grad_(requires_grad=False).eval()
        self.no_grad = no_grad
        self.head = nn.Linear(D, D)

    def forward(self, x):
        with torch.set_grad_enabled(not self.no_grad):
            x = self.encoder(x, x, x)[0] if isinstance(self.encoder, nn.MultiheadAttention) else self.encoder(x)
        return self.head(x)


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize(
    ("encoder", "products"),
    [
        (lambda: nn.MultiheadAttention(D, 4, batch_first=True), 4),
        (lambda: nn.TransformerEncoderLayer(D, 4, 4 * D, batch_first=True), 12),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 4 * D, batch_first=True), 1), 12),
    ],
)
def test_a_frozen_encoder_counts_in_full(encoder, products, no_grad):
    net = Encodes(encoder(), no_grad=no_grad)
    fast = torch.backends.mha.get_fastpath_enabled()
    counted = count_flops(net, batch()[0])
    scores = 2 * B * S * S * D
    assert counted.forward == products * PRODUCT + 2 * scores + PRODUCT
    assert (counted.backward, counted.uncounted) == (PRODUCT, ())
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_a_product_with_a_sparse_matrix_is_named():
    class Graph(nn.Linear):
        def forward(self, adjacency, x):
            return torch.sparse.mm(adjacency, super().forward(x))

    counted = count_flops(Graph(D, D), (torch.eye(S).to_sparse(), torch.randn(S, D)))
    assert counted.forward == 2 * S * D * D
    assert counted.uncounted == ("aten._sparse_addmm",)


def test_a_lightning_modules_training_step_is_counted():
    lit = Lit()
    assert count_flops(lit, batch()).total == 5 * PRODUCT
    assert lit.calls == 1


class OtherName(Lit):
    def training_step(self, batch, i):
        assert i == 0
        return super().training_step(batch, i)["loss"]


class NoIndex(Lit):
    def training_step(self, batch):
        return super().training_step(batch, 0)["loss"]


@pytest.mark.parametrize("lit", [OtherName, NoIndex])
def test_a_training_step_is_called_as_lightning_does(lit):
    assert count_flops(lit(), batch()).total == 5 * PRODUCT


def state_of(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), "kept": module.net.kept[0]}
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: (id(t), t.clone()) for name, t in {**tensors, **{f"{n}.grad": g for n, g in grads.items()}}.items()}


def test_nothing_is_changed_by_it():
    lit = Lit()
    lit.net.layers[0].eval()
    for parameter in lit.parameters():
        parameter.grad = torch.randn_like(parameter)
    held = batch()
    before, modes, inputs = state_of(lit), [m.training for m in lit.modules()], [x.clone() for x in held]
    numbers = torch.get_rng_state()
    count_flops(lit, held)
    after = state_of(lit)
    assert before.keys() == after.keys()
    for name, (identity, value) in before.items():
        assert after[name][0] == identity
        assert torch.equal(after[name][1], value), name
    assert [m.training for m in lit.modules()] == modes
    assert all(torch.equal(x, y) for x, y in zip(held, inputs, strict=True))
    assert torch.equal(numbers, torch.get_rng_state())
    assert lit._trainer is None


def test_a_module_on_the_meta_device_counts_the_same():
    with torch.device("meta"):
        lit, attention = Lit(), Attention()
    assert count_flops(lit, batch(device="meta")).total == 5 * PRODUCT
    with sdpa_kernel(SDPBackend.MATH):
        expected = count_flops(Attention(), batch()[0])
    assert count_flops(attention, batch(device="meta")[0]) == expected, "attention as separate products"


def test_a_module_larger_than_the_machine_is_counted():
    with torch.device("meta"):
        huge = nn.Linear(2**20, 2**20, bias=False)  # 4 TiB
        x = torch.empty(1, 2**20)
    assert count_flops(huge, x).forward == 2 * 2**40


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    net[1].weight = net[0].weight
    net[0].requires_grad_(requires_grad=False)
    net[1].bias = None
    assert count_flops(net, batch()[0]).backward == 0


def test_a_compiled_module_counts_as_written():
    net = Net()
    net.compile(backend="eager")
    assert count_flops(net, batch()[0]).total == 5 * PRODUCT
    assert count_flops(torch.compile(Net(), backend="eager"), batch()[0]).total == 5 * PRODUCT


@dataclass
class Held:
    x: torch.Tensor


class TakesHeld(nn.Linear):
    def forward(self, held):
        return super().forward(held.x if isinstance(held, Held) else held["x"])


class TakesNames(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x if scale is None else x * scale)


@pytest.mark.parametrize(
    ("module", "held"),
    [
        (TakesHeld, Held),
        (TakesHeld, lambda x: UserDict(x=x)),
        (TakesNames, lambda x: {"x": x, "scale": x}),
        (TakesNames, lambda x: (x, x)),
        (TakesNames, lambda x: [x]),
    ],
)
def test_batches_of_any_kind(module, held):
    assert count_flops(module(D, D), held(batch()[0])).forward == PRODUCT


class HasMore(nn.Linear):
    def forward(self, x):
        return torch.mv(super().forward(x).flatten(0, 1), x[0, 0]) + torch.ops.tests_flop_count.scale(x)[0, :, 0].sum()


@torch.library.custom_op("tests_flop_count::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


scale.register_fake(torch.empty_like)


def test_what_has_no_formula_is_named():
    counted = count_flops(HasMore(D, D), batch()[0])
    assert counted.uncounted == ("aten.mv", "tests_flop_count.scale")
    assert counted.forward == PRODUCT


class Normalized(nn.Linear):
    def forward(self, x):
        return torch.linalg.cross(F.normalize(super().forward(x), dim=-1)[..., :3], x[..., :3]).lgamma()


class Quantized(nn.Linear):
    def forward(self, x):
        weight = torch.zeros(D, D, dtype=torch.int8, device=x.device)
        scales = torch.ones(D, dtype=torch.bfloat16, device=x.device)
        return super().forward(x) + torch._weight_int8pack_mm(x.flatten(0, 1).bfloat16(), weight, scales).view_as(x)


def test_what_is_no_product_is_no_gap():
    assert count_flops(Normalized(D, D), batch()[0]).uncounted == ()


def test_a_quantized_product_is_named():
    assert count_flops(Quantized(D, D), batch()[0]).uncounted == ("aten._weight_int8pack_mm",)


class LooksAtValues(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()


def test_a_step_that_reads_values_is_counted():
    assert count_flops(LooksAtValues(D, D), batch()[0]).total == 2 * PRODUCT


class Fails(Net):
    def forward(self, x):
        super().forward(x)
        raise ZeroDivisionError("of the step")


def test_a_step_that_fails_raises_its_error_and_changes_nothing():
    net, x = Fails(), batch()[0]
    net.layers[0].weight.grad = torch.ones(D, D)
    before, numbers = net.norm.running_mean.clone(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="of the step"):
        count_flops(net, x)
    assert torch.equal(net.norm.running_mean, before)
    assert torch.equal(net.layers[0].weight.grad, torch.ones(D, D))
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, r"takes a module \(torch.nn.Module\) and a batch, got a NoneType"),
        (batch, "got a function"),
        (Net, "got the class Net"),
    ],
)
def test_what_is_no_module_is_refused(module, message):
    with pytest.raises(ConfigurationError, match=message):
        count_flops(module, batch()[0])


def test_it_agrees_with_a_live_step():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 4, 4 * D, batch_first=True)
    x = batch()[0]
    with sdpa_kernel(SDPBackend.MATH):  # the one kind of attention that PyTorch counts on a CPU
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        assert count_flops(layer, x).total == counter.get_total_flops()


@pytest.mark.gpu
def test_it_is_the_same_on_a_gpu():
    x = batch()[0]
    for module in (Lit(), Attention(), nn.TransformerEncoderLayer(D, 4, 4 * D, batch_first=True, dropout=0.0)):
        held = batch() if isinstance(module, Lit) else x
        expected = count_flops(module, held)
        on_gpu = count_flops(module.cuda(), tuple(x.cuda() for x in held) if isinstance(held, tuple) else held.cuda())
        assert (on_gpu.forward, on_gpu.backward, on_gpu.uncounted) == (expected.forward, expected.backward, ())
        assert next(module.parameters()).is_cuda


def test_what_was_counted_prints():
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)
    counted = count_flops(layer, torch.randn(2, 16, 64))
    first, *rest = str(counted).splitlines()
    assert first.startswith(f"{counted.total / 1e6:,.3f} MFLOP a batch: ")
    assert [line.split()[-1] for line in rest[: len(counted.by_operator)]] == list(counted.by_operator)


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (2_600, "2.600 kFLOP"),
        (3_141_592, "3.142 MFLOP"),
        (2 * 10**9, "2.000 GFLOP"),
        (12_345 * 10**12, "12,345.000 TFLOP"),
    ],
)
def test_the_unit_is_the_totals(flops, text):
    counted = FlopCount(forward=flops, backward=0, recomputed=0, by_operator={"aten.mm": flops}, uncounted=())
    unit = text.split()[-1]
    first, second = str(counted).splitlines()
    assert first == f"{text} a batch: {text} forward, 0{'' if unit == 'FLOP' else '.000'} {unit} backward"
    assert second.split()[:2] == text.split()


def test_what_was_counted_says_how_attention_counts_and_what_is_missing():
    counted = FlopCount(
        forward=4,
        backward=10,
        recomputed=4,
        by_operator={"aten._scaled_dot_product_flash_attention": 18},
        uncounted=("mylib.scan",),
    )
    text = str(counted)
    assert "a causal mask does not halve it" in text
    assert "mylib.scan" in text
    assert "are recomputed" in text


class OwnOperators(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) for _ in range(2))
        self.reentrant = reentrant

    def products(self, x):
        for weight in self.weights:
            x = Product.apply(x, weight).relu()
        return x

    def forward(self, x):
        return (
            self.products(x) if self.reentrant is None else checkpoint(self.products, x, use_reentrant=self.reentrant)
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_custom_operators_count_as_computed_again(reentrant):
    x = torch.randn(8, 32, requires_grad=True)
    once, again = count_flops(OwnOperators(), x), count_flops(OwnOperators(reentrant), x)
    assert (once.forward, once.backward, once.recomputed) == (2 * 2 * 8 * 32 * 32, 2 * once.forward, 0)
    assert (again.total, again.recomputed) == (once.total, once.forward)


class SlopePenalty(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 1)

    def training_step(self, batch):
        x = batch.requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)
        return slope.square().sum()


def test_a_step_that_takes_a_gradient_in_its_input_is_counted():
    assert count_flops(SlopePenalty(), torch.randn(8, 32)).total > 0

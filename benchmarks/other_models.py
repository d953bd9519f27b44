"""Other people's models with what slows them and the fix that is named for it, for `docs/measure_fixes.py`.

GPT-2, Llama, BERT, ViT, T5, Qwen2 and DistilBERT are those of `transformers`, ConvNeXt, Swin and ResNet-18 those of
`torchvision`, with random weights; either is imported where one of them is made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.real_models import ResNet

__all__ = ["CHANGES", "Made", "make"]

_MIXED = {"precision": "bf16-mixed"}


@dataclass(slots=True)
class Made:
    """A network with its loss of a batch and its optimizer's options; changed in place."""

    network: nn.Module
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    batch: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    update: dict[str, Any] = field(default_factory=lambda: {"fused": True})


class _Trained(L.LightningModule):
    def __init__(self, made: Made) -> None:
        super().__init__()
        self.network, self.made = made.network, made

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:  # noqa: ARG002
        return self.made.loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return self.made.optimizer(trained, lr=1e-5, **self.made.update)  # type: ignore[call-arg]


def _of_tokens(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return network(input_ids=batch[0], labels=batch[0], use_cache=False).loss  # type: ignore[no-any-return]


def _of_labels(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    found = network(batch[0])
    return functional.cross_entropy(getattr(found, "logits", found), batch[1])


def _gpt2(rows: int, length: int, *, layers: int = 12, width: int = 768, attention: str = "sdpa") -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, n_positions=2048, use_cache=False)
    config._attn_implementation = attention  # noqa: SLF001  (as from_pretrained(attn_implementation=...) sets it)
    return Made(GPT2LMHeadModel(config), _of_tokens, (torch.randint(0, 50257, (rows, length)),), _MIXED)


def _in_tf32() -> Made:
    torch.set_float32_matmul_precision("high")
    made = _gpt2(8, 1024)
    made.options = {}
    return made


def _checkpointed() -> Made:
    made = _gpt2(2, 256, layers=24, width=1024)
    made.network.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return made


class _LowRank(nn.Module):
    def __init__(self, base: nn.Module, width: int, rank: int = 8) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(width, rank, bias=False), nn.Linear(rank, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))  # type: ignore[no-any-return]


def _lora() -> Made:
    made = _gpt2(1, 128)
    made.network.requires_grad_(requires_grad=False)
    for block in made.network.transformer.h:  # type: ignore[union-attr]
        block.attn.c_attn = _LowRank(block.attn.c_attn, 768)  # type: ignore[union-attr]
    return made


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (no dependency)

    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000}
    config = LlamaConfig(hidden_size=1024, num_hidden_layers=8, use_cache=False, **sizes)
    return Made(LlamaForCausalLM(config), _of_tokens, (torch.randint(0, 32000, (8, 1024)),), _MIXED)


def _bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415  (no dependency)

    batch = torch.randint(0, 1000, (32, 128)), torch.randint(0, 10, (32,))
    return Made(BertForSequenceClassification(BertConfig(num_labels=10)), _of_labels, batch)


def _vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415  (no dependency)

    return Made(ViTForImageClassification(ViTConfig(num_labels=1000)), _of_labels, _pictures(64), _MIXED)


def _pictures(rows: int, side: int = 224) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, side, side), torch.randint(0, 1000, (rows,))


def _resnet_in_float32() -> Made:
    torch.backends.cudnn.allow_tf32 = False
    return Made(ResNet().layers, _of_labels, _pictures(64), {}, torch.optim.SGD, {"momentum": 0.9})


def _resnet_channels_last() -> Made:
    pictures, labels = _pictures(32)
    batch = pictures.contiguous(memory_format=torch.channels_last), labels
    network = ResNet().layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Made(network, _of_labels, batch, _MIXED, torch.optim.SGD, {"momentum": 0.9})


class _Convolutions(nn.Module):
    """A residual block of a U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shorter = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shorter(x) + self.second(self.first(x))  # type: ignore[no-any-return]


class _UNet(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(_Convolutions(inputs * width, outputs * width) for inputs, outputs in _DOWN)
        self.up = nn.ModuleList(_Convolutions(inputs * width, outputs * width) for inputs, outputs in _UP)
        self.middle = _Convolutions(4 * width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.begin(x), list[Tensor]()
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.end(x)  # type: ignore[no-any-return]


_DOWN, _UP = ((1, 1), (1, 2), (2, 4)), ((8, 2), (4, 1), (2, 1))


def _unet(options: dict[str, Any]) -> Made:
    def loss(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.mse_loss(network(batch[0]), batch[0])

    return Made(_UNet(), loss, _pictures(16, 64)[:1], options)


class _Cells(nn.Module):
    """An LSTM as a Python loop over time."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(64, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for time in x.unbind(1):
            hidden, cell = self.cell(time, (hidden, cell))
        return self.head(hidden)  # type: ignore[no-any-return]


class _Residual(nn.Module):
    """A perceptron for tables, in small layers."""

    def __init__(self, layers: int = 20, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.1))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Rows(nn.Module):
    """An embedding, of whose rows a batch uses few."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.score = nn.Embedding(4_000_000, 128), nn.Linear(128, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.rows(x).mean(1)).squeeze(1)  # type: ignore[no-any-return]


def _rows() -> Made:
    def loss(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return network(batch[0]).square().mean()  # type: ignore[no-any-return]

    return Made(_Rows(), loss, (torch.randint(0, 4_000_000, (1024, 20)),), {}, torch.optim.Adam, {})


def _labelled(network: nn.Module, rows: int, *sizes: int) -> Made:
    return Made(network, _of_labels, (torch.randn(rows, *sizes), torch.randint(0, 10, (rows,))))


def _loop() -> Made:
    made = _gpt2(4, 512)
    made.update = {"foreach": False}
    return made


def _wide(inputs: int = 27648) -> Made:
    layers = nn.Linear(inputs, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    made = _labelled(nn.Sequential(*layers), 2048, inputs)
    made.optimizer, made.update = torch.optim.SGD, {}
    return made


# -- those on which nothing was fitted -------------------------------------------------------------------------------


def _t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415  (no dependency)

    def loss(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return network(input_ids=batch[0], labels=batch[1]).loss  # type: ignore[no-any-return]

    batch = torch.randint(0, 32000, (16, 256)), torch.randint(0, 32000, (16, 128))
    return Made(T5ForConditionalGeneration(T5Config(use_cache=False, decoder_start_token_id=0)), loss, batch, _MIXED)


def _vision(name: str, rows: int, options: dict[str, Any], **update: bool) -> Made:
    import torchvision  # noqa: PLC0415  (no dependency)

    network = getattr(torchvision.models, name)(weights=None)
    return Made(network, _of_labels, _pictures(rows), options, update=update or {"fused": True})


def _distilbert(length: int, options: dict[str, Any]) -> Made:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification  # noqa: PLC0415  (no dependency)

    torch.set_float32_matmul_precision("highest" if options else "high")
    batch = torch.randint(0, 30000, (32, length)), torch.randint(0, 10, (32,))
    return Made(DistilBertForSequenceClassification(DistilBertConfig(num_labels=10)), _of_labels, batch, options)


def _qwen(rows: int, attention: str = "sdpa", *, checkpointed: bool = False) -> Made:
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415  (no dependency)

    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 3072, "vocab_size": 32000}
    config = Qwen2Config(hidden_size=1024, num_hidden_layers=12, use_cache=False, **sizes)
    config._attn_implementation = attention  # noqa: SLF001  (as from_pretrained(attn_implementation=...) sets it)
    network = Qwen2ForCausalLM(config)
    if checkpointed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    return Made(network, _of_tokens, (torch.randint(0, 32000, (rows, 1024)),), _MIXED)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 6), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))  # type: ignore[no-any-return]


class _Gates(nn.Module):
    """A GRU as a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(64, 384), nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], 384)
        for time in x.unbind(1):
            hidden = self.cell(time, hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _deep() -> Made:
    torch.set_float32_matmul_precision("highest")
    layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU())]
    return _labelled(nn.Sequential(*layers, nn.Linear(4096, 10)), 2048, 4096)


def _pageable_pictures() -> Made:
    made = _vision("resnet18", 192, _MIXED)
    made.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made.batch = made.batch[0].contiguous(memory_format=torch.channels_last), made.batch[1]
    made.optimizer, made.update = torch.optim.SGD, {"momentum": 0.9}
    return made


def _compile(made: Made, mode: str | None = None) -> None:
    made.network.compile(mode=mode)


def _mixed(made: Made) -> None:
    made.options = _MIXED


def _pin(made: Made) -> None:
    made.batch = tuple(each.pin_memory() for each in made.batch)


def _fuse(made: Made) -> None:
    made.update = {"fused": True}


def _keep_activations(made: Made) -> None:
    made.network.gradient_checkpointing_disable()  # type: ignore[operator]


_graphs = partial(_compile, mode="reduce-overhead")

CHANGES: dict[str, tuple[Callable[[], Made], Callable[[Made], None], str]] = {
    "resnet-50-float32": (_resnet_in_float32, _mixed, "compute-bound"),
    "bert-float32": (_bert, _mixed, "compute-bound"),
    "gpt2-tf32": (_in_tf32, _mixed, "compute-bound"),
    "gpt2-eager": (partial(_gpt2, 2, 2048, attention="eager"), _compile, "memory-bandwidth-bound"),
    "gpt2-16x512": (partial(_gpt2, 16, 512), _compile, "launch-bound"),
    "llama": (_llama, _compile, "launch-bound"),
    "vit": (_vit, _compile, "launch-bound"),
    "resnet-50-channels-last": (_resnet_channels_last, _graphs, "launch-bound"),
    "gpt2-lora": (_lora, _graphs, "launch-bound"),
    "gpt2-checkpointed-graphs": (_checkpointed, _graphs, "launch-bound"),
    "lstm-cells": (lambda: _labelled(_Cells(), 64, 64, 64), _graphs, "launch-bound"),
    "table-perceptron": (lambda: _labelled(_Residual(), 256, 256), _graphs, "launch-bound"),
    "unet": (partial(_unet, _MIXED), _graphs, "launch-bound"),
    "unet-tf32": (partial(_unet, {}), _graphs, "launch-bound"),
    "gpt2-checkpointed": (_checkpointed, _keep_activations, "slow-call"),
    "gpt2-optimizer-loop": (_loop, _fuse, "slow-optimizer"),
    "embedding-adam": (_rows, _fuse, "slow-optimizer"),
    "pageable-batches": (_wide, _pin, "transfer-bound"),
    # on which nothing was fitted
    "t5": (_t5, _graphs, "launch-bound"),
    "convnext": (partial(_vision, "convnext_tiny", 64, _MIXED), _graphs, "launch-bound"),
    "swin": (partial(_vision, "swin_t", 64, _MIXED), _graphs, "launch-bound"),
    "distilbert": (partial(_distilbert, 128, _MIXED), _graphs, "launch-bound"),
    "encoder": (lambda: _labelled(_Encoder(), 16, 64, 256), _graphs, "launch-bound"),
    "qwen2": (partial(_qwen, 4), _graphs, "launch-bound"),
    "qwen2-eager": (partial(_qwen, 4, "eager"), _compile, "launch-bound"),
    "gru-cells": (lambda: _labelled(_Gates(), 128, 80, 64), _graphs, "launch-bound"),
    "convnext-float32": (partial(_vision, "convnext_small", 64, {}), _mixed, "compute-bound"),
    "distilbert-tf32": (partial(_distilbert, 256, {}), _mixed, "compute-bound"),
    "perceptron-float32": (_deep, _mixed, "compute-bound"),
    "swin-optimizer-loop": (partial(_vision, "swin_t", 16, _MIXED, foreach=False), _fuse, "slow-optimizer"),
    "pageable-pictures": (_pageable_pictures, _pin, "transfer-bound"),
    "qwen2-checkpointed": (partial(_qwen, 8, checkpointed=True), _keep_activations, "slow-call"),
}
"""By name what is made, the named change, and the code of the finding that names it."""


def make(name: str, *, changed: bool) -> tuple[L.LightningModule, tuple[Tensor, ...], dict[str, Any]]:
    """A module that trains such a network, a batch for it, and options for the Trainer."""
    new, change, _ = CHANGES[name]
    made = new()
    if not name.startswith("pageable") and torch.cuda.is_available():
        _pin(made)
    if changed:
        change(made)
    return _Trained(made), made.batch, made.options

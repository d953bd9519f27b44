"""Scripts of a user's with mistakes in real models, for `forge-profiling try`; `--best` has the best changes known.

    forge-profiling try --yes -m benchmarks.try_scripts gpt2
    python -m benchmarks.try_scripts gpt2
    python -m benchmarks.try_scripts gpt2 --best

Without `try` it prints the mean step after a warm-up by a clock of its own. `--small` is for a machine without a GPU.
"""

import argparse
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from benchmarks.real_models import Pictures, ResNet

WARMUP = 15  # steps that do not count


class Script(L.LightningModule):
    """A network with what its user computes in each step."""

    def __init__(self, network: nn.Module, metrics: Sequence[nn.Module] = (), **update: bool) -> None:
        super().__init__()
        self.network, self.metrics, self.update = network, nn.ModuleList(metrics), update

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Cross entropy of tokens with themselves, or of pictures with their labels."""
        inputs, *labels = batch
        if not labels:
            return self.network(input_ids=inputs, labels=inputs, use_cache=False).loss  # type: ignore[no-any-return]
        if inputs.dtype == torch.uint8:
            inputs = inputs.float() / 255
        found = self.network(inputs)
        logits = getattr(found, "logits", found)
        for metric in self.metrics:
            metric(logits.softmax(1), labels[0])
        return functional.cross_entropy(logits, labels[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with its defaults, unless it is fused."""
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-5, **self.update)


class Files(Dataset[tuple[Tensor, int]]):
    """JPEG files, which are decoded for each sample."""

    def __init__(self, count: int, side: int) -> None:
        from PIL import Image  # noqa: PLC0415  (TensorBoard's, not this package's)

        self.count, self.image, file = count, Image, io.BytesIO()
        picture = torch.randint(0, 256, (2 * side, 2 * side, 3), dtype=torch.uint8).numpy()
        Image.fromarray(picture).resize((side, side)).save(file, "JPEG", quality=90)
        self.file = file.getvalue()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(3, side, side) bytes and a label."""
        picture = self.image.open(io.BytesIO(self.file)).convert("RGB")
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(*picture.size, 3).permute(2, 0, 1).contiguous(), index % 1000


def _gpt2(*, small: bool, attention: str = "eager") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  (no dependency)

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2} if small else {}
    config = GPT2Config(use_cache=False, **sizes)
    config._attn_implementation = attention  # noqa: SLF001  (as from_pretrained(attn_implementation=...) sets it)
    return GPT2LMHeadModel(config)


class _LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))  # type: ignore[no-any-return]


def _lora(*, small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (no dependency)

    sizes = {"hidden_size": 64, "num_hidden_layers": 2} if small else {"hidden_size": 1024, "num_hidden_layers": 16}
    config = LlamaConfig(num_attention_heads=8, intermediate_size=256 if small else 2816, use_cache=False, **sizes)
    model = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, _LowRank(getattr(layer.self_attn, name)))
    return model


def _bert(*, small: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415  (no dependency)

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2} if small else {}
    return BertForSequenceClassification(BertConfig(num_labels=10, **sizes))


def _vit(*, small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415  (no dependency)

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32} if small else {}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **sizes))


def _resnet(*, small: bool) -> nn.Module:
    return ResNet((1, 1, 1, 1), 8).layers if small else ResNet().layers


def _tokens(count: int, length: int, *, small: bool) -> Dataset[Any]:
    return TensorDataset(torch.randint(0, 30_000, (count, 32 if small else length)))


def _labelled(count: int, *, small: bool) -> Dataset[Any]:
    return TensorDataset(torch.randint(0, 1000, (count, 16 if small else 128)), torch.randint(0, 10, (count,)))


def _pictures(kind: Callable[[int, int], Dataset[Any]], count: int, *, small: bool) -> Dataset[Any]:
    return kind(count, 32 if small else 224)


_METRICS = (MulticlassAUROC, MulticlassF1Score, MulticlassAccuracy)
_MIXED = {"precision": "bf16-mixed"}


@dataclass(frozen=True, slots=True)
class Case:
    """A script: what it trains, on what, and how; and the same with the best changes known."""

    network: Callable[..., nn.Module]
    dataset: Callable[..., Dataset[Any]]
    batch_size: int
    options: dict[str, Any]  # of the Trainer
    metrics: bool = False  # whether they are computed in each step
    best: Callable[..., nn.Module] | None = None  # the network, if another one is best
    best_options: dict[str, Any] | None = None
    mode: str | None = None  # of torch.compile
    channels_last: bool = False
    workers: int = 0


CASES = {
    "gpt2": Case(
        _gpt2, partial(_tokens, length=1024), 8, {}, best=partial(_gpt2, attention="sdpa"), best_options=_MIXED
    ),
    "lora": Case(_lora, partial(_tokens, length=128), 1, _MIXED, mode="reduce-overhead"),
    "resnet": Case(_resnet, partial(_pictures, Pictures), 64, {}, best_options=_MIXED, channels_last=True, workers=14),
    "vit": Case(_vit, partial(_pictures, Files), 64, {}, best_options=_MIXED, workers=14),
    "bert": Case(_bert, _labelled, 32, {}, metrics=True, best_options=_MIXED),
    "ddp": Case(
        partial(_gpt2, attention="sdpa"),
        partial(_tokens, length=1024),
        8,
        {"devices": 2, "strategy": "ddp_find_unused_parameters_true"},
        best_options={"devices": 2, "strategy": "ddp", **_MIXED},
    ),
}


class Clock(Callback):
    """When each batch has ended, with the GPU's work of a step well before it."""

    def __init__(self) -> None:
        self.ended_s = list[float]()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Stamp it."""
        if len(self.ended_s) in {0, WARMUP}:
            self._wait()
        self.ended_s.append(time.perf_counter())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last step: what comes after it, as the end of the workers, is no part of one."""
        self._wait()
        self.ended_s[-1:] = [time.perf_counter()]

    def mean_ms(self) -> float:
        """The mean step after the warm-up."""
        counted = self.ended_s[WARMUP:]
        return 1e3 * (counted[-1] - counted[0]) / max(len(counted) - 1, 1)

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the mean step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--best", action="store_true", help="with the best changes known, made by hand")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--steps", type=int, default=60, help="of the epoch (60)")
    args = parser.parse_args(arguments)
    case, size = CASES[args.case], 2 if args.small else CASES[args.case].batch_size
    made = case.best if args.best and case.best is not None else case.network
    network = made(small=args.small)
    metrics = [each(num_classes=10) for each in _METRICS] if case.metrics and not args.best else []
    workers = min(case.workers, 2) if args.small else case.workers
    loader_options = {"num_workers": workers, "persistent_workers": True} if args.best and workers else {}
    loader = DataLoader(case.dataset(size * args.steps, small=args.small), size, **loader_options)
    options, clock = dict(case.options), Clock()
    if args.best:
        options |= case.best_options or {}
        if case.channels_last:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network.compile(mode=case.mode)
    module = Script(network, metrics, **({"fused": True} if args.best else {}))
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[clock], **options)
    trainer.fit(module, loader)
    if trainer.is_global_zero and len(clock.ended_s) > WARMUP:
        print(f"{args.case}{' as best known' if args.best else ''}: {clock.mean_ms():.2f} ms a step")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

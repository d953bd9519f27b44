"""A call of the user's that costs time is the cause, with its line and what to write; a healthy run has none."""

import glob
import gzip
import json
import sqlite3
import zipfile
from pathlib import Path

import lightning as L
import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import AUROC, MeanMetric

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.diagnosis.calls import SLOW_CALL
from lightning_forge_profiling.diagnosis.catalogue import CATALOGUE
from lightning_forge_profiling.diagnosis.combine import combine, without_run
from lightning_forge_profiling.run.run_settings import padding_pct
from lightning_forge_profiling.schema import WORKER_LINES, Analysis, SampledLine, TelemetrySummary
from tests.golden import outputs
from tests.models import quiet_trainer

ROWS = 24_000


class Net(L.LightningModule):
    """A small net; subclasses add a mistake."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.auroc, self.average = AUROC(task="binary"), MeanMetric()

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self.net(x)[:, 0], y.float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ComputesInStep(Net):
    def training_step(self, batch):
        x, y = batch
        self.auroc.update(self.net(x)[:, 0].detach(), y)
        self.auroc.compute()
        return super().training_step(batch)


class ComputesInHelper(ComputesInStep):
    def training_step(self, batch):
        self.scores(batch)
        return Net.training_step(self, batch)

    def scores(self, batch):
        x, y = batch
        self.auroc.update(self.net(x)[:, 0].detach(), y)
        self.auroc.compute()


class ComputesAtTheEnd(Net):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.average.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        for _ in range(200):
            self.average.compute()
            self.average.update(1.0)
        self.average.reset()


class ComputesInValidation(Net):
    def validation_step(self, batch):
        x, y = batch
        self.auroc(self.net(x)[:, 0], y)


class KeepsItsData(Net):
    def __init__(self, series):
        super().__init__()
        self.save_hyperparameters()


class NormsOneByOne(Net):
    def __init__(self):
        super().__init__()
        self.many = torch.nn.ParameterList(torch.rand(8) for _ in range(400))

    def training_step(self, batch):
        return super().training_step(batch) + torch.cat(list(self.many)).mean()

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm(2) for p in self.parameters()]
        torch.stack(norms).norm()


class ClipsOneByOne(NormsOneByOne):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            torch.nn.utils.clip_grad_norm_(p, 1.0)


class EncodesOneHot(Net):
    """Multiplies rows of zeros by a table, in place of indexing it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Linear(5000, 16)

    def training_step(self, batch):
        x, y = batch
        rows = torch.nn.functional.one_hot(y.expand(8, -1), 5000).float()
        return super().training_step((x + self.table(rows).mean(0), y))


class LooksUpOneHot(EncodesOneHot):
    def training_step(self, batch):
        x, y = batch
        return Net.training_step(self, (x + self.table(torch.eye(5000)[y]), y))


class Inverts(Net):
    """Computes the inverse of a matrix that stays the same."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kernel", torch.rand(200, 200) + 200 * torch.eye(200))

    def training_step(self, batch):
        return super().training_step(batch) + 0 * torch.linalg.inv(self.kernel).sum()


class DerivesTwice(Net):
    """Looks at the gradients of parts of its loss."""

    def training_step(self, batch):
        out = self.net(batch[0])
        for loss in (out.mean(), out.abs().mean(), out.square().mean()):
            torch.autograd.grad(loss, [*self.net.parameters()], retain_graph=True)
        return super().training_step(batch)


class SortsInStep(Net):
    """Computes something of the samples alone."""

    def training_step(self, batch):
        ranks = np.sort(np.repeat(batch[0].numpy(), 300, 0), 0)
        return super().training_step(batch) + 0 * float(ranks[0, 0])


class Table(Net):
    """Looks some rows of a large table up."""

    def __init__(self, sparse, optimizer=torch.optim.SGD):
        super().__init__()
        self.table, self.optimizer = torch.nn.Embedding(200_000, 16, sparse=sparse), optimizer

    def training_step(self, batch):
        rows = torch.randint(0, 200_000, (256,))
        return super().training_step(batch) + self.table(rows).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


class Frame(Dataset):
    def __init__(self):
        pandas = pytest.importorskip("pandas")
        self.frame = pandas.DataFrame({"of": [row % 200 for row in range(20_000)], "value": 1.0})

    def __len__(self):
        return 2400

    def __getitem__(self, index):
        rows = self.frame[self.frame["of"] == index % 200]
        return torch.full((16,), float(rows["value"].sum())), index % 2


class Lines(Dataset):
    def __init__(self):
        self.lines = [json.dumps({"x": [0.1] * 16, "more": [0.1] * 200, "y": row % 2}) for row in range(9600)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        row = json.loads(self.lines[index])
        return torch.tensor(row["x"]), row["y"]


class Files(Dataset):
    """A folder of small files, which is listed for each sample."""

    def __init__(self, folder):
        self.folder = folder
        for name in range(400):
            (folder / f"{name:03d}.bin").write_bytes(bytes(64))

    def __len__(self):
        return 1600

    def __getitem__(self, index):
        file = sorted(glob.glob(f"{self.folder}/*.bin"))[index % 400]  # noqa: PTH207  (as users do)
        return torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.float32), index % 2


class Replay(Dataset):
    """Draws from all that it keeps for each sample."""

    def __len__(self):
        return 1600

    def __getitem__(self, index):
        rows = np.random.choice(40_000, 16, replace=False)  # noqa: NPY002  (as users do)
        return torch.from_numpy(rows).float(), index % 2


class ReadsAnew(Net):
    """Draws from a second loader, whose sampler orders all samples for each batch."""

    def __init__(self):
        super().__init__()
        self.others = DataLoader(TensorDataset(torch.rand(100_000, 16)), 64, shuffle=True)

    def training_step(self, batch):
        return super().training_step(batch) + 0 * next(iter(self.others))[0].mean()


class ReadsOn(ReadsAnew):
    def on_train_start(self):
        self.batches = iter(self.others)

    def training_step(self, batch):
        return Net.training_step(self, batch) + 0 * next(self.batches)[0].mean()


class KeepsAll(L.Callback):
    """Copies all outputs for each new one."""

    def __init__(self):
        self.outputs = torch.empty(0, 4096)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs = torch.cat([self.outputs, torch.rand(64, 4096)])


class Archive(Dataset):
    """A file of many samples, which is opened for each."""

    def __init__(self, folder):
        self.path = folder / "all.zip"
        with zipfile.ZipFile(self.path, "w") as archive:
            for name in range(300):
                archive.writestr(f"{name}", bytes(64))

    def __len__(self):
        return 800

    def __getitem__(self, index):
        with zipfile.ZipFile(self.path) as archive:
            return torch.frombuffer(bytearray(archive.read(f"{index % 300}")), dtype=torch.float32), index % 2


class Database(Dataset):
    """A table without an index, which is asked for each sample."""

    def __init__(self, _):
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table rows (key integer, x blob)")
        self.base.executemany("insert into rows values (?, ?)", [(key, bytes(64)) for key in range(6000)])

    def __del__(self):
        self.base.close()

    def __len__(self):
        return 4800

    def __getitem__(self, index):
        [x] = self.base.execute("select x from rows where key = ?", (index,)).fetchone()
        return torch.frombuffer(bytearray(x), dtype=torch.float32), index % 2


ON_DISK = (Files, Archive, Database)


class ListsOfNumbers(Dataset):
    def __len__(self):
        return 4800

    def __getitem__(self, index):
        return [0.1] * 400, index % 2


class ListsInStep(Net):
    def training_step(self, batch):
        return super().training_step((torch.stack(batch[0][:16], 1).float(), batch[1]))


class NormalizesAll(Dataset):
    def __init__(self):
        self.x = torch.randn(2400, 16)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return ((self.x - self.x.mean(0)) / self.x.std(0))[index], index % 2


def data(rows=ROWS):
    x = torch.randn(rows, 16)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 64)


def analysed(model, train=None, validation=None, *callbacks, **options):
    callback = ThroughputCallback(warmup_steps=2, record=False)
    options = {"num_sanity_val_steps": 0, "max_epochs": 2, **options}
    quiet_trainer(callback, *callbacks, **options).fit(model, train or data(), validation)
    return callback.analysis()


def call_of(analysis):
    return next((finding for finding in analysis.findings if finding.code == SLOW_CALL), None)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("model", "loaders", "mistake", "said"),
    [
        (ComputesInStep, {}, "metric-in-step", "self.auroc.compute() at"),
        (ComputesInHelper, {}, "metric-in-step", "self.auroc.compute() at"),
        (ComputesInValidation, {"validation": data(64_000)}, "metric-in-step", "self.auroc(self.net(x)[:, 0], y) at"),
        (NormsOneByOne, {}, "norm-per-parameter", "p.grad.norm(2) at"),
        (ClipsOneByOne, {"train": data(3000)}, "clipped-per-parameter", "torch.nn.utils.clip_grad_norm_(p, 1.0) at"),
        (EncodesOneHot, {"train": data(3000)}, "one-hot", "torch.nn.functional.one_hot(y.expand(8, -1), 5000)"),
        (LooksUpOneHot, {"train": data(3000)}, "identity", "torch.eye(5000)"),
        (Inverts, {}, "factorization", "torch.linalg.inv(self.kernel) at"),
        (DerivesTwice, {}, "gradients-again", "torch.autograd.grad(...) at"),
        (SortsInStep, {}, "most-of-forward", "np.sort(np.repeat(batch[0].numpy(), 300, 0), 0) at"),
        (Net, {"train": Frame}, "frame-per-sample", 'self.frame[self.frame["of"] == index % 200] at'),
        (ListsInStep, {"train": ListsOfNumbers}, "collated", "default_collate"),
        (Net, {"train": NormalizesAll}, "all-samples-per-sample", "self.x.std(0) at"),
        (Net, {"train": Files}, "listed-per-sample", 'glob.glob(f"{self.folder}/*.bin") at'),
        (Net, {"train": Archive}, "opened-per-sample", "zipfile.ZipFile(self.path) at"),
        (Net, {"train": Replay}, "ordered-per-batch", "np.random.choice(40_000, 16, replace=False) at"),
        (ReadsAnew, {}, "loader-in-step", "next(iter(self.others)) at"),
        (
            Net,
            {"train": Database},
            "query-per-sample",
            "self.base.execute(...) at",
        ),
        (Net, {"train": Lines}, "parsed-per-sample", "json.loads(self.lines[index]) at"),
    ],
)
def test_a_mistake_is_named_with_its_call_and_line(tmp_path, model, loaders, mistake, said):
    made = {
        name: each(tmp_path) if each in ON_DISK else each() for name, each in loaders.items() if isinstance(each, type)
    }
    found = call_of(analysed(model(), **loaders | {name: DataLoader(each, 16) for name, each in made.items()}))
    assert found is not None
    assert found.evidence["mistake"] == mistake
    assert said in found.title
    assert " at tests/test_calls.py:" in found.title or mistake == "collated"
    assert found.share_pct > 5
    assert found.saves.at_most is (mistake not in {"one-hot", "listed-per-sample"})


@pytest.mark.slow
@pytest.mark.real_time
def test_what_copies_all_earlier_batches_is_named_with_how_it_grows():
    found = call_of(analysed(Net(), data(12_000), None, KeepsAll()))
    assert found.evidence["mistake"] == "all-concatenated"
    assert "torch.cat([self.outputs, torch.rand(64, 4096)]) at tests/test_calls.py:" in found.title
    assert "it grows from" in found.title
    low, high = found.saves.low_pct, found.saves.high_pct
    assert low < found.saves.pct < high
    assert f"({found.saves.pct:.0f} %, {low:.0f} to {high:.0f} %), less one copy" in found.saves.text


@pytest.mark.slow
@pytest.mark.real_time
def test_an_iterator_that_is_kept_is_no_mistake():
    assert call_of(analysed(ReadsOn(), data(12_800), max_epochs=1)) is None


@pytest.mark.slow
@pytest.mark.real_time
def test_large_hyperparameters_are_known_without_a_line(tmp_path):
    series = [[float(i * j % 17) for j in range(40)] for i in range(1500)]
    found = call_of(analysed(KeepsItsData(series), logger=True, default_root_dir=tmp_path))
    assert found.evidence["mistake"] == "hyperparameters"
    assert "save_hyperparameters(ignore=" in found.fix
    assert "validation" not in found.evidence["parts"]


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_large_embedding_with_a_dense_gradient_is_named_with_what_all_its_rows_take(optimizer):
    analysis = analysed(Table(sparse=False, optimizer=optimizer))
    found = call_of(analysis)
    assert analysis.verdict == SLOW_CALL
    assert found.evidence["mistake"] == "dense-embedding"
    assert "the gradient of self.table, of whose 200,000 rows a step uses 0." in found.title
    steps_ms = analysis.run.timing.step_ms.mean
    stays_ms = steps_ms - found.saves.ms_per_step
    assert stays_ms > 0
    # again where the machine was busy during the fit without the mistake, which then takes longer
    sparse_ms = (analysed(Table(sparse=True)).run.timing.step_ms.mean for _ in range(3))
    assert any(stays_ms > 0.5 * ms for ms in sparse_ms), "what is predicted to stay"
    assert "slow-optimizer" not in {each.code for each in analysis.findings}


class Distils(Net):
    """Learns from a teacher that no optimizer updates."""

    def __init__(self, without_gradients):
        super().__init__()
        self.teacher = torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 1))
        self.teacher.requires_grad_(not without_gradients)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), self.teacher(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.real_time
def test_gradients_that_no_optimizer_uses_are_named_with_what_they_take_of_backward():
    analysis = analysed(Distils(without_gradients=False))
    found = call_of(analysis)
    assert found.evidence["mistake"] == "not-updated"
    assert "gradients of self.teacher, which no optimizer updates" in found.title
    backward_ms = analysis.run.timing.regions["backward"].device_ms
    assert found.saves.ms_per_step == pytest.approx(backward_ms, rel=0.05), "nearly all parameters are the teacher's"
    assert call_of(analysed(Distils(without_gradients=True))) is None


class Tokens(Net):
    """Computes something for each position of sequences that are padded."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(100, 64)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch):
        return self.layers(self.table(batch["input_ids"]))[batch["attention_mask"].bool()].square().mean()


def padded(length):
    ids = torch.randint(0, 100, (1600, length))
    mask = (torch.arange(length) < 40).long().expand(1600, -1)
    return DataLoader([{"input_ids": one, "attention_mask": m} for one, m in zip(ids, mask, strict=True)], 16)


@pytest.mark.parametrize(
    ("mask", "more"),
    [
        (torch.ones(4, 4).tril(), {}),  # which positions each may look at
        (torch.zeros(4, 4).long(), {}),  # what is left out
        (torch.tensor([[0.0, 0.0, -9.0, -9.0]] * 4), {}),  # added to the scores
        (torch.tensor([[1, 0, 1, 0]] * 4), {}),
        (torch.tensor([[1, 1, 0, 0]] * 4), {"pixel_values": torch.rand(4, 3, 8, 8)}),
        (torch.ones(4, 4, device="meta").long(), {}),
        (None, {}),
    ],
)
def test_a_mask_that_is_none_of_padding_is_no_padding(mask, more):
    assert padding_pct({"input_ids": torch.zeros(4, 4).long(), "attention_mask": mask, **more}) == 0.0


def test_padding_is_what_a_tokenizers_mask_leaves_out():
    ids = torch.zeros(2, 4).long()
    assert padding_pct({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])}) == 25.0
    assert padding_pct({"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]])}) == 50.0
    assert padding_pct((ids, ids)) == 0.0


@pytest.mark.parametrize(
    ("rows", "pct"),
    [
        ([[7, 8, 9, 0, 0, 0, 0, 0], [7, 0, 9, 9, 0, 0, 0, 0]], None),  # with a 0 that counts
        ([[7, 8, 9, 0, 0, 0, 0, 0], [7, 6, 9, 9, 0, 0, 0, 0]], 100 * 9 / 16),
        ([[7, 8, 9, 1, 1, 1, 1, 1], [7, 6, 9, 9, 9, 9, 9, 9]], None),  # as long as the longest
        ([[0] * 8, [7, 6, 9, 9, 0, 0, 0, 0]], None),
        ([[1, 2, 0], [3, 4, 0]], None),  # columns of a table
        ([[1, 2, 3, 4, 5, 6, 0, 0], [3, 4, 5, 6, 7, 8, 0, 0]], None),
        ([[1, 2, 3, 4, 5, 6, 0, 0]], None),
        ([[1, 0, 0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1, 0, 0]], None),  # classes
    ],
)
def test_padding_without_a_mask_is_what_all_rows_end_in(rows, pct):
    ids = torch.tensor(rows)
    labels = torch.zeros(2).long()
    for batch in (ids, (ids, labels), [labels, ids], {"tokens": ids, "y": labels}):
        assert padding_pct(batch) == pytest.approx(pct or 0.0)
    assert padding_pct((ids, torch.rand(2, 3, 8, 8))) == 0.0
    assert padding_pct((ids, torch.rand(2, 512))) == 0.0, "the target of a sound"
    assert padding_pct((ids, torch.rand(2, 4))) == pytest.approx(pct or 0.0)
    assert padding_pct((ids, ids.ne(ids[0, -1]).sum(1), labels)) == 0.0, "with their lengths, which may be packed"
    assert padding_pct(ids.float()) == 0.0


@pytest.mark.slow
@pytest.mark.real_time
def test_padding_is_named_with_what_the_model_computes_for_it():
    analysis = analysed(Tokens(), padded(200))
    found = call_of(analysis)
    assert found.evidence["mistake"] == "padding"
    assert "go to padding, 80 % of the positions of a batch" in found.title
    model_ms = sum(analysis.run.timing.regions[name].device_ms for name in ("forward", "backward"))
    assert found.saves.ms_per_step == pytest.approx(0.8 * model_ms, rel=0.05)
    assert call_of(analysed(Tokens(), padded(40))) is None


class Checkpoints(Net):
    """Computes its activations again, on a machine with memory to spare."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512 if each else 16, 512) for each in range(4))

    def training_step(self, batch):
        x = batch[0]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.real_time
def test_activations_that_are_computed_again_by_hand_are_named_with_as_much_of_backward_as_forward_takes():
    analysis = analysed(Checkpoints(), data(6400))
    found = call_of(analysis)
    assert found.evidence["mistake"] == "activation-checkpointing"
    assert "go to checkpoint(layer, x, use_reentrant=False) at tests/test_calls.py:" in found.title
    forward_ms = analysis.run.timing.regions["forward"].device_ms
    assert 0.5 * forward_ms < found.saves.ms_per_step <= forward_ms * 1.000001  # of a share of the step: rounded


class CountsOneByOne(Net):
    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(2, 2)

    def training_step(self, batch):
        self.count((self.net(batch[0])[:, 0] > 0).long(), batch[1])
        return super().training_step(batch)

    def count(self, predicted, true):
        for one, other in zip(predicted, true, strict=True):
            self.counts[other, one] += 1


class CallsForEachSample(Net):
    def training_step(self, batch):
        out = torch.stack([self.net(each) for each in batch[0]])
        return torch.nn.functional.mse_loss(out[:, 0], batch[1].float())


class DoesMoreForEachSample(Net):
    def training_step(self, batch):
        out = []
        for sample in batch[0]:
            hidden = self.net(sample)
            out.append(torch.softmax(torch.cat([hidden, hidden + 1, hidden * 2]), 0))
        return torch.nn.functional.mse_loss(torch.stack(out)[:, 0], batch[1].float())


class CallsEachLayer(Net):
    """A loop over layers is what a network is."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(20))

    def training_step(self, batch):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return super().training_step((x, batch[1]))


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("model", "mistake", "parts", "said"),
    [
        (CountsOneByOne, "item-by-item", "forward", "CountsOneByOne.count"),
        (CallsForEachSample, "module-per-item", "backward, forward", "self.net(each) at"),
        # two lines of one loop are one call
        (DoesMoreForEachSample, "module-per-item", "backward, forward", "self.net(sample) at"),
    ],
)
def test_a_loop_over_items_in_small_operators_is_named_if_they_were_recorded(tmp_path, model, mistake, parts, said):
    forge = ForgeProfilerCallback(10, 13, trace_dir=tmp_path)
    found = call_of(analysed(model(), None, None, forge))
    assert found.evidence["mistake"] == mistake
    assert ", ".join(sorted(found.evidence["parts"].split(", "))) == parts
    assert said in found.title
    assert call_of(analysed(model())) is None, "how small they are is unknown"


@pytest.mark.slow
@pytest.mark.real_time
def test_a_loop_over_layers_is_none(tmp_path):
    forge = ForgeProfilerCallback(10, 13, trace_dir=tmp_path)
    assert call_of(analysed(CallsEachLayer(), None, None, forge)) is None


class Recomputes(Net):
    """Computes its activations again, by the switch of transformers' models."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = True

    def training_step(self, batch):
        out = torch.utils.checkpoint.checkpoint(self.deep, batch[0], use_reentrant=False)
        return torch.nn.functional.mse_loss(out[: len(batch[1]), 0], batch[1].float())

    def deep(self, x):
        return self.net(torch.nn.functional.pad(x, (0, 0, 0, 2000))).tanh()


@pytest.mark.slow
@pytest.mark.real_time
def test_activation_checkpointing_with_memory_to_spare_costs_as_much_as_forward():
    analysis = analysed(Recomputes())
    found = call_of(analysis)
    assert found.title.startswith(f"{found.saves.ms_per_step:.2f} ms of each")
    assert "activation checkpointing of Recomputes: backward computes forward again" in found.title
    assert found.saves.ms_per_step == pytest.approx(analysis.run.timing.regions["forward"].device_ms, rel=0.01)


@pytest.mark.parametrize(("peak_gib", "named"), [(20.0, True), (60.0, False)])
def test_on_a_gpu_checkpointing_is_a_mistake_where_half_of_the_memory_is_left(peak_gib, named):
    run = outputs.run_of("gpu_update").analysis.run
    settings = replace(run.settings, switches=replace(run.settings.switches, checkpointing="GPT2Model"))
    memory = TelemetrySummary(device="NVIDIA H100", memory_peak_gib=peak_gib, memory_total_gib=80.0)
    analysis = combine(None, replace(run, settings=settings, machine=replace(run.machine, telemetry=memory)))
    assert (call_of(analysis) is not None) == named


def of_settings(model, folder, *, named=False, **options):
    """The finding of a setting, which has no line if it is not `named`; None without one. Some steps are recorded."""
    found = call_of(analysed(model, None, None, ForgeProfilerCallback(10, 13, trace_dir=folder), **options))
    return None if found is None or found.evidence["where"].rpartition(":")[2].isdecimal() is not named else found


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))


@pytest.mark.slow
@pytest.mark.real_time
def test_float64_is_half_of_what_large_operators_take(tmp_path):
    found = of_settings(Wide(), tmp_path, precision="64-true", limit_train_batches=60)
    assert found.evidence["mistake"] == "float64"
    assert not found.saves.at_most
    assert 30 < found.share_pct <= 50
    assert of_settings(Net(), tmp_path, precision="64-true") is None, "whose operators take no longer"
    assert of_settings(Wide(), tmp_path, limit_train_batches=60) is None


class Deep(Net):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(16, 16) for _ in range(20)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))


@pytest.mark.slow
@pytest.mark.real_time
def test_small_batches_that_are_accumulated_are_to_be_larger(tmp_path):
    found = of_settings(Deep(), tmp_path, accumulate_grad_batches=8)
    assert found.evidence["mistake"] == "small-batches"
    assert "accumulate_grad_batches=8 with batches of 64: each batch is so small" in found.title
    assert found.saves is None
    assert 30 < found.share_pct <= 87.5, "an update is of one batch"
    assert of_settings(Wide(), tmp_path, accumulate_grad_batches=8, limit_train_batches=60) is None


class Attends(Net):
    def __init__(self, *, weights, dropout=0.0):
        super().__init__()
        self.attention, self.weights = torch.nn.MultiheadAttention(16, 2, dropout, batch_first=True), weights

    def training_step(self, batch):
        x = batch[0].expand(4, -1, -1).repeat(1, 6, 1)
        return self.attention(x, x, x, need_weights=self.weights)[0].mean() + super().training_step(batch)


@pytest.mark.slow
@pytest.mark.real_time
def test_attention_that_keeps_its_weights_is_named_with_its_call(tmp_path):
    found = of_settings(Attends(weights=True), tmp_path, limit_train_batches=60, named=True)
    assert found.evidence["mistake"] == "attention"
    assert "self.attention(x, x, x, need_weights=self.weights) at" in found.title
    assert found.saves.at_most, "the operator that does it at once computes the same products"
    for other in Attends(weights=False), Attends(weights=True, dropout=0.1):
        assert of_settings(other, tmp_path, limit_train_batches=60, named=True) is None


@pytest.mark.slow
@pytest.mark.real_time
def test_a_batch_of_many_objects_is_to_be_one_of_tensors():
    rows = [{"x": [0.1] * 16, "y": row % 2} for row in range(6400)]

    class Rows(Net):
        def training_step(self, batch):
            x, y = torch.tensor([row["x"] for row in batch]), torch.tensor([row["y"] for row in batch])
            return super().training_step((x, y))

    found = call_of(analysed(Rows(), DataLoader(rows, 128, collate_fn=list)))
    assert found.evidence["mistake"] == "batch-of-objects"
    assert "go to handing each batch over: Lightning looks for tensors in each list" in found.title
    many = [{f"x{name}": torch.rand(16) for name in range(4)} | {"y": row % 2} for row in range(6400)]

    class Tensors(Net):
        def training_step(self, batch):
            return super().training_step((batch["x0"], batch["y"]))

    found = call_of(analysed(Tensors(), DataLoader(many, 128)))
    assert found is None or found.evidence["mistake"] != "batch-of-objects"


@pytest.mark.parametrize(("peak_gib", "named"), [(20.0, True), (60.0, False)])
def test_on_a_gpu_batches_are_to_be_larger_where_half_of_the_memory_is_left(peak_gib, named):
    run = outputs.run_of("gpu_launch_bound").analysis.run
    loader = replace(outputs.run_of("gpu_loader").analysis.run.settings.loader, accumulate_grad_batches=16)
    memory = TelemetrySummary(device="NVIDIA H100", memory_peak_gib=peak_gib, memory_total_gib=80.0)
    for starved_pct, waits in (90.0, True), (0.0, False):
        analysis = combine(
            None,
            replace(
                run,
                settings=replace(run.settings, loader=loader),
                machine=replace(run.machine, telemetry=memory),
                timing=replace(run.timing, gpu_starved_pct=starved_pct),
            ),
        )
        assert (call_of(analysis) is not None) == (named and waits)


class NormsOnce(NormsOneByOne):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        torch.rand(300, 300).norm()


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("model", [Net, ComputesAtTheEnd, NormsOnce])
def test_a_healthy_run_has_no_such_call(model):
    assert call_of(analysed(model())) is None


class AllRows(Table):
    """Uses each row of its table in each step, as one that is tied to the output does."""

    def training_step(self, batch):
        return Net.training_step(self, batch) + self.table.weight.mean() * self.table(batch[1]).mean()


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("model", [Table(sparse=True), AllRows(sparse=False)])
def test_an_embedding_whose_gradient_has_few_rows_or_needs_all_is_no_mistake(model):
    assert call_of(analysed(model, data(3000))) is None


@pytest.mark.parametrize(
    ("call", "callee"),
    [
        ("self.net(x)", "torch.nn.modules.linear.Linear.forward"),
        ("self.model(**batch)", "transformers.utils.generic.can_return_tuple.<locals>.wrapper"),
        ("F.cross_entropy(x, y)", "torch.nn.functional.cross_entropy"),
        ("q @ k", ""),
        ("torch.matmul(q, k)", "matmul"),
        ("torch.fft.rfft(x)", "fft_rfft"),
        ("self.log(name, loss)", "lightning.pytorch.core.module.LightningModule.log"),
        ("x.masked_fill(mask, 0)", "masked_fill"),
        ("torch.einsum('bixy,ioxy->boxy', x, w)", "torch.functional.einsum"),
        ("torch.cdist(z, self.codebook)", "torch.functional.cdist"),
        ("torch.autograd.grad(u.sum(), x, create_graph=True)", "torch.autograd.grad"),
        ("torch.linalg.cholesky(kernel)", "linalg_cholesky"),
        ("scores.topk(k)", "topk"),
        ("w.abs()", "abs"),
        ("torch.nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)", "torch.nn.utils.clip_grad.clip_grad_norm_"),
        ("(m(x) for x, _ in loader)", "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"),
        ("next(self.batches)", "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"),
        ("torch.cat([x, self.skip], dim=1)", "cat"),
        ("torch.cat([self.encode(x), y])", "cat"),
        ("torch.cat([self.prototypes, self.proj(x)])", "cat"),
        ("iter(self.loader)", "torch.utils.data.dataloader.DataLoader.__iter__"),
    ],
)
def test_what_a_model_consists_of_is_no_mistake(call, callee):
    line = SampledLine(file="net.py", line=3, function="Net.training_step", pct=95.0, call=call, callee=callee)
    if "loader" in call or "critic" in call:  # in a loop
        line = replace(line, in_loop=True)
    assert not any(mistake.is_in("forward", line, small=True) for mistake in CATALOGUE)


@pytest.mark.parametrize(
    ("function", "call", "callee", "named"),
    [
        ("Set.__getitem__", "zipfile.ZipFile(self.path)", "zipfile.ZipFile.__init__", "opened-per-sample"),
        ("Set.__getitem__", "self.archive.open(name)", "zipfile.ZipFile.open", None),
        ("Set.__iter__", "zipfile.ZipFile(shard)", "zipfile.ZipFile.__init__", None),
        ("Set.__getitem__", "self.base.execute(QUERY, (index,))", "execute", "query-per-sample"),
        ("Set.__getitems__", "self.base.execute(QUERY, indices)", "execute", None),
        ("Set.__getitem__", "os.walk(self.root)", "<frozen os>.walk", "listed-per-sample"),
        ("Set.load", "sorted(self.root.glob(name))", "pathlib.Path.glob", "listed-per-sample"),
        ("Set.__getitem__", "Path(file).read_bytes()", "pathlib.Path.read_bytes", None),
        ("Set.sample", "np.random.choice(n, k, replace=False)", "choice", "ordered-per-batch"),
        ("Set.sample", "np.random.choice(n, k, replace=False, p=weights)", "choice", None),
        ("Set.sample", "self.rng.choice(n, k, replace=False)", "choice", None),
        ("Set.__iter__", "np.random.choice(n, k, replace=False)", "choice", None),
    ],
)
def test_what_is_done_once_for_many_samples_is_no_mistake(function, call, callee, named):
    line = SampledLine(file="data.py", line=3, function=function, pct=40.0, call=call, callee=callee)
    found = [mistake.name for mistake in CATALOGUE if mistake.is_in(WORKER_LINES, line)]
    assert found == ([named] if named else [])


@pytest.mark.parametrize(
    ("call", "callee", "named"),
    [
        ("torch.linalg.matrix_norm(w, ord=2)", "matrix_norm", "norm-by-svd"),
        ("torch.linalg.matrix_norm(w, 2)", "linalg_matrix_norm", "norm-by-svd"),
        ('torch.norm(w, p="nuc")', "torch.functional.norm", "norm-by-svd"),
        ("torch.linalg.matrix_norm(w)", "matrix_norm", None),
        ("torch.linalg.matrix_norm(w, dim=(-2, -1))", "matrix_norm", None),
        ("w.norm(2)", "torch._tensor.Tensor.norm", None),
        ("Normal(mean, std)", "torch.distributions.normal.Normal.__init__", "distribution-checked"),
        ("dist.log_prob(x)", "torch.distributions.normal.Normal.log_prob", None),
    ],
)
def test_what_takes_a_factorization_or_a_check_is_told_from_what_does_not(call, callee, named):
    line = SampledLine(file="net.py", line=3, function="Net.loss", pct=30.0, call=call, callee=callee)
    found = [mistake.name for mistake in CATALOGUE if mistake.is_in("forward", line)]
    assert found == ([named] if named else [])


@pytest.mark.parametrize(
    ("part", "function", "named"),
    [
        (WORKER_LINES, "Audited.__getitem__", True),
        ("callback/Log.on_train_batch_end", "Log.on_train_batch_end", True),
        ("callback/Log.on_train_epoch_end", "Log.on_train_epoch_end", False),
        ("callback/Log.on_save_checkpoint", "Log.on_save_checkpoint", False),
        ("validation", "Log.on_validation_epoch_end", False),
    ],
)
def test_waiting_for_the_disk_is_one_in_each_batch_alone(part, function, named):
    line = SampledLine(
        file="log.py", line=3, function=function, pct=50.0, call="os.fsync(self.file.fileno())", callee="fsync"
    )
    assert any(mistake.is_in(part, line) for mistake in CATALOGUE) is named


def test_each_mistake_has_its_own_name_and_says_what_to_write():
    names = [mistake.name for mistake in CATALOGUE]
    assert len(names) == len({*names})
    assert all(mistake.instead.endswith(".") and mistake.wrong for mistake in CATALOGUE)


def kept_of_an_h200(case):
    """An analysis that was made on an H200."""
    with gzip.open(Path(__file__).parent / f"data/analyses/{case}.json.gz") as file:
        return msgspec.json.decode(file.read(), type=Analysis)


def of_an_h200(case):
    """What today's rules say of it."""
    kept = kept_of_an_h200(case)
    return combine(without_run(kept), kept.run)


@pytest.mark.parametrize(
    ("case", "mistake", "place", "most_ms"),
    [
        ("f1", "functional-metric-in-step", "f1_score(...) at train.py:135", 5.7),
        ("isnan", "check-per-parameter", "torch.isnan(p.grad) at train.py:143", 5.5),
        ("gradnorms", "norm-per-parameter", "p.grad.norm(2) at train.py:153", 22.5),
        ("empty", "empties-cache", "torch.cuda.empty_cache() at train.py:128", 19.1),
        ("pyloss", "module-per-item", "F.cross_entropy(out[i:i + 1], batch[1][i:i + 1]) at train.py:187", 14.4),
    ],
)
def test_on_a_gpu_a_call_comes_before_the_waits_that_it_makes(case, mistake, place, most_ms):
    analysis = of_an_h200(case)
    first = analysis.findings[0]
    assert (first.code, first.evidence["mistake"], first.evidence["where"]) == (SLOW_CALL, mistake, place)
    assert (first.saves.ms_per_step, first.saves.at_most) == (pytest.approx(most_ms, abs=0.05), True)
    left = {finding.code for finding in analysis.findings}
    assert left.isdisjoint({"sync-bound", "allocator-churn"}), "whose time is the call's"


def of_a_metric(run):
    """The same run where what it calls is a metric of torchmetrics."""
    lines = {
        part: tuple(
            replace(line, call="self.f1(out, batch[1])", callee="torchmetrics.metric.Metric.forward")
            if "f1" in line.call
            else line
            for line in lines
        )
        for part, lines in run.lines.items()
    }
    return replace(run, lines=lines)


@pytest.mark.parametrize("starved_pct", [0.0, 100.0])  # the host is ahead of the GPU, or sets the pace
def test_the_values_that_a_metric_reads_are_the_metrics(starved_pct):
    kept = kept_of_an_h200("f1")
    run = of_a_metric(kept.run)
    run = replace(run, timing=replace(run.timing, gpu_starved_pct=starved_pct))
    found = combine(without_run(kept), run).findings
    assert (found[0].code, found[0].evidence.get("mistake")) == (SLOW_CALL, "metric-in-step")
    assert "sync-bound" not in {each.code for each in found}


@pytest.mark.parametrize("starved_pct", [0.0, 100.0])
def test_values_that_another_line_reads_are_not_a_metrics(starved_pct):
    kept = kept_of_an_h200("f1")
    run = of_a_metric(kept.run)
    reads = replace(run.lines["forward"][-1], line=140, call="loss.item()", callee="item")
    lines = {**run.lines, "forward": (*run.lines["forward"], reads)}
    run = replace(run, lines=lines, timing=replace(run.timing, gpu_starved_pct=starved_pct))
    found = {each.code: each for each in combine(without_run(kept), run).findings}
    assert "one such call is loss.item() at train.py:140" in found["sync-bound"].title


def test_a_metric_of_validation_alone_reads_nothing_in_a_step():
    kept = kept_of_an_h200("f1")
    lines = of_a_metric(kept.run).lines
    lines = {"forward": lines["forward"][:1], "validation/step": lines["forward"][1:]}
    found = {each.code for each in combine(without_run(kept), replace(kept.run, lines=lines)).findings}
    assert "sync-bound" in found


def test_a_metric_is_no_reason_of_waits_where_the_trace_has_none_for_values():
    kept = kept_of_an_h200("f1")
    run, no_reads = of_a_metric(kept.run), without_run(kept)
    no_reads = replace(no_reads, findings=tuple(each for each in no_reads.findings if each.code != "sync-bound"))
    assert SLOW_CALL not in {each.code for each in combine(no_reads, run).findings}


def test_on_a_gpu_a_wait_for_a_value_names_the_line_that_reads_it():
    first = of_an_h200("cpu_augment").findings[0]
    assert first.code == "sync-bound"
    assert first.title.endswith("; one such call is batch[0].cpu() at train.py:170")
    assert first.saves.text == "That saves about 13.4 ms a step (26 %, 12 to 37 %)."


def test_a_precision_after_which_the_host_is_no_faster_is_not_what_to_change_first():
    compiled, in_bf16 = of_an_h200("distilbert_tf32").findings
    assert (compiled.code, in_bf16.code) == ("launch-bound", "compute-bound")
    assert in_bf16.saves.text == "That saves nothing by itself: the host would set the pace."


def test_a_hook_that_is_nothing_but_a_call_leaves_no_other_cause_on_a_gpu():
    run = outputs.run_of("gpu_update").analysis.run
    hook = "module/on_before_optimizer_step"
    line = SampledLine(
        file="model.py", line=3, function="Net.on_before_optimizer_step", pct=100.0, waiting_pct=90.0,
        call="p.grad.norm()", callee="norm", in_loop=True, samples=400,
    )  # fmt: skip
    ledger = replace(
        run.ledger,
        parts={"steps": run.ledger.parts["steps"], hook: 2.0},
        counted_s={hook: 1.9},
        counts={"steps": 1, hook: 300},
        first_s={hook: 0.5},
    )
    analysis = combine(None, replace(run, ledger=ledger, lines={hook: (line,)}))
    assert analysis.verdict == SLOW_CALL
    assert "p.grad.norm() at model.py:3" in analysis.verdict_text
    assert [found for found in analysis.findings if found.code == "slow-hook"] == []

"""A call of the user's that costs time is the cause, with its line and what to write; a healthy run has none."""

import lightning as L
import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import AUROC, MeanMetric

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.diagnosis.calls import SLOW_CALL
from lightning_forge_profiling.diagnosis.catalogue import CATALOGUE
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.schema import SampledLine, TelemetrySummary
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
@pytest.mark.parametrize(
    ("model", "loaders", "mistake", "said"),
    [
        (ComputesInStep, {}, "metric-in-step", "self.auroc.compute() at"),
        (ComputesInHelper, {}, "metric-in-step", "self.auroc.compute() at"),
        (ComputesInValidation, {"validation": data(64_000)}, "metric-in-step", "self.auroc(self.net(x)[:, 0], y) at"),
        (NormsOneByOne, {}, "norm-per-parameter", "p.grad.norm(2) at"),
        (Net, {"train": "frame"}, "frame-per-sample", 'self.frame[self.frame["of"] == index % 200] at'),
    ],
)
def test_a_mistake_is_named_with_its_call_and_line(model, loaders, mistake, said):
    loaders = {name: DataLoader(Frame(), 16) if loader == "frame" else loader for name, loader in loaders.items()}
    found = call_of(analysed(model(), **loaders))
    assert found is not None
    assert found.evidence["mistake"] == mistake
    assert f"{said} tests/test_calls.py:" in found.title
    assert found.share_pct > 5
    assert found.saves.at_most


@pytest.mark.slow
def test_large_hyperparameters_are_known_without_a_line(tmp_path):
    series = [[float(i * j % 17) for j in range(40)] for i in range(1500)]
    found = call_of(analysed(KeepsItsData(series), logger=True, default_root_dir=tmp_path))
    assert found.evidence["mistake"] == "hyperparameters"
    assert "save_hyperparameters(ignore=" in found.fix
    assert "validation" not in found.evidence["parts"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_large_embedding_with_a_dense_gradient_is_named_with_what_all_its_rows_take(optimizer):
    analysis = analysed(Table(sparse=False, optimizer=optimizer))
    found = call_of(analysis)
    assert analysis.verdict == SLOW_CALL
    assert found.evidence["mistake"] == "dense-embedding"
    assert "the gradient of self.table, of whose 200,000 rows a step uses 0." in found.title
    steps_ms = analysis.run.timing.step_ms.mean
    sparse_ms = analysed(Table(sparse=True)).run.timing.step_ms.mean
    assert found.saves.ms_per_step < steps_ms
    assert steps_ms - found.saves.ms_per_step > 0.5 * sparse_ms, "what is predicted to stay"
    assert "slow-optimizer" not in {each.code for each in analysis.findings}


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
@pytest.mark.parametrize(
    ("model", "mistake", "parts", "said"),
    [
        (CountsOneByOne, "item-by-item", "forward", "CountsOneByOne.count"),
        (CallsForEachSample, "module-per-item", "backward, forward", "self.net(each) at"),
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


class NormsOnce(NormsOneByOne):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        torch.rand(300, 300).norm()


@pytest.mark.slow
@pytest.mark.parametrize("model", [Net, ComputesAtTheEnd, NormsOnce])
def test_a_healthy_run_has_no_such_call(model):
    assert call_of(analysed(model())) is None


class AllRows(Table):
    """Uses each row of its table in each step, as one that is tied to the output does."""

    def training_step(self, batch):
        return Net.training_step(self, batch) + self.table.weight.mean() * self.table(batch[1]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("model", [Table(sparse=True), AllRows(sparse=False)])
def test_an_embedding_whose_gradient_has_few_rows_or_needs_all_is_no_mistake(model):
    assert call_of(analysed(model, data(3000))) is None


def test_each_mistake_has_its_own_name_and_says_what_to_write():
    names = [mistake.name for mistake in CATALOGUE]
    assert len(names) == len({*names})
    assert all(mistake.instead.endswith(".") and mistake.wrong for mistake in CATALOGUE)


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

"""How many samples a run is said to have worked through, for batches of every make."""

import re
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.models import Classifier, FromIterator, Samples, every_step
from tests.outcomes import logged, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class AnyBatch(Classifier):
    """Trains, whatever the batch is."""

    def training_step(self, batch):
        return self.head(torch.ones(2, 8)).sum()

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class Made(Dataset):
    """Samples that a function makes of their number."""

    def __init__(self, count, make=int):
        self.count, self.make = count, make

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError(i)
        return self.make(i)


class Streamed(IterableDataset):
    def __init__(self, count, make=int):
        self.made = Made(count, make)

    def __iter__(self):
        return (self.made[i] for i in range(len(self.made)))


class Graphs:
    """Several graphs as one, as in PyTorch Geometric."""

    def __init__(self, numbers):
        self.x = torch.zeros(5 * len(numbers) + 1, 4)


@dataclass
class Fields:
    scale: float
    ids: torch.Tensor


@dataclass(slots=True)
class Slots:
    ids: torch.Tensor
    covariates: torch.Tensor | None = None


class Plain:
    def __init__(self, numbers):
        self.name, self.x = "a", ids(numbers)


def images(numbers):
    """Images of three channels and various sizes, each with its boxes."""
    made = [torch.zeros(3, 8 + number % 3, 8) for number in numbers]
    return made, [{"boxes": torch.zeros(1 + number % 8, 4)} for number in numbers]


def ids(numbers):
    return torch.zeros(len(numbers), 1 + numbers[0] % 5)


def changes(before, after):
    """Batches of which the first dimension is another from the third on."""
    return loader(lambda n: torch.zeros(before if n[0] < 16 else after))


def loader(collate=None, size=8, count=44, *, data=Made, **options):
    return DataLoader(data(count), size, collate_fn=collate, **options)


class Own:
    """A loader of the user's own that says nothing."""

    def __init__(self, make=lambda n: {"name": ["a"] * n, "x": torch.zeros(n, 8)}):
        self.make = make

    def __iter__(self):
        return map(self.make, (8, 8, 8, 8, 8, 4))


# of each 44 samples, six batches of 8 of which the last has 4, unless said otherwise
COUNTED = {
    "numbers": loader(),
    "a dict that begins with a scalar": loader(lambda n: {"scale": torch.tensor(2.0), "ids": ids(n)}),
    "texts and a number first": loader(lambda n: (["a"] * len(n), 0.5, ids(n))),
    "deep inside": loader(lambda n: {"all": [{"names": ("a", "b")}, {"ids": ids(n)}]}),
    "not where it was": loader(lambda n: {"ids": ids(n)} if n[0] % 16 else [{"name": "a"}, ids(n)]),
    "a dataclass": loader(lambda n: Fields(0.1, ids(n))),
    "a dataclass with slots": loader(lambda n: Slots(ids(n))),
    "a class": loader(Plain),
    "no short batch": loader(drop_last=True, count=47),
    "less than a batch": loader(size=100),
    "a stream": loader(data=Streamed),
    "a batch sampler that names no size": DataLoader(Made(44), batch_sampler=[range(12), range(12, 40), range(40, 44)]),
    "a combined loader of one": CombinedLoader(loader()),
    "a loader that names no size": Own(),
    "a data set that makes batches": DataLoader([torch.zeros(n, 3) for n in (8, 8, 8, 8, 8, 4)], batch_size=None),
    "a batch that is short, but not the last": changes(8, 5),
}
# the loader's batch size for each, also for the short one at the end
BY_THE_LOADER = {
    "time first": loader(lambda n: torch.zeros(24, len(n), 4)),
    "time first, as long as the batch at first": changes(8, 11),
    "packed": loader(lambda n: pack_sequence([torch.zeros(9)] * len(n))),
    "graphs": loader(Graphs),
    "images of various sizes": loader(images),
    "texts": loader(lambda n: [str(number) for number in n]),
    "no tensor from the third on": loader(lambda n: ids(n) if n[0] < 16 else "a"),
    "a stream of images": loader(images, data=Streamed),
}
TOTAL = {"no short batch": 40, "a batch that is short, but not the last": 2 * 8 + 4 * 5} | dict.fromkeys(
    BY_THE_LOADER, 48
)


def fitted(make_trainer, data, caplog, model=None, **options):
    throughput = every_step(warmup_steps=0, **options)
    trainer = make_trainer(throughput, max_epochs=2, log_every_n_steps=1000)
    trainer.fit(model or AnyBatch(), data)
    warnings = warnings_of(caplog)
    return throughput.summary(), trainer.fit_loop.epoch_loop.total_batch_idx + 1, warnings


@pytest.mark.parametrize("case", COUNTED | BY_THE_LOADER)
def test_samples_are_read_off_the_first_tensor_or_the_loader(make_trainer, caplog, case):
    metrics, steps, warnings = fitted(make_trainer, (COUNTED | BY_THE_LOADER)[case], caplog)
    assert warnings == []
    counted = metrics["throughput/samples_per_sec"] * metrics["time/step_ms"] / 1e3 * steps
    assert counted == pytest.approx(2 * TOTAL.get(case, 44))


UNKNOWN = {
    "no tensor": (Own(lambda n: ["a"] * n), r"the loader \(Own\) has no batch_size"),
    "several loaders": ({"a": loader(), "b": loader(size=4)}, "2 loaders"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_unknown_is_said_with_what_to_do(tmp_path, make_trainer, caplog, case):
    data, why = UNKNOWN[case]
    metrics, _, [warning] = fitted(make_trainer, data, caplog)
    assert "batch_size_fn" in warning
    assert re.search(why, warning), warning
    assert not any("samples" in name for name in metrics)
    assert not any("samples" in name for row in logged(tmp_path) for name in row)
    assert metrics["throughput/steps_per_sec"] > 0
    caplog.clear()
    metrics, _, warnings = fitted(make_trainer, data, caplog, batch_size_fn=lambda batch: 2)
    assert warnings == []
    assert metrics["throughput/samples_per_sec"] == pytest.approx(2 * metrics["throughput/steps_per_sec"])


class TakesTwo(FromIterator):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def training_step(self, dataloader_iter):
        if self.seen >= self.first:
            next(dataloader_iter)
        return super().training_step(dataloader_iter)


@pytest.mark.parametrize("first", [0, 3])
def test_a_step_that_takes_two_batches_has_no_known_size(make_trainer, caplog, first):
    throughput = every_step(warmup_steps=0)
    make_trainer(throughput, max_steps=6).fit(TakesTwo(first), DataLoader(Samples(320), 4))  # far from the epoch's end
    [warning] = [record.message for record in caplog.records if record.name.startswith("lightning_forge")]
    assert "dataloader_iter" in warning
    assert "throughput/samples_per_sec" not in throughput.summary()


def test_a_loader_that_is_made_anew_may_have_another_batch_size(make_trainer, caplog):
    class Growing(Classifier):
        def train_dataloader(self):
            return DataLoader(Samples(32), 4 if self.current_epoch == 0 else 16)

    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(throughput, max_epochs=2, reload_dataloaders_every_n_epochs=1, log_every_n_steps=1000)
    trainer.fit(Growing())
    metrics = throughput.summary()
    counted = metrics["throughput/samples_per_sec"] * metrics["time/step_ms"] / 1e3 * 10
    assert counted == pytest.approx(64)

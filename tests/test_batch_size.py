"""How many samples a run is said to have worked through, for batches of every make: the right number, or none."""

import re
from dataclasses import dataclass
from typing import NamedTuple

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
        self.ptr = torch.arange(len(numbers) + 1)


class LabelledGraphs(Graphs):
    def __init__(self, numbers):
        super().__init__(numbers)
        self.y = torch.zeros(len(numbers))


@dataclass
class Fields:
    scale: float
    ids: torch.Tensor


@dataclass(slots=True)
class Slots:
    ids: torch.Tensor
    covariates: torch.Tensor | None = None


class Pair(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor


def detection(numbers):
    """Images of three channels and various sizes, each with its boxes."""
    images = [torch.zeros(3, 8 + number % 3, 8) for number in numbers]
    return images, [{"boxes": torch.zeros(1 + number % 8, 4), "label": torch.tensor(1)} for number in numbers]


def ids(numbers):
    return torch.zeros(len(numbers), 1 + numbers[0] % 5)


def loader(collate=None, size=8, count=44, *, data=Made, **options):
    return DataLoader(data(count), size, collate_fn=collate, **options)


class Tables:
    """A loader of the user's own whose batches agree on their size, as of cells or time series."""

    def __init__(self, make=lambda n: {"x": torch.zeros(n, 8), "label": torch.zeros(n, 1), "name": ["a"] * n}):
        self.make = make

    def __iter__(self):
        return map(self.make, (8, 8, 8, 8, 8, 4))


class Batched(Dataset):
    """Batches of time series: past, covariates that are not there, future."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        size = 4 if i == 5 else 8
        return torch.zeros(size, 24, 1), None, torch.zeros(size, 12, 1)


# in each 44 samples, six batches of 8 of which the last has 4, unless said otherwise
COUNTED = {
    "numbers": loader(),
    "a dict that begins with a scalar": loader(lambda n: {"scale": torch.tensor(2.0), "ids": ids(n)}),
    "a number first": loader(lambda n: (0.5, ids(n))),
    "images of various sizes": loader(detection),
    "images of various sizes alone": loader(lambda n: detection(n)[0]),
    "as many images as channels": loader(detection, size=3),
    "as many images as channels alone": loader(lambda n: detection(n)[0], size=3),
    "as many fields as samples": loader(lambda n: [ids(n), ids(n)], size=3, count=44),
    "two fields, two samples": loader(lambda n: [ids(n), ids(n)], size=2, count=43),
    "a pair, two samples": loader(lambda n: Pair(ids(n), ids(n)), size=2, count=43),
    "an image, a label, two samples": loader(
        lambda n: (torch.zeros(len(n), 3, 8, 8), torch.zeros(len(n))), size=2, count=43
    ),
    "time first, with lengths": loader(lambda n: (torch.zeros(1 + n[0] % 16, len(n), 4), torch.zeros(len(n)))),
    "a constant of that length": loader(lambda n: {"weights": torch.zeros(8), "ids": ids(n)}),
    "texts": loader(lambda n: [str(number) for number in n]),
    "texts of the default": DataLoader(Made(44, str), 8),
    "a dataclass": loader(lambda n: Fields(0.1, ids(n))),
    "a dataclass with slots": loader(lambda n: Slots(ids(n))),
    "a class": loader(LabelledGraphs),
    "packed, in any order": loader(
        lambda n: pack_sequence([torch.zeros(1 + number % 7) for number in n], enforce_sorted=False)
    ),
    "no short batch": loader(drop_last=True, count=47),
    "less than a batch": loader(size=100),
    "one sample each": loader(size=1),
    "a stream": loader(data=Streamed),
    "a stream of images": loader(detection, data=Streamed),
    "a stream with two short batches": loader(lambda n: [ids(n), ids(n)], data=Streamed),
    "a batch sampler of its own": DataLoader(Made(44), batch_sampler=[range(12), range(12, 40), range(40, 44)]),
    "a batch sampler, dicts": DataLoader(
        Made(44, lambda i: {"name": str(i), "ids": torch.zeros(3), "scale": 1.0}),
        batch_sampler=[range(3), range(3, 40), range(40, 44)],
    ),
    "a combined loader of one": CombinedLoader(loader()),
    "a loader that names no size": Tables(),
    "a data set that makes batches": DataLoader(Batched(), batch_size=None),
}  # fmt: skip
TOTAL = {
    "two fields, two samples": 43,
    "a pair, two samples": 43,
    "an image, a label, two samples": 43,
    "no short batch": 40,
}


def fitted(make_trainer, data, caplog, model=None, **options):
    throughput = every_step(warmup_steps=0, **options)
    trainer = make_trainer(throughput, max_epochs=2, log_every_n_steps=1000)
    trainer.fit(model or AnyBatch(), data)
    warnings = warnings_of(caplog)
    return throughput.summary(), trainer.fit_loop.epoch_loop.total_batch_idx + 1, warnings


@pytest.mark.parametrize("case", COUNTED)
def test_samples_are_counted_as_they_are(make_trainer, caplog, case):
    metrics, steps, warnings = fitted(make_trainer, COUNTED[case], caplog)
    assert warnings == []
    counted = metrics["throughput/samples_per_sec"] * metrics["time/step_ms"] / 1e3 * steps
    assert counted == pytest.approx(2 * TOTAL.get(case, 44))


class Own:
    """A loader of the user's own, which says nothing."""

    def __iter__(self):
        return (torch.zeros(4, 8) for _ in range(6))


UNKNOWN = {
    "images as one": (loader(lambda n: torch.zeros(3, len(n), 8)), "batch_size is 8, .*lengths: 3"),
    "packed": (loader(lambda n: pack_sequence([torch.zeros(9)] * len(n))), "batch_size is 8"),
    "graphs": (loader(Graphs), "batch_size is 8, .*lengths: 41, 9"),
    "no tensor at all": (loader(lambda n: {"count": len(n)}), "lengths: none"),
    "batches of the data set's own": (loader(size=None, count=6), "DataLoader.* has no batch_size"),
    "a loader of the user's own": (Own(), "Own.* has no batch_size"),
    "images of the user's own": (Tables(lambda n: [torch.zeros(3, 8 + i, 8) for i in range(n)]), "has no batch_size"),
    "a sample of the user's own": (
        Tables(lambda n: {"image": torch.zeros(3, 8, 8), "mask": torch.zeros(3, 8, 8)}),
        "has no batch_size",
    ),
    "batch sampler and collate function": (
        DataLoader(Made(44), batch_sampler=[range(12), range(12, 44)], collate_fn=ids),
        "has no batch_size",
    ),
    "several loaders": ({"a": loader(), "b": loader(size=4)}, "2 loaders"),
    "a size that does not stay": (loader(lambda n: torch.zeros(8 if n[0] < 16 else 11)), "batch 3"),
    "a short batch that is not the last": (loader(lambda n: torch.zeros(8 if n[0] < 16 else 5)), "batch 3"),
    "two that do not stay": (
        loader(lambda n: (torch.zeros(8 if n[0] < 16 else 7), torch.zeros(8 if n[0] < 16 else 6))),
        "batch 3",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_there_is_no_guess(tmp_path, make_trainer, caplog, case):
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

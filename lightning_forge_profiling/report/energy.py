"""Energy of a run: over the GPUs of all ranks, and over the runs that it continues."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from lightning_forge_profiling.record.reader import RankEnergy, RecordError, RunRecord, read_run

_MOST_RUNS: Final = 100
_JOULES_PER_KWH: Final = 3.6e6
_SHOWN_KWH: Final = 0.1
_PREFIXES: Final = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))
_THOUSAND: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnergy:
    """Energy of the GPUs of a run. A GPU that several ranks share counts once.

    Attributes:
        joules: energy during the fits, warm-up and validation included.
        joules_per_sample: energy of all GPUs per sample of the counted steps; None if a GPU's is unknown.
        samples: number of these samples, on all ranks.
        gpus: number of GPUs.
        ranks: number of ranks whose GPU's energy is known.
        world_size: number of ranks.
        fits: number of fits: this one, and those before it that it continues.
        missing: record of a fit before it that cannot be read; "" if there is none.
    """

    joules: float
    joules_per_sample: float | None
    samples: float
    gpus: int
    ranks: int
    world_size: int
    fits: int = 1
    missing: str = ""

    def after(self, earlier: "RunEnergy") -> "RunEnergy":
        """The energy of this fit and of those that it continues."""
        samples, each = self.samples + earlier.samples, None
        if self.joules_per_sample is not None and earlier.joules_per_sample is not None and samples:
            spent = self.joules_per_sample * self.samples + earlier.joules_per_sample * earlier.samples
            each = spent / samples
        return replace(
            self,
            joules=self.joules + earlier.joules,
            joules_per_sample=each,
            samples=samples,
            fits=self.fits + earlier.fits,
        )


def fit_energy(record: RunRecord) -> RunEnergy | None:
    """Energy of one fit, over all ranks; None if no rank's is known."""
    by_gpu: dict[str, RankEnergy] = {}
    known = [rank for rank in record.ranks if rank.energy is not None]
    for rank in known:
        gpu = rank.begin.gpu or f"of rank {rank.begin.rank}"
        # of ranks that share a GPU, each has read its meter
        by_gpu[gpu] = max(filter(None, (by_gpu.get(gpu), rank.energy)), key=lambda energy: energy.joules)
    if not by_gpu:
        return None
    energies, world_size = [*by_gpu.values()], record.ranks[0].begin.world_size
    each = [energy.joules_per_sample for energy in energies if energy.joules_per_sample is not None]
    complete = len(known) == world_size and len(each) == len(energies)
    return RunEnergy(
        joules=sum(energy.joules for energy in energies),
        # a sample is trained on one replica, and all of them train equally fast
        joules_per_sample=sum(each) / energies[0].replicas if complete else None,
        samples=max(energy.samples for energy in energies),
        gpus=len(energies),
        ranks=len(known),
        world_size=world_size,
    )


def run_energy(record: RunRecord) -> RunEnergy | None:
    """Energy of a run and of the fits that it continues; None if this one's is not known."""
    fit, continues = fit_energy(record), record.ranks[0].begin.continues
    if fit is None or not continues:
        return fit
    earlier, missing = _earlier(continues, record.folder)
    return replace(fit if earlier is None else fit.after(earlier), missing=missing)


@lru_cache(maxsize=1)
def _earlier(continues: str, folder: Path) -> tuple[RunEnergy | None, str]:
    """Energy of the fits that a record continues, and the first record of them without one; "" if all have."""
    total, seen = None, {folder.absolute()}
    while continues:
        folder = _moved(Path(continues), folder)
        if folder.absolute() in seen or len(seen) > _MOST_RUNS:
            break
        seen.add(folder.absolute())
        energy = None
        with suppress(OSError, RecordError):
            record = read_run(folder)
            energy, continues = fit_energy(record), record.ranks[0].begin.continues
        if energy is None:
            return total, str(folder)
        total = energy if total is None else total.after(energy)
    return total, ""


def _moved(folder: Path, follower: Path) -> Path:
    """The folder of a record, also where it was moved together with the record that follows it."""
    beside = follower.absolute().parents[1].joinpath(*folder.parts[-2:])
    return next((each for each in (folder, beside) if each.is_dir()), folder)


def energy_words(energy: RunEnergy) -> str:
    """The energy of a run in words."""
    amounts = [_joules(energy.joules)]
    if (kwh := energy.joules / _JOULES_PER_KWH) >= _SHOWN_KWH:
        amounts[0] += f" ({kwh:,.1f} kWh)"
    if energy.joules_per_sample is not None:
        amounts.insert(0, f"{_joules(energy.joules_per_sample)} per sample")
    gpus = "1 GPU" if energy.gpus == 1 else f"{energy.gpus:,} GPUs"
    known = "" if energy.ranks == energy.world_size else f" of {energy.ranks:,} of {energy.world_size:,} ranks"
    fits = f", {energy.fits} fits together" if energy.fits > 1 else ""
    missing = f", without that of {energy.missing}, which is not known" if energy.missing else ""
    return f"{', '.join(amounts)} on {gpus}{known}{fits}{missing}"


def _joules(joules: float) -> str:
    factor, unit = next(((factor, unit) for factor, unit in _PREFIXES if joules >= factor), (1.0, "J"))
    return f"{joules / factor:.3g} {unit}" if joules < _THOUSAND * factor else f"{joules / factor:,.0f} {unit}"

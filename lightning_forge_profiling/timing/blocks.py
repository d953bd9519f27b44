"""Sums over consecutive steps in at most 64 blocks, from which the interval of a share follows."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_MOST: Final = 64


@dataclass(slots=True)
class StepBlock:
    """Sums over the counted steps of one block.

    Attributes:
        steps: how many steps.
        ms: their time.
        split_steps: how many of them had their regions timed.
        split_ms: the time of those.
        region_ms: their time by region.
        part_ms: time of all steps by part of the ledger.
    """

    steps: int = 0
    ms: float = 0.0
    split_steps: int = 0
    split_ms: float = 0.0
    region_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    part_ms: Mapping[str, float] = field(default_factory=dict)

    def add(self, other: "StepBlock") -> None:
        """Add the sums of another block."""
        self.steps += other.steps
        self.ms += other.ms
        self.split_steps += other.split_steps
        self.split_ms += other.split_ms
        for region, ms in other.region_ms.items():
            self.region_ms[region] += ms


class StepBlocks:
    """Adds steps to blocks of as many step numbers each; blocks double in length when they become too many.

    Example:
        >>> blocks = StepBlocks()
        >>> for step in range(10, 138):
        ...     blocks.add(step, 2.0, {"forward": 1.0} if step % 2 else {})
        >>> found = blocks.read()
        >>> len(found), found[1].steps, found[1].ms, found[1].split_ms, found[1].region_ms["forward"]
        (64, 2, 4.0, 2.0, 1.0)
    """

    def __init__(self) -> None:
        self._length = 1
        self._blocks: dict[int, StepBlock] = {}

    def add(self, step: int, took_ms: float, region_ms: Mapping[str, float]) -> None:
        """Add a counted step, with its times by region if they are known."""
        block = self._blocks.get(step // self._length)
        if block is None:
            if len(self._blocks) >= _MOST:
                self._blocks, self._length = _merged(self._blocks, 2), 2 * self._length
            block = self._blocks.setdefault(step // self._length, StepBlock())
        block.steps += 1
        block.ms += took_ms
        if region_ms:
            block.split_steps += 1
            block.split_ms += took_ms
            for region, ms in region_ms.items():
                block.region_ms[region] += ms

    def read(self, parts: "PartMarks | None" = None) -> tuple[StepBlock, ...]:
        """The blocks in order."""
        parts = parts or PartMarks()
        length = max(self._length, parts.every)
        found = []
        for place, block in sorted(_merged(self._blocks, length // self._length).items()):
            before, after = (parts.at(step) for step in (place * length, (place + 1) * length))
            block.part_ms = {name: (ns - before.get(name, 0)) / 1e6 for name, ns in after.items()}
            found.append(block)
        return tuple(found)


class PartMarks:
    """Time so far in counted steps by part of the ledger, at up to 64 steps that are a power of 2 apart."""

    def __init__(self) -> None:
        self.every = 1
        """In steps of which number times so far are kept."""
        self._marks: dict[int, Mapping[str, int]] = {}

    def add(self, step: int, counted_ns: Mapping[str, int]) -> None:
        """Add nanoseconds by part, before a step that `every` divides or after the last one."""
        if len(self._marks) >= _MOST:
            self.every *= 2
            self._marks = {at: ns for at, ns in self._marks.items() if not at % self.every}
        self._marks[step] = counted_ns

    def until(self, step: int, counted_ns: Mapping[str, int]) -> "PartMarks":
        """These marks and the latest one, which a later step replaces."""
        ended = PartMarks()
        ended.every, ended._marks = self.every, {**self._marks, step: counted_ns}
        return ended

    def at(self, step: int) -> Mapping[str, int]:
        """Nanoseconds by part before a step; empty before the first that counts."""
        return self._marks.get(max((at for at in self._marks if at <= step), default=-1), {})


def _merged(blocks: Mapping[int, StepBlock], times: int) -> dict[int, StepBlock]:
    merged: dict[int, StepBlock] = {}
    for place, block in blocks.items():
        merged.setdefault(place // times, StepBlock()).add(block)
    return merged

"""What fills a rank's GPU: what the model keeps, what comes on top of it, and whether it grows."""

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

GIB: Final = 2**30
MIB: Final = 2**20
KIB: Final = 2**10

Category: TypeAlias = Literal["parameters", "gradients", "optimizer", "buffers", "other tensors", "activations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What a rank's model keeps on its GPU, once its optimizer has stepped. A storage counts once.

    Attributes:
        parameters_bytes: of parameters.
        gradients_bytes: of gradients that are kept to the end of a batch.
        optimizer_bytes: of the optimizers' state.
        buffers_bytes: of buffers.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.buffers_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """PyTorch's allocator over a run, read between steps, as columns of equal length. It begins after the warm-up.

    Attributes:
        seconds: time since the run began, as in the ledger.
        steps: number of the step.
        kept_gib: tensors that are kept from one step to the next.
        peak_gib: the most that tensors took so far.
        reserved_gib: what the allocator holds, its free blocks included.
    """

    seconds: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    kept_gib: tuple[float, ...] = ()
    peak_gib: tuple[float, ...] = ()
    reserved_gib: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Memory that grows steadily from step to step.

    Attributes:
        category: what grows: a part of the model, `other tensors` that are kept from one step to the next, or
            `activations`, which a step frees at its end.
        bytes_per_step: by how much.
        from_step: the first of the steps by which it is known.
        to_step: the last of them.
        full_step: the step in which the memory will be full, if it goes on.
    """

    category: Category
    bytes_per_step: float
    from_step: int
    to_step: int
    full_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """What fills a rank's GPU.

    Attributes:
        model: what the model keeps.
        limit_gib: what PyTorch may use of the GPU's memory: all but what other processes and the driver had when the
            curve began.
        curve: the allocator over the run.
        growth: what grows; None if nothing does.
        peak_known: whether the peak is known; else the process had a higher one before, and the curve's is a bound.
        samples_per_step: mean number of samples of a batch; None if unknown.
        tokens_per_step: mean number of its tokens; None if they are not counted.
    """

    model: ModelMemory
    limit_gib: float
    curve: MemoryCurve = field(default_factory=MemoryCurve)
    growth: MemoryGrowth | None = None
    peak_known: bool = True
    samples_per_step: float | None = None
    tokens_per_step: float | None = None

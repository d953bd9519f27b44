"""A timeline to draw, made up: three steps of kernels on two streams, communication, and what the host did."""

from collections.abc import Iterable

from lightning_forge_profiling.schema import Lane, Timeline
from tests.samples import ADD, ALLREDUCE, GEMM, NORM

STEPS = ((5, 0.0, 50_000.0), (6, 50_000.0, 101_500.0), (7, 101_500.0, 159_800.0))
COPY = "Memcpy HtoD (Pageable -> Device)"
NAMES = (GEMM, ADD, NORM, ALLREDUCE, COPY, "data", "forward", "backward", "optimizer", "attention block")
KINDS = ("matmul", "elementwise", "normalization", "comm", "memcpy", "region")

Span = tuple[float, float, int, int]
"""Start and duration in microseconds, which name, which kind."""


def lane(name: str, group: str, spans: Iterable[Span]) -> Lane:
    """A lane of `spans`."""
    start_us, duration_us, name_index, kind_index = zip(*sorted(spans), strict=True)
    return Lane(
        name=name,
        group=group,
        start_us=start_us,
        duration_us=duration_us,
        name_index=name_index,
        kind_index=kind_index,
    )


def sample_timeline(rank: int = 0, *, kernels_per_step: int = 120, names: tuple[str, ...] = NAMES) -> Timeline:
    """Steps that wait for data, compute (each third kernel is a GEMM), and end with an all-reduce."""
    host, compute, copies, comm = [], [], [], []
    for _, begin, end in STEPS:
        length = end - begin
        host += [
            (begin, 0.16 * length, 5, 5),
            (begin + 0.17 * length, 0.3 * length, 6, 5),
            (begin + 0.2 * length, 0.1 * length, 9, 5),
            (begin + 0.48 * length, 0.35 * length, 7, 5),
            (begin + 0.85 * length, 0.1 * length, 8, 5),
        ]
        copies.append((begin + 0.17 * length, 0.02 * length, 4, 4))
        comm.append((begin + 0.8 * length, 0.15 * length, 3, 3))
        every = 0.75 * length / kernels_per_step
        for position in range(kernels_per_step):
            which = position % 3
            compute.append((begin + 0.2 * length + position * every, every * (1.6, 0.3, 0.2)[which], which, which))
    return Timeline(
        rank=rank,
        length_us=STEPS[-1][2],
        steps=STEPS,
        names=names,
        kinds=KINDS,
        lanes=(
            lane("host: regions", "host", host),
            lane("stream 7", "stream", compute),
            lane("stream 17", "stream", copies),
            lane("communication", "comm", comm),
        ),
        omitted=42,
    )

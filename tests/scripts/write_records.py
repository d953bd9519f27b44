"""For each folder named on standard input: a process that writes a record there until it is killed. Prints its id."""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_forge_profiling.record.writer import RecordWriter, Segments
from lightning_forge_profiling.schema import (
    Begin,
    IntervalLine,
    RunEvidence,
    RunReport,
    RunTiming,
    State,
    StepCounters,
    StepGroup,
)

BEGIN = Begin(run="a1", rank=0, world_size=1, at=0.0, versions={"torch": "2"}, host="h", device="cpu", settings={})
TIMES = {"forward": [12.3456, 152.4138, 443.49], "backward": [23.4567, 550.2167, 842.64], "data": [0.123, 0.0151, 4.42]}
GROUP = StepGroup(split=1, ms=35.9253, squares=1290.627, regions=TIMES)
COUNTERS = StepCounters(steps=1, optimizer_steps=1, no_samples=1, groups={"changing": GROUP}, steps_us={415: 1})


def write(folder):
    """Lines with their numbers as steps, in segments of 20 kB, as fast as they are taken."""
    writer = RecordWriter(lambda: Segments(folder, BEGIN, segment_bytes=20_000), flush_s=0.001)
    report = RunReport(RunEvidence(timing=RunTiming()), None, "cpu", 1, None)
    for step in itertools.count(1):
        interval = IntervalLine(at=0.5, step=step, logger_step=step, counters=COUNTERS)
        line = interval if step % 40 else State(at=0.5, step=step, report=report, metrics={"time/step_ms": 4.5})
        while not writer.write(line):
            os.sched_yield()


def main():
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            write(Path(line.strip()))
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()

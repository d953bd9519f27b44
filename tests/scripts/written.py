"""Write traces with problems that no run here can be made to have, of the structure that others' traces show.

python -m tests.scripts.written tests/data/traces
"""

import gzip
import sys
from pathlib import Path

from tests.synthetic import ADD, Synthetic

STEPS = range(5, 8)


def slow_launches() -> Synthetic:
    """Each step launches a kernel whose module has to be loaded first, as on an MI250 with deferred loading."""
    trace = Synthetic(device="AMD Instinct MI250X")
    for number in STEPS:
        start = 10 * number
        trace.step(number, start, start + 10)
        for kernel in range(5):
            launched = start + 0.2 + 0.3 * kernel
            trace.kernel(launched + 0.01, launched + 0.25, launched=launched, by="hipLaunchKernel")
        trace.operator("aten::add_", start + 1.8, start + 8.5)
        trace.kernel(start + 8.41, start + 9.8, launched=start + 1.9, takes=6.5, by="hipLaunchKernel", name=ADD)
    return trace


def gpu_idle() -> Synthetic:
    """Each step waits on the GPU's own side while the host is in a blocking copy, as in a decoding server on AMD."""
    trace = Synthetic(device="AMD Instinct MI300X")
    for number in STEPS:
        start = 20 * number
        trace.step(number, start, start + 20)
        for kernel in range(10):
            launched = start + 0.1 + 0.2 * kernel
            trace.kernel(launched + 0.01, launched + 0.2, launched=launched, by="hipLaunchKernel")
        trace.kernel(start + 15, start + 19.9, launched=start + 2.2, name=ADD, stream=3, by="hipLaunchKernel")
        trace.operator("aten::copy_", start + 2.3, start + 19.5)
        trace.call("hipMemcpyWithStream", start + 2.4, start + 19.4)
    return trace


if __name__ == "__main__":
    for case in (slow_launches, gpu_idle):
        path = case().write(Path(sys.argv[1]) / case.__name__)
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()

"""A simulated GPU and its host, with a clock that only they move: launches take the host time, kernels the GPU.

The figures are about an H200's: 5 us of host time a launch, 0.9 us between kernels of a stream, 0.1 in a graph.
"""

from contextlib import contextmanager
from types import SimpleNamespace

LAUNCH_NS, RECORD_NS, LATENCY_NS, GAP_NS, GRAPH_GAP_NS, EVENT_NS = 5_000, 1_400, 3_000, 900, 100, 700
FLUSH_NS = 30_000
QUEUE = 1000


class SimulatedEvent:
    def __init__(self, gpu):
        self._gpu, self._ns = gpu, None

    def record(self):
        self._gpu.host_ns += RECORD_NS
        self._ns = self._gpu.put(EVENT_NS, gap_ns=0)[1]

    def query(self):
        self._gpu.host_ns += 300
        return self._ns <= self._gpu.host_ns

    def synchronize(self):
        self._gpu.host_ns = max(self._gpu.host_ns, self._ns)

    def elapsed_time(self, end):
        return (end._ns - self._ns) / 1e6


class SimulatedGpu:
    device = "cuda:0"
    name = "Simulated GPU (cuda:0)"
    uuid = "8932f937-d72c-4106-c12f-20bd9faed9f6"

    def __init__(self):
        self.host_ns = 1_000_000
        self.free_ns = 0
        self.ends = []
        """When each launch that may still be in the queue is through."""
        self.cold = False
        self.slowdown = 1.0
        self.captured = None
        self.captures = self.replays = self.flushes = self.kernels = 0
        self.profiler_error = None
        self.recorded = None
        self.in_use = self.allocated = self.cuda_mallocs = 0

    # what the host does

    def clock_ns(self):
        self.host_ns += 50
        return self.host_ns

    def rest(self, seconds):
        self.host_ns += int(seconds * 1e9)

    def put(self, ns, *, gap_ns=GAP_NS):
        """Queue something; the host waits for a place in the queue."""
        self.ends = [end for end in self.ends if end > self.host_ns]
        if len(self.ends) >= QUEUE:
            self.host_ns = self.ends[len(self.ends) - QUEUE]
        start = max(self.free_ns + gap_ns, self.host_ns + LATENCY_NS)
        self.free_ns = start + int(ns)
        self.ends.append(self.free_ns)
        return start, self.free_ns

    def kernel(self, ns, *, cold_ns=0):
        """Launch a kernel; it takes longer when its data is not in the L2."""
        if self.captured is not None:
            self.captured.append(ns)
            return
        self.kernels += 1
        self.host_ns += LAUNCH_NS
        launched = self.host_ns
        start, end = self.put((ns + (cold_ns if self.cold else 0)) * self.slowdown)
        self.cold = False
        self._record("cuda_runtime", "cudaLaunchKernel", launched, launched)
        self._record("kernel", "k", start, end)

    def kernel_aside(self, ns):
        """Launch a kernel on a stream that the current one does not wait for."""
        self.host_ns += LAUNCH_NS
        self._record("cuda_runtime", "cudaLaunchKernel", self.host_ns, self.host_ns)
        self._record("kernel", "k", self.host_ns + LATENCY_NS, self.host_ns + LATENCY_NS + ns)

    def allocate(self, size, *, keep):
        self.allocated += size
        self.in_use += size if keep else 0
        self.cuda_mallocs += keep

    # what the package calls

    def new_event(self):
        return SimulatedEvent(self)

    def synchronize(self):
        if self.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.host_ns = max(self.host_ns + 3_000, self.free_ns)

    def sleep(self, cycles):
        self.host_ns += LAUNCH_NS
        start, end = self.put(cycles / 2)  # 2 GHz
        self._record("cuda_runtime", "cudaLaunchKernel", self.host_ns, self.host_ns)
        self._record("kernel", "spin_kernel", start, end)

    def flush_l2(self):
        self.flushes += 1
        self.host_ns += LAUNCH_NS
        start, end = self.put(FLUSH_NS)
        self._record("cuda_runtime", "cudaMemsetAsync", self.host_ns, self.host_ns)
        self._record("gpu_memset", "Memset", start, end)
        self.cold = True

    def capture(self, calls, count):
        self.captures += 1
        nodes: list[float] = []
        self.captured = nodes
        try:
            calls(count)
        finally:
            self.captured = None

        def replay():
            self.replays += 1
            self.host_ns += 20_000
            self.put(sum(ns * self.slowdown + GRAPH_GAP_NS for ns in nodes))

        return replay

    def memory(self):
        return SimpleNamespace(in_use_bytes=self.in_use, allocated_bytes=self.allocated, cuda_mallocs=self.cuda_mallocs)

    @contextmanager
    def mark(self, name):
        self.host_ns += 100
        start = self.host_ns
        yield
        self.host_ns += 100
        self._record("user_annotation", name, start, self.host_ns)

    def trace(self, run):
        if self.profiler_error is not None:
            raise self.profiler_error
        self.recorded = []
        run()
        self.synchronize()
        events, self.recorded = self.recorded, None
        self.host_ns += 10_000_000
        return events

    def _record(self, kind, name, start, end):
        if self.recorded is not None:
            args = {}
            if kind != "user_annotation":  # a launch and its work follow each other
                args["correlation"] = sum(event["cat"] == "cuda_runtime" for event in self.recorded) + (
                    kind == "cuda_runtime"
                )
            self.recorded.append(
                {"ph": "X", "cat": kind, "name": name, "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args}
            )

"""Traces written by hand, as `torch.profiler` would export them: what the host did, and what the GPU did for it.

All times are milliseconds. Work on the GPU is launched by a call on the host at `launched`; None leaves the launch out,
as for work from before the recording.

    trace = Synthetic()
    trace.step(7, 0, 10)
    trace.kernel(2, 5, launched=1)
    trace.rank(tmp_path).gpu.busy_ms_per_step  # 3
"""

import json
from itertools import count
from typing import Any

from lightning_forge_profiling.pipeline import analyze

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy HtoD (Pinned -> Device)"

MAIN, AUTOGRAD, WORKER = 100, 101, 102  # threads
LAUNCH = 0.001  # how long a launch takes on the host


class Synthetic:
    """A trace under way; `events` is what will stand in the file."""

    def __init__(self, *, device="NVIDIA H200", rank=None, about=None):
        self.events = []
        self._header: dict[str, Any] = {"deviceProperties": [{"id": 0, "name": device}]}
        if rank is not None:
            self._header["distributedInfo"] = {"rank": rank}
        if about is not None:  # what the callback says of its run
            self._header["forge_profiling"] = about
        self._ids = count(1)

    def __repr__(self):
        return "\n".join(map(str, self.events))

    # -- the host

    def step(self, number, start, end):
        self.mark(f"ProfilerStep#{number}", start, end)

    def mark(self, name, start, end, thread=MAIN):
        self._host("user_annotation", name, start, end, thread)

    def frame(self, name, start, end):
        self._host("python_function", name, start, end, MAIN)

    def call(self, name, start, end, thread=MAIN, *, category="cuda_runtime", **args):
        self._host(category, name, start, end, thread, **args)

    def operator(self, name, start, end, thread=MAIN, *, dims=(), types=(), **args):
        shapes = {"Input Dims": dims, "Input type": types, "Concrete Inputs": [""] * len(dims)} if dims else {}
        self._host("cpu_op", name, start, end, thread, **shapes, **args)

    def allocation(self, at, size, *, allocated, reserved, device_type=1):
        args = {"Bytes": size, "Total Allocated": allocated, "Total Reserved": reserved, "Device Type": device_type}
        self.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": _us(at), "pid": 1, "tid": MAIN}
            | {"args": args}
        )

    # -- the GPU

    def kernel(
        self, start, end, *, launched, takes=LAUNCH, name=GEMM, stream=7, by="cudaLaunchKernel", thread=MAIN, **args
    ):
        correlation = self._launch(by, launched, thread, takes)
        self._gpu("kernel", name, start, end, stream, correlation=correlation, **args)

    def graph(self, kernels, *, launched):
        """One launch of many kernels, given as (start, end)."""
        correlation = self._launch("cudaGraphLaunch", launched, MAIN)
        for start, end in kernels:
            self._gpu("kernel", GEMM, start, end, 7, correlation=correlation)

    def copy(self, start, end, *, launched, name=PAGEABLE, size=0, stream=7):
        correlation = self._launch("cudaMemcpyAsync", launched, MAIN)
        self._gpu("gpu_memcpy", name, start, end, stream, correlation=correlation, bytes=size)

    def collective(self, start, end, *, launched, name="allreduce", group="0", elements=1000, dtype="Float"):
        says = {"Collective name": name, "Process Group Name": group, "In msg nelems": elements, "dtype": dtype}
        self.kernel(start, end, launched=launched, name=NCCL, stream=20, **says)

    # -- the file, and what is found in it

    def write(self, folder, name="rank0.trace.json"):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(json.dumps(self._header | {"traceEvents": self.events}))
        return path

    def rank(self, folder, **options):
        """The figures of its only rank."""
        return analyze(self.write(folder), **options).analysis.ranks[0]

    def _launch(self, by, launched, thread, takes=LAUNCH):
        correlation = next(self._ids)
        if launched is not None:
            category = "cuda_driver" if by.startswith("cuLaunch") else "cuda_runtime"
            self.call(by, launched, launched + takes, thread, category=category, correlation=correlation)
        return correlation

    def _host(self, category, name, start, end, thread, **args):
        self._add(category, name, start, end, pid=1, tid=thread, args=args)

    def _gpu(self, category, name, start, end, stream, **args):
        self._add(category, name, start, end, pid=0, tid=stream, args={"device": 0, "stream": stream, **args})

    def _add(self, category, name, start, end, **rest):
        times = {"ts": _us(start), "dur": round(_us(end) - _us(start), 3)}
        self.events.append({"ph": "X", "cat": category, "name": name, **times, **rest})


def _us(ms):
    return round(ms * 1e3, 3)

"""Small traces as profilers have written them since 2021: the same three steps in the words of each age.

The spellings are those of Kineto's `output_json.cpp` of the time, of its TensorBoard plugin's test data, and of its
roctracer activities.
"""

import json

STEPS = (4, 5, 6)
STEP_US = 1000
MM, ADD = (
    "ampere_sgemm_128x64_tn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
)
CIJK = "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1_SN"
BYTES = 4096

# What is in each step: kind, name, start and duration in microseconds, number of the operator and its launch
HOST = (
    ("step", "ProfilerStep#{}", 0, 900, 0),
    ("operator", "aten::mm", 10, 50, 1),
    ("launch", "cudaLaunchKernel", 20, 5, 1),
    ("operator", "aten::copy_", 100, 60, 2),
    ("launch", "cudaMemcpyAsync", 110, 30, 2),
    ("operator", "aten::zero_", 200, 40, 3),
    ("launch", "cudaMemsetAsync", 210, 10, 3),
    ("operator", "aten::add", 300, 60, 4),
    ("launch", "cudaLaunchKernel", 310, 5, 4),
    ("loader", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 700, 150, 0),
)
GPU = (
    ("kernel", MM, 100, 400, 1),
    ("memcpy", "Memcpy HtoD (Pageable -> Device)", 510, 50, 2),
    ("memset", "Memset (Device)", 570, 10, 3),
    ("kernel", ADD, 600, 100, 4),
)
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation")
BUSY_MS = {"matmul": 0.4, "memory": 0.06, "other": 0.1, "comm": 0.0}


def happenings(gpu=True):
    """Kind, name, start, duration and number of everything in the three steps."""
    for position, step in enumerate(STEPS):
        for kind, name, start, duration, number in (*HOST, *(GPU if gpu else ())):
            unique = number and 10 * position + number
            yield kind, name.format(step), position * STEP_US + start, duration, unique


def today(base=4_350_599_000_000.125, **options):
    """As PyTorch writes them from 2.3 on."""
    category = {
        "step": "user_annotation", "operator": "cpu_op", "launch": "cuda_runtime", "loader": "user_annotation",
        "kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset",
    }  # fmt: skip
    events = []
    for kind, name, start, duration, number in happenings(**options):
        event = {"ph": "X", "cat": category[kind], "name": name, "pid": 3360, "tid": 3751}
        event |= {"ts": base + start, "dur": float(duration), "args": {"External id": number}}
        if kind == "launch":
            event["args"] |= {"cbid": 211, "correlation": number}
        elif kind in {"kernel", "memcpy", "memset"}:
            event |= {"pid": 0, "tid": 7}
            event["args"] |= {"device": 0, "context": 1, "stream": 7, "correlation": number}
            if kind != "kernel":
                event["args"] |= {"bytes": BYTES, "memory bandwidth (GB/s)": BYTES / duration / 1e3}
        events.append(event)
        if kind == "launch":
            flow = {"ph": "s", "id": number, "pid": 3360, "tid": 3751, "ts": base + start, "cat": "ac2g"}
            events.append({**flow, "name": "ac2g"})
    properties = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "numSms": 132}
    return {
        "schemaVersion": 1,
        "deviceProperties": [properties],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1790857026000000000,
        "traceEvents": [*metadata(base), *events],
        "traceName": "log/rank3.json",
    }


def metadata(base):
    return [
        {"name": "process_name", "ph": "M", "ts": base, "pid": 3360, "tid": 0, "args": {"name": "python"}},
        {"name": "process_labels", "ph": "M", "ts": base, "pid": -1, "tid": 0, "args": {"labels": ""}},
        {"name": "process_sort_index", "ph": "M", "ts": base, "pid": "Spans", "tid": 0, "args": {"sort_index": 2**29}},
        {"ph": "X", "cat": "Trace", "ts": base, "dur": 3 * STEP_US, "pid": "Spans", "tid": "PyTorch Profiler",
         "name": "PyTorch Profiler (0)", "args": {"Op count": 0}},
        {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces",
         "tid": "Trace PyTorch Profiler", "ts": base},
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": base + 3 * STEP_US},
    ]  # fmt: skip


def of_2021(base=1_621_401_187_223_197, **options):
    """As PyTorch 1.8 and 1.9 wrote them: whole microseconds since 1970, threads in quotes, steps as operators."""
    category = {
        "step": "Operator", "operator": "Operator", "loader": "Operator", "launch": "Runtime",
        "kernel": "Kernel", "memcpy": "Memcpy", "memset": "Memset",
    }  # fmt: skip
    events = []
    for kind, name, start, duration, number in happenings(**options):
        event = {"ph": "X", "cat": category[kind], "name": name, "pid": 24572, "tid": "24572"}
        event |= {"ts": base + start, "dur": duration}
        if kind == "launch":
            event["args"] = {"cbid": 211, "correlation": number, "external id": number, "external ts": base + start}
        elif kind in {"kernel", "memcpy", "memset"}:
            event |= {"pid": 0, "tid": "stream 7"}
            event["args"] = {"device": 0, "context": 1, "stream": 7, "correlation": number, "external id": number}
            if kind != "kernel":
                event["args"] |= {"bytes": BYTES, "memory bandwidth (GB/s)": 0.08}
        else:
            event["args"] = {"Device": 24572, "External id": number, "Trace name": "PyTorch Profiler"}
            event["args"] |= {"Trace iteration": 0}
        events.append(event)
        if kind == "launch":
            flow = {"ph": "s", "id": number, "pid": 24572, "tid": 24572, "ts": base + start}
            events.append({**flow, "cat": "async", "name": "launch"})
    allocation = {"ph": "i", "s": "t", "name": "[memory]", "pid": 24572, "tid": 24572, "ts": base + 50}
    allocation["args"] = {"Device Type": 1, "Device Id": 0, "Addr": 140123, "Bytes": 512}
    return {"schemaVersion": 1, "traceEvents": [*events, allocation, *metadata(base)]}


def of_2022(base=1_660_178_423_000_001, **options):
    """As PyTorch 1.11 and 1.12 wrote them."""
    category = {
        "step": "cpu_op", "operator": "cpu_op", "loader": "cpu_op", "launch": "cuda_runtime",
        "kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset",
    }  # fmt: skip
    events = []
    for kind, name, start, duration, number in happenings(**options):
        event = {"ph": "X", "cat": category[kind], "name": name, "pid": 71, "tid": 71}
        event |= {"ts": base + start, "dur": duration, "args": {"Trace name": "PyTorch Profiler"}}
        event["args"] |= {"Trace iteration": 0, "External id": number}
        if kind == "launch":
            event["args"] |= {"cbid": 211, "correlation": number}
        elif kind in {"kernel", "memcpy", "memset"}:
            event |= {"pid": 0, "tid": 7}
            event["args"] |= {"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": number}
            if kind != "kernel":
                event["args"] |= {"bytes": BYTES, "memory bandwidth (GB/s)": "N/A"}
        events.append(event)
        if kind in {"launch", "kernel"}:
            flow = {"ph": "s" if kind == "launch" else "f", "id": number, "pid": 71, "tid": 71, "ts": base + start}
            events.append({**flow, "cat": "async_cpu_to_gpu", "name": "async_gpu", "bp": "e"})
    return {"schemaVersion": 1, "deviceProperties": [], "traceEvents": [*events, *metadata(base)]}


def amd(base=7_098_562_913_553.5, copy="Memcpy HtoD (Host -> Device)", **options):
    """As PyTorch for ROCm writes them."""
    calls = {"cudaLaunchKernel": "hipLaunchKernel", "cudaMemcpyAsync": "hipMemcpyWithStream"}
    calls["cudaMemsetAsync"] = "hipMemsetAsync"
    trace = today(base, **options)
    for event in trace["traceEvents"]:
        name, args = event["name"], event.get("args", {})
        event["name"] = calls.get(name, {MM: CIJK, GPU[1][1]: copy}.get(name, name))
        if event.get("cat") == "cuda_runtime":
            args |= {"cid": 144, "stream": "0x55d0c8a3b2f0", "grid": [1024, 1, 1], "block": [256, 1, 1]}
            args["kernel"] = CIJK
        elif event.get("pid") == 0:
            event |= {"pid": 2, "tid": 0}
            args |= {"device": 2, "stream": 0, "kind": "Dispatch Kernel"}
    trace["deviceProperties"] = [
        {"id": 2, "name": "AMD Instinct MI300X", "totalGlobalMem": 206141652992, "numSms": 304}
    ]
    return trace


def kineto(trace):
    """The text as Kineto lays it out: an event over several lines, what is in it on few."""
    lines = []
    for event in trace["traceEvents"]:
        rest = {key: value for key, value in event.items() if key != "args"}
        args = f',\n    "args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}' if "args" in event else ""
        lines.append("  {\n    " + json.dumps(rest)[1:-1] + args + "\n  }")
    head = {key: value for key, value in trace.items() if key not in {"traceEvents", "traceName"}}
    name = json.dumps(trace.get("traceName", "trace.json"))
    separator = ",\n"
    return (
        f"\n{json.dumps(head, indent=2)[:-2]},\n"
        f'  "traceEvents": [\n{separator.join(lines)}\n  ],\n  "traceName": {name}\n}}\n'
    )


def turned(value):
    """The same with the keys of every object in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value

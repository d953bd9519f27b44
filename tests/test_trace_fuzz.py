"""Whatever a file holds, it is refused or analysed, and figures are figures."""

import gzip
import json
import math
import os
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_forge_profiling.cli.show import schema_json
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.json_layout import summary_json
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.page import report_page
from tests import trace_builder as made

pytestmark = pytest.mark.slow

# The same examples in each run, so that a red one is red for all; FUZZ_EXAMPLES=5000 looks further.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
fuzzed = settings(
    max_examples=EXAMPLES or 150,
    derandomize=not EXAMPLES,
    database=None,
    deadline=timedelta(seconds=20),
    suppress_health_check=list(HealthCheck),
)
VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema_json()))
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check(path):
    """Either an error that says what is wrong with the file, or figures that can be."""
    try:
        result = analyze(path)
    except TraceError as exc:
        assert str(exc).startswith(str(path))  # noqa: PT017  (either of both may be)
        return
    summary = json.loads(summary_json(result.analysis), parse_constant=pytest.fail)
    VALIDATOR.validate(summary)
    check_numbers(summary)
    for rank in summary["ranks"]:
        check_sums(rank)
    assert markdown(result.analysis)
    assert report_page(result.analysis, result.timelines)


def check_numbers(value, name=""):
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            check_numbers(item, name)
    elif isinstance(value, float):
        assert math.isfinite(value), name
        if name.endswith(("pct", "_ms", "ms_per_step", "per_step", "mean", "p50", "max", "min")):
            assert value >= -ROUNDING, name


def check_sums(rank):
    step, busy, idle = rank["step_ms"]["mean"], rank["gpu"]["busy_ms_per_step"], rank["gpu"]["idle_ms_per_step"]
    assert busy <= step + ROUNDING
    assert busy + idle == pytest.approx(step, abs=ROUNDING)
    for split in ("categories", "kinds"):
        assert sum(share["ms_per_step"] for share in rank[split].values()) == pytest.approx(busy, abs=ROUNDING)
    assert sum(share["ms_per_step"] for share in rank["idle"].values()) == pytest.approx(idle, abs=ROUNDING)
    assert rank["comm"]["exposed_ms_per_step"] <= rank["comm"]["ms_per_step"] + ROUNDING
    assert rank["comm"]["hidden_pct"] <= 100 + ROUNDING
    for step in rank["per_step"]:
        assert step["busy_ms"] <= step["ms"] + ROUNDING
        assert sum(step["categories_ms"].values()) == pytest.approx(step["busy_ms"], abs=ROUNDING)


# --- text ------------------------------------------------------------------------------------------------------------


def real_text():
    """The beginning of a real trace, and parts from around its steps and its kernels, as Kineto wrote them."""
    path = Path(__file__).parent / "data" / "traces" / "ddp" / "rank0.trace.json.gz"
    text, between = gzip.decompress(path.read_bytes()), b"\n  },\n"
    parts = [text[: text.index(between)]]
    for landmark, before in ((b'"name": "ProfilerStep#', 30_000), (b'"cat": "kernel"', 15_000)):
        begin = text.index(between, text.index(landmark) - before) + len(between)
        parts.append(text[begin : text.index(between, begin + 40_000)])
    return between.join(parts) + b'\n  }\n  ],\n"traceName": "rank0.trace.json"\n}\n'


SOURCES = [real_text(), *(made.kineto(age()).encode() for age in (made.today, made.of_2021, made.amd))]
FRAGMENTS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u12", b"nan", b"-inf", b"null", b"1e999", b"-1", b"\0",
    b"\xff", b"\xf0\x9f", b"},{", b"}]}", b'{"ph":"X"}', b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1},',
    b"[" * 2000, b'"ts": 9e18,', b'"dur": -5,', b'"traceEvents": [', b'"args": {"correlation": 1}', b" " * 70_000,
]  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "repeat", "insert", "cut", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 400),
        st.sampled_from(FRAGMENTS),
    ),
    min_size=1,
    max_size=6,
)


def mutated(text, mutations):
    for what, where, length, fragment in mutations:
        at = int(where * len(text))
        before, piece, after = text[:at], text[at : at + length], text[at + length :]
        if what == "flip":
            text = before + bytes([piece[0] ^ (1 << length % 8)]) + piece[1:] + after if piece else text
        elif what == "delete":
            text = before + after
        elif what == "repeat":
            text = before + piece + piece + after
        elif what == "insert":
            text = before + fragment + piece + after
        elif what == "cut" and length > 300:
            text = before
        elif what == "swap":
            text = before + after[:length] + piece + after[length:]
    return text


@fuzzed
@given(source=st.sampled_from(SOURCES), mutations=MUTATIONS, packed=st.booleans())
def test_a_mutated_trace_is_refused_or_gives_figures(source, mutations, packed, folder):
    path = folder / "mutated.json"
    text = mutated(source, mutations)
    path.write_bytes(gzip.compress(text, 1) if packed else text)
    check(path)


@fuzzed
@given(mutations=MUTATIONS)
def test_mutated_gzip_data_is_refused_or_gives_figures(mutations, folder):
    path = folder / "mutated.json.gz"
    path.write_bytes(b"\x1f\x8b" + mutated(gzip.compress(SOURCES[0], mtime=0)[2:], mutations))
    check(path)


# --- structures ------------------------------------------------------------------------------------------------------

ODD = st.sampled_from(
    [None, True, -1, 0, 2**31, 2**63, -(2**63), 10**40, 1e308, -1e308, 0.1, "", "x", "7", "NaN", "sNaN", [], {}, [[1]]]
)


def mostly(strategy):
    """Values that make sense, and some that do not."""
    return st.integers(1, 40).flatmap(lambda number: ODD if number == 40 else strategy)


def one_of(*values):
    return mostly(st.sampled_from(values))


def times(most):
    """Round ones, of which many are the same, and any others."""
    return mostly(st.integers(0, most // 50).map(lambda n: 50 * n) | st.integers(0, 10 * most).map(lambda n: n / 10))


def events(categories, names, **arguments):
    """Events of a category."""
    named = {name.replace("_", " "): value for name, value in arguments.items()}
    return st.fixed_dictionaries(
        {
            "ph": one_of("X"),
            "cat": one_of(*categories),
            "name": one_of(*names),
            "ts": times(3000),
            "dur": times(600),
            "pid": one_of(0),
            "tid": one_of(0, 0, 0, 1),
            "args": mostly(st.fixed_dictionaries({}, optional=named)),
        }
    )


NUMBER = mostly(st.integers(-1, 12))
BYTES = mostly(st.integers(0, 10**9))
SHAPES = one_of(
    [[4, 8], [8, 2]], [[0, 8], [8, 0]], [[-1, 2], [2, 2]], [[10**9] * 2] * 2, [[]], [["a"], [1.5]], [[2, 3, 8, 8]] * 3
)
WORK = {"correlation": NUMBER, "External_id": NUMBER, "stream": one_of(0, 1), "device": one_of(0, 0, 1), "bytes": BYTES}
KERNELS = events(
    ["kernel", "Kernel"],
    [made.MM, made.ADD, "flash_fwd_kernel", "", "\x1b[31m<b>|`\u202e\ud800"],
    **WORK,
)
COLLECTIVES = events(
    ["kernel"],
    ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)"],
    **WORK, Collective_name=one_of("allreduce"), Process_Group_Name=one_of("0", 1), In_msg_nelems=BYTES,
    dtype=one_of("Int"),
)  # fmt: skip
COPIES = events(
    ["gpu_memcpy", "gpu_memset", "Memcpy"],
    ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)", "CopyDeviceToDevice"],
    **WORK,
)
CALLS = events(
    ["cuda_runtime", "cuda_driver", "Runtime"],
    [*["cudaLaunchKernel"] * 4, "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaMemcpyAsync",
     "cudaGraphLaunch"],
    correlation=NUMBER, External_id=NUMBER,
)  # fmt: skip
OPERATORS = events(
    ["cpu_op", "Operator"],
    ["aten::mm", "aten::addmm", "aten::item", "aten::_local_scalar_dense", "aten::copy_", "c10d::broadcast_",
     "aten::add_", "autograd::engine::evaluate_function: MmBackward0", "aten::convolution",
     "aten::scaled_dot_product_attention"],
    External_id=NUMBER, Sequence_number=NUMBER, Input_Dims=SHAPES,
    Input_type=one_of(["float"] * 2, ["c10::BFloat16"] * 3), Concrete_Inputs=one_of(["", "1"], ["[1, 1]"] * 9),
)  # fmt: skip
ANNOTATIONS = events(
    ["user_annotation"],
    ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3", f"ProfilerStep#{10**30}", "forge.data", "forge.forward",
     "forge.backward", "forge.optimizer", "forge.validation", "forge.checkpoint", "forge.x",
     "Optimizer.step#AdamW.step", "my region", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"],
)  # fmt: skip
REST = events(
    ["python_function", "cpu_instant_event", "gpu_user_annotation", "ac2g"],
    ["train.py(3): step", "torch/nn/modules/module.py(1): _call", "[memory]", "ProfilerStep#2"],
    Bytes=mostly(st.integers(-512, 512)), Total_Allocated=BYTES, Total_Reserved=BYTES, Device_Type=one_of(0, 1),
)  # fmt: skip
EVENTS = st.lists(
    st.one_of(KERNELS, COLLECTIVES, COPIES, CALLS, CALLS, OPERATORS, ANNOTATIONS, REST, ODD), min_size=3, max_size=60
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "deviceProperties": mostly(st.just([{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 1, "numSms": 132}])),
        "distributedInfo": mostly(st.just({"rank": 1})),
        "baseTimeNanoseconds": ODD,
    },
)


def sound_events():
    events = made.today(base=0)["traceEvents"]
    for event in events:
        if event["name"] == "aten::mm":
            event["args"] |= {"Input Dims": [[64, 32], [32, 64]], "Input type": ["float"] * 2, "Sequence number": 7}
    for category, name, start, duration in (
        ("cpu_op", "aten::item", 1400, 200),
        ("cuda_runtime", "cudaStreamSynchronize", 1410, 150),
        ("python_function", "train.py(3): step", 1390, 300),
    ):
        event = {"ph": "X", "cat": category, "name": name, "pid": 3360, "tid": 3751, "ts": start, "dur": duration}
        events.append({**event, "args": {}})
    return events


SOUND = sound_events()
KEYS = ["ph", "cat", "name", "ts", "dur", "pid", "tid", "args", "correlation", "External id", "stream", "Input Dims"]
CHANGES = st.lists(
    st.tuples(st.integers(0, len(SOUND) - 1), st.sampled_from(KEYS), ODD | st.integers(0, 3000) | st.just(...)),
    max_size=12,
)


@st.composite
def traces(draw):
    """Nothing sound, or the three steps with some changes; and more events."""
    events = json.loads(json.dumps(draw(st.sampled_from([SOUND, SOUND, []]))))
    for place, key, value in draw(CHANGES) if events else ():
        event = events[place]
        event = event["args"] if key not in event and isinstance(event.get("args"), dict) else event
        if value is ...:
            event.pop(key, None)
        else:
            event[key] = value
    events += draw(EVENTS)
    base = draw(st.sampled_from([0, 10**12, 17 * 10**14, -500]))
    for event in events:
        if isinstance(event, dict) and isinstance(event.get("ts"), int | float) and abs(event["ts"]) < 10**6:
            event["ts"] += base
    return {**draw(FIELDS), "traceEvents": events}


@fuzzed
@given(trace=traces())
def test_any_events_are_refused_or_give_figures(trace, folder):
    path = folder / "events.json"
    path.write_text(json.dumps(trace))
    check(path)


@fuzzed
@given(
    content=st.recursive(
        ODD | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["traceEvents", "ph", "cat", "name", "ts", "args", "a"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_refused_or_gives_figures(content, folder):
    path = folder / "content.json"
    path.write_text(json.dumps(content))
    check(path)

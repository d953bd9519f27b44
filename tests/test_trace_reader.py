"""Reading traces: every spelling since 2021, files cut at every place, and damaged ones."""

import gzip
import json
import os
import re
import subprocess
import sys
import zlib
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import unpacked
from lightning_forge_profiling.kineto.copies import write_plugin_copy
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.pipeline import analyze
from tests import trace_builder as made
from tests.outcomes import HANGS_S

AGES = (made.today, made.of_2021, made.of_2022, made.amd)
TRACES = Path(__file__).parent / "data" / "traces"
CHECKOUT = Path(__file__).parents[1]


def written(tmp_path, content, name="trace.json"):
    path = tmp_path / name
    content = json.dumps(content) if isinstance(content, dict | list) else content
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def the_rank(path):
    (rank,) = analyze(path).analysis.ranks
    return rank


def event(name, start_us, took_us, **more):
    return {"ph": "X", "name": name, "ts": start_us, "dur": took_us, "pid": 1, "tid": 1, "args": {}, **more}


STEP = [event("ProfilerStep#3", 0, 9000, cat="user_annotation"), event("aten::mm", 100, 8000, cat="cpu_op")]
LAUNCHES = [event("cudaLaunchKernel", 100 * n, 5, cat="cuda_runtime", args={"correlation": n + 1}) for n in range(20)]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (
            [event("MatMulV2", 200, 50, tid=7, args={"Task Type": "AI_CORE"})],
            "1 event is of Ascend, which is not",
        ),
        ([event("fc", 200, 50, tid=7, cat="mtia_ccp_events")] * 2, "2 events are of MTIA, which is not analysed"),
        (LAUNCHES, "20 launches have no kernel: what the GPU did was not recorded"),
    ],
)
def test_what_a_device_did_and_the_trace_does_not_tell_leaves_no_verdict_and_no_advice(tmp_path, events, why):
    analysis = analyze(written(tmp_path, {"traceEvents": [*STEP, *events]})).analysis
    assert analysis.verdict_text.startswith(f"No verdict: {why}")
    assert analysis.findings == ()
    assert analysis.ranks[0].cpu is None


@pytest.mark.parametrize(
    ("call", "took_us", "starts"),
    [
        ("cudaDeviceGetStreamPriorityRange", 900_000, True),
        ("cudaStreamSynchronize", 900_000, False),  # for work from before the recording
        ("cudaDeviceGetStreamPriorityRange", 90, False),
    ],
)
def test_a_recording_in_which_cuda_starts_leaves_no_verdict(tmp_path, call, took_us, starts):
    begins = took_us + 100
    events = [
        event("ProfilerStep#3", 0, took_us + 10_000, cat="user_annotation"),
        event(call, 50, took_us, cat="cuda_runtime", args={"correlation": 1}),
        event("cudaLaunchKernel", begins, 5, cat="cuda_runtime", args={"correlation": 2}),
        event("gemm", begins + 8, 50, cat="kernel", args={"correlation": 2, "device": 0, "stream": 7}),
    ]
    text = analyze(written(tmp_path, {"traceEvents": events})).analysis.verdict_text
    assert text.startswith("No verdict: the GPU is started in the recorded steps") == starts


def test_gpu_work_by_another_clock_is_moved_behind_its_launches_and_that_is_said(tmp_path):
    kernels = [
        event("gemm", 100 * n - 3000 + 8, 50, cat="kernel", args={"correlation": n + 1, "device": 0, "stream": 7})
        for n in range(20)
    ]
    rank = the_rank(written(tmp_path, {"traceEvents": [*STEP, *LAUNCHES, *kernels]}))
    assert rank.gpu.busy_ms_per_step == pytest.approx(20 * 0.05)
    assert rank.step_ms.mean == pytest.approx(9)
    assert any("GPU work begins before its launch: its times were moved by 2.992 ms" in each for each in rank.warnings)
    kernels = [kernel | {"ts": kernel["ts"] + 3000} for kernel in kernels]
    assert the_rank(written(tmp_path, {"traceEvents": [*STEP, *LAUNCHES, *kernels]}, "b.json")).warnings == ()


def figures(rank):
    """What is said of the three steps, but for what differs from one age to the other."""
    return {
        "steps": [(step.number, step.ms, step.busy_ms, step.whole) for step in rank.per_step],
        "categories": {name: share.ms_per_step for name, share in rank.categories.items()},
        "launches": rank.host.launches_per_step,
        "bytes": rank.host.h2d_bytes_per_step,
        "loader": (rank.host.data_loader, rank.host.data_wait_ms_per_step),
        "copies": [(copy.direction, copy.ms_per_step) for copy in rank.copies],
        "operators": sorted(
            (operator.name, operator.calls_per_step, operator.device_ms_per_step) for operator in rank.operators
        ),
        "unlinked": rank.unlinked_pct,
    }


def rows(trace):
    """How many events of a trace are in its tables."""
    tables = (trace.gpu, trace.calls, trace.operators, trace.annotations, trace.frames, trace.allocations)
    return sum(len(table) for table in tables)


def forge(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    progress = ("reading ", "copying ")  # where the machine is slow
    return code, out, "".join(line for line in err.splitlines(keepends=True) if not line.startswith(progress))


def refused(capsys, path, complaint, command=("show",)):
    """One line on stderr with the file and what is wrong, and exit code 2."""
    code, out, err = forge(capsys, *command, path)
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    assert line.startswith("forge-profiling: ")
    assert str(path) in line
    assert complaint in line
    return True


# --- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", AGES)
def test_traces_of_every_age_give_the_same_figures(age, tmp_path):
    rank = the_rank(written(tmp_path, made.kineto(age())))

    assert [step.number for step in rank.per_step] == list(made.STEPS)
    assert {name: share.ms_per_step for name, share in rank.categories.items()} == pytest.approx(made.BUSY_MS)
    assert rank.gpu.busy_ms_per_step == pytest.approx(0.56)
    assert rank.host.launches_per_step == 2
    assert rank.host.h2d_bytes_per_step == made.BYTES
    assert rank.unlinked_pct == 0
    assert rank.warnings == ()
    assert figures(rank) == figures(the_rank(written(tmp_path, made.kineto(made.today()), "today.json")))


LAYOUTS = {
    "compact": lambda trace: json.dumps(trace, separators=(",", ":")),
    "pretty": lambda trace: json.dumps(trace, indent=4),
    "lines of Windows": lambda trace: made.kineto(trace).replace("\n", "\r\n"),
    "keys turned round": lambda trace: json.dumps(made.turned(trace)),
    "events first": lambda trace: json.dumps({"traceEvents": trace["traceEvents"], **trace}),
    "events last": lambda trace: json.dumps({**trace, "traceEvents": 0}).replace(
        '"traceEvents": 0', f'"z": {{}}, "traceEvents"\n :\t{json.dumps(trace["traceEvents"])}'
    ),
    "byte order mark": lambda trace: "\ufeff" + made.kineto(trace),
    "trailing comma": lambda trace: made.kineto(trace).replace("\n  }\n  ],\n", "\n  },\n  ],\n"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("age", AGES)
def test_the_layout_of_the_json_does_not_matter(age, layout, tmp_path):
    rank = the_rank(written(tmp_path, LAYOUTS[layout](age())))
    plain = the_rank(written(tmp_path, made.kineto(age())))
    assert replace(rank, file="") == replace(plain, file="")


@pytest.mark.slow
@pytest.mark.parametrize("age", AGES)
def test_a_bare_list_of_events_is_a_trace_even_if_nobody_closed_it(age, tmp_path):
    events = json.dumps(age()["traceEvents"])
    for text, warned in ((events, False), (events[:-1] + ",", True), (events + "\n", False), (events + "x", True)):
        rank = the_rank(written(tmp_path, text))
        assert figures(rank) == figures(the_rank(written(tmp_path, made.kineto(age()))))
        assert len(rank.warnings) == warned


def test_numbers_in_quotes_and_without_are_the_same(tmp_path):
    trace = made.of_2021()
    for number, event in enumerate(trace["traceEvents"]):
        event["pid"] = str(event["pid"]) if number % 2 else event["pid"]
        event["tid"] = int(event["tid"]) if number % 3 and event["tid"] == "24572" else event["tid"]
        if number % 5 == 0 and event.get("ph") == "X":
            event["ts"], event["dur"] = str(event["ts"]), str(event["dur"])
        args = event.get("args", {})
        if number % 2 and "correlation" in args:
            args["correlation"] = str(args["correlation"])
            args.pop("stream", None)  # as some did; then the thread says it

    found = read_trace(written(tmp_path, trace))

    assert found.warnings == ()
    assert found.threads.count(("24572", "24572")) == 1
    assert found.lanes == (("0", "7"),)
    assert figures(the_rank(tmp_path / "trace.json")) == figures(the_rank(written(tmp_path, made.of_2021())))


def test_processes_and_threads_may_be_negative_or_have_names(tmp_path):
    events = made.today()["traceEvents"]
    for event in events:
        if event["pid"] == 3360:
            event |= {"pid": -1, "tid": "main thread"}
    rank = the_rank(written(tmp_path, events))
    assert figures(rank) == figures(the_rank(written(tmp_path, made.today())))


def test_amd_copies_have_their_direction_whatever_they_are_called(tmp_path):
    for name in ("Memcpy HtoD (Host -> Device)", "CopyHostToDevice"):
        rank = the_rank(written(tmp_path, made.amd(copy=name)))
        assert [copy.direction for copy in rank.copies] == ["HtoD"]
        assert rank.device == "AMD Instinct MI300X"
        assert rank.top_kernels[0].name == made.CIJK
        assert rank.top_kernels[0].category == "matmul"


def test_the_rank_and_the_device_are_in_the_fields_before_or_after_the_events(tmp_path):
    trace = made.today()
    fields = {key: value for key, value in trace.items() if key != "traceEvents"}
    for text in (
        json.dumps({**fields, "traceEvents": trace["traceEvents"]}),
        json.dumps({"traceEvents": trace["traceEvents"], **fields}),
    ):
        found = read_trace(written(tmp_path, text))
        assert (found.rank, found.device, found.multiprocessors) == (3, "NVIDIA H200", 132)


@pytest.mark.parametrize("age", AGES)
def test_a_trace_of_the_cpu_alone_has_steps_and_no_busy_time(age, tmp_path):
    rank = the_rank(written(tmp_path, made.kineto(age(gpu=False))))
    assert [step.number for step in rank.per_step] == list(made.STEPS)
    assert rank.gpu.busy_ms_per_step == 0
    assert [step.ms for step in rank.per_step] == [1, 1, 0.9]
    assert any("no GPU work" in warning for warning in rank.warnings)


@pytest.mark.parametrize("age", AGES)
def test_a_trace_without_steps_is_one(age, tmp_path):
    events = [event for event in age()["traceEvents"] if not event["name"].startswith("ProfilerStep#")]
    rank = the_rank(written(tmp_path, events))
    assert rank.steps == 1
    assert rank.gpu.busy_ms_per_step == pytest.approx(3 * 0.56)
    assert any("no ProfilerStep" in warning for warning in rank.warnings)


@pytest.mark.parametrize("base", [-(10**9), -1500.5, 0])
def test_times_may_be_before_the_base_time(base, tmp_path):
    rank = the_rank(written(tmp_path, made.today(base)))
    assert figures(rank) == figures(the_rank(written(tmp_path, made.today())))


def test_times_since_1970_keep_their_nanoseconds(tmp_path):
    base = Decimal("1753861234567890.123")
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": base, "dur": 1.001},
        {"ph": "X", "cat": "kernel", "name": "b", "ts": base + Decimal("1.001"), "dur": 0.999},
        {"ph": "X", "cat": "kernel", "name": "c", "ts": base + Decimal("2.002"), "dur": 0.5},
        {"ph": "X", "cat": "kernel", "name": "no time", "ts": None},
    ]
    for order in (events, events[::-1]):
        text = msgspec.json.Encoder(decimal_format="number").encode(order)
        found = read_trace(written(tmp_path, text))
        assert found.gpu.start.tolist() == [
            1_753_861_234_567_890_123, 1_753_861_234_567_891_124, 1_753_861_234_567_892_125,
        ]  # fmt: skip
        assert (found.gpu.end - found.gpu.start).tolist() == [1001, 999, 500]


def test_several_windows_of_a_rank_are_put_together(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    for number, stamp in enumerate(("1700000000000000000", "1700000009000000000")):
        for worker in ("host_17", "host_18"):
            trace = made.today(base=10**7 * (number + 1))
            trace["distributedInfo"]["rank"] = int(worker == "host_18")
            for event in trace["traceEvents"]:
                if event["name"].startswith("ProfilerStep#"):
                    event["name"] = f"ProfilerStep#{int(event['name'][13:]) + 100 * number}"
            text = gzip.compress(made.kineto(trace).encode())
            written(folder, text, f"{worker}.{stamp}.pt.trace.json.gz")

    ranks = analyze(folder).analysis.ranks

    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert [step.number for step in rank.per_step] == [4, 5, 6, 104, 105, 106]
        assert rank.gpu.busy_ms_per_step == pytest.approx(0.56)
        assert rank.step_ms.max == 1  # the time between the windows is in none of the steps
        assert rank.unlinked_pct == 0  # although both windows use the same correlation ids


def test_windows_of_a_rank_are_in_the_order_of_their_numbers(tmp_path):
    for step in (9, 10):
        trace = made.today()
        for event in trace["traceEvents"]:
            event["name"] = event["name"].replace("ProfilerStep#", f"ProfilerStep#{step}")
        written(tmp_path, trace, f"rank0_step{step}.trace.json")
    rank = the_rank(tmp_path)
    assert [step.number for step in rank.per_step] == [94, 95, 96, 104, 105, 106]


def test_the_copy_for_the_plugin_says_the_same_as_the_trace(tmp_path):
    source = TRACES / "elementwise" / "rank0.trace.json.gz"
    write_plugin_copy(source, tmp_path / "rank0.pt.trace.json.gz")
    copy, trace = the_rank(tmp_path / "rank0.pt.trace.json.gz"), the_rank(source)
    assert copy.per_step == trace.per_step
    assert copy.categories == trace.categories


def test_a_name_may_look_like_json(tmp_path):
    name = 'void f<"a">},{"ph":"X"},]}\\n\\"[{\u00e9\U0001f600'
    trace = made.today()
    for event in trace["traceEvents"]:
        event["name"] = name if event["name"] == made.MM else event["name"]
    for text in (json.dumps(trace), json.dumps(trace, ensure_ascii=False), made.kineto(trace)):
        found = read_trace(written(tmp_path, text))
        assert name in found.names
        assert found.warnings == ()


@pytest.mark.slow
def test_events_of_any_size_are_read(tmp_path):
    trace = made.today()
    longest = {"ph": "X", "cat": "cpu_op", "name": "x" * 9_000_000, "ts": trace["traceEvents"][-1]["ts"], "dur": 1}
    listed = {**longest, "name": "listed", "args": {"groups": [{"name": "a", "ranks": [1]}, {"name": "b"}] * 200_000}}
    trace["traceEvents"] += [longest, listed, {**longest, "name": "last"}]
    path = written(tmp_path, trace)
    assert path.stat().st_size > 15_000_000
    found = read_trace(path)
    assert found.warnings == ()
    assert {"listed", "last", longest["name"]} < set(found.names)
    assert rows(found) == sum(event.get("cat") in made.CATEGORIES for event in trace["traceEvents"])


# --- what is not JSON, but has been written --------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity", "-Infinity"])
def test_a_bandwidth_that_is_no_number_costs_no_event(value, tmp_path):
    text = made.kineto(made.of_2021()).replace('"memory bandwidth (GB/s)": 0.08', f'"memory bandwidth (GB/s)": {value}')
    assert text.count(f": {value}") == 6
    rank = the_rank(written(tmp_path, text))
    assert figures(rank) == figures(the_rank(written(tmp_path, made.of_2021())))
    assert rank.warnings == ()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (rb"C:\Users\me\my_code.py(3): step", "C:/Users/me/my_code.py(3): step"),
        (b"a \x01 control\x1f character", "a   control  character"),
        (b"a\nline\tbreak", "a line break"),
        (b"caf\xe9 \xf0\x9f\x98", "caf? ???"),
        (rb"\u00e9 and \u12", "\u00e9 and /u12"),
        (rb"a: nan, b: inf}", "a: nan, b: inf}"),
    ],
)
def test_names_that_no_json_may_have_are_read_all_the_same(name, shown, tmp_path):
    text = made.kineto(made.today()).encode().replace(made.ADD.encode(), name)
    bad = text.replace(b'"N/A"', b"nan").replace(b'"Memset (Device)"', rb'"Mem\set (Device)"')
    found = read_trace(written(tmp_path, bad))
    assert shown in found.names
    assert found.warnings == ()
    assert rows(found) == len([*made.happenings()])


def test_fields_of_windows_are_read(tmp_path):
    text = made.kineto(made.today()).replace('"log/rank3.json"', r'"C:\Users\rank3.json"')
    found = read_trace(written(tmp_path, text))
    assert (found.rank, found.warnings) == (3, ())


DAMAGE = {
    "no colon": b'"dur" 100.0', "two minus signs": b'"dur": -1.-234', "a list without end": b'"dur": [',
    "no value": b'"dur": }', "objects without end": b'"dur": {"a": {"b": ', "commas": b'"dur": ,,',
    "a zero in front": b'"dur": 01', "no quotation mark": b'dur": 100.0', "too deep": b'"dur": ' + b"[" * 100_000,
    "a lost end": b"},", "not escaped": b'"Trace name": "a"quote", "dur": 100.0',
}  # fmt: skip


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_trace_that_is_damaged_in_its_middle_is_refused_and_the_place_is_said(damage, large, tmp_path, capsys):
    """Also where several megabytes of sound events lie before and behind it."""
    trace = made.today()
    trace["traceEvents"] *= 300 if large else 1
    whole = made.kineto(trace).encode()
    at = whole.index(b'"dur": 100.0', len(whole) // 2)
    path = written(tmp_path, whole[:at] + DAMAGE[damage] + whole[at + 12 :])
    assert refused(capsys, path, "Copy the file again, or record again")
    with pytest.raises(TraceError, match=r"damaged at byte \d+, in ") as caught:
        read_trace(path)
    place = int(re.search(r"at byte (\d+)", str(caught.value))[1])
    assert at - 200 < place < at + len(DAMAGE[damage]) + 500


@pytest.mark.parametrize("garbage", ["x", "x ", "}}", ":", '{"ph":{"ph":1}', "1 2"])
def test_what_is_no_json_between_two_events_is_refused(garbage, tmp_path):
    event = json.dumps({"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1})
    for text in (f"[{event},{garbage},{event}]", f"[{event},{event},{garbage},{event},{event}]", f"[{event} {event}]"):
        with pytest.raises(TraceError, match="damaged at byte"):
            read_trace(written(tmp_path, text))


def test_damaged_fields_before_the_events_are_refused(tmp_path):
    text = made.kineto(made.today()).replace('"schemaVersion": 1', '"schemaVersion": 1.x')
    with pytest.raises(TraceError, match=r"damaged at byte 24, in .*schemaVersion"):
        read_trace(written(tmp_path, text))


# --- values that cannot be ------------------------------------------------------------------------------------------


ABSURD = {
    "negative": {"dur": -5.0},
    "of centuries": {"dur": 7.4e15},
    "of hours": {"dur": 3.6e9},
    "of no kind": {"dur": "long"},
    "endless": {"dur": 1e400},
    "of no length": {"dur": None},
    "without a time": {"ts": None},
    "at a name": {"ts": "soon"},
    "at no number": {"ts": "NaN"},
    "at a list": {"ts": [1]},
    "in the far future": {"ts": 9e17},
    "beyond all numbers": {"ts": 10**400},
    "beyond all integers": {"ts": 1.7e19},
    "at the beginning of time": {"ts": -9.3e18},
}


@pytest.mark.slow
@pytest.mark.parametrize("base", [4_350_599_000_000.125, 1_753_861_234_567_890])
@pytest.mark.parametrize("absurd", ABSURD)
def test_an_event_that_cannot_be_is_left_out_with_one_warning(absurd, base, tmp_path, capsys):
    trace = made.today(base)
    sound = figures(the_rank(written(tmp_path, trace)))
    kernel = next(event for event in trace["traceEvents"] if event.get("cat") == "kernel")
    trace["traceEvents"].insert(9, {**kernel, "name": "absurd", "args": {}, **ABSURD[absurd]})

    path = written(tmp_path, trace)

    assert figures(the_rank(path)) == sound
    code, out, err = forge(capsys, "show", path)
    assert (code, err) == (0, "")
    assert out.count("1 event is ") == 1


@pytest.mark.parametrize(
    "args",
    [None, [], "none", 7, {"correlation": []}, {"device": {}}, {"stream": True}, {"Collective name": 5},
     {"External id": [1], "Input Dims": 3}],
)  # fmt: skip
def test_arguments_of_wrong_types_do_not_cost_the_time_of_their_event(args, tmp_path, capsys):
    trace = made.today()
    kernel = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"][2]
    kernel["args"] = args

    path = written(tmp_path, trace)

    assert the_rank(path).gpu.busy_ms_per_step == pytest.approx(0.56)
    code, out, err = forge(capsys, "show", path)
    assert (code, err) == (0, "")
    assert out.count("read without their arguments") == (args is not None)


@pytest.mark.parametrize("value", [None, -1, 10**30, 1e300, "many", ""])
def test_numbers_that_are_none_or_too_large_are_unknown(value, tmp_path):
    trace = made.today()
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        args |= {key: value for key in ("bytes", "External id", "stream", "Sequence number") if key in args}
    rank = the_rank(written(tmp_path, trace))
    assert rank.host.h2d_bytes_per_step == 0
    assert rank.gpu.busy_ms_per_step == pytest.approx(0.56)
    assert rank.warnings == ()


def test_names_may_be_missing(tmp_path):
    trace = made.today()
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            event["name"] = None
    rank = the_rank(written(tmp_path, trace))
    assert rank.gpu.busy_ms_per_step == pytest.approx(0.56)


def test_what_is_in_the_list_and_no_event_is_left_out(tmp_path):
    trace = made.today()
    trace["traceEvents"] = [1, None, *trace["traceEvents"], "event", [], {}]
    rank = the_rank(written(tmp_path, trace))
    assert figures(rank) == figures(the_rank(written(tmp_path, made.today())))
    (warning,) = rank.warnings
    assert "4 events are malformed and left out" in warning


@pytest.mark.parametrize("rank", [-1, 2**31, 10**40, "3", None, 1.5])
def test_a_rank_that_cannot_be_is_unknown(rank, tmp_path):
    trace = made.today()
    trace["distributedInfo"]["rank"] = rank
    assert read_trace(written(tmp_path, trace)).rank is None


# --- files that are no trace -----------------------------------------------------------------------------------------

EXPORT = 'export one with prof.export_chrome_trace("trace.json") of torch.profiler'
# as `torch.autograd.profiler.profile` writes it without Kineto
OF_AUTOGRAD = {"ph": "X", "ts": 288.048, "dur": 9.5, "tid": 1, "pid": "CPU functions", "args": {}}
AUTOGRAD_LIST = [
    {"name": "aten::add", **OF_AUTOGRAD},
    {"name": "aten::add", **OF_AUTOGRAD, "ph": "s", "id": 1, "cat": "cpu_to_cuda"},
    {"name": "add_kernel", **OF_AUTOGRAD, "tid": "0", "pid": "CUDA functions"},
]
NO_TRACES = {
    "empty": (b"", "the file is empty"),
    "blank": (b" \n\t ", "the file is empty"),
    "packed nothing": (gzip.compress(b"", mtime=0), "the file is empty"),
    "text": (b"Traceback (most recent call last):", "not a trace: a trace is JSON"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(99), "not a trace: a trace is JSON"),
    "zip": (b"PK\x03\x04" + bytes(99), "a zip archive, not a trace: unzip it"),
    "zst": (b"\x28\xb5\x2f\xfd" + bytes(99), "compressed with zstd, not a trace: decompress it with zstd -d"),
    "tar": (bytes(257) + b"ustar\x0000", "a tar archive, not a trace: unpack it with tar -xf"),
    "database": (b"SQLite format 3\0" + bytes(99), f"an SQLite database, as of Nsight Systems, not a trace: {EXPORT}"),
    "snapshot": (b"\x80\x04\x95" + bytes(99), "a pickle, as a memory snapshot is, not a trace"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, not a trace: fetch the file"),
    "web page": (b"\n<!doctype html><html>", "a web page, not a trace: download the file itself"),
    "perfetto": (b"\n\x80\x01\x08\x00", f"a Perfetto trace (protobuf), not one of torch.profiler: {EXPORT}"),
    "perfetto that begins like JSON": (
        b"\n{" + b"\x08\x01".ljust(ord("{"), b"a") + b"\n\x02\x08\x01",
        "a Perfetto trace (protobuf)",
    ),
    "autograd's list": (
        json.dumps(AUTOGRAD_LIST).encode(),
        f"a list of events of torch.autograd.profiler, which has no kinds of events; {EXPORT}",
    ),
    "half a gzip header": (b"\x1f\x8b\x08", "damaged gzip data"),
    "an object": (b"{}", f"JSON, but not a trace: it has no traceEvents list; {EXPORT}"),
    "another object": (b'{"a": [1, 2], "b": {"c": null}}', "JSON, but not a trace"),
    "events that are no list": (b'{"traceEvents": {"a": 1}}', "JSON, but not a trace"),
    "a number": (b"12", f"not a trace: a trace is JSON, also as gzip; {EXPORT}"),
    "deep": (b'{"a": ' + b"[" * 100_000, "not JSON"),
    "an empty trace": (b'{"traceEvents": []}', "no complete event: its list has none"),
    "an empty list": (b"[]", "no complete event: its list has none"),
    "another list": (b"[1, 2, 3]", "no complete event"),
    "a list of something": (b'[{"id": 1, "title": "a"}]', "of its 1 events, none is an operator"),
    "metadata alone": (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "of its 1 events, none"),
    "cut in a field": (b'{"schemaVersion": 1, "deviceProp', "cut before its first event, at byte 32"),
    "cut in the first event": (b'{"traceEvents": [{"ph": "X", "na', "in the middle of an event, at byte 32"),
    "cut before the first event": (b'{"traceEvents": [', "before its list of events does, at byte 17"),
    "nothing sound": (b'[{"ph": "X", "cat": "kernel", "ts": -1, "dur": -1}]', "1 event is left out for a missing"),
    "nothing readable": (b"[{ph: 1}, {ph: 2}]", "damaged at byte 2"),
}


@pytest.mark.parametrize("case", NO_TRACES)
def test_a_file_that_is_no_trace_is_one_line_and_exit_code_2(case, tmp_path, capsys):
    """Whatever its name says, and whichever command reads it."""
    content, complaint = NO_TRACES[case]
    assert refused(capsys, written(tmp_path, content), complaint)
    assert refused(capsys, written(tmp_path, gzip.compress(content) if content[:1] != b"\x1f" else content), complaint)


@pytest.mark.parametrize("case", ["zip", "zst", "perfetto", "autograd's list", "empty"])
def test_what_show_refuses_is_not_exported(case, tmp_path, capsys):
    path, out = written(tmp_path, NO_TRACES[case][0]), tmp_path / "out"
    assert refused(capsys, path, "", ("export", "--for", "tensorboard", "--out", out))
    assert list(out.iterdir()) == []


def test_traces_in_other_formats_are_named_where_a_folder_has_them(tmp_path, capsys):
    """Alone or beside a trace that is read."""
    written(tmp_path, NO_TRACES["zst"][0], "rank1.trace.json.zst")
    (tmp_path / "data.zip").write_bytes(NO_TRACES["zip"][0])  # a data set
    assert refused(
        capsys, tmp_path, "rank1.trace.json.zst (compressed with zstd, not a trace: decompress it with zstd -d)"
    )
    written(tmp_path, made.today(), "rank0.trace.json")
    code, out, _ = forge(capsys, "show", tmp_path)
    assert code == 0
    (line,) = [line for line in out.splitlines() if "decompress it with zstd -d" in line]
    assert "rank1.trace.json.zst" in line
    assert "data.zip" not in out


@pytest.mark.linux
def test_what_cannot_be_read_at_all_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert refused(capsys, tmp_path / "folder", "no trace in this folder")
    assert refused(capsys, tmp_path / "none", "no such file or folder")
    os.mkfifo(tmp_path / "pipe")
    assert refused(capsys, tmp_path / "pipe", "neither a file nor a folder")
    (tmp_path / "rank0.trace.json").symlink_to("/proc/self/mem")  # opens, and fails when it is read
    for command in (["show"], ["export", "--for", "tensorboard", "--out", str(tmp_path / "out")]):
        code, out, err = forge(capsys, *command, tmp_path / "rank0.trace.json")
        assert (code, out) == (2, "")
        assert re.fullmatch(r"forge-profiling: /proc/\d+/mem: Input/output error\n", err), "what the link leads to"


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9, 0.98])
def test_a_file_that_is_cut_off_gets_no_verdict_and_says_so_first(part, tmp_path):
    """Wherever it ends: one thread's events follow another's, so that any step may lack some."""
    whole = gzip.decompress((TRACES / "input_bound" / "rank0.trace.json.gz").read_bytes())
    path = written(tmp_path, whole[: int(len(whole) * part)])
    found = analyze(path).analysis
    assert (found.verdict, found.findings) == ("no verdict", ())
    assert found.verdict_text.startswith(f"No verdict: {path.name} is cut off")
    assert not any(step.whole for step in found.ranks[0].per_step)
    assert "no step is known to be whole" in found.verdict_text
    assert found.hints == ()


def test_ranks_whose_files_are_whole_are_judged_beside_one_that_is_cut_off(tmp_path):
    for rank in (0, 1):
        text = gzip.decompress((TRACES / "ddp_comm_bound" / f"rank{rank}.trace.json.gz").read_bytes())
        written(tmp_path, text[: len(text) * 9 // 10] if rank else text, f"rank{rank}.trace.json")
    assert analyze(tmp_path).analysis.verdict == "communication-bound"


def test_a_process_of_its_own_ends_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_forge_profiling", "show", written(tmp_path, b'{"traceEvents": [{"ph')],
        capture_output=True, text=True, check=False, cwd=CHECKOUT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    problems = [line for line in done.stderr.splitlines() if not line.startswith("reading ")]  # said after a second
    assert len(problems) == 1


def test_a_folder_with_bad_files_still_reports_the_others(tmp_path, capsys):
    trace = made.today()
    del trace["distributedInfo"]
    written(tmp_path, trace, "rank0.trace.json")
    written(tmp_path, b'{"traceEvents": [', "rank1.trace.json")
    written(tmp_path, gzip.compress(made.kineto(trace).encode())[:-30], "rank2.trace.json.gz")
    (tmp_path / "rank3.trace.json").symlink_to("/proc/self/mem")

    code, out, err = forge(capsys, "show", tmp_path, "--json")

    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 2]
    for complaint in ("rank1.trace.json: ", "rank2.trace.json.gz: damaged gzip", "rank3.trace.json (a link"):
        assert sum(complaint in warning for warning in summary["warnings"]) == 1


# --- files that end too early ----------------------------------------------------------------------------------------

NAMES = ["plain", '},{"ph": "X"}, ', "]}", 'a "quote" and a \\', "n\u00e4me \U0001f600", "last"]
SMALL = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": name, "ts": 10 * number, "dur": 1.5, "args": {"a": [{"b": []}, {"c": {}}]}}
        for number, name in enumerate(NAMES)
    ],
    "traceName": "trace.json",
}
TEXTS = {
    "compact": json.dumps(SMALL, separators=(",", ":"), ensure_ascii=False),
    "pretty": json.dumps(SMALL, indent=2, ensure_ascii=False),
    "kineto": made.kineto(SMALL),
    "list": json.dumps(SMALL["traceEvents"]),
}


def ends_of_events(content):
    """Where each event of a trace ends, found by another reader."""
    text = content.decode()
    at = text.index("[", text.index('"traceEvents"') if text.lstrip().startswith("{") else 0)
    ends = []
    for event in SMALL["traceEvents"]:
        found, at = json.JSONDecoder().raw_decode(text, text.index("{", at))
        assert found == event
        ends.append(len(text[:at].encode()))
    return ends


def is_json(content):
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def check_cut(path, content, ends, *, damaged=False):
    """That all events which end before the file does are read, and that something is said about the rest."""
    whole = sum(end <= len(content) for end in ends)
    if not whole:
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}: ")
        return
    trace = read_trace(path)
    assert list(trace.names) == NAMES[:whole]
    assert trace.gpu.start.tolist() == [10_000 * number for number in range(whole)]
    assert len(trace.warnings) == (damaged or not is_json(content))


@pytest.mark.slow
@pytest.mark.parametrize("layout", TEXTS)
def test_a_trace_cut_at_any_byte_gives_the_whole_events_before(layout, tmp_path):
    content = TEXTS[layout].encode()
    ends = ends_of_events(content)
    for length in range(len(content) + 1):
        check_cut(written(tmp_path, content[:length]), content[:length], ends)


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 3])
def test_gzip_data_cut_at_any_byte_gives_the_whole_events_before(members, tmp_path):
    content = TEXTS["pretty"].encode()
    size = len(content) // members + 1
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    packed = b"".join(gzip.compress(part) for part in parts)
    ends = ends_of_events(content)
    for length in range(2, len(packed)):
        text, rest, complete = b"", packed[:length], False
        while rest:
            unpacker = zlib.decompressobj(wbits=31)
            text += unpacker.decompress(rest)
            rest, complete = unpacker.unused_data, unpacker.eof
        check_cut(written(tmp_path, packed[:length]), text, ends, damaged=not complete)


def test_a_flipped_byte_in_gzip_data_is_told(tmp_path):
    packed = gzip.compress(TEXTS["kineto"].encode(), mtime=0)
    for place in range(2, len(packed)):
        path = written(tmp_path, packed[:place] + bytes([packed[place] ^ 0x55]) + packed[place + 1 :])
        try:
            trace = read_trace(path)
        except TraceError as exc:
            assert str(exc).startswith(f"{path}: ")  # noqa: PT017  (either of both may be)
        else:
            assert set(trace.names) == set(NAMES) or trace.warnings
            assert place < len(packed) - 8, "its check sum and length"


def test_gzip_data_is_read_up_to_its_cut_and_refused_where_it_is_damaged(tmp_path, capsys):
    packed = bytearray((TRACES / "input_bound" / "rank0.trace.json.gz").read_bytes())
    events = rows(read_trace(TRACES / "input_bound" / "rank0.trace.json.gz"))
    middle = len(packed) * 3 // 4
    path = written(tmp_path, bytes(packed[:middle]), "cut.json.gz")
    assert rows(read_trace(path)) > 0.6 * events
    code, out, err = forge(capsys, "show", path)
    assert (code, err) == (65, "")
    assert out.count("damaged gzip data") == 1
    for content in (packed[:middle] + bytes(1000) + packed[middle + 1000 :], packed + b"junk"):
        assert refused(capsys, written(tmp_path, bytes(content), "damaged.json.gz"), "damaged gzip data after ")


@pytest.mark.slow
def test_a_cut_through_a_large_trace_says_where(tmp_path, capsys):
    trace = made.kineto(made.today()).encode()
    events = trace[trace.index(b"[\n  {") + 1 : trace.rindex(b"\n  ],")]
    large = b'{"traceEvents": [' + b",".join([events] * 1200)
    assert len(large) > 12 << 20
    cut = large[: len(large) - 3 * len(events) // 2]
    path = written(tmp_path, cut)
    code, out, err = forge(capsys, "show", path, "--json")
    assert (code, err) == (65, "")
    (warning,) = [text for text in json.loads(out)["warnings"] if "the file ends" in text]
    assert warning == f"trace.json: the file ends in the middle of an event, at byte {len(cut)}"
    assert rows(read_trace(path)) > 1198 * len([*made.happenings()])


def test_a_file_padded_with_zeros_is_read_up_to_them(tmp_path):
    content = TEXTS["kineto"].encode()
    path = written(tmp_path, content[: ends_of_events(content)[-1]] + bytes(9_000_000))
    trace = read_trace(path)
    assert list(trace.names) == NAMES
    assert len(trace.warnings) == 1


# --- limits ----------------------------------------------------------------------------------------------------------


EVENT = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{"correlation":1}},'


def bomb(path, piece, megabytes):
    opening, block = b'{"traceEvents": [', piece * ((1 << 20) // len(piece) + 1)
    path.write_bytes(gzip.compress(opening) + gzip.compress(block) * megabytes)
    return path


def run_limited(code, *arguments):
    """Run Python code in a process of its own; returns its peak of resident memory in MB and its standard error."""
    # not getrusage, which counts what the process that started this one held
    peak = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\ntry:\n    {code}\nfinally:\n    {peak}", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=CHECKOUT, timeout=HANGS_S,
    )  # fmt: skip
    return int(done.stdout.split()[-1]) / 1024, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("piece", [b" ", EVENT], ids=["spaces", "events"])
@pytest.mark.parametrize(
    "command", [["show"], ["export", "--for", "tensorboard", "--out", "out"]], ids=lambda words: words[0]
)
def test_a_small_gzip_that_unpacks_without_end_is_stopped(command, piece, tmp_path):
    path = bomb(tmp_path / "rank0.trace.json.gz", piece, 400)
    assert path.stat().st_size < 2_500_000
    code = "from lightning_forge_profiling.cli.main import main; assert main(sys.argv[1:]) == 2"
    memory_mb, err = run_limited(code, *(tmp_path / "out" if word == "out" else word for word in command), path)
    (line,) = [line for line in err.splitlines() if line.startswith("forge-profiling: ")]  # and progress
    assert str(path) in line
    assert "implausible for a trace of its size" in line or "no event ends within 64 MB" in line
    assert memory_mb < 450


def test_the_limit_is_a_hundredfold_and_never_below_what_is_always_allowed(tmp_path):
    path = bomb(tmp_path / "trace.json.gz", EVENT, 3)
    assert sum(map(len, unpacked(path, []))) > 3 << 20
    with pytest.raises(TraceError, match="unpacks to more than 2 MB"):
        list(unpacked(path, [], always_allowed=2 << 20))
    noise = os.urandom(1 << 16)
    (tmp_path / "noise.gz").write_bytes(gzip.compress(noise))
    assert b"".join(unpacked(tmp_path / "noise.gz", [], always_allowed=0)) == noise


def large_trace(path, megabytes):
    """A real trace again and again, each time later and with other ids."""
    trace = json.loads(gzip.decompress((TRACES / "launch_bound" / "rank0.trace.json.gz").read_bytes()))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    period = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events) + 1
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        copy = 0
        while file.tell() < megabytes << 20:
            for event in events:
                args = event.get("args", {})
                ids = {key: args[key] + copy * 10**6 for key in ("correlation", "External id") if key in args}
                again = {**event, "ts": round(event["ts"] + copy * period, 3), "args": {**args, **ids}}
                file.write(("" if copy == 0 and event is events[0] else ",\n") + json.dumps(again))
            copy += 1
        file.write("]}")
    return path


@pytest.mark.slow
def test_reading_holds_little_beyond_the_columns(tmp_path):
    path = large_trace(tmp_path / "trace.json", 60)
    read = "from lightning_forge_profiling.kineto.reader import read_trace; from pathlib import Path"
    idle_mb, _ = run_limited(f"{read}; list(map(Path, sys.argv))", path)
    memory_mb, err = run_limited(f"{read}; read_trace(Path(sys.argv[1]))", path)
    assert err == ""
    assert memory_mb - idle_mb < 60


@pytest.mark.slow
def test_eight_ranks_are_read_in_processes_of_their_own_within_limits(tmp_path):
    path = large_trace(tmp_path / "rank0.trace.json", 12)
    for rank in range(1, 8):
        (tmp_path / f"rank{rank}.trace.json").hardlink_to(path)
    code = (
        "from lightning_forge_profiling.pipeline import analyze; from pathlib import Path; import resource;"
        "assert len(analyze(Path(sys.argv[1])).analysis.ranks) == 8;"
        "child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024; assert 20 < child < 150, child"
    )
    memory_mb, err = run_limited(code, tmp_path)
    assert err == ""
    assert memory_mb < 80

import gzip
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.copies import write_plugin_copy

CASES = ("input_bound", "launch_bound", "ddp_comm_bound", "elementwise")  # the last with our callbacks' marks
TRACES = sorted(path for case in CASES for path in Path(__file__).parent.glob(f"data/traces/{case}/*.gz"))
RENAMED = {"cuda_runtime": "Runtime", "cuda_driver": "Runtime", "user_annotation": "cpu_op"}
PACKED = gzip.compress(b'{"traceEvents": []}', mtime=0)  # the same bytes in every process


def load(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def copied_text(trace):
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "trace.json"), Path(folder, "rank0.pt.trace.json.gz")
        source.write_bytes(trace if isinstance(trace, bytes) else json.dumps(trace).encode())
        write_plugin_copy(source, target)
        return gzip.decompress(target.read_bytes())


def copied(trace):
    return json.loads(copied_text(trace))


def test_there_are_traces_to_test_with():
    assert {path.parent.name for path in TRACES} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("source", TRACES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_real_traces_change_in_the_stated_events_and_nowhere_else(source, tmp_path):
    trace = load(source)
    before = Counter(event.get("cat") for event in trace["traceEvents"])
    assert {*RENAMED, "gpu_user_annotation", "fwdbwd", "ac2g", "kernel", "cpu_op"} <= set(before)

    write_plugin_copy(source, tmp_path / "rank0.pt.trace.json.gz")

    copy = load(tmp_path / "rank0.pt.trace.json.gz")
    expected = [
        {**event, "cat": RENAMED[event["cat"]]} if event.get("cat") in RENAMED else event
        for event in trace["traceEvents"]
        if event.get("cat") != "gpu_user_annotation"
    ]
    for event in expected:
        if event.get("name") == "forge.data":
            event["name"] = "enumerate(DataLoader)#forge.data.__next__"
    assert copy["traceEvents"] == expected
    assert len(expected) == len(trace["traceEvents"]) - before["gpu_user_annotation"]
    assert list(copy) == list(trace)
    assert {**copy, "traceEvents": None} == {**trace, "traceEvents": None}


def test_the_source_is_only_read(tmp_path):
    source = tmp_path / "rank0.trace.json.gz"
    source.write_bytes(TRACES[0].read_bytes())
    source.chmod(0o400)

    write_plugin_copy(source, tmp_path / "rank0.pt.trace.json.gz")

    assert source.read_bytes() == TRACES[0].read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.trace.json.gz", "rank0.pt.trace.json.gz"}


@pytest.mark.slow
def test_plain_and_gzipped_compact_and_pretty_sources_give_the_same_copy(tmp_path):
    trace = load(TRACES[0])
    (tmp_path / "pretty.json").write_text(json.dumps(trace, indent=4))
    (tmp_path / "compact.json").write_text(json.dumps(trace, separators=(",", ":")))
    (tmp_path / "named.json").write_bytes(gzip.compress(json.dumps(trace).encode()))  # the name does not decide
    (tmp_path / "named.gz").write_text(json.dumps(trace, indent=1))

    copies = []
    for source in sorted(tmp_path.iterdir()):
        write_plugin_copy(source, tmp_path / "copy.pt.trace.json.gz")
        copies.append(load(tmp_path / "copy.pt.trace.json.gz"))

    assert len(copies) == 4
    assert all(copy == copied(trace) for copy in copies)


def test_key_order_escapes_and_layout_of_the_json_do_not_matter():
    text = b"""
    {"after": 1, "traceEvents" : [
      { "name" : "cudaLaunchKernel", "args": {"cat": "user_annotation", "a": [1, {"b": "},{"}]}, "cat" :"cuda_runtime"},
      {"c\\u0061t":"cuda\\u005fdriver","ph":"X"},{"cat": "gpu_user_annotation"},
      {"ph": "M", "name": "cuda_runtime"}, {"cat": null, "name": null}, {}
    ] , "z": [{"cat": "cuda_runtime"}], "\\u00e4": "\\u00e4"}"""

    assert copied(text) == {
        "after": 1,
        "traceEvents": [
            {"name": "cudaLaunchKernel", "args": {"cat": "user_annotation", "a": [1, {"b": "},{"}]}, "cat": "Runtime"},
            {"cat": "Runtime", "ph": "X"},
            {"ph": "M", "name": "cuda_runtime"},
            {"cat": None, "name": None},
            {},
        ],
        "z": [{"cat": "cuda_runtime"}],
        "ä": "ä",
    }


def test_numbers_and_strings_keep_their_spelling():
    kept = rb'"ts": 4350319260851.6150, "id": 123456789012345678901234567890, "dur": 1e2, "name": "\u00e9\/"'
    unchanged, changed = rb'{%b, "cat": "kernel"}' % kept, rb'{%b, "cat": "cuda_runtime"}' % kept

    copy = copied_text(rb'{"baseTime": 1.50e3, "traceEvents": [%b, %b]}' % (unchanged, changed))

    assert unchanged in copy
    assert rb'"baseTime":1.50e3' in copy
    for value in (rb"4350319260851.6150", rb"123456789012345678901234567890", rb"1e2", rb'"\u00e9\/"'):
        assert copy.count(value) == 2


def test_the_fetch_our_callbacks_mark_gets_a_name_the_plugin_counts_as_data_loading():
    fetch = {"ph": "X", "cat": "user_annotation", "name": "forge.data", "ts": 1.0, "dur": 2.0}
    on_gpu = {**fetch, "cat": "gpu_user_annotation"}
    other = {**fetch, "name": "forge.data.of.mine"}
    operator = {**fetch, "cat": "cpu_op"}

    assert copied({"traceEvents": [fetch, on_gpu, other, operator]})["traceEvents"] == [
        {**fetch, "cat": "cpu_op", "name": "enumerate(DataLoader)#forge.data.__next__"},
        {**other, "cat": "cpu_op"},
        operator,
    ]


def test_a_trace_of_dropped_events_alone_has_none():
    assert copied({"traceEvents": [{"ph": "X", "cat": "gpu_user_annotation"}], "a": 1}) == {"traceEvents": [], "a": 1}


KERNEL = b'{"ph": "X", "cat": "kernel", "name": "%b", "args": {"memory bandwidth (GB/s)": %b}}'
READ = {"ph": "X", "cat": "kernel", "name": "k", "args": {"memory bandwidth (GB/s)": 1.5}}
UNKNOWN = {**READ, "args": {"memory bandwidth (GB/s)": ""}}


@pytest.mark.parametrize("number", [b"inf", b"-inf", b"nan", b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_has_not_become_empty_so_that_every_reader_reads_the_copy(number):
    text = b'{"bandwidth": %b, "traceEvents": [%b, %b], "z": %b}' % (
        number, KERNEL % (b"k", number), KERNEL % (b"k", b"1.5"), number,
    )  # fmt: skip
    assert copied(text) == {"bandwidth": "", "traceEvents": [UNKNOWN, READ], "z": ""}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b'{"traceEvents": [%b, {"cat', "in the middle of an event", id="cut in an event"),
        pytest.param(b'{"traceEvents": [%b,', "before its list of events does", id="cut between events"),
        pytest.param(gzip.compress(b'{"traceEvents": [%b,' % (KERNEL % (b"k", b"1.5"))), "before its list", id="gzip"),
        pytest.param(b'{"traceEvents": [1, %b, null]}', "", id="values that are no events"),
        pytest.param(b"[%b]", "", id="a list alone"),
        pytest.param(b'{"traceEvents": [%b], "a\xff": 1}', "", id="no UTF-8 behind the events"),
    ],
)
def test_what_show_reads_of_a_damaged_trace_is_copied(content, problem, tmp_path):
    source, target = tmp_path / "rank0.trace.json", tmp_path / "rank0.pt.trace.json.gz"
    source.write_bytes(content.replace(b"%b", KERNEL % (b"k", b"1.5")))
    problems = write_plugin_copy(source, target)
    assert load(target)["traceEvents"] == [READ]
    assert [problem in text for text in problems] == [True] * bool(problem)


def test_names_that_no_json_may_have_are_copied_as_show_reads_them():
    text = b'{"traceEvents": [%b, %b]}' % (KERNEL % (b"a\\path\t", b"1.5"), KERNEL % (b"\xff", b"1.5"))
    assert [event["name"] for event in copied(text)["traceEvents"]] == ["a/path ", "?"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param(b"", "the file is empty", id="nothing"),
        pytest.param(b"no json", "not a trace", id="text"),
        pytest.param(b'{"traceEvents": [{"cat": "kernel"', "no complete event", id="cut"),
        pytest.param(b'{"traceEvents": []} {}', "no complete event", id="no event"),
        pytest.param(b"[]", "no complete event", id="an empty list"),
        pytest.param(b'{"schemaVersion": 1}', "no traceEvents", id="no events"),
        pytest.param(b'{"traceEvents": {}}', "no traceEvents", id="events in an object"),
        pytest.param(b'{"traceEvents": [1]}', "no complete event", id="an event that is a number"),
        pytest.param(
            b'{"traceEvents": [{"ph": "X"}]}', "none of its events has a kind", id="events without a category"
        ),
        pytest.param(b'{"traceEvents": [{"cat": "a"}, {cat: "b"}]}', "damaged at byte", id="damaged"),
        pytest.param(PACKED[:-9], "no complete event", id="cut gzip"),
        pytest.param(PACKED + b"junk", "damaged gzip data", id="gzip and more"),
        pytest.param(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 30, "damaged gzip", id="gzip of no block"),
    ],
)
def test_what_is_not_a_trace_is_refused_and_leaves_nothing(content, complaint, tmp_path):
    source, target = tmp_path / "rank0.trace.json.gz", tmp_path / "rank0.pt.trace.json.gz"
    source.write_bytes(content)

    with pytest.raises(TraceError) as caught:
        write_plugin_copy(source, target)

    assert isinstance(caught.value, ValueError)
    assert complaint in str(caught.value)
    assert str(source) in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_a_failed_copy_leaves_an_earlier_one_in_place(tmp_path):
    target = tmp_path / "rank0.pt.trace.json.gz"
    write_plugin_copy(TRACES[0], target)
    first = target.read_bytes()
    (tmp_path / "broken.json").write_bytes(b'{"traceEvents": [{"ph": "X", "cat": "kernel"}, {cat: 1}]}')

    with pytest.raises(TraceError):
        write_plugin_copy(tmp_path / "broken.json", target)

    assert target.read_bytes() == first
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.pt.trace.json.gz", "broken.json"}


def test_a_missing_source_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_plugin_copy(tmp_path / "none.json", tmp_path / "copy.json.gz")
    assert not list(tmp_path.iterdir())


def test_the_module_loads_neither_torch_nor_lightning_nor_numpy():
    code = (
        "import sys, lightning_forge_profiling.kineto.copies\n"
        "print(sorted({'torch', 'lightning', 'pytorch_lightning', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert answer.stdout.strip() == "[]"

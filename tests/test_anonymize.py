"""What is made to be shared tells neither who recorded a trace nor where, and else the same as the trace."""

import getpass
import gzip
import json
import os
import re
import socket

import pytest
from msgspec.structs import replace

from lightning_forge_profiling import ForgeProfilerCallback, region
from lightning_forge_profiling.kineto.copies import identities_in, redaction
from lightning_forge_profiling.pipeline import analyze
from tests.models import Classifier, loader
from tests.test_cli import CHECKOUT, INPUT_BOUND, TRACES, fails, forge, without_progress

SYNC_STACK = TRACES / "sync_stack" / "rank0.trace.json.gz"
USER, HOST, PID, THREAD = "adalovelace", "gpu-node-17", 543_210, 543_987
UUID, BUS, SERIAL, ADDRESS = "GPU-0f3a4d5e-1111-2222-3333-444455556666", "0000:3b:00.0", "1564720004321", "10.20.30.41"
HOME = f"/home/{USER}/secret-project"
SECRETS = (USER, HOST, str(PID), str(THREAD), UUID[4:], BUS, SERIAL, ADDRESS)
SECRETS += ("secret-project", "/home", "hunter2", "Lovelace")
OF_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}


def telling_event(event, ids):
    """An event with what programs have been seen to write into one."""
    category, name, args = event.get("cat"), event.get("name", ""), event.setdefault("args", {})
    for key in ("pid", "tid"):
        event[key] = ids.get(event.get(key), event.get(key)) if category not in OF_GPU else event[key]
    if name.endswith("sort_index"):
        args["sort_index"] = ids.get(args["sort_index"], args["sort_index"])
    elif name == "process_name":
        args["name"] = f"{HOME}/venv/bin/python {HOME}/train.py --token=hunter2"
    elif name == "process_labels" and event["pid"] == PID:
        args["labels"] = f"{USER}@{HOST}"
    elif name == "thread_name" and event["pid"] == PID:
        args["name"] = f"thread {event['tid']} ({USER}-loader)"
    elif category == "python_function" and name.startswith("torch/"):
        event["name"] = f"{HOME}/venv/lib/python3.12/site-packages/{name}"
    elif category == "python_function" and not name.startswith(("lightning", "<")):
        event["name"] = f"{HOME}/src/{name}"
    elif category == "kernel":
        args |= {"kernel_file": f"/scratch/torchinductor_{USER}/ab/k.py", "node": HOST, "environ": {"A": "hunter2"}}
        event["name"] = name.replace("(", f"(lambda at {HOME}/a b/ops.cu:12:3, ", 1)
    elif category == "cpu_op":
        event["hostname"] = HOST
        args |= {"Concrete Inputs": [f"{HOME}/weights.pt", [HOST]], "pid": PID}
    return event


def telling_trace(folder):
    """A trace that names user, host, paths, processes and devices wherever such names have been seen."""
    trace = json.loads(gzip.decompress(SYNC_STACK.read_bytes()))
    events = trace["traceEvents"]
    main, autograd = sorted({event["tid"] for event in events if event.get("cat") == "cpu_op"})
    [pid] = {event["pid"] for event in events if event.get("cat") == "cpu_op"}
    assert pid == main
    trace["traceEvents"] = [telling_event(event, {main: PID, autograd: THREAD}) for event in events]
    trace |= {
        "traceName": f"{HOME}/lightning_logs/.rank0.raw.json",
        "hostname": f"{HOST}.cluster.example",
        "username": "Lovelace",
        "cmdline": ["python", f"{HOME}/train.py", "--token=hunter2"],
        "environment": {"USER": USER, "TOKEN": "hunter2"},
        "metadata": json.dumps({"pid": PID, "host": HOST}),
        "record_shapes": {"host": HOST},
        "nvidia-smi": f"{UUID} {BUS} {SERIAL}",
    }
    trace["distributedInfo"] |= {"hostname": HOST, "address": ADDRESS, "pg_config": [{"pg_desc": f"{HOST}:{ADDRESS}"}]}
    for device in trace["deviceProperties"]:
        device |= {"uuid": UUID, "pciBusId": BUS, "serial": SERIAL}
    forward = next(event for event in events if event.get("name") == "forge.forward")
    for name in (
        f"load {HOME}/shard 7.bin",
        f"on {HOST} ({ADDRESS})",
        f"by Lovelace, {USER}@example.com",
        f"{UUID} {BUS}",
    ):
        trace["traceEvents"].append({**forward, "name": f"forge.{name}"})
    folder = folder / "home" / USER / "runs"
    folder.mkdir(parents=True)
    path = folder / f"{HOST}_{PID}.1790857026000.pt.trace.json"
    path.write_text(json.dumps(trace))
    return path


def tells_nothing(text, *more):
    """None of what is secret is in a text."""
    assert [secret for secret in (*SECRETS, *more) if secret.lower() in text.lower()] == []
    return True


def figures(path):
    """What an analysis finds but for names of files and the numbers of threads."""
    analysis = analyze(path).analysis
    ranks = tuple(replace(rank, file="", idle_parts=unnumbered(rank.idle_parts)) for rank in analysis.ranks)
    return replace(analysis, source="", ranks=ranks)


def unnumbered(parts):
    return tuple(replace(part, thread="") for part in parts)


def test_a_copy_of_a_telling_trace_tells_nothing_and_keeps_what_the_analysis_needs(tmp_path):
    trace = telling_trace(tmp_path)
    done = forge("export", trace, "--for", "sharing", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert without_progress(done.stderr) == ""
    [copy] = (tmp_path / "out").iterdir()
    assert copy.name == "trace1.trace.json.gz"
    packed = copy.read_bytes()
    assert packed[3:8] == bytes(5), "neither the file's name nor its time"
    text = gzip.decompress(packed).decode()
    assert tells_nothing(text)
    content = json.loads(text)
    assert "torch/nn/modules/module.py(" in text
    assert "train.py(" in text or "sync" in text
    assert content["distributedInfo"]["rank"] == 0
    assert content.keys() < {*json.loads(trace.read_text()), "traceEvents"}
    before, after = figures(trace), figures(copy)
    assert after.verdict == before.verdict
    assert [rank.per_step for rank in after.ranks] == [rank.per_step for rank in before.ranks]
    assert [rank.kinds for rank in after.ranks] == [rank.kinds for rank in before.ranks]
    assert after.ranks[0].operators == before.ranks[0].operators
    names = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert {name for name in names if name.startswith("thread ")} <= {"thread 1001", "thread 1002"}


@pytest.mark.slow
def test_reports_for_others_tell_nothing(tmp_path):
    trace = telling_trace(tmp_path)
    assert forge("export", trace, "--for", "sharing", "--out", tmp_path / "out").returncode == 0
    (page,) = outcomes = [forge("view", "out", "--save", "page.html", cwd=tmp_path)]
    outcomes += [forge("show", "out", *options, "--top", 1000, cwd=tmp_path) for options in ([], ["--json"])]
    outcomes.append(forge("show", "out", "--markdown", cwd=tmp_path))
    assert [done.returncode for done in outcomes] == [0] * 4
    assert page.stdout == "page.html: out\n"
    for text in ((tmp_path / "page.html").read_text(encoding="utf-8"), *(done.stdout for done in outcomes[1:])):
        assert tells_nothing(text, str(tmp_path), "forge-profiling-")
    assert json.loads(outcomes[2].stdout)["source"] == "out"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["input_bound", "sync_stack", "ddp", "cuda_graph", "compiled", "validation_inside"])
def test_the_analysis_of_copies_is_that_of_the_traces(case, tmp_path):
    assert forge("export", TRACES / case, "--for", "sharing", "--out", tmp_path).returncode == 0
    assert figures(tmp_path) == figures(TRACES / case)


@pytest.mark.slow
def test_a_real_run_s_copy_names_neither_the_machine_nor_its_folders(make_trainer, tmp_path):
    window = ForgeProfilerCallback(start_step=2, end_step=4, trace_dir=tmp_path / "traces", with_stack=True)

    class Model(Classifier):
        def training_step(self, batch):
            with region("mine"):
                return super().training_step(batch)

    make_trainer(window).fit(Model(), loader(32))
    [trace] = (tmp_path / "traces").rglob("rank0.trace.json.gz")
    assert str(tmp_path) in gzip.decompress(trace.read_bytes()).decode(), "otherwise there is nothing to show"

    assert forge("export", tmp_path / "traces", "--for", "sharing", "--out", tmp_path / "out").returncode == 0
    [copy] = (tmp_path / "out").iterdir()
    content = json.loads(gzip.decompress(copy.read_bytes()))
    text = json.dumps(content)
    assert str(tmp_path) not in text
    assert not re.search(rf"(?<![^\W_]){re.escape(socket.gethostname())}(?![^\W_])", text), "as a word of its own"
    assert os.getpid() not in {event.get(key) for event in content["traceEvents"] for key in ("pid", "tid")}
    assert not re.search(r'"/|"[A-Z]:', text), "no text begins with a path"
    assert '"name": "mine"' in text
    assert "lightning/pytorch/trainer/trainer.py(" in text
    if (user := getpass.getuser()) != "root":
        assert not re.search(rf"\b{re.escape(user)}\b", text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/home/ada/gpt/train.py(88): step", "train.py(88): step"),
        ("/home/ada b/c d/train.py(88): <lambda>", "train.py(88): <lambda>"),
        ("C:\\Users\\ada\\train.py(88): step", "train.py(88): step"),
        ("home/ada/train.py(8): step", "train.py(8): step"),
        ("~/gpt/train.py(8): step", "train.py(8): step"),
        ("gpt/train.py(8): step", "gpt/train.py(8): step"),
        ("/v/lib/python3.12/site-packages/torch/nn/x.py(1): f", "torch/nn/x.py(1): f"),
        ("/usr/lib/python3.12/threading.py(1): f", "threading.py(1): f"),
        ("/usr/lib/python3/dist-packages/a/b.py(1): f", "a/b.py(1): f"),
        ("k<lambda at /home/ada/my ops/x.cu:12:3>(int*)", "k<lambda at x.cu:12:3>(int*)"),
        ("load '/data/ada/set a' now", "load '…' now"),
        ("read /scratch/ada", "read …"),
        ("read \\\\server\\ada\\x.bin", "read x.bin"),
        ("get https://ada:pw@host/x and s3://bucket/ada", "get … and …"),
        ("ada@node17:/data/x.bin", "…:x.bin"),
        ("peer 10.0.0.7, fe:ed:00:00:00:01", "peer …, …"),
        ("GPU-0f3a4d5e-1111-2222-3333-444455556666 at 00000000:3B:00.0", "… at …"),
        ("Ada's step, ada_step", "…'s step, …_step"),
        ("adapter", "adapter"),
        ("train/loss at 3 GB/s, 1 / 2", "train/loss at 3 GB/s, 1 / 2"),
        ("aten::_foreach_addcmul_", "aten::_foreach_addcmul_"),
        ("void at::native::k<4, at::F<float>, std::array<char*, 2ul> >(int)",) * 2,
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",) * 2,
        ("<frozen runpy>(198): _run_module_as_main",) * 2,
        ("Memcpy HtoD (Pageable -> Device)",) * 2,
    ],
)
def test_what_is_taken_out_of_a_name(name, expected):
    assert redaction({"ada", "root", "data", "17"})(name) == expected


def test_a_long_name_takes_no_long_time():
    for text in ("a", "/", "/a b", "a.", "~/ /", "0:", "'/", "a-", "f.py(", "0.", " "):
        name = text * (100_000 // len(text))
        redaction({"ada"})(name)
        assert identities_in(name) == set()


@pytest.mark.slow
def test_windows_and_ranks_are_told_apart_as_before(tmp_path):
    for name in ("host_1.1700000000000.pt.trace.json.gz", "host_1.1700000009000.pt.trace.json.gz"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(INPUT_BOUND.read_bytes())
    for name in ("run_rank1_a.json.gz", "run_rank1_b.json.gz", "run_rank0.json.gz"):
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / name).write_bytes(INPUT_BOUND.read_bytes())
    for folder in ("a", "b"):
        assert (
            forge("export", tmp_path / folder, "--for", "sharing", "--out", tmp_path / f"{folder}-out").returncode == 0
        )
        assert figures(tmp_path / f"{folder}-out") == figures(tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "b-out").iterdir())
    assert names == ["rank0.trace.json.gz", "rank1.trace.json.gz", "rank1_2.trace.json.gz"]


def test_what_is_sound_of_a_damaged_trace_is_copied_and_the_rest_said(tmp_path):
    source = tmp_path / "traces"
    source.mkdir()
    text = gzip.decompress(INPUT_BOUND.read_bytes())
    (source / "rank0.trace.json").write_bytes(text[: len(text) // 2])
    (source / "rank1.trace.json").write_text("nothing")
    done = forge("export", source, "--for", "sharing", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "rank0.trace.json.gz: the file ends in the middle of an event" in done.stderr
    assert re.search(r"left out: .*rank1\.trace\.json: not a trace", done.stderr)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank0.trace.json.gz"]
    report = json.loads(forge("show", "out", "--json", cwd=tmp_path).stdout)
    assert str(tmp_path) not in json.dumps(report)


def test_it_replaces_no_trace_and_leaves_nothing_where_there_is_none(tmp_path):
    trace = tmp_path / "rank0.trace.json.gz"
    trace.write_bytes(INPUT_BOUND.read_bytes())
    assert fails(forge("export", trace, "--for", "sharing", "--out", tmp_path), "would replace the trace")
    assert trace.read_bytes() == INPUT_BOUND.read_bytes()
    (tmp_path / "bad.json").write_text("{}")
    assert fails(forge("export", tmp_path / "bad.json", "--for", "sharing", "--out", tmp_path / "out"), "not a trace")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_the_commands_in_the_documentation_do_what_it_says(tmp_path):
    telling_trace(tmp_path / "lightning_logs" / "version_0")
    page = (CHECKOUT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("### Share a trace")[2].partition("\n## ")[0]
    commands = re.findall(r"^forge-profiling (.+)$", section, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words, _, file = command.partition(" > ")
        done = forge(*words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if file:
            (tmp_path / file).write_text(done.stdout)
    shared = {path.name: path.read_bytes() for path in (tmp_path / "share").iterdir()}
    assert sorted(shared) == ["report.html", "summary.md", "trace1.trace.json.gz"]
    shared["trace1.trace.json.gz"] = gzip.decompress(shared["trace1.trace.json.gz"])
    for content in shared.values():
        assert tells_nothing(content.decode(), str(tmp_path), "version_0")

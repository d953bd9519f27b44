"""The command line as users have it: processes, exit codes, and what goes to which stream."""

import gzip
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jsonschema
import pytest

from lightning_forge_profiling.analysis import operators
from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.cli import commands, main
from lightning_forge_profiling.cli.shared import Progress
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.json_layout import summary_json
from lightning_forge_profiling.pipeline import analyze as analyze_in_python
from lightning_forge_profiling.report.page import block_of, record_of, report_page, write_reports
from tests.outcomes import HANGS_S
from tests.record_builder import MadeRun
from tests.samples import sample_analysis
from tests.test_combine import evidence as run_evidence

CHECKOUT = Path(__file__).parents[1]
TRACES = CHECKOUT / "tests" / "data" / "traces"
LONG_AGO = 1_700_000_000.0
INPUT_BOUND = TRACES / "input_bound" / "rank0.trace.json.gz"
COMMAND = [sys.executable, "-m", "lightning_forge_profiling"]
PATHS = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "COLUMNS": "80"}


def forge(*arguments, environment=(), **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        **{
            "capture_output": True,
            "text": True,
            "env": {**ENVIRONMENT, **dict(environment)},
            "timeout": HANGS_S,
            **options,
        },
        check=False,
    )


def without_progress(text):
    """What a command wrote on stderr, but for how far it is, which it says where it takes more than a second."""
    return re.sub(r"(?m)^(?:(?:reading|copying) .*|\w+ \d+ \(\d+ of \d+\))\n", "", text)


def fails(done, complaint):
    """Bad input: exit code 2, one clear line on stderr, nothing else."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = without_progress(done.stderr).splitlines()
    assert line.startswith("forge-profiling: ")
    assert complaint in line
    return True


# --- show ------------------------------------------------------------------------------------------------------------


def test_show_prints_the_verdict_and_nothing_on_stderr_but_progress():
    done = forge("show", INPUT_BOUND)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verdict     input-bound: ")
    assert "NVIDIA H200" in done.stdout
    assert "in the data loader" in done.stdout
    assert "\x1b" not in done.stdout
    assert "forge-profiling:" not in done.stderr


def test_each_file_that_cannot_be_read_is_on_a_line_of_its_own(tmp_path):
    for rank, content in enumerate(('{"a', "xx", "")):
        (tmp_path / f"rank{rank}.trace.json").write_text(content)
    done = forge("show", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    lines = without_progress(done.stderr).splitlines()
    assert [line.startswith(f"forge-profiling: {tmp_path}/rank{rank}.") for rank, line in enumerate(lines)] == [
        True
    ] * 3


def test_show_reports_all_ranks_of_a_folder():
    done = forge("show", TRACES / "ddp")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert "waits for others" in done.stdout


@pytest.mark.slow
def test_show_says_first_which_window_of_a_folder_it_is_about(tmp_path):
    for age, case in enumerate(("sync_item", "input_bound")):
        window = tmp_path / "logs" / case
        shutil.copytree(TRACES / case, window)
        for file in window.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    done = forge("show", tmp_path / "logs")
    assert done.stdout.startswith(f"window      {tmp_path / 'logs' / 'sync_item'}\nverdict     sync-bound: ")
    assert forge("show", tmp_path / "logs" / "input_bound").stdout.startswith("verdict     input-bound: ")


def test_json_is_alone_on_stdout_and_follows_the_schema():
    done = forge("show", INPUT_BOUND, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    jsonschema.validate(summary, json.loads(forge("show", "--schema").stdout))
    assert summary["verdict"] == "input-bound"
    assert summary["ranks"][0]["steps"] == 2


@pytest.mark.slow
def test_python_and_the_command_count_the_whole_run_alike(tmp_path):
    """What the callbacks measured lies beside the traces, and the step of a finding is the live one in both."""
    shutil.copy(INPUT_BOUND, tmp_path)
    of_trace = analyze_in_python(tmp_path).analysis
    evidence = run_evidence(2 * of_trace.ranks[0].step_ms.mean, data=0.1 * of_trace.ranks[0].step_ms.mean)
    write_reports(combine(of_trace, evidence), (), tmp_path)
    both = analyze_in_python(tmp_path).analysis
    assert both.run == evidence
    assert both.findings != of_trace.findings
    assert forge("show", tmp_path, "--json").stdout.encode() == summary_json(both)
    forge("view", tmp_path, "--save", tmp_path / "report.html")
    assert json.loads(block_of((tmp_path / "report.html").read_text(), "summary"))["analysis"] == json.loads(
        summary_json(both)
    )
    for options in ({"rank": 0}, {"steps": (0, 100)}, {"with_run": False}):
        assert analyze_in_python(tmp_path, **options).analysis.run is None


def test_the_page_is_written_and_named(tmp_path):
    done = forge("view", INPUT_BOUND, "--save", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert str(tmp_path / "r.html") in done.stdout


@pytest.mark.slow
def test_markdown_is_printed_of_a_trace_and_of_a_run(tmp_path):
    assert forge("show", INPUT_BOUND, "--markdown").stdout.split("\n\n")[1].startswith("**Verdict:** input-bound")
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path)
    assert forge("show", record, "--markdown").stdout.split("\n\n")[1].startswith("**Verdict:** input-bound")
    begun = MadeRun(began=LONG_AGO, rows=0).write(tmp_path / "begun")
    assert fails(forge("show", begun, "--markdown"), "has no totals yet")


@pytest.mark.slow
def test_a_folder_with_a_record_is_shown_as_a_run_and_its_window_by_options_of_traces(tmp_path):
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path)
    shutil.copytree(TRACES / "ddp", tmp_path / "profiler_traces")
    assert forge("show", tmp_path).stdout.startswith(f"{record}\n")
    assert forge("show", tmp_path, "--rank", 1).stdout.startswith(f"window      {tmp_path / 'profiler_traces'}\n")


@pytest.mark.slow
def test_rank_and_steps_choose_what_is_analysed():
    everything = json.loads(forge("show", TRACES / "ddp", "--json").stdout)
    assert [rank["rank"] for rank in everything["ranks"]] == [0, 1]
    first, *_, last = (step["number"] for step in everything["ranks"][1]["per_step"])
    part = json.loads(forge("show", TRACES / "ddp", "--json", "--rank", 1, "--steps", f"{first}:{last}").stdout)
    assert [rank["rank"] for rank in part["ranks"]] == [1]
    assert [step["number"] for step in part["ranks"][0]["per_step"]] == list(range(first, last))


@pytest.mark.slow
def test_sort_and_top_order_and_cut_the_operators():
    done = forge("show", INPUT_BOUND, "--json", "--sort", "calls", "--top", 5)
    calls = [operator["calls_per_step"] for operator in json.loads(done.stdout)["ranks"][0]["operators"]]
    assert calls == sorted(calls, reverse=True)
    assert len(calls) == 5
    assert len(json.loads(done.stdout)["ranks"][0]["top_kernels"]) <= 5
    assert "Operators" in forge("show", INPUT_BOUND, "--sort", "calls").stdout


def test_names_of_choices_are_those_of_the_analysis():
    assert set(commands.SORTS) == set(operators.SORTS)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.json").touch()
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8b\x08\x00junk")
    for name in ("none.json", "folder", "empty.json", "text.json", "other.json", "bad.json.gz"):
        path = tmp_path / name
        assert fails(forge("show", path), str(path))
        assert fails(forge("compare", INPUT_BOUND, path), str(path))
        assert fails(forge("export", path, "--for", "tensorboard", "--out", tmp_path / "out"), str(path))
    assert fails(forge("view", tmp_path / "none.html"), str(tmp_path / "none.html"))


def test_an_output_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "file").touch()
    assert fails(forge("view", INPUT_BOUND, "--save", tmp_path / "none" / "r"), str(tmp_path / "none" / "r"))
    assert fails(
        forge("export", INPUT_BOUND, "--for", "tensorboard", "--out", tmp_path / "file"), str(tmp_path / "file")
    )


def test_a_name_in_an_error_cannot_steer_the_terminal(tmp_path):
    assert fails(forge("show", tmp_path / "a\x1b[2Jb"), "/ab: no such file")


HARM = "x\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ry"


def harmless(done):
    """What a command wrote, in which nothing is for a terminal to obey."""
    for text in (done.stdout, done.stderr):
        assert all(line.isprintable() for line in text.split("\n")), text
    return done


@pytest.mark.slow
def test_no_name_of_a_file_steers_the_terminal(tmp_path):
    folder = tmp_path / HARM
    folder.mkdir()
    trace = folder / f"rank0{HARM}.trace.json.gz"
    trace.write_bytes(INPUT_BOUND.read_bytes())
    (folder / f"{HARM}.trace.json").write_text("nothing")
    for arguments in (
        ["view", trace, "--save", folder / f"{HARM}.html"],
        ["show", trace, "--markdown"],
        ["show", folder, "--json"],
        ["compare", trace, folder],
        ["compare", trace, folder, "--format", "json"],
        ["export", folder, "--for", "tensorboard", "--out", folder / f"out{HARM}"],
        ["view", folder / f"{HARM}.html", "--no-browser"],
    ):
        done = harmless(forge(*arguments, encoding="utf-8"))
        assert done.returncode == 0, done.stderr
    for arguments in (
        ["show", folder / f"none{HARM}"],
        ["view", trace, "--save", folder / HARM / "none"],
        ["export", trace, "--for", "tensorboard", "--out", trace],
        ["view", "--perfetto", folder],
        ["show", trace, HARM],
        ["show", trace, f"--{HARM}"],
        ["show", trace, "--sort", HARM],
        ["crossover", "--ops", HARM],
        ["crossover", "--from", trace],
        [HARM],
    ):
        assert harmless(forge(*arguments, encoding="utf-8")).returncode == 2


@pytest.mark.slow
def test_json_on_a_terminal_cannot_steer_it_and_says_the_same(tmp_path):
    trace = json.loads(gzip.decompress(INPUT_BOUND.read_bytes()))
    name = "NVIDIA \u009b31m\u202e\x7f\U000e0041 Köln"
    for device in trace["deviceProperties"]:
        device["name"] = name
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    done = harmless(forge("show", path, "--json", encoding="utf-8"))
    assert json.loads(done.stdout)["ranks"][0]["device"] == name
    assert "Köln" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["show", "x", "--stepz"],
        ["show"],
        ["show", "x", "--steps", "8:5"],
        ["show", "x", "--steps", "5"],
        ["show", "x", "--rank", "-1"],
        ["show", "x", "--top", "0"],
        ["show", "x", "--sort", "colour"],
        ["compare", "x"],
        ["compare", "x", "y", "--fail-over", "-3"],
        ["compare", "x", "y", "--fail-over", "nan"],
        ["compare", "x", "y", "--metric", "speed"],
        ["export", "x", "--for", "tensorboard"],
        ["export", "x", "--for", "nobody", "--out", "y"],
    ],
)
def test_wrong_arguments_are_exit_code_2_with_usage(arguments):
    done = forge(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: forge-profiling")


def test_the_bare_command_prints_its_help():
    done = forge()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == forge("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (
            ["train.py", "--lr", "1"],
            "[--version]",
            "error: unknown command 'train.py': did you mean forge-profiling run train.py?",
        ),
        ([str(INPUT_BOUND)], "[--version]", f"did you mean forge-profiling show {INPUT_BOUND}?"),
        (["shwo", "x"], "[--version]", "error: unknown command 'shwo': did you mean show?"),
        (["xyz"], "[--version]", "error: unknown command 'xyz', not one of run, try, watch, trace, show,"),
        (["--verson"], "[--version]", "error: unknown option '--verson': did you mean --version?"),
        (["show", "x", "--jsn"], "show [options]", "show: error: unknown option '--jsn': did you mean --json?"),
        (["run", "--windw=1:2", "x"], "run [options]", "run: error: unknown option '--windw=1:2': did you mean"),
        (["compare", "a", "--fail-over", "5", "b"], "compare [options]", "unexpected 'b': give all files and folders"),
        (["compare", "a"], "compare [options]", "error: two runs are needed: compare BEFORE AFTER, or"),
    ],
)
def test_a_mistyped_argument_is_answered_by_its_own_command(capsys, arguments, usage, message):
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"usage: forge-profiling {usage}")
    assert message in err


@pytest.mark.slow
@pytest.mark.parametrize("command", [each.name for each in commands.COMMANDS])
def test_help_has_examples_of_commands_that_parse(command):
    done = forge(*command.split(), "--help")
    assert done.returncode == 0
    assert f"usage: forge-profiling {command}" in done.stdout
    lines = (line.strip().partition("    ")[0].split() for line in done.stdout.splitlines())
    examples = [words for words in lines if words[:1] == ["forge-profiling"]]
    assert examples
    for words in examples:
        arguments = words[1 : next((i for i, word in enumerate(words) if word in {"|", ">"}), len(words))]
        assert callable(main._parser()[0].parse_args(arguments).command.function())


def test_the_help_of_all_commands_fits_on_two_screens(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    for command in ([], *([each.name] for each in commands.COMMANDS)):
        assert main.main([*command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 112
    assert max(map(len, lines)) <= 120


# --- compare ---------------------------------------------------------------------------------------------------------


def stretched(source, target, factor, copies=4):
    """The trace several times in a row, so that there are enough steps, and all times multiplied."""
    trace = json.loads(gzip.decompress(source.read_bytes()))
    events = [event for event in trace["traceEvents"] if "ts" in event]
    steps = [
        event for event in events if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"
    ]
    period = max(step["ts"] + step["dur"] for step in steps) - min(step["ts"] for step in steps)
    count = len({step["name"] for step in steps})
    repeated = []
    for copy in range(copies):
        for event in events:
            args = dict(event.get("args", {}))
            args.update({key: args[key] + copy * 10**6 for key in ("correlation", "External id") if key in args})
            again = {**event, "ts": factor * (event["ts"] + copy * period), "args": args}
            if "dur" in event:
                again["dur"] = factor * event["dur"]
            if event["name"].startswith("ProfilerStep#"):
                again["name"] = f"ProfilerStep#{int(event['name'].partition('#')[2]) + copy * count}"
            repeated.append(again)
    target.write_bytes(gzip.compress(json.dumps(trace | {"traceEvents": repeated}).encode(), 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, factor in (("base", 1.0), ("same", 1.01), ("slow", 1.3)):
        stretched(INPUT_BOUND, folder / f"{name}.json.gz", factor)
    return folder


@pytest.mark.slow
def test_compare_without_a_limit_only_shows(runs):
    done = forge("compare", runs / "base.json.gz", runs / "slow.json.gz")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 30 % slower (")
    assert "limit" not in done.stdout.splitlines()[0]


@pytest.mark.slow
def test_a_slower_run_fails_the_gate_and_one_that_is_not_passes(runs):
    slower = forge("compare", runs / "base.json.gz", runs / "slow.json.gz", "--fail-over", "15")
    assert slower.returncode == 1, slower.stdout + slower.stderr
    assert slower.stdout.startswith("step ")
    alike = forge("compare", runs / "base.json.gz", runs / "same.json.gz", "--fail-over", "15%", "--metric", "busy")
    assert alike.returncode == 0, alike.stdout + alike.stderr
    assert alike.stdout.splitlines()[1].startswith("same: busy 1.0 % slower (")


@pytest.mark.slow
def test_three_steps_are_too_few_to_tell_which_has_an_exit_code_of_its_own():
    done = forge("compare", INPUT_BOUND, INPUT_BOUND, "--fail-over", "5", "--metric", "busy")
    assert done.returncode == 3, done.stderr
    assert "too short: busy +0.0 %, no interval: " in done.stdout
    assert "too few steps for an interval: each side needs 5" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_compare_writes_what_github_action_benchmark_reads(runs):
    done = forge("compare", runs / "base.json.gz", runs / "slow.json.gz", "--format", "github", "--fail-over", "15")
    assert done.returncode == 1, done.stderr
    entries = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert {"step", "busy", "idle"} <= entries.keys()
    assert all(entry.keys() <= {"name", "unit", "value", "range", "extra"} for entry in entries.values())
    assert entries["step"]["unit"] == "ms"
    assert entries["step"]["value"] > 0
    assert entries["step"]["range"].startswith("± ")
    assert entries["step"]["extra"].startswith("slower: step 30 % slower (")


@pytest.mark.slow
def test_results_of_benchmark_are_compared(tmp_path):
    for name, us in (("a", 10.0), ("b", 13.0)):
        samples = tuple(us + 0.01 * (sample % 7) for sample in range(50))
        result = BenchmarkResult(name="f", method="cpu", device="cpu", samples_us=samples)
        (tmp_path / f"{name}.json").write_text(result.to_json())
    done = forge("compare", tmp_path / "a.json", tmp_path / "b.json", "--fail-over", "5")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("call 30 % slower (")
    done = forge("compare", tmp_path / "a.json", INPUT_BOUND)
    assert fails(done, "is a result of benchmark()")


@pytest.mark.slow
def test_compare_as_json_holds_the_decision_and_all_kernels(runs):
    done = forge(
        "compare", runs / "base.json.gz", runs / "slow.json.gz",
        "--format", "json", "--fail-over", "15", "--metric", "step", "--metric", "comm",
    )  # fmt: skip
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["outcome"] == "slower"
    assert {gate["metric"]: gate["outcome"] for gate in answer["gates"]} == {"step": "slower", "comm": "same"}
    assert answer["comparison"]["metrics"]["step"]["pct"] == pytest.approx(30, abs=5)
    assert all(change["pct"] == pytest.approx(30, abs=0.1) for change in answer["comparison"]["kernels"])


# --- tensorboard -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_copies_each_rank_of_a_folder_and_leaves_it_alone(tmp_path):
    source = tmp_path / "traces"
    source.mkdir()
    for rank in (0, 1):
        (source / f"rank{rank}.trace.json.gz").write_bytes((TRACES / "ddp" / f"rank{rank}.trace.json.gz").read_bytes())
    (source / "summary.json").write_text("{}")
    (source / "rank2.trace.json").write_text("nothing")
    before = {path.name: path.read_bytes() for path in source.iterdir()}

    done = forge("export", source, "--for", "tensorboard", "--out", tmp_path / "new" / "plugin")

    assert done.returncode == 0, done.stderr
    assert "tensorboard --logdir" in done.stdout
    assert "left out" in done.stderr
    assert "rank2.trace.json" in done.stderr
    copies = sorted(path.name for path in (tmp_path / "new" / "plugin").iterdir())
    assert copies == ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"]
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.slow
def test_tensorboard_takes_the_rank_from_the_name_and_never_replaces_a_trace(tmp_path):
    trace = tmp_path / "rank3.pt.trace.json.gz"
    trace.write_bytes(INPUT_BOUND.read_bytes())
    assert fails(forge("export", trace, "--for", "tensorboard", "--out", tmp_path), "would replace the trace")
    assert forge("export", trace, "--for", "tensorboard", "--out", tmp_path / "out").returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank3.pt.trace.json.gz"]


# --- view ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path):
    """A browser that notes what it was asked to open."""
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n')
    script.chmod(0o755)
    return {"BROWSER": str(script), "TMPDIR": str(tmp_path)}, tmp_path / "opened"


@pytest.mark.slow
def test_view_opens_the_report_that_is_there_or_makes_one(browser, tmp_path):
    environment, opened = browser
    folder = tmp_path / "forge"
    folder.mkdir()
    (folder / "report.html").write_text("<!DOCTYPE html>")
    for path in (folder, folder / "report.html"):
        done = forge("view", path, environment=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{folder / 'report.html'}\n"
    made = Path(forge("view", INPUT_BOUND, environment=environment).stdout.strip())
    assert made.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert opened.read_text().split() == [(folder / "report.html").as_uri()] * 2 + [made.as_uri()]


def test_view_of_a_folder_of_runs_opens_the_newest_report(tmp_path):
    for age, name in enumerate(("version_1", "version_0")):
        window = tmp_path / "lightning_logs" / name / "profiler_traces" / "steps_5-7"
        window.mkdir(parents=True)
        (window / "rank0.trace.json.gz").write_bytes(b"")
        os.utime(window / "rank0.trace.json.gz", (1e9 + age, 1e9 + age))
        (window / "report.html").write_text("<!DOCTYPE html>")
    done = forge("view", "--no-browser", tmp_path / "lightning_logs")
    assert done.stdout == f"{window / 'report.html'}\n", "which tells of the whole run, as one made anew could not"


@pytest.mark.slow
def test_view_of_a_run_makes_its_page_unless_the_one_of_its_window_has_the_run(tmp_path):
    run = tmp_path / "logs" / "version_0"
    MadeRun(began=1.7e9, outcome="finished").write(run)

    def viewed(path=tmp_path / "logs"):
        done = forge("view", "--no-browser", path, environment={"TMPDIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    made = viewed()
    assert not made.is_relative_to(run)
    assert record_of(made.read_text(encoding="utf-8"))["outcome"] == "finished"
    window = run / "profiler_traces" / "steps_5-7"
    window.mkdir(parents=True)
    (window / "rank0.trace.json.gz").write_bytes(b"")
    page = window / "report.html"
    page.write_text(report_page(sample_analysis(), ()), encoding="utf-8")
    assert viewed() not in {page, made}, "the page of the window was written before the run ended"
    page.write_text(made.read_text(encoding="utf-8"), encoding="utf-8")
    assert viewed() == page
    assert viewed(window) == page


@pytest.mark.slow
def test_no_browser_opens_none(browser):
    environment, opened = browser
    made = Path(forge("view", INPUT_BOUND, "--no-browser", environment=environment).stdout.strip())
    assert made.is_file()
    assert not opened.exists()


# --- the process -----------------------------------------------------------------------------------------------------


def loaded(*arguments):
    """Which of the heavy packages a command loads."""
    program = (
        "import sys\nfrom lightning_forge_profiling.cli.main import main\n"
        f"try:\n    main({[str(argument) for argument in arguments]})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'numpy', 'rich', 'msgspec'} & set(sys.modules)\n"
        "print(*heavy, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True, timeout=HANGS_S
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.slow
def test_help_loads_nothing_heavy_and_analysing_needs_no_torch(tmp_path):
    assert loaded("--help") == set()
    assert loaded("show", "--help") == set()
    assert loaded("show", INPUT_BOUND) == {"numpy", "msgspec"}
    assert "torch" not in loaded("compare", INPUT_BOUND, INPUT_BOUND)


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error():
    read, write = os.pipe()
    os.close(read)
    for arguments in (["show", str(INPUT_BOUND), "--json"], ["show", str(INPUT_BOUND)], ["show", "--schema"]):
        done = forge(*arguments, stdout=write, stderr=subprocess.PIPE, capture_output=False)
        assert done.returncode == 141
        assert without_progress(done.stderr) == ""
    os.close(write)


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_what_looks_like_it():
    done = forge("show", INPUT_BOUND, environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "---" in done.stdout
    assert "the mean kernel runs 21.0 us" in " ".join(done.stdout.split())


def test_progress_is_said_only_after_a_while():
    late, soon, at_once = io.StringIO(), io.StringIO(), io.StringIO()
    with Progress(late, after_s=3600.0) as progress:
        progress("reading a")
    with Progress(soon, after_s=0.001) as progress:
        time.sleep(0.002)
        progress("reading a")
        progress("reading b")
    with Progress(at_once, after_s=0) as progress:
        progress(f"timing {HARM}")
    assert late.getvalue() == ""
    assert soon.getvalue() == "reading a\nreading b\n"
    assert at_once.getvalue() == "timing x y\n"


def test_the_command_is_installed_under_its_name():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["forge-profiling"].split(":")
    assert getattr(importlib.import_module(module), function) is main.main

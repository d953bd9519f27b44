"""The page of a run: what it holds of the record and of the recorded window, and how a browser shows it."""

import dataclasses
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from lightning_forge_profiling.names import MFU, SUMMARY_JSON
from lightning_forge_profiling.record.files import encode_line, write_plan
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.report.page import block_of, record_of, timelines_of, write_reports
from lightning_forge_profiling.report.run_page import run_page, run_view, write_run_page
from lightning_forge_profiling.schema import End, EventLine, IntervalLine, State, TraceReport, WindowPlan
from tests.record_builder import MadeRun, with_times
from tests.sample_timeline import sample_timeline
from tests.samples import sample_analysis
from tests.test_cli import INPUT_BOUND, fails, forge

LONG_AGO = 1.7e9
HOSTILE = "</script><script>hacked=1</script><img src=x onerror='hacked=1'>"


def page_of(run, folder):
    return run_page(read_run(run.write(folder)), LONG_AGO + 1000)


def analysis_in(page):
    return msgspec.json.decode(block_of(page, "summary"))["analysis"]


def test_the_page_has_the_whole_run(tmp_path):
    page = page_of(MadeRun(ranks=4, late=2, began=LONG_AGO, outcome="finished"), tmp_path)
    view = record_of(page)
    assert (view["outcome"], view["status"]) == ("finished", "finished 1,200 steps in 1 min")
    assert dict(view["facts"]) == {
        "Device": "NVIDIA H200", "Host": "node0", "Ranks": "4", "Steps": "1,200", "Time": "1 min",
    }  # fmt: skip
    title = "Where a step goes: 42.6 ms, mean of 1195 of 1200 steps on NVIDIA H200, longest 63.1 ms"
    assert view["step"]["title"] == title
    assert [row["cells"][0] for row in view["step"]["table"]["rows"]][:3] == ["data", "transfer", "forward"]
    assert view["step"]["lines"][0]["text"]["text"].startswith("1,50")
    assert [curve["title"] for curve in view["curves"]] == [
        *("Step time", "Samples", "Tokens"),
        *("GPU utilization", "GPU memory", "GPU power", "GPU clock", "GPU temperature"),
    ]
    assert all(len(curve["values"]) == len(view["seconds"]) == 24 for curve in view["curves"])
    kinds = [event["kind"] for event in view["events"]]
    assert kinds == ["validation", "checkpoint", "validation", "checkpoint"], "once for all ranks"
    table = view["ranks"]["table"]
    words = [column["name"] for column in table["columns"]].index("")
    assert [row["cells"][words] for row in table["rows"]] == ["straggler: data", "", "", ""]
    assert table["rows"][0]["cells"][0] == "2"
    assert "torch 2.11.0" in {line["name"]: line["text"]["text"] for line in view["setting"]}["Versions"]
    analysis = analysis_in(page)
    assert analysis["verdict"] == "input-bound"
    assert "startup/fit" in analysis["run"]["ledger"]["parts"]


def test_names_cannot_add_markup(tmp_path):
    record = MadeRun(began=LONG_AGO, rows=4).write(tmp_path)
    event = EventLine(at=LONG_AGO + 15, step=10, kind=HOSTILE, text=HOSTILE)
    with (record / "rank0.jsonl").open("ab") as file:
        file.write(encode_line(event))
    html = run_page(read_run(record), LONG_AGO + 100)
    assert record_of(html)["events"][-1]["kind"] == HOSTILE
    assert "<img" not in html
    assert html.count("<script") == 4, "three blocks of JSON and the page's own"


def test_an_exception_and_a_run_without_totals_have_a_page_too(tmp_path):
    failed = record_of(page_of(MadeRun(began=LONG_AGO, outcome="failed"), tmp_path / "failed"))
    assert failed["status"] == "failed after 1 min, step 1,200: ValueError: the loss is nan"
    assert failed["events"][-1]["text"] == "ValueError: the loss is nan"
    assert failed["events"][-1]["kind"] in failed["problems"]
    page = page_of(MadeRun(began=LONG_AGO, states=False, rows=3), tmp_path / "early")
    early = record_of(page)
    assert analysis_in(page)["verdict"] == "no verdict yet"
    assert early["status"].startswith("silent for ")
    assert "forward" in [row["cells"][0] for row in early["step"]["table"]["rows"]]
    empty = record_of(page_of(MadeRun(began=LONG_AGO, rows=0), tmp_path / "empty"))
    assert empty["step"]["table"] is None
    assert empty["curves"] == empty["seconds"] == []


def test_a_long_run_is_as_many_points_as_a_page_shows_and_no_step_is_lost(tmp_path):
    rows = [row for row in MadeRun(began=LONG_AGO, rows=3).lines() if isinstance(row, IntervalLine)]
    many = [
        with_times(rows[-1], {"step": 50 * (30.0 + second % 2 * 10.0)}, at=LONG_AGO + second) for second in range(1203)
    ]
    view = view_with(many, tmp_path)
    assert len(view.seconds) == 401
    assert view.seconds[-1] == 1202
    [step_time] = [curve for curve in view.curves if curve.name == "median"]
    assert step_time.values[0] == pytest.approx(30.0, rel=0.02)
    assert step_time.highs[0] == pytest.approx(40.0, rel=0.02)


def view_with(rows, folder):
    """What a page shows of a run with these intervals instead of its own."""
    record = read_run(MadeRun(began=LONG_AGO, rows=1).write(folder))
    first = record.ranks[0]
    lines = tuple(line for line in first.lines if not isinstance(line, IntervalLine))
    changed = dataclasses.replace(first, lines=(*lines, *rows))
    return run_view(dataclasses.replace(record, ranks=(changed,)), LONG_AGO + 2000)


def test_metrics_of_merged_intervals_are_means_by_their_steps(tmp_path):
    [row, *_] = [row for row in MadeRun(began=LONG_AGO, rows=3).lines() if isinstance(row, IntervalLine)]
    few, many = (
        with_times(row, {"step": 36.0 * counted}, counted=counted, metrics={MFU: mfu})
        for counted, mfu in ((10, 0.1), (30, 0.5))
    )
    [mfu] = [curve for curve in view_with([few, many] * 400, tmp_path).curves if curve.title == "MFU"]
    assert [*mfu.values] == pytest.approx([40.0] * 400), "each of two intervals"


# --- the recorded window ---------------------------------------------------------------------------------------------


def with_window(folder, outcome, analysis=None):
    """A run that recorded a window: the record, its window's folder, and the report on the run."""
    window = folder / "version_0" / "profiler_traces" / "steps_5-7"
    paths = write_reports(analysis or sample_analysis(), [sample_timeline()], window)
    record = MadeRun(began=LONG_AGO, outcome=outcome).write(folder / "version_0")
    lines = MadeRun(began=LONG_AGO, outcome=outcome).lines()
    trace = TraceReport(
        status="written", steps=(5, 6), path=window / "rank0.trace.json.gz", summary_path=paths.summary_json,
        report_path=paths.html,
    )  # fmt: skip
    lines = [
        msgspec.structs.replace(line, report=replace(line.report, trace=trace)) if hasattr(line, "report") else line
        for line in lines
    ]
    (record / "rank0.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    return record, window, [line.report for line in lines if hasattr(line, "report")][-1]


@pytest.mark.parametrize("moved", [False, True])
def test_a_killed_run_has_its_window_in_the_page_with_one_verdict_for_both(tmp_path, moved):
    record, window, _ = with_window(tmp_path / "logs", None)
    if moved:
        (tmp_path / "logs").rename(tmp_path / "elsewhere")
        record = tmp_path / "elsewhere" / "version_0" / record.name
    page = run_page(read_run(record), LONG_AGO + 1000)
    assert timelines_of(page) == (sample_timeline(),)
    analysis = analysis_in(page)
    assert [rank["rank"] for rank in analysis["ranks"]] == [0]
    assert analysis["run"]["timing"]["steps"] == 995, "by the latest totals"
    assert record_of(page)["outcome"] == "silent"
    assert window.name == "steps_5-7"


def test_a_window_that_was_asked_for_a_moment_ago_is_the_one_that_opens(tmp_path):
    """`forge-profiling trace` has recorded it since the totals that are on record were written."""
    record, earlier, _ = with_window(tmp_path, None)
    os.utime(earlier / "report.html", (LONG_AGO, LONG_AGO))
    asked = tmp_path / "version_0" / "profiler_traces" / "steps_1000-1002"
    write_reports(sample_analysis(), [replace(sample_timeline(), lanes=())], asked)
    plan = WindowPlan(run="made", number=1, request="ab" * 8, state="recorded", start=1000, steps=3, folder=str(asked))
    write_plan(record, plan)
    said = forge("view", record, "--no-browser")
    assert said.stderr.endswith(", with steps_1000-1002\n")
    page = Path(said.stdout.strip()).read_text()
    assert [timeline.lanes for timeline in timelines_of(page)] == [()]


def test_a_window_whose_reports_are_gone_or_damaged_leaves_the_page_of_the_run(tmp_path):
    record, window, _ = with_window(tmp_path, "finished")
    for damage in (lambda file: file.write_text("no page"), lambda file: file.unlink()):
        damage(window / "report.html")
        damage(window / SUMMARY_JSON)
        page = run_page(read_run(record), LONG_AGO + 1000)
        assert (timelines_of(page), analysis_in(page)["ranks"]) == ((), [])
        assert record_of(page)["outcome"] == "finished"


def test_the_end_of_a_fit_writes_the_page_that_the_record_gives_later(tmp_path):
    record, window, report = with_window(tmp_path, None)
    merged = replace(sample_analysis(), run=report.analysis.run)
    write_reports(merged, None, window)
    end = End(at=LONG_AGO + 70, step=1200, outcome="finished")

    write_run_page(record, replace(report, analysis=merged), end)

    slim = replace(report, analysis=replace(merged, ranks=()))  # as the last lines of the record are
    with (record / "rank0.jsonl").open("ab") as file:
        file.write(encode_line(State(at=end.at, step=end.step, report=slim, metrics={})) + encode_line(end))
    at_end = (window / "report.html").read_text(encoding="utf-8")
    later = run_page(read_run(record), LONG_AGO + 1000)
    assert [analysis_in(page) for page in (at_end, later)] == [analysis_in(later)] * 2
    assert record_of(at_end) == record_of(later)
    assert timelines_of(at_end) == timelines_of(later)
    assert record_of(at_end)["status"] == "finished 1,200 steps in 1 min"
    write_reports(merged, None, window)
    assert (window / "report.html").read_text(encoding="utf-8") == at_end, "kept where the reports are written again"


def test_without_a_window_the_end_of_a_fit_writes_no_page(tmp_path):
    record = MadeRun(began=LONG_AGO).write(tmp_path)
    report = read_run(record).ranks[0].state.report
    write_run_page(record, report, End(at=LONG_AGO + 70, step=1200, outcome="finished"))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rank0.jsonl"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_says_of_which_run(tmp_path):
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path / "logs")
    file = tmp_path / "run.html"
    done = forge("view", tmp_path / "logs", "--save", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file}: {record}\n"
    assert record_of(file.read_text(encoding="utf-8"))["outcome"] == "finished"


@pytest.mark.slow
def test_of_a_trace_without_a_run_the_page_is_of_its_window(tmp_path):
    window = tmp_path / "steps_5-7"
    window.mkdir()
    trace = shutil.copy(INPUT_BOUND, window)
    for path in (tmp_path, trace):
        done = forge("view", path, "--save", window / "report.html")
        name = window if path == tmp_path else trace
        assert (done.returncode, done.stdout) == (0, f"{window / 'report.html'}: {name}\n")
        assert len(timelines_of((window / "report.html").read_text(encoding="utf-8"))) == 1


@pytest.mark.slow
def test_what_cannot_be_read_or_written_is_refused_before_anything_is_written(tmp_path):
    record = MadeRun(began=LONG_AGO, rows=2).write(tmp_path)
    assert fails(forge("view", record, "--save", tmp_path / "no" / "run.html"), "there is no folder ")
    assert fails(forge("view", record, "--save", record / "rank0.jsonl"), "one would overwrite the other")
    assert read_run(record).problems == ()
    (tmp_path / "empty").mkdir()
    for options in ((), ("--save", tmp_path / "run.html")):
        assert fails(forge("view", tmp_path / "none", *options), "none: no such file or folder")
        done = forge("view", tmp_path / "empty", *options)
        assert fails(done, "no record of a run in ")
        assert fails(done, "no trace in this folder")
    assert [*tmp_path.rglob("*.html")] == []


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_the_run_without_scrolling_sideways(show, tmp_path, width, scheme):
    run = MadeRun(ranks=3, late=1, began=LONG_AGO, outcome="finished")
    page = show(page_of(run, tmp_path), width=width, scheme=scheme)
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert page.texts("#outcome") == ["finished"]
    sections = [section.get_attribute("id") for section in page.all("section")]
    assert sections[:3] == ["verdict", "step", "findings"]
    assert {"course", "over-time", "telemetry", "ranks", "events", "about"} <= {*sections}
    assert not {"timeline", "breakdown", "run"} & {*sections}, "the step is there once"
    widths = page.run("return [...document.querySelectorAll('#step .segment')].map((one) => one.offsetWidth)")
    assert widths[3] > widths[0] > widths[1] > 0, "backward, data, transfer"
    assert page.column("step", 1)[-1] == "step"
    titles = page.texts("#over-time .chart-title b")
    assert titles[:3] == ["Step time", "Samples", "Tokens"]
    assert len(page.all("#over-time path.spread")) == 1, "the band of the step time"
    assert "million per second" in page.texts("#over-time .chart-title")[2]
    assert page.texts("#over-time .state .chart-line > :nth-child(2)") == ["validation", "checkpoint"]
    assert page.column("ranks", 1)[0] == "1 \u2191 straggler"
    assert page.column("ranks", 2) == ["straggler: data", "", ""]
    assert page.column("events", 1) == ["checkpoint", "validation"] * 2
    assert "torch 2.11.0" in page.texts("#about")[0]
    assert page.faint_texts() == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.browser
def test_a_run_and_the_window_inside_it_are_one_page(show, tmp_path):
    record, _, _ = with_window(tmp_path, None, sample_analysis(2))
    page = show(run_page(read_run(record), LONG_AGO + 1000))
    sections = [section.get_attribute("id") for section in page.all("section")]
    assert sections.index("over-time") < sections.index("breakdown") < sections.index("timeline")
    assert page.one("#window").text == "The recorded window"
    assert page.one("canvas").is_displayed()


@pytest.mark.browser
def test_the_cursor_reads_all_curves_and_says_which_event_it_is_in(show, tmp_path):
    page = show(page_of(MadeRun(began=LONG_AGO, outcome="finished"), tmp_path))
    page.run("document.querySelector('#over-time .scrubber').focus()")
    page.run(
        "document.querySelector('#over-time .scrubber')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: 'End', cancelable: true}))"
    )
    [spoken] = page.run("return [document.querySelector('#over-time .scrubber').getAttribute('aria-valuetext')]")
    assert re.search(r"Step time, median: 3\d\.\d \(3\d\.\d to \d\d\.\d\) ms", spoken)
    assert "validation: no" in spoken


@pytest.mark.browser
def test_what_a_run_lacks_is_left_out(show, tmp_path):
    early = show(page_of(MadeRun(began=LONG_AGO, states=False, rows=3), tmp_path / "early"))
    assert early.texts("h1") == ["No verdict yet."]
    assert early.column("step", 1)[0] == "data"
    empty = show(page_of(MadeRun(began=LONG_AGO, rows=0), tmp_path / "empty"))
    assert empty.texts("#step .empty") == ["No step was timed."]
    assert empty.all("#over-time, #events, #ranks") == []


@pytest.mark.slow
@pytest.mark.browser
def test_markup_in_an_event_runs_nothing(show, tmp_path):
    record = MadeRun(began=LONG_AGO, rows=4).write(tmp_path)
    with (record / "rank0.jsonl").open("ab") as file:
        file.write(encode_line(EventLine(at=LONG_AGO + 15, step=10, kind=HOSTILE, text=HOSTILE)))
    page = show(run_page(read_run(record), LONG_AGO + 100))
    assert page.column("events", 1) == [HOSTILE]
    assert page.run("return typeof hacked") == "undefined"

"""`forge-profiling report`: a run as one page, as text and in a browser."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from lightning_forge_profiling.record.histogram import histogram
from lightning_forge_profiling.record.lines import EventLine, IntervalLine, encode_line
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.report.charts import TimeAxis
from lightning_forge_profiling.report.curves import points
from lightning_forge_profiling.report.run_page import run_page
from tests.browser import chromium
from tests.record_builder import MadeRun
from tests.test_cli import INPUT_BOUND, fails, forge

LONG_AGO = 1.7e9


class Page(HTMLParser):
    """Sections and their text, tags with their attributes."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.sections, self._within = [], {}, "head"
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._within = dict(attrs)["id"]

    def handle_data(self, data):
        self.sections[self._within] = f"{self.sections.get(self._within, '')} {data.strip()}".strip()


def page_of(run, folder):
    return run_page(read_run(run.write(folder)), LONG_AGO + 1000)


def test_the_page_has_the_whole_run(tmp_path):
    page = Page(page_of(MadeRun(ranks=4, late=2, began=LONG_AGO, outcome="finished"), tmp_path))
    said = page.sections
    assert "input-bound finished finished after 1 min, 1,200 steps" in said["verdict"]
    assert "Measure the DataLoader with more num_workers" in said["verdict"]
    head = "Where a step goes: 42.6 ms, mean of 1195 of 1200 steps on NVIDIA H200, longest 63.1 ms data forward"
    assert said["step"].startswith(head)
    assert "throughput 1,50" in said["step"]
    assert "startup/fit" in said["ledger"]
    for chart in ("Step time , ms", "Samples , per second", "GPU power , W", "GPU temperature , °C"):
        assert chart in said["over-time"], chart
    assert "validation 2 checkpoint 2" in said["over-time"], "once for all ranks"
    assert re.search(r"2 node0 1,200 42\.\d\d 42\.\d\d 0\.00 finished", said["ranks"])
    assert "1,050 checkpoint 1.50" in said["events"]
    assert "torch 2.11.0" in said["setting"]


def test_it_is_one_file_without_scripts_and_without_requests(tmp_path):
    html = page_of(MadeRun(ranks=2, began=LONG_AGO), tmp_path)
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "object", "img"} == set()
    assert [
        value for _, attributes in page.tags for name, value in attributes.items() if name in {"src", "style"}
    ] == []
    [icon] = [attributes["href"] for _, attributes in page.tags if "href" in attributes]
    assert icon == "data:,"
    [policy] = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_names_cannot_add_markup(tmp_path):
    run = MadeRun(began=LONG_AGO, rows=4)
    record = run.write(tmp_path)
    event = EventLine(at=LONG_AGO + 15, step=10, kind="<script>kind", text="<script>text")
    with (record / "rank0.jsonl").open("ab") as file:
        file.write(encode_line(event))
    html = run_page(read_run(record), LONG_AGO + 100)
    assert "&lt;script&gt;kind" in html
    assert "<script" not in html


def test_an_exception_and_a_run_without_totals_have_a_page_too(tmp_path):
    failed = Page(page_of(MadeRun(began=LONG_AGO, outcome="failed"), tmp_path / "failed")).sections
    assert "failed after 1 min, step 1,200: ValueError: the loss is nan" in failed["verdict"]
    assert "ValueError: the loss is nan" in failed["events"]
    early = Page(page_of(MadeRun(began=LONG_AGO, states=False, rows=3), tmp_path / "early")).sections
    assert "no verdict yet silent silent: step " in early["verdict"]
    assert "forward" in early["step"]
    empty = Page(page_of(MadeRun(began=LONG_AGO, rows=0), tmp_path / "empty")).sections
    assert "No step was timed." in empty["step"]
    assert "over-time" not in empty


def test_a_long_run_is_as_many_points_as_a_page_shows_and_no_step_is_lost():
    rows = [row for row in MadeRun(began=LONG_AGO, rows=3).lines() if isinstance(row, IntervalLine)]
    many = [
        msgspec.structs.replace(rows[-1], at=LONG_AGO + second, steps_us=histogram([30.0 + second % 2 * 10.0] * 50))
        for second in range(1203)
    ]
    found = points(many, LONG_AGO, most=500)
    assert len(found) == 401
    assert found[-1].second == 1202
    assert found[0].spread.p50 == pytest.approx(30.0, rel=0.02)
    assert found[0].spread.p95 == pytest.approx(40.0, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [
        (7.0, ["0 s", "1 s", "2 s", "3 s", "4 s", "5 s", "6 s", "7 s"]),
        (3000.0, ["0 min", "10 min", "20 min", "30 min", "40 min", "50 min"]),
        (4 * 3600.0, ["0.0 h", "0.5 h", "1.0 h", "1.5 h", "2.0 h", "2.5 h", "3.0 h", "3.5 h", "4.0 h"]),
    ],
)
def test_the_axis_is_in_the_unit_of_its_length(seconds, ticks):
    assert [text for _, text in TimeAxis(seconds).ticks()] == ticks


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_says_of_which_run(tmp_path):
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path / "logs")
    file = tmp_path / "run.html"
    done = forge("report", tmp_path / "logs", "--html", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file}: {record}\n"
    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_cannot_be_read_or_written_is_refused_before_anything_is_written(tmp_path):
    record = MadeRun(began=LONG_AGO, rows=2).write(tmp_path)
    assert fails(forge("report", record, "--html", tmp_path / "no" / "run.html"), "there is no folder ")
    assert fails(forge("report", record, "--html", record / "rank0.jsonl"), "one would overwrite the other")
    assert read_run(record).problems == ()
    assert fails(forge("report", INPUT_BOUND, "--html", tmp_path / "run.html"), "is not a record of a run")
    assert not (tmp_path / "run.html").exists()
    assert forge("report", record).returncode == 2


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_it_without_a_complaint_and_without_scrolling_sideways(tmp_path, width):
    run = MadeRun(ranks=3, late=1, began=LONG_AGO, outcome="finished")
    file = tmp_path / "run.html"
    file.write_text(page_of(run, tmp_path), encoding="utf-8")
    with chromium() as browser:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(file.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        step, placed, bar = browser.execute_script(
            "const box = (query) => document.querySelector(query).getBoundingClientRect();"
            "const ticks = [...document.querySelectorAll('.tick:not(.minor)')];"
            "const all = ticks.map((tick) => tick.getBoundingClientRect().left);"
            "const widths = [...document.querySelectorAll('#step .segment')].map((one) => one.offsetWidth);"
            "return [box('svg.chart').width, all, widths]"
        )
        assert step > width / 2
        assert len(set(placed)) == len(placed) >= 3, "each tick has its place"
        assert bar[3] > bar[0] > bar[1] > 0, "backward, data, transfer"
        assert browser.get_log("browser") == []

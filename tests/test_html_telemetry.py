"""The GPU's readings in the web page: a real fit on a simulated GPU, and what a browser then shows."""

import itertools
import json
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.gpu.memory import AllocatorReading
from lightning_forge_profiling.gpu.nvml import GpuReader, GpuSample, find_device
from lightning_forge_profiling.names import BEFORE_FIT
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.telemetry import RunTelemetry
from lightning_forge_profiling.schema import Analysis, Distribution, RunEvidence, TelemetrySummary
from tests.browser import wait_until
from tests.evidence import made_evidence
from tests.fake_nvml import GPU_IS_LOST, FakeBoard, FakeNvml
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S
from tests.report_page import Page
from tests.sample_timeline import sample_timeline
from tests.samples import sample_analysis

pytestmark = pytest.mark.browser

GIB = 2**30
H200_RUN = Path(__file__).parent / "data" / "telemetry" / "h200.json"
NOTHING = "\N{EN DASH}"
HOSTILE = '</script><script>hacked=1</script><img src=x onerror="hacked=1">"onmouseover="hacked=1"&lt;'
BUSY = {
    "utilization_pct": 96.0, "memory_utilization_pct": 51.0, "encoder_pct": 0.0, "decoder_pct": 0.0,
    "memory_used_bytes": 80.0 * GIB, "memory_own_bytes": 78.0 * GIB, "allocated_bytes": 60.0 * GIB, "power_w": 650.0,
    "temperature_c": 61.0, "sm_mhz": 1980.0, "memory_mhz": 3201.0, "throttles": (),
}  # fmt: skip


class ReadingsOf:
    """A device whose sensors show these readings, one after the other."""

    def __init__(self, name, samples, *, memory_bytes=140.0 * GIB, power_limit_w=700.0, is_mig=False):
        self.name, self.memory_bytes, self.power_limit_w, self.is_mig = name, memory_bytes, power_limit_w, is_mig
        self._samples = iter(samples)

    def read(self, at_ns):
        return GpuSample(at_ns=at_ns, **next(self._samples))


def telemetry(samples, *, device="NVIDIA H200", period_s=0.2, counted=lambda number: True, **options):
    """The summary of a run whose samples are these readings, a period apart."""
    samples = [*samples]
    now = itertools.count(0, round(period_s * 1e9))
    reader = ReadingsOf(device, samples, **options)
    run = RunTelemetry(lambda: reader, AllocatorReading, period_s=1, clock_ns=now.__next__)
    run.sampler.start = lambda: None  # sampled by hand instead
    run.start()
    assert run.sampler.open()
    for number in range(len(samples)):
        (run.sampler.resume if counted(number) else run.sampler.pause)()
        assert run.sampler.sample()
    return run.summary(samples_per_second=None, steps=0)


def analysis_with(seen, *, world_size=1):
    spread = Distribution(mean=51.0, p50=50.4, min=49.9, max=80.2)
    run = made_evidence(steps=512, on_device=True, step_ms=spread, regions={}, world_size=world_size, telemetry=seen)
    return replace(sample_analysis(), run=run)


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page on a run; whatever else the page does, it never complains."""

    def open_page(seen, *, world_size=1, **options):
        return TelemetryPage(
            browser, tmp_path, analysis_with(seen, world_size=world_size), [sample_timeline()], **options
        )

    yield open_page
    assert browser.get_log("browser") == []


class TelemetryPage(Page):
    """What a reader finds in the section."""

    def readings(self):
        """The texts of the labels: {"Power": {"board": "690"}, "": {"not in the means": "no"}}."""
        found = {}
        for row in self.all("#telemetry .chart-row:not(.axis)"):
            title = [each.get_property("textContent") for each in row.find_elements(By.CSS_SELECTOR, ".chart-title b")]
            for line in row.find_elements(By.CSS_SELECTOR, ".chart-line"):
                _, name, reading = [
                    each.get_property("textContent") for each in line.find_elements(By.TAG_NAME, "span")
                ]
                found.setdefault(title[0] if title else "", {})[name] = reading
        return found

    def hover_part(self, part):
        """Point at a moment, as a part of the time that is drawn."""
        box = self.one("#telemetry .scrubber").rect
        ActionChains(self.browser).move_to_element_with_offset(
            self.one("#telemetry .scrubber"), round((part - 0.5) * box["width"]), 0
        ).perform()

    def titles(self):
        return self.texts("#telemetry .chart-title b")

    def shades(self, style):
        """Where a chart is shaded, as parts of its width; all of them are shaded alike."""
        [first, *others] = [
            [
                (rect.get_attribute("x"), rect.get_attribute("width"))
                for rect in chart.find_elements(By.CSS_SELECTOR, f"rect.{style}")
            ]
            for chart in self.all("#telemetry svg.chart")
        ]
        assert others == [first] * len(others)
        return [(float(x) / 1000, (float(x) + float(width)) / 1000) for x, width in first]

    def segments(self, chart, line="a"):
        """How many pieces a line is drawn in."""
        [path] = self.all("#telemetry svg.chart")[chart].find_elements(By.CSS_SELECTOR, f"path.line.{line}")
        return path.get_attribute("d").count("M")

    def open_table(self):
        self.one("#telemetry details:not(.fold) > summary").click()
        wait_until(lambda: self.all("#telemetry table"), "the table is there")

    def notes(self):
        return self.one("#telemetry .charts-text").text


# -- by the product, end to end --------------------------------------------------------------------------------------

IDLE, CAPPED, LOST, AGAIN = 12, 24, 32, 48


class Gpu(FakeNvml):
    """Idle at first, then held down by its power cap, then its power cannot be read, then it is well used."""

    def __init__(self):
        super().__init__(FakeBoard(name="NVIDIA H200 <b>"))
        self.taken, self.sampled = 0, threading.Semaphore(0)

    def clock_ns(self):
        """Samples are 20 ms apart, also where the thread that takes them is held up: that would be a gap."""
        return 20_000_000 * self.taken

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802  (NVML's name; the first that a sample asks)
        board, self.taken = self.boards[0], self.taken + 1
        board.utilization = 4 if self.taken <= IDLE else 97
        board.memory_used, board.milliwatts = 100 * GIB, 120_000 if self.taken <= IDLE else 690_000
        board.reasons = 0x4 if IDLE < self.taken <= CAPPED else 0
        board.sm_mhz = 1700 if IDLE < self.taken <= CAPPED else 1980
        lost = CAPPED < self.taken <= LOST
        self.fails = {"nvmlDeviceGetPowerUsage": GPU_IS_LOST} if lost else {}
        return super().nvmlDeviceGetUtilizationRates(handle)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802  (NVML's name; the last that a sample asks)
        handle.millijoules += 2000
        self.sampled.release()
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


class Waiting(Classifier):
    """Each of its steps takes as long as two samples."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def training_step(self, batch):
        while self.gpu.sampled.acquire(blocking=False):  # those of before
            pass
        for _ in range(2):
            assert self.gpu.sampled.acquire(timeout=HANGS_S)
        return super().training_step(batch)


@pytest.fixture
def report(make_trainer, monkeypatch, tmp_path):
    """The page and the summary that a fit on such a GPU leaves."""
    gpu = Gpu()

    def start(rows, device, period_s):
        rows._telemetry = RunTelemetry(
            lambda: GpuReader(gpu, find_device(gpu, gpu.boards[0].uuid), pid=1), AllocatorReading, period_s=period_s,
            clock_ns=gpu.clock_ns,
        )  # fmt: skip
        gpu.nvmlInit()
        rows._telemetry.start()

    monkeypatch.setattr(FitLog, "_start_telemetry", start)
    callbacks = (
        ForgeProfilerCallback(start_step=3, end_step=5, trace_dir=tmp_path / "traces"),
        ThroughputCallback(warmup_steps=2, telemetry_period_s=0.02),
    )
    make_trainer(*callbacks).fit(Waiting(gpu), loader(2 * AGAIN))
    [page] = (tmp_path / "traces").glob("*/report.html")
    run = json.loads(page.with_name("summary.json").read_text(encoding="utf-8"))["run"]
    return page, run["machine"]["telemetry"]["series"], run["ledger"]


def part_of_axis(ledger, series, second):
    """Where a second of the telemetry, which begins with training, lies on the axis of the run."""
    # the run of a process that had another fit before begins with the fit
    fit_s = max((span["end_s"] for span in ledger["spans"] if span["part"] in BEFORE_FIT), default=0.0)
    training_s = next(span["start_s"] for span in ledger["spans"] if span["part"] == "steps") - fit_s
    return (training_s + second) / max(ledger["wall_s"] - fit_s, training_s + series["seconds"][-1])


@pytest.mark.slow
def test_a_fit_leaves_a_page_that_draws_what_the_sensors_said(report, browser):
    path, series, ledger = report
    page = TelemetryPage.of_file(browser, path)
    on_axis = partial(part_of_axis, ledger, series)
    assert page.texts("#telemetry h2") == ["GPU over the run"]
    assert page.texts("#telemetry .facts dd")[0] == "NVIDIA H200 <b>"
    assert page.titles() == ["Utilization", "Memory", "Power", "Clock", "Temperature"], "no video engine was used"
    ranges = page.readings()
    assert ranges["Utilization"] == {"GPU": "4 to 97", "memory controller": "0"}
    assert ranges["Power"] == {"board": "120 to 690"}
    assert ranges["Clock"] == {"SM": "1,700 to 1,980", "memory": "3,201"}
    assert page.texts("#telemetry .limit-name") == ["total 141.0 GiB", "limit 700 W"]

    powers, throttled = series["values"]["power_w"], series["throttled_by_pct"]["power cap"]
    assert (powers[0], powers[-1], None in powers) == (120, 690, True)
    capped = [index for index, pct in enumerate(throttled) if pct == 100]
    lost = [index for index, watts in enumerate(powers) if watts is None]
    for index in (capped[len(capped) // 2], lost[len(lost) // 2], len(powers) - 1):
        page.hover_part(on_axis(series["seconds"][index]))
        read = page.readings()
        assert read["Power"]["board"] == (NOTHING if powers[index] is None else "690")
        assert read[""]["throttled: power cap"] == ("yes" if throttled[index] else "no")
        assert ("throttled: power cap" in page.one("#telemetry .moment").text) == (throttled[index] == 100)
    assert page.segments(chart=2) == page.segments(chart=0) + 1, "the line of power has a gap"

    [(begin, end)] = page.shades("throttled")
    assert begin < on_axis(series["seconds"][throttled.index(100.0)]) < end
    assert 0 < end - begin < 1
    left_out = page.shades("left-out")
    assert left_out[0][0] == pytest.approx(on_axis(0), abs=0.05), "the warm-up"
    assert "Grey: not in the means" in page.notes()
    assert "A line is broken where there was no reading." in page.notes()
    assert page.complaints() == []


# -- what there is to see --------------------------------------------------------------------------------------------


def busy(count=60, **changes):
    return [{**BUSY, **{name: change(number) for name, change in changes.items()}} for number in range(count)]


def test_without_telemetry_there_is_no_section(show):
    assert show(None).all("#telemetry") == []


def test_pointing_reads_all_charts_at_one_time_and_leaving_ends_it(show):
    page = show(telemetry(busy(50, power_w=lambda number: 100.0 + 10 * number)))
    page.hover_part(0.5)
    assert page.one("#telemetry .moment").text == "5.0 s"
    assert page.readings() == {
        "Utilization": {"GPU": "96", "memory controller": "51"},
        "Memory": {"all in use": "80.0", "this process": "78.0", "tensors": "60.0"},
        "Power": {"board": "340"},
        "Clock": {"SM": "1,980", "memory": "3,201"},
        "Temperature": {"GPU": "61"},
    }
    assert len([dot for dot in page.all("#telemetry .dot") if dot.is_displayed()]) == 8
    ActionChains(page.browser).move_to_element(page.one("h1")).perform()
    assert page.readings()["Power"] == {"board": "100 to 590"}
    assert not page.one("#telemetry .cursor").is_displayed()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_what_is_said_of_a_moment_lies_on_no_label_of_the_axis(show, width):
    page = show(telemetry(busy(50, throttles=lambda number: ("power cap",))), width=width)
    for number in range(0, 50, 7):
        page.one("#telemetry .scrubber").send_keys(Keys.HOME + number * Keys.ARROW_RIGHT)
        moment, facts = page.one("#telemetry .moment").rect, page.one("#telemetry .facts").rect
        assert moment["y"] >= facts["y"] + facts["height"]
        ticks = [tick.rect for tick in page.all("#telemetry .tick") if tick.is_displayed()]
        assert len(ticks) > 2
        assert all(moment["y"] + moment["height"] <= tick["y"] for tick in ticks)


def test_the_keyboard_reads_point_by_point(show):
    page = show(telemetry(busy(50, power_w=lambda number: 100.0 + 10 * number)))
    scrubber = page.one("#telemetry .scrubber")
    for keys, expected in (
        (Keys.HOME, "100"),
        (Keys.ARROW_RIGHT * 3, "130"),
        (Keys.END, "590"),
        (Keys.ARROW_LEFT, "580"),
    ):
        scrubber.send_keys(keys)
        assert page.readings()["Power"] == {"board": expected}
    assert "9.8 s; Utilization, GPU: 96 %" in scrubber.get_attribute("aria-valuetext")
    assert "Power, board: 580 W" in scrubber.get_attribute("aria-valuetext")
    scrubber.send_keys(Keys.ESCAPE)
    assert page.readings()["Power"] == {"board": "100 to 590"}


def test_each_chart_is_told_in_words(show):
    page = show(telemetry(busy(50, power_w=lambda number: None if 20 <= number < 30 else 600.0 + number)))
    told = [chart.get_attribute("aria-label") for chart in page.all("#telemetry svg[role=img]")]
    assert told[0] == ("Utilization over 10.0 s. GPU: mean 96, constant, %; memory controller: mean 51, constant, %.")
    assert told[2] == "Power over 10.0 s. board: mean 625, 600 to 649 W, with gaps; limit 700 W."


def test_the_readings_are_a_table_too(show):
    page = show(telemetry(busy(50, power_w=lambda number: None if number == 1 else 600.0 + number)))
    assert page.all("#telemetry table") == []
    page.open_table()
    heads = page.texts("#telemetry thead th")
    assert heads[0] == "s"
    power = heads.index("power, board, W") + 1
    assert page.column("telemetry", 1)[:3] == ["0.2", "0.4", "0.6"]
    assert page.column("telemetry", power)[:3] == ["600", NOTHING, "602"]


def test_a_missing_reading_is_a_gap_and_so_is_a_stretch_without_samples(show):
    lost = [20, 21, 22]
    page = show(telemetry([{} if number in lost else BUSY for number in range(60)]))
    assert {page.segments(chart) for chart in range(5)} == {2}
    page.hover_part(21.5 / 60)
    assert set(page.readings()["Memory"].values()) == {NOTHING}
    assert not any(dot.is_displayed() for dot in page.all("#telemetry .dot"))
    seen = telemetry(busy(40))
    late = tuple(second if second < 4 else second + 30 for second in seen.series.seconds)
    stalled = show(replace(seen, series=replace(seen.series, seconds=late)))
    assert {stalled.segments(chart) for chart in range(5)} == {2}
    assert "A line is broken where there was no reading." in stalled.notes()


def test_a_reading_alone_between_gaps_is_seen(show):
    page = show(telemetry([BUSY, {}, BUSY, {}, BUSY]))
    [path] = page.all("#telemetry svg.chart")[3].find_elements(By.CSS_SELECTOR, "path.line")
    assert path.get_attribute("d").count("h0") == 3
    assert path.value_of_css_property("stroke-linecap") == "round"
    assert show(telemetry([BUSY])).titles() == ["Utilization", "Memory", "Power", "Clock", "Temperature"]


def test_throttling_is_shaded_in_all_charts_and_named_by_reason(show):
    def throttles(number):
        return {1: ("power cap",), 2: ("power cap", "temperature")}.get(number // 20, ())

    seen = telemetry(busy(80, throttles=throttles), counted=lambda number: number >= 10)
    page = show(seen)
    assert page.shades("throttled") == [
        (pytest.approx(0.256, abs=0.01), pytest.approx(0.756, abs=0.01)),
        (pytest.approx(0.506, abs=0.01), pytest.approx(0.756, abs=0.01)),
    ]
    assert page.shades("left-out") == [(pytest.approx(0.006, abs=0.01), pytest.approx(0.131, abs=0.01))]
    assert page.readings()[""] == {
        "throttled: power cap": "50.0 %", "throttled: temperature": "25.0 %", "not in the means": "12.5 %",
    }  # fmt: skip
    page.hover_part(0.6)
    assert page.one("#telemetry .moment").text.endswith("s · throttled: power cap · throttled: temperature")
    assert page.readings()[""] == {
        "throttled: power cap": "yes", "throttled: temperature": "yes", "not in the means": "no",
    }  # fmt: skip
    assert "Tinted: something held the clock down." in page.notes()


def test_whether_it_is_throttled_is_not_known_where_nothing_tells(show):
    page = show(telemetry([{**BUSY, "throttles": ("power cap",) if number < 5 else None} for number in range(10)]))
    page.hover_part(0.9)
    assert page.readings()[""]["throttled: power cap"] == NOTHING


def test_of_a_long_run_each_point_is_a_mean_with_its_spread(show):
    page = show(telemetry(busy(512 * 6, utilization_pct=lambda number: 100.0 if number % 2 else 20.0)))
    assert "Each point is the mean of 8 readings, over 1.6 s; the pale band" in page.notes()
    chart = page.all("#telemetry svg.chart")[0]
    assert len(chart.find_elements(By.CSS_SELECTOR, "path.spread.a")) == 1
    assert chart.find_elements(By.CSS_SELECTOR, "path.spread.b") == [], "the memory's utilization did not vary"
    page.hover_part(0.5)
    assert page.readings()["Utilization"] == {"GPU": "60 (20 to 100)", "memory controller": "51"}
    assert page.texts("#telemetry .tick")[-1] == "10 min"


def test_what_the_driver_does_not_tell_is_said_and_its_chart_left_out(show):
    silent = dict.fromkeys(("power_w", "memory_own_bytes", "temperature_c", "throttles"))
    page = show(telemetry([{**BUSY, **silent}] * 20))
    assert page.titles() == ["Utilization", "Memory", "Clock"]
    assert page.readings()["Memory"] == {"all in use": "80.0", "tensors": "60.0"}
    assert "Not reported by the driver: power, temperature." in page.notes()
    assert "Throttled" not in page.texts("#telemetry .facts dt")
    nothing = show(TelemetrySummary(device="GPU", samples=3))
    assert nothing.titles() == []
    assert "Not reported by the driver: utilization, memory, power, clock, temperature." in nothing.notes()


def test_of_a_slice_it_is_said_what_is_the_whole_gpus(show):
    rates = dict.fromkeys(("utilization_pct", "memory_utilization_pct", "encoder_pct", "decoder_pct"))
    page = show(telemetry([{**BUSY, **rates}] * 20, device="NVIDIA H200 MIG 1g.18gb", is_mig=True))
    assert page.titles() == ["Memory", "Power", "Clock", "Temperature"]
    assert "Not reported by the driver: utilization." in page.notes()
    assert "slice of a GPU (MIG): power, temperature, clocks and throttling are the whole GPU's" in page.notes()


def test_of_several_ranks_it_is_said_which_one_it_is(show):
    assert "rank" not in show(telemetry(busy())).notes()
    assert "This is rank 0's GPU; that of the other rank is not read." in show(telemetry(busy()), world_size=2).notes()
    assert "those of the other 7 ranks are not read." in show(telemetry(busy()), world_size=8).notes()


def test_the_video_engines_show_where_they_were_used(show):
    page = show(telemetry(busy(decoder_pct=lambda number: 30.0 if number > 20 else 0.0)))
    assert page.titles()[:3] == ["Utilization", "Video", "Memory"]
    assert page.readings()["Video"] == {"encoder": "0", "decoder": "0 to 30"}


def test_a_limit_that_is_far_off_is_named_and_leaves_the_scale_to_the_line(show):
    little = {"memory_own_bytes": lambda _: GIB, "allocated_bytes": lambda _: GIB / 2}
    page = show(telemetry(busy(memory_used_bytes=lambda number: (2.0 + number / 60) * GIB, **little)))
    assert page.texts("#telemetry .chart-title")[1] == "Memory, GiB of 140.00"
    assert page.texts("#telemetry .limit-name") == ["limit 700 W"]
    assert page.readings()["Memory"] == {"all in use": "2.00 to 2.98", "this process": "1.00", "tensors": "0.50"}


def test_a_memory_clock_that_varies_is_drawn(show):
    page = show(telemetry(busy(memory_mhz=lambda number: 405.0 if number < 5 else 3201.0)))
    assert len(page.all("#telemetry svg.chart")[3].find_elements(By.CSS_SELECTOR, "path.line")) == 2
    steady = show(telemetry(busy()))
    assert len(steady.all("#telemetry svg.chart")[3].find_elements(By.CSS_SELECTOR, "path.line")) == 1


@pytest.mark.slow
def test_a_run_on_an_h200_tells_its_phases_apart(show):
    """A run of 52 s: at the power limit, validating from 14.2 to 21.9 s, slowed by its loader to 31.4 s."""
    run = msgspec.json.decode(H200_RUN.read_bytes(), type=RunEvidence)
    page = show(run.machine.telemetry)
    length = run.machine.telemetry.series.seconds[-1]
    facts = dict(zip(page.texts("#telemetry .facts dt"), page.texts("#telemetry .facts dd"), strict=True))
    assert facts == {
        "Device": "NVIDIA H200", "GPU utilized": "83.0 %", "Peak memory": "24.2 of 140 GiB",
        "Mean power": "603 of 700 W", "Energy": "7.38 J per sample", "Mean clock": "1,658 MHz",
        "Throttled": "100.0 % (power cap 100.0 %)",
    }  # fmt: skip

    def at(second):
        page.hover_part(second / length)
        read = page.readings()
        return (
            float(read["Power"]["board"]),
            float(read["Utilization"]["memory controller"]),
            read[""]["not in the means"],
        )

    training, validating, waiting = at(10), at(19), at(28)
    assert training == (pytest.approx(690, abs=15), pytest.approx(40, abs=8), "no")
    assert validating == (pytest.approx(690, abs=15), pytest.approx(80, abs=8), "yes")
    assert waiting[0] == pytest.approx(370, abs=60)
    assert [(round(begin * length), round(end * length)) for begin, end in page.shades("left-out")] == [
        (0, 3), (6, 7), (14, 22), (40, 48),
    ], "the warm-up, the recorded steps, validation twice"  # fmt: skip


def test_a_run_without_a_trace_has_it_too(browser, tmp_path):
    run = analysis_with(telemetry(busy())).run
    alone = Analysis(source="fit", verdict="x", verdict_text="X.", findings=(), run=run)
    page = TelemetryPage(browser, tmp_path, alone)
    assert page.titles() == ["Utilization", "Memory", "Power", "Clock", "Temperature"]
    assert page.complaints() == []


# -- whose text it is, and how it looks ------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shown"), [(HOSTILE, HOSTILE), ("x" * 3000, "x" * 199 + "…")], ids=["markup", "huge"])
def test_names_are_text_and_push_nothing_aside(show, text, shown):
    page = show(telemetry(busy(throttles=lambda number: (text,)), device=text), width=400)
    page.open_table()
    page.one("#telemetry .scrubber").send_keys(Keys.END)
    assert page.texts("#telemetry .facts dd")[0] == shown
    assert f"throttled: {shown}" in page.readings()[""]
    assert page.run("return typeof hacked") == "undefined"
    assert page.all("img, iframe, [onerror], [onmouseover]") == []
    assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [400, 400]


def test_a_narrow_page_has_its_charts_over_all_its_width(show):
    page = show(telemetry(busy(throttles=lambda number: ("power cap",))), width=400)
    section = page.one("#telemetry").rect
    for chart in page.all("#telemetry svg.chart"):
        assert chart.rect["width"] > 0.8 * section["width"]
        assert chart.rect["x"] + chart.rect["width"] <= section["x"] + section["width"]
    chart, over = page.all("#telemetry svg.chart")[0].rect, page.one("#telemetry .scrubber").rect
    assert (over["x"], over["width"]) == (pytest.approx(chart["x"], abs=1), pytest.approx(chart["width"], abs=1))
    page.one("#telemetry .scrubber").send_keys(Keys.END)
    assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [400, 400]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_text_has_contrast(show, scheme):
    seen = telemetry(busy(throttles=lambda number: ("power cap",)), counted=lambda number: number > 9)
    page = show(seen, world_size=2, scheme=scheme)
    page.open_table()
    assert page.faint_texts() == []


@pytest.mark.slow
def test_a_print_shows_the_charts_and_no_cursor(show):
    page = show(telemetry(busy()))
    page.one("#telemetry .scrubber").send_keys(Keys.END)
    assert page.one("#telemetry .cursor").is_displayed()
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not page.one("#telemetry .cursor").is_displayed()
        assert all(chart.is_displayed() for chart in page.all("#telemetry svg.chart"))
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})

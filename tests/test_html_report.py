"""The web page: what it holds, and how it looks and behaves in a real browser."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from lightning_forge_profiling.kernel_name import short_kernel_name
from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.page import report_page, write_reports
from lightning_forge_profiling.report.run_wording import compute_lines
from lightning_forge_profiling.schema import (
    Analysis,
    Communication,
    Distribution,
    Gpu,
    RunCompute,
    RunLedger,
    RunRegion,
    Share,
    Timeline,
)
from tests.browser import wait_until
from tests.evidence import made_evidence, with_figures
from tests.report_page import Page
from tests.sample_timeline import COPY, STEPS, lane, sample_timeline
from tests.samples import ADAM, ADD, ALLREDUCE, GEMM, NORM, sample_analysis

TRACES = Path(__file__).parent / "data" / "traces"
HOSTILE = '</script><script>hacked=1</script><img src=x onerror="hacked=1">"onmouseover="hacked=1"&lt;'
HIDES = "\x00\x1b[31m\u202egpj.exe\u2066 \u05e9\u05dc\u05d5\u05dd"
RUN = made_evidence(
    steps=512,
    on_device=True,
    step_ms=Distribution(mean=51.0, p50=50.4, min=49.9, max=80.2),
    regions={
        "data": RunRegion(device_ms=8.1, host_ms=9.4, p50_ms=7.9, p95_ms=12.25),
        "loss": RunRegion(device_ms=1.5, host_ms=0.2, p50_ms=1.4),
    },
    user_regions=("loss",),
    gpu_starved_pct=12.5,
    compute=(
        RunCompute(
            kind="mfu", tflops=400.0, dtype="bf16", device="H200 SXM", peak_tflops=989.5, peak_source="data sheet",
            pct_of_peak=40.4,
        ),
        RunCompute(
            kind="hfu", tflops=500.0, dtype="bf16", device="H200 SXM", peak_tflops=None, peak_source="unknown",
            pct_of_peak=None,
        ),
    ),
    ledger=RunLedger(
        wall_s=100.0,
        parts={"steps": 70.0, "callback/EMA.on_train_batch_end": 20.0, "checkpoint": 10.02, "sanity_check": 0.01},
        unexplained_s=-0.03,
        counts={"steps": 1, "callback/EMA.on_train_batch_end": 300, "checkpoint": 5, "sanity_check": 1},
    ),
)  # fmt: skip


def run_only():
    return Analysis(
        source="fit", verdict="nothing stands out", verdict_text="Nothing stands out.", findings=(), run=RUN
    )


def without_gpu():
    """What a trace from a CPU leaves: steps, operators, and no GPU activity."""
    [rank] = sample_analysis().ranks
    none = Communication(
        ms_per_step=0.0, exposed_ms_per_step=0.0, holds_up_ms_per_step=0.0, hidden_pct=0.0, exposed_pct=0.0
    )
    step_ms = rank.step_ms.mean
    idle = Gpu(busy_ms_per_step=0.0, busy_pct=0.0, idle_ms_per_step=step_ms, idle_pct=100.0, kernels_per_step=0.0)
    python = {"python": Share(ms_per_step=step_ms, pct=100.0)}
    warning = "rank0.trace.json.gz: no GPU work was recorded"
    rank = replace(
        rank, device="", gpu=idle, categories={}, kinds={}, idle=python, warnings=(warning,), comm=none,
        copies=(), memory=None, top_kernels=(), flops=None, flops_note="no GPU events in the trace",
    )  # fmt: skip
    return replace(run_only(), run=None, ranks=(rank,), warnings=(warning,))


def without_steps():
    analysis = sample_analysis()
    zero = Distribution(mean=0.0, p50=0.0, min=0.0, max=0.0)
    return replace(analysis, ranks=(replace(analysis.ranks[0], steps=0, step_ms=zero, per_step=()),), findings=())


def embellished(content, text):
    """The same plain data with `text` after every string that a trace could bring, keys of mappings included."""
    if isinstance(content, str):
        return (
            content
            if content in {"trace", "run", "step", "mfu", "hfu", "user", "library", "profiler", "lightning"}
            else content + text
        )
    if isinstance(content, list | tuple):
        return [embellished(each, text) for each in content]
    if isinstance(content, dict):
        return {key: embellished(each, text) for key, each in content.items()}
    return content


def with_names(result, text):
    plain = embellished(msgspec.to_builtins(result), text)
    for rank in plain.get("ranks", ()):
        for part in ("kinds", "idle", "categories"):
            rank[part] = {key + text: value for key, value in rank[part].items()}
    return msgspec.convert(plain, type(result))


def test_nothing_is_loaded_from_elsewhere():
    page = report_page(sample_analysis(2), [sample_timeline(0), sample_timeline(1)])

    svg = "http://www.w3.org/2000/svg"  # its name, which nothing is loaded by
    docs = {docs_url(finding.code) for finding in sample_analysis(2).findings}
    assert set(re.findall(r"https?://[\w./-]*", page)) == {"https://ui.perfetto.dev", svg, *docs}
    assert re.findall(r"<\w[^>]*\s(?:src|href)=\S*", page) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in page
    assert "unsafe" not in page


def test_three_steps_of_many_kernels_stay_small():
    empty = report_page(run_only(), [])
    full = report_page(sample_analysis(), [sample_timeline(kernels_per_step=6600)])

    assert len(empty.encode()) < 110_000
    assert len(full.encode()) < 1_500_000


def test_no_control_or_direction_character_is_in_the_file_and_no_name_without_end():
    page = report_page(with_names(sample_analysis(), HIDES), [with_names(sample_timeline(), "x" * 100_000)])

    assert "gpj.exe \u05e9\u05dc\u05d5\u05dd" in page
    for hidden in "\x00\x1b\u202e\u2066":
        assert hidden not in page
        assert f"\\u{ord(hidden):04x}" not in page
    assert len(page) < 300_000


@pytest.mark.parametrize("timelines", [(), (sample_timeline(),)], ids=["no timeline", "a timeline"])
def test_reports_that_are_written_again_keep_the_timelines(tmp_path, timelines):
    timelines = tuple(with_names(timeline, HOSTILE + "\u2028") for timeline in timelines)
    write_reports(sample_analysis(), timelines, tmp_path)

    page = write_reports(run_only(), None, tmp_path).html.read_text(encoding="utf-8")

    assert page == report_page(run_only(), timelines)


def test_a_page_of_something_else_is_not_replaced(tmp_path):
    other = tmp_path / "report.html"
    other.write_text("<!DOCTYPE html><title>Something else</title>", encoding="utf-8")

    with pytest.raises(ValueError, match="not a report"):
        write_reports(run_only(), None, tmp_path)
    assert other.read_text(encoding="utf-8").endswith("<title>Something else</title>")


@pytest.fixture
def page(show):
    return show(sample_analysis(), sample_timeline())


@pytest.mark.browser
class TestContent:
    @pytest.mark.smoke
    def test_the_verdict_comes_first_and_the_rest_in_order(self, page):
        assert page.texts("#verdict-code") == ["input-bound"]
        assert page.texts("h1") == ["the GPU waits 8.5 ms of each step for the data loader"]
        assert "num_workers=4" in page.one("#verdict .advice").text
        assert "NVIDIA H200" in page.one("#about .facts").text
        sections = [section.get_attribute("id") for section in page.all("section")]
        assert sections[:5] == ["verdict", "breakdown", "findings", "timeline", "steps"]
        assert {"kernels", "operators", "regions", "syncs", "host", "copies", "hints"} < set(sections)
        assert "Schema version 2" in page.one("footer").text
        assert page.run("return performance.getEntriesByType('resource').length") == 0

    def test_each_finding_has_its_evidence_with_units(self, page):
        [first, *_] = page.all(".finding")
        assert "idle in the data loader\n8.53 ms per step" in first.text
        assert "from the trace" in first.text

    def test_a_bar_shows_all_of_the_step(self, page):
        [bar] = page.all("#breakdown .bars .stack")
        widths = [segment.rect["width"] for segment in bar.find_elements(By.CSS_SELECTOR, ".segment")]
        assert sum(widths) == pytest.approx(bar.rect["width"], abs=1)
        assert widths[0] == pytest.approx(0.38 * bar.rect["width"], abs=1)  # matmul
        shares = page.texts("#breakdown tbody tr:has(.swatch) > :nth-child(2)")
        assert sum(float(text.removesuffix(" %")) for text in shares) == pytest.approx(100, abs=0.5)

    def test_the_base_name_of_a_kernel_stands_out(self, page):
        bold = dict(zip(page.texts("#kernels .name"), page.texts("#kernels .name b"), strict=True))
        assert bold[GEMM] == GEMM
        for name in (ADD, NORM, ADAM):
            label = short_kernel_name(name, 120)
            assert bold[label] == label.partition("<")[0]
        assert bold[COPY] == COPY

    def test_a_long_name_opens_in_full(self, page):
        row = next(each for each in page.all("#kernels tbody th") if "layer_norm" in each.text)
        toggle = row.find_element(By.CSS_SELECTOR, "button")
        toggle.click()
        assert toggle.get_attribute("aria-expanded") == "true"
        assert row.find_element(By.CSS_SELECTOR, ".name").get_property("textContent") == NORM

    def test_the_run_is_shown_beside_the_trace(self, browser, tmp_path):
        merged = replace(sample_analysis(), run=RUN, differences=("recorded steps are 12 % longer",))
        page = Page(browser, tmp_path, merged, [sample_timeline()])
        assert "recorded steps are 12 % longer" in page.one("#findings").text
        assert page.column("step", 1) == ["data", "step", "your loss"]
        assert page.column("step", 3) == ["8.10", "51.00", "1.50"]
        assert page.column("step", 4) == ["7.90", "50.40", "1.40"]
        assert page.column("step", 5) == ["12.25", "", ""]
        assert page.column("step", 6) == ["9.40", "", ""]
        parts = ["steps", "callback/EMA.on_train_batch_end", "checkpoint", "other parts", "unexplained"]
        assert page.column("course", 1)[:5] == parts
        assert page.column("course", 3)[:5] == ["70.000", "20.000", "10.020", "0.010", "-0.030"]
        run = " ".join(page.one("#about").text.split())
        assert "compute 400 TFLOP/s per device, MFU 40.4 % of 989.5 TFLOP/s (H200 SXM, bf16; data sheet)" in run
        assert "compute 500 TFLOP/s per device carried out, HFU unknown: unknown" in run

    def test_a_rate_reads_as_in_the_other_reports(self, show):
        known = RUN.machine.compute[0]
        unknown = replace(known, peak_tflops=None, pct_of_peak=None, peak_source="no peak is known for this CPU")
        cases = [
            RUN.machine.compute,
            (known, replace(known, kind="hfu", tflops=500.0, pct_of_peak=50.5)),
            (known, replace(known, kind="hfu", tflops=400.1)),
            (replace(known, tflops=0.0000583, pct_of_peak=140.0, peak_tflops=1979.0),),
            (replace(known, peak_source="data sheet, https://example.org/a.pdf (dense)", peak_tflops=0.5),),
            (unknown, replace(unknown, kind="hfu", tflops=0.058, note="convolutions of one model are not counted")),
            (replace(unknown, tflops=0.0),),
        ]
        for compute in cases:
            page = show(replace(run_only(), run=with_figures(RUN, compute=compute)))
            facts = [*zip(page.texts("#about .lines dt"), page.texts("#about .lines dd"), strict=True)]
            assert [value for name, value in facts if name == "compute"] == list(compute_lines(compute))
            assert not {"MFU", "HFU"} & {name for name, _ in facts}

    def test_a_small_rate_keeps_its_digits(self, browser, tmp_path):
        analysis = sample_analysis()
        [rank] = analysis.ranks
        flops = replace(rank.flops, per_step=12.2e6, matmul_tflops=0.000583, busy_tflops=0.0123, step_tflops=0.5)
        page = Page(browser, tmp_path, replace(analysis, ranks=(replace(rank, flops=flops),)))
        assert "0.000583 TFLOP/s in matrix products, 0.0123 while busy" in page.one("#host").text
        assert dict(zip(page.column("host", 1), page.column("host", 2), strict=True))["GFLOP"] == "0.0122"

    def test_it_is_said_once_which_steps_the_findings_are_over(self, browser, tmp_path):
        result = analyze(TRACES / "slow_optimizer")
        page = Page(browser, tmp_path, result.analysis, result.timelines)
        assert "8.77 ms step" in page.one("h1").text
        assert "2 of 3 recorded" in page.one("#about .facts").text
        assert "8.77 ms" in page.one("#about .facts").text
        assert page.one("#findings-note").text == f"Note: {result.analysis.findings_note}."
        assert page.one("body").text.count("all figures leave out step") == 1
        of_run = tuple(replace(finding, source="run") for finding in result.analysis.findings)
        page = Page(browser, tmp_path, replace(result.analysis, findings=of_run))
        assert "Note: " not in page.one("body").text

    def test_what_makes_shares_unreliable_stands_beside_the_verdict(self, browser, tmp_path):
        [first, *_] = sample_analysis().findings
        said, beside = (
            f"{first.code}: {first.title}. {first.remedy}",
            "All other shares include such waits and are unreliable.",
        )
        for text, expected in ((f"{said} {beside}", [beside]), (said, [])):
            page = Page(browser, tmp_path, replace(sample_analysis(), verdict_text=text))
            assert page.texts("#verdict-beside") == expected
            assert page.texts("h1") == [first.title]

    def test_the_footer_has_the_commands_for_the_trace(self, page):
        assert page.texts("footer code") == [
            "forge-profiling view --perfetto PATH",
            "forge-profiling export PATH --for tensorboard --out DIR",
            "tensorboard --logdir DIR",
        ]

    @pytest.mark.parametrize("make", [run_only, without_gpu, without_steps])
    def test_what_is_missing_is_said(self, show, make):
        nothing = Timeline(rank=0, length_us=0.0, steps=(), names=(), kinds=(), lanes=())
        for timelines in ([], [nothing]):
            page = show(make(), *timelines)
            assert page.one("h1").is_displayed()
            assert page.one("footer").is_displayed()
            assert "NaN" not in page.one("body").text
            assert "undefined" not in page.one("body").text
        expected = {run_only: "Steps measured", without_gpu: "No GPU activity", without_steps: "Steps that count"}
        assert expected[make] in page.one("body").text
        if make is without_gpu:
            assert page.one("body").text.count("no GPU work was recorded") == 1
            assert "GPU was idle" not in page.one("body").text
            assert "GPU busy" not in page.one("body").text

    def test_python_functions_are_as_wide_as_their_time_and_a_click_widens_one(self, browser, tmp_path):
        page = Page(browser, tmp_path, sample_analysis(), [sample_timeline()])
        whole = page.one(".flame").rect["width"]

        def widths():
            return {call.text: call.rect["width"] / whole for call in page.all(".call")}

        shares = {"run": 1, "training_step": 0.88, "log_losses": 0.8, "Tensor.item": 0.5, "on_train_batch_end": 0.04}
        assert widths() == pytest.approx(shares, abs=0.002)  # _training_step does little but call training_step
        lefts = {call.text: call.rect["x"] for call in page.all(".call")}
        assert lefts["on_train_batch_end"] - lefts["run"] == pytest.approx(0.9 * whole, abs=2), (
            "callees beside each other"
        )
        rows = [call.rect["y"] for call in page.all(".call")]
        assert len(set(rows)) == 4
        [losses] = [call for call in page.all(".call") if call.text == "log_losses"]
        title = losses.get_attribute("data-tip")
        assert title.startswith("log_losses (train.py:88): ")
        assert "80.0 %" in title

        losses.click()
        assert widths() == pytest.approx(
            {"run": 1, "training_step": 1, "log_losses": 1, "Tensor.item": 0.625}, abs=0.002
        )
        next(call for call in page.all(".call") if call.text == "log_losses").click()
        assert widths()["training_step"] == 1, "back to what called it"
        next(call for call in page.all(".call") if call.text == "run").click()
        assert widths() == pytest.approx(shares, abs=0.002)
        assert page.column("python", 1) == ["train.py:88 log_losses"]
        assert browser.get_log("browser") == []

    def test_training_on_a_cpu_has_its_step_by_region_and_no_empty_section(self, show):
        result = analyze(TRACES / "cpu_mlp")
        page = show(result.analysis, *result.timelines)
        assert page.texts("main h2") == ["Breakdown of the step", "Findings", "Step timeline", "Operators", "The trace"]
        shares = dict(zip(page.column("breakdown", 1), page.column("breakdown", 2), strict=True))
        assert shares["step"] == "100.0 %"
        assert shares["optimizer \u2191 slow-optimizer"] == "36.8 %"
        assert "intra-op threads: 1; usable cores: 2" in page.one("#breakdown").text
        assert page.column("operators", 1)[0] == "aten::mm"
        assert page.texts("#operators thead th")[:3] == ["operator", "calls", "self host"], "no column of zeros"

    def test_steps_and_shares_say_what_they_count(self, browser, tmp_path):
        result = analyze(TRACES / "slow_rank_gpu")
        page = Page(browser, tmp_path, result.analysis, result.timelines)
        assert page.texts("#steps .barlabel") == ["Step 12 (not counted)", "Step 13", "Step 14"]
        assert "46.2 % of the step, mean of the ranks\n\u00b7 rank 1" in page.one("#findings").text

    def test_kernels_that_begin_alike_show_what_they_differ_in(self, browser, tmp_path):
        analysis = sample_analysis()
        rank = analysis.ranks[0]
        names = [
            f"void cutlass::device_kernel<{'cute::Layout<' * 12}cute::C<{size}>{' >' * 12} >()" for size in (64, 128)
        ]
        kernels = tuple(replace(kernel, name=name) for name, kernel in zip(names, rank.top_kernels, strict=False))
        page = Page(browser, tmp_path, replace(analysis, ranks=(replace(rank, top_kernels=kernels),)), [])
        labels = [cell.splitlines()[0] for cell in page.column("kernels", 1)]
        assert ["64" in label for label in labels] == [True, False]
        assert ["128" in label for label in labels] == [False, True]
        page.one("#kernels tbody tr:first-child button").click()
        assert names[0] in page.column("kernels", 1)[0]
        page.one("#kernels tbody tr:first-child button").click()
        assert names[0] not in page.column("kernels", 1)[0]


@pytest.mark.browser
class TestFolds:
    """The first screen has the verdict, what to change and where the step goes; the rest unfolds."""

    @pytest.fixture
    def page(self, show):
        return show(sample_analysis(), sample_timeline(), unfolded=False)

    def test_the_rest_is_folded(self, page):
        shown = [
            each.get_attribute("id") for each in page.all("section") if not each.find_elements("css selector", ".fold")
        ]
        assert shown == ["verdict", "breakdown"]
        assert not page.one("canvas").is_displayed()
        assert "input-bound 16.0 %" in page.one("#findings summary").text
        for width, most in ((1280, 1800), (390, 2600)):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
            page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            assert page.run("return document.documentElement.scrollHeight") < most

    def test_a_link_unfolds_what_it_leads_to(self, page):
        page.one("#findings summary").click()
        page.all(".finding .evidence a")[0].click()
        [place] = page.all(":target")
        assert place.is_displayed()
        page.browser.get(page.browser.current_url.partition("#")[0] + "#kernels")
        page.browser.refresh()
        assert page.one("#kernels table").is_displayed()

    def test_a_print_unfolds_all(self, page):
        page.run("window.dispatchEvent(new Event('beforeprint'))")
        assert page.one("#kernels table").is_displayed()
        page.run("window.dispatchEvent(new Event('afterprint'))")
        assert not page.one("#kernels table").is_displayed()

    def test_evidence_says_what_it_means(self, show):
        result = analyze(TRACES / "input_bound")
        page = show(result.analysis, *result.timelines)
        labels = [label.text for label in page.all(".finding:first-of-type dt")]
        assert len(labels) == len(set(labels))
        told = page.all(".finding [data-tip]")
        assert told
        page.run("arguments[0].focus()", told[0])
        assert [tip.text for tip in page.all("body > .tip")] == [told[0].get_attribute("data-tip")]


@pytest.mark.browser
class TestTables:
    def test_a_click_on_a_header_sorts_and_another_turns_it_round(self, page):
        calls = page.one("#kernels thead th:nth-child(3) button")
        before = page.column("kernels", 1)
        calls.click()
        figures = [int(text) for text in page.column("kernels", 3)]
        assert figures == sorted(figures, reverse=True)
        assert page.column("kernels", 1) != before
        assert page.texts("#kernels th[aria-sort=descending]") == ["calls per step"]
        calls.click()
        assert [int(text) for text in page.column("kernels", 3)] == sorted(figures)
        assert page.texts("#kernels th[aria-sort=ascending]") == ["calls per step"]
        page.one("#kernels thead th:nth-child(1) button").send_keys(Keys.ENTER)
        assert page.texts("#kernels .name") == sorted(page.texts("#kernels .name"), key=str.lower)

    def test_a_search_leaves_what_matches_by_name_or_kind(self, page):
        search = page.one("#kernels input")
        search.send_keys("LAYER_norm")
        assert page.texts("#kernels .name") == [short_kernel_name(NORM, 120)]
        search.clear()
        search.send_keys("matmul")
        assert page.texts("#kernels .name") == [GEMM]
        search.clear()
        search.send_keys("no such kernel")
        assert page.column("kernels", 1) == ["Nothing matches."]

    def test_the_rest_of_a_long_table_shows_on_demand(self, browser, tmp_path):
        analysis = sample_analysis()
        kernels = [replace(analysis.ranks[0].top_kernels[0], name=f"kernel_{n}") for n in range(40)]
        rank = replace(analysis.ranks[0], top_kernels=tuple(kernels))
        page = Page(browser, tmp_path, replace(analysis, ranks=(rank,)))
        assert len(page.all("#kernels tbody tr")) == 15
        page.one("#kernels .more").click()
        assert len(page.all("#kernels tbody tr")) == 40

    def test_choosing_a_rank_changes_the_details(self, show):
        page = show(sample_analysis(3), *(sample_timeline(rank) for rank in range(3)))
        assert len(page.all("#breakdown .bars .stack")) == 3
        total = page.column("kernels", 4)[0]
        Select(page.one("select[aria-label='Rank of the details']")).select_by_value("2")
        assert page.column("kernels", 4)[0] != total

    def test_of_many_ranks_it_says_which_are_shown(self, show):
        analysis = replace(
            sample_analysis(3), all_ranks=1000, spread={"step": Distribution(mean=50.2, p50=50.1, min=47.9, max=55.04)}
        )
        page = show(analysis, *(sample_timeline(rank) for rank in range(3)))
        [note] = page.texts("#ranks-note")
        assert note.startswith("3 of 1,000 ranks are shown: rank 0, ")
        assert "Over all ranks a step takes 47.9 ms to 55.0 ms (median 50.1 ms); shares" in note
        assert "1,000" in page.texts("#about dl")[0]
        assert len(page.all("#breakdown .bars .stack")) == 3

    def test_idle_time_comes_before_the_kernels_where_it_is_the_larger_share(self, show):
        for case, first in (("input_bound", "idle"), ("compute_bound", "kernels")):
            result = analyze(TRACES / case)
            page = show(result.analysis, *result.timelines)
            sections = [section.get_attribute("id") for section in page.all("section")]
            assert min({"idle", "kernels"} & set(sections), key=sections.index) == first
        result = analyze(TRACES / "input_bound")
        page = show(result.analysis, *result.timelines)
        assert "in the data loader \u2191 input-bound" in page.column("breakdown", 1)
        longest = result.analysis.ranks[0].idle_parts[0]
        assert page.column("idle", 1)[0].startswith(longest.activity)
        assert page.column("idle", 3)[0] == f"{longest.ms_per_step:.3f}"


@pytest.mark.browser
class TestTimeline:
    WHOLE = (0.0, STEPS[-1][2])

    def test_the_buttons_zoom_and_reset(self, page):
        assert page.view() == self.WHOLE
        page.one("[data-zoom=in]").click()
        start, end = page.view()
        assert end - start == pytest.approx(self.WHOLE[1] / 2)
        page.one("[data-zoom=out]").click()
        assert page.view() == pytest.approx(self.WHOLE)
        page.one("[data-step='6']").click()
        assert page.view() == (STEPS[1][1], STEPS[1][2])
        page.one("[data-zoom=reset]").click()
        assert page.view() == self.WHOLE

    def test_the_wheel_zooms_around_the_pointer(self, page):
        page.run("document.querySelector('canvas').scrollIntoView()")
        before = page.run("return scrollY")
        page.wheel(-300)
        start, end = wait_until(lambda: page.view() != self.WHOLE and page.view(), "the wheel zooms")
        assert (start + end) / 2 == pytest.approx(self.WHOLE[1] / 2, rel=0.01)
        assert page.run("return scrollY") == before

    def test_the_wheel_scrolls_the_page_where_there_is_nothing_to_zoom_out_of(self, page):
        page.wheel(200)
        wait_until(lambda: page.run("return scrollY") > 0, "the page scrolls")
        assert page.view() == self.WHOLE

    def test_the_keyboard_zooms_pans_and_resets(self, page):
        canvas = page.one("canvas")
        canvas.send_keys("++")
        start, end = page.view()
        assert end - start == pytest.approx(self.WHOLE[1] / 4)
        canvas.send_keys(Keys.ARROW_RIGHT)
        assert page.view()[0] > start
        canvas.send_keys(Keys.ARROW_LEFT * 50)
        assert page.view()[0] == 0
        canvas.send_keys("0")
        assert page.view() == self.WHOLE

    def test_dragging_pans(self, page):
        page.one("[data-zoom=in]").click()
        start, end = page.view()
        ActionChains(page.browser).drag_and_drop_by_offset(page.one("canvas"), -100, 0).perform()
        moved = page.view()
        assert moved[0] > start
        assert moved[1] - moved[0] == pytest.approx(end - start)

    def test_a_step_is_as_long_as_in_the_summary_and_the_rest_is_between_steps(self, browser, tmp_path):
        """Before two of these steps there is a validation and a checkpoint, which are in their windows."""
        result = analyze(TRACES / "validation_inside")
        page = Page(browser, tmp_path, result.analysis, result.timelines)
        own = {step.number: f"step {step.number}  {step.ms:.3f} ms" for step in result.analysis.ranks[0].per_step}
        assert own[12] == "step 12  6.710 ms"
        labels = page.labels_after("[data-zoom=reset]")
        assert labels == [f"{own[12]} + 242.831 ms between steps", f"{own[14]} + 238.719 ms between steps"]
        assert "Striped: validation or checkpoints between steps" in page.one("#timeline-text").text
        for number, label in own.items():
            labels = page.labels_after(f"[data-step='{number}']")
            assert next(each for each in labels if each.startswith(f"step {number} ")).startswith(label)
            start, end = page.view()
            assert end - start < 7000, "the step is shown, not what lies before it"

    @pytest.mark.slow
    def test_a_label_that_does_not_fit_loses_its_time_not_some_of_its_digits(self, browser, tmp_path):
        timeline = sample_timeline()
        for width in range(390, 800, 30):
            page = Page(browser, tmp_path, sample_analysis(), [timeline], width=width)
            for label, (number, begin, end) in zip(page.labels_after("[data-zoom=reset]"), STEPS, strict=True):
                assert label in {f"step {number}", f"step {number}  {(end - begin) / 1000:.3f} ms"}
        assert "Striped" not in page.one("#timeline-text").text

    def test_ranks_are_stacked_and_a_step_begins_on_all_at_once(self, show):
        late = replace(sample_timeline(1), steps=tuple((n, a + 7000.0, b + 7000.0) for n, a, b in STEPS))
        later = [replace(each, start_us=tuple(us + 7000.0 for us in each.start_us)) for each in late.lanes]
        late = replace(late, lanes=(*reversed(later),), length_us=late.length_us + 7000)
        page = show(sample_analysis(2), sample_timeline(0), late)
        names = ["host: regions", "stream 7", "stream 17", "communication"]
        assert page.texts(".lane") == ["Rank 0", *names, "Rank 1", *names], "in the same order"
        tops = [label.rect["y"] for label in page.all(".lane")]
        assert tops == sorted(tops)
        _, begin, end = STEPS[1]
        for rank in (0, 1):
            page.hover("communication", 7000 + begin + 0.85 * (end - begin), rank=rank)
            assert (
                page.one(".tip-facts").text
                == f"comm \u00b7 7.725 ms \u00b7 at 98.200 ms \u00b7 rank {rank}, communication"
            )
        page.one("[data-step='6']").click()
        assert page.view() == (7000 + STEPS[1][1], 7000 + STEPS[1][2])
        assert "drawn as if step 6 began on all at once" in page.one("#timeline-text").text

    def test_of_many_ranks_those_beside_the_chosen_one_are_drawn(self, show):
        page = show(sample_analysis(20), *(sample_timeline(rank) for rank in range(20)))
        assert [text for text in page.texts(".lane") if text.startswith("Rank")] == [f"Rank {n}" for n in range(8)]
        Select(page.one("select[aria-label='Rank of the details']")).select_by_value("17")
        assert [text for text in page.texts(".lane") if text.startswith("Rank")] == [f"Rank {n}" for n in range(16, 20)]
        assert "Ranks 16 to 19 of 20" in page.one("#timeline-text").text

    def test_regions_have_colours_that_no_kind_of_work_has(self, browser, tmp_path):
        def colours(selector):
            script = (
                "return [...document.querySelectorAll(arguments[0])].map((e) => getComputedStyle(e).backgroundColor)"
            )
            return page.run(script, selector)

        result = analyze(TRACES / "cpu_mlp")
        page = Page(browser, tmp_path, result.analysis, result.timelines)
        regions = colours("#breakdown tbody .swatch")
        assert len(set(regions)) == len(regions) == 6
        assert set(colours(".legend .swatch")[:5]) < set(regions)
        page = Page(browser, tmp_path, sample_analysis(), [sample_timeline()])
        assert not set(regions) & set(colours("#breakdown tbody .swatch"))

    def test_pointing_at_a_span_shows_name_kind_duration_and_start(self, page):
        _, begin, end = STEPS[1]
        page.hover("communication", begin + 0.85 * (end - begin))
        assert page.one(".tip-name").text == ALLREDUCE
        assert page.one(".tip-facts").text == "comm · 7.725 ms · at 91.200 ms · communication"
        page.hover("communication", begin + 0.5 * (end - begin))
        assert not page.one(".plot .tip").is_displayed()

    def test_nested_regions_have_rows_of_their_own(self, page):
        page.one("[data-step='5']").click()
        _, y = page.place("host: regions", 0)
        x, _ = page.place("host: regions", 0.25 * 50_000)
        for row, name in ((-8, "forward"), (8, "attention block")):
            ActionChains(page.browser).move_to_element_with_offset(page.one("canvas"), x, y + row).perform()
            assert page.one(".tip-name").text == name

    def test_a_tap_tells_and_two_fingers_zoom(self, show, browser):
        page = show(sample_analysis(), sample_timeline(), width=390)
        canvas = page.one("canvas")
        page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
        box = page.run("return arguments[0].getBoundingClientRect().toJSON()", canvas)

        def touch(kind, *places):
            points = [{"x": box["x"] + x, "y": box["y"] + y, "id": finger} for finger, (x, y) in enumerate(places, 1)]
            browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        lane_end = page.one(".lane:last-child").rect
        middle = lane_end["y"] - canvas.rect["y"] + lane_end["height"] + 10
        at = (0.85 * STEPS[0][2] / self.WHOLE[1] * box["width"], middle)
        touch("touchStart", at)
        touch("touchEnd")
        assert page.one(".tip-name").text == ALLREDUCE
        touch("touchStart", (100, 60))
        touch("touchStart", (100, 60), (200, 60))
        touch("touchMove", (50, 60), (250, 60))
        touch("touchEnd")
        start, end = page.view()
        assert end - start == pytest.approx(self.WHOLE[1] / 2, rel=0.1)

    def test_a_row_of_tiny_kernels_looks_as_busy_as_it_is(self, browser, tmp_path):
        def busy(share):
            return lane(f"{share} %", "stream", [(10.0 * each, share / 10, 0, 0) for each in range(5_000)])

        nearly_empty = lane("0 %", "stream", [(49_990.0, 10.0, 0, 0)])
        timeline = Timeline(
            rank=0,
            length_us=50_000.0,
            steps=(),
            names=(GEMM,),
            kinds=("matmul",),
            lanes=(nearly_empty, busy(10), busy(60), busy(100)),
        )
        page = Page(browser, tmp_path, sample_analysis(), [timeline])
        wait_until(lambda: page.run("return document.querySelector('canvas').width > 300"), "it is drawn")

        def average(lane_name):
            _, y = page.place(lane_name, 0)
            red = page.pixels(round(y + page.one("canvas").rect["height"] / 2))[::4]
            return sum(red) / len(red)

        empty, little, much, full = (average(f"{share} %") for share in (0, 10, 60, 100))
        assert empty > little > much > full
        assert (empty - much) / (empty - full) == pytest.approx(0.6, abs=0.25)


@pytest.mark.browser
class TestUntrustedNames:
    def test_markup_in_any_name_is_text_and_runs_nothing(self, show):
        analysis = with_names(replace(sample_analysis(2), run=RUN), HOSTILE)
        page = show(analysis, *(with_names(sample_timeline(rank), HOSTILE) for rank in range(2)))
        for more in page.all("button.link"):
            more.click()
        page.hover("communication" + HOSTILE, 0.85 * 50_000, rank=1)
        assert page.one(".tip-name").text == ALLREDUCE + HOSTILE
        assert page.texts("#verdict-code") == ["input-bound" + HOSTILE]
        assert page.one("#kernels").text.count(HOSTILE) >= 16
        assert page.run("return typeof hacked") == "undefined"
        assert len(page.all("script")) == 4
        assert page.all("img, iframe, [onerror], [onmouseover]") == []

    def test_control_and_direction_characters_are_not_shown(self, browser, tmp_path):
        page = Page(browser, tmp_path, with_names(sample_analysis(), HIDES), [with_names(sample_timeline(), HIDES)])
        body = page.texts("body > #page")[0]
        assert "gpj.exe \u05e9\u05dc\u05d5\u05dd" in body
        assert not set("\x00\x1b\u202e\u2066") & set(body)

    def test_a_script_that_got_in_would_not_run(self, page):
        page.run("const made = document.createElement('script'); made.text = 'hacked = 1'; document.body.append(made)")
        page.run("document.body.setAttribute('onclick', 'hacked = 1'); document.body.click()")
        assert page.run("return typeof hacked") == "undefined"
        assert "Content Security Policy" in str(page.complaints())


@pytest.mark.browser
class TestLooks:
    @pytest.mark.parametrize("text", ["", "x" * 3000, HOSTILE], ids=["plain", "huge names", "hostile names"])
    def test_a_phone_scrolls_nothing_sideways_but_tables(self, show, text):
        analysis = with_names(replace(sample_analysis(8), run=RUN), text)
        page = show(analysis, with_names(sample_timeline(), text), width=390)
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        assert page.one("#kernels .scroll").rect["width"] < 390

    def test_on_a_phone_what_matters_of_a_table_fits_and_the_rest_fades_out(self, browser, tmp_path):
        for ranks in (1, 2):
            analysis = replace(sample_analysis(ranks), run=RUN)
            page = Page(browser, tmp_path, analysis, [sample_timeline(rank) for rank in range(ranks)], width=400)
            tables = page.tables()
            assert len(tables) >= 7
            assert tables["Parts of the step"]["cut"] == []
            assert tables["The step by region"]["cut"] == []
            assert tables["Calls that wait for the GPU"]["cut"] == []
            for label, column in (("Top kernels", 3), ("Operators", 3), ("Regions", 3), ("Copies", 4)):
                assert not tables[label]["cut"] or min(tables[label]["cut"]) > column, label
            for label, table in tables.items():
                assert table["fades"] == table["noted"] == bool(table["cut"]), label

    def test_a_table_fades_out_where_it_goes_on(self, show):
        for width in (320, 400):
            page = show(sample_analysis(8), sample_timeline(), width=width)
            scroller = page.one("#breakdown .scroll[aria-label=Ranks]")

            def ends(scroller=scroller):
                return [name in scroller.get_attribute("class").split() for name in ("on-left", "on-right")]

            assert ends() == [False, True]
            for left, expected in ((20, [True, True]), (10_000, [True, False]), (0, [False, True])):
                page.run("arguments[0].scrollLeft = arguments[1]", scroller, left)
                wait_until(lambda ends=ends, expected=expected: ends() == expected, f"it fades {expected}")

    def test_colours_follow_the_system_and_the_button(self, page):
        def background():
            return page.one("#verdict").value_of_css_property("background-color")

        def pixel():
            return page.pixels(60)[8:12]

        light = background()
        light_pixel = wait_until(lambda: any(pixel()) and pixel(), "the timeline is drawn")
        page.prefer("dark")
        assert background() != light
        wait_until(lambda: pixel() != light_pixel, "the timeline is drawn in dark colours")
        page.one("#theme").click()
        assert background() == light
        wait_until(lambda: pixel() == light_pixel, "the timeline is drawn in light colours")

    @pytest.mark.slow
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_has_contrast(self, browser, tmp_path, scheme):
        analysis = replace(sample_analysis(2), run=RUN, differences=("the trace is slower",))
        page = Page(browser, tmp_path, analysis, [sample_timeline(0), sample_timeline(1)], scheme=scheme)
        assert page.faint_texts() == []

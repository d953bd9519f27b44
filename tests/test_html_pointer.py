"""The web page under a pointer, a finger and the keys, on a phone; its links from findings to what shows them."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from lightning_forge_profiling.names import FINDING_PAGES, docs_url
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.report.page import asset
from lightning_forge_profiling.report.run_page import run_page
from lightning_forge_profiling.schema import Finding
from tests.record_builder import MadeRun
from tests.sample_timeline import STEPS, sample_timeline
from tests.samples import ALLREDUCE, sample_analysis
from tests.test_html_run import analysis as of_run
from tests.test_run_page import LONG_AGO, page_of, with_window

DATA = Path(__file__).parent / "data"
pytestmark = pytest.mark.browser


def shown_tips(page):
    return [tip.text for tip in page.all(".tip") if tip.is_displayed()]


def point_at(page, element, x=0.5):
    """Move the mouse over a place of an element, in parts of its width."""
    page.run("arguments[0].scrollIntoView({block: 'center'})", element)
    across = round((x - 0.5) * element.rect["width"])
    ActionChains(page.browser).move_to_element_with_offset(element, across, 0).perform()


# --- a phone ---------------------------------------------------------------------------------------------------------


def run_and_window(folder, ranks=1, **run):
    record, _, _ = with_window(folder, "finished", sample_analysis(ranks))
    for rank, lines in enumerate(
        MadeRun(began=LONG_AGO, outcome="finished", ranks=ranks, **run).write(folder / "other").iterdir()
    ):
        if rank:
            lines.rename(record / lines.name)
    return run_page(read_run(record), LONG_AGO + 1000)


PAGES = {
    "a run and its window": run_and_window,
    "two ranks": lambda folder: run_and_window(folder, ranks=2, late=1),
    "a run without a window": lambda folder: page_of(MadeRun(began=LONG_AGO, outcome="finished"), folder),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_on_a_phone_nothing_is_cut_or_needs_scrolling_sideways(show, tmp_path, name):
    html = PAGES[name](tmp_path)
    for width in (400, 320):
        page = show(html, width=width)
        assert page.run("return document.scrollingElement.scrollWidth <= innerWidth")
        assert page.cut_texts() == []
        assert [
            one for one in page.all("#verdict .scroll") if page.run("return arguments[0].scrollWidth", one) > width
        ] == []


def test_of_a_run_the_lanes_fit_too(show):
    for width in (400, 320, 1280):
        page = show(of_run(), width=width)
        assert page.run("return document.scrollingElement.scrollWidth <= innerWidth")
        assert page.cut_texts() == []


# --- values at the pointer -------------------------------------------------------------------------------------------


def test_each_bar_says_what_is_under_the_pointer(show, tmp_path):
    page = show(run_and_window(tmp_path))
    for bars in ("#step", "#course", "#breakdown .bars", "#steps"):
        bar = page.all(f"{bars} .stack")[0]
        segment = max(bar.find_elements("css selector", ".segment"), key=lambda each: each.rect["width"])
        point_at(page, segment)
        [tip] = shown_tips(page)
        name, _, values = tip.partition(": ")
        assert segment.text in {name, name.removeprefix("idle: ")}
        assert " %" in values
        assert " ms" in values or " s," in values
    point_at(page, page.one("h1"))
    assert shown_tips(page) == []


def test_the_keys_go_through_a_bar_and_a_finger_tells_too(show):
    page = show(of_run(), width=400)
    [bar] = page.all("#course .stack")
    first = ["steps: 55.4 s, 50.4 %"]
    page.run("arguments[0].scrollIntoView({block: 'center'})", bar)
    box = page.run("const { x, y } = arguments[0].getBoundingClientRect(); return { x, y }", bar)
    touch = {"x": box["x"] + 5, "y": box["y"] + 5}
    page.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [touch]})
    page.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert shown_tips(page) == first
    box = page.run(
        "const { left, right } = document.querySelector('body > .tip').getBoundingClientRect(); return [left, right]"
    )
    assert 0 <= box[0] < box[1] <= 400
    bar.send_keys(Keys.ESCAPE, Keys.ARROW_RIGHT)
    assert shown_tips(page) == first
    bar.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert shown_tips(page) == first
    bar.send_keys(Keys.END)
    assert shown_tips(page) == ["unexplained: 4.00 s, 3.6 %"]
    bar.send_keys(Keys.ESCAPE)
    assert shown_tips(page) == []


def test_a_lane_says_what_is_near_the_pointer_and_the_keys_go_through_it(show):
    page = show(of_run())
    [lane] = page.all("#lane--validation .state-lane")
    point_at(page, lane, 0.5)
    assert shown_tips(page) == ["validation: 10.0 s, at 40.00 s, step 200"]
    begin = float(page.one("#lane--validation rect").get_attribute("x")) / 1000
    point_at(page, lane, begin - 5 / lane.rect["width"])
    assert shown_tips(page) == ["validation: 10.0 s, at 40.00 s, step 200"], "a few pixels beside it"
    point_at(page, lane, 0.2)
    assert shown_tips(page) == []
    lane.send_keys(Keys.HOME)
    assert shown_tips(page) == ["validation: 10.0 s, at 40.00 s, step 200"]


def test_python_functions_say_their_time_to_the_keys(show):
    page = show(sample_analysis(), sample_timeline())
    losses = next(call for call in page.all(".call") if call.text == "log_losses")
    page.run("arguments[0].focus()", losses)
    [tip] = shown_tips(page)
    assert tip.startswith("log_losses (train.py:88): ")
    losses.send_keys(Keys.ENTER)
    assert page.run("return document.activeElement.textContent") == "log_losses", "the one that is now as wide as all"
    assert shown_tips(page) == [tip]


def test_between_the_spans_of_a_stream_the_timeline_says_how_long_nothing_ran(show):
    timeline = sample_timeline()
    stream = next(lane for lane in timeline.lanes if lane.name == "stream 7")
    ends = [start + us for start, us in zip(stream.start_us, stream.duration_us, strict=True)]
    gap, begin = max((start - end, end) for start, end in zip(stream.start_us[1:], ends, strict=False))
    page = show(sample_analysis(), timeline)
    page.hover("stream 7", begin + gap / 2)
    [tip] = shown_tips(page)
    words = tip.split(" \u00b7 ")
    assert (words[0], words[3]) == ("nothing runs", "stream 7")
    assert [float(word.strip("at ms")) for word in words[1:3]] == pytest.approx([gap / 1000, begin / 1000], abs=0.001)


def test_the_keys_go_from_span_to_span_of_the_timeline(show):
    page = show(sample_analysis(), sample_timeline())
    canvas = page.one("canvas")
    canvas.send_keys(Keys.ARROW_UP)
    assert page.one(".tip-name").text == ALLREDUCE, "the first of the last lane"
    assert page.one(".tip-facts").text.endswith("communication")
    canvas.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT, Keys.NULL)
    assert "at 91.200 ms" in page.one(".tip-facts").text
    page.one(f"[data-step='{STEPS[0][0]}']").click()
    canvas.send_keys(Keys.ARROW_UP, Keys.SHIFT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.NULL)
    assert page.view()[0] > STEPS[0][1], "what is out of view comes into view"
    assert shown_tips(page)
    canvas.send_keys(Keys.ESCAPE)
    assert shown_tips(page) == []


def test_charts_over_the_run_say_how_long_an_event_took(show, tmp_path):
    page = show(page_of(MadeRun(began=LONG_AGO, outcome="finished"), tmp_path))
    scrubber = page.one("#over-time .scrubber")
    spoken = set()
    scrubber.send_keys(Keys.HOME)
    for _ in range(24):
        spoken |= {text for text in scrubber.get_attribute("aria-valuetext").split("; ") if "validation" in text}
        scrubber.send_keys(Keys.ARROW_RIGHT)
    assert spoken == {"validation: no", "validation: 4.00 s"}


# --- links -----------------------------------------------------------------------------------------------------------


def links(finding):
    return finding.find_elements("css selector", ".evidence a")


def test_codes_lead_to_their_page_of_the_docs(show):
    page = show(sample_analysis(), sample_timeline())
    codes = page.all("#verdict-code, .finding .badge")
    assert len(codes) > 1
    for code in codes:
        assert code.get_attribute("href") == docs_url(code.text) != ""
        assert code.get_attribute("rel") == "noopener noreferrer"
    odd = show(replace(sample_analysis(), findings=(replace(sample_analysis().findings[0], code="__proto__"),)))
    assert odd.one(".finding .badge").tag_name == "span"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["allocator_churn", "compute_bound", "cpu_mlp", "ddp_big_grads", "input_bound", "slow_rank_gpu", "sync_item"],
)
def test_each_finding_of_a_trace_leads_to_what_shows_it_and_that_back(show, case):
    result = analyze(DATA / "traces" / case)
    page = show(result.analysis, *result.timelines)
    for finding in page.all(".finding"):
        targets = [link.get_attribute("href").partition("#")[2] for link in links(finding)]
        assert targets
        for link, target in zip(links(finding), targets, strict=True):
            page.run("arguments[0].scrollIntoView({block: 'center'})", link)
            link.click()
            [there] = page.all(":target")
            assert there.get_attribute("id") == target
            assert page.run(
                "const { top, bottom } = arguments[0].getBoundingClientRect(); return top < innerHeight && bottom > 0",
                there,
            )
            if there.tag_name == "tr":
                back = next(
                    each
                    for each in there.find_elements("css selector", ".back")
                    if finding.get_attribute("id") in each.get_attribute("href")
                )
                back.click()
                assert page.all(":target") == [finding]


def test_only_codes_that_there_are_have_links():
    codes = re.findall(r'^  "([a-z-]+)": {', asset("links.js"), re.MULTILINE)
    assert len(codes) > 10
    assert {*codes} < {*FINDING_PAGES}


def test_a_finding_shows_its_spans_in_full_colour_until_all_are_asked_for(show):
    result = analyze(DATA / "traces" / "cpu_mlp")
    page = show(result.analysis, *result.timelines)
    settled = "requestAnimationFrame(() => requestAnimationFrame(done))"

    def drawn():
        page.run_until_done(settled)
        return page.run("return document.querySelector('canvas').toDataURL()")

    before = drawn()
    next(link for link in links(page.one("#finding-slow-optimizer")) if link.text == "Timeline").click()
    assert page.one("#emphasized").text.startswith("In full colour: spans of optimizer.")
    assert drawn() != before
    page.one("#emphasized .back").click()
    assert page.all(":target") == page.all("#finding-slow-optimizer")
    page.one("#emphasized button").click()
    assert not page.one("#emphasized").is_displayed()
    assert drawn() == before


def test_a_finding_outside_the_step_leads_to_its_row_and_lane(show):
    found = Finding(
        code="slow-callback", share_pct=9.0, rank=None, title="slow", evidence={"part": "callback/EMA.hook"},
        advice="do less", source="run",
    )  # fmt: skip
    page = show(replace(of_run(), findings=(found,), verdict="slow-callback"))
    row, lane = links(page.one(".finding"))
    for link, tag in ((row, "tr"), (lane, "div")):
        link.click()
        [there] = page.all(":target")
        assert there.tag_name == tag
        assert "callback/EMA.hook" in there.text.replace("\n", "")
        there.find_element("css selector", ".back").click()
        assert page.all(":target") == page.all("#finding-slow-callback")


def test_an_address_with_a_place_opens_the_page_there(show):
    page = show(sample_analysis(), sample_timeline())
    page.browser.get(page.browser.current_url + "#kernels")
    page.browser.refresh()
    assert [each.get_attribute("id") for each in page.all(":target")] == ["kernels"]
    assert page.run("return scrollY") > 0


def test_a_finding_of_one_rank_leads_to_that_ranks_details(show):
    analysis = sample_analysis(2)
    ranks = analysis.ranks
    late = replace(analysis.findings[0], rank=1, code="sync-bound", source="trace")
    page = show(
        replace(analysis, ranks=ranks, findings=(analysis.findings[0], late)), sample_timeline(0), sample_timeline(1)
    )
    next(link for link in links(page.one("#finding-sync-bound")) if link.text == "Calls that wait for the GPU").click()
    assert page.one("select[aria-label='Rank of the details']").get_property("value") == "1"

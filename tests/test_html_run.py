"""The whole run in the web page: the bar of its parts, when they took place, and its slowest steps."""

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.run_wording import goodput_words
from lightning_forge_profiling.schema import RunLedger, SlowStep, Span
from tests.evidence import with_figures
from tests.test_html_report import HOSTILE, RUN, run_only

pytestmark = pytest.mark.browser

SPANS = (
    Span(part="startup/process", start_s=0.0, end_s=20.0, seconds=20.0),
    Span(part="startup/fit", start_s=20.0, end_s=30.0, seconds=10.0),
    Span(part="startup/module.configure_optimizers", start_s=21.0, end_s=25.0, seconds=4.0),
    Span(part="steps", start_s=30.0, end_s=110.0, seconds=80.0, step=400),
    Span(part="epoch", start_s=30.0, end_s=70.0, seconds=40.0, step=200),
    Span(part="callback/EMA.hook", start_s=31.0, end_s=51.0, seconds=10.0, count=100, step=90),
    Span(part="validation", start_s=60.0, end_s=70.0, seconds=10.0, step=200),
    Span(part="epoch", start_s=70.0, end_s=110.0, seconds=40.0, step=400),
    Span(part="module/hook", start_s=80.0, end_s=80.1, seconds=0.1, step=230),
)
PARTS = {"steps": 55.4, "startup/process": 20.0, "startup/fit": 10.0, "callback/EMA.hook": 10.0, "validation": 10.0,
         "teardown": 0.5, "module/hook": 0.1}  # fmt: skip
COUNTS = {"startup/process": 1, "startup/fit": 1, "validation": 1, "callback/EMA.hook": 100}
LEDGER = RunLedger(wall_s=110.0, parts=PARTS, unexplained_s=4.0, counts=COUNTS, spans=SPANS)
SLOWEST = (
    SlowStep(step=120, ms=812.0, end_s=40.0, parts_ms={"callback/EMA.hook": 640.0}),
    SlowStep(step=121, ms=80.0, end_s=41.0),
)


def analysis(ledger=LEDGER, slowest=SLOWEST):
    return replace(run_only(), run=with_figures(RUN, ledger=ledger, slowest=slowest))


def lanes(page):
    """Of each lane its texts of spans, and from where to where on the axis they reach, in percent."""
    return dict(
        page.run(  # a list: the driver sorts an object by its keys
            """
        return [...document.querySelectorAll("#course .chart-row.state")].map((row) => [
          row.querySelector(".chart-line > :nth-child(2)").textContent,
          [...row.querySelectorAll("rect")].map((rect) => [rect.dataset.tip, Math.round(rect.getAttribute("x") / 10),
            Math.round((Number(rect.getAttribute("x")) + Number(rect.getAttribute("width"))) / 10)]),
        ]);
        """
        )
    )


def test_the_bar_is_the_whole_run_with_small_parts_folded_and_the_remainder_shown(show):
    page = show(analysis())
    legend = [text.replace("\N{NO-BREAK SPACE}", " ") for text in page.texts("#course .legend li")]
    assert legend[:2] == ["steps 55.4 s, 50.4 %", "startup/process 20.0 s, 18.2 %"]
    assert legend[-2:] == ["rest 0.600 s, 0.5 %", "unexplained 4.00 s, 3.6 %"]
    widths = page.run("return [...document.querySelectorAll('#course .segment')].map((one) => one.style.width)")
    assert len(widths) == len(legend)
    assert sum(float(width.rstrip("%")) for width in widths) == pytest.approx(100)
    colours = page.run(
        "return [...document.querySelectorAll('#course .swatch')].slice(0, 6).map((one) => one.style.cssText)"
    )
    assert len({*colours}) == 6


def test_a_negative_remainder_is_said_and_the_bar_stays_whole(show):
    page = show(analysis(replace(LEDGER, unexplained_s=-2.0)))
    assert page.texts("#course .legend li")[-1].endswith("-2.00 s, -1.8 %")
    widths = page.run("return [...document.querySelectorAll('#course .segment')].map((one) => one.style.width)")
    assert sum(float(width.rstrip("%")) for width in widths) == pytest.approx(100)


def test_lanes_show_when_the_parts_took_place_on_the_axis_of_the_fit(show):
    seen = lanes(show(analysis()))
    assert [*seen] == ["startup", "epochs", "validation", "slow steps", "callback/EMA.hook"], "and no trifle"
    assert [(begin, end) for _, begin, end in seen["epochs"]] == [(11, 56), (56, 100)]
    assert seen["validation"] == [["validation: 10.0 s, at 40.00 s, step 200", 44, 56]]
    [[text, begin, _]] = seen["slow steps"]
    assert (text, begin) == ("step 120: 812 ms, 640 of it callback/EMA.hook", 21)
    assert seen["callback/EMA.hook"][0][0] == "callback/EMA.hook: 100 times, 10.0 s together, at 11.00 s, step 90"


def test_a_lane_has_the_seconds_that_the_bar_has(show):
    """What ran inside a part, as data_loader in validation, is drawn in its span, and counts for itself."""
    parts = {**PARTS, "validation": 9.3, "data_loader": 0.7}
    spans = (*SPANS, Span(part="sanity_check", start_s=29.0, end_s=29.5, seconds=0.5))
    page = show(analysis(replace(LEDGER, parts=parts, spans=spans)))
    readings = dict(zip(lanes(page), page.texts("#course .chart-row.state .reading"), strict=True))
    assert readings["startup"] == "2 \N{MULTIPLICATION SIGN}, 30.0 s", "with what was before the axis"
    assert readings["validation"] == "1 \N{MULTIPLICATION SIGN}, 9.30 s", "without the sanity check"
    assert readings["epochs"] == "2 \N{MULTIPLICATION SIGN}, 80.0 s"
    legend = [text.replace("\N{NO-BREAK SPACE}", " ") for text in page.texts("#course .legend li")]
    assert "validation 9.30 s, 8.5 %" in legend


def test_goodput_is_the_one_of_the_other_reports(show):
    ledger = replace(LEDGER, goodput=0.62)
    words = goodput_words(ledger)
    assert words == "62 % of the fit was training"
    page = show(analysis(ledger))
    assert words in page.texts("#about dd")
    assert words in markdown(analysis(ledger))


def test_the_slowest_steps_and_the_spans_are_in_tables(show):
    page = show(analysis())
    before = page.column("course", 1)
    assert before[-2:] == ["120", "121"]
    assert page.column("course", 4)[-2:] == ["640 of it callback/EMA.hook", ""]
    page.one("#course details:not(.fold) > summary").click()
    page.run_until_done("setTimeout(done)")
    assert len(page.column("course", 1)) == len(before) + len(SPANS)


def test_a_run_without_a_ledger_has_no_picture_and_one_without_spans_has_its_bar(show):
    assert show(analysis(None)).all("#course") == []
    page = show(analysis(replace(LEDGER, spans=()), ()))
    assert page.all("#course .stack")
    assert not page.all("#course .chart-row")


def test_markup_in_names_is_text(show):
    spans = (*SPANS, Span(part=HOSTILE, start_s=90.0, end_s=100.0, seconds=10.0))
    page = show(analysis(replace(LEDGER, spans=spans, parts={**PARTS, HOSTILE: 10.0})))
    assert HOSTILE in lanes(page)
    assert page.run("return window.hacked") is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_has_contrast(show, scheme):
    page = show(analysis(), width=400, scheme=scheme)
    assert page.run("return document.documentElement.scrollWidth") == 400
    assert page.faint_texts() == []

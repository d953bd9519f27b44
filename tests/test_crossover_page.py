"""The page of a crossover: what it holds, and how it looks in a real browser."""

import re
from base64 import b64encode
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lightning_forge_profiling.bench.result import in_unit
from lightning_forge_profiling.crossover.curves import OperationCurves, read_crossover
from lightning_forge_profiling.crossover.plot import DARK, LIGHT, crossover_page, draw_operation
from tests.report_page import Page

H200 = read_crossover(Path(__file__).parent / "data" / "crossover_h200.json")
HOSTILE = '</style><script>hacked=1</script><img src=x onerror="hacked=1">"onmouseover="hacked=1"&lt;{{style}}'


def without_gpu():
    operations = tuple(replace(operation, curves=operation.curves[:1]) for operation in H200.operations)
    return replace(H200, setting=replace(H200.setting, gpu="", tf32="", platform=""), operations=operations)


def hostile():
    setting = replace(H200.setting, cpu=HOSTILE, gpu=HOSTILE, dtype=HOSTILE, torch=HOSTILE, tf32=HOSTILE)
    first = H200.operations[0]
    curves = (replace(first.curves[0], ended=HOSTILE), *first.curves[1:])
    operations = (OperationCurves(name=HOSTILE, meaning=HOSTILE, curves=curves),)
    return replace(H200, setting=setting, operations=operations)


@pytest.mark.slow
def test_it_needs_nothing_from_elsewhere_and_is_always_the_same():
    page = crossover_page(H200)
    outside = re.sub(r"data:image/svg\+xml;base64,[\w+/=]*", "", page)
    assert "http" not in outside.replace("http-equiv", "")
    assert "<script" not in outside
    assert "default-src 'none'" in outside
    assert "unsafe" not in outside
    assert crossover_page(H200) == page
    assert len(page) < 2_000_000


@pytest.mark.slow
def test_what_is_said_of_an_operation_stands_under_its_way():
    """Also where the first was not run in each: in a file, that may be."""
    first, second, *_ = H200.operations
    page = crossover_page(replace(H200, operations=(replace(first, curves=first.curves[::3]), second)))
    verdict = page.split("<tbody>")[0].split("<table>")[1] + page.split("<tbody>")[1].split("</tbody>")[0]
    cells = re.findall("<t[dh](?: [^>]*)?>(.*?)</t[dh]>", verdict)
    assert cells[:4] == ["operation", "GPU, in a stream", "GPU, one call", "GPU, with copies"]
    assert cells[4:8] == ["matmul", "", "", "faster from about 790 on"]
    assert cells[8:10] == ["add", "faster from about 200 on"]


page_of = cache(crossover_page)  # drawing takes seconds


class CrossoverPage(Page):
    """The page of a result, open in a browser from its file."""

    def __init__(self, browser, folder, result, *, width=1280, scheme="light"):
        path = folder / "crossover.html"
        path.write_text(page_of(result), encoding="utf-8")
        self._open(browser, path, width, scheme)

    def texts(self, selector):
        """As they are shown."""
        return [element.text for element in self.all(selector)]


@pytest.mark.browser
class TestPage:
    @pytest.mark.slow
    def test_the_crossovers_come_first_with_where_they_were_measured(self, browser, tmp_path):
        page = CrossoverPage(browser, tmp_path, H200)
        assert page.texts("h1") == ["The size from which the GPU is faster"]
        assert page.texts("#verdict tbody tr:first-child > *") == [
            "matmul",
            "faster from about 140 on",
            "faster from about 210 on",
            "faster from about 790 on",
        ]
        [facts] = page.texts("#verdict .facts")
        assert "NVIDIA H200" in facts
        assert "16 threads" in facts
        assert page.texts(".operation h2") == ["matmul", "add", "softmax", "layernorm", "conv2d"]

    def test_every_number_is_in_a_table(self, browser, tmp_path):
        page = CrossoverPage(browser, tmp_path, H200)
        tables = page.texts(".operation table")
        assert len(tables) == 5
        for table, operation in zip(tables, H200.operations, strict=True):
            for curve in operation.curves:
                assert [point for point in curve.points if in_unit(point.us) not in table] == []
        assert "no larger size" in page.texts(".operation:nth-of-type(6)")[0]
        assert len(page.texts("#warnings li")) == 20
        faster = page.texts(".operation:nth-of-type(2) tbody tr:nth-child(3) .faster")
        assert [text.split(" µs")[0] for text in faster] == ["12.2", "2.87", "23.8", "1.47"]

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_its_pictures_follow_the_colours_of_the_page(self, browser, tmp_path, scheme):
        page = CrossoverPage(browser, tmp_path, H200, scheme=scheme)
        colours = page.run(
            """
            const drawn = [...document.querySelectorAll("picture img")];
            return drawn.map((image) => {
              const canvas = document.createElement("canvas");
              const context = canvas.getContext("2d");
              context.drawImage(image, 0, 0);
              const [red, green, blue] = context.getImageData(3, 3, 1, 1).data;
              return `rgb(${red}, ${green}, ${blue})`;
            });
            """
        )
        assert len(colours) == 5
        assert set(colours) == {page.run("return getComputedStyle(document.querySelector('section')).backgroundColor")}
        alt = page.run("return document.querySelector('picture img').alt")
        assert "matmul" in alt
        assert "GPU, one call: faster from about 210 on" in alt
        assert page.run("return performance.getEntriesByType('resource').length") == 0
        assert browser.get_log("browser") == []

    def test_a_narrow_screen_scrolls_tables_and_not_the_page(self, browser, tmp_path):
        page = CrossoverPage(browser, tmp_path, H200, width=400)
        assert page.run("return document.documentElement.scrollWidth") <= 400

    @pytest.mark.parametrize("width", [400, 700, 740, 1280])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_the_text_of_its_pictures_can_be_read_at_every_width(self, browser, tmp_path, width, scheme):
        """9.5 points are 12.7 pixels in a picture that is as wide as it says."""
        page = CrossoverPage(browser, tmp_path, H200, width=width, scheme=scheme)
        shown = page.run(
            """
            const image = document.querySelector("picture img");
            return [image.getBoundingClientRect().width / image.naturalWidth, image.currentSrc];
            """
        )
        assert 10 < 12.7 * shown[0] < 17
        theme = LIGHT if scheme == "light" else DARK
        drawn = draw_operation(H200.operations[0], theme, narrow=width <= 720)
        assert shown[1].endswith(b64encode(drawn).decode())
        assert page.run("return document.documentElement.scrollWidth") <= width

    @pytest.mark.slow
    def test_without_a_gpu_it_says_so_and_shows_the_cpu(self, browser, tmp_path):
        page = CrossoverPage(browser, tmp_path, without_gpu())
        assert page.texts("h1")[0].lower().startswith("no gpu")
        assert page.texts("#verdict table") == []
        assert "5.48 µs" in page.texts(".operation table")[0]
        assert "CPU / GPU" not in page.texts("body")[0]

    @pytest.mark.slow
    def test_names_from_a_file_are_text(self, browser, tmp_path):
        page = CrossoverPage(browser, tmp_path, hostile())
        assert page.run("return typeof hacked") == "undefined"
        assert page.texts(".operation h2") == [HOSTILE]
        assert page.run("return document.querySelectorAll('script, [onerror], [onmouseover]').length") == 0
        assert browser.get_log("browser") == []

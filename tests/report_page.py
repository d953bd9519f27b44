"""A report in a browser, for tests."""

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By

from lightning_forge_profiling.report.page import report_page


class Page:
    """A report, open in a browser from its file."""

    def __init__(self, browser, folder, analysis, timelines=(), *, width=1280, scheme="light", unfolded=True):
        path = folder / "report.html"
        path.write_text(report_page(analysis, timelines), encoding="utf-8")
        self._open(browser, path, width, scheme)
        if unfolded:
            self.unfold()

    @classmethod
    def of_file(cls, browser, path, *, width=1280, scheme="light", unfolded=True):
        """A page that somebody else has written."""
        page = cls.__new__(cls)
        page._open(browser, path, width, scheme)
        if unfolded:
            page.unfold()
        return page

    def unfold(self):
        """Show all sections."""
        self.run("for (const each of document.querySelectorAll('details.fold')) each.open = true")
        self.run_until_done("requestAnimationFrame(() => requestAnimationFrame(done))")

    def _open(self, browser, path, width, scheme):
        self.browser = browser
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.prefer(scheme)
        browser.get(path.as_uri())
        # what observes sizes has done so when the first frame has been drawn
        self.run_until_done("requestAnimationFrame(() => requestAnimationFrame(done))")

    def prefer(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        [found] = self.all(selector)
        return found

    def texts(self, selector):
        """What elements say, as written: without what the style sheet does to capitals."""
        return [element.get_property("textContent") for element in self.all(selector)]

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def run_until_done(self, script):
        """Run what calls `done` later."""
        return self.browser.execute_async_script(f"const done = () => arguments[0](); {script};")

    def complaints(self):
        return self.browser.get_log("browser")

    def column(self, table, position):
        return self.texts(f"#{table} tbody tr > :nth-child({position})")

    def view(self):
        data = self.one("#timeline-view")
        return float(data.get_attribute("data-view-start-us")), float(data.get_attribute("data-view-end-us"))

    def place(self, lane_name, time_us, rank=0):
        """Where on the canvas a lane shows a time: offsets from its middle, as the driver wants them."""
        canvas = self.one("canvas").rect
        lanes = self.all(f".lane[data-rank='{rank}']")
        [label] = [each.rect for each in lanes if each.get_property("textContent") == lane_name]
        start, end = self.view()
        x = (time_us - start) / (end - start) * canvas["width"]
        y = label["y"] + label["height"] / 2 - canvas["y"]
        return round(x - canvas["width"] / 2), round(y - canvas["height"] / 2)

    def labels_after(self, button):
        """The labels of the steps as they are drawn after a click."""
        return self.browser.execute_async_script(
            """
            const [button, done] = arguments;
            const context = document.querySelector("canvas").getContext("2d");
            const texts = [];
            context.fillText = (text, ...place) => {
              texts.push(text);
              CanvasRenderingContext2D.prototype.fillText.call(context, text, ...place);
            };
            document.querySelector(button).click();
            requestAnimationFrame(() => requestAnimationFrame(() => {
              delete context.fillText;
              done(texts.filter((text) => text.startsWith("step ")));
            }));
            """,
            button,
        )

    def tables(self):
        """Of each table: which columns reach over its edge, whether it fades out there, and whether a note says so."""
        return self.run(
            """
            return Object.fromEntries([...document.querySelectorAll(".scroll")].map((scroller) => {
              const edge = scroller.getBoundingClientRect().right;
              const style = getComputedStyle(scroller);
              const masked = style.maskImage.startsWith("linear-gradient");
              const cut = [...scroller.querySelectorAll("tr")].flatMap((row) => [...row.children]
                .map((cell, index) => (cell.getBoundingClientRect().right > edge + 1 ? index + 1 : 0)).filter(Boolean));
              return [scroller.getAttribute("aria-label"), {
                cut: [...new Set(cut)].sort((a, b) => a - b),
                fades: masked && parseFloat(style.getPropertyValue("--right")) > 0,
                noted: scroller.nextElementSibling.checkVisibility(),
              }];
            }));
            """
        )

    def cut_texts(self):
        """The texts outside of tables' own boxes that are cut, reach out of the window, or lie over one another."""
        return self.run(
            """
            const found = [], seen = [];
            const walker = document.createTreeWalker(document.getElementById("page"), NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
              const { data, parentElement: element } = walker.currentNode;
              if (!data.trim() || !element.checkVisibility() || element.closest(".for-readers, .scroll")) continue;
              const range = document.createRange();
              range.selectNodeContents(walker.currentNode);
              for (const { left, top, right, bottom } of range.getClientRects()) {
                const shown = [left, top, right, bottom];
                let ellipsis = false;
                for (let each = element; each.id !== "page"; each = each.parentElement) {
                  if (getComputedStyle(each).overflowX === "visible") continue;
                  ellipsis ||= getComputedStyle(each).textOverflow === "ellipsis";
                  const box = each.getBoundingClientRect();
                  shown[0] = Math.max(shown[0], box.left);
                  shown[1] = Math.max(shown[1], box.top);
                  shown[2] = Math.min(shown[2], box.right);
                  shown[3] = Math.min(shown[3], box.bottom);
                }
                if (shown[2] <= shown[0] || shown[3] <= shown[1]) continue;
                if (shown[2] > innerWidth || shown[0] < 0) found.push(`${data}: out of the window`);
                if (shown[2] - shown[0] < right - left - 1.5 && !ellipsis) found.push(`${data}: cut`);
                const over = seen.find(([other, box]) => !other.contains(element) && !element.contains(other) &&
                  Math.min(box[2], shown[2]) - Math.max(box[0], shown[0]) > 2 &&
                  Math.min(box[3], shown[3]) - Math.max(box[1], shown[1]) > 5);
                if (over) found.push(`${data}: over ${over[0].textContent}`);
                seen.push([element, shown]);
              }
            }
            return found;
            """
        )

    def pixels(self, row):
        """Red, green, blue and opacity of each pixel of a row of the timeline."""
        return self.run(
            """
            const canvas = document.querySelector("canvas");
            const copy = document.createElement("canvas");
            [copy.width, copy.height] = [canvas.width, 1];
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, 0, -arguments[0]);
            return [...context.getImageData(0, 0, copy.width, 1).data];
            """,
            row,
        )

    def hover(self, lane_name, time_us, rank=0):
        place = self.place(lane_name, time_us, rank)
        ActionChains(self.browser).move_to_element_with_offset(self.one("canvas"), *place).perform()

    def wheel(self, amount):
        origin = ScrollOrigin.from_element(self.one("canvas"))
        ActionChains(self.browser).scroll_from_origin(origin, 0, amount).perform()

    def faint_texts(self):
        """The texts whose contrast with what is under them is below 4.5."""
        return self.run(
            """
            const luminance = (colour) => {
              const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((part) => {
                const share = part / 255;
                return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
              });
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const under = (element) => {
              const colour = getComputedStyle(element).backgroundColor;
              return colour.endsWith(", 0)") ? under(element.parentElement) : colour;
            };
            const faint = new Set();
            const walker = document.createTreeWalker(document.getElementById("page"), NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
              const element = walker.currentNode.parentElement;
              const [a, b] = [luminance(getComputedStyle(element).color), luminance(under(element))];
              const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
              if (contrast < 4.5) faint.add(`${walker.currentNode.data}: ${contrast.toFixed(2)}`);
            }
            return [...faint];
            """
        )

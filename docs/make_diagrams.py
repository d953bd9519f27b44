"""Draw the diagrams: how a step, a gap and an overlap are counted, and how data flows through the package.

    python docs/make_diagrams.py        # writes them; tests/test_documents.py compares

Those of docs/results.md are made up, to show a rule each; times are in arbitrary units along the x-axis.
"""
# ruff: noqa: INP001  (a script, in no package)

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parent / "images"

WIDTH = 900
LEFT = 150  # of the lanes; their names stand before it
UNIT = (WIDTH - LEFT - 20) / 100
ROW = 40
BOX = 26
ROOM = (144, 48)

STEPS = ("#9ec5f4", "#f7c99b", "#a9d8b0")  # one colour a step
MATMUL, OTHER, COPY, COMM = "#3f8fdb", "#8d959e", "#d67bba", "#ea6f36"
HOST, IDLE, WAITS = "#d5dbe1", "#f4f6f8", "#f2c14e"


@dataclass
class Diagram:
    """An SVG on a white card, so that it can be read on a dark page too."""

    title: str
    parts: list[str] = field(default_factory=list)
    y: float = 16

    def lane(self, name: str, *boxes: tuple[float, float, str, str], note: str = "") -> float:
        """A row of boxes (from, to, text, colour) with its name before it; returns its top."""
        top = self.y
        self.text(LEFT - 12, top + 18, name, anchor="end", bold=True)
        for start, end, text, colour in boxes:
            x, width = LEFT + start * UNIT, (end - start) * UNIT
            self.parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" rx="2" fill="{colour}" '
                'stroke="#59636e" stroke-width="0.6"/>'
            )
            self.text(x + width / 2, top + 17.5, text, anchor="middle")
        if note:
            self.text(LEFT, top + ROW, note, muted=True)
            self.y += 20
        self.y += ROW
        return top

    def line(self, at: float, top: float, bottom: float) -> None:
        """A dashed vertical line at a time, behind everything."""
        x = LEFT + at * UNIT
        self.parts.insert(
            0, f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#c0392b" stroke-dasharray="4 3"/>'
        )

    def arrow(self, start: float, top: float, end: float, bottom: float) -> None:
        """From a launch to the work that it launched."""
        a, b = LEFT + start * UNIT, LEFT + end * UNIT
        self.parts.append(
            f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{top}" y2="{bottom}" stroke="#59636e" marker-end="url(#tip)"/>'
        )

    def room(self, x: float, y: float, name: str, what: str, colour: str) -> None:
        """A part of the package, of ROOM pixels."""
        width, height = ROOM
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="#59636e" '
            'stroke-width="0.6"/>'
        )
        self.text(x + width / 2, y + 19, name, anchor="middle", bold=True)
        self.text(x + width / 2, y + 37, what, anchor="middle", muted=True)

    def flow(self, *points: tuple[float, float]) -> None:
        """An arrow along points."""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path d="{path}" fill="none" stroke="#59636e" marker-end="url(#tip)"/>')

    def span(self, start: float, end: float, text: str) -> None:
        """A length with its name under it."""
        a, b, y = LEFT + start * UNIT, LEFT + end * UNIT, self.y
        self.parts.append(
            f'<path d="M{a + 2:.1f} {y - 5}v10M{a + 2:.1f} {y}H{b - 2:.1f}M{b - 2:.1f} {y - 5}v10" '
            'stroke="#c0392b" fill="none"/>'
        )
        self.text((a + b) / 2, y + 18, text, anchor="middle")

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, muted: bool = False
    ) -> None:
        """One line of text."""
        weight = ' font-weight="600"' if bold else ""
        colour = "#59636e" if muted else "#1f2328"
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
        )

    def heading(self, text: str) -> None:
        """A line over what follows."""
        self.y += 6
        self.text(16, self.y + 6, text, bold=True)
        self.y += 22

    def svg(self) -> str:
        """The whole file."""
        height = self.y + 4
        drawn = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-size="13" '
            'font-family="system-ui, sans-serif" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#59636e"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#ffffff"/>\n{drawn}\n</svg>\n'
        )


def step_window() -> Diagram:
    """The host runs ahead: a step's window on the GPU is not its span on the host."""
    five, six, seven = STEPS
    drawing = Diagram("The windows of steps on the GPU against their spans on the host")
    host = drawing.lane(
        "host", (0, 20, "ProfilerStep#5", five), (20, 40, "ProfilerStep#6", six), (40, 60, "ProfilerStep#7", seven)
    )
    drawing.y += 14
    gpu = drawing.lane(
        "GPU",
        (2, 20, "launched by 5", five), (21, 33, "5", five), (33, 48, "launched by 6", six), (49, 62, "6", six),
        (62, 79, "launched by 7", seven), (80, 92, "7", seven),
    )  # fmt: skip
    for launch, begin in ((1, 2), (22, 33), (42, 62)):
        drawing.arrow(launch, host + BOX, begin + 0.6, gpu)
    for at in (33, 62, 92):
        drawing.line(at, gpu - 8, gpu + BOX + 22)
    drawing.y += 8
    drawing.span(0, 33, "window of step 5")
    drawing.span(33, 62, "window of step 6")
    drawing.span(62, 92, "window of step 7")
    drawing.y += 30
    return drawing


def overlap() -> Diagram:
    """An instant counts once, communication last."""
    drawing = Diagram("How overlapping GPU work is counted")
    top = drawing.y
    drawing.lane("stream 7", (5, 35, "matmul", MATMUL), (35, 50, "elementwise", OTHER), (70, 88, "optimizer", OTHER))
    drawing.lane("stream 20", (28, 66, "all-reduce", COMM))
    drawing.lane("stream 9", (40, 56, "memcpy", COPY))
    drawing.y += 8
    counted = drawing.lane(
        "counts as",
        (0, 5, "", IDLE), (5, 35, "matmul", MATMUL), (35, 50, "other", OTHER), (50, 56, "mem.", COPY),
        (56, 66, "comm", COMM), (66, 70, "", IDLE), (70, 88, "other", OTHER), (88, 100, "idle", IDLE),
    )  # fmt: skip
    for at in (28, 56, 66):
        drawing.line(at, top, counted + BOX + 18)
    drawing.y += 6
    drawing.span(28, 56, "hidden")
    drawing.span(56, 66, "exposed")
    drawing.y += 36
    drawing.span(28, 66, "communication in full")
    drawing.y += 30
    return drawing


def idle() -> Diagram:
    """Two gaps: what the idle table says of them, and what the findings do."""
    drawing = Diagram("The causes of the GPU's idle time in two gaps")
    drawing.heading("A gap that ends with a launch")
    host = drawing.lane(
        "host",
        (0, 24, "in the data loader", HOST), (24, 40, "Python", HOST), (40, 52, "cudaMalloc", HOST),
        (52, 62, "Python", HOST), (62, 68, "launch", WAITS), (68, 100, "", HOST),
    )  # fmt: skip
    gpu = drawing.lane("GPU", (0, 10, "busy", MATMUL), (10, 84, "gap", IDLE), (84, 100, "next kernel", MATMUL))
    drawing.arrow(62, host + BOX, 84.5, gpu)
    row = drawing.lane(
        "idle",
        (10, 24, "data", WAITS), (24, 40, "python", WAITS), (40, 52, "allocator", WAITS), (52, 70, "python", WAITS),
        (70, 84, "gpu", IDLE),
        note="“python” goes on after the launch for as long as any launch takes to get through; the rest is “gpu”",
    )  # fmt: skip
    for at in (10, 62, 70, 84):
        drawing.line(at, host, row + BOX)
    drawing.heading("A gap that begins while the host waits for the GPU")
    host = drawing.lane(
        "host",
        (0, 24, ".item()", HOST), (24, 62, "Python", HOST), (62, 68, "launch", WAITS), (68, 100, "", HOST),
    )  # fmt: skip
    gpu = drawing.lane("GPU", (0, 18, "busy", MATMUL), (18, 68, "gap", IDLE), (68, 100, "next kernel", MATMUL))
    drawing.arrow(62, host + BOX, 68.5, gpu)
    drawing.lane("idle", (18, 24, "sync", WAITS), (24, 68, "python", WAITS))
    row = drawing.lane(
        "finding",
        (18, 68, "idle after a sync: sync-bound", WAITS),
        note="the queue ran dry because the host waited: the whole gap is the price of the wait",
    )
    for at in (18, 68):
        drawing.line(at, host, row + BOX)
    return drawing


def rooms() -> Diagram:
    """Data goes one way: hooks, times, metrics; trace, columns, figures, findings, pages."""
    drawing = Diagram("How data flows through the rooms of the package")
    columns = (20, 199, 378, 557, 736)
    (width, height), (training, middle, apart) = ROOM, (40, 124, 252)
    drawing.text(20, 26, "the training process", bold=True)
    for x, name, what, colour in zip(
        columns,
        ("Trainer", "callbacks/, run/", "timing/, gpu/", "diagnosis/", "loggers, end table"),
        ("hooks", "hooks to one run", "events, steps, totals", "rules for a run", "report/"),
        (IDLE, STEPS[0], STEPS[0], STEPS[0], IDLE),
        strict=True,
    ):
        drawing.room(x, training, name, what, colour)
    for left, right in pairwise(columns):
        drawing.flow((left + width, training + height / 2), (right - 1, training + height / 2))
    drawing.room(columns[1], middle, "profiler/", "one window", STEPS[0])
    drawing.room(columns[2], middle, "record/", "rankN.jsonl", STEPS[0])
    for x in columns[1:3]:
        drawing.flow((x + width / 2, training + height), (x + width / 2, middle - 1))
    drawing.text(columns[1], 222, "without torch", bold=True)
    drawing.text(columns[1], 240, "finish, a child process at the window's end, or cli/ later", muted=True)
    for x, name, what in zip(
        columns,
        ("kineto/", "analysis/", "diagnosis/", "schema", "report/"),
        ("columns of events", "figures of each rank", "findings, verdict", "summary.json", "console, md, html"),
        strict=True,
    ):
        drawing.room(x, apart, name, what, STEPS[2])
    for left, right in pairwise(columns):
        drawing.flow((left + width, apart + height / 2), (right - 1, apart + height / 2))
    drawing.flow((columns[1] - 8, middle + height / 2), (columns[0] + width / 2, middle + height / 2),
                 (columns[0] + width / 2, apart - 1))  # fmt: skip
    drawing.parts.append(
        f'<path d="M{columns[1]} {middle + height / 2}H{columns[1] - 8}" stroke="#59636e" fill="none"/>'
    )
    drawing.text(columns[0] + 4, middle + 16, "raw trace", muted=True)
    record = columns[2] + width
    drawing.flow((record, middle + height / 2), (columns[4] + width / 2, middle + height / 2),
                 (columns[4] + width / 2, apart - 1))  # fmt: skip
    drawing.text(record + 10, middle + 16, "the whole run, read from its record", muted=True)
    drawing.y = apart + height + 10
    return drawing


def drawn() -> dict[Path, str]:
    """Each diagram's file, as it should be."""
    diagrams = {"step-window": step_window(), "overlap": overlap(), "idle-causes": idle(), "rooms": rooms()}
    return {IMAGES / f"{name}.svg": diagram.svg() for name, diagram in diagrams.items()}


if __name__ == "__main__":
    for file, svg in drawn().items():
        file.write_text(svg, encoding="utf-8")

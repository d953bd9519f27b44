"""A histogram of samples as SVG."""

from collections.abc import Sequence
from html import escape
from typing import Final

import numpy as np

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 240, 20, 60, 190
_LONGEST_TITLE: Final = 88  # of 12 pixels, in letters of mean width
_MOST_BARS: Final = 60


def draw(samples: Sequence[float], title: str, subtitle: str = "", *, unit: str = "µs") -> str:
    """Draw samples as bars, with lines at the median and at the 5th and 95th percentile.

    The axis ends at the 1st and 99th percentile; samples beyond are counted at the side.

    Example:
        >>> draw([1.0, 2.0, 2.0, 3.0], "four samples").startswith("<svg ")
        True
    """
    values = np.asarray(samples, float)
    low, high = (float(value) for value in np.percentile(values, [1, 99]))
    margin = (high - low) * 0.05 or abs(low) * 0.01 or 1e-3
    low, high = low - margin, high + margin
    shown = values[(values >= low) & (values <= high)]
    bars = int(min(_MOST_BARS, max(5, 2 * len(shown) ** 0.5)))
    counts, edges = np.histogram(shown, bins=bars, range=(low, high))

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - 2 * _LEFT)

    tallest = max(int(counts.max()), 1)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    style = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" fill="#222" font-weight="bold">{escape(_shortened(title))}</text>',
        f'<text x="{_LEFT}" y="38" fill="#222">{escape(_shortened(subtitle))}</text>',
    ]
    for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            top = _BOTTOM - (_BOTTOM - _TOP) * int(count) / tallest
            size = f'width="{max(x(end) - x(start) - 1, 0.5):.1f}" height="{_BOTTOM - top:.1f}"'
            tip = f"<title>{int(count)} samples, {start:.4g} to {end:.4g} {unit}</title>"
            parts.append(f'<rect x="{x(start):.1f}" y="{top:.1f}" {size} fill="#4878cf">{tip}</rect>')
    parts.append(f'<line x1="{_LEFT}" y1="{_BOTTOM}" x2="{_WIDTH - _LEFT}" y2="{_BOTTOM}" stroke="#222"/>')
    marks = zip(("p5", "median", "p95"), np.percentile(values, [5, 50, 95]), strict=True)
    for row, (name, value) in enumerate(marks):
        at, down = x(float(value)), _BOTTOM + 14 * (row + 1)
        dash = "" if name == "median" else ' stroke-dasharray="3 3"'
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{down - 10}" stroke="#c44e52"{dash}/>')
        side = "end" if at > _WIDTH / 2 else "start"
        parts.append(
            f'<text x="{at:.1f}" y="{down}" fill="#c44e52" text-anchor="{side}">{name} {value:.4g} {unit}</text>'
        )
    below, above = int((values < low).sum()), int((values > high).sum())
    if above:
        parts.append(f'<text x="{_WIDTH - _LEFT}" y="{_TOP}" fill="#222" text-anchor="end">{above} longer</text>')
    if below:
        parts.append(f'<text x="{_LEFT}" y="{_TOP}" fill="#222">{below} shorter</text>')
    return "\n".join([*parts, "</svg>", ""])


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TITLE else f"{text[: _LONGEST_TITLE - 1]}…"

"""The stream that a report is printed on: its width, whether sentences wrap, whether it has colours."""

import io
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import Final, TextIO

from lightning_forge_profiling.report.table import Table, Text, clean, padded, width_of, wrap

_NARROWEST: Final = 20
_STYLE: Final = re.compile(r"\x1b\[[\d;]*m")
_ASCII: Final = str.maketrans("─µ…█▉▊▋▌▍▎▏▁▂▃▄▅▆▇", "-u~#####   __..-=+")


class Screen:
    """A stream that reports are printed on.

    Example:
        >>> Screen(width=40, wrap=True).line("one two three four five six seven", name="count", column=8)
        count    one two three four five six
                 seven
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        width: int | None = None,
        wrap: bool | None = None,
        colours: bool | None = None,
    ) -> None:
        self._stream = stream or sys.stdout or io.StringIO()  # a process without a console has no sys.stdout
        self._width = max(_NARROWEST, width or shutil.get_terminal_size().columns)
        isatty = getattr(self._stream, "isatty", None)  # what stands in for sys.stdout may have `write` alone
        terminal = isatty is not None and isatty()
        self._wrap = terminal if wrap is None else wrap
        allowed = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._colours = (terminal and allowed) if colours is None else colours

    @property
    def width(self) -> int:
        """In columns."""
        return self._width

    @property
    def colours(self) -> bool:
        """Whether it uses them."""
        return self._colours

    def line(self, text: str | Text = "", *, name: str | Text = "", column: int = 0, whole: bool = False) -> None:
        """Print a line. Where sentences wrap, they wrap beside its name."""
        text, name = clean(text), clean(name)
        start = padded(name.text, column) + " " if name.text or column else ""
        room = max(_NARROWEST // 2, self._width - width_of(start))
        first, *others = wrap(text.text, room) if self._wrap and not whole else [text.text]
        self._write(name.painted(start) + text.painted(first))
        for line in others:
            self._write(" " * width_of(start) + text.painted(line))

    def table(self, table: Table) -> None:
        """Print a table."""
        for line in table.lines(self._width):
            self._write(line)

    def tables(self, titled: Iterable[tuple[str, Table]]) -> None:
        """Print tables below their titles, with an empty line before each and after the last."""
        for title, table in titled:
            self.line()
            self.line(Text(title, "bold"))
            self.table(table)
        self.line()

    def flush(self) -> None:
        """Write out what is buffered: the process may be killed next."""
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            flush()

    def _write(self, line: str) -> None:
        if not self._colours:
            line = _STYLE.sub("", line)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            line.encode(encoding)
        except UnicodeEncodeError:
            line = line.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        self._stream.write(f"{line}\n")

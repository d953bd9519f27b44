"""`forge-profiling report`: a run, or a trace, as one web page."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_forge_profiling.cli.files import find_record, refuse_bad_outputs, warn_of_problems, write_output
from lightning_forge_profiling.cli.output import Progress, say
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import REPORT_HTML
from lightning_forge_profiling.safe_files import read_regular

_EXAMPLES = """\
examples:
  forge-profiling report lightning_logs/                     writes report.html beside the newest run's record
  forge-profiling report lightning_logs/version_3 --html run.html
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="write a whole run as one web page",
        description="Write a run as one web page that works offline: verdict, split of the step and of the run, step "
        "time, rates and GPU over time, events, ranks, and the recorded window if there is one.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a record, its folder, or any folder above it; or a trace without one"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write this file instead of report.html beside the record or trace"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    source = source_at(args.path)
    file = args.html or source.folder / REPORT_HTML
    refuse_bad_outputs({"--html": file}, [(str(args.path), each) for each in source.files])
    if args.html is None and not source.is_run and file.is_file() and has_run(file):
        raise ConfigurationError(
            f"{file} shows more than this trace and is not replaced; name another file with --html"
        )
    write_output(file, source.page().encode(errors="replace"))
    say(f"{file}: {source.name}")
    return 0


@dataclass(frozen=True, slots=True)
class PageSource:
    """What a page is made of: the record of a run, or traces."""

    folder: Path
    name: str  # for messages
    files: tuple[Path, ...]
    page: Callable[[], str]  # makes it
    is_run: bool


def source_at(path: Path) -> PageSource:
    """The newest record at a path, or the newest traces if it has no record."""
    from lightning_forge_profiling.record.reader import RecordError, read_run  # noqa: PLC0415  (loads msgspec)

    try:
        folder, name = find_record(path)
    except RecordError as no_record:
        if path.suffix == ".jsonl":
            raise
        try:
            traces = find_traces(path)[0]
        except TraceError as no_trace:
            raise (TraceError(f"{no_record}; {no_trace}") if path.is_dir() else no_trace) from None
        window = traces[0].parent
        return PageSource(
            window, str(path if path.is_file() else window), traces, lambda: _page_of_traces(path), is_run=False
        )
    record = read_run(folder)

    def page() -> str:
        from lightning_forge_profiling.report.run_page import run_page  # noqa: PLC0415  (loads NumPy)

        warn_of_problems(record)
        return run_page(record, time.time())

    return PageSource(folder, name, tuple(rank.path for rank in record.ranks), page, is_run=True)


def _page_of_traces(path: Path) -> str:
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.report.page import report_page  # noqa: PLC0415

    with Progress() as progress:
        result = analyze(path, progress=progress)
        return report_page(result.analysis, result.timelines)


def has_run(page: Path) -> bool:
    """Whether a page shows a run, or is one that another program wrote."""
    from lightning_forge_profiling.report.page import record_of  # noqa: PLC0415

    try:
        return record_of(read_regular(page).decode()) is not None
    except ValueError:
        return True

"""`forge-profiling analyze`: verdict and tables on the terminal, and reports; of traces here or where fsspec reads."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning_forge_profiling.cli.copies import write_copies
from lightning_forge_profiling.cli.shared import (
    Progress,
    at_least,
    refuse_bad_outputs,
    say,
    step_range,
    warn,
    write_json,
    write_output,
)
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.files import (
    find_rank_summaries,
    find_ranks,
    find_traces,
    is_rank_summary,
    rank_summaries_among,
    ranks_among,
    traces_among,
)
from lightning_forge_profiling.names import rank_summary_path

if TYPE_CHECKING:
    from lightning_forge_profiling.pipeline import AnalysisResult

# the keys of `analysis.operators.SORTS`, repeated so that `--help` does not import it
SORTS = ("self_device", "device", "self_host", "host", "calls", "memory")
_CUT_OFF = 65  # EX_DATAERR of sysexits.h

_TOP = 20  # kernels and operators in the reports by default
_TOP_ON_TERMINAL = 8

_EXAMPLES = """\
examples:
  forge-profiling analyze lightning_logs/                verdict and tables of all ranks
  forge-profiling analyze rank0.trace.json.gz --json | jq '.ranks[0].gpu.busy_pct'
  forge-profiling analyze lightning_logs/ --html report.html --markdown summary.md
  forge-profiling analyze lightning_logs/ --rank 3 --steps 6:8 --sort self_host --top 30
  forge-profiling analyze lightning_logs/ --anonymize --html report.html        to share with others
  forge-profiling analyze s3://bucket/window/rank3.trace.json.gz --map          on any machine, for each rank
  forge-profiling analyze s3://bucket/window --reduce --html report.html        then all ranks, without the traces
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "analyze",
        help="find what bounds a run, and show the numbers",
        description="Find what bounds a run: print the verdict and the numbers behind it, and write reports.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "path", metavar="PATH", help="a trace (JSON or gzip) or a folder with one per rank, also as a URL of fsspec"
    )
    parser.add_argument("--json", action="store_true", help="print summary.json and nothing else")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report with the timeline")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report as Markdown")
    parser.add_argument(
        "--rank", type=at_least(0), metavar="N", help="only this rank, without the measurements of the whole run"
    )
    parser.add_argument(
        "--steps", type=step_range, metavar="A:B", help="only steps A to B-1, without the measurements of the whole run"
    )
    parser.add_argument(
        "--sort",
        choices=SORTS,
        help="also print the operators, in this order (reports: self_device, or self_host without GPU work)",
    )
    parser.add_argument(
        "--top", type=at_least(1), metavar="N", help=f"number of kernels and operators (default: {_TOP} in the reports)"
    )
    parser.add_argument(
        "--anonymize", action="store_true", help="leave out hosts, users, paths and process ids, for sharing"
    )
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--map", action="store_true", help="only write rankN.summary.json beside the trace of each rank")
    many.add_argument("--reduce", action="store_true", help="compare all ranks by these files, without the traces")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    outputs = {"--html": args.html, "--markdown": args.markdown}
    chosen = {"--rank": args.rank, "--steps": args.steps, "--sort": args.sort, "--top": args.top}
    _refuse(args, "--map", {**outputs, **chosen, "--json": args.json, "--anonymize": args.anonymize})
    _refuse(args, "--reduce", {**chosen, "--anonymize": args.anonymize})
    if not _is_remote(args.path):
        args.path = Path(args.path)
        return _map(args.path) if args.map else _analyze(args, args.path, str(args.path))
    with TemporaryDirectory(prefix="forge-profiling-") as folder:
        if args.map:
            return _map_remote(args.path, Path(folder))
        with Progress() as progress:
            path = _fetched(args.path, Path(folder), reduce=args.reduce, progress=progress)
        return _analyze(args, path, args.path)


def _refuse(args: argparse.Namespace, option: str, others: Mapping[str, object]) -> None:
    """Refuse options that mean nothing beside another one."""
    given = [name for name, value in others.items() if value is not None and value is not False]
    if getattr(args, option.removeprefix("--")) and given:
        raise ConfigurationError(f"{option} goes without {given[0]}")


def _map(path: Path) -> int:
    """Write what the analysis of each rank leaves; 65 if some traces cannot be read."""
    from lightning_forge_profiling.pipeline import write_rank_results  # noqa: PLC0415  (loads NumPy)

    with Progress() as progress:
        written, problems = write_rank_results(path, progress=progress)
    for problem in problems:
        warn(problem)
    for file in written:
        say(f"written    {file}")
    return _CUT_OFF if problems else 0


def _map_remote(url: str, folder: Path) -> int:
    from lightning_forge_profiling.pipeline import write_rank_results  # noqa: PLC0415  (loads NumPy)

    problems = []
    for trace, put in _each_trace(url, folder):
        try:
            [file], _ = write_rank_results(trace)
            put(file)
        except TraceError as exc:
            problems.append(str(exc).replace(f"{folder}/", ""))
            warn(problems[-1])
            continue
        say(f"written    {file.name}, beside the trace")
    return _CUT_OFF if problems else 0


def _analyze(args: argparse.Namespace, path: Path, named: str) -> int:
    """Analyse a path, which the user named otherwise if it is a copy."""
    files, _ = (find_rank_summaries if args.reduce else find_ranks)(path)
    refuse_bad_outputs({"--html": args.html, "--markdown": args.markdown}, [("PATH", file) for file in files])
    with Progress() as progress:
        result = (_analyzed_anonymously if args.anonymize else _analyzed)(args, path, progress)
        if named != str(path):
            result = _with_analysis(result, source=named)
        _write_files(args, result)
    if args.json:
        from lightning_forge_profiling.json_layout import summary_json  # noqa: PLC0415

        write_json(summary_json(result.analysis))
    else:
        if path.is_dir() and files[0].parent != path and not args.anonymize:
            say(f"window     {files[0].parent}")  # of perhaps several below the folder
        _print(args, result)
    return _CUT_OFF if result.analysis.cut_off else 0


def _with_analysis(result: "AnalysisResult", **changes: Any) -> "AnalysisResult":
    from msgspec import structs  # noqa: PLC0415  (`--help` needs none)

    return replace(result, analysis=structs.replace(result.analysis, **changes))


def _analyzed(args: argparse.Namespace, path: Path, progress: Progress) -> "AnalysisResult":
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415  (loads NumPy)

    options = {"rank": args.rank, "steps": args.steps, "top": args.top or _TOP, "sort": args.sort}
    return analyze(path, **options, progress=progress, reduce=args.reduce)


def _analyzed_anonymously(args: argparse.Namespace, path: Path, progress: Progress) -> "AnalysisResult":
    """The analysis of anonymous copies: what they leave out cannot get into a report."""
    sources, notes = find_traces(path)
    for note in notes:
        warn(note)
    with TemporaryDirectory(prefix="forge-profiling-") as folder:
        copies = Path(folder) / "traces"
        copies.mkdir()
        _, left_out = write_copies(sources, copies, progress)
        try:
            result = _analyzed(args, copies, progress)
        except TraceError as exc:
            problems = [str(exc), *getattr(exc, "__notes__", ())]
            raise TraceError.of([problem.replace(f"{folder}/", "") for problem in problems]) from exc
    warnings = (*left_out, *(warning.replace(f"{folder}/", "") for warning in result.analysis.warnings))
    return _with_analysis(result, source=copies.name, warnings=warnings)


def _write_files(args: argparse.Namespace, result: "AnalysisResult") -> None:
    if args.markdown:
        from lightning_forge_profiling.report.analysis_text import markdown  # noqa: PLC0415

        write_output(args.markdown, markdown(result.analysis).encode(errors="replace"))
    if args.html:
        from lightning_forge_profiling.report.page import report_page  # noqa: PLC0415

        write_output(args.html, report_page(result.analysis, result.timelines).encode(errors="replace"))


def _print(args: argparse.Namespace, result: "AnalysisResult") -> None:
    from lightning_forge_profiling.report.analysis_text import print_analysis  # noqa: PLC0415

    shown = args.top or _TOP_ON_TERMINAL
    print_analysis(result.analysis, kernels=shown, operators=shown if args.top or args.sort else 0)
    for written in (args.markdown, args.html):
        if written:
            say(f"report     {written}")


def _is_remote(place: str) -> bool:
    """Whether a place is a URL."""
    return "://" in place


def _fetched(url: str, folder: Path, *, reduce: bool, progress: Callable[[str], None]) -> Path:
    """Copy a remote file, or the files of a folder; returns where the copy lies.

    Args:
        url: a file, or the folder that the files are in.
        folder: an empty folder for the copies.
        reduce: whether to leave out the traces, and copy only what analyses of single ranks left.
        progress: called with the name of each file.

    Raises:
        TraceError: there are none, or the place cannot be read.
    """
    system, place, names = _listed(url)
    both = {*ranks_among(place, names), *rank_summaries_among(place, names)}
    files = sorted(file for file in both if is_rank_summary(file) or not reduce)
    if not files:
        raise TraceError(f"{url}: no {'result of a rank' if reduce else 'trace'} in this folder")
    for file in files:
        progress(f"fetching {file}")
        _get(system, file, folder / file.name)
    return folder / files[0].name if names == [Path(url).name] else folder


def _each_trace(url: str, folder: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A copy of each trace in turn, one at a time, and what puts a file beside the trace."""
    system, place, names = _listed(url)
    for file in traces_among(place, names):
        copy = folder / file.name
        _get(system, file, copy)
        yield copy, partial(_put, system, place)
        for used in (copy, rank_summary_path(copy)):
            used.unlink(missing_ok=True)


def _listed(url: str) -> tuple[Any, Path, list[str]]:
    """The file system of a place, the folder in it, and the names of the files there."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415  (only for a URL)

    try:
        system, root = url_to_fs(url)
        if system.isfile(root):
            return system, Path(root).parent, [Path(root).name]
        return system, Path(root), [Path(name).name for name in system.ls(root, detail=False)]
    except Exception as exc:  # each kind of storage has its own
        raise TraceError(f"{url}: cannot be read: {type(exc).__name__}: {exc}") from exc


def _put(system: Any, place: Path, made: Path) -> None:
    try:
        system.put_file(str(made), str(place / made.name))
    except Exception as exc:
        raise TraceError(f"{place}: cannot be written to: {type(exc).__name__}: {exc}") from exc


def _get(system: Any, file: Path, target: Path) -> None:
    try:
        system.get_file(str(file), str(target))
    except Exception as exc:
        raise TraceError(f"{file}: cannot be read: {type(exc).__name__}: {exc}") from exc

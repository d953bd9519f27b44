"""`forge-profiling analyze`: verdict and tables on the terminal, and reports as files."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.anonymize import write_copies
from lightning_forge_profiling.cli.arguments import at_least, step_range
from lightning_forge_profiling.cli.files import refuse_bad_outputs, write_output
from lightning_forge_profiling.cli.output import Progress, say, warn, write_json
from lightning_forge_profiling.cli.remote import each_trace, fetched, is_remote
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.files import find_rank_summaries, find_ranks, find_traces

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
    if not is_remote(args.path):
        args.path = Path(args.path)
        return _map(args.path) if args.map else _analyze(args, args.path, str(args.path))
    with TemporaryDirectory(prefix="forge-profiling-") as folder:
        if args.map:
            return _map_remote(args.path, Path(folder))
        with Progress() as progress:
            path = fetched(args.path, Path(folder), reduce=args.reduce, progress=progress)
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
    for trace, put in each_trace(url, folder):
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
            result = replace(result, analysis=replace(result.analysis, source=named))
        _write_files(args, result)
    if args.json:
        from lightning_forge_profiling.kineto.rank_result import summary_json  # noqa: PLC0415

        write_json(summary_json(result.analysis))
    else:
        if path.is_dir() and files[0].parent != path and not args.anonymize:
            say(f"window     {files[0].parent}")  # of perhaps several below the folder
        _print(args, result)
    return _CUT_OFF if result.analysis.cut_off else 0


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
    return replace(result, analysis=replace(result.analysis, source=copies.name, warnings=warnings))


def _write_files(args: argparse.Namespace, result: "AnalysisResult") -> None:
    if args.markdown:
        from lightning_forge_profiling.report.markdown import markdown  # noqa: PLC0415

        write_output(args.markdown, markdown(result.analysis).encode(errors="replace"))
    if args.html:
        from lightning_forge_profiling.report.page import report_page  # noqa: PLC0415

        write_output(args.html, report_page(result.analysis, result.timelines).encode(errors="replace"))


def _print(args: argparse.Namespace, result: "AnalysisResult") -> None:
    from lightning_forge_profiling.report.console import print_analysis  # noqa: PLC0415

    shown = args.top or _TOP_ON_TERMINAL
    print_analysis(result.analysis, kernels=shown, operators=shown if args.top or args.sort else 0)
    for written in (args.markdown, args.html):
        if written:
            say(f"report     {written}")

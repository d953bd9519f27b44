"""`forge-profiling analyze`, `anonymize`, `tensorboard` and `schema`: what traces say, copies of them, the layouts.

`analyze` also reads traces where fsspec does.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import structs

from lightning_forge_profiling import pipeline
from lightning_forge_profiling.cli.shared import (
    Progress,
    refuse_bad_outputs,
    same_file,
    say,
    warn,
    write_json,
    write_output,
)
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.json_layout import schema_of, summary_json
from lightning_forge_profiling.kineto.copies import write_anonymous_copy, write_plugin_copy
from lightning_forge_profiling.kineto.files import (
    find_rank_summaries,
    find_ranks,
    find_traces,
    is_rank_summary,
    rank_in_name,
    rank_summaries_among,
    ranks_among,
    traces_among,
    windows_by_rank,
)
from lightning_forge_profiling.names import plugin_name, rank_summary_path
from lightning_forge_profiling.pipeline import AnalysisResult
from lightning_forge_profiling.report.analysis_text import print_analysis
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.page import report_page
from lightning_forge_profiling.schema import Analysis, Line

_CUT_OFF = 65  # EX_DATAERR of sysexits.h
_TOP_ON_TERMINAL = 8


def analyze(args: argparse.Namespace) -> int:
    """Analyse traces."""
    outputs = {"--html": args.html, "--markdown": args.markdown}
    chosen = {"--rank": args.rank, "--steps": args.steps, "--sort": args.sort, "--top": args.top}
    _refuse(args, "--map", {**outputs, **chosen, "--json": args.json, "--anonymize": args.anonymize})
    _refuse(args, "--reduce", {**chosen, "--anonymize": args.anonymize})
    if "://" not in args.path:
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
    with Progress() as progress:
        written, problems = pipeline.write_rank_results(path, progress=progress)
    for problem in problems:
        warn(problem)
    for file in written:
        say(f"written    {file}")
    return _CUT_OFF if problems else 0


def _map_remote(url: str, folder: Path) -> int:
    """The same where fsspec reads, with a copy of one trace at a time."""
    system, place, names = _listed(url)
    code = 0
    for file in traces_among(place, names):
        copy = folder / file.name
        _get(system, file, copy)
        try:
            [made], _ = pipeline.write_rank_results(copy)
            _put(system, place, made)
            say(f"written    {made.name}, beside the trace")
        except TraceError as exc:
            code = _CUT_OFF
            warn(str(exc).replace(f"{folder}/", ""))
        for used in (copy, rank_summary_path(copy)):
            used.unlink(missing_ok=True)
    return code


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
        write_json(summary_json(result.analysis))
    else:
        if path.is_dir() and files[0].parent != path and not args.anonymize:
            say(f"window     {files[0].parent}")  # of perhaps several below the folder
        _print(args, result)
    return _CUT_OFF if result.analysis.cut_off else 0


def _with_analysis(result: AnalysisResult, **changes: Any) -> AnalysisResult:
    return replace(result, analysis=structs.replace(result.analysis, **changes))


def _analyzed(args: argparse.Namespace, path: Path, progress: Progress) -> AnalysisResult:
    options = {"rank": args.rank, "steps": args.steps, "top": args.top or pipeline.TOP, "sort": args.sort}
    return pipeline.analyze(path, **options, progress=progress, reduce=args.reduce)


def _analyzed_anonymously(args: argparse.Namespace, path: Path, progress: Progress) -> AnalysisResult:
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


def _write_files(args: argparse.Namespace, result: AnalysisResult) -> None:
    if args.markdown:
        write_output(args.markdown, markdown(result.analysis).encode(errors="replace"))
    if args.html:
        write_output(args.html, report_page(result.analysis, result.timelines).encode(errors="replace"))


def _print(args: argparse.Namespace, result: AnalysisResult) -> None:
    shown = args.top or _TOP_ON_TERMINAL
    print_analysis(result.analysis, kernels=shown, operators=shown if args.top or args.sort else 0)
    for written in (args.markdown, args.html):
        if written:
            say(f"report     {written}")


def _fetched(url: str, folder: Path, *, reduce: bool, progress: Callable[[str], None]) -> Path:
    """Copy a remote file, or the files of a folder, with `reduce` without the traces; returns where the copy lies."""
    system, place, names = _listed(url)
    both = {*ranks_among(place, names), *rank_summaries_among(place, names)}
    files = sorted(file for file in both if is_rank_summary(file) or not reduce)
    if not files:
        raise TraceError(f"{url}: no {'result of a rank' if reduce else 'trace'} in this folder")
    for file in files:
        progress(f"fetching {file}")
        _get(system, file, folder / file.name)
    return folder / files[0].name if names == [Path(url).name] else folder


def _listed(url: str) -> tuple[Any, Path, list[str]]:
    """The file system of a place, the folder in it, and the names of the files there."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415  (only for a URL)

    with _storage(f"{url}: cannot be read"):
        system, root = url_to_fs(url)
        if system.isfile(root):
            return system, Path(root).parent, [Path(root).name]
        return system, Path(root), [Path(name).name for name in system.ls(root, detail=False)]


@contextmanager
def _storage(problem: str) -> Iterator[None]:
    """Context in which any exception is a problem of the storage: each kind of it has its own."""
    try:
        yield
    except Exception as exc:
        raise TraceError(f"{problem}: {type(exc).__name__}: {exc}") from exc


def _put(system: Any, place: Path, made: Path) -> None:
    with _storage(f"{place}: cannot be written to"):
        system.put_file(str(made), str(place / made.name))


def _get(system: Any, file: Path, target: Path) -> None:
    with _storage(f"{file}: cannot be read"):
        system.get_file(str(file), str(target))


def anonymize(args: argparse.Namespace) -> int:
    """Write anonymous copies."""
    sources, notes = find_traces(args.path)
    args.out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        written, problems = write_copies(sources, args.out, progress)
    for remark in (*notes, *problems):
        warn(remark)
    say(_copies_in(args.out, written))
    say("Names that you chose are kept (modules, functions, regions): check them before you share.")
    return 0


def write_copies(sources: Sequence[Path], folder: Path, progress: Callable[[str], None]) -> tuple[int, list[str]]:
    """Write an anonymous copy of each trace; returns how many there are, and what is missing from or in them."""
    problems: list[str] = []

    def write(source: Path, target: Path) -> None:
        problems.extend(f"{target.name}: {problem}" for problem in write_anonymous_copy(source, target))

    copies = [(source, folder / name) for source, name in _names(sources)]
    failures = _copy_each(copies, write, progress)
    problems += (f"{target.name} is left out: {why.removeprefix(f'{source}: ')}" for source, target, why in failures)
    return len(copies) - len(failures), problems


def _names(sources: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Each trace and the name of its copy: rank or running number, and window; `windows_by_rank` groups them alike."""
    for number, windows in enumerate(windows_by_rank(sources), start=1):
        rank = rank_in_name(windows[0])
        for window, source in enumerate(windows, start=1):
            if rank is not None:
                yield source, f"rank{rank}{f'_{window}' if window > 1 else ''}.trace.json.gz"
            elif len(windows) > 1:
                yield source, f"trace{number}.{window:010}.pt.trace.json.gz"
            else:
                yield source, f"trace{number}.trace.json.gz"


def tensorboard(args: argparse.Namespace) -> int:
    """Write copies for TensorBoard."""
    sources, notes = find_traces(args.path)
    copies = _targets(sources, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        failures = _copy_each(copies, write_plugin_copy, progress)
    for remark in (*notes, *(f"left out: {why}" for _, _, why in failures)):
        warn(remark)
    made = _copies_in(args.out, len(copies) - len(failures))
    say(f"{made}; to view them: tensorboard --logdir {quote(str(args.out))}    (tab PyTorch Profiler)")
    return 0


def _targets(sources: Sequence[Path], folder: Path) -> list[tuple[Path, Path]]:
    """Each trace and the path of its copy, by the rank in its name, else by its position."""
    named = [rank_in_name(source) for source in sources]
    ranks = [rank for rank in named if rank is not None]
    if len(set(ranks)) < len(sources):
        ranks = list(range(len(sources)))
    return [(source, folder / plugin_name(rank)) for source, rank in zip(sources, ranks, strict=True)]


def _copy_each(
    copies: Sequence[tuple[Path, Path]], write: Callable[[Path, Path], object], progress: Callable[[str], None]
) -> list[tuple[Path, Path, str]]:
    """Write a copy of each trace to its target; returns those that cannot be read. Raises if none can."""
    for (source, _), (_, target) in product(copies, copies):
        if same_file(source, target):
            raise ConfigurationError(f"{source}: the copy would replace the trace; give --out another folder")
    failures = []
    for source, target in copies:
        progress(f"copying {source}")
        try:
            write(source, target)
        except TraceError as exc:
            failures.append((source, target, str(exc)))
    if len(failures) == len(copies):
        raise TraceError.of([why for _, _, why in failures])
    return failures


def _copies_in(folder: Path, number: int) -> str:
    return f"{number} {'copy' if number == 1 else 'copies'} in {folder}"


def schema(args: argparse.Namespace) -> int:
    """Print a schema."""
    write_json(schema_json(of_record=args.record))
    return 0


def schema_json(*, of_record: bool = False) -> bytes:
    """The schema of `summary.json`, or of a line of a record, made from what is written to it."""
    if of_record:
        return schema_of(Line, "a line of forge-profiling's forge_record/rankN.jsonl")
    return schema_of(Analysis, "forge-profiling summary.json")

"""`forge-profiling show`: a run by its record, or what traces say; the JSON Schemas of both."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from lightning_forge_profiling.cli.shared import CUT_OFF, say, wraps, write_as_json, write_json
from lightning_forge_profiling.cli.sources import analyze_place, record_or_traces, warn_of_problems
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.json_layout import schema_of, summary_json
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.report.live_view import print_summary, run_summary
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.schema import Analysis, Line

_TOP_ON_TERMINAL = 8
_OF_TRACES = ("rank", "steps", "sort", "top")  # options


def show(args: argparse.Namespace) -> int:
    """Show a run, or traces."""
    if args.schema:
        write_json(schema_json(of_record=args.schema == "record"))
        return 0
    if args.path is None:
        args.parser.error("a run or a trace is needed: show PATH")
    if args.predictions:
        from lightning_forge_profiling.trial.report import predictions, results_in  # noqa: PLC0415  (only for this)

        for line in predictions(results_in(Path(args.path))):
            say(line)
        return 0
    options = {name: getattr(args, name) for name in _OF_TRACES if getattr(args, name) is not None}
    record = None if options else record_or_traces(args.path)
    return _show_traces(args, options) if record is None else _show_run(args, *record)


def _show_run(args: argparse.Namespace, folder: Path, where: str) -> int:
    record = read_run(folder)
    if args.json:
        write_as_json(run_summary(record, time.time()))
    elif args.markdown:
        analysis = run_summary(record, time.time()).analysis
        if analysis is None:
            raise ConfigurationError(f"{where} has no totals yet")
        sys.stdout.write(markdown(analysis))
    else:
        print_summary(record, where, time.time(), Screen(wrap=wraps()))
    warn_of_problems(record)
    return 0


def _show_traces(args: argparse.Namespace, options: dict[str, Any]) -> int:
    result, window = analyze_place(args.path, **options)
    analysis = result.analysis
    if args.json:
        write_json(summary_json(analysis))
    elif args.markdown:
        sys.stdout.write(markdown(analysis))
    else:
        from lightning_forge_profiling.report.terminal import print_analysis  # noqa: PLC0415  (only for traces)

        if Path(args.path).is_dir() and window != Path(args.path):
            say(f"window      {window}")  # of perhaps several below the folder
        shown = args.top or _TOP_ON_TERMINAL
        print_analysis(analysis, kernels=shown, operators=shown if args.top or args.sort else 0)
    return CUT_OFF if analysis.cut_off else 0


def schema_json(*, of_record: bool = False) -> bytes:
    """The schema of `summary.json`, or of a line of a record, made from what is written to it."""
    if of_record:
        return schema_of(Line, "a line of forge-profiling's forge_record/rankN.jsonl")
    return schema_of(Analysis, "summary.json of forge-profiling")

"""`forge-profiling try`: makes the named changes one after another, measures each, and keeps what helps."""

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lightning_forge_profiling import entry_point
from lightning_forge_profiling.cli.run import path_at_start, refuse_unless_installed, script_file
from lightning_forge_profiling.cli.shared import Progress, say, warn, write_as_json
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import Analysis, TriedChange, TryResult
from lightning_forge_profiling.trial import report
from lightning_forge_profiling.trial.ablated import ABLATED, place, without_call
from lightning_forge_profiling.trial.changes import VALIDATION, Change, by_hand, candidates
from lightning_forge_profiling.trial.processes import Measured, Trials, python, validation_ms
from lightning_forge_profiling.trial.search import Search, TrialError, in_words

_RANKS = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "WORLD_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_TASKS"}  # with how many
_RUNNER = "from lightning_forge_profiling.trial.ablated import main; main()"
_LEAST_LIMIT_S = 120.0  # for a process of a trial, which may compile
_VALIDATION_PCT = 10.0  # least share of the time at which validation counts
_MOST_STARTS = 7  # for a change: three pairs of runs, of which the first may decide


def try_(args: argparse.Namespace) -> int:
    """Try changes of a script."""
    script, *arguments = args.script
    _refuse_ranks(args)
    started = script if args.module else script_file(script)
    refuse_unless_installed()
    ablated = None if args.ablate is None else _ablated(args.ablate)
    _ask(args, script)
    command = [*python(module=args.module), started, *arguments]
    if ablated is not None:
        command = [*python(module=False), "-c", _RUNNER, *(["-m"] if args.module else []), started, *arguments]
    folder = args.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        folder.mkdir()
    code = read_regular(Path(started)) if Path(started).is_file() else b""
    digest = hashlib.sha256(b"\0".join([code, *map(os.fsencode, arguments)])).hexdigest()[:16]
    result = TryResult(script=script, arguments=digest, host=socket.gethostname(), at=time.time())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a trial that is under way is ended
    with Progress(after_s=0.0) as progress, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        trials = Trials(command, folder, _variables, temporary=Path(temporary))
        result = _Session(args, trials, result, progress).run(ablated)
    write_whole(folder / report.TRY_JSON, msgspec.json.format(msgspec.json.encode(result), indent=2))
    if args.format == "json":
        write_as_json(result)
    elif args.format == "github":
        write_as_json(report.github(result))
    else:
        for line in report.last_lines(result):
            say(line)
        say(f"{'records':<11}{folder}")
    return 130 if result.ended == _INTERRUPTED else 0


_INTERRUPTED = "interrupted: this is what was known by then"


def _variables(options: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, str]:
    """What starts a trial with the callbacks."""
    return {
        "PYTHONPATH": path_at_start(),
        entry_point.RUN_OPTIONS: json.dumps(options),
        entry_point.TRIAL_OPTIONS: json.dumps(trial),
    }


def _refuse_ranks(args: argparse.Namespace) -> None:
    """Refuse to start from each rank of a launcher."""
    many = (name for name, of in _RANKS.items() if name in os.environ and os.environ.get(of, "1") != "1")
    if (name := next(many, None)) is None:
        return
    script = " ".join([*(["-m"] if args.module else []), *args.script])
    raise ConfigurationError(
        f"{name} is set: this is a rank of a launcher, and each would try by itself. Start the launcher from `try`, "
        f"anew for each trial: forge-profiling try -m torch.distributed.run --nproc-per-node N {script}"
    )


def _ask(args: argparse.Namespace, script: str) -> None:
    """Say what will be done, and ask on a terminal; refuse where nobody can answer."""
    starts = 1 + _MOST_STARTS if args.ablate else int(args.budget // 5)
    warn(
        f"{script} will be started again and again, at most {max(starts, 3)} times in {report.minutes(args.budget)}. "
        "What it does before fit() is done each time; its loggers and checkpoints are off, and nothing after fit() is "
        "done"
    )
    if args.yes:
        return
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigurationError("there is no terminal to ask on: say --yes if the script may be started that often")
    sys.stderr.write("forge-profiling: go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError("nothing was started")


def _ablated(text: str) -> tuple[Change, str]:
    """The change that leaves out the call at a line."""
    file, line = place(text)
    _, removed = without_call(read_regular(file), str(file), line)
    where = f"{file}:{line}"
    spec = {"environment": {ABLATED: where}}
    return Change(report.ABLATION, f"without {removed}", spec, "random numbers", (where,)), removed


@dataclass(slots=True)
class _Session:
    """One `try`: says what has been decided as soon as it is."""

    args: argparse.Namespace
    trials: Trials
    result: TryResult
    progress: Progress
    baseline: list[Measured] = field(default_factory=list)
    latest: Analysis | None = None  # with what is kept
    counts: bool = True  # whether validation does
    told: int = 0

    def run(self, ablated: tuple[Change, str] | None) -> TryResult:
        """Diagnose the script, and try what that calls for."""
        began = time.monotonic()
        again = None if self.args.only else self._diagnose  # else its changes are known
        search = Search(self._measure, again, self.args.budget, self._tell)
        fields: dict[str, Any] = {}
        try:
            diagnosed = self._begin()
            fields = self._of(diagnosed)
            self.result = replace(self.result, **fields)
            if ablated is None:
                rows = partial(candidates, only=self.args.only or (), everything=self.args.all)
                before = [] if self.args.again else report.results_in(self.args.out)
                search.run(diagnosed, rows, report.known_before(before, self.result))
            else:
                search.ablate(ablated[0], diagnosed)
        except KeyboardInterrupt:
            fields["ended"] = _INTERRUPTED
        except TrialError as exc:
            if not search.tried:
                raise
            fields["ended"] = str(exc)
        step, kept = search.result(), [each for each in search.tried if each.state == "kept"]
        if not search.tried:
            self._say_baseline()
        return replace(
            self.result,
            **fields,
            by_hand=self._by_hand(
                {each.cause for each in kept}, None if self.args.only or ablated else search.asked.causes
            ),
            baseline=in_words(self.baseline[1:] or self.baseline),
            tried=tuple(search.tried),
            not_tried=search.not_tried,
            before_ms=None if step is None else step.a,
            after_ms=None if step is None else step.b,
            ratio=None if step is None else step.ratio,
            seconds=time.monotonic() - began,
            starts=self.trials.starts,
        )

    def _begin(self) -> Measured:
        """The first run, which says what bounds the script and whether its validation counts."""
        self.progress("baseline: what bounds it")
        diagnosed = self.trials.measure((), diagnosis=True)
        if diagnosed.source is None:
            raise TrialError(f"the script cannot be tried: {diagnosed.failure} (its output: {diagnosed.folder})")
        whole_ms = diagnosed.source.metrics["step"].value
        self.counts = 100 * validation_ms(diagnosed.facts) >= _VALIDATION_PCT * whole_ms
        self.trials.validates = self.counts
        self.trials.limit_s = min(self.trials.limit_s, _LEAST_LIMIT_S + 5 * diagnosed.seconds)
        diagnosed = self._as_counts(diagnosed)
        self.baseline.append(diagnosed)
        return diagnosed

    def _diagnose(self, changes: Sequence[Change]) -> Measured:
        self.progress(f"run {self.trials.starts + 1}: what bounds it now")
        diagnosed = self._as_counts(self.trials.measure(changes, diagnosis=True))
        self.latest = diagnosed.analysis or self.latest
        return diagnosed

    def _by_hand(self, kept: Collection[str], asked: Collection[str] | None) -> dict[str, str]:
        """What only the user can change, by the first run and by the latest that tells what bounds the script."""
        first = self.baseline[0].analysis if self.baseline else None
        return by_hand(first, kept, asked) | by_hand(self.latest, kept, asked)

    def _as_counts(self, diagnosed: Measured) -> Measured:
        """The run without what its validation costs, if that does not count: it came earlier than it would."""
        if diagnosed.analysis is None or self.counts:
            return diagnosed
        others = tuple(each for each in diagnosed.analysis.findings if each.code != VALIDATION)
        return dataclasses.replace(diagnosed, analysis=replace(diagnosed.analysis, findings=others))

    def _of(self, diagnosed: Measured) -> dict[str, Any]:
        analysis = diagnosed.analysis
        codes = [] if analysis is None else [each.code for each in analysis.findings]
        verdict = "" if analysis is None else analysis.verdict
        return {
            "model": diagnosed.facts.model,
            "device": diagnosed.facts.device,
            "verdict": next(iter(codes), "") if verdict == VALIDATION and verdict not in codes else verdict,
        }

    def _measure(self, changes: Sequence[Change]) -> Measured:
        names = ", ".join(report.short(each.code) for each in changes) or "no change"
        self.progress(f"run {self.trials.starts + 1}: {names}")
        measured = self.trials.measure(changes)
        if measured.failure and not changes and not self.trials.validates and len(self.baseline) == 1:
            self.trials.validates = True  # the script reads what a validation has logged
            measured = self.trials.measure(changes)
        if not changes and not measured.failure:
            self.baseline.append(measured)
        return measured

    def _tell(self, tried: TriedChange) -> None:
        if sys.stderr.isatty():
            self.progress("")
        if not self.told:
            self._say_baseline()
        self.told += 1
        if self.args.format == "text":
            say(report.tried_line(self.told, tried))

    def _say_baseline(self) -> None:
        if self.args.format == "text":
            say(report.baseline_line(replace(self.result, baseline=in_words(self.baseline[1:] or self.baseline))))

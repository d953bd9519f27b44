"""The result of a `try`: as lines of text, for GitHub, and what earlier ones found."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.safe_files import read_regular
from lightning_forge_profiling.schema import TriedChange, TryResult
from lightning_forge_profiling.trial.search import times_as_fast

TRY_JSON: Final = "try.json"
ABLATION: Final = "ablate"  # name of the change that leaves out a call
_NAME, _CODE, _MS, _TEXT = 11, 44, 10, 42  # columns


def short(code: str) -> str:
    """The part of a code that changes.

    Examples:
        >>> short("DataLoader(..., num_workers=8)"), short("trainer.fit(torch.compile(model), ...)")
        ('num_workers=8', 'torch.compile(model)')
    """
    if (inner := re.fullmatch(r"(?:DataLoader|Trainer)\(\.\.\., (.*)\)", code.partition("  #")[0])) is not None:
        return inner[1]
    if (fitted := re.fullmatch(r"trainer\.fit\((.*), \.\.\.\)", code)) is not None:
        return fitted[1]
    return code


def tried_line(number: int, tried: TriedChange) -> str:
    """One change that was tried, in a line."""
    ms = "" if tried.after_ms is None else f"{digits(tried.after_ms)} ms"
    state = ", ".join(filter(None, (tried.state, tried.losses if tried.after_ms is not None else "")))
    name = "drop" if tried.state == "dropped" else "try"
    if tried.after_ms is None:
        return _columns((f"{name} {number}", _NAME), (short(tried.code), _CODE), (f"{tried.state}: {tried.text}", 0))
    return _columns((f"{name} {number}", _NAME), (short(tried.code), _CODE), (ms, _MS), (tried.text, _TEXT), (state, 0))


def _columns(*cells: tuple[str, int]) -> str:
    """Cells of some width each; a longer one is followed by two spaces."""
    return "".join(f"{text:<{width}}" if len(text) < width - 1 else f"{text}  " for text, width in cells).rstrip()


def baseline_line(result: TryResult) -> str:
    """The unchanged script, in a line."""
    return _columns(("baseline", _NAME), (result.baseline, _CODE + _MS), (result.verdict, 0))


def last_lines(result: TryResult) -> Iterator[str]:
    """What was kept, how much that gains, and the code to write."""
    took, wide = minutes(result.seconds), _CODE + _MS
    nothing = "nothing that was tried helps"
    if not result.tried and not result.not_tried:
        nothing = "no finding calls for a change that can be made from outside (--all tries each that applies)"
    text = f"{nothing}; the script was started {result.starts} time{'' if result.starts == 1 else 's'} in {took}"
    if result.ratio is not None and result.before_ms is not None and result.after_ms is not None:
        step = f"{digits(result.before_ms)} -> {digits(result.after_ms)} ms a step"
        text = f"{step}, {times_as_fast(result.ratio)}, in {took}"
    first = next(iter(result.tried), None)
    if first is not None and first.name == ABLATION and first.before_ms is not None and first.after_ms is not None:
        text = f"{digits(max(first.before_ms - first.after_ms, 0.0))} ms of each step are that call's, in {took}"
    yield _columns(("result", _NAME), (text, 0))
    for number, each in enumerate(kept(result)):
        places = ", ".join(map(_shown, each.places))
        yield _columns(("" if number else "change", _NAME), (each.code, wide), (places, 0))
    for code, why in result.not_tried.items():
        yield _columns(("not tried", _NAME), (short(code), wide), (why, 0))
    for code, advice in result.by_hand.items():
        yield _columns(("by hand", _NAME), (f"{code}: {advice.partition('. ')[0].rstrip('.')}", 0))
    if result.ended:
        yield _columns(("ended", _NAME), (result.ended, 0))


def kept(result: TryResult) -> list[TriedChange]:
    """The changes that are kept at the end."""
    dropped = {each.name for each in result.tried if each.state == "dropped"}
    return [each for each in result.tried if each.state == "kept" and each.name not in dropped]


def _shown(place: str) -> str:
    """A file and line, the file relative to the working directory if it is below that."""
    name, _, line = place.rpartition(":")
    path = Path(name)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def minutes(seconds: float) -> str:
    """A time as `6 min 40 s`."""
    whole, left = divmod(round(seconds), 60)
    return f"{whole} min {left} s" if whole else f"{left} s"


def github(result: TryResult) -> list[dict[str, Any]]:
    """The step before and after for github-action-benchmark, as its tool `customSmallerIsBetter` reads them."""
    changes = "; ".join(each.code for each in kept(result)) or "nothing kept"
    sides = ("step without changes", result.before_ms, ""), ("step with what was kept", result.after_ms, changes)
    return [
        {"name": name, "unit": "ms", "value": float(f"{ms:.6g}"), **({"extra": extra} if extra else {})}
        for name, ms, extra in sides
        if ms is not None
    ]


def results_in(folder: Path) -> list[TryResult]:
    """Results of earlier tries below a folder, oldest first. What cannot be read is left out."""
    found = []
    for path in folder.rglob(TRY_JSON) if folder.is_dir() else ():
        try:
            found.append(msgspec.json.decode(read_regular(path), type=TryResult))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda each: each.at)


def known_before(results: Iterable[TryResult], this: TryResult) -> dict[str, str]:
    """By code of a change why it is not tried again: it failed or did not help the unchanged script on this machine."""
    same = (each for each in results if _subject(each) == _subject(this))
    return {
        tried.code: f"tried before: {tried.state}, {tried.text} (--again tries it again)"
        for each in same
        for tried in each.tried
        if tried.state in {"left out", "failed"} and not tried.on_top_of
    }


def _subject(result: TryResult) -> tuple[str, ...]:
    return result.host, result.device, Path(result.script).name, result.arguments, result.model


def predictions(results: Sequence[TryResult]) -> list[str]:
    """What findings predicted of a change beside what it saved, a line each."""
    rows = [f"{'finding':<24}{'change':<{_CODE}}{'predicted':>14}{'measured':>12}   ms a step"]
    for each in results:
        for tried in each.tried:
            if tried.predicted is None or tried.before_ms is None or tried.after_ms is None:
                continue
            predicted = f"{'at most ' if tried.predicted.at_most else ''}{digits(tried.predicted.ms_per_step)}"
            saved = tried.before_ms - tried.after_ms
            measured = f"{'-' if saved < 0 else ''}{digits(abs(saved))}"
            rows.append(f"{tried.cause:<24}{short(tried.code):<{_CODE}}{predicted:>14}{measured:>12}   {each.model}")
    return rows if len(rows) > 1 else ["no change was tried for a finding that predicts a saving"]

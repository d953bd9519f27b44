"""A run as one web page, from its record: verdict, split of step and run, curves, ranks, events."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.record.lines import EventLine
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.report.charts import Mark, Placing, TimeAxis, axis_row, chart_row, mark_row
from lightning_forge_profiling.report.curves import curves, points
from lightning_forge_profiling.report.live_view import regions_table, setting_words
from lightning_forge_profiling.report.page import asset, filled, page, scrolling_table
from lightning_forge_profiling.report.run_status import (
    RankPace,
    RunStatus,
    counted,
    duration,
    rank_paces,
    run_status,
    split,
    totals,
)
from lightning_forge_profiling.report.run_table import Line, Row, RunTable, run_table
from lightning_forge_profiling.report.run_wording import ledger_rows
from lightning_forge_profiling.report.text import escaped
from lightning_forge_profiling.report.wording import share_of
from lightning_forge_profiling.results.analysis import Analysis, RunLedger

_PROBLEMS: Final = frozenset({"exception", "slow-step", "recompilation"})
_SHOWN_EVENTS: Final = 100
_COLOURED: Final = 6
_WORTH_A_NAME_PCT: Final = 7.0


def run_page(record: RunRecord, now: float) -> str:
    """Render a run as a web page.

    The page is one file without scripts. Its content security policy blocks every request.
    """
    status, (first, state) = run_status(record, now), totals(record)
    analysis = None if state is None else state.report.analysis
    ledger = analysis.run.ledger if analysis is not None and analysis.run is not None else None
    table = _pace_table(first) if state is None else run_table(state.report)
    placing = Placing()
    sections = [
        _verdict(status, first, analysis),
        _step(table, placing),
        _ledger(ledger, placing),
        _over_time(record, first, status, placing),
        _ranks(rank_paces(record, now)),
        _findings(analysis),
        _events(record, status),
        _setting(first, record.problems),
    ]
    values = {"source": escaped(str(record.folder)), "sections": "\n".join(filter(None, sections))}
    title = escaped(f"{status.outcome} · {record.folder}")
    return page(title, filled(asset("run.html"), values), style=asset("run.css") + placing.rules())


def _pace_table(first: RankRecord) -> RunTable:
    """Split of the step before the first totals."""
    by_region = split(counted(first))
    return regions_table(by_region, beside_run=True) if by_region else RunTable((), "")


# -- sections --------------------------------------------------------------------------------------------------------


def _section(name: str, heading: str, *parts: str) -> str:
    title = f"<h2>{heading}</h2>" if heading else ""
    return f'<section id="{name}">{title}{"".join(parts)}</section>' if any(parts) else ""


def _verdict(status: RunStatus, first: RankRecord, analysis: Analysis | None) -> str:
    found = next((one for one in analysis.findings if one.code == analysis.verdict), None) if analysis else None
    code = analysis.verdict if analysis else "no verdict yet"
    title = found.title if found is not None else code
    advice = f'<p class="advice">{escaped(found.remedy)}</p>' if found is not None else ""
    begin = first.begin
    facts = {
        "Device": begin.device,
        "Host": begin.host,
        "Ranks": f"{begin.world_size:,}",
        "Steps": f"{status.step:,}",
        "Time": duration(status.at - status.began),
    }
    shown = "".join(f"<div><dt>{name}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    badges = f'<span class="badge">{escaped(code)}</span><span class="badge quiet">{status.outcome}</span>'
    return _section(
        "verdict",
        "",
        f'<div class="badges">{badges}<span class="muted">{escaped(status.text)}</span></div>',
        f"<h1>{escaped(title)}</h1>{advice}",
        f'<dl class="facts">{shown}</dl>',
    )


def _step(table: RunTable, placing: Placing) -> str:
    if not table.rows:
        return _section("step", "Where a step goes", '<p class="empty">No step was timed.</p>')
    first, *others = table.headings
    head = f"<th>{escaped(first)}</th>{_heads(others)}"
    parts = [(row.name, row.pct, f"region-{row.name}") for row in table.rows if row.pct and row.name in REGIONS]
    rows = "".join(_row(row, placing) for row in table.rows)
    return _section(
        "step",
        escaped(table.title or "Where a step goes"),
        _bar(parts, placing),
        scrolling_table(head, rows),
        _lines(table.lines),
    )


def _row(row: Row, placing: Placing) -> str:
    style = ' class="whole"' if row.pct is None else ""
    pct = row.pct or 0.0
    share = "" if row.pct is None else f"{pct:.1f} %"
    times = "".join(map(_number, row.times))
    bar = f"number bar {placing.at('--part', pct)}"
    return f'<tr{style}><th scope="row">{escaped(row.name)}</th><td class="{bar}">{share}</td>{times}</tr>'


def _bar(parts: Sequence[tuple[str, float, str]], placing: Placing) -> str:
    """Stacked bar of parts: name, share in percent, class of the colour."""
    said = ", ".join(f"{name} {pct:.0f} %" for name, pct, _ in parts)
    segments = "".join(
        f'<div class="segment {colour} {placing.at("--part", pct)}" title="{escaped(name)} {pct:.1f} %">'
        f"<span>{escaped(name) if pct >= _WORTH_A_NAME_PCT else ''}</span></div>"
        for name, pct, colour in parts
    )
    return f'<div class="stack" role="img" aria-label="{escaped(said)}">{segments}</div>' if parts else ""


def _lines(lines: Iterable[Line]) -> str:
    rows = "".join(f"<dt>{escaped(line.name)}</dt><dd>{escaped(line.text.text)}</dd>" for line in lines)
    return f'<dl class="lines">{rows}</dl>' if rows else ""


def _ledger(ledger: RunLedger | None, placing: Placing) -> str:
    if ledger is None or ledger.wall_s <= 0:
        return ""
    rows = [(name, s, count) for name, s, count in ledger_rows(ledger) if s > 0]
    shares = [100 * s / ledger.wall_s for _, s, _ in rows]
    colours = [f"part-{place}" if place < _COLOURED else "part-rest" for place in range(len(rows))]
    parts = [(name, pct, colour) for (name, _, _), pct, colour in zip(rows, shares, colours, strict=True)]
    cells = "".join(
        f'<tr><th scope="row"><span class="part"><span class="swatch {colour}"></span>{escaped(name)}</span></th>'
        f'<td class="number bar {placing.at("--part", pct)}">{pct:.1f} %</td>'
        f"{_number(f'{seconds:,.2f}')}{_number('' if count is None else f'{count:,}')}</tr>"
        for (name, seconds, count), pct, colour in zip(rows, shares, colours, strict=True)
    )
    head = f"<th>part</th>{_heads(('% of the run', 'seconds', 'times'))}"
    return _section("ledger", "Where the run went", _bar(parts, placing), scrolling_table(head, cells))


def _over_time(record: RunRecord, first: RankRecord, status: RunStatus, placing: Placing) -> str:
    found = points(counted(first), status.began)
    if not found:
        return ""
    axis = TimeAxis(status.at - status.began)
    marks = [_mark(event, status.began) for event in _seen_once(record)]
    rows = [axis_row(axis, placing), *(chart_row(chart, axis, marks, placing) for chart in curves(found))]
    kinds = dict.fromkeys(mark.kind for mark in marks)
    rows += [mark_row(kind, [mark for mark in marks if mark.kind == kind], axis) for kind in kinds]
    notes = [
        "Each point covers the steps since the previous one. The band reaches from the median to the 95th percentile."
    ]
    notes += [f"Curves are of rank {first.begin.rank}."] if len(record.ranks) > 1 else []
    lost = counted(first)[0]
    if lost.step > 2 * lost.counted + 1000:
        notes.append(f"The record keeps only its newest part: intervals before step {lost.step:,} were deleted.")
    if marks:
        notes.append("Grey and tinted bars are events, as in the lanes below.")
    return _section(
        "over-time", "Over the run", f'<div class="telemetry">{"".join(rows)}</div>',
        f'<p id="telemetry-text" class="muted">{" ".join(notes)}</p>',
    )  # fmt: skip


def _mark(event: EventLine, began: float) -> Mark:
    """Mark of an event, whose time is that of its end."""
    return Mark(event.at - event.seconds - began, event.seconds, event.kind, is_problem=event.kind in _PROBLEMS)


def _ranks(paces: Sequence[RankPace]) -> str:
    if len(paces) < 2:  # noqa: PLR2004
        return ""
    head = f"<th>rank</th><th>host</th>{_heads(('step', 'step ms', 'own work, ms', 'waits, ms', ''))}"
    rows = ""
    for pace in paces:
        numbers = (pace.step_ms, pace.own_ms, pace.waits_ms)
        texts = (f"{pace.step:,}", *("" if ms is None else f"{ms:.2f}" for ms in numbers), pace.outcome)
        cells = f"<td>{escaped(pace.host)}</td>{''.join(map(_number, texts))}"
        style = ' class="late"' if pace.late else ""
        rows += f'<tr{style}><th scope="row">{pace.rank}</th>{cells}</tr>'
    note = (
        "Own work and waiting for other ranks per step, over the run. "
        "The rank with most own work is late, and the others wait for it."
    )
    return _section("ranks", "Ranks", scrolling_table(head, rows), f'<p class="muted">{note}</p>')


def _findings(analysis: Analysis | None) -> str:
    said = (
        ""
        if analysis is None
        else "".join(
            f'<div class="finding"><div class="badges"><span class="badge quiet">{escaped(found.code)}</span>'
            f'<span class="muted">{found.share_pct:.0f} % {share_of(analysis, found)}</span></div>'
            f'<h3>{escaped(found.title)}</h3><p class="advice">{escaped(found.remedy)}</p></div>'
            for found in analysis.findings
            if found.code != analysis.verdict
        )
    )
    hints = "".join(f"<li>{escaped(hint.text)}</li>" for hint in analysis.hints) if analysis else ""
    return _section("findings", "Other findings", said, f'<ul class="hints">{hints}</ul>' if hints else "")


def _seen_once(record: RunRecord) -> Iterator[EventLine]:
    """All events by time. An event of several ranks is listed once."""
    found: dict[tuple[int, str, str], EventLine] = {}
    for rank in record.ranks:
        for event in rank.events:
            found.setdefault((event.step, event.kind, event.text), event)
    yield from sorted(found.values(), key=lambda event: event.at)


def _events(record: RunRecord, status: RunStatus) -> str:
    events = list(_seen_once(record))
    rows = "".join(
        f"<tr>{_number(duration(event.at - status.began))}{_number(f'{event.step:,}')}<td>{escaped(event.kind)}</td>"
        f"{_number(f'{event.seconds:.2f}' if event.seconds else '')}<td>{escaped(event.text)}</td></tr>"
        for event in reversed(events[-_SHOWN_EVENTS:])
    )
    head = f"{_heads(('after', 'step'))}<th>event</th>{_heads(['seconds'])}<th></th>"
    more = f'<p class="muted">The newest {_SHOWN_EVENTS} of {len(events):,}.</p>' if len(events) > _SHOWN_EVENTS else ""
    return _section("events", "Events", scrolling_table(head, rows) if rows else "", more)


def _setting(first: RankRecord, problems: Sequence[str]) -> str:
    begin = first.begin
    rows = {
        "Trainer": setting_words(first),
        "Versions": ", ".join(f"{name} {version}" for name, version in begin.versions.items()),
        "Command": " ".join(begin.argv),
        "Commit": begin.commit,
        "Resumed from": begin.restored_from,
        "Continues": begin.continues,
        "Could not be read": "; ".join(problems),
    }
    said = "".join(f"<dt>{name}</dt><dd>{escaped(value)}</dd>" for name, value in rows.items() if value)
    return _section("setting", "The run", f"<dl>{said}</dl>")


def _heads(names: Iterable[str]) -> str:
    """Head cells of columns of numbers."""
    return "".join(f'<th class="number">{escaped(name)}</th>' for name in names)


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'

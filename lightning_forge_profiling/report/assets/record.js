// What the record of a run adds to its page: its curves and events, its ranks, its settings.

const EVENTS_SHOWN = 20;
const RANKS_SHOWN = 16;
const FROM_LEAST = "\u00b0C"; // a scale in this unit does not begin at 0
const LARGE_UNITS = [[1e9, "billion "], [1e6, "million "], [1e4, "thousand "]];

function curveChart({ title, unit, name, values, highs }) {
  const most = Math.max(...values.filter(isNumber), ...highs);
  const [factor, large] = LARGE_UNITS.find(([from]) => most >= from) ?? [1, ""];
  const divisor = factor === 1e4 ? 1e3 : factor;
  const scaled = (all) => all.map((value) => (isNumber(value) ? value / divisor : null));
  const [means, tops] = [scaled(values), highs.length ? scaled(highs) : null];
  const kind = {
    title, unit: `${large}${unit}`, top: unit === "%" && most > 50 && most <= 100 ? 100 : undefined, fromLeast: unit === FROM_LEAST,
    digits: Math.min(3, Math.max(0, 2 - Math.floor(Math.log10(Math.max(most / divisor, 1e-3))))),
  };
  return chartOf(kind, [lineOf(name, "a", means, means, tops ?? means)]);
}

// The events with their times since the run began.
const eventsOf = ({ events, began }) => events.map((event) => ({ ...event, start_s: event.at - (event.seconds ?? 0) - began, end_s: event.at - began, text: event.text ?? "" }));

// The events of one kind, as a lane below the charts.
function eventState(kind, events, time, isProblem) {
  const spans = events.map((event) => ({
    begin: time.part(event.start_s), end: Math.max(time.part(event.end_s), time.part(event.start_s) + 0.0015), share: 100,
  }));
  const during = (index) => events.filter((event) => event.start_s <= time.seconds[index] && event.end_s >= (time.seconds[index - 1] ?? 0));
  const holds = (index) => during(index).length > 0;
  const lasting = (index) => during(index).reduce((sum, event) => sum + event.end_s - event.start_s, 0);
  const at = (index) => (lasting(index) > 0 ? `${short(lasting(index))} s` : holds(index) ? "yes" : "no");
  const total = `${number(events.length)} \u00d7`;
  return { name: kind, style: isProblem ? "throttled" : "left-out", spans, total, label: `${kind}: ${total}`, holds, at };
}

function curvesSection(record) {
  const { seconds, curves, problems, length_s: length } = record;
  const events = eventsOf(record);
  const time = new RunTime({ seconds, samples_per_point: 1 }, { training: 0, length });
  const kinds = [...new Set(events.map((event) => event.kind))];
  const states = kinds.map((kind) => eventState(kind, events.filter((event) => event.kind === kind), time, problems.includes(kind)));
  const view = new ChartsView(time, curves.map(curveChart), states);
  const notes = [
    "Each point covers the steps since the previous one. The band reaches from the median to the 95th percentile.",
    record.ranks?.table.rows.length > 1 && `Curves are of rank ${record.curves_of}.`,
    record.lost_steps > 0 && `The record keeps only its newest part: intervals before step ${number(record.lost_steps)} were deleted.`,
    states.length > 0 && "Grey and tinted bars are events, as in the lanes below.",
  ];
  return [view.element, element("p", { class: "charts-text muted" }, notes.filter(Boolean).join(" "))];
}

function ranksSection({ table, lines }) {
  return [named(lines), tableOf(table, { limit: RANKS_SHOWN })];
}

function eventsSection({ event_table: table }) {
  return tableOf(table, { limit: EVENTS_SHOWN });
}

function aboutRun({ facts: ofRun, step, setting }, summary) {
  return [
    facts([...ofRun, ...(summary.ranks.length ? overview(summary).slice(2) : [])]),
    named([...step.lines.filter(({ name }) => name !== "note"), ...setting]),
  ];
}

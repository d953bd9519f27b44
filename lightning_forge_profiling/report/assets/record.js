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
    record.ranks?.ranks.length > 1 && `Curves are of rank ${record.curves_of}.`,
    record.lost_steps > 0 && `The record keeps only its newest part: intervals before step ${number(record.lost_steps)} were deleted.`,
    states.length > 0 && "Grey and tinted bars are events, as in the lanes below.",
  ];
  return [view.element, element("p", { class: "charts-text muted" }, notes.filter(Boolean).join(" "))];
}

// All ranks, the worst first; columns that no rank has are left out.
function ranksSection({ ranks, words, lines }) {
  const rows = ranks.map((rank, index) => ({ ...rank, words: words[index] }));
  const has = (value) => rows.some((rank) => value(rank));
  const odd = (text, rank) => (rank.words ? element("b", null, text) : text);
  const columns = [
    column.text("Rank", (rank) => rank.rank, (number, rank) => odd(String(number), rank)),
    column.text("", (rank) => rank.words, odd),
    has((rank) => isNumber(rank.own_ms)) && column.number("own work, ms", (rank) => rank.own_ms, 2),
    has((rank) => isNumber(rank.waits_ms)) && column.number("waits, ms", (rank) => rank.waits_ms, 2),
    column.number("age, s", (rank) => (rank.state === "missing" ? null : rank.age_s), 0, "since it was last heard"),
    column.count("step", (rank) => rank.step),
    has((rank) => rank.host) && column.text("Host", (rank) => rank.host),
    has((rank) => rank.sensors.sm_mhz) && column.number("MHz", (rank) => rank.sensors.sm_mhz ?? null, 0),
    has((rank) => rank.sensors.temperature_c) && column.number("\u00b0C", (rank) => rank.sensors.temperature_c ?? null, 0),
  ].filter(Boolean);
  const table = new DataTable({ label: "Ranks of the run", rows, columns, limit: RANKS_SHOWN }).element;
  table.classList.add("small");
  return [
    named(lines),
    table,
    element("p", { class: "muted" }, "Own work is the step without waiting for other ranks. The rank with most of it is the one that the others wait for."),
  ];
}

function eventsSection(record) {
  return [
    new DataTable({
      label: "Events", rows: eventsOf(record).reverse(), limit: EVENTS_SHOWN, columns: [
        column.text("Event", (event) => event.kind),
        column.count("step", (event) => event.step),
        column.number("after, s", (event) => event.end_s, 1, "since the run began"),
        column.number("seconds", (event) => (event.end_s > event.start_s ? event.end_s - event.start_s : null), 2, "with what ran inside it"),
        column.text("What", (event) => event.text, (text) => element("span", null, breakable(text))),
      ],
    }).element,
    record.events_left_out > 0 && element("p", { class: "muted" }, `${number(record.events_left_out)} earlier events are left out.`),
  ];
}

function aboutRun({ facts: ofRun, step, setting }, summary) {
  return [
    facts([...ofRun, ...(summary.ranks.length ? overview(summary).slice(2) : [])]),
    named([...step.lines.filter(({ name }) => name !== "note"), ...setting]),
  ];
}

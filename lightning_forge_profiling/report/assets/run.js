// Where the run's time went: one bar of all of it, and on an axis of time when its long parts took place.

const PART_COLOURS = [
  [/^steps$/, ["--blue"]],
  [/^startup\/process$/, ["--stone"]],
  [/^startup\//, ["--slate", "--sand"]],
  [/^sanity_check$/, ["--pink"]],
  [/^validation/, ["--plum", "--pink", "--lilac"]],
  [/^checkpoint/, ["--brown", "--sand"]],
  [/^data_loader$/, ["--amber"]],
  [/^compile$/, ["--lilac"]],
  [/^gc\//, ["--rose", "--pink"]],
  [/^profiler$/, ["--indigo"]],
  [/^logger\//, ["--teal", "--green"]],
  [/^(callback|module|datamodule)\//, ["--vermilion", "--yellow", "--olive", "--rose", "--mint"]],
  [/^teardown$/, ["--grey"]],
];
const FOLDED_PCT = 1; // of the run: what is shorter is in the bar's rest
const VISIBLE_PCT = 0.1;
const SHORTEST = 0.0015; // of the axis: a span is drawn so wide at least
const FAINTEST_SPAN = 0.3;
const OTHER_LANES = 6;
const LANE_PCT = 0.5; // of the axis: what is shorter is in the table of spans alone

// Colours by name; of hooks and loggers each has another as long as there are some.
function partColours(names) {
  const used = new Map();
  return new Map(names.map((name) => {
    const [pattern, colours] = PART_COLOURS.find(([each]) => each.test(name)) ?? [null, ["--grey"]];
    const place = used.get(pattern) ?? 0;
    used.set(pattern, place + 1);
    return [name, colours[place % colours.length]];
  }));
}

const inSeconds = (value) => `${short(value)} s`;

// The bar's parts: the large ones of the ledger, the rest together, and what is in none.
function barParts(ledger, colours) {
  const pct = (seconds) => (100 * seconds) / ledger.wall_s;
  const made = (name, seconds, colour, idle = false) => ({
    name, seconds, colour, idle, pct: pct(seconds), title: `${name}: ${inSeconds(seconds)}, ${percent(pct(seconds))}`,
  });
  const parts = Object.entries(ledger.parts);
  const large = parts.filter(([, seconds]) => pct(seconds) >= FOLDED_PCT);
  const rest = parts.reduce((sum, part) => (large.includes(part) ? sum : sum + part[1]), 0);
  return [
    ...large.map(([name, seconds]) => made(name, seconds, colours.get(name))),
    rest > 0 && made("rest", rest, "--region-other"),
    Math.abs(pct(ledger.unexplained_s)) >= VISIBLE_PCT && made("unexplained", ledger.unexplained_s, "--grey", true),
  ].filter(Boolean);
}

function runBar(ledger, colours) {
  const parts = barParts(ledger, colours);
  const drawnParts = parts.filter((part) => part.pct > 0); // a negative remainder is in the legend alone
  const whole = drawnParts.reduce((sum, part) => sum + part.pct, 0);
  const text = parts.map((part) => `${part.name} ${percent(part.pct)}`).join(", ");
  return [
    barOf(`The whole run, ${inSeconds(ledger.wall_s)}: ${text}`, drawnParts.map((part) => segment(part, (100 * part.pct) / whole))),
    element("ul", { class: "legend" }, parts.map((part) => element("li", null, swatch(part.colour, part.idle),
      element("span", { class: "name" }, breakable(part.name)), "\u00a0", element("span", { class: "muted" }, `${inSeconds(part.seconds)}, ${percent(part.pct)}`)))),
  ];
}

const BEFORE_FIT = new Set(["startup/imports", "startup/script", "startup/process", "startup/trainer"]);

// The axis of a run: from the fit on, which a long-lived script may have begun late. The telemetry lies on it, too.
function runAxis({ ledger, telemetry }) {
  if (!ledger?.spans.length) return null;
  const origin = Math.max(0, ...ledger.spans.filter((span) => BEFORE_FIT.has(span.part)).map((span) => span.end_s));
  const training = (ledger.spans.find((span) => span.part === "steps")?.start_s ?? origin) - origin;
  const last = telemetry?.series.seconds.at(-1) ?? 0;
  return Object.assign(new TimeAxis(Math.max(ledger.wall_s - origin, training + last, 1e-3)), { origin, training });
}

// The lanes: each has a name, a colour, and spans that are drawn as dense as what they stand for. The seconds and times of
// a part of the ledger are those of the bar.
function lanesOf(run, { length }, colours, causes) {
  const named = (...parts) => run.ledger.spans.filter((span) => parts.includes(span.part));
  const whole = (name) => Object.keys(run.ledger.parts).filter((part) => part === name || part.startsWith(`${name}/`));
  const starting = (prefix) => run.ledger.spans.filter((span) => span.part.startsWith(prefix) && !BEFORE_FIT.has(span.part));
  const slow = run.timing.slowest.filter((step) => step.end_s !== null && step.ms >= 2 * run.timing.step_ms.p50).map((step) => ({
    part: "", start_s: step.end_s - step.ms / 1000, end_s: step.end_s, seconds: step.ms / 1000, count: 1, step: null,
    says: `step ${step.step}: ${milliseconds(step.ms)}${causes.get(step.step) ? `, ${causes.get(step.step)}` : ""}`,
  })).sort((a, b) => a.start_s - b.start_s);
  const lanes = [
    ["startup", "--slate", starting("startup/"), whole("startup")],
    ["epochs", "--sky", named("epoch")],
    ["sanity_check", "--pink", named("sanity_check"), ["sanity_check"]],
    ["validation", "--plum", named("validation"), whole("validation")],
    ["checkpoint", "--brown", named("checkpoint"), whole("checkpoint")],
    ["recorded window", "--green", named("window")],
    ["slow steps", "--hot", slow],
  ];
  const shown = new Set(["steps", "epoch", "validation", "sanity_check", "checkpoint", "window"]);
  const others = new Map();
  for (const span of run.ledger.spans) {
    if (shown.has(span.part) || span.part.startsWith("startup/")) continue;
    others.set(span.part, [...(others.get(span.part) ?? []), span]);
  }
  const own_s = ([part]) => run.ledger.parts[part] ?? 0; // without what is a part itself
  const longest = [...others].filter((other) => 100 * own_s(other) >= LANE_PCT * length).sort((a, b) => own_s(b) - own_s(a)).slice(0, OTHER_LANES);
  const sum = (values) => values.reduce((before, value) => before + (value ?? 0), 0);
  return [...lanes, ...longest.map(([part, spans]) => [part, colours.get(part) ?? "--grey", spans, [part]])]
    .filter(([, , spans]) => spans.length > 0)
    .map(([name, colour, spans, parts]) => ({
      name, colour, spans,
      seconds: sum(parts ? parts.map((part) => run.ledger.parts[part]) : spans.map((span) => span.seconds)),
      count: run.ledger.counts[name] ?? sum(parts ? parts.map((part) => run.ledger.counts[part]) : spans.map((span) => span.count)),
    }));
}

function spanText(span, name, axis) {
  const step = span.step === null ? "" : `, step ${number(span.step)}`;
  const several = span.count > 1 ? `${number(span.count)} times, ${inSeconds(span.seconds)} together` : inSeconds(span.seconds);
  return span.says ?? `${span.part === "" ? name : span.part}: ${several}, at ${axis.write(span.start_s - axis.origin, 2)}${step}`;
}

function laneRow(lane, axis) {
  const rects = lane.spans.map((span, index) => {
    const [begin, end] = [axis.part(span.start_s - axis.origin), axis.part(span.end_s - axis.origin)];
    const width = Math.max(end - begin, SHORTEST);
    const dense = span.end_s > span.start_s ? Math.min(1, span.seconds / (span.end_s - span.start_s)) : 1;
    const alternate = lane.name === "epochs" && index % 2 ? 0.6 : 1;
    return drawn("rect", {
      x: (WIDE * Math.min(begin, 1 - width)).toFixed(2), width: (WIDE * width).toFixed(2), y: 0, height: 100,
      opacity: (alternate * Math.max(FAINTEST_SPAN, dense)).toFixed(2), "data-tip": spanText(span, lane.name, axis),
    });
  });
  const total = `${number(lane.count)} \u00d7, ${inSeconds(lane.seconds)}`;
  const picture = plot("state-lane marks", `${lane.name}: ${total}`, rects);
  picture.setAttribute("tabindex", "0");
  picture.style.setProperty("fill", `var(${lane.colour})`);
  return element("div", { class: "chart-row state", id: laneId(lane.name) },
    element("div", { class: "chart-label" }, element("div", { class: "chart-line" }, swatch(lane.colour), element("span", null, breakable(lane.name), backLinks(laneId(lane.name))), element("span", { class: "reading" }, total))),
    element("div", { class: "chart-plot" }, picture));
}

function runLanes(run, axis, colours, causes) {
  const heading = element("span", { class: "muted reading" }, "count, seconds");
  return element("div", { class: "telemetry course" }, axisRow(axis, heading),
    lanesOf(run, axis, colours, causes).map((lane) => laneRow(lane, axis)));
}

function spanTable(spans) {
  const columns = [["part", "code"], ...["from, s", "to, s", "seconds", "times", "step"].map((name) => [name, "number"])];
  const rows = spans.map(({ part, start_s: start, end_s: end, seconds, count: times, step }) => (
    { cells: [part, number(start, 3), number(end, 3), number(seconds, 3), number(times), step === null ? "" : number(step)] }));
  return new DataTable({ title: "Spans", columns: columns.map(([name, kind]) => ({ name, kind })), rows }, { limit: 20 }).element;
}

function courseSection(run, { ledger: parts, slowest }) {
  const { ledger } = run;
  const colours = partColours([...Object.keys(ledger.parts)]);
  const axis = runAxis(run);
  const causes = new Map(slowest.rows.map(({ cells: [step, cause] }) => [Number(step), cause]));
  const table = element("details", null, element("summary", null, "The spans as a table"));
  table.addEventListener("toggle", () => table.append(spanTable(ledger.spans)), { once: true });
  const before = axis && axis.origin > 0 ? ` The axis begins with the fit, ${inSeconds(axis.origin)} after the process.` : "";
  return [
    ...runBar(ledger, colours),
    axis && runLanes(run, axis, colours, causes),
    axis && element("p", { class: "muted help-text" }, `A span includes what ran inside it, the seconds of a part do not; paler spans stand for several.${before}`),
    tableOf(parts),
    slowest.rows.length > 0 && [element("h3", null, slowest.title), tableOf(slowest)],
    axis && table,
  ];
}

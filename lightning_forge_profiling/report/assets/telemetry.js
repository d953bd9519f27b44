// Small charts one above the other over one axis of time, and a cursor that reads all of them: the GPU over the run.
//
// Each chart is drawn once and stretched to its place, so that neither a narrow window nor a print needs it redrawn.

function spanRects(spans, style) {
  return spans.map(({ begin, end, share }) => drawn("rect", {
    class: style, x: (WIDE * begin).toFixed(2), width: (WIDE * Math.max(end - begin, 0.0005)).toFixed(2), y: 0, height: 100,
    opacity: Math.max(FAINTEST, share / 100).toFixed(2),
  }));
}

// The stretches of points between gaps, each as a list of numbers.
function stretches(values, time) {
  const found = [];
  values.forEach((value, index) => {
    if (!isNumber(value)) return;
    if (index > 0 && isNumber(values[index - 1]) && time.follows(index)) found[found.length - 1].push(index);
    else found.push([index]);
  });
  return found;
}

// How far below the top of a chart a value lies, in percent.
function down({ bottom, high }, value) {
  return 100 * (1 - (value - bottom) / (high - bottom));
}

function linePaths(chart, line, time) {
  const x = (index) => (WIDE * time.part(time.seconds[index])).toFixed(2);
  const y = (value) => down(chart, value).toFixed(2);
  const { means, lows, highs } = line.drawn ?? line;
  const parts = stretches(means, time);
  const along = (indices, values) => indices.map((index) => `${x(index)} ${y(values[index])}`).join("L");
  const outline = parts.map((part) => `M${along(part, means)}${part.length === 1 ? "h0" : ""}`).join("");
  const between = parts.map((part) => `M${along(part, highs)}L${along([...part].reverse(), lows)}Z`).join("");
  const under = parts.map((part) => `M${x(part[0])} 100L${along(part, means)}L${x(part[part.length - 1])} 100Z`).join("");
  return [
    chart.filled && line.style === "a" && drawn("path", { class: "area a", d: under }),
    (lows !== means || highs !== means) && drawn("path", { class: `spread ${line.style}`, d: between }),
    drawn("path", { class: `line ${line.style}`, d: outline }),
  ].filter(Boolean);
}

function chartPlot(chart, time, states) {
  const across = (value, style) => drawn("path", { class: style, d: `M0 ${down(chart, value).toFixed(2)}H${WIDE}` });
  const shades = states.flatMap(({ spans, style }) => spanRects(spans, style));
  const grid = time.ticks().map(({ part, minor }) => drawn("path", { class: minor ? "grid minor" : "grid", d: `M${(WIDE * part).toFixed(2)} 0V100` }));
  const lines = chart.lines.filter((line) => !line.steady).reverse().flatMap((line) => linePaths(chart, line, time));
  const levels = [...chart.marks.map(({ value }) => across(value, "grid")), ...(chart.near ? [across(chart.limitValue, "limit")] : [])];
  const made = element("div", { class: "chart-plot" },
    plot("chart", chartText(chart, time), [...shades, ...grid, ...levels, ...lines]),
    chart.marks.map(({ value, text }) => placed(element("span", { class: "mark", "aria-hidden": "true" }, text), { top: down(chart, value) })),
    chart.near && placed(element("span", { class: "limit-name", "aria-hidden": "true" }, `${chart.limited} ${reading(chart, chart.limitValue)} ${chart.unit}`), { top: down(chart, chart.limitValue) }));
  chart.dots = chart.lines.filter((line) => !line.steady).map((line) => {
    const dot = element("span", { class: `dot ${line.style}`, hidden: true });
    made.append(dot);
    return [dot, line, chart];
  });
  return made;
}

class ChartsView {
  constructor(time, charts, states) {
    Object.assign(this, { time, charts, states });
    this.heading = element("span", { class: "muted reading" });
    this.moment = element("span", { class: "moment", hidden: true, "aria-hidden": "true" });
    this.cursor = element("span", { class: "cursor", hidden: true });
    this.scrubber = element("div", {
      class: "scrubber", role: "slider", tabindex: "0", "aria-label": "Moment of the run", "aria-orientation": "horizontal",
      "aria-valuemin": 0, "aria-valuemax": this.time.seconds.length - 1, "aria-keyshortcuts": "ArrowLeft ArrowRight Home End",
    }, this.cursor);
    this.rows = [
      ...this.charts.flatMap((chart) => chart.lines.map((line) => ({
        cell: element("span", { class: "reading" }), range: rangeText(chart, line), at: (index) => valueText(chart, line, index),
        spoken: (index) => `${chart.title}, ${line.name}: ${isNumber(line.means[index]) ? `${valueText(chart, line, index)} ${chart.unit}` : "no reading"}`, of: line,
      }))),
      ...this.states.map((state) => ({
        cell: element("span", { class: "reading" }), range: state.total, of: state, at: state.at,
        spoken: (index) => `${state.name}: ${state.at(index)}`,
      })),
    ];
    this.element = element("div", { class: "telemetry" }, this.axis(), this.charts.map((chart) => this.chart(chart)),
      this.states.map((state) => this.state(state)), this.scrubber);
    this.listen();
    this.show(null);
  }

  cell(of) {
    return this.rows.find((row) => row.of === of).cell;
  }

  axis() {
    return axisRow(this.time, this.heading, this.moment);
  }

  chart(chart) {
    const names = chart.lines.map((line) => element("div", { class: "chart-line" },
      element("span", { class: `stroke ${line.steady ? "steady" : line.style}`, "aria-hidden": "true" }), element("span", null, line.name), this.cell(line)));
    const far = chart.limitValue !== null && !chart.near;
    return element("div", { class: "chart-row" }, element("div", { class: "chart-label" },
      element("div", { class: "chart-title" }, element("b", null, chart.title), `, ${chart.unit}`,
        far && element("span", { class: "muted" }, ` of ${reading(chart, chart.limitValue)}`)), names), chartPlot(chart, this.time, this.states));
  }

  state(state) {
    const label = element("div", { class: "chart-line" },
      element("span", { class: `stroke ${state.style}`, "aria-hidden": "true" }), element("span", null, state.name), this.cell(state));
    const lane = plot("state-lane", state.label, spanRects(state.spans, state.style));
    return element("div", { class: "chart-row state" }, element("div", { class: "chart-label" }, label), element("div", { class: "chart-plot" }, lane));
  }

  // The readings at a point, or of the whole run where there is none.
  show(index) {
    this.index = index;
    const shown = index !== null;
    const left = shown ? 100 * this.time.part(this.time.seconds[index]) : 0;
    this.heading.textContent = shown ? `at ${this.time.write(this.time.seconds[index])}` : "lowest to highest";
    for (const row of this.rows) row.cell.textContent = shown ? row.at(index) : row.range;
    for (const mark of [this.cursor, this.moment]) {
      mark.hidden = !shown;
      placed(mark, { left });
    }
    const throttles = shown ? this.states.filter((state) => state.style === "throttled" && state.holds(index)) : [];
    this.moment.textContent = shown ? [this.time.write(this.time.seconds[index]), ...throttles.map((state) => state.name)].join(" \u00b7 ") : "";
    this.moment.classList.toggle("late", left > 60);
    for (const [dot, line, chart] of this.charts.flatMap((chart) => chart.dots)) {
      const value = shown ? (line.drawn ?? line).means[index] : null;
      dot.hidden = !isNumber(value);
      if (isNumber(value)) placed(dot, { left, top: down(chart, value) });
    }
    this.scrubber.setAttribute("aria-valuenow", index ?? 0);
    this.scrubber.setAttribute("aria-valuetext", shown
      ? [this.time.write(this.time.seconds[index]), ...this.rows.map((row) => row.spoken(index))].join("; ") : "no moment chosen");
  }

  listen() {
    const point = (event) => {
      const box = this.scrubber.getBoundingClientRect();
      this.show(this.time.nearest((event.clientX - box.left) / box.width));
    };
    this.scrubber.addEventListener("pointermove", point);
    this.scrubber.addEventListener("pointerdown", point);
    this.scrubber.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.show(null));
    this.scrubber.addEventListener("blur", () => this.show(null));
    this.scrubber.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.time.seconds.length - 1;
    const from = this.index ?? (event.key === "ArrowLeft" || event.key === "PageDown" ? last + 1 : -1);
    const places = {
      ArrowLeft: from - 1, ArrowRight: from + 1, PageDown: from - 10, PageUp: from + 10, Home: 0, End: last, Escape: null,
    };
    if (!Object.hasOwn(places, event.key)) return;
    event.preventDefault();
    const place = places[event.key];
    this.show(place === null ? null : Math.min(last, Math.max(0, place)));
  }
}

function telemetryFacts(telemetry) {
  const { throttled_pct: throttled, throttled_by_pct: reasons } = telemetry;
  const of = (value, limit, unit) => (isNumber(limit) ? `${short(value)} of ${short(limit)} ${unit}` : `${short(value)} ${unit}`);
  const why = Object.entries(reasons ?? {}).sort(([, a], [, b]) => b - a).map(([reason, pct]) => `${reason} ${percent(pct)}`).join(", ");
  return facts([
    ["Device", telemetry.device],
    isNumber(telemetry.utilization_pct) && ["GPU utilized", percent(telemetry.utilization_pct)],
    isNumber(telemetry.memory_peak_gib) && ["Peak memory", of(telemetry.memory_peak_gib, telemetry.memory_total_gib, "GiB")],
    isNumber(telemetry.power_w) && ["Mean power", of(telemetry.power_w, telemetry.power_limit_w, "W")],
    isNumber(telemetry.joules_per_sample) && ["Energy", `${short(telemetry.joules_per_sample)} J per sample`],
    isNumber(telemetry.sm_mhz) && ["Mean clock", `${number(telemetry.sm_mhz)} MHz`],
    isNumber(throttled) && ["Throttled", throttled > 0 ? `${percent(throttled)} (${why})` : "never"],
  ].filter(Boolean));
}

// What the charts are of, and what they lack.
function telemetryNotes(telemetry, run, view, record) {
  const { time, charts, states } = view;
  const missing = READINGS.filter((each) => !each.whereUsed && !charts.some((chart) => chart.title === each.title)).map((each) => each.title.toLowerCase());
  const broken = charts.some((chart) => chart.lines.some((line) => !line.means.every(isNumber))) || time.seconds.some((_, index) => index > 0 && !time.follows(index));
  const ofRank = [
    run.ranks.world_size === 2 && "This is rank 0's GPU; that of the other rank is not read.",
    run.ranks.world_size > 2 && `This is rank 0's GPU; those of the other ${number(run.ranks.world_size - 1)} ranks are not read.`,
  ];
  if (!charts.length && record) return ofRank.filter(Boolean).join(" ");
  return [
    time.averaged
      ? `Each point is the mean of ${number(time.samples)} readings, over ${time.each}; the pale band reaches from the lowest to the highest of them.`
      : time.step > 0 && `A reading every ${time.each}.`,
    "The figures above are over the steps that count; the peak of memory and the charts are of all the run, from the start of training on.",
    states.some((state) => state.style === "left-out") && "Grey: not in the means, as the warm-up, validation, and steps in which the profiler ran.",
    states.some((state) => state.style === "throttled") && "Tinted: something held the clock down.",
    broken && "A line is broken where there was no reading.",
    missing.length > 0 && `Not reported by the driver: ${missing.join(", ")}.`,
    telemetry.is_mig && "This is a slice of a GPU (MIG): power, temperature, clocks and throttling are the whole GPU's.",
    ...ofRank,
  ].filter(Boolean).join(" ");
}

function telemetryTable({ time, charts, states }) {
  const columns = [
    { name: time.unit, means: time.since, at: (index) => number(time.seconds[index] / time.divisor, time.digits) },
    ...charts.flatMap((chart) => chart.lines.map((line) => ({
      name: `${chart.title.toLowerCase()}, ${line.name}, ${chart.unit}`,
      at: (index) => (isNumber(line.means[index]) ? reading(chart, line.means[index]) : "\u2013"),
    }))),
    ...states.map((state) => ({ name: `${state.name}, %`, at: (index) => number(state.shares[index], 0) })),
  ].map((column) => ({ ...column, kind: "number" }));
  const rows = [...time.seconds.keys()].map((index) => ({ cells: columns.map(({ at }) => at(index)) }));
  return new DataTable({ title: "Readings", columns, rows }, { limit: 20 }).element;
}

function telemetrySection(telemetry, run, record) {
  const time = new RunTime(telemetry.series, run.ledger ? runAxis(run) : null);
  const view = new ChartsView(time, chartsOf(telemetry), statesOf(telemetry.series, time));
  const table = element("details", null, element("summary", null, "The readings as a table"));
  table.addEventListener("toggle", () => table.append(telemetryTable(view)), { once: true });
  return [telemetryFacts(telemetry), view.charts.length > 0 && view.element, element("p", { class: "charts-text muted" }, telemetryNotes(telemetry, run, view, record)), view.charts.length > 0 && table];
}

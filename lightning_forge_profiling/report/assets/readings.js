// The GPU's readings over the run as charts: their lines, scales and axis of time.

// `filled` draws the first line's area, `aside` is drawn only where it varies: a memory clock seldom does, and would take
// the scale from the other. Where `fromLeast`, the scale does not begin at 0.
const READINGS = [
  { title: "Utilization", unit: "%", top: 100, filled: true, lines: [["GPU", "utilization_pct"], ["memory controller", "memory_utilization_pct"]] },
  { title: "Video", unit: "%", top: 100, whereUsed: true, lines: [["encoder", "encoder_pct"], ["decoder", "decoder_pct"]] },
  { title: "Memory", unit: "GiB", filled: true, limit: "memory_total_gib", limited: "total", lines: [["all in use", "memory_used_gib"], ["this process", "memory_own_gib"], ["tensors", "allocated_gib"]] },
  { title: "Power", unit: "W", filled: true, limit: "power_limit_w", limited: "limit", lines: [["board", "power_w"]] },
  { title: "Clock", unit: "MHz", aside: "memory_mhz", lines: [["SM", "sm_mhz"], ["memory", "memory_mhz"]] },
  { title: "Temperature", unit: "\u00b0C", fromLeast: true, lines: [["GPU", "temperature_c"]] },
];
const LEFT_OUT = "not in the means";
const GAP = 3; // so many times the usual distance between two points is a gap,
const SHORTEST_GAP_S = 0.5; // if it is as long as this: in less the sensors have little new
const WORTH_SHOWING = 0.25; // how much of a limit has to be reached for the limit to be on the scale

// Where the points lie: each reaches half way to its neighbours, but not over a gap. On the axis of a run training
// begins later than the axis.
class RunTime extends TimeAxis {
  constructor({ seconds: sinceTraining, samples_per_point: samples }, run = null) {
    const seconds = run === null ? sinceTraining : sinceTraining.map((second) => second + run.training);
    const steps = seconds.slice(1).map((second, index) => second - seconds[index]).sort((a, b) => a - b);
    const step = steps[steps.length >> 1] || 0;
    const averaged = samples > 1;
    super(run === null ? Math.max(seconds[seconds.length - 1] + (averaged ? step / 2 : 0), 0.1) : run.length);
    Object.assign(this, { seconds, step, averaged, samples });
    this.each = step < 120 ? `${Number(step.toPrecision(3))} s` : `${short(step / 60)} min`;
    this.since = run === null ? "since training began" : "since the fit began";
    this.digits = Math.min(4, Math.max(0, Math.ceil(-Math.log10((this.step || 1) / this.divisor))));
  }

  follows(index) {
    return index > 0 && this.seconds[index] - this.seconds[index - 1] <= Math.max(GAP * this.step, SHORTEST_GAP_S);
  }

  begin(index) {
    const reach = this.follows(index) ? this.seconds[index] - this.seconds[index - 1] : this.step;
    return this.part(this.seconds[index] - reach / 2);
  }

  end(index) {
    const reach = this.follows(index + 1) ? this.seconds[index + 1] - this.seconds[index] : this.step;
    return this.part(this.seconds[index] + reach / 2);
  }

  nearest(part) {
    const after = firstAbove(this.seconds, part * this.length);
    if (after === 0) return 0;
    if (after === this.seconds.length) return after - 1;
    return part * this.length - this.seconds[after - 1] < this.seconds[after] - part * this.length ? after - 1 : after;
  }
}

// A line of a chart: values, and the edges of the band around them. A layer on others has `drawn`: where it lies.
function lineOf(name, style, means, lows, highs) {
  const all = means.filter(isNumber);
  return {
    name, style, means, lows, highs, steady: false, mean: all.reduce((sum, value) => sum + value, 0) / all.length,
    least: Math.min(...lows.filter(isNumber)), most: Math.max(...highs.filter(isNumber)),
  };
}

// A chart with the range and the grid of its lines.
function chartOf(kind, lines, limit = null) {
  return { ...kind, lines, ...scaleOf(kind, lines, limit) };
}

// The charts that have readings.
function chartsOf(telemetry) {
  const { values, lowest = {}, highest = {} } = telemetry.series;
  return READINGS.flatMap((kind) => {
    const known = kind.lines.filter(([, key]) => values[key]?.some(isNumber));
    const lines = known.map(([name, key]) => {
      const style = "abc"[kind.lines.findIndex(([, other]) => other === key)];
      const line = lineOf(name, style, values[key], lowest[key] ?? values[key], highest[key] ?? values[key]);
      return { ...line, steady: kind.aside === key && line.least === line.most && known.length > 1 };
    });
    const used = lines.length > 0 && (!kind.whereUsed || lines.some((line) => line.most > 0));
    return used ? [chartOf(kind, lines, telemetry[kind.limit])] : [];
  });
}

// The range of a chart, its grid, and its limit if that is in range.
function scaleOf({ top, fromLeast }, lines, limit) {
  const shown = lines.filter((line) => !line.steady);
  const most = Math.max(...shown.map((line) => (line.drawn ? Math.max(...line.drawn.highs) : line.most)));
  const least = Math.min(...shown.map((line) => line.least));
  const near = isNumber(limit) && most >= WORTH_SHOWING * limit;
  const span = Math.max(near ? limit : (top ?? most), most) - (fromLeast ? least : 0);
  const step = tickStep(Math.max(span, fromLeast ? 4 : 1e-3), 4);
  const bottom = fromLeast ? Math.floor(least / step) * step : 0;
  const high = top ?? (near ? Math.max(1.2 * limit, most) : Math.max(Math.ceil(most / step) * step, bottom + step));
  const marks = Array.from({ length: Math.floor((high - bottom) / step + 1e-6) + 1 }, (_, index) => bottom + index * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return { bottom, high, marks: marks.map((value) => ({ value, text: number(value, digits) })), limitValue: isNumber(limit) ? limit : null, near };
}

// A value with as many digits as its sensor has, or as the chart's own.
const reading = (chart, value) => number(value, chart.digits ?? (chart.unit === "GiB" ? (chart.high < 20 ? 2 : 1) : 0));

function rangeText(chart, { least, most }) {
  const [from, to] = [reading(chart, least), reading(chart, most)];
  return from === to ? from : `${from} to ${to}`;
}

function valueText(chart, line, index) {
  const [value, low, high] = [line.means[index], line.lows[index], line.highs[index]];
  if (!isNumber(value)) return "\u2013";
  return low < high ? `${reading(chart, value)} (${rangeText(chart, { least: low, most: high })})` : reading(chart, value);
}

function chartText(chart, time) {
  const lines = chart.lines.map((line) => `${line.name}: mean ${reading(chart, line.mean)}, ` +
    (line.least < line.most ? `${reading(chart, line.least)} to ${reading(chart, line.most)} ${chart.unit}` : `constant, ${chart.unit}`) +
    (line.means.every(isNumber) ? "" : ", with gaps"));
  const limit = chart.limitValue === null ? "" : `; ${chart.limited} ${reading(chart, chart.limitValue)} ${chart.unit}`;
  return `${chart.title} over ${time.write(time.length, 1)}. ${lines.join("; ")}${limit}.`;
}

// What holds in parts of the run, as the lanes below the charts show it: where, how much of the run, and at a point.
function statesOf({ throttled_by_pct: throttled = {}, counted_pct: counted = [] }, time) {
  const state = (name, style, shares) => {
    const known = shares.filter(isNumber);
    const total = percent(known.reduce((sum, share) => sum + share, 0) / known.length);
    const at = (index) => {
      const share = shares[index];
      if (!isNumber(share)) return "\u2013";
      return share > 0 && share < 100 ? percent(share) : share > 0 ? "yes" : "no";
    };
    return { name, style, shares, total, label: `${name}: ${total} of the run`, spans: spansOf(shares, time), at, holds: (index) => shares[index] > 0 };
  };
  const reasons = Object.entries(throttled).map(([reason, shares]) => state(`throttled: ${reason}`, "throttled", shares));
  const leftOut = state(LEFT_OUT, "left-out", counted.map((share) => 100 - share));
  return [...reasons, leftOut].filter(({ shares }) => shares.some((share) => share > 0));
}

// Points of the same share that follow each other, as one.
function spansOf(shares, time) {
  const spans = [];
  shares.forEach((share, index) => {
    if (!(share > 0)) return;
    const last = spans[spans.length - 1];
    if (last?.next === index && last.share === share && time.follows(index)) Object.assign(last, { next: index + 1, end: time.end(index) });
    else spans.push({ begin: time.begin(index), end: time.end(index), share, next: index + 1 });
  });
  return spans;
}


// The timeline on its canvas. What is drawn comes as a view: { timelines, start, end, length, hovered, emphasis }, one timeline a
// rank, each with the place that it has: y, height.
//
// Spans narrower than a pixel and a half are gathered by pixel column and drawn as dense as they cover it, so that a row
// of tiny kernels with gaps between them does not look busy when zoomed out.

const AXIS_HEIGHT = 20;
const STEP_HEIGHT = 18;
const SMALL_SPAN_PX = 1.5;
const PALE = 0.25; // spans beside those that are emphasized
const FAINTEST = 0.2; // so that a lone short span is still visible
const CANVAS_COLOURS = ["--ink", "--muted", "--line", "--lane", "--band", "--on-colour", "--accent"];

// 1, 2 or 5 times a power of ten, so that about `wanted` of them fill `range`.
function tickStep(range, wanted) {
  const rough = range / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

class TimelineCanvas {
  constructor(canvas) {
    this.canvas = canvas;
  }

  resize(width, height) {
    this.ratio = window.devicePixelRatio || 1;
    Object.assign(this, { width, height });
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
  }

  // Resolve the colours in the theme that is on.
  recolour(properties) {
    this.colours = resolvedColours(new Set([...CANVAS_COLOURS, ...properties]));
  }

  draw(view) {
    Object.assign(this, view);
    const context = this.canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    context.textBaseline = "middle";
    this.letter = context.measureText("0").width;
    this.scale = this.width / (this.end - this.start);
    for (const timeline of this.timelines) this.drawSteps(context, timeline);
    this.drawAxis(context);
    for (const timeline of this.timelines) this.drawStepLabels(context, timeline);
    for (const timeline of this.timelines) {
      for (const lane of timeline.lanes) this.drawLane(context, lane);
      this.drawStepBorders(context, timeline);
    }
    this.drawHovered(context);
    this.drawPosition(context);
  }

  // Fill from one time to another, as far as that is in view.
  area(begin, end, fill) {
    const [x, right] = [Math.max(0, (begin - this.start) * this.scale), Math.min(this.width, (end - this.start) * this.scale)];
    if (right > x) fill(x, right - x);
  }

  drawSteps(context, { steps, left_out: between, y, height }) {
    context.fillStyle = this.colours.get("--band");
    for (const [, begin, end] of steps.filter((_, position) => position % 2 === 0)) {
      this.area(begin, end, (x, width) => context.fillRect(x, y, width, height));
    }
    for (const [begin, end] of between) this.area(begin, end, (x, width) => this.drawStriped(context, x, y, width, height));
  }

  drawStepLabels(context, { steps, left_out: between, y }) {
    for (const [step, begin, end] of steps) {
      const others = between.reduce((sum, [start, stop]) => sum + Math.max(0, Math.min(stop, end) - Math.max(start, begin)), 0);
      const time = `step ${step}  ${duration(end - begin - others)}`;
      const texts = [others ? `${time} + ${duration(others)} between steps` : time, time, `step ${step}`];
      this.area(begin, end, (x, width) => {
        const fits = texts.find((text) => text.length * this.letter <= width - 6); // a time that is cut reads as another
        if (fits) this.write(context, fits, x + 4, y + STEP_HEIGHT / 2, width, "--ink");
      });
    }
  }

  // Time between steps.
  drawStriped(context, x, y, width, height) {
    context.clearRect(x, y, width, height);
    for (let stripe = x; stripe < x + width; stripe += 5) context.fillRect(stripe, y, 1, height);
  }

  drawStepBorders(context, { steps, y, height }) {
    context.fillStyle = this.colours.get("--muted");
    const borders = new Set(steps.flatMap(([, begin, end]) => [begin, end]));
    for (const time of borders) {
      const x = Math.round((time - this.start) * this.scale);
      if (x >= 0 && x <= this.width) context.fillRect(Math.min(x, this.width - 1), y, 1, height);
    }
  }

  drawAxis(context) {
    const step = tickStep(this.end - this.start, this.width / 90);
    const [unit, divisor] = this.end >= 1000 && step >= 1 ? ["ms", 1000] : ["\u00b5s", 1];
    const digits = Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9));
    for (let tick = Math.ceil(this.start / step); tick * step <= this.end; tick += 1) {
      const x = (tick * step - this.start) * this.scale;
      context.fillStyle = this.colours.get("--line");
      context.fillRect(Math.min(Math.round(x), this.width - 1), 0, 1, this.height);
      this.write(context, `${number((tick * step) / divisor, digits)} ${unit}`, x + 4, AXIS_HEIGHT / 2, this.width - x - 4, "--muted");
    }
  }

  drawLane(context, lane) {
    context.fillStyle = this.colours.get("--lane");
    context.fillRect(0, lane.y, this.width, lane.height);
    const small = { column: -1, row: 0, covered: 0, longest: 0, colour: "", pale: false };
    const flush = () => {
      if (small.column < 0) return;
      context.globalAlpha = Math.max(FAINTEST, Math.min(1, small.covered)) * (small.pale ? PALE : 1);
      context.fillStyle = this.colours.get(small.colour);
      context.fillRect(small.column, lane.y + small.row * lane.rowHeight, 1, lane.rowHeight);
      context.globalAlpha = 1;
    };
    const last = firstAbove(lane.start_us, this.end);
    for (let index = firstAbove(lane.reach, this.start); index < last; index += 1) {
      const x = (lane.start_us[index] - this.start) * this.scale;
      const right = (lane.ends[index] - this.start) * this.scale;
      if (right < 0) continue;
      const row = lane.depth[index];
      const wide = right - x;
      if (wide < SMALL_SPAN_PX) {
        const column = Math.floor(x);
        if (column !== small.column || row !== small.row) {
          flush();
          Object.assign(small, { column, row, covered: 0, longest: 0 });
        }
        small.covered += wide;
        if (wide >= small.longest) Object.assign(small, { longest: wide, colour: lane.colours[index], pale: this.isPale(lane, index) });
      } else {
        flush();
        small.column = -1;
        context.globalAlpha = this.isPale(lane, index) ? PALE : 1;
        this.drawSpan(context, lane, index, x, right);
        context.globalAlpha = 1;
      }
    }
    flush();
  }

  isPale(lane, index) {
    return this.emphasis !== null && !this.emphasis.shows(lane, index);
  }

  drawSpan(context, lane, index, x, right) {
    const [left, end] = [Math.max(-1, x), Math.min(this.width + 1, right)];
    const y = lane.y + lane.depth[index] * lane.rowHeight;
    context.fillStyle = this.colours.get(lane.colours[index]);
    context.fillRect(left, y, end - left - (end - left > 4 ? 1 : 0), lane.rowHeight - (lane.depths > 1 ? 1 : 0));
    const text = lane.onHost(index) ? regionName(lane.nameAt(index)) : shortName(lane.nameAt(index));
    if (end - left > 30) this.write(context, text, Math.max(0, left) + 4, y + lane.rowHeight / 2, end - Math.max(0, left) - 8, "--on-colour");
  }

  drawHovered(context) {
    if (!this.hovered) return;
    const { lane, index } = this.hovered;
    const x = Math.max(0, (lane.start_us[index] - this.start) * this.scale);
    const right = Math.min(this.width, (lane.ends[index] - this.start) * this.scale);
    context.strokeStyle = this.colours.get("--ink");
    context.lineWidth = 2;
    context.strokeRect(x, lane.y + lane.depth[index] * lane.rowHeight + 1, Math.max(2, right - x), lane.rowHeight - 2);
  }

  // Which part of the whole is in view.
  drawPosition(context) {
    if (this.end - this.start >= this.length) return;
    context.fillStyle = this.colours.get("--line");
    context.fillRect(0, this.height - 4, this.width, 4);
    context.fillStyle = this.colours.get("--accent");
    const part = ((this.end - this.start) / this.length) * this.width;
    context.fillRect((this.start / this.length) * this.width, this.height - 4, Math.max(3, part), 4);
  }

  // As much of a text as fits, none where that is less than three letters.
  write(context, text, x, y, room, colour) {
    const letters = Math.floor(room / this.letter);
    if (letters < 3 && letters < text.length) return;
    context.fillStyle = this.colours.get(colour);
    context.fillText(text.length > letters ? `${text.slice(0, letters - 1)}\u2026` : text, x, y);
  }
}

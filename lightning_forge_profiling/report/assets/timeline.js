// The recorded window with zoom and pan: the ranks one below the other, one row a lane, and a tip with what a span is.

const LANE_HEIGHT = 22;
const NESTED_HEIGHT = 16;
const LANE_GAP = 6;
const LABEL_WIDTH = 184;
const NARROW = 620;
const SHORTEST_VIEW_US = 0.5;
const MOST_RANKS = 8; // more would be higher than any screen

class TimelineView {
  constructor(timelines) {
    this.all = timelines;
    this.pointers = new Map();
    this.hovered = null;
    this.emphasis = null;
    this.lastPageScroll = -Infinity;
    this.canvas = element("canvas", {
      tabindex: "0", role: "application", "aria-label": "Step timeline", "aria-describedby": "timeline-text",
      "aria-keyshortcuts": "+ - 0 ArrowLeft ArrowRight ArrowUp ArrowDown Shift+ArrowLeft Shift+ArrowRight",
    });
    this.drawing = new TimelineCanvas(this.canvas);
    this.labels = element("div", { class: "lanes", role: "list", "aria-label": "Lanes" });
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    this.emphasized = element("p", { id: "emphasized", role: "status", hidden: true });
    this.plot = element("div", { class: "plot" }, this.labels, this.canvas, this.tip);
    this.legend = element("ul", { class: "legend", "aria-label": "Colours" });
    this.text = element("p", { id: "timeline-text", class: "muted" });
    this.stepButtons = element("span", { class: "group" });
    this.element = element("div", { class: "timeline", id: "timeline-view" },
      element("div", { class: "tools" },
        element("span", { class: "group" },
          button("\u2212", () => this.zoom(2), { "aria-label": "Zoom out", "data-zoom": "out" }),
          button("+", () => this.zoom(0.5), { "aria-label": "Zoom in", "data-zoom": "in" }),
          button("Reset", () => this.reset(), { "data-zoom": "reset" })),
        this.stepButtons,
        element("span", { class: "muted help" }, "wheel or pinch zooms, drag pans, double click fits a span; keys + \u2212 0 \u2190 \u2192, \u2191 \u2193 and Shift \u2190 \u2192 for spans")),
      this.emphasized, this.plot, this.legend, this.text);
    this.listen();
    this.show(timelines[0].rank);
  }

  // Show a rank: with all others if they are few, else with its neighbours.
  show(rank) {
    const position = this.all.findIndex((each) => each.rank === rank);
    const first = MOST_RANKS * Math.floor(position / MOST_RANKS);
    if (position < 0 || this.first === first) return;
    this.first = first;
    this.timelines = alignedTimelines(this.all.slice(first, first + MOST_RANKS));
    this.lanes = this.timelines.flatMap((timeline) => timeline.lanes);
    this.length = Math.max(...this.timelines.map((timeline) => timeline.length_us), SHORTEST_VIEW_US);
    this.describe();
    this.layout();
    this.recolour();
    this.reset();
  }

  describe() {
    this.text.textContent = this.timelines.map((timeline) => this.description(timeline)).concat(this.remarks()).join(" ");
    this.legend.replaceChildren(...[...this.colours()].map(([name, colour]) => element("li", null, swatch(colour), name)));
    const steps = new Map();
    for (const timeline of this.timelines) {
      for (const [step, begin, end] of timeline.steps) {
        const after = timeline.left_out.flatMap(([, stop]) => (stop < end ? stop : []));
        const [from, to] = steps.get(step) ?? [Infinity, -Infinity];
        steps.set(step, [Math.min(from, Math.max(begin, ...after)), Math.max(to, end)]);
      }
    }
    const jumps = steps.size > 1 && steps.size <= 12 ? [...steps] : [];
    this.stepButtons.replaceChildren(...jumps.map(([step, [begin, end]]) =>
      button(`Step ${step}`, () => this.setView(begin, end), { "data-step": step })));
  }

  description({ rank, steps, lanes, omitted, length_us: length }) {
    const spans = lanes.reduce((sum, lane) => sum + lane.start_us.length, 0);
    const left = omitted ? `; the ${number(omitted)} shortest were left out` : "";
    return `Rank ${rank}: ${duration(length)}, ${number(steps.length)} steps, ${number(spans)} spans${left}.`;
  }

  remarks() {
    const shown = this.timelines.map((timeline) => timeline.rank);
    return [
      this.timelines.some((timeline) => timeline.left_out.length) && "Striped: validation or checkpoints between steps, in no step's time.",
      shown.length > 1 && anchorStep(this.timelines[0])[0] !== null && `The clocks of two machines differ: ranks are drawn as if step ${anchorStep(this.timelines[0])[0]} began on all at once.`,
      shown.length < this.all.length && `Ranks ${shown[0]} to ${shown[shown.length - 1]} of ${number(this.all.length)}: choose a rank of the details to see others.`,
    ].filter(Boolean);
  }

  // What is drawn, and in which colour: kinds of work, then regions of the host.
  colours() {
    const seen = new Map();
    for (const lane of this.lanes) {
      lane.colours.forEach((colour, index) => lane.onHost(index) || seen.set(lane.kindAt(index), colour));
    }
    const ordered = this.timelines.flatMap((timeline) => timeline.kinds).filter((kind) => seen.has(kind));
    const work = new Map(ordered.map((kind) => [kind, seen.get(kind)]));
    const onHost = new Set(this.lanes.filter((each) => each.group === "host").flatMap((lane) => lane.colours));
    const regions = [...REGION_COLOURS].map(([name, colour]) => [`host: ${name}`, colour]);
    return new Map([...work, ...[...regions, ["host: other ranges", "--slate"]].filter(([, colour]) => onHost.has(colour))]);
  }

  // Where each lane lies; its name stands left of it, on a narrow screen above it.
  layout() {
    const width = this.plot.clientWidth;
    const narrow = width < NARROW;
    const several = this.timelines.length > 1;
    this.left = narrow ? 0 : LABEL_WIDTH;
    this.width = Math.max(1, width - this.left);
    const caption = narrow ? 16 : 0;
    const labels = [];
    let y = AXIS_HEIGHT;
    for (const timeline of this.timelines) {
      if (several) labels.push(this.label(`Rank ${timeline.rank}`, timeline, y, narrow ? caption : STEP_HEIGHT, narrow));
      timeline.y = y + (several ? caption : 0);
      y = timeline.y + (timeline.steps.length || several ? STEP_HEIGHT : 0) + LANE_GAP;
      for (const lane of timeline.lanes) {
        lane.y = y + caption;
        lane.rowHeight = lane.depths > 1 ? NESTED_HEIGHT : LANE_HEIGHT;
        lane.height = lane.rowHeight * lane.depths;
        labels.push(this.label(lane.name, lane, y, narrow ? caption : lane.height, narrow));
        y = lane.y + lane.height + LANE_GAP;
      }
      timeline.height = y - timeline.y;
      y += several ? LANE_GAP : 0;
    }
    this.labels.replaceChildren(...labels);
    this.canvas.style.marginLeft = `${this.left}px`;
    this.drawing.resize(this.width, y + LANE_GAP);
  }

  label(text, { rank, group }, top, height, narrow) {
    const made = element("div", { class: `lane${group ? "" : " of-rank"}${narrow ? " above" : ""}`, role: "listitem", title: text, "data-rank": rank }, text);
    made.style.top = `${top}px`;
    made.style.width = narrow ? "fit-content" : `${LABEL_WIDTH - 10}px`;
    made.style.lineHeight = `${height}px`;
    made.style.pointerEvents = narrow ? "none" : "auto"; // above a lane it lies over the canvas
    return made;
  }

  setView(start, end) {
    const range = Math.min(this.length, Math.max(SHORTEST_VIEW_US, end - start));
    this.start = Math.min(Math.max(0, start), this.length - range);
    this.end = this.start + range;
    this.element.dataset.viewStartUs = this.start;
    this.element.dataset.viewEndUs = this.end;
    this.hideTip();
    this.redraw();
  }

  reset() {
    this.setView(0, this.length);
  }

  zoom(factor, around = (this.start + this.end) / 2) {
    const range = Math.min(this.length, Math.max(SHORTEST_VIEW_US, (this.end - this.start) * factor));
    const start = around - ((around - this.start) / (this.end - this.start)) * range;
    this.setView(start, start + range);
  }

  pan(us) {
    this.setView(this.start + us, this.end + us);
  }

  timeAt(x) {
    return this.start + (x / this.width) * (this.end - this.start);
  }

  listen() {
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    window.addEventListener("wheel", (event) => {
      if (!event.defaultPrevented) this.lastPageScroll = event.timeStamp;
    }, { passive: true });
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    for (const name of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(name, (event) => this.onUp(event));
    }
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.hideTip());
    this.canvas.addEventListener("dblclick", (event) => {
      const hit = this.hit(event.offsetX, event.offsetY);
      if (!hit) return;
      const [start, end] = [hit.lane.start_us[hit.index], hit.lane.ends[hit.index]];
      const margin = 0.1 * (end - start);
      this.setView(start - margin, end + margin);
    });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => {
      if (Math.abs(this.plot.clientWidth - this.left - this.width) < 1) return;
      this.layout();
      this.redraw();
    }).observe(this.plot);
  }

  // A scroll of the page that passes over the timeline goes on; so does one that could zoom out no further.
  onWheel(event) {
    const scrolling = event.timeStamp - this.lastPageScroll < 250 && !event.ctrlKey;
    const range = this.end - this.start;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (scrolling || (range >= this.length && (sideways || event.deltaY > 0))) return;
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    if (sideways) {
      this.pan((((event.deltaX || event.deltaY) * lines) / this.width) * range);
    } else {
      const pace = event.ctrlKey ? 0.01 : 0.002; // a trackpad's pinch comes as small steps with ctrl
      this.zoom(Math.exp(event.deltaY * lines * pace), this.timeAt(event.offsetX));
    }
  }

  onDown(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.travelled = this.pointers.size > 1 ? Infinity : 0;
  }

  onMove(event) {
    const before = this.pointers.get(event.pointerId);
    const [x, y] = [event.offsetX, event.offsetY];
    if (!before) {
      if (event.pointerType === "mouse") this.point(x, y);
      return;
    }
    this.pointers.set(event.pointerId, { x, y });
    const perPixel = (this.end - this.start) / this.width;
    this.travelled += Math.abs(x - before.x);
    if (this.pointers.size === 1) {
      this.canvas.classList.add("dragged");
      this.pan((before.x - x) * perPixel);
      return;
    }
    const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    const apart = (place) => Math.max(8, Math.hypot(place.x - other.x, place.y - other.y));
    this.zoom(apart(before) / apart({ x, y }), this.timeAt((x + other.x) / 2));
  }

  onUp(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    this.canvas.classList.remove("dragged");
    if (event.type === "pointerup" && this.travelled < 4) this.point(event.offsetX, event.offsetY);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const range = this.end - this.start;
    const actions = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.reset(),
      ArrowLeft: () => this.pan(-0.1 * range), ArrowRight: () => this.pan(0.1 * range), Escape: () => this.hideTip(),
    };
    const steps = event.shiftKey ? { ArrowLeft: [0, -1], ArrowRight: [0, 1] } : { ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const action = Object.hasOwn(steps, event.key) ? () => this.choose(...steps[event.key]) : Object.hasOwn(actions, event.key) && actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // The span that is so many lanes and spans from the one that has a tip; in another lane the one at the same time.
  choose(lanes, spans) {
    const from = this.hovered;
    const [first, last] = [0, this.lanes.length - 1];
    const place = from ? this.lanes.indexOf(from.lane) + lanes : lanes < 0 ? last : first;
    const lane = this.lanes[Math.min(last, Math.max(first, place))];
    const time = from && from.lane !== lane ? from.lane.start_us[from.index] : this.start;
    const index = from?.lane === lane ? from.index + spans : firstAbove(lane.ends, time);
    const hit = { lane, index: Math.min(lane.ends.length - 1, Math.max(0, index)) };
    const [start, end] = [lane.start_us[hit.index], lane.ends[hit.index]];
    if (end < this.start || start > this.end) this.pan((start + end - this.start - this.end) / 2);
    this.showTip(hit, (Math.max(0, start - this.start) / (this.end - this.start)) * this.width);
  }

  // Whether there is a span that `shows` is true for.
  has(shows) {
    return this.lanes.some((lane) => lane.ends.some((_, index) => shows(lane, index)));
  }

  // All other spans become pale; none do where it is null. `link` leads back to the finding.
  emphasize(emphasis, link = null) {
    this.emphasis = emphasis;
    this.emphasized.hidden = !emphasis;
    if (emphasis) this.emphasized.replaceChildren(`In full colour: ${emphasis.text}. `, link, " ", button("Show all", () => this.emphasize(null)));
    this.redraw();
  }

  // The span at a place on the canvas, or within two pixels of it.
  hit(x, y) {
    const lane = this.lanes.find((each) => y >= each.y && y < each.y + each.height);
    if (!lane) return null;
    const depth = Math.floor((y - lane.y) / lane.rowHeight);
    const index = spanAt(lane, depth, this.timeAt(x), (2 * (this.end - this.start)) / this.width);
    return index < 0 ? null : { lane, index };
  }

  point(x, y) {
    const hit = this.hit(x, y);
    if (hit) {
      this.showTip(hit, x);
      return;
    }
    this.hideTip();
    const lane = this.lanes.find((each) => each.group === "stream" && y >= each.y && y < each.y + each.height);
    if (lane) this.showGap(lane, x);
  }

  // The time without work around a place in a stream's lane.
  showGap(lane, x) {
    const next = firstAbove(lane.start_us, this.timeAt(x));
    const [begin, end] = [lane.reach[next - 1] ?? 0, lane.start_us[next] ?? this.length];
    this.tip.replaceChildren(element("div", { class: "tip-facts" }, this.facts("nothing runs", lane, begin, end - begin)));
    this.placeTip(lane, x);
  }

  showTip(hit, x) {
    if (this.hovered?.lane !== hit.lane || this.hovered.index !== hit.index) {
      this.hovered = hit;
      this.fillTip(hit);
      this.redraw();
    }
    this.placeTip(hit.lane, x);
  }

  placeTip(lane, x) {
    this.tip.hidden = false;
    const space = this.plot.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(space, this.left + x + 14))}px`;
    this.tip.style.top = `${lane.y + lane.height + 8}px`;
  }

  fillTip({ lane, index }) {
    this.tip.replaceChildren(
      element("div", { class: "tip-facts" }, swatch(lane.colours[index]), this.facts(lane.kindAt(index), lane, lane.start_us[index], lane.duration_us[index])),
      element("div", { class: "tip-name" }, nameText(lane.nameAt(index), !lane.onHost(index))));
  }

  facts(kind, { rank, name }, begin, us) {
    const where = this.timelines.length > 1 ? `rank ${rank}, ${name}` : name;
    return [kind, duration(us), `at ${duration(begin)}`, where].filter(Boolean).join(" \u00b7 ");
  }

  hideTip() {
    this.tip.hidden = true;
    if (this.hovered) this.redraw();
    this.hovered = null;
  }

  // To be called when the theme has changed.
  recolour() {
    this.drawing.recolour(this.lanes.flatMap((lane) => [...new Set(lane.colours)]));
    this.redraw();
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const { timelines, start, end, length, hovered, emphasis } = this;
      this.drawing.draw({ timelines, start, end, length, hovered, emphasis });
    });
  }
}

// The recorded window as a picture with zoom and pan: one row a lane, and what a span is when pointed at.

const LANE_HEIGHT = 22;
const NESTED_HEIGHT = 16;
const LANE_GAP = 6;
const LABEL_WIDTH = 184;
const NARROW = 620;
const SHORTEST_VIEW_US = 0.5;

class TimelineView {
  constructor(timelines, onRank) {
    this.timelines = timelines;
    this.pointers = new Map();
    this.hovered = null;
    this.lastPageScroll = -Infinity;
    this.canvas = element("canvas", {
      tabindex: "0", role: "application", "aria-label": "Step timeline", "aria-describedby": "timeline-text",
      "aria-keyshortcuts": "+ - 0 ArrowLeft ArrowRight",
    });
    this.picture = new TimelinePicture(this.canvas);
    this.labels = element("div", { class: "lanes", role: "list", "aria-label": "Lanes" });
    this.tip = element("div", { class: "tip", role: "tooltip", hidden: true });
    this.plot = element("div", { class: "plot" }, this.labels, this.canvas, this.tip);
    this.legend = element("ul", { class: "legend", "aria-label": "Colours" });
    this.text = element("p", { id: "timeline-text", class: "muted" });
    this.stepButtons = element("span", { class: "group" });
    this.ranks = rankSelect(timelines.map((timeline) => timeline.rank), "Rank of the timeline", onRank);
    this.element = element("div", { class: "timeline", id: "timeline-view" },
      element("div", { class: "tools" }, this.ranks,
        element("span", { class: "group" },
          button("\u2212", () => this.zoom(2), { "aria-label": "Zoom out", "data-zoom": "out" }),
          button("+", () => this.zoom(0.5), { "aria-label": "Zoom in", "data-zoom": "in" }),
          button("Reset", () => this.reset(), { "data-zoom": "reset" })),
        this.stepButtons,
        element("span", { class: "muted help" }, "wheel or pinch zooms, drag pans, double click fits a span; keys + \u2212 0 \u2190 \u2192")),
      this.plot, this.legend, this.text);
    this.listen();
    this.show(timelines[0].rank);
  }

  show(rank) {
    const timeline = this.timelines.find((each) => each.rank === rank);
    if (!timeline) return;
    this.timeline = timeline;
    this.length = Math.max(timeline.length_us, SHORTEST_VIEW_US);
    this.lanes = timeline.lanes.map(preparedLane);
    this.rankSelected(rank);
    this.describe();
    this.layout();
    this.recolour();
    this.reset();
  }

  rankSelected(rank) {
    const select = this.ranks?.querySelector("select");
    if (select) select.value = String(rank);
  }

  describe() {
    const { rank, steps, lanes, kinds, omitted, left_out: between, length_us: length } = this.timeline;
    const shown = lanes.map((lane) => `${lane.name} (${number(lane.start_us.length)} spans)`).join(", ");
    const left = omitted ? ` The ${number(omitted)} shortest spans were left out.` : "";
    const striped = between.length ? " Striped: validation or checkpoints between steps, in no step's time." : "";
    this.text.textContent = visible(
      `Rank ${rank}: ${duration(length)}, ${number(steps.length)} steps. Lanes: ${shown || "none"}.${left}${striped}`);
    const seen = new Set(lanes.flatMap((lane) => lane.kind_index));
    this.legend.replaceChildren(...kinds.filter((_, index) => seen.has(index)).map((kind) => element("li", null, swatch(kindColour(kind)), kind)));
    const jumps = steps.length > 1 && steps.length <= 12 ? steps : [];
    this.stepButtons.replaceChildren(...jumps.map(([step, begin, end]) => {
      const after = between.flatMap(([, stop]) => (stop < end ? stop : []));
      return button(`Step ${step}`, () => this.setView(Math.max(begin, ...after), end), { "data-step": step });
    }));
  }

  // Where each lane lies; its name stands left of it, on a narrow screen above it.
  layout() {
    const width = this.plot.clientWidth;
    const narrow = width < NARROW;
    this.left = narrow ? 0 : LABEL_WIDTH;
    this.width = Math.max(1, width - this.left);
    const caption = narrow ? 16 : 0;
    let y = AXIS_HEIGHT + (this.timeline.steps.length ? STEP_HEIGHT : 0) + LANE_GAP;
    for (const lane of this.lanes) {
      lane.y = y + caption;
      lane.rowHeight = lane.depths > 1 ? NESTED_HEIGHT : LANE_HEIGHT;
      lane.height = lane.rowHeight * lane.depths;
      y = lane.y + lane.height + LANE_GAP;
    }
    this.labels.replaceChildren(...this.lanes.map((lane) => {
      const label = element("div", { class: "lane", role: "listitem", title: lane.name }, lane.name);
      label.style.top = `${narrow ? lane.y - caption : lane.y}px`;
      label.style.width = narrow ? "100%" : `${LABEL_WIDTH - 10}px`;
      label.style.lineHeight = `${narrow ? caption : lane.height}px`;
      label.style.pointerEvents = narrow ? "none" : "auto"; // above a lane it lies over the canvas
      return label;
    }));
    this.canvas.style.marginLeft = `${this.left}px`;
    this.picture.resize(this.width, y + LANE_GAP);
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
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
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
    if (!hit) {
      this.hideTip();
      return;
    }
    if (this.hovered?.lane !== hit.lane || this.hovered.index !== hit.index) {
      this.hovered = hit;
      this.fillTip(hit);
      this.redraw();
    }
    this.tip.hidden = false;
    const space = this.plot.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(space, this.left + x + 14))}px`;
    this.tip.style.top = `${hit.lane.y + hit.lane.height + 8}px`;
  }

  fillTip({ lane, index }) {
    const { names, kinds } = this.timeline;
    const kind = kinds[lane.kind_index[index]] ?? "";
    const facts = [kind, duration(lane.duration_us[index]), `at ${duration(lane.start_us[index])}`, lane.name];
    this.tip.replaceChildren(
      element("div", { class: "tip-facts" }, swatch(kindColour(kind)), facts.filter(Boolean).join(" \u00b7 ")),
      element("div", { class: "tip-name" }, nameText(names[lane.name_index[index]] ?? "", lane.group !== "host")));
  }

  hideTip() {
    this.tip.hidden = true;
    if (this.hovered) this.redraw();
    this.hovered = null;
  }

  // To be called when the theme has changed.
  recolour() {
    this.picture.recolour(this.timeline.kinds);
    this.redraw();
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const { timeline, lanes, start, end, length, hovered } = this;
      this.picture.draw({ timeline, lanes, start, end, length, hovered });
    });
  }
}

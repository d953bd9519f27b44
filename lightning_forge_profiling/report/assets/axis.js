// An axis of time, and drawings that are stretched over it.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const WIDE = 1000; // of a drawing, whose height is 100

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

function plot(style, label, shapes) {
  return drawn("svg", { class: style, viewBox: `0 0 ${WIDE} 100`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...shapes);
}

// An element at so many percent from the left or the top of where it is.
function placed(made, places) {
  for (const [side, pct] of Object.entries(places)) made.style[side] = `${pct}%`;
  return made;
}

// An axis of seconds that begins at 0.
class TimeAxis {
  constructor(length) {
    this.length = length;
    [this.unit, this.divisor] = length < 300 ? ["s", 1] : length < 3 * 3600 ? ["min", 60] : ["h", 3600];
    this.digits = 2;
  }

  part(second) {
    return Math.min(1, Math.max(0, second / this.length));
  }

  write(second, digits = this.digits) {
    return `${number(second / this.divisor, digits)} ${this.unit}`;
  }

  ticks() {
    const step = tickStep(this.length / this.divisor, 8);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return Array.from({ length: Math.floor(this.length / this.divisor / step) + 1 }, (_, index) => {
      const second = index * step * this.divisor;
      return { part: this.part(second), text: this.write(second, digits), minor: index % 2 === 1, last: this.part(second) > 0.96 };
    });
  }
}

// The row of an axis' ticks, beside what is given.
function axisRow(axis, label, ...marks) {
  const ticks = axis.ticks().map(({ part, text, minor, last }) =>
    placed(element("span", { class: `tick${minor ? " minor" : ""}${last ? " last" : ""}` }, text), { left: 100 * part }));
  return element("div", { class: "chart-row axis" }, element("div", { class: "chart-label" }, label),
    element("div", { class: "chart-plot", "aria-hidden": "true" }, ticks, marks));
}

// What a mark of a chart stands for, as a tip beside it: for the pointer, for a tap, and for the keys.
//
// A mark is an element with `data-tip`. The marks of a bar or of a lane are in one element with the class `marks`, which
// takes the focus, and whose marks the arrow keys go through.

const REACH_PX = 8; // so near a mark the pointer need be: some are narrower than it

class Tips {
  constructor() {
    this.mark = null;
    this.element = element("div", { class: "tip", role: "status", hidden: true });
    document.body.append(this.element);
    for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, (event) => this.show(this.at(event)));
    document.addEventListener("focusin", ({ target }) => { // a tap gives the focus to the bar of the mark that it is at
      if (target.matches("[data-tip]")) this.show(target);
      else if (!target.contains(this.mark)) this.show(null);
    });
    document.addEventListener("keydown", (event) => this.onKey(event));
  }

  // The mark under the pointer, else the nearest one in the same bar or lane.
  at({ target, clientX }) {
    const mark = target.closest?.("[data-tip]");
    if (mark) return mark;
    const away = (each) => {
      const { left, right } = each.getBoundingClientRect();
      return Math.max(0, left - clientX, clientX - right);
    };
    const near = this.marksIn(target.closest?.(".marks")).map((each) => [away(each), each]).filter(([far]) => far <= REACH_PX);
    return near.reduce((best, each) => (each[0] < best[0] ? each : best), [Infinity, null])[1];
  }

  marksIn(chart) {
    return chart ? [...chart.querySelectorAll("[data-tip]")] : [];
  }

  show(mark) {
    this.mark?.classList.remove("pointed");
    this.mark = mark;
    this.element.hidden = !mark;
    if (!mark) return;
    mark.classList.add("pointed");
    this.element.textContent = mark.dataset.tip;
    const [page, box, around] = [document.documentElement, mark.getBoundingClientRect(), mark.parentElement.getBoundingClientRect()];
    const left = Math.max(box.left, around.left); // of a mark that begins before its chart
    Object.assign(this.element.style, { left: "4px", top: "0" }); // where nothing narrows it while it is measured
    this.element.style.left = `${Math.max(4, Math.min(left, page.clientWidth - this.element.offsetWidth - 4))}px`;
    this.element.style.top = `${box.bottom + window.scrollY + 6}px`;
  }

  onKey(event) {
    if (event.key === "Escape") this.show(null);
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.matches(".marks")) return;
    const marks = this.marksIn(event.target);
    const from = marks.indexOf(this.mark);
    const places = { ArrowLeft: (from < 0 ? marks.length : from) - 1, ArrowRight: from + 1, Home: 0, End: marks.length - 1 };
    if (!Object.hasOwn(places, event.key) || !marks.length) return;
    event.preventDefault();
    this.show(marks[Math.min(marks.length - 1, Math.max(0, places[event.key]))]);
  }
}

// A table of the reports: it sorts by a click on a header, and can be searched.
//
// Its columns are { name, kind, means }, and of a row the first cell names it, by its `key` if it has one. Shares and other
// numbers come before text: a phone shows what fits. Numbers sort largest first, missing ones last.

const textOf = (cell) => cell?.text ?? cell ?? "";

// "12.34 ms" as the number that it begins with, "" as none.
function figure(text) {
  const value = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(value) ? null : value;
}

class DataTable {
  // `colour` gives that of a row, where it has one.
  constructor({ title, columns, rows }, { search = null, limit = Infinity, colour = null } = {}) {
    Object.assign(this, { label: title, rows, limit, colour });
    const kinds = ["share", "number"];
    const order = ({ name, kind, place }) => (place === 0 ? -2 : name === "" ? -1 : kinds.includes(kind) ? kinds.indexOf(kind) : kinds.length);
    this.columns = columns.map((column, place) => ({ ...column, place, numeric: kinds.includes(column.kind) })).sort((a, b) => order(a) - order(b));
    const named = new Map(rows.map((row) => [rowId(title, row.key || textOf(row.cells[0])), row]).reverse()); // the first of each name
    this.ids = new Map([...named].map(([id, row]) => [row, id]));
    this.sorted = null;
    this.wanted = "";
    this.all = false;
    this.body = element("tbody");
    this.heads = this.columns.map((column, index) => this.head(column, index));
    this.more = button("", () => this.toggleAll(), { class: "more" });
    this.status = element("span", { class: "muted", role: "status" });
    const table = element("table", null,
      element("caption", { class: "for-readers" }, title),
      element("thead", null, element("tr", null, this.heads)), this.body);
    const searchBox = search && element("input", {
      type: "search", placeholder: search, "aria-label": `${search}: ${title}`, spellcheck: "false",
      oninput: (event) => this.search(event.target.value),
    });
    this.scroller = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title, onscroll: () => this.fade() }, table);
    this.element = element("div", { class: search ? "datatable" : "datatable small" },
      searchBox && element("div", { class: "tools" }, searchBox, this.status),
      this.scroller, element("p", { class: "muted sideways" }, "\u2194 more columns: scroll sideways"), this.more);
    const resized = new ResizeObserver(() => this.fade());
    for (const each of [this.scroller, table]) resized.observe(each);
    this.render();
  }

  value(row, { place, numeric }) {
    const text = textOf(row.cells[place]);
    return numeric ? figure(text) : text;
  }

  // Where the table goes on it fades out: a number that is cut reads as another.
  fade() {
    const { scrollLeft, clientWidth, scrollWidth, classList } = this.scroller;
    classList.toggle("on-left", scrollLeft > 1);
    classList.toggle("on-right", scrollLeft + clientWidth < scrollWidth - 1);
  }

  head(column, index) {
    return element("th", { scope: "col", class: column.numeric ? "number" : null, title: column.means || null },
      button(column.name, () => this.sort(index)));
  }

  search(text) {
    this.wanted = text.trim().toLowerCase();
    this.render();
  }

  sort(column) {
    const again = this.sorted?.column === column;
    this.sorted = { column, descending: again ? !this.sorted.descending : this.columns[column].numeric === true };
    this.render();
  }

  toggleAll() {
    this.all = !this.all;
    this.render();
  }

  matching() {
    const texts = this.columns.filter((column) => !column.numeric);
    const found = this.rows.filter((row) => this.wanted === "" ||
      [row.key ?? "", ...texts.map((column) => this.value(row, column))].some((text) => text.toLowerCase().includes(this.wanted)));
    if (this.sorted === null) return found;
    const { column, descending } = this.sorted;
    const key = (row) => this.value(row, this.columns[column]);
    const direction = descending ? -1 : 1;
    return found.sort((first, second) => {
      const [a, b] = [key(first), key(second)];
      if (a === b) return 0;
      if (a === null) return 1;
      if (b === null) return -1;
      return direction * (typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
    });
  }

  render() {
    const found = this.matching();
    const shown = this.all || this.wanted ? found : found.slice(0, this.limit);
    this.heads.forEach((head, index) => {
      const order = this.sorted?.column === index ? (this.sorted.descending ? "descending" : "ascending") : null;
      if (order) head.setAttribute("aria-sort", order);
      else head.removeAttribute("aria-sort");
    });
    const none = element("tr", null, element("td", { colspan: this.columns.length, class: "muted" },
      this.wanted ? "Nothing matches." : "None."));
    this.body.replaceChildren(...(shown.length ? shown.map((row) => this.row(row)) : [none]));
    this.status.textContent = this.wanted ? `${found.length} of ${this.rows.length}` : `${this.rows.length}`;
    this.more.textContent = this.all ? `Show the first ${this.limit}` : `Show all ${found.length}`;
    this.more.hidden = this.wanted !== "" || found.length <= this.limit;
  }

  row(row) {
    const id = this.ids.get(row);
    return element("tr", { id, class: row.depth > 1 ? "inner" : null }, this.columns.map((column, index) => {
      const attributes = { class: column.numeric ? "number" : null, scope: index === 0 ? "row" : null };
      const cell = element(index === 0 ? "th" : "td", attributes, this.written(row, column), index === 0 && backLinks(id));
      if (column.kind === "share" && textOf(row.cells[column.place])) {
        cell.classList.add("bar");
        cell.style.setProperty("--part", `${Math.min(100, Math.max(0, this.value(row, column)))}%`);
      }
      return cell;
    }));
  }

  written(row, { place, name, kind, numeric }) {
    const text = textOf(row.cells[place]);
    if (numeric) return text;
    const coloured = name === "kind" ? kindColour(text) : place === 0 && this.colour?.(row);
    const shown = kind === "code" ? nameCell(text, (place === 0 && row.key) || text)
      : kind === "codes" ? clampedWhenLong(element("span", { class: "shapes" }, text.replaceAll("\n", "; ")), "all shapes")
        : element(row.strong || (row.style && place === 0) ? "b" : "span", null, breakable(text));
    return coloured ? element("span", { class: "part" }, swatch(coloured, (row.key ?? "").startsWith("idle: ")), shown) : shown;
  }
}

// A table of few rows, and what to know of it.
function tableOf(table, options) {
  return [table.note && element("p", { class: "muted" }, table.note), new DataTable(table, options).element];
}

// A name that may break between its words, and nowhere in one.
function breakable(name) {
  return name.split(/(?<=[/._:])(?=[a-z])/i).flatMap((piece, index) => (index ? [element("wbr"), piece] : [piece]));
}

// The base name of a kernel stands out.
function nameText(name, isKernel = true) {
  const [begin, end] = isKernel ? baseName(name) : [0, name.length];
  return element("span", { class: "name" },
    name.slice(0, begin), element("b", null, breakable(name.slice(begin, end))), name.slice(end));
}

// A name as the reports shorten it; a button opens the whole.
function nameCell(label, name) {
  if (label === name) return clampedWhenLong(nameText(name), "full name");
  const [base] = label.split(/[<(]/, 1);
  const text = element("span", { class: "name" }, element("b", null, breakable(base)), label.slice(base.length));
  const whole = nameText(name);
  const toggle = button("full name", () => {
    const opens = text.isConnected;
    (opens ? text : whole).replaceWith(opens ? whole : text);
    toggle.textContent = opens ? "less" : "full name";
    toggle.setAttribute("aria-expanded", String(opens));
  }, { class: "link", "aria-expanded": "false" });
  return element("div", null, text, " ", toggle);
}

// Of a long text two lines show, and a button opens the rest.
const LONG_TEXT = 120;

function clampedWhenLong(text, label) {
  if (text.textContent.length <= LONG_TEXT) return text;
  text.classList.add("clamped");
  const toggle = button(label, () => {
    const clamped = text.classList.toggle("clamped");
    toggle.textContent = clamped ? label : "less";
    toggle.setAttribute("aria-expanded", String(!clamped));
  }, { class: "link", "aria-expanded": "false" });
  return element("div", null, text, toggle);
}

// Terms and values in a row, and what they mean: [["Device", "NVIDIA H200"], ["line", "train.py:8", "where ..."], ...].
function facts(rows) {
  return element("dl", { class: "facts" }, rows.map(([term, value, means]) =>
    element("div", means ? { "data-tip": means, tabindex: "0" } : null, element("dt", null, term), element("dd", null, breakable(String(value))))));
}

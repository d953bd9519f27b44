// A table that sorts by a click on a header, and can be searched.
//
// A column is { label, value(row), write(value, row) -> text or element, numeric, bar, title }. Numbers sort largest
// first, missing values last; `bar` draws a number as a bar of so many percent behind it.

class DataTable {
  constructor({ label, columns, rows, search = null, limit = 20, sort = null, empty = "None." }) {
    Object.assign(this, { label, columns, rows, limit, empty });
    const named = new Map(rows.map((row) => [rowId(label, columns[0].value(row)), row]).reverse()); // the first of each name
    this.ids = new Map([...named].map(([id, row]) => [row, id]));
    this.sorted = sort === null ? null : { column: sort, descending: columns[sort].numeric === true };
    this.wanted = "";
    this.all = false;
    this.body = element("tbody");
    this.heads = columns.map((column, index) => this.head(column, index));
    this.more = button("", () => this.toggleAll(), { class: "more" });
    this.status = element("span", { class: "muted", role: "status" });
    const table = element("table", null,
      element("caption", { class: "for-readers" }, label),
      element("thead", null, element("tr", null, this.heads)), this.body);
    const searchBox = search && element("input", {
      type: "search", placeholder: search, "aria-label": `${search}: ${label}`, spellcheck: "false",
      oninput: (event) => this.search(event.target.value),
    });
    this.scroller = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label, onscroll: () => this.fade() }, table);
    this.element = element("div", { class: "datatable" },
      searchBox && element("div", { class: "tools" }, searchBox, this.status),
      this.scroller, element("p", { class: "muted sideways" }, "\u2194 more columns: scroll sideways"), this.more);
    const resized = new ResizeObserver(() => this.fade());
    for (const each of [this.scroller, table]) resized.observe(each);
    this.render();
  }

  // Where the table goes on it fades out: a number that is cut reads as another.
  fade() {
    const { scrollLeft, clientWidth, scrollWidth, classList } = this.scroller;
    classList.toggle("on-left", scrollLeft > 1);
    classList.toggle("on-right", scrollLeft + clientWidth < scrollWidth - 1);
  }

  head(column, index) {
    return element("th", { scope: "col", class: column.numeric ? "number" : null, title: column.title },
      button(column.label, () => this.sort(index)));
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
      texts.some((column) => String(column.value(row) ?? "").toLowerCase().includes(this.wanted)));
    if (this.sorted === null) return found;
    const { column, descending } = this.sorted;
    const key = this.columns[column].value;
    const direction = descending ? -1 : 1;
    return found.sort((first, second) => {
      const [a, b] = [key(first), key(second)];
      if (a === b) return 0;
      if (a === null || a === undefined) return 1;
      if (b === null || b === undefined) return -1;
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
      this.wanted ? "Nothing matches." : this.empty));
    this.body.replaceChildren(...(shown.length ? shown.map((row) => this.row(row)) : [none]));
    this.status.textContent = this.wanted ? `${found.length} of ${this.rows.length}` : `${this.rows.length}`;
    this.more.textContent = this.all ? `Show the first ${this.limit}` : `Show all ${found.length}`;
    this.more.hidden = this.wanted !== "" || found.length <= this.limit;
  }

  row(row) {
    const id = this.ids.get(row);
    return element("tr", { id }, this.columns.map((column, index) => {
      const value = column.value(row);
      const written = column.write ? column.write(value, row) : value;
      const attributes = { class: column.numeric ? "number" : null, scope: index === 0 ? "row" : null };
      const cell = element(index === 0 ? "th" : "td", attributes, written, index === 0 && backLinks(id));
      if (column.bar) {
        cell.classList.add("bar");
        cell.style.setProperty("--part", `${Math.min(100, Math.max(0, value || 0))}%`);
      }
      return cell;
    }));
  }
}

// A table of few rows: all of them show, in the order they come.
function smallTable(label, columns, rows) {
  const table = new DataTable({ label, columns, rows, limit: Infinity }).element;
  table.classList.add("small");
  return table;
}

// A name that may break between its words, and nowhere in one.
function breakable(name) {
  return name.split(/(?<=[/._:])(?=[a-z])/i).flatMap((piece, index) => (index ? [element("wbr"), piece] : [piece]));
}

// A kernel's base name stands out.
function nameText(name, isKernel) {
  const [begin, end] = isKernel ? baseName(name) : [0, name.length];
  return element("span", { class: "name" },
    name.slice(0, begin), element("b", null, breakable(name.slice(begin, end))), name.slice(end));
}

// A kernel's name, or the part in which it differs from others that begin alike; a button opens the whole name.
function kernelCell(name, label) {
  if (label === undefined) return clampedWhenLong(nameText(name, true), "full name");
  const text = element("span", { class: "name" }, element("b", null, label));
  const whole = nameText(name, true);
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

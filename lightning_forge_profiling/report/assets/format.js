// Elements, text and numbers.
//
// Names come out of trace files and are untrusted: they reach the page without control characters and those that
// reverse the direction of the text around them, and as text nodes and plain attributes only.

// element("td", { class: "number", onclick: f }, "text", otherElement): what is null or false is left out.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child);
  }
  return made;
}

function button(label, onclick, attributes) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

const FORMATS = new Map();

function number(value, digits = 0) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "\u2013";
  if (!FORMATS.has(digits)) {
    const fixed = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    FORMATS.set(digits, new Intl.NumberFormat("en-US", fixed));
  }
  return FORMATS.get(digits).format(value);
}

// Three significant digits or more, for numbers that stand alone.
function short(value) {
  return number(value, value === 0 ? 0 : Math.min(20, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))))));
}

// Whole numbers as they are, others with two digits: 3, 0.33.
function count(value) {
  return number(value, Number.isInteger(value) ? 0 : 2);
}

const milliseconds = (value) => `${short(value)} ms`;
const percent = (value) => `${number(value, 1)} %`;

// A time on the timeline, in the unit in which it is easy to read.
function duration(us) {
  if (us < 1000) return `${number(us, us < 100 ? 2 : 1)} \u00b5s`;
  return us < 1e6 ? `${number(us / 1000, 3)} ms` : `${number(us / 1e6, 3)} s`;
}

// Where the bracket opens that closes at the end of `text`, its length where none does.
function openingOf(text, opens, closes) {
  let depth = 0;
  for (let place = text.length - 1; text.endsWith(closes) && place >= 0; place -= 1) {
    if (text[place] === closes) depth += 1;
    else if (text[place] === opens && (depth -= 1) === 0) return place;
  }
  return text.length;
}

// Where the base name of a demangled kernel begins and ends: without return type, namespaces, template and arguments.
function baseName(name) {
  const called = name.slice(0, openingOf(name, "(", ")"));
  const plain = called.slice(0, openingOf(called, "<", ">"));
  const begin = Math.max(plain.lastIndexOf("::") + 2, plain.lastIndexOf(" ") + 1);
  const demangled = plain.length < name.length && begin < plain.length && !/^Mem(cpy|set)/.test(name);
  return demangled ? [begin === 1 ? 0 : begin, plain.length] : [0, name.length];
}

function shortName(name) {
  const [begin, end] = baseName(name);
  return name.slice(begin, end) || name;
}

// Colours by kind of work. Hues follow Okabe and Ito's colour-blind-safe set, in two lightnesses; all are light enough
// for black text on them. Idle time is hatched: colour alone never distinguishes it from work.

const KIND_COLOURS = new Map([
  ["matmul", "--blue"],
  ["attention", "--sky"],
  ["convolution", "--indigo"],
  ["elementwise", "--green"],
  ["normalization", "--mint"],
  ["reduction", "--amber"],
  ["softmax", "--yellow"],
  ["optimizer", "--brown"],
  ["embedding", "--teal"],
  ["indexing", "--olive"],
  ["random", "--lilac"],
  ["loss", "--rose"],
  ["copy", "--sand"],
  ["fill", "--stone"],
  ["comm", "--vermilion"],
  ["memory", "--plum"],
  ["memcpy", "--plum"],
  ["memset", "--pink"],
  ["region", "--slate"],
]);

// Regions of the step, in the breakdown of a step without GPU work and on the host's lanes of the timeline.
const REGION_COLOURS = new Map([
  ["data", "--region-data"],
  ["transfer", "--region-transfer"],
  ["forward", "--region-forward"],
  ["backward", "--region-backward"],
  ["optimizer", "--region-optimizer"],
  ["other", "--region-other"],
]);

const IDLE_COLOURS = new Map([
  ["data", "--amber"],
  ["launch", "--pink"],
  ["sync", "--vermilion"],
  ["allocator", "--brown"],
  ["copy", "--plum"],
  ["python", "--blue"],
]);

const CATEGORY_ORDER = ["matmul", "other", "memory", "comm"];

function kindColour(kind, category) {
  return KIND_COLOURS.get(kind) ?? KIND_COLOURS.get(category) ?? "--grey";
}

// A region's name without the prefix that its range has in a trace.
function regionName(name) {
  return name.replace(/^forge\./, "");
}

function regionColour(name) {
  return REGION_COLOURS.get(regionName(name)) ?? KIND_COLOURS.get("region");
}

const idleColour = (name) => IDLE_COLOURS.get(name.replace("idle: ", "")) ?? "--grey";

function swatch(colour, hatched = false) {
  const made = element("span", { class: hatched ? "swatch hatched" : "swatch", "aria-hidden": "true" });
  made.style.setProperty("--colour", `var(${colour})`);
  return made;
}

// The values of custom properties in the theme that is on, for the canvas.
function resolvedColours(properties) {
  const probe = element("span", { hidden: true });
  document.body.append(probe);
  const colours = new Map();
  for (const property of properties) {
    probe.style.color = `var(${property})`;
    colours.set(property, getComputedStyle(probe).color);
  }
  probe.remove();
  return colours;
}

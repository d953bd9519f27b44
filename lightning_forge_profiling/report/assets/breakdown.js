// Where a step's time goes: bars of which the whole is the step, and the same in numbers.

const usedGpu = (rank) => rank.gpu.busy_ms_per_step > 0;
const rankName = (rank) => (rank.cut_off ? `${rank.rank} (cut off)` : `${rank.rank}`);

// The parts of a step without GPU work: the host's time by region.
function hostParts(rank) {
  const step = rank.step_ms.mean;
  return rank.regions.filter((region) => !region.user && region.host_ms_per_step > 0).map((region) => ({
    name: region.name, idle: false, colour: regionColour(region.name),
    ms: region.host_ms_per_step, pct: step > 0 ? (100 * region.host_ms_per_step) / step : 0,
  }));
}

// The parts of one rank's step: work by kind and idle time by cause, the larger of both first.
function partsOf(rank) {
  if (!usedGpu(rank)) return hostParts(rank);
  const place = (kind) => CATEGORY_ORDER.indexOf(kind.category);
  const work = Object.entries(rank.kinds)
    .sort(([, a], [, b]) => place(a) - place(b) || b.ms_per_step - a.ms_per_step)
    .map(([name, kind]) => ({
      name, idle: false, colour: kindColour(name, kind.category), ms: kind.ms_per_step, pct: kind.pct,
    }));
  const idle = Object.entries(rank.idle).map(([cause, share]) => (
    { name: `idle: ${cause}`, idle: true, colour: idleColour(cause), ms: share.ms_per_step, pct: share.pct }));
  return (rank.gpu.idle_pct > rank.gpu.busy_pct ? [...idle, ...work] : [...work, ...idle]).filter((part) => part.ms > 0);
}

function segment(part, pct) {
  const made = element("div", {
    class: part.idle ? "segment hatched" : "segment", "data-tip": part.title ?? `${part.name}: ${number(part.ms, 3)} ms, ${percent(part.pct)}`,
  }, element("span", null, part.name.replace("idle: ", "")));
  made.style.width = `${pct}%`;
  made.style.setProperty("--colour", `var(${part.colour})`);
  return made;
}

function barOf(label, segments) {
  return element("div", { class: "stack marks", role: "img", tabindex: "0", "aria-label": label }, segments);
}

function stackedBar(parts, label) {
  const text = parts.map((part) => `${part.name} ${percent(part.pct)}`).join(", ");
  return barOf(`${label}: ${text || "nothing recorded"}`, parts.map((part) => segment(part, part.pct)));
}

function rankBars(ranks) {
  return element("div", { class: "bars" }, ranks.map((rank) => element("div", { class: "barrow" },
    element("span", { class: "barlabel" }, `Rank ${rankName(rank)}`),
    stackedBar(partsOf(rank), `Rank ${rankName(rank)}`),
    element("span", { class: "barvalue" }, milliseconds(rank.step_ms.mean)))));
}

// The parts of one rank's step in numbers; those that its bar is made of have a key.
function partsTable(rank, table) {
  const colour = ({ key }) => key && (key.startsWith("idle: ") ? idleColour : usedGpu(rank) ? kindColour : regionColour)(key);
  return tableOf(table, { colour });
}

// The steps one by one, on the scale of the longest.
function stepBars(rank) {
  const longest = Math.max(...rank.per_step.map((step) => step.ms));
  return element("div", { class: "bars steps" }, rank.per_step.map((step) => {
    const share = (ms) => (longest > 0 ? (100 * ms) / longest : 0);
    const ofStep = (ms) => (step.ms > 0 ? (100 * ms) / step.ms : 0);
    const work = CATEGORY_ORDER.filter((category) => step.categories_ms[category] > 0).map((category) => ({
      name: category, idle: false, colour: kindColour(category), ms: step.categories_ms[category],
    }));
    const idle = { name: "idle", idle: true, colour: "--grey", ms: Math.max(0, step.ms - step.busy_ms) };
    const parts = [...work, idle].map((part) => ({ ...part, pct: ofStep(part.ms) }));
    const remark = !step.whole ? " (cut off)" : step.counted ? "" : rank.per_step.some((other) => other.light) && !step.light
      ? " (with operators)" : " (not counted)";
    const label = `Step ${step.number}${remark}`;
    const text = parts.map((part) => `${part.name} ${percent(part.pct)}`).join(", ");
    return element("div", { class: "barrow" },
      element("span", { class: "barlabel" }, label),
      barOf(`${label}: ${text}`, parts.map((part) => segment(part, share(part.ms)))),
      element("span", { class: "barvalue" }, milliseconds(step.ms)));
  }));
}

// Empty where there is neither GPU work nor a region; `ofRun`: whether the page has a table of the regions already.
function breakdownSection(ranks, words, ofRun) {
  const onGpu = ranks.some(usedGpu);
  const recorded = ranks.filter((rank) => usedGpu(rank) === onGpu && partsOf(rank).length > 0);
  if (!recorded.length) return [];
  const says = onGpu ? "The whole bar is the step. Hatched: the GPU was idle, by what the host did meanwhile."
    : "No GPU activity in the trace: the whole bar is the step on the host, by region.";
  return [
    rankBars(recorded),
    element("p", { class: "muted" }, says),
    ranks.length > 1 ? tableOf(words.of_ranks) : (onGpu || !ofRun) && partsTable(ranks[0], words.parts[0]),
    !onGpu && ranks.length === 1 && element("p", { class: "muted" }, words.said[0].join("; ")),
  ];
}

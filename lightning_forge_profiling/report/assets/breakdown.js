// Where a step's time goes: bars of which the whole is the step, and the same in numbers.

const usedGpu = (rank) => rank.gpu.busy_ms_per_step > 0;
const rankName = (rank) => (rank.cut_off ? `${rank.rank} (cut off)` : `${rank.rank}`);

// The parts of a step without GPU work: the host's time by region.
function hostParts(rank) {
  const step = rank.step_ms.mean;
  return rank.regions.filter((region) => !region.user && region.host_ms_per_step > 0).map((region) => ({
    key: `region ${region.name}`, name: region.name, idle: false, colour: regionColour(region.name),
    note: "", ms: region.host_ms_per_step, pct: step > 0 ? (100 * region.host_ms_per_step) / step : 0,
    calls: region.calls_per_step || null,
  }));
}

// Whether the GPUs were idle for longer than they worked.
function mostlyIdle(ranks) {
  const gpus = ranks.filter(usedGpu).map((rank) => rank.gpu);
  return gpus.reduce((sum, gpu) => sum + gpu.idle_pct - gpu.busy_pct, 0) > 0;
}

// The parts of one rank's step: work by kind and idle time by cause, the larger of both first.
function partsOf(rank) {
  if (!usedGpu(rank)) return hostParts(rank);
  const place = (kind) => CATEGORY_ORDER.indexOf(kind.category);
  const work = Object.entries(rank.kinds)
    .sort(([, a], [, b]) => place(a) - place(b) || b.ms_per_step - a.ms_per_step)
    .map(([name, kind]) => ({
      key: `kind ${name}`, name, idle: false, colour: kindColour(name, kind.category), note: "", ms: kind.ms_per_step,
      pct: kind.pct, calls: kind.calls_per_step,
    }));
  const idle = Object.entries(rank.idle).map(([cause, share]) => {
    const [colour, note] = IDLE.get(cause) ?? ["--grey", ""];
    return { key: `idle ${cause}`, name: `idle: ${cause}`, idle: true, colour, note, ms: share.ms_per_step, pct: share.pct };
  });
  return (mostlyIdle([rank]) ? [...idle, ...work] : [...work, ...idle]).filter((part) => part.ms > 0);
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

// One row a part, two columns a rank.
function partsTable(ranks) {
  const parts = new Map();
  const shares = new Map();
  for (const rank of ranks) {
    for (const part of partsOf(rank)) {
      if (!parts.has(part.key)) parts.set(part.key, part);
      shares.set(`${rank.rank} ${part.key}`, part);
    }
  }
  const largest = (part) => Math.max(...ranks.map((rank) => shares.get(`${rank.rank} ${part.key}`)?.ms ?? 0));
  const idleFirst = mostlyIdle(ranks) ? -1 : 1;
  const rows = [...parts.values()].sort((a, b) => idleFirst * (a.idle - b.idle) || largest(b) - largest(a));
  const named = {
    label: "Part of the step", value: (part) => part.name,
    write: (name, part) => element("span", { class: "part" }, swatch(part.colour, part.idle), name,
      part.note && element("span", { class: "muted" }, part.note)),
  };
  const several = ranks.length > 1;
  const numbers = ranks.flatMap((rank) => {
    const share = (part) => shares.get(`${rank.rank} ${part.key}`);
    return [
      { label: several ? `rank ${rankName(rank)}: ms` : "ms per step", title: "ms per step", numeric: true, value: (part) => share(part)?.ms ?? 0, write: (ms) => number(ms, 3) },
      { label: several ? "%" : "% of step", numeric: true, bar: !several, value: (part) => share(part)?.pct ?? 0, write: (pct) => number(pct, 1) },
      !several && { label: "calls per step", numeric: true, value: (part) => share(part)?.calls, write: count },
    ].filter(Boolean);
  });
  return smallTable("Parts of the step", [named, ...numbers], rows);
}

function rankTable(ranks) {
  const numeric = (label, value, write, title) => ({ label, value, write, title, numeric: true });
  const ms = (value) => number(value, 3);
  const pct = (value) => number(value, 1);
  return smallTable("Ranks", [
    { label: "Rank", value: rankName },
    numeric("step ms", (rank) => rank.step_ms.mean, ms, "mean"),
    numeric("p50", (rank) => rank.step_ms.p50, ms),
    numeric("min", (rank) => rank.step_ms.min, ms),
    numeric("max", (rank) => rank.step_ms.max, ms),
    numeric("busy %", (rank) => rank.gpu.busy_pct, pct),
    numeric("idle %", (rank) => rank.gpu.idle_pct, pct),
    numeric("comm ms", (rank) => rank.comm.ms_per_step, ms, "communication per step"),
    numeric("hidden %", (rank) => rank.comm.hidden_pct, pct, "share of the communication during which something else ran"),
    numeric("exposed ms", (rank) => rank.comm.exposed_ms_per_step, ms, "communication during which no other kernel ran"),
    numeric("exposed %", (rank) => rank.comm.exposed_pct, pct, "share of the step"),
    numeric("kernels", (rank) => rank.gpu.kernels_per_step, count, "per step"),
  ], ranks);
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

function communicationText(rank) {
  const { ms_per_step: full, exposed_ms_per_step: exposed, hidden_pct: hidden, exposed_pct: share } = rank.comm;
  if (!(full > 0)) return null;
  return element("p", null, `Communication, rank ${rank.rank}: ${milliseconds(full)} per step, ${percent(hidden)} of it hidden behind other work; `,
    `${milliseconds(exposed)} exposed, ${percent(share)} of the step.`);
}

// Operators and Python in a step on the CPU, which lie across its regions.
function cpuFacts({ cpu, step_ms: step }, threads) {
  if (!cpu) return null;
  const share = (ms) => `${milliseconds(ms)} per step, ${percent(step.mean > 0 ? (100 * ms) / step.mean : 0)}`;
  return facts([
    ["Operators without data and optimizer", share(cpu.operators_ms_per_step)],
    ["Python between operators", share(cpu.python_ms_per_step)],
    ["Threads", threads],
  ]);
}

// Empty where there is neither GPU work nor a region; `ofRun`: whether the page has a table of the regions already.
function breakdownSection(ranks, words, ofRun) {
  const onGpu = ranks.some(usedGpu);
  const recorded = ranks.filter((rank) => usedGpu(rank) === onGpu && partsOf(rank).length > 0);
  if (!recorded.length) return [];
  if (!onGpu) {
    return [
      rankBars(recorded),
      element("p", { class: "muted" }, "No GPU activity in the trace: the whole bar is the step on the host, by region."),
      !ofRun && partsTable(recorded),
      recorded.length === 1 && cpuFacts(recorded[0], words.threads),
    ];
  }
  const communicates = recorded.some((rank) => rank.comm.ms_per_step > 0);
  return [
    rankBars(recorded),
    element("p", { class: "muted" }, "The whole bar is the step. Hatched: the GPU was idle, by what the host did meanwhile."),
    partsTable(recorded),
    recorded.length === 1 && communicates && communicationText(recorded[0]),
  ];
}

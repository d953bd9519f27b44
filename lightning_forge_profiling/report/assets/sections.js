// Sections of facts and tables.

function verdictSection(summary, record) {
  const first = summary.findings[0];
  const named = first !== undefined && first.code === summary.verdict;
  const plain = summary.verdict_text.replace(`${summary.verdict}: `, "");
  const said = named ? `${first.title}. ${remedy(first)}` : plain;
  const beside = plain.startsWith(said) ? plain.slice(said.length).trim() : "";
  const ofRanks = record?.ranks;
  return [
    ofRanks?.hang && element("p", { class: "notes", id: "hang" }, element("b", null, "Hang: "), ofRanks.hang),
    ofRanks?.straggler && summary.verdict !== "straggler" && element("p", { class: "notes", id: "straggler" }, element("b", null, "Straggler: "), ofRanks.straggler),
    element("p", { class: "badges" }, codeBadge(summary.verdict, summary.words, { class: "badge", id: "verdict-code" }),
      record && element("span", { class: "badge quiet", id: "outcome" }, record.outcome),
      named && element("span", { class: "muted" }, `${percent(first.share_pct)} ${summary.words.shares[0]}${ofRank(first.rank)}`),
      record && element("span", { class: "muted", id: "status" }, record.status)),
    element("h1", { id: "verdict-text" }, named ? first.title : plain),
    named && element("p", { class: "advice" }, remedy(first)),
    named && fix(first),
    beside && element("p", { id: "verdict-beside" }, beside),
    summary.words.ranks && element("p", { id: "ranks-note", class: "muted" }, `${summary.words.ranks}.`),
    notes("Warnings", summary.words.warnings),
  ];
}

function ofRank(rank) {
  return rank === null || rank === undefined ? "" : ` \u00b7 rank ${rank}`;
}

function notes(title, texts) {
  if (!texts.length) return null;
  return element("div", { class: "notes" }, element("h3", null, title),
    element("ul", null, texts.map((text) => element("li", null, text))));
}

function between(values, write) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return write(least) === write(most) ? write(most) : `${write(least)} to ${write(most)}`;
}

function overview({ ranks, run, all_ranks: all }) {
  if (!ranks.length) {
    return run ? [
      ["Device", run.timing.on_device ? "GPU" : "CPU"], ["Processes", count(run.ranks.world_size)], ["Steps measured", number(run.timing.steps)],
      ["Step time", stepTime(run.timing.step_ms)],
    ] : [];
  }
  const devices = [...new Set(ranks.map((rank) => rank.device).filter(Boolean))];
  const recorded = ranks.length > 1 ? between(ranks.map((rank) => rank.step_ms.mean), milliseconds) : stepTime(ranks[0].step_ms);
  return [
    ["Device", devices.join(", ") || "no GPU in the trace"],
    ["Ranks", number(Math.max(all, ranks.length))],
    ["Steps that count", `${between(ranks.map((rank) => rank.steps), number)} of ${between(ranks.map((rank) => rank.per_step.length), number)} recorded`],
    ...(run ? [["Step time", stepTime(run.timing.step_ms)], ["Recorded step", recorded]] : [["Step time", recorded]]),
    ...(ranks.some(usedGpu) ? [
      ["GPU busy", between(ranks.map((rank) => rank.gpu.busy_pct), percent)],
      ["Kernels per step", between(ranks.map((rank) => rank.gpu.kernels_per_step), (value) => number(value))],
    ] : []),
  ];
}

function stepTime({ mean, p50, p95, min, max }) {
  return `${milliseconds(mean)} (p50 ${short(p50)}, ${p95 === null ? "" : `p95 ${short(p95)}, `}${short(min)} to ${short(max)})`;
}

function remedy(finding) {
  return finding.saves ? `${finding.advice} ${finding.saves.text}` : finding.advice;
}

// The fix as code to copy, where it is some.
function fix(finding) {
  return finding.fix ? element("p", { class: "fix" }, element("code", null, finding.fix)) : false;
}

// A code, as a link to its page of the docs.
function codeBadge(code, { docs }, attributes) {
  if (!Object.hasOwn(docs, code) || !docs[code]) return element("span", attributes, code);
  return element("a", { ...attributes, href: docs[code], target: "_blank", rel: "noopener noreferrer", title: `${code} in the documentation` }, code);
}

// What to change for the verdict is said above.
function findingsSection({ findings, words, verdict, differences }) {
  const { shares, remarks } = words;
  return [words.note && element("p", { id: "findings-note", class: "muted" }, `${words.note}.`),
    notes("The trace and the whole run differ", differences), ...findings.map((finding, index) => element("article", { class: "finding", id: findingId(findings, finding) },
    element("p", { class: "badges" }, codeBadge(finding.code, words, { class: "badge quiet" }),
      element("b", null, percent(finding.share_pct)),
      element("span", { class: "muted" }, `${shares[index]}${ofRank(finding.rank)} \u00b7 from the ${finding.source === "run" ? "whole run" : "trace"}`)),
    element("h3", null, finding.title),
    facts(words.evidence[index]),
    (index > 0 || finding.code !== verdict) && [element("p", { class: "advice" }, remedy(finding)), fix(finding)])), ...remarks.map((remark) => element("p", { class: "muted" }, remark))];
}

const column = {
  text: (label, value, write) => ({ label, value, write }),
  name: (label, value) => ({ label, value, write: (name) => clampedWhenLong(nameText(name, false), "full name") }),
  number: (label, value, digits = 3, title = null) => ({
    label, value, title, numeric: true, write: (figure) => number(figure, digits),
  }),
  count: (label, value, title = null) => ({ label, value, title, numeric: true, write: count }),
  bar: (label, value, title = null) => ({ label, value, title, numeric: true, bar: true, write: (figure) => number(figure, 1) }),
};

const SHOWN_PCT = 0.05; // less shows as 0.0 %

// The longest parts of the GPU's idle time, by what the thread was in that launched the work after them.
function idleTable(parts, step) {
  const shown = parts.filter((part) => 100 * part.ms_per_step >= SHOWN_PCT * step);
  const threads = new Set(shown.map((part) => part.thread)).size > 1;
  return smallTable("Idle time", [
    column.text("The host was in", (part) => part.activity, (activity, part) => element("span", { class: "part" },
      activity ? element("span", { class: "name" }, activity) : part.launched ? "anything: the work had been launched" : "Python outside of operators",
      part.operator && element("span", { class: "muted" }, "in ", element("span", { class: "name" }, part.operator)),
      threads && part.thread && element("span", { class: "muted" }, `thread ${part.thread}`))),
    column.number("ms per step", (part) => part.ms_per_step),
    column.bar("% of step", (part) => (step > 0 ? (100 * part.ms_per_step) / step : 0)),
    column.text("Ended by", (part) => part.following, (name) => element("span", { class: "name" }, shortName(name))),
  ], shown);
}

function kernelTable(kernels, labels) {
  return new DataTable({
    label: "Top kernels", search: "Search kernels", rows: kernels, sort: 2, limit: 15, empty: "No kernels in the trace.",
    columns: [
      column.text("Kernel", (kernel) => kernel.name, (name) => kernelCell(name, labels[name])),
      column.bar("% of step", (kernel) => kernel.pct),
      column.number("ms per step", (kernel) => kernel.ms_per_step),
      column.number("mean \u00b5s", (kernel) => kernel.mean_us, 2, "of one call"),
      column.count("calls per step", (kernel) => kernel.calls_per_step),
      column.text("Kind", (kernel) => kernel.kind, (kind, kernel) =>
        element("span", { class: "kind" }, swatch(kindColour(kind, kernel.category)), kind)),
    ],
  });
}

function operatorTable(operators, onGpu) {
  const allocated = operators.some((operator) => operator.allocated_bytes_per_step !== null);
  const shaped = operators.some((operator) => operator.input_shapes.length > 0);
  return new DataTable({
    label: "Operators", search: "Search operators", rows: operators, sort: 1, limit: 15, empty: "No operators in the trace.",
    columns: [
      column.name("Operator", (operator) => operator.name),
      ...(onGpu ? [
        column.number("self GPU ms", (operator) => operator.self_device_ms_per_step, 3, "per step, of what it launched itself"),
        column.number("GPU ms", (operator) => operator.device_ms_per_step, 3, "per step, with the operators it called"),
      ] : []),
      column.number("self host ms", (operator) => operator.self_host_ms_per_step, 3, "per step, without the operators it called"),
      column.number("host ms", (operator) => operator.host_ms_per_step, 3, "per step, with the operators it called"),
      column.count("calls", (operator) => operator.calls_per_step, "per step"),
      ...(allocated ? [{ ...column.count("allocated", (operator) => operator.allocated_bytes_per_step, "per step, net of what it freed"), write: (size) => (size === null ? "\u2013" : memoryBytes(size)) }] : []),
      ...(shaped ? [column.text("Input shapes", (operator) => operator.input_shapes.join("; "), (shapes) => clampedWhenLong(element("span", { class: "shapes" }, shapes), "all shapes"))] : []),
    ],
  });
}

function regionTable(regions, onGpu) {
  return smallTable("Regions", [
    column.text("Region", (region) => region.name, (name, region) => element("span", { class: "part" },
      element("span", { class: "name" }, name), region.user && element("span", { class: "muted" }, "yours"))),
    ...(onGpu ? [
      column.bar("% of step", (region) => region.pct, "GPU work launched in it"),
      column.number("GPU ms per step", (region) => region.gpu_ms_per_step),
    ] : []),
    column.number("host ms per step", (region) => region.host_ms_per_step),
    ...(onGpu ? [column.count("launches per step", (region) => region.launches_per_step)] : []),
    column.count("entered per step", (region) => region.calls_per_step || null, "unknown where inferred from operators"),
  ], regions);
}

function copyTable(copies) {
  return smallTable("Copies", [
    column.text("Direction", (copy) => copy.direction),
    column.text("Host memory", (copy) => copy.memory || "\u2013"),
    column.count("calls per step", (copy) => copy.calls_per_step),
    { ...column.count("copied per step", (copy) => copy.bytes_per_step), write: bytes },
    column.number("ms per step", (copy) => copy.ms_per_step),
    column.number("exposed ms", (copy) => copy.exposed_ms_per_step, 3, "the GPU did nothing but such copies"),
    column.number("GB/s", (copy) => copy.gb_per_s || null, 1),
  ], copies);
}

function syncTable(syncs) {
  return smallTable("Calls that wait for the GPU", [
    column.text("Cause", (sync) => sync.cause),
    column.text("Where", (sync) => sync.where || (sync.lightning ? "Lightning's own loop" : "no stacks recorded"),
      (where) => element("span", { class: "name" }, where)),
    column.count("per step", (sync) => sync.per_step),
    column.number("host waits, ms per step", (sync) => sync.host_ms_per_step),
  ], syncs);
}

function hostFacts({ host, memory, unlinked_pct: unlinked }) {
  return facts([
    ["Launches per step", count(host.launches_per_step)],
    ["Waits for the GPU per step", count(host.device_syncs_per_step)],
    host.lightning_syncs_per_step > 0 && ["\u2026 of Lightning's own loop", count(host.lightning_syncs_per_step)],
    ["GPU idle after such waits", `${milliseconds(host.idle_after_sync_ms_per_step)} per step`],
    ["In the data loader", `${milliseconds(host.data_wait_ms_per_step)} per step`],
    ["cudaMalloc / cudaFree per step", `${count(host.cuda_mallocs_per_step)} / ${count(host.cuda_frees_per_step)}`],
    ["Copied to the GPU", `${bytes(host.h2d_bytes_per_step)} per step`],
    memory && ["Peak memory allocated", memoryBytes(memory.peak_allocated_bytes)],
    memory && ["Peak memory reserved", memoryBytes(memory.peak_reserved_bytes)],
    memory && ["Allocations / frees per step", `${count(memory.allocations_per_step)} / ${count(memory.frees_per_step)}`],
    unlinked > 0 && ["GPU time without a launch in the trace", percent(unlinked)],
  ].filter(Boolean));
}

function flopsSection({ flops }) {
  const ofPeak = (share) => (share === null ? "" : ` (${percent(share)} of peak)`);
  return element("div", null, facts([
    ["Counted per step", flop(flops.per_step)],
    ["The model's part", flops.model_per_step === null ? "unknown: compiled code may recompute" : flop(flops.model_per_step)],
    ["Over its kernels", `${short(flops.matmul_tflops)} TFLOP/s${ofPeak(flops.matmul_pct_of_peak)}`],
    ["Over GPU busy time", `${short(flops.busy_tflops)} TFLOP/s${ofPeak(flops.busy_pct_of_peak)}`],
    ["Over the step", `${short(flops.step_tflops)} TFLOP/s`],
    ["Peak", flops.peak_tflops === null ? `unknown device: no ratio (${flops.dtype})` : `${short(flops.peak_tflops)} TFLOP/s, dense ${flops.dtype}`],
    ["Covers", `${percent(flops.counted_pct)} of matmul, convolution and attention time`],
  ]), flops.uncounted.length > 0 && element("p", { class: "muted" }, `Not counted: ${flops.uncounted.join(", ")}.`));
}

function collectivesSection(collectives, waits) {
  const waiting = smallTable("Waiting by rank", [
    column.text("Rank", (wait) => wait.rank),
    column.number("communication, ms per step", (wait) => wait.comm_ms_per_step),
    column.number("of it waiting, ms per step", (wait) => wait.wait_ms_per_step),
  ], waits);
  const costs = smallTable("Collectives", [
    column.text("Collective", (each) => each.name),
    column.text("Group", (each) => each.group),
    column.count("calls per step", (each) => each.calls_per_step),
    column.number("MB per step", (each) => each.megabytes_per_step || null, 1, "input of one rank"),
    column.number("cost, ms per step", (each) => each.cost_ms_per_step, 3, "the shortest over the ranks: what it takes itself"),
    column.number("waiting, ms per step", (each) => each.wait_ms_per_step, 3, "mean over the ranks: for the last to join"),
  ], collectives);
  return [
    element("p", { class: "muted" }, "Matched over the ranks: the shortest is the cost, what the others took longer is waiting. The rank that waits least is the one that the others wait for."),
    waits.length > 0 && waiting, collectives.length > 0 && costs,
  ];
}

// "12.34" as the number that it is, "" as none.
const figure = (text) => (text === "" || text === undefined ? null : Number(text.replaceAll(",", "")));

const named = (lines) => lines.length > 0 && element("dl", { class: "lines" }, lines.flatMap(({ name, text }) => [element("dt", null, name), element("dd", null, breakable(text.text))]));

function stepSection({ table, lines }) {
  if (!table) return element("p", { class: "empty" }, "No step was timed.");
  const [first, share, ...others] = table.columns.map((each) => each.name);
  const rows = table.rows.map(({ cells: [name, , ...times], share: pct }) => ({ name, pct, times }));
  const parts = rows.filter((row) => row.pct > 0 && REGION_COLOURS.has(row.name)).map((row) => ({
    name: row.name, pct: row.pct, colour: regionColour(row.name), idle: false,
    title: `${row.name}: ${[percent(row.pct), ...others.map((heading, index) => `${heading} ${row.times[index]}`)].join(", ")}`,
  }));
  const columns = [
    column.text(first || "Region", (row) => row.name, (name, row) => element(row.pct === null ? "b" : "span", null, name)),
    { ...column.bar(share, (row) => row.pct), write: (pct) => (pct === null ? "" : percent(pct)) },
    ...others.map((heading, index) => ({
      label: heading, numeric: true, value: (row) => figure(row.times[index]), write: (_, row) => row.times[index],
    })),
  ];
  return [
    parts.length > 0 && stackedBar(parts, "The step"),
    smallTable("The step by region", columns, rows),
    named(lines.filter(({ name }) => name === "note")),
  ];
}

function aboutTrace(summary) {
  const starved = summary.run?.timing.gpu_starved_pct ?? null;
  return [
    facts([...overview(summary), ...(starved === null ? [] : [["GPU had caught up at the batch's end", `${percent(starved)} of the steps`]])]),
    named((summary.words.step?.lines ?? []).filter(({ name }) => name !== "note")),
  ];
}

function footer(summary) {
  const files = summary.ranks.map((rank) => rank.file).filter(Boolean);
  return element("footer", null,
    summary.ranks.length > 0 && element("h2", null, "View the trace"),
    summary.ranks.length > 0 && element("ul", null,
      element("li", null, "Perfetto: open ", element("a", { href: "https://ui.perfetto.dev", target: "_blank", rel: "noopener noreferrer" }, "ui.perfetto.dev"),
        " and drop the file on it, or run ", element("code", null, "forge-profiling view --perfetto PATH"), "."),
      element("li", null, "TensorBoard: ", element("code", null, "forge-profiling export PATH --for tensorboard --out DIR"), ", then ",
        element("code", null, "tensorboard --logdir DIR"), ".")),
    files.length > 0 && element("p", { class: "muted" }, `Files: ${files.join(", ")}`),
    element("p", { class: "muted" }, `Schema version ${summary.schema_version} of summary.json, which holds every number shown here.`));
}

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
      named && element("span", { class: "muted" }, `${summary.words.shares[0]}${ofRank(first.rank)}`),
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
      element("b", null, shares[index]),
      element("span", { class: "muted" }, `${ofRank(finding.rank)} \u00b7 from the ${finding.source === "run" ? "whole run" : "trace"}`)),
    element("h3", null, finding.title),
    facts(words.evidence[index]),
    (index > 0 || finding.code !== verdict) && [element("p", { class: "advice" }, remedy(finding)), fix(finding)])), ...remarks.map((remark) => element("p", { class: "muted" }, remark))];
}

function communicationSection({ words, collectives }) {
  return [
    collectives.length > 0 && element("p", { class: "muted" }, "Matched over the ranks: the shortest is the cost, what the others took longer is waiting. The rank that waits least is the one that the others wait for."),
    words.communication.map((table) => tableOf(table)),
  ];
}

const named = (lines) => lines.length > 0 && element("dl", { class: "lines" }, lines.flatMap(({ name, text }) => [element("dt", null, name), element("dd", null, breakable(text.text))]));

function stepSection({ table, lines }) {
  if (!table) return element("p", { class: "empty" }, "No step was timed.");
  const [, , ...others] = table.columns.map((each) => each.name);
  const parts = table.rows.filter(({ share, cells: [name] }) => share > 0 && REGION_COLOURS.has(name)).map(({ share, cells: [name, , ...times] }) => ({
    name, pct: share, colour: regionColour(name), idle: false,
    title: `${name}: ${[percent(share), ...others.map((heading, index) => `${heading} ${times[index]}`)].join(", ")}`,
  }));
  return [
    parts.length > 0 && stackedBar(parts, "The step"),
    tableOf({ ...table, title: "The step by region" }),
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

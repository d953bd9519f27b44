// The page: sections in order, the choice of a rank for the details, and the theme.

function rankSelect(ranks, label, onRank) {
  if (ranks.length < 2) return null;
  const select = element("select", { "aria-label": label, onchange: (event) => onRank(Number(event.target.value)) },
    ranks.map((rank) => element("option", { value: rank }, String(rank))));
  return element("label", { class: "rank" }, "Rank ", select);
}

function section(id, title, content, tools = null) {
  return element("section", { id, "aria-label": title || "Verdict" },
    title && element("div", { class: "heading" }, element("h2", null, title), tools), content);
}

function rankDetails(rank, words) {
  const onCpu = rank.cpu !== null && !usedGpu(rank);
  const regions = onCpu ? rank.regions.filter((region) => region.user) : rank.regions; // the others are the breakdown
  const part = (id, title, content) => section(id, title, content);
  const idle = usedGpu(rank) && rank.idle_parts.some((part) => 100 * part.ms_per_step >= SHOWN_PCT * rank.step_ms.mean) && part("idle", "Idle GPU, by what the host was in", idleTable(rank.idle_parts, rank.step_ms.mean));
  const kernels = rank.top_kernels.length > 0 && part("kernels", "Top kernels", kernelTable(rank.top_kernels, words.labels).element);
  const uncounted = !onCpu && !rank.flops && rank.flops_note ? ` FLOPs unknown: ${rank.flops_note}.` : "";
  return [
    ...(mostlyIdle([rank]) ? [idle, kernels] : [kernels, idle]),
    rank.python && part("python", "Python functions of the step", pythonSection(rank.python, rank.step_ms.mean)),
    rank.operators.length > 0 && part("operators", "Operators", [
      element("p", { class: "muted" }, `Means per step.${uncounted}`), operatorTable(rank.operators, usedGpu(rank)).element,
    ]),
    regions.length > 0 && part("regions", onCpu ? "Your regions" : "Regions", regionTable(regions, !onCpu)),
    !onCpu && part("host", "Host and memory", [hostFacts(rank), rank.host.syncs.length > 0 && syncTable(rank.host.syncs)]),
    rank.copies.length > 0 && part("copies", "Copies", copyTable(rank.copies)),
    rank.flops && part("flops", "FLOPs", flopsSection(rank)),
  ];
}

function themeButton(onChange) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const toggle = button("", () => apply(isDark() ? "light" : "dark"), { id: "theme" });
  const apply = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    toggle.textContent = isDark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    onChange();
  };
  dark.addEventListener("change", () => apply(root.dataset.theme));
  let before;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    apply("light");
  });
  window.addEventListener("afterprint", () => apply(before));
  apply(root.dataset.theme);
  return toggle;
}

// The run before the window that was recorded in it; a page of a trace alone begins with the window.
function build(summary, record, timelines) {
  const { ranks, findings, hints, collectives, rank_waits: waits, run } = summary;
  const details = element("div", { id: "details" });
  const detailRanks = rankSelect(ranks.map((rank) => rank.rank), "Rank of the details", (rank) => choose(rank));
  const steps = element("div", { id: "steps" });
  const drawn = timelines.filter((timeline) => timeline.lanes.length > 0);
  const timeline = drawn.length > 0 ? new TimelineView(drawn) : null;

  const choose = (number) => {
    timeline?.show(number);
    const rank = ranks.find((each) => each.rank === number);
    if (!rank) return;
    const select = detailRanks?.querySelector("select");
    if (select) select.value = String(number);
    details.replaceChildren(...rankDetails(rank, summary.words).filter(Boolean));
    steps.replaceChildren(...(rank.per_step.length > 1 && usedGpu(rank)
      ? [element("h3", null, ranks.length > 1 ? `Steps of rank ${rankName(rank)}` : "Steps"), stepBars(rank)] : []));
  };

  linkBack(findings);
  const several = ranks.length > 1;
  const breakdown = breakdownSection(ranks, summary.words);
  const verdict = section("verdict", "", verdictSection(summary, record));
  const found = findings.length > 0 && section("findings", "Findings", findingsSection(findings, summary.words, summary.verdict));
  const course = [
    run?.ledger && section("course", "Where the run's time went", courseSection(run, summary.words)),
    record && record.seconds.length > 0 && section("over-time", "Over the run", curvesSection(record)),
    run?.machine.telemetry && section("telemetry", "GPU over the run", telemetrySection(run.machine.telemetry, run, record)),
    run?.memory?.curve.seconds.length > 0 && section("memory", "What fills the GPU's memory", memorySection(run, summary.words.memory)),
  ];
  const window = [
    timeline && section("timeline", "Step timeline", timeline.element),
    breakdown.length > 0 && section("breakdown", "Breakdown of the step", [...breakdown, steps]),
  ];
  const ofRanks = [
    ranks.length > 0 && element("div", null, several && element("div", { class: "heading details" }, element("h2", null, "Details of one rank"), detailRanks), details),
    (collectives.length > 0 || waits.length > 0) && section("collectives", "Collectives over the ranks", collectivesSection(collectives, waits)),
  ];
  const whole = run && !record && section("run", "The whole run", runSection(run, summary.words));
  const advice = hints.length > 0 && section("hints", "Hints", hintsSection(hints, several));
  const sections = (record ? [
    verdict, section("step", record.step.title || "Where a step goes", stepSection(record)), found, ...course,
    record.ranks && section("ranks", record.ranks.title, ranksSection(record.ranks)),
    ranks.length > 0 && element("div", { class: "heading details", id: "window" }, element("h2", null, "The recorded window")), ...window, ...ofRanks,
    record.events.length > 0 && section("events", "Events", eventsSection(record)), advice, section("setting", "Setting", settingSection(record)),
  ] : [verdict, ...window, found, ...course, ...ofRanks, whole, advice]).filter(Boolean);
  const page = document.getElementById("page");
  page.append(
    element("header", null,
      element("div", null, element("span", { class: "product" }, "forge-profiling"), " ", element("span", { class: "source" }, record ? record.folder : summary.source)),
      themeButton(() => timeline?.recolour())),
    element("main", null, sections), footer(summary));
  document.title = [record?.outcome, summary.verdict, record ? record.folder : summary.source].filter(Boolean).join(" \u00b7 ");
  if (ranks.length) choose(findings[0]?.rank ?? ranks[0].rank);
  timeline?.layout();
  const reveal = (finding) => finding.rank !== null && choose(finding.rank);
  for (const finding of findings) {
    const links = evidenceLinks(findings, finding, timeline, reveal);
    if (links) document.getElementById(findingId(findings, finding)).append(links);
  }
  new Tips();
  if (location.hash) location.replace(location.hash); // the place was not there yet
}

const block = (id) => JSON.parse(document.getElementById(id).textContent);
const { analysis, words } = block("forge-summary");
build({ ...analysis, words }, block("forge-record"), block("forge-timeline"));

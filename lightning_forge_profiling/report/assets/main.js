// The page: the verdict and where the time goes, then sections to unfold; the choice of a rank, and the theme.

function rankSelect(ranks, label, onRank) {
  if (ranks.length < 2) return null;
  const select = element("select", { "aria-label": label, onchange: (event) => onRank(Number(event.target.value)) },
    ranks.map((rank) => element("option", { value: rank }, String(rank))));
  return element("label", { class: "rank" }, "Rank ", select);
}

function section(id, title, content) {
  return element("section", { id, "aria-label": title || "Verdict" }, title && element("h2", null, title), content);
}

// A section that is folded until it is asked for: by a click, a link to what is in it, or a print. `says` stands beside its title.
function folded(id, title, content, says = "") {
  return element("section", { id, "aria-label": title }, element("details", { class: "fold" },
    element("summary", null, element("h2", null, title), says && element("span", { class: "muted says" }, says)), content));
}

// Unfold what holds the place that an address names, and what it is the heading of.
function unfold(id) {
  const place = document.getElementById(id);
  const inside = place?.querySelector(":scope > details.fold");
  if (inside) inside.open = true;
  for (let each = place; each; each = each.parentElement) if (each.matches("details")) each.open = true;
}

function listenForFolds() {
  const all = () => [...document.querySelectorAll("details.fold:not([open])")];
  let opened = [];
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (link) unfold(link.hash.slice(1));
  }, true);
  window.addEventListener("hashchange", () => unfold(location.hash.slice(1)));
  window.addEventListener("beforeprint", () => { for (const each of (opened = all())) each.open = true; });
  window.addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
}

function rankDetails(rank, words, place) {
  const [tables, work] = [words.details[place], words.work[place]];
  const long = { kernels: { search: "Search kernels", limit: 15 }, operators: { search: "Search operators", limit: 15 } };
  return [
    words.parts.length > 1 && folded("parts", words.parts[place].title, partsTable(rank, words.parts[place])),
    rank.python && folded("python", "Python functions of the step", [pythonSection(rank.python), tables.python && tableOf(tables.python)]),
    ...Object.entries(tables).filter(([id]) => id !== "python").map(([id, table]) => folded(id, table.title, tableOf(table, long[id]))),
    work.rows.length > 0 && folded("host", work.title, [element("p", { class: "muted" }, words.said[place].join("; ")), tableOf(work)]),
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
  const { ranks, findings, hints, run } = summary;
  const details = element("div", { id: "details" });
  const detailRanks = rankSelect(ranks.map((rank) => rank.rank), "Rank of the details", (rank) => choose(rank));
  const steps = element("div");
  const several = ranks.length > 1;
  const drawn = timelines.filter((timeline) => timeline.lanes.length > 0);
  const timeline = drawn.length > 0 ? new TimelineView(drawn) : null;

  const choose = (number) => {
    timeline?.show(number);
    const rank = ranks.find((each) => each.rank === number);
    if (!rank) return;
    const select = detailRanks?.querySelector("select");
    if (select) select.value = String(number);
    details.replaceChildren(...rankDetails(rank, summary.words, ranks.indexOf(rank)).filter(Boolean));
    steps.replaceChildren(...(rank.per_step.length > 1 && usedGpu(rank)
      ? [several && element("h3", null, `Steps of rank ${rankName(rank)}`), stepBars(rank)].filter(Boolean) : []));
  };

  linkBack(findings);
  const breakdown = breakdownSection(ranks, summary.words, record !== null || run !== null);
  const verdict = section("verdict", "", verdictSection(summary, record));
  const codes = findings.map(({ code, of, share_pct }) => of === "times" ? code : `${code} ${percent(share_pct)}`).join(", ");
  const found = findings.length > 0 && folded("findings", "Findings", findingsSection(summary), codes);
  const course = [
    run?.ledger && folded("course", "Where the run's time went", courseSection(run, summary.words), summary.words.goodput),
    record && record.seconds.length > 0 && folded("over-time", "Over the run", curvesSection(record)),
    run?.machine.telemetry && folded("telemetry", "GPU over the run", telemetrySection(run.machine.telemetry, run, record)),
    run?.memory?.curve.seconds.length > 0 && folded("memory", "What fills the GPU's memory", memorySection(run, summary.words.memory)),
  ];
  const ofSteps = breakdown.length > 0 && (run || record ? folded : section)("breakdown", "Breakdown of the step", breakdown);
  const oneByOne = ranks.some(usedGpu) && folded("steps", several ? "Steps of a rank one by one" : "Steps one by one", [steps]);
  const ofRanks = [
    timeline && folded("timeline", "Step timeline", timeline.element),
    oneByOne,
    ranks.length > 0 && element("div", null, several && element("div", { class: "heading details" }, element("h2", null, "Details of one rank"), detailRanks), details),
    summary.words.communication.length > 0 && folded("collectives", "Communication", communicationSection(summary)),
  ];
  const step = record ? record.step : summary.words.step;
  const ofStep = step && section("step", step.title || "Where a step goes", stepSection(step));
  const about = record ? folded("about", "The run: rates, files, settings", aboutRun(record, summary), record.throughput)
    : folded("about", ranks.length ? "The trace" : "The run", aboutTrace(summary), overview(summary)[0]?.[1]);
  const advice = hints.length > 0 && folded("hints", "Hints", element("ul", { class: "hints" }, summary.words.hints.map((text) => element("li", null, text))));
  const sections = (record ? [
    verdict, ofStep, found, ...course,
    record.ranks && folded("ranks", record.ranks.title, ranksSection(record.ranks), record.ranks.straggler),
    record.events.length > 0 && folded("events", "Events", eventsSection(record)), advice, about,
    ranks.length > 0 && element("div", { class: "heading details", id: "window" }, element("h2", null, "The recorded window")), ofSteps, ...ofRanks,
  ] : [verdict, ofStep, ofSteps, found, ...ofRanks, ...course, advice, about]).filter(Boolean);
  const page = document.getElementById("page");
  page.append(
    element("header", null,
      element("div", null, element("span", { class: "product" }, "forge-profiling"), " ", element("span", { class: "source" }, breakable(record ? record.folder : summary.source))),
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
  listenForFolds();
  if (!location.hash) return;
  unfold(location.hash.slice(1));
  location.replace(location.hash); // the place was not there yet
}

const block = (id) => JSON.parse(document.getElementById(id).textContent);
const { analysis, words } = block("forge-summary");
build({ ...analysis, words }, block("forge-record"), block("forge-timeline"));

// From a finding to what shows it, and back: rows of tables, lanes, spans of the timeline. Each has an id that depends on
// its name alone, so that links to a place of a page stay valid.

const slug = (text) => String(text).toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 80);
const rowId = (table, name) => `${slug(table)}--${slug(name)}`;
const laneId = (name) => rowId("lane", name);

// Of each code: names of rows, sections, and which spans of the timeline, of which the first that there are count.
const region = (name) => ({ text: `spans of ${name}`, shows: (lane, index) => lane.group === "host" && regionName(lane.nameAt(index)) === name });
const STREAMS = { text: "the GPU's streams; a gap is idle time", shows: (lane) => lane.group === "stream" };
const COMMUNICATION = { text: "communication", shows: (lane) => lane.group === "comm" };
const COPIES = { text: "copies from the host", shows: (lane, index) => /HtoD/.test(lane.nameAt(index)) };
const SHOWN_BY = {
  "input-bound": { rows: ["idle: data", "data"], spans: [region("data"), STREAMS] },
  "worker-restarts": { rows: ["data_loader", "idle: data", "data"], spans: [region("data"), STREAMS] },
  "transfer-bound": { rows: ["idle: copy", "transfer"], sections: ["copies"], spans: [COPIES] },
  "sync-bound": { rows: ["idle: sync"], sections: ["syncs", "host"], spans: [STREAMS] },
  "launch-bound": { rows: ["idle: python"], sections: ["idle"], spans: [STREAMS] },
  "allocator-churn": { rows: ["idle: allocator"], sections: ["host"], spans: [STREAMS] },
  "slow-launches": { rows: ["idle: launch"], sections: ["idle"], spans: [STREAMS] },
  "gpu-idle": { sections: ["breakdown", "idle"], spans: [STREAMS] },
  "slow-optimizer": { rows: ["optimizer"], spans: [region("optimizer")] },
  "between-regions": { rows: ["other"], spans: [region("other")] },
  "blocked-forward": { rows: ["forward"], spans: [region("forward")] },
  "blocked-backward": { rows: ["backward"], spans: [region("backward")] },
  "blocked-optimizer": { rows: ["optimizer"], spans: [region("optimizer")] },
  "communication-bound": { rows: ["comm"], sections: ["collectives"], spans: [COMMUNICATION] },
  "straggler": { sections: ["ranks", "collectives"], spans: [COMMUNICATION] },
  "compute-bound": { sections: ["kernels", "operators"], spans: [STREAMS] },
  "memory-bandwidth-bound": { sections: ["kernels"], spans: [STREAMS] },
  "python-bound": { sections: ["python", "operators"] },
};
const OF_TRACE = ["Parts of the step", "Regions"];
const OF_RANKS = { run: "Ranks of the run", trace: "Communication" };
const OF_RUN = ["The step by region", "Wall time of the run"];

const findingId = (findings, finding) => {
  const place = findings.filter((each) => each.code === finding.code).indexOf(finding);
  return `finding-${slug(finding.code)}${place ? `-${place + 1}` : ""}`;
};

// What shows a finding, where it is on the page: [id, words]; a finding of the run is not that of the recorded steps.
function placesOf(finding) {
  const { rows = [], sections = [] } = Object.hasOwn(SHOWN_BY, finding.code) ? SHOWN_BY[finding.code] : {};
  const names = [...new Set([...rows, finding.evidence.part, finding.evidence.leaf])].filter((name) => typeof name === "string");
  const tables = finding.source === "run" ? OF_RUN : OF_TRACE;
  return [
    ...tables.flatMap((table) => names.map((name) => [rowId(table, name), `${table}: ${name}`])),
    ...names.map((name) => [laneId(name), `Lane: ${name}`]),
    ...(finding.code === "straggler" ? [[rowId(OF_RANKS[finding.source], finding.rank), `${OF_RANKS[finding.source]}: ${finding.rank}`]] : []),
    ...sections.map((id) => [id, null]),
  ];
}

const BACK = new Map(); // id -> the findings that it shows

function linkBack(findings) {
  for (const finding of findings) {
    for (const [id] of placesOf(finding)) BACK.set(id, [...(BACK.get(id) ?? []), [findingId(findings, finding), finding.code]]);
  }
}

// The findings that a row or lane shows, as links.
function backLinks(id) {
  return (BACK.get(id) ?? []).flatMap(([target, code]) => [" ", backLink(target, code)]);
}

function backLink(target, code) {
  return element("a", { class: "back", href: `#${target}` }, `\u2191 ${code}`);
}

// The links of a finding, to what is on the page. `reveal` shows the rank of a finding, and its spans.
function evidenceLinks(findings, finding, timeline, reveal) {
  const { spans = [] } = Object.hasOwn(SHOWN_BY, finding.code) ? SHOWN_BY[finding.code] : {};
  const drawn = spans.find(({ shows }) => timeline?.has(shows));
  const place = ([id, words]) => {
    const heading = document.getElementById(id)?.querySelector("h2")?.textContent;
    return element("a", { href: `#${id}`, onclick: () => reveal(finding) }, words ?? heading);
  };
  const there = placesOf(finding).filter(([id]) => document.getElementById(id)).map(place);
  const toTimeline = drawn && element("a", {
    href: "#timeline",
    onclick: () => {
      reveal(finding);
      timeline.emphasize(drawn, backLink(findingId(findings, finding), finding.code));
    },
  }, "Timeline");
  const links = [toTimeline, ...there].filter(Boolean);
  return links.length > 0 && element("p", { class: "evidence" }, "Shown by ", links.flatMap((link, index) => [index > 0 && " \u00b7 ", link]));
}

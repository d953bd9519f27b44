// Lanes of spans, made ready to be drawn and searched.

const MAX_DEPTH = 4;
const ROUNDING_US = 0.01;

// The step by which a rank is placed beside others: the second, since ranks are out of step in the first recorded one.
function anchorStep({ steps }) {
  return steps[1] ?? steps[0] ?? [null, 0];
}

// The timelines of several ranks over one axis of time. The clocks of two machines differ, so each rank is placed by its
// own steps.
function alignedTimelines(timelines) {
  const begins = timelines.map((timeline) => anchorStep(timeline)[1]);
  const latest = Math.max(...begins);
  return timelines.map((timeline, position) => {
    const later = latest - begins[position];
    const moved = {
      ...timeline,
      length_us: timeline.length_us + later,
      steps: timeline.steps.map(([step, begin, end]) => [step, begin + later, end + later]),
      left_out: timeline.left_out.map(([begin, end]) => [begin + later, end + later]),
    };
    return { ...moved, lanes: orderedLanes(timeline.lanes).map((lane) => preparedLane(lane, moved, later)) };
  });
}

// The host's lanes, then the critical path, streams, and communication, so that the ranks' lanes can be compared.
function orderedLanes(lanes) {
  const groups = ["host", "path", "stream", "comm"];
  const place = (lane) => groups.indexOf(lane.group);
  const byName = (a, b) => (a.group === "host" ? 0 : a.name.localeCompare(b.name, "en", { numeric: true }));
  return [...lanes].sort((a, b) => place(a) - place(b) || byName(a, b));
}

// A lane with what drawing and searching need: ends, the furthest end so far, a colour and a row for each span. Host
// spans are nested and so take the first row that is free; what overlaps on a stream stays in one.
function preparedLane(lane, { rank, names, kinds }, later) {
  const starts = lane.start_us.map((start) => start + later);
  const ends = starts.map((start, index) => start + lane.duration_us[index]);
  const reach = [];
  let furthest = -Infinity;
  for (const end of ends) reach.push((furthest = Math.max(furthest, end)));
  const depth = new Uint8Array(ends.length);
  const rows = [];
  if (lane.group === "host") {
    starts.forEach((start, index) => {
      const free = rows.findIndex((end) => end <= start + ROUNDING_US);
      depth[index] = Math.min(free < 0 ? rows.length : free, MAX_DEPTH - 1);
      rows[depth[index]] = ends[index];
    });
  }
  const depths = 1 + depth.reduce((deepest, each) => Math.max(deepest, each), 0);
  const nameAt = (index) => names[lane.name_index[index]] ?? "";
  const kindAt = (index) => kinds[lane.kind_index[index]] ?? "";
  const onHost = (index) => lane.group === "host" || (lane.group === "path" && kindAt(index) === "region");
  const colours = starts.map((_, index) => (onHost(index) ? regionColour(nameAt(index)) : kindColour(kindAt(index))));
  return { ...lane, rank, start_us: starts, ends, reach, depth, depths, colours, nameAt, kindAt, onHost };
}

// The first index whose value is greater than `limit`, in values that never fall.
function firstAbove(values, limit) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The span of a lane at a time: the one that began last of those that cover it, or the nearest less than `near` away.
function spanAt(lane, depth, time, near) {
  let [best, distance] = [-1, Infinity];
  for (let index = firstAbove(lane.start_us, time + near) - 1; index >= 0; index -= 1) {
    if (lane.reach[index] < time - near || distance === 0) break;
    if (lane.depth[index] !== depth) continue;
    const away = Math.max(0, lane.start_us[index] - time, time - lane.ends[index]);
    if (away <= near && away < distance) [best, distance] = [index, away];
  }
  return best;
}

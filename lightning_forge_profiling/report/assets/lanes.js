// Lanes of spans, made ready to be drawn and searched.

const MAX_DEPTH = 4;
const ROUNDING_US = 0.01;

// A lane with what drawing and searching need: ends, the furthest end so far, and a row for each span. Host spans are
// nested and so take the first row that is free; what overlaps on a stream stays in one.
function preparedLane(lane) {
  const ends = lane.start_us.map((start, index) => start + lane.duration_us[index]);
  const reach = [];
  let furthest = -Infinity;
  for (const end of ends) reach.push((furthest = Math.max(furthest, end)));
  const depth = new Uint8Array(ends.length);
  const rows = [];
  if (lane.group === "host") {
    lane.start_us.forEach((start, index) => {
      const free = rows.findIndex((end) => end <= start + ROUNDING_US);
      depth[index] = Math.min(free < 0 ? rows.length : free, MAX_DEPTH - 1);
      rows[depth[index]] = ends[index];
    });
  }
  const depths = 1 + depth.reduce((deepest, each) => Math.max(deepest, each), 0);
  return { ...lane, ends, reach, depth, depths };
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

// What fills the GPU's memory over the run: what the model keeps, other tensors, activations, and what is cached, stacked.

const OF_MODEL = [["parameters", "parameters_bytes"], ["gradients", "gradients_bytes"], ["optimizer", "optimizer_bytes"], ["buffers", "buffers_bytes"]];
const BYTES_PER_GIB = 2 ** 30;
const LEAST_GIB = 0.01; // less is no layer

// The layers from the lowest to the highest: name and GiB at each point.
function memoryLayers({ model, curve }) {
  const { kept_gib: kept, peak_gib: peak, reserved_gib: reserved } = curve;
  const known = OF_MODEL.map(([name, key]) => [name, model[key] / BYTES_PER_GIB]);
  const sum = known.reduce((before, [, gib]) => before + gib, 0);
  return [
    ...known.map(([name, gib]) => [name, kept.map(() => gib)]),
    ["other tensors", kept.map((gib) => Math.max(gib - sum, 0))],
    ["activations and temporaries", peak.map((gib, index) => Math.max(gib - Math.max(kept[index], sum), 0))],
    ["cached by the allocator", reserved.map((gib, index) => Math.max(gib - peak[index], 0))],
  ].filter(([, gib]) => Math.max(...gib) >= LEAST_GIB);
}

function memorySection(run) {
  const { curve, growth, limit_gib: limit } = run.memory;
  const axis = run.ledger ? runAxis(run) : null;
  const offset = axis ? axis.origin + axis.training : 0;
  const time = new RunTime({ seconds: curve.seconds.map((second) => second - offset), samples_per_point: 1 }, axis);
  let below = curve.seconds.map(() => 0);
  const lines = memoryLayers(run.memory).map(([name, gib]) => {
    const [lows, highs] = [below, below.map((value, index) => value + gib[index])];
    below = highs;
    return { ...lineOf(name, `layer ${name.split(" ")[0]}`, gib, gib, gib), drawn: { means: highs, lows, highs } };
  });
  const view = new ChartsView(time, [chartOf({ title: "Memory", unit: "GiB", limited: "limit" }, lines, limit)], []);
  const table = element("details", null, element("summary", null, "The readings as a table"));
  table.addEventListener("toggle", () => table.append(telemetryTable(view)), { once: true });
  const note = "Read every few steps after the warm-up: what is kept from one step to the next, and above it the most that steps took so far. "
    + "The limit is what other processes and the driver leave to PyTorch.";
  return [
    growth && element("p", { class: "notes" }, element("b", null, "Grows: "),
      `${growth.category}, by ${number(growth.bytes_per_step / 2 ** 20, 1)} MiB a step; full at about step ${number(growth.full_step)}.`),
    view.element, element("p", { class: "charts-text muted" }, note), table,
  ];
}

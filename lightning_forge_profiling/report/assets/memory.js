// What fills the GPU's memory over the run: what the model keeps, other tensors, activations, and what is cached, stacked.

function memorySection(run, { layers, growth }) {
  const { curve, limit_gib: limit } = run.memory;
  const axis = run.ledger ? runAxis(run) : null;
  const offset = axis ? axis.origin + axis.training : 0;
  const time = new RunTime({ seconds: curve.seconds.map((second) => second - offset), samples_per_point: 1 }, axis);
  let below = curve.seconds.map(() => 0);
  const lines = layers.map(({ name, gib }) => {
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
    growth && element("p", { class: "notes" }, element("b", null, "Grows: "), `${growth}.`),
    view.element, element("p", { class: "charts-text muted" }, note), table,
  ];
}

// Python functions of the mean recorded step: callers above what they call, as wide as the time in them.

const CALL_COLOURS = { user: ["--amber", "yours"], library: ["--stone", "Python, PyTorch, Lightning, packages"], profiler: ["--indigo", "this package"] };
const PASSED_ON = 0.9; // a library function whose only callee takes so much of its time is folded into that

// The calls as nodes with places: from `begin` to `end` in parts of the step, and `depth` rows down.
function flameNodes(tree) {
  const nodes = tree.map((call) => ({ call, callees: [], folded: [] }));
  const roots = nodes.filter((node) => node.call.caller < 0);
  for (const node of nodes) nodes[node.call.caller]?.callees.push(node);
  const whole = roots.reduce((sum, root) => sum + root.call.ms_per_step, 0);
  const drawn = [];
  const place = (node, begin, depth, above) => {
    let shown = node;
    const folded = [];
    while (shown.call.kind !== "user" && shown.callees.length === 1 && shown.callees[0].call.ms_per_step >= PASSED_ON * shown.call.ms_per_step) {
      folded.push(shown.call.name);
      [shown] = shown.callees;
    }
    Object.assign(shown, { begin, end: begin + shown.call.ms_per_step / whole, depth, above, folded });
    drawn.push(shown);
    let next = begin;
    for (const callee of shown.callees) next = place(callee, next, depth + 1, shown) + (callee.call.ms_per_step / whole);
    return begin;
  };
  roots.reduce((begin, root) => place(root, begin, 0, null) + root.call.ms_per_step / whole, 0);
  return drawn;
}

function callTitle({ call, begin, end, folded }) {
  const times = call.calls_per_step > 0 ? `, ${count(call.calls_per_step)} calls per step` : "";
  return `${call.name}${call.where && ` (${call.where})`}: ${milliseconds(call.ms_per_step)}, ${percent(100 * (end - begin))}; ` +
    `${milliseconds(call.self_ms_per_step)} in itself${times}${folded.length ? `; called by way of ${folded.join(", ")}` : ""}`;
}

// A click on a function widens it to the whole width; one on the widened one goes back to what called it.
function flameGraph(tree) {
  const nodes = flameNodes(tree);
  const chart = element("div", { class: "flame", role: "group", "aria-label": "Python functions of the step" });
  chart.style.height = `${20 * (1 + Math.max(...nodes.map((node) => node.depth)))}px`;
  const show = (widened) => {
    const [from, length] = widened ? [widened.begin, widened.end - widened.begin] : [0, 1];
    const around = new Set();
    for (let node = widened; node; node = node.above) around.add(node);
    const [hadFocus, first] = [chart.contains(document.activeElement), widened ?? nodes[0]];
    let next = null;
    chart.replaceChildren(...nodes.filter((node) => around.has(node) || (node.end > from && node.begin < from + length)).map((node) => {
      const [left, width] = around.has(node) ? [0, 100] : [(100 * (node.begin - from)) / length, (100 * (node.end - node.begin)) / length];
      const made = button(element("span", null, node.call.name), () => show(node === widened ? node.above : node),
        { class: "call", "data-tip": callTitle(node), "aria-label": callTitle(node) });
      placed(made, { left });
      Object.assign(made.style, { width: `${width}%`, top: `${20 * node.depth}px` });
      made.style.setProperty("--colour", `var(${CALL_COLOURS[node.call.kind][0]})`);
      if (node === first) next = made;
      return made;
    }));
    if (hadFocus) next.focus({ preventScroll: true });
  };
  show(null);
  return chart;
}

function pythonSection({ tree }) {
  const kinds = Object.entries(CALL_COLOURS).filter(([kind]) => tree.some((call) => call.kind === kind));
  return [
    tree.length > 0 && flameGraph(tree),
    tree.length > 0 && element("ul", { class: "legend" }, kinds.map(([, [colour, words]]) => element("li", null, swatch(colour), words))),
    element("p", { class: "muted help-text" }, "The mean recorded step on the thread that trains. Click a function to widen it."),
  ];
}

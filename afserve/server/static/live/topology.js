// Attention nodes on the left, expert nodes on the right, and the rows between every pair.

import { $, drawn, mib, tip } from "./page.js";

const HIGH = 46, GAP = 14, MOST = 24, NARROW = 560;
const nodes = new Map(), wires = new Map();
let svg = null, shape = "", last = null;
let WIDE = 900, BOX = 190;  // as wide as there is room; a narrow page shows less in each box

function measure() {
  WIDE = Math.min(1100, Math.max(300, $("flow").clientWidth));
  BOX = WIDE < NARROW ? (WIDE - 70) / 2 : Math.min(210, 0.3 * WIDE);
}

function frame(left, right) {
  const rows = Math.max(left.length, right.length, 1), high = rows * (HIGH + GAP);
  svg?.remove();
  svg = null;
  nodes.clear(); wires.clear();
  svg = drawn($("flow"), "svg", { viewBox: `0 0 ${WIDE} ${high}`, role: "group", "aria-label": "Nodes" });
  const fade = drawn(drawn(svg, "defs", {}), "linearGradient",
    { id: "wire", gradientUnits: "userSpaceOnUse", x1: BOX, x2: WIDE - BOX, y1: 0, y2: 0 });
  drawn(fade, "stop", { offset: 0, class: "from" });
  drawn(fade, "stop", { offset: 1, class: "to" });
  const under = drawn(svg, "g", {});
  const y = (list, i) => (high - list.length * (HIGH + GAP)) / 2 + i * (HIGH + GAP) + GAP / 2;
  left.forEach((a, i) => right.forEach((e, j) => {
    const from = y(left, i) + HIGH / 2, to = y(right, j) + HIGH / 2, middle = WIDE / 2;
    const path = `M${BOX} ${from} C${middle} ${from} ${middle} ${to} ${WIDE - BOX} ${to}`;
    wires.set(a + " " + e, drawn(under, "path", { d: path, "stroke-width": 0, "stroke-opacity": 0 }));
  }));
  left.forEach((name, i) => nodes.set(name, box(name, "attention", 0, y(left, i))));
  right.forEach((name, i) => nodes.set(name, box(name, "expert", WIDE - BOX, y(right, i))));
}

function box(name, role, x, y) {
  const group = drawn(svg, "g", { class: "node " + role, tabindex: 0, transform: `translate(${x} ${y})` });
  drawn(group, "rect", { class: "box", width: BOX, height: HIGH, rx: 6 });
  drawn(group, "rect", { class: "mark", x: 0, y: 8, width: 4, height: HIGH - 16, rx: 2 });
  drawn(group, "text", { x: 14, y: 18, "font-weight": 650 }, name);
  const right = drawn(group, "text", { x: BOX - 10, y: 18, "text-anchor": "end" });
  const under = drawn(group, "text", { x: 14, y: 33, class: "dim" });
  drawn(group, "rect", { class: "rail", x: 14, y: 38, width: BOX - 24, height: 3, rx: 1.5 });
  const use = drawn(group, "rect", { class: "use", x: 14, y: 38, width: 0, height: 3, rx: 1.5 });
  const one = { group, right, under, use, text: "" };
  for (const kind of ["mousemove", "focus"]) group.addEventListener(kind, event => tip(event, one.text));
  for (const kind of ["mouseleave", "blur"]) group.addEventListener(kind, event => tip(event, ""));
  return one;
}

// Busiest first where there are more than fit, each side in the order of its indices.
function chosen(all) {
  const order = new Map(all.map((node, i) => [node.name, i]));
  const busiest = [...all].sort((a, b) => b.load - a.load).slice(0, MOST);
  return busiest.sort((a, b) => order.get(a.name) - order.get(b.name));
}

// `attention` and `experts`: {name, state, away, rate, load, use, detail, more, bytes}; `more` is only in the tip
export function drawTopology(attention, experts) {
  const left = chosen(attention), right = chosen(experts);
  const names = [left, right].map(side => side.map(node => node.name));
  last = [attention, experts];
  measure();
  const now = JSON.stringify([WIDE, names]);
  if (now !== shape) { shape = now; frame(...names); }
  for (const node of [...left, ...right]) {
    const one = nodes.get(node.name);
    one.group.classList.toggle("away", node.away);
    const narrow = WIDE < NARROW;
    one.right.textContent = narrow ? "" : node.rate;
    one.under.textContent = node.away ? node.state : narrow ? [node.phase, node.rate].filter(Boolean).join(", ") : node.detail;
    one.use.setAttribute("width", (BOX - 24) * Math.min(1, node.use));
    one.text = `${node.name}, ${node.state}\n${node.rate}\n${node.detail}${node.more ?? ""}\n${mib(node.bytes)} resident`;
    one.group.setAttribute("aria-label", one.text.replaceAll("\n", ", "));
  }
  const tokens = left.reduce((sum, node) => sum + node.load, 0);
  const flows = left.flatMap(a => right.map(e => [a.name + " " + e.name, tokens ? e.load * a.load / tokens : 0]));
  const top = Math.max(1, ...flows.map(([, rows]) => rows));
  for (const [pair, rows] of flows) {
    const wire = wires.get(pair), share = Math.sqrt(rows / top);
    wire.setAttribute("stroke-width", rows ? 1 + 9 * share : 1);
    wire.setAttribute("stroke-opacity", rows ? 0.25 + 0.5 * share : 0.12);
  }
}


export function watchTopology() {
  new ResizeObserver(() => last && drawTopology(...last)).observe($("flow"));
}

// Rows by MoE layer and expert of the last ten seconds; who holds an expert, on pointing at it.

import { $, clock, color, element, nodeColor, short } from "./page.js";

const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // viridis
const LEFT = 34, UNDER = 18, KEPT = 10;
const past = [];
let rows = [], holders = null, at = null, elapsed = 0, idle = true, seen = 0;

function shade(share) {
  const place = Math.min(0.9999, Math.max(0, share)) * (STOPS.length - 1), i = Math.floor(place), part = place - i;
  return "rgb(" + STOPS[i].map((from, c) => Math.round(from + part * (STOPS[i + 1][c] - from))).join(" ") + ")";
}

export function placed(value) { holders = value.holders; }

export function drawHeat(routed, now) {
  past.push({ now, routed });
  while (past.length > KEPT + 1) past.shift();
  const first = past[0];
  const grown = routed.map((layer, l) => layer.map((n, e) => Math.max(0, n - (first.routed[l]?.[e] ?? n))));
  idle = !grown.some(layer => layer.some(Boolean));
  if (idle && rows.length === grown.length && seen) { paint(); return; }  // the last rows stay, with their time
  [rows, elapsed, seen] = [grown, now - first.now, idle ? 0 : now];
  $("heat-card").hidden = !seen;
  paint();
}

function paint() {
  const canvas = $("heat");
  if (!rows.length || !rows[0].length) return;
  const layers = rows.length, experts = rows[0].length, sharp = devicePixelRatio || 1;
  const wide = Math.max(canvas.parentElement.clientWidth, LEFT + 3 * experts), cell = (wide - LEFT) / experts;
  const tall = Math.max(5, Math.min(26, 420 / layers));
  canvas.style.width = wide + "px"; canvas.style.height = layers * tall + UNDER + "px";
  canvas.width = wide * sharp; canvas.height = (layers * tall + UNDER) * sharp;
  const pen = canvas.getContext("2d"), top = Math.max(1, ...rows.map(layer => Math.max(...layer)));
  pen.scale(sharp, sharp);
  rows.forEach((layer, l) => layer.forEach((n, e) => {
    pen.fillStyle = n ? shade(n / top) : color("--idle");
    pen.fillRect(LEFT + e * cell, l * tall, Math.max(1, cell - (cell > 6 ? 1 : 0)), tall - (tall > 6 ? 1 : 0));
    if (holders?.[l]?.[e]?.length > 1 && cell > 9 && tall > 9) {  // replicas
      pen.fillStyle = n / top > 0.6 ? "#0008" : "#fffc";
      pen.fillRect(LEFT + e * cell + 2, l * tall + 2, 3, 3);
    }
  }));
  pen.fillStyle = color("--dim"); pen.font = "11px system-ui"; pen.textAlign = "right";
  for (let l = 0; l < layers; l += Math.ceil(14 / tall)) pen.fillText("L" + l, LEFT - 6, l * tall + tall / 2 + 4);
  pen.textAlign = "center";
  for (let e = 0; e < experts; e += Math.ceil(28 / cell)) pen.fillText(e, LEFT + (e + .5) * cell, layers * tall + 13);
  if (at) {
    pen.strokeStyle = color("--ink"); pen.lineWidth = 1.5;
    pen.strokeRect(LEFT + at.e * cell, at.l * tall, Math.max(2, cell - 1), Math.max(2, tall - 1));
    say();
  }
  legend(top);
}

function legend(top) {
  const box = $("scale");
  if (!box.firstChild) {
    element(box, "span");
    const bar = element(box, "canvas"), pen = bar.getContext("2d");
    bar.width = 120; bar.height = 1;
    bar.setAttribute("aria-hidden", "true");
    for (let x = 0; x < 120; x++) { pen.fillStyle = shade(x / 119); pen.fillRect(x, 0, 1, 1); }
    element(box, "span"); element(box, "span");
  }
  const [low, , high, skew] = box.children, sums = rows.map(layer => layer.reduce((a, b) => a + b, 0));
  const worst = rows.map((layer, l) => sums[l] ? Math.max(...layer) * layer.length / sums[l] : 0);
  low.textContent = "0"; high.textContent = short(top / Math.max(elapsed, 1)) + " rows/s";
  const layer = worst.indexOf(Math.max(...worst));
  skew.textContent = idle && seen ? `of ${clock(seen)}: no rows in the last ten seconds` : sums.some(Boolean) ? `busiest expert ${worst[layer].toFixed(1)} times the mean of its layer (layer ${layer}); ` +
    "a dot marks one with replicas" : "no rows in the last ten seconds";
}

function say() {
  const box = $("cell"), { l, e } = at, n = rows[l]?.[e];
  if (n === undefined) return;
  const sum = rows[l].reduce((a, b) => a + b, 0), on = holders?.[l]?.[e] ?? [];
  box.textContent = `layer ${l}, expert ${e}: ${short(n / Math.max(elapsed, 1))} rows/s, ` +
    `${sum ? (100 * n / sum).toFixed(1) : 0} % of its layer; ${on.length} ${on.length === 1 ? "copy" : "copies"}`;
  for (const node of on) {
    const chip = element(box, "span", undefined, "chip");
    element(chip, "i").style.background = nodeColor(node);
    chip.append("expert-" + node);
  }
}

export function watchHeat() {
  const canvas = $("heat");
  const where = event => {
    const place = canvas.getBoundingClientRect(), layers = rows.length, experts = rows[0]?.length ?? 0;
    const e = Math.floor((event.clientX - place.left - LEFT) / (place.width - LEFT) * experts);
    const l = Math.floor((event.clientY - place.top) / (place.height - UNDER) * layers);
    return e >= 0 && e < experts && l >= 0 && l < layers ? { l, e } : null;
  };
  canvas.addEventListener("mousemove", event => { const found = where(event); if (found) { at = found; paint(); } });
  canvas.addEventListener("keydown", event => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !rows.length) return;
    event.preventDefault();
    const { l, e } = at ?? { l: 0, e: 0 };
    at = { l: Math.max(0, Math.min(rows.length - 1, l + step[0])), e: Math.max(0, Math.min(rows[0].length - 1, e + step[1])) };
    paint();
  });
  new ResizeObserver(paint).observe(canvas.parentElement);
}

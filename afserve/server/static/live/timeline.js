// The micro-batches of the last steps: a lane for each, and one for each expert node, over the same few milliseconds.

import { $, clock, color, element, percent } from "./page.js";

const TALL = 18, THIN = 4, GAP = 9, AXIS = 24, NARROW = 560, ARROW = { ArrowLeft: -1, ArrowRight: 1 };
let said = null, coming = null, lanes = [], at = null, steps = 2, held = false, over = false, shown = null, hint = "";

// A picture of `micros` us: {at, micros, steps, nodes: [{name, role, busy, waiting, waits, last, lanes: [{name, spans}]}],
// trips: [{node, lane, layer, start, end, nodes, by: [[node, start, end]]}]}; a span is [start, end, kind, layer, rows].
export function drawTimeline(value) {
  if (!value.micros) return;
  if ((held || over) && said) { coming = value; return; }
  use(value);
}

function use(value) {
  said = value; coming = null; at = null; lanes = [];
  $("lanes-card").hidden = false;
  $("lanes").dataset.steps = value.steps.length;
  for (const node of value.nodes) node.lanes.forEach((lane, i) => {
    const trips = value.trips.filter(trip => trip.node === node.name && trip.lane === lane.name);
    const away = trips.map(trip => ({ start: trip.start, end: trip.end, kind: "away", trip }));
    const spans = lane.spans.map(([start, end, kind, layer, rows]) => ({ start, end, kind, layer, rows }));
    const all = [...spans, ...away].sort((a, b) => a.start - b.start);
    lanes.push({ node, first: i === 0, name: lane.name, spans: all });
  });
  paint();
  summary();
}

function range() {
  const ends = said.steps, to = ends.at(-1) ?? said.micros;
  if (ends.length <= steps) return [0, said.micros];
  return [ends[ends.length - 1 - steps], to];
}

const ms = micros => (micros / 1000).toFixed(micros < 9950 ? 2 : 1) + " ms";
const brief = name => name.replace("attention-", "a").replace("expert-", "e");

function measure() {
  const wide = $("lanes").parentElement.clientWidth, narrow = wide < NARROW;
  const [from, to] = range(), runs = span => span.end > from && span.start < to;
  const seen = lanes.filter(lane => lane.first || lane.spans.some(runs));  // others would be empty
  let y = 4;
  for (const lane of seen) { if (lane.first && y > 4) y += GAP; lane.y = y; y += TALL + 2; }
  return { wide, narrow, from, to, seen, left: narrow ? 62 : 176, high: y + AXIS };
}

function paint() {
  if (!said) return;
  const canvas = $("lanes"), { wide, narrow, from, to, seen, left, high } = measure(), sharp = devicePixelRatio || 1;
  if (!wide) return;
  const scale = (wide - left - 2) / Math.max(1, to - from), x = t => left + (t - from) * scale;
  shown = { from, to, left, scale, seen };
  canvas.style.width = wide + "px"; canvas.style.height = high + "px";
  canvas.width = wide * sharp; canvas.height = high * sharp;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.font = "11px system-ui";
  axis(pen, { from, to, x, left, wide, high });
  pen.save();
  pen.beginPath(); pen.rect(left, 0, wide - left, high); pen.clip();
  for (const lane of seen) if (lane.first) bubbles(pen, lane, seen, x);
  for (const lane of seen) row(pen, lane, x, from, to);
  if (at) chosen(pen, x);
  pen.restore();
  for (const lane of seen) label(pen, lane, narrow, left);
}

function axis(pen, { from, to, x, left, wide, high }) {
  const span = to - from, raw = span / Math.max(2, (wide - left) / 110), ten = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map(n => n * ten).find(n => n >= raw);
  pen.strokeStyle = color("--grid"); pen.fillStyle = color("--dim"); pen.lineWidth = 1; pen.textAlign = "center";
  for (let t = 0; t <= span; t += tick) {
    pen.beginPath(); pen.moveTo(x(from + t), 0); pen.lineTo(x(from + t), high - AXIS + 4); pen.stroke();
    if (x(from + t) < wide - 16) pen.fillText((t / 1000).toFixed(tick < 1000 ? 1 : 0) + (t ? "" : " ms"), x(from + t), high - 6);
  }
  pen.strokeStyle = color("--dim"); pen.setLineDash([3, 3]);
  for (const end of said.steps) if (end > from && end < to) {
    pen.beginPath(); pen.moveTo(x(end), 0); pen.lineTo(x(end), high - AXIS + 4); pen.stroke();
  }
  pen.setLineDash([]);
}

// Where the whole node had nothing to compute, behind all its lanes.
function bubbles(pen, lane, seen, x) {
  const high = seen.filter(one => one.node === lane.node).length * (TALL + 2);
  pen.fillStyle = color("--bubble");
  for (const [start, end] of lane.node.waits) pen.fillRect(x(start), lane.y - 2, Math.max(0.5, x(end) - x(start)), high + 2);
}

// Of a lane's height: rows that are away run below what is computed meanwhile.
const part = ({ kind }) => kind === "away" ? [TALL - THIN, THIN] : kind === "experts" ? [0, TALL] : [0, TALL - THIN - 1];

function row(pen, lane, x, from, to) {
  const inks = { attend: color("--attention"), own: color("--own"), experts: color("--expert"), away: color("--expert") };
  for (const kind of ["away", "attend", "own", "experts"]) {
    pen.fillStyle = inks[kind];
    for (const span of lane.spans) {
      if (span.kind !== kind || span.end < from || span.start > to) continue;
      const wide = x(span.end) - x(span.start), [under, high] = part(span);
      pen.fillRect(x(span.start), lane.y + under, Math.max(1.2, wide - (wide > 3 ? 0.6 : 0)), high);
      if (kind === "experts" && wide > 22) {
        pen.fillStyle = color("--card"); pen.textAlign = "center";
        pen.fillText("L" + span.layer, x(span.start) + wide / 2, lane.y + TALL - 5);
        pen.fillStyle = inks[kind];
      }
    }
  }
}

function label(pen, lane, narrow, left) {
  const { node } = lane, attention = node.role === "attention";
  if (!lane.first) {
    pen.textAlign = "right"; pen.fillStyle = color("--dim"); pen.font = "11px system-ui";
    pen.fillText(narrow ? "" : lane.name, left - 8, lane.y + TALL - 5);
    return;
  }
  pen.textAlign = "left"; pen.fillStyle = color("--ink"); pen.font = "600 12px system-ui";
  pen.fillText(narrow ? brief(node.name) : node.name, 0, lane.y + TALL - 5);
  pen.textAlign = "right"; pen.fillStyle = color("--dim"); pen.font = "11px system-ui";
  const share = percent(attention ? node.waiting : node.busy);
  pen.fillText(narrow ? share : (attention ? "waits " : "busy ") + share, left - 8, lane.y + TALL - 5);
}

// The chosen span, and where its rows went.
function chosen(pen, x) {
  const { lane, span } = at, links = span.trip ? [span.trip] : span.kind === "experts" ? tripsOf(lane, span) : [];
  pen.strokeStyle = color("--ink"); pen.lineWidth = 1.6;
  for (const trip of links) {
    const home = shown.seen.find(one => one.node.name === trip.node && one.name === trip.lane);
    for (const [name, start, end] of trip.by) {
      const there = shown.seen.find(one => one.node.name === name);
      if (!home || !there || (span.kind === "experts" && there !== lane)) continue;
      curve(pen, x(trip.start), home.y + TALL - THIN / 2, x(start), there.y);
      curve(pen, x(end), there.y, x(trip.end), home.y + TALL - THIN / 2);
      pen.strokeRect(x(start), there.y, Math.max(2, x(end) - x(start)), TALL);
    }
  }
  const [under, high] = part(span);
  pen.strokeRect(x(span.start), lane.y + under, Math.max(2, x(span.end) - x(span.start)), high);
}

function curve(pen, fromX, fromY, toX, toY) {
  const middle = (fromY + toY) / 2;
  pen.beginPath(); pen.moveTo(fromX, fromY); pen.bezierCurveTo(fromX, middle, toX, middle, toX, toY); pen.stroke();
}

const tripsOf = (lane, span) =>
  said.trips.filter(trip => trip.by.some(([name, start]) => name === lane.node.name && start === span.start));

function summary() {
  const parts = said.nodes.filter(node => node.role === "attention").map(node =>
    `${node.name} waited ${percent(node.waiting)} of the time` +
    (node.last ? `, most often for ${node.last[0]} (last in ${percent(node.last[1])} of its exchanges)` : ""));
  $("moment").textContent = `${ms(said.micros)} before ${clock(said.at)}. ${parts.join("; ")}.`;
}

function describe() {
  const { lane, span } = at, long = ms(span.end - span.start), who = `${lane.node.name}, ${lane.name}`;
  if (span.kind === "attend") return `${who}: computes for ${long}`;
  if (span.kind === "own") return `${who}: schedules or samples for ${long}`;
  if (span.kind === "experts") {
    const from = tripsOf(lane, span).map(trip => `${trip.node} ${trip.lane}`);
    return `${lane.node.name}: layer ${span.layer}, ${span.rows} rows for ${long}` + (from.length ? `, of ${from.join(" and ")}` : "");
  }
  const { trip } = span, by = [...trip.by].sort((a, b) => b[2] - a[2]);
  const parts = by.map(([name, start, end]) => `${name} began after ${ms(start - trip.start)} and computed ${ms(end - start)}`);
  const late = by.length > 1 ? `; ${by[0][0]} was last` : "";
  return `${who}: layer ${trip.layer} away for ${long}, at ${trip.nodes} expert node${trip.nodes === 1 ? "" : "s"}: ${parts.join(", ")}${late}`;
}

function choose(found) {
  at = found;
  $("span").textContent = found ? describe() : hint;
  paint();
}

function hold(on) {
  held = on;
  $("hold").setAttribute("aria-pressed", on);
  if (!on && !over && coming) use(coming);
}

function zoom(more) {
  steps = Math.max(1, Math.min(said?.steps.length || 6, steps + more));
  $("steps").textContent = steps === 1 ? "1 step" : steps + " steps";
  if (at && !(at.span.end > range()[0] && at.span.start < range()[1])) choose(null);
  paint();
}

// The nearest span that is visible, in this lane: the smallest of those that lie over each other.
function nearest(lane, t) {
  const [from, to] = range(), spans = lane.spans.filter(span => span.end > from && span.start < to);
  const apart = span => Math.max(0, span.start - t, t - span.end);
  return spans.sort((a, b) => apart(a) - apart(b) || (a.end - a.start) - (b.end - b.start))[0];
}

function walk(key) {
  if (!at) {
    const lane = shown.seen.find(one => one.spans.length), span = lane && nearest(lane, range()[0]);
    return span ? { lane, span } : null;
  }
  const { lane, span } = at;
  if (key in ARROW) {
    const next = lane.spans[lane.spans.indexOf(span) + ARROW[key]], [from, to] = range();
    return next && next.end > from && next.start < to ? { lane, span: next } : at;
  }
  const way = key === "ArrowDown" ? 1 : -1;
  for (let i = shown.seen.indexOf(lane) + way; shown.seen[i]; i += way) {
    const found = nearest(shown.seen[i], (span.start + span.end) / 2);
    if (found) return { lane: shown.seen[i], span: found };
  }
  return at;
}

function where(event) {
  if (!shown) return null;
  const place = $("lanes").getBoundingClientRect(), y = event.clientY - place.top;
  const lane = shown.seen.find(one => y >= one.y && y < one.y + TALL + 2), t = shown.from + (event.clientX - place.left - shown.left) / shown.scale;
  const span = lane && t >= shown.from && nearest(lane, t);
  return span ? { lane, span } : null;
}

export function watchTimeline() {
  const canvas = $("lanes");
  hint = $("span").textContent;
  if (innerWidth < NARROW) steps = 1;  // the canvas is shown with its first picture
  zoom(0);
  canvas.addEventListener("mousemove", event => { over = true; const found = where(event); if (found) choose(found); });
  canvas.addEventListener("mouseleave", () => { over = false; if (!held) { choose(null); hold(false); } });
  canvas.addEventListener("click", () => hold(!held));
  canvas.addEventListener("keydown", event => {
    if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? -1 : 1);
    else if (event.key === "Escape") { choose(null); hold(false); }
    else if (event.key.startsWith("Arrow") && shown) { hold(true); choose(walk(event.key)); }
    else return;
    event.preventDefault();
  });
  $("fewer").onclick = () => zoom(-1);
  $("more").onclick = () => zoom(1);
  $("hold").onclick = () => hold(!held);
  new ResizeObserver(paint).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  const key = $("key-lanes");
  for (const [kind, text] of [["attend", "attention computes"], ["own", "schedules, samples"], ["away", "its rows are with the experts"],
                              ["wait", "the node only waits: the bubble"], ["experts", "an expert node computes"]]) {
    element(element(key, "span"), "i", undefined, kind).parentElement.append(text);
  }
}

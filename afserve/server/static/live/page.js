// What all parts of the page use: elements, numbers in words, differences of counters.

export const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

export function element(parent, tag, text, style) {
  const made = parent.appendChild(document.createElement(tag));
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  return made;
}

export function drawn(parent, tag, attributes, text) {
  const made = parent.appendChild(document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// What a table says, row by row; the first of each is its name.
export function fillRows(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  while (body.rows.length < rows.length) element(body.insertRow(), "th").scope = "row";
  rows.forEach((said, i) => {
    const row = body.rows[i];
    while (row.cells.length < said.length) row.insertCell();
    said.forEach((text, j) => { row.cells[j].textContent = text; });
  });
}

export function short(n) {
  if (n >= 1e6) return (n / 1e6).toFixed(1) + "M";
  if (n >= 1e4) return (n / 1e3).toFixed(0) + "k";
  return n >= 100 || n === 0 ? n.toFixed(0) : n.toFixed(n >= 10 ? 0 : 1);
}

// As many digits as tell two shares apart that differ by `step`.
export function percent(share, step) {
  const digits = step ? Math.max(0, Math.ceil(-Math.log10(100 * step) - 1e-9)) : share && share < 0.1 ? 1 : 0;
  return (100 * share).toFixed(Math.min(6, digits)) + " %";
}
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
// The one clock of the page: this machine's time of day, 24 hours. `at` in Unix seconds.
export const clock = at => new Date(1000 * at).toLocaleTimeString("en-GB", { hour12: false });
export const mib = bytes => Math.round(bytes / 1048576).toLocaleString("en") + " MiB";
export const size = bytes => bytes >= 1e9 ? (bytes / 1e9).toFixed(2) + " GB" : (bytes / 1e6).toFixed(1) + " MB";
export const age = seconds => seconds < 120 ? Math.round(seconds) + " s" : seconds < 7200 ? Math.round(seconds / 60) + " min"
  : (seconds / 3600).toFixed(1) + " h";
export const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function seconds(value) {
  if (value === null || value === undefined) return "none yet";
  if (value === 0) return "0";
  return value < 1 ? (1000 * value).toFixed(value < 0.01 ? 1 : 0) + " ms" : value.toFixed(2) + " s";
}

// Per second, of counters that a node started anew begins again at zero.
export const rate = (now, before, elapsed) =>
  before === undefined || now < before || elapsed <= 0 ? 0 : (now - before) / elapsed;

// Colours of expert nodes, those of Okabe and Ito: told apart by colour-blind readers.
const NODES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
export const nodeColor = index => NODES[index % NODES.length];

export function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const place = event.target.getBoundingClientRect();
  const x = event.clientX || place.right, y = event.clientY || place.top;
  box.style.left = Math.min(x + 14, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = Math.max(8, y - box.offsetHeight - 10) + "px";
}

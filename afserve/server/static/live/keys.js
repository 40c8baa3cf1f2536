// What each key asked, and how much of it was found in caches: those of the gateway that answers this page.

import { shareChart } from "./charts.js";
import { $, color, fillRows, percent } from "./page.js";

const LINES = ["--attention", "--expert", "--good", "--bad", "--own", "--dim"];
const OTHERS = "other keys";
const MOST = 24;  // keys of which a gateway shows the counts: a further one takes the place of another

const chart = shareChart("shares", "Prompt tokens found, by key");

// Those who asked the most first, the others together last.
const sorted = all => Object.entries(all).sort(([one, [a]], [other, [b]]) => (one === OTHERS) - (other === OTHERS) || b - a);

function use(names) {
  if (names.length === chart.names.length && names.every(name => chart.names.includes(name))) return;
  // Few ask without a pause: their points are joined.
  chart.use(names.map((label, i) => ({ label, stroke: () => color(LINES[i]), spanGaps: true, points: { show: true, size: 4 } })));
}

let remembered = null, before = {};
const left = new Map();  // what the keys had that are not shown now

// The ten minutes before the page was opened: drawn with the first status, which says who asked the most.
export function rememberKeys(past) { remembered = past; }

// `then`: the status of `elapsed` seconds before `at`.
export function drawKeys({ key_hits }, then, elapsed, at) {
  const all = sorted(key_hits);
  $("key-card").hidden = !all.length;
  if (!all.length) return;
  for (const [name, counts] of Object.entries(before)) if (!Object.hasOwn(key_hits, name)) left.set(name, counts);
  // Once places are taken, one that this page has not seen may have been shown before: only what it asks from now on counts.
  if (Object.keys(before).length >= MOST)
    for (const [name, counts] of all) if (!Object.hasOwn(before, name) && !left.has(name)) left.set(name, counts);
  before = key_hits;
  const had = name => then && Object.hasOwn(then.key_hits, name) ? then.key_hits[name] : left.get(name) ?? [0, 0];
  const lately = Object.fromEntries(all.map(([name, counts]) => [name, since(counts, had(name))]));
  fillRows($("by-key").tBodies[0], all.map(([name, [asked, found, ...below]]) =>
    [name, asked.toLocaleString("en"), found.toLocaleString("en"), percent(found / asked), said(lately[name]), ...where(found, below)]));
  use(all.slice(0, LINES.length).map(([name]) => name));
  if (remembered) chart.before([...remembered.at], remembered.keys);
  remembered = null;
  if (elapsed) chart.add(at, chart.names.map(name => lately[name]));
}

// The share found since then; null where nothing was asked, also where a key's counts began anew.
function since([asked, found], [askedThen, foundThen]) {
  return asked > askedThen ? Math.max(0, found - foundThen) / (asked - askedThen) : null;
}

// Of what was found: the share that lay in the cache, and those that came from below it.
function where(found, below) {
  const here = found - below.reduce((sum, tokens) => sum + tokens, 0);
  return [here, ...below].map(tokens => tokens ? percent(tokens / found) : "");
}

const said = share => share === null ? "" : percent(share);

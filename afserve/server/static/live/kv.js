// Where the KV of prompts was found, tier by tier, and what moved between nodes.

import { linesChart } from "./charts.js";
import { $, fillRows, rate, seconds, short, size } from "./page.js";

const TIERS = [
  ["memory", "cache", all => blocks(all, stats => stats.kv_blocks_used, stats => stats.kv_blocks)],
  ["peer", "other nodes", all => moved(all, stats => stats.kv.bytes_received, stats => stats.kv.bytes_sent)],
  ["host", "host memory", all => tier(all, stats => stats.tiers.host)],
  ["disk", "disk", all => tier(all, stats => stats.tiers)],
];

const chart = linesChart("hits", "Prompt tokens found per second", TIERS.map(([, name]) => name));

const sum = (all, read) => all.reduce((total, stats) => total + read(stats), 0);
const blocks = (all, used, most) => [`${short(sum(all, used))} of ${short(sum(all, most))}`, "", ""];
const moved = (all, read, written) => ["", size(sum(all, read)), size(sum(all, written))];

// Nothing where no node has such a tier.
function tier(all, of) {
  if (!sum(all, stats => of(stats).capacity)) return null;
  const [held] = blocks(all, stats => of(stats).blocks, stats => of(stats).capacity);
  const [, read, written] = moved(all, stats => of(stats).bytes_read, stats => of(stats).bytes_written);
  return [held, read, written];
}

const attention = status => status?.nodes.filter(node => node.role === "attention" && node.stats).map(node => node.stats) ?? [];

// The ten minutes before the page was opened.
export function rememberKv(past) {
  chart.before([...past.at], Object.fromEntries(TIERS.map(([key, name]) => [name, past.rates[key]])));
}

// `then`: the status of `elapsed` seconds before `at`.
export function drawKv(status, then, elapsed, at) {
  const all = attention(status), past = attention(then);
  const some = sum(all, s => s.kv.bytes_received + s.kv.handed + s.kv.leased + s.tiers.capacity + s.tiers.host.capacity);
  $("found-card").hidden = !some && !Object.values(status.kv_hits).some(Boolean);
  const rows = TIERS.map(([key, name, figures]) => [key, name, figures(all)]).filter(([, , figures]) => figures);
  fillRows($("found").tBodies[0], rows.map(([key, name, figures]) => {
    const tokens = status.kv_hits[key] ?? 0;
    return [name, tokens.toLocaleString("en"), short(rate(tokens, then?.kv_hits[key], elapsed)), ...figures];
  }));
  if (elapsed) chart.add(at, TIERS.map(([key]) => rate(status.kv_hits[key] ?? 0, then.kv_hits[key] ?? 0, elapsed)));
  $("handed").textContent = handed(all, past);
  $("leased").textContent = leased(all);
  $("kept").textContent = kept(all, past, elapsed);
}

function handed(all, past) {
  const [count, short_, straight] = ["handed", "handed_short", "straight"].map(name => sum(all, s => s.kv[name]));
  if (!count && !straight) return "";
  const mean = (stats, before) => {
    const n = sum(stats, s => s.kv.handed) - sum(before, s => s.kv.handed);
    return n > 0 ? seconds((sum(stats, s => s.kv.hand_seconds) - sum(before, s => s.kv.hand_seconds)) / n) : "none";
  };
  return `Prompts handed over: ${count.toLocaleString("en")} (${short_.toLocaleString("en")} in part), from the request to the last ` +
    `block ${mean(all, past)} in the last ten seconds, ${mean(all, [])} since the start; ` +
    `${straight.toLocaleString("en")} computed where they are decoded, as that was sooner.`;
}

// What stays because somebody asked, what made room for it, and what was computed before anybody asked.
function kept(all, past, elapsed) {
  const count = (read, words) => `${sum(all, read).toLocaleString("en")} ${words}`;
  const made = s => s.kv.evicted + s.kv.evicted_copies + s.kv.evicted_retained;
  return `Kept because somebody asked: ${count(s => s.kv.retained, "blocks")}. Made room in the cache: ` +
    `${count(s => s.kv.evicted, "ordinary")}, ${count(s => s.kv.evicted_copies, "copies")}, ` +
    `${count(s => s.kv.evicted_retained, "kept")}, ${short(rate(sum(all, made), past.length ? sum(past, made) : undefined, elapsed))} a second. ` +
    `Computed ahead: ${count(s => s.ahead_tokens, "tokens")}.`;
}

function leased(all) {
  const held = sum(all, s => s.kv.leased), lapsed = sum(all, s => s.kv.lapsed);
  const oldest = Math.max(0, ...all.map(s => s.kv.oldest_lease));
  return `Leases: ${held.toLocaleString("en")} blocks are held for other nodes` + (held ? `, the first for ${seconds(oldest)}` : "") +
    `; ${lapsed.toLocaleString("en")} were not renewed.`;
}

// From frames to drawings: what changed between two of them, and since ten seconds.

import { $, color, count, percent, rate, seconds, short } from "./page.js";
import { follow, useKey } from "./feed.js";
import { drawTopology, watchTopology } from "./topology.js";
import { latencyChart, rateChart, shareChart } from "./charts.js";
import { drawHeat, placed, watchHeat } from "./heat.js";
import { drawEvents, drawFigures, drawPhases, drawRunning, drawSettings, drawTime } from "./parts.js";
import { drawKv, rememberKv } from "./kv.js";
import { drawKeys, rememberKeys } from "./keys.js";
import { drawTimeline, watchTimeline } from "./timeline.js";
import { offer, startChat } from "./chat.js";

const WINDOW = 10, REMEMBERED = 600, LINES = ["--attention", "--expert", "--good", "--bad", "--wait", "--dim"];
const frames = [];
const charts = { rate: rateChart(), first: latencyChart("first", "Time to first token"),
                 inter: latencyChart("inter", "Time between tokens"), kv: shareChart("kv", "KV cache in use") };
let flowed = 0;  // when tokens last flowed, Unix seconds

const statsOf = frame => Object.fromEntries(frame?.status.nodes.map(node => [node.name, node.stats]) ?? []);

function attentionNode(node, then, elapsed) {
  const now = node.stats, use = now.kv_blocks ? now.kv_blocks_used / now.kv_blocks : 0;
  const tokens = rate(now.generated_tokens, then?.generated_tokens, elapsed);
  const prompts = rate(now.prompt_tokens, then?.prompt_tokens, elapsed);
  const phase = ["prefill", "decode"].includes(node.phase) ? node.phase : "";  // the others do both
  const drafts = now.drafts.verified - (then?.drafts.verified ?? 0), right = now.drafts.accepted - (then?.drafts.accepted ?? 0);
  const more = drafts > 0 ? `\n${(1 + right / drafts).toFixed(1)} tokens a drafted step` : "";
  const requests = phase ? `${phase}, ${now.running + now.waiting} requests` : `${now.running} running, ${now.waiting} waiting`;
  return { ...about(node), rate: short(phase === "prefill" ? prompts : tokens) + " tok/s", tokens, prompts,
           load: tokens + prompts, use, more, detail: `${requests}, KV ${percent(use)}` };
}

function expertNode(node, then, elapsed) {
  const now = node.stats, busy = rate(now.busy_seconds, then?.busy_seconds, elapsed);
  const rows = rate(now.rows, then?.rows, elapsed), calls = rate(now.calls, then?.calls, elapsed);
  return { ...about(node), rate: short(rows) + " rows/s", load: rows, use: busy,
           detail: `busy ${percent(Math.min(1, busy))}, ${calls ? short(rows / calls) : 0} rows a call` };
}

const about = node => ({ name: node.name, phase: ["prefill", "decode"].includes(node.phase) ? node.phase : "", state: node.state, away: node.state !== "ready", bytes: node.resident_bytes });

function timeShares(status, old, elapsed) {
  return status.nodes.filter(node => node.stats).map(node => {
    const now = node.stats, then = old[node.name], attention = node.role === "attention";
    const work = Math.min(1, rate(now.busy_seconds, then?.busy_seconds, elapsed));
    const parked = attention ? rate(now.parked_seconds, then?.parked_seconds, elapsed)
                             : rate(now.hold_seconds, then?.hold_seconds, elapsed);
    return { name: node.name, role: node.role, work, bubble: Math.max(0, Math.min(1 - work, parked)) };
  });
}

function missing(status, role) {
  const lost = status.absent.map(text => text.split(" ")[0]).filter(name => name.startsWith(role + "-"));
  return lost.map(name => ({ name, state: "gone", away: true, bytes: 0, rate: "", tokens: 0, prompts: 0, load: 0, use: 0,
                             detail: "" }));
}

function show(frame) {
  const before = frames.at(-1), status = frame.status;
  frames.push(frame);
  while (frames.length > WINDOW + 1) frames.shift();
  const elapsed = before ? frame.at - before.at : 0, old = statsOf(before);
  const of = (role, read) => status.nodes.filter(node => node.role === role && node.stats)
    .map(node => read(node, old[node.name], elapsed));
  const attention = of("attention", attentionNode), experts = of("expert", expertNode);
  drawTopology([...attention, ...missing(status, "attention")], [...experts, ...missing(status, "expert")]);
  const sum = name => attention.reduce((total, node) => total + node[name], 0);
  const first = frames[0];
  drawTime(timeShares(status, statsOf(first), frame.at - first.at));
  drawHeat(status.routed, frame.at);
  drawEvents(status, frame.at);
  drawPhases(status, first.status, frame.at - first.at);
  drawKv(status, first.status, frame.at - first.at, frame.at);
  drawKeys(status, first.status, frame.at - first.at, frame.at);
  drawRunning(frame);
  drawSettings(status);
  quiet(frame, sum);
  drawCharts(frame, attention, sum);
  drawHead(frame, attention, sum);
}

// Without traffic in the last ten minutes there is nothing to chart: what would be empty is not shown.
function quiet(frame, sum) {
  const busy = sum("tokens") + sum("prompts") > 0 || frame.running.length > 0;
  if (busy) flowed = frame.at;
  document.body.classList.toggle("quiet", frame.at - flowed > REMEMBERED);
  $("quiet").hidden = frame.at - flowed <= REMEMBERED;
}

const quantiles = all => Object.fromEntries(["p50", "p90", "p99"].map(name => [name, all.map(one => one?.[name] ?? null)]));

// The ten minutes before the page was opened.
function remember(past) {
  charts.rate.before([...past.at], past.rates);
  charts.first.before([...past.at], quantiles(past.first_token));
  charts.inter.before([...past.at], quantiles(past.inter_token));
  useNodes(Object.keys(past.kv));
  charts.kv.before([...past.at], past.kv);
  rememberKv(past);
  rememberKeys(past);
  past.at.forEach((at, i) => { if (past.rates.generated[i] + past.rates.prompt[i]) flowed = at; });
}

function useNodes(names) {
  if (JSON.stringify(names) !== JSON.stringify(charts.kv.names))
    charts.kv.use(names.map((label, i) => ({ label, stroke: () => color(LINES[i % LINES.length]) })));
}

function drawCharts(frame, attention, sum) {
  charts.rate.add(frame.at, [sum("tokens"), sum("prompts")]);
  for (const [chart, name] of [[charts.first, "first_token"], [charts.inter, "inter_token"]]) {
    const said = frame.latency[name];
    chart.add(frame.at, [said?.p50, said?.p90, said?.p99]);
  }
  useNodes(attention.map(node => node.name));
  charts.kv.add(frame.at, attention.map(node => node.use));
}

function drawHead(frame, attention, sum) {
  const { status, last } = frame, nodes = status.nodes.filter(node => node.role === "attention");
  const total = name => nodes.reduce((all, node) => all + (node.stats?.[name] ?? 0), 0);
  $("model").textContent = document.title = status.model.id;
  offerModels(status);
  state(status.refusing ? "refusing" : status.ready ? "ready" : "not ready", status.ready && !status.refusing);
  const experts = status.nodes.filter(n => n.role === "expert").length;
  $("about").textContent = `${attention.length} attention, ${count(experts, "expert node")}, afserve ${status.version}`;
  $("epoch").textContent = `placement epoch ${status.epoch}`;
  const then = frames[0], elapsed = frame.at - then.at;
  const failed = kind => rate(frame.responses[kind] ?? 0, then.responses[kind] ?? 0, elapsed);
  drawFigures([
    ["Tokens per second", short(sum("tokens"))], ["Prompt tokens per second", short(sum("prompts"))],
    ["Running", total("running")], ["Waiting", total("waiting") + status.waiting],
    ["KV in use", percent(total("kv_blocks") ? total("kv_blocks_used") / total("kv_blocks") : 0)],
    ["Prompts from cache", share(total("prefix_hits"), total("prefix_queries"))],
    ["First token, p50", seconds(last.first_token?.p50)], ["Between tokens, p50", seconds(last.inter_token?.p50)],
    ["Refused, failed a second", `${short(failed("4"))}, ${short(failed("5"))}`],
  ]);
  offer(status.model.id);
}

const share = (part, whole) => whole ? percent(part / whole) : "none yet";

// Of a server with several models the title is a choice.
function offerModels({ model, models }) {
  const several = models.length > 1, box = $("models");
  $("model").hidden = several;
  box.hidden = !several;
  if (box.options.length !== models.length) box.replaceChildren(...models.map(name => new Option(name)));
  if (document.activeElement !== box) box.value = model.id;
}

$("models").onchange = () => { location.search = "?model=" + encodeURIComponent($("models").value); };

function state(text, good) {
  $("state").textContent = text;
  $("state").className = "pill " + (good ? "good" : text === "connecting" ? "wait" : "bad");
}

function told(text) {
  $("keys").hidden = text !== "needs a key";
  if (text !== "open") state(text, false);
}

$("keys").onsubmit = event => { event.preventDefault(); useKey($("key").value.trim()); };
watchTopology();
watchHeat();
watchTimeline();
startChat();
const parts = { history: remember, placement: placed, timeline: drawTimeline, frame: show };
follow((name, value) => parts[name]?.(value), told);

// Figures at the top, shares of time, and what happened.

import { $, age, clock, count, element, fillRows, mib, percent, rate, short } from "./page.js";

export function drawFigures(pairs) {
  const box = $("figures");
  while (box.children.length < pairs.length) { const one = element(box, "div"); element(one, "dt"); element(one, "dd"); }
  pairs.forEach(([name, value], i) => {
    const [term, figure] = box.children[i].children;
    term.textContent = name; figure.textContent = value;
  });
}

// `all`: {name, role, work, bubble} as shares of the time.
export function drawTime(all) {
  const box = $("time");
  $("time-card").hidden &&= !all.some(one => one.work > 0.001);
  if (box.children.length !== all.length) {
    box.replaceChildren();
    for (const one of all) {
      const line = element(box, "div", undefined, "share " + one.role);
      element(line, "span", one.name);
      const track = element(line, "div", undefined, "track");
      element(track, "div", undefined, "work"); element(track, "div", undefined, "bubble");
      element(line, "span", undefined, "dim");
    }
  }
  all.forEach((one, i) => {
    const [name, track, said] = box.children[i].children;
    name.textContent = one.name;
    box.children[i].className = "share " + one.role;
    track.children[0].style.width = 100 * one.work + "%";
    track.children[1].style.width = 100 * one.bubble + "%";
    track.title = `computing ${percent(one.work)}, waiting ${percent(one.bubble)}`;
    said.textContent = `${percent(one.work)} / ${percent(one.bubble)}`;
  });
}

// `then`: the status of `elapsed` seconds ago, for tokens per second that were on time.
export function drawPhases(status, then, elapsed) {
  const names = [...new Set([...Object.keys(status.phases), ...Object.keys(status.goodput)])].sort();
  $("phases-card").hidden = names.length < 2 && !Object.keys(status.goodput).length;
  fillRows($("phases").tBodies[0], names.map(name => {
    const queue = status.phases[name], good = status.goodput[name], judged = good ? good.on_time + good.late : 0;
    const speed = good ? rate(good.tokens, then?.goodput[name]?.tokens, elapsed) : 0;
    return [name, queue?.nodes ?? "", queue?.running ?? "", queue?.waiting ?? "", queue ? short(queue.queued_tokens) : "",
            judged ? `${percent(good.on_time / judged)} of ${judged}` : "", good ? short(speed) + " tok/s" : ""];
  }));
}

// Those of one gateway that have run longest.
export function drawRunning({ at, running, in_flight }) {
  $("running-card").hidden = !running.length;
  $("running-count").textContent = in_flight > running.length ? `${running.length} of ${in_flight}` : `${running.length}`;
  fillRows($("running").tBodies[0], running.map(one =>
    [one.id, one.key || "none", age(Math.max(0, at - one.created)), one.tokens.toLocaleString("en"), one.choices,
     one.stream ? "stream" : "whole"]));
}

// What was chosen for this machine, and why.
export function drawSettings({ model, picked }) {
  const rows = [["model", model.id], ["context", `${count(model.max_model_len, "token")} at most`], ...Object.entries(picked)];
  const box = $("settings"), known = JSON.stringify(rows);
  if (box.dataset.known === known) return;
  box.dataset.known = known;
  box.replaceChildren();
  for (const [name, value] of rows) { element(box, "dt", name); element(box, "dd", value); }
}

const KINDS = { lost: "bad", "keeps failing": "bad", refused: "bad", joined: "good", returned: "good", ready: "good" };

// `now` in Unix seconds.
export function drawEvents(status, now) {
  const sum = all => Object.values(all).reduce((a, b) => a + b, 0);
  const lost = Object.values(status.lost).reduce((total, causes) => total + sum(causes), 0);
  $("counts").textContent = `Since the start: ${count(lost, "node")} lost, ${count(sum(status.moved), "request")} moved, ` +
    `${count(status.resent_rows, "row")} sent again, ${mib(status.reloaded_bytes)} of experts reloaded, ` +
    `${count(status.moves, "expert")} moved${piloted(status.pilot)}`;
  const late = Object.entries(status.refused).sort().map(([why, n]) => `${n.toLocaleString("en")} for ${why}`);
  $("refused").hidden = !late.length;
  $("refused").textContent = `Refused at once, as they would have been too late: ${late.join(", ")}`;
  const all = status.incidents.map(each => [each.at, each.text, KINDS[each.what] ?? ""]);
  for (const text of status.decisions) all.push(decided(text, now));
  all.push(...advised(status.pilot, now));
  all.reverse().sort(([a], [b]) => b - a);
  const list = $("events"), known = JSON.stringify(all.map(([, text, , came]) => [text, came?.text]));
  if (list.dataset.known === known) return;
  list.dataset.known = known;
  list.replaceChildren();
  for (const [at, text, kind, came] of all.slice(0, 40)) {
    const line = element(list, "li", undefined, kind);
    element(line, "time", clock(at));
    line.append(text);
    if (!came) continue;
    const below = element(line, "p", undefined, came.text.includes(", missed)") ? "missed" : "held");
    element(below, "time", clock(came.at));
    below.append(came.text);
  }
}

function piloted(pilot) {
  if (!pilot) return "";
  const { advised = 0, acted = 0, compared = 0, held = 0 } = pilot.counts;
  return `; pilot: ${advised} advised, ${acted} done` + (compared ? `, ${held} of ${compared} intervals held` : "");
}

// A pilot's advices, each with what came of it: both say its number.
function advised(pilot, now) {
  const number = text => text.match(/advice (\d+)/)?.[1];
  const came = new Map();
  for (const text of pilot?.outcomes ?? []) {
    const [at, what] = decided(text, now);
    came.set(number(text), { at, text: what.slice(what.indexOf("was ") + 4) });
  }
  return (pilot?.advices ?? []).map(text => [...decided(text, now), came.get(number(text))]);
}

const times = new Map();  // of decisions, when each was first heard of: their age is told in whole seconds

function decided(text, now) {
  const [, ago, what] = text.match(/^(\d+) s ago: (.*)$/s) ?? [text, "0", text];
  const near = (times.get(what) ?? []).find(at => Math.abs(at - (now - Number(ago))) < 3);
  const at = near ?? now - Number(ago);
  if (near === undefined) times.set(what, [...(times.get(what) ?? []), at].slice(-20));
  return [at, what, "move"];
}

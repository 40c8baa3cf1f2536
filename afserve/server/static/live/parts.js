// Figures at the top, shares of time, and what happened.

import { $, element, mib, percent, rate, short } from "./page.js";

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
  const body = $("phases").tBodies[0];
  while (body.rows.length > names.length) body.deleteRow(-1);
  while (body.rows.length < names.length) {
    const row = body.insertRow();
    element(row, "th").scope = "row";
    for (let i = 0; i < 6; i++) row.insertCell();
  }
  names.forEach((name, i) => {
    const queue = status.phases[name], good = status.goodput[name], judged = good ? good.on_time + good.late : 0;
    const speed = good ? rate(good.tokens, then?.goodput[name]?.tokens, elapsed) : 0;
    const said = [name, queue?.nodes ?? "", queue?.running ?? "", queue?.waiting ?? "", queue ? short(queue.queued_tokens) : "",
                  judged ? `${percent(good.on_time / judged)} of ${judged}` : "", good ? short(speed) + " tok/s" : ""];
    said.forEach((text, j) => { body.rows[i].cells[j].textContent = text; });
  });
}

const KINDS = { lost: "bad", "keeps failing": "bad", refused: "bad", joined: "good", returned: "good", ready: "good" };

export function drawEvents(status) {
  const sum = all => Object.values(all).reduce((a, b) => a + b, 0);
  const lost = Object.values(status.lost).reduce((total, causes) => total + sum(causes), 0);
  $("counts").textContent = `Since the start: ${lost} nodes lost, ${sum(status.moved)} requests moved, ` +
    `${status.resent_rows} rows sent again, ${mib(status.reloaded_bytes)} of experts reloaded, ${status.moves} experts moved`;
  const late = Object.entries(status.refused).sort().map(([why, count]) => `${count.toLocaleString()} for ${why}`);
  $("refused").hidden = !late.length;
  $("refused").textContent = `Refused at once, as they would have been too late: ${late.join(", ")}`;
  const list = $("events");
  const all = [...status.incidents].reverse().map(each => [each.at, each.text, KINDS[each.what] ?? ""]);
  for (const text of [...status.decisions].reverse()) all.push([null, text, "move"]);
  const known = JSON.stringify(all);
  if (list.dataset.known === known) return;
  list.dataset.known = known;
  list.replaceChildren();
  for (const [at, text, kind] of all.slice(0, 40)) {
    const line = element(list, "li", undefined, kind);
    if (at !== null) element(line, "time", new Date(1000 * at).toLocaleTimeString());
    line.append(text);
  }
}

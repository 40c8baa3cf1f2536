// Lines over the last ten minutes, by uPlot. What was before the page was opened comes from the server.

import { $, clock, color, element, percent, seconds, short } from "./page.js";

const SECONDS = 600, WHOLE = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600];  // seconds between two marks

export class Chart {
  // `least`: the top of an empty axis. `label`: what a screen reader says of the canvas.
  constructor(id, label, format, least, series) {
    this.box = $(id); this.label = label; this.format = format; this.least = least;
    this.names = []; this.data = [[]]; this.plot = null;
    if (series) this.use(series);
    new ResizeObserver(() => this.fit()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (this.series) this.use(this.series); });
  }

  // `series`: [{label, stroke, fill, dash}]; what is there of the same label stays.
  use(series) {
    const old = new Map(this.names.map((name, i) => [name, this.data[i + 1]]));
    const count = this.data[0].length;
    this.series = series;
    this.names = series.map(one => one.label);
    this.data = [this.data[0], ...this.names.map(name => old.get(name) ?? Array(count).fill(null))];
    this.plot?.destroy();
    this.values?.remove();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false },
                   font: "11px system-ui" };
    this.plot = new uPlot({
      ...this.size(), legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (plot, low, high) => [0, high > 0 ? Math.max(high * 1.1, this.least) : this.least] } },
      axes: [{ ...axis, space: 90, size: 30, incrs: WHOLE, values: (plot, values) => values.map(clock) },
             { ...axis, size: 62, values: (plot, values, i, space, step) => values.map(value => this.format(value, step)) }],
      series: [{}, ...series.map(one => ({ width: 2, points: { show: false }, spanGaps: false, ...one,
        stroke: one.stroke(), fill: one.fill?.() }))],
      hooks: { setCursor: [plot => this.legend(plot.cursor.idx)] },
    }, this.data, this.box);
    const canvas = this.box.querySelector("canvas");
    canvas.setAttribute("role", "img");
    this.values = element(this.box, "p", undefined, "values");
    this.legend(null);
  }

  // The values at a place, or the last ones; beside each name the colour of its line.
  legend(index) {
    const place = index ?? this.data[0].length - 1;
    this.values.replaceChildren();
    this.series.forEach((one, i) => {
      const item = element(this.values, "span"), mark = element(item, "i");
      mark.style.background = one.stroke();
      item.append(`${one.label} `);
      element(item, "b", this.said(this.at(i + 1, place, index !== null)));
    });
    if (index !== null && index !== undefined) element(this.values, "span", clock(this.data[0][place]));
    const last = this.series.map((one, i) => `${one.label} ${this.said(this.at(i + 1, this.data[0].length - 1, false))}`);
    this.box.querySelector("canvas").setAttribute("aria-label", `${this.label}: ${last.join(", ")}`);
  }

  said(value) { return value === null || value === undefined ? "none yet" : this.format(value); }

  // Of a line with gaps the last value that there was, where nobody points at a place.
  at(line, place, exact) {
    const column = this.data[line];
    while (!exact && place > 0 && column[place] === null) place--;
    return column[place];
  }

  // What was before: times, and a list for each name.
  before(at, columns) {
    this.data = [at, ...this.names.map(name => Object.hasOwn(columns, name) ? columns[name] : Array(at.length).fill(null))];
    this.draw();
  }

  add(at, values) {
    this.data[0].push(at);
    values.forEach((value, i) => this.data[i + 1].push(value ?? null));
    while (this.data[0][0] < at - SECONDS) for (const column of this.data) column.shift();
    this.draw();
  }

  draw() {
    if (document.hidden || !this.plot) return;
    this.plot.setData(this.data);
    if (this.plot.cursor.left === undefined || this.plot.cursor.left < 0) this.legend(null);
  }

  size() { return { width: Math.max(200, this.box.clientWidth), height: 160 }; }
  fit() { this.plot?.setSize(this.size()); }
}

const faded = name => () => color(name) + "22";
export const rateChart = () => new Chart("rate", "Tokens per second", short, 10, [
  { label: "generated", stroke: () => color("--attention"), fill: faded("--attention") },
  { label: "prompt", stroke: () => color("--expert") }]);
export const latencyChart = (id, label) => new Chart(id, label, seconds, 0.01, [
  { label: "p50", stroke: () => color("--attention") },
  { label: "p90", stroke: () => color("--good"), dash: [6, 3] },
  { label: "p99", stroke: () => color("--bad"), dash: [2, 3] }]);
export const linesChart = (id, label, names) => new Chart(id, label, short, 10,
  names.map((name, i) => ({ label: name, stroke: () => color(["--attention", "--good", "--expert", "--wait"][i]) })));
export const shareChart = (id, label) => new Chart(id, label, percent, 0.01);

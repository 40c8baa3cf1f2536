// Lines over the last ten minutes, by uPlot.

import { $, color, percent, seconds, short } from "./page.js";

const KEPT = 600;
const clock = at => new Date(1000 * at).toLocaleTimeString([], { hour12: false });

export class Chart {
  constructor(id, format, series) {
    this.box = $(id); this.format = format; this.names = []; this.data = [[]]; this.plot = null;
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
    const axis = { stroke: color("--dim"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false },
                   font: "11px system-ui" };
    this.plot = new uPlot({
      ...this.size(), legend: { live: true }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (plot, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, space: 90, values: (plot, values) => values.map(clock) }, { ...axis, size: 58, values: (plot, values) => values.map(this.format) }],
      series: [{ value: (plot, value) => value === null ? "-" : clock(value) }, ...series.map(one => ({ width: 2, points: { show: false }, spanGaps: false, ...one,
        stroke: one.stroke(), fill: one.fill?.(), value: (plot, value) => value === null ? "-" : this.format(value) }))],
    }, this.data, this.box);
  }

  add(at, values) {
    this.data[0].push(at);
    values.forEach((value, i) => this.data[i + 1].push(value ?? null));
    if (this.data[0].length > KEPT) for (const column of this.data) column.shift();
    if (!document.hidden) this.plot?.setData(this.data);
  }

  size() { return { width: Math.max(200, this.box.clientWidth), height: 150 }; }
  fit() { this.plot?.setSize(this.size()); }
}

const faded = name => () => color(name) + "22";
export const rateChart = () => new Chart("rate", short, [
  { label: "generated", stroke: () => color("--attention"), fill: faded("--attention") },
  { label: "prompt", stroke: () => color("--expert") }]);
export const latencyChart = id => new Chart(id, seconds, [
  { label: "p50", stroke: () => color("--attention") },
  { label: "p90", stroke: () => color("--good"), dash: [6, 3] },
  { label: "p99", stroke: () => color("--bad"), dash: [2, 3] }]);
export const shareChart = id => new Chart(id, percent);

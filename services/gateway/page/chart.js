// Draws lines over the last minutes as SVG, with ticks on both axes and the values under the pointer. Knows points only.

import { el, svg } from "./dom.js";

const HEIGHT = 180;
const LEFT = 44;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 24;
const SPANS_S = [60, 120, 300]; // The shortest that holds all samples is shown.
const GAP_S = 4; // Without a point for so long, a line is interrupted.

/** Round values from 0 to at least `most`, four to six of them. */
function ticks(most) {
  const raw = (most || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw) * power;
  return Array.from({ length: Math.ceil((most || 1) / step - 1e-9) + 1 }, (_, index) => index * step);
}

const short = (value) => (value >= 10_000 ? `${Number((value / 1000).toPrecision(3))}k` : String(Number(value.toPrecision(6))));

export class Chart {
  /** `series` are [name, value of a sample]; a value may be null. `format` writes a value with its unit. */
  constructor(title, unit, series, format) {
    this._series = series;
    this._format = format;
    this._samples = [];
    this._values = series.map(() => el("b", { text: "–" }));
    const legend = el("ul", { class: "legend" });
    series.forEach(([name], index) => legend.append(el("li", {}, el("i", { class: `series-${index}` }), name, " ", this._values[index])));
    this._when = el("span", { class: "when" });
    this._plot = svg("svg", { height: HEIGHT, role: "img" });
    const heading = el("h3", {}, title, el("small", { text: unit }), this._when);
    this.root = el("figure", { class: "chart" }, heading, this._plot, legend);
    this._title = title;
    new ResizeObserver(() => this.draw(this._samples)).observe(this.root);
    this._plot.addEventListener("pointermove", (event) => this._point(event));
    this._plot.addEventListener("pointerleave", () => {
      this._pointed = null;
      this.draw(this._samples);
    });
  }

  /** Draws samples, oldest first, each with its time `at` in seconds. */
  draw(samples) {
    this._samples = samples;
    const now = samples.at(-1)?.at ?? 0;
    const age = now - (samples[0]?.at ?? 0);
    this._span = SPANS_S.find((span) => span >= age) ?? SPANS_S.at(-1);
    const width = (this._width = Math.max(240, this._plot.clientWidth || 480));
    this._plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = this._series.flatMap(([, read]) => samples.map(read)).filter((value) => value !== null);
    const marks = ticks(Math.max(0, ...values));
    const x = (at) => width - RIGHT - ((now - at) / this._span) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / marks.at(-1)) * (HEIGHT - TOP - BOTTOM);
    const parts = [...this._grid(marks, x, y, now)];
    this._series.forEach(([, read], index) => parts.push(svg("path", { class: `line series-${index}`, d: path(samples, read, x, y) })));
    const shown = this._shown(now);
    if (this._pointed && shown) parts.push(svg("path", { class: "cursor", d: `M${x(shown.at)} ${TOP}V${HEIGHT - BOTTOM}` }));
    this._plot.replaceChildren(...parts);
    this._write(shown, now);
  }

  _write(shown, now) {
    const words = this._series.map(([name, read], index) => {
      const value = shown ? read(shown) : null;
      this._values[index].textContent = value === null ? "–" : this._format(value);
      return `${name} ${this._values[index].textContent}`;
    });
    this._when.textContent = this._pointed && shown ? `${Math.round(now - shown.at)} s ago` : "";
    this._plot.setAttribute("aria-label", `${this._title}: ${words.join(", ")}`);
  }

  *_grid(marks, x, y, now) {
    for (const value of marks) {
      yield svg("path", { class: "grid", d: `M${LEFT} ${y(value)}H${this._width - RIGHT}` });
      yield svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", text: short(value) });
    }
    const step = this._span / (this._span > 120 ? 5 : 4);
    for (let ago = 0; ago <= this._span; ago += step) {
      const at = x(now - ago);
      yield svg("path", { class: "grid", d: `M${at} ${HEIGHT - BOTTOM}v4` });
      const words = ago === 0 ? "now" : this._span > 120 ? `-${ago / 60} min` : `-${ago} s`;
      yield svg("text", { x: at, y: HEIGHT - 6, "text-anchor": ago === 0 ? "end" : "middle", text: words });
    }
  }

  /** The sample under the pointer, or the newest one. */
  _shown(now) {
    if (!this._pointed) return this._samples.at(-1);
    const at = now - (1 - this._pointed) * this._span;
    return this._samples.reduce((best, each) => (!best || Math.abs(each.at - at) < Math.abs(best.at - at) ? each : best), undefined);
  }

  _point(event) {
    const box = this._plot.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * this._width;
    this._pointed = Math.min(1, Math.max(1e-6, (inside - LEFT) / (this._width - LEFT - RIGHT)));
    this.draw(this._samples);
  }
}

function path(samples, read, x, y) {
  let drawn = "";
  let last = null;
  for (const sample of samples) {
    const value = read(sample);
    if (value === null) {
      last = null;
      continue;
    }
    const joined = last !== null && sample.at - last <= GAP_S;
    const [across, up] = [x(sample.at).toFixed(1), y(value).toFixed(1)];
    drawn += joined ? `L${across} ${up}` : `M${across} ${up}h.01`;
    last = sample.at;
  }
  return drawn;
}

/** How many seconds a chart shows. */
export const SHOWN_S = SPANS_S.at(-1);

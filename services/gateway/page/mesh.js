// The live view of the mesh: services, traffic over time, workers, what has changed. Draws snapshots, opens no connection.

import { Chart, SHOWN_S } from "./chart.js";
import { el } from "./dom.js";
import { count, duration, figure, percent } from "./format.js";
import { Workers } from "./workers.js";

const CACHES = {
  CACHE_STATE_NONE: ["none", "quiet"],
  CACHE_STATE_CONNECTED: ["connected", "good"],
  CACHE_STATE_DISCONNECTED: ["not reachable", "bad"],
};
const MOST_CHANGES = 30;
const sum = (items, read) => items.reduce((total, item) => total + Number(read(item)), 0);
const milliseconds = (value) => duration(value / 1e3);

export class MeshPage {
  constructor(root, watch) {
    this._root = root;
    this._watch = watch;
    this._samples = [];
    this._model = "";
    this._before = null;
    this._workers = new Workers();
    this._notice = el("p", { class: "notice", role: "status", hidden: true });
    this._models = el("select", { "aria-label": "Model" });
    this._models.addEventListener("change", () => this._choose(this._models.value));
    this._picker = el("label", { class: "field inline", hidden: true }, "Model", this._models);
    this._tiles = el("div", { class: "tiles" });
    this._services = el("div", { class: "services" });
    this._changes = el("ol", { class: "changes", "aria-live": "polite" });
    this._charts = charts();
    this._body = el(
      "div",
      { hidden: true },
      el("div", { class: "mesh-head" }, el("h1", { text: "Mesh" }), this._picker),
      this._tiles,
      el("div", { class: "charts" }, ...this._charts.map((chart) => chart.root)),
      el("h2", { text: "Workers" }),
      this._workers.root,
      el("h2", { text: "Services" }),
      this._services,
      el("h2", { text: "Changes" }),
      this._changes,
    );
    root.append(this._notice, this._body);
    watch.addEventListener("change", () => this._show());
    window.addEventListener("hashchange", () => this._draw());
    this._show();
  }

  _show() {
    const { state, problem, snapshot } = this._watch;
    const words = {
      connecting: "Connecting to the gateway …",
      lost: `${problem}: trying again. What follows may be old.`,
      denied: "The mesh is shown to operators with an API key.",
      forbidden: `${problem}: the mesh is shown to operators (operator = true in the tenants file).`,
      open: snapshot && !snapshot.scheduler_connected ? "The scheduler does not answer. What follows may be old." : "",
    };
    this._notice.textContent = words[state];
    this._notice.hidden = !words[state];
    if (snapshot && snapshot !== this._before) this._take(snapshot);
    this._draw();
  }

  /** Keeps what a snapshot adds to what is known. */
  _take(snapshot) {
    const names = snapshot.models.map((model) => model.name);
    if (!names.includes(this._model)) this._model = names[0] ?? "";
    if (this._models.childElementCount !== names.length || this._models.value !== this._model) {
      this._models.replaceChildren(...names.map((text) => el("option", { value: text, text })));
      this._models.value = this._model;
    }
    this._picker.hidden = names.length < 2;
    if (snapshot.scheduler_connected) {
      this._note(this._workers.show(snapshot, this._before), snapshot.at_s);
      this._samples.push({ at: snapshot.at_s, models: new Map(names.map((name) => [name, sample(snapshot, name)])) });
      while (this._samples[0].at < snapshot.at_s - SHOWN_S) this._samples.shift();
    }
    if (this._before && this._before.scheduler_connected !== snapshot.scheduler_connected) {
      this._note([`scheduler: ${snapshot.scheduler_connected ? "connected" : "not reachable"}`], snapshot.at_s);
    }
    this._before = snapshot;
  }

  _note(changes, atS) {
    for (const words of changes) {
      const time = new Date(atS * 1e3).toLocaleTimeString();
      this._changes.prepend(el("li", {}, el("time", { text: time }), words));
    }
    while (this._changes.childElementCount > MOST_CHANGES) this._changes.lastChild.remove();
  }

  _choose(model) {
    this._model = model;
    this._draw();
  }

  _draw() {
    const snapshot = this._before;
    this._body.hidden = !snapshot;
    if (!snapshot || this._root.hidden) return;
    const samples = this._samples.filter((each) => each.models.has(this._model));
    const points = samples.map((each) => ({ at: each.at, ...each.models.get(this._model) }));
    for (const chart of this._charts) chart.draw(points);
    this._tiles.replaceChildren(...tiles(points.at(-1)));
    this._services.replaceChildren(...services(snapshot, this._watch.state));
  }
}

/** The figures of one model in a snapshot, in milliseconds, tokens and shares; null where there is none. */
function sample(snapshot, name) {
  const model = snapshot.models.find((each) => each.name === name);
  const workers = snapshot.workers.filter((each) => each.model === name && each.phase !== "PHASE_LOADING");
  const blocks = sum(workers, (each) => each.active_blocks + each.cached_blocks + each.free_blocks);
  const latency = (values, figure_) => (values && Number(values.count) ? values[figure_] * 1e3 : null);
  return {
    ttft50: latency(model.first_token, "p50_s"),
    ttft90: latency(model.first_token, "p90_s"),
    ttft99: latency(model.first_token, "p99_s"),
    itl50: latency(model.inter_token, "p50_s"),
    itl90: latency(model.inter_token, "p90_s"),
    itl99: latency(model.inter_token, "p99_s"),
    tokens: model.tokens_per_s,
    requests: model.requests_per_s,
    failed: model.failed_per_s,
    cached: model.cached_share,
    hits: model.result_hit_share,
    queued: Number(model.waiting) + sum(workers, (each) => each.waiting),
    running: sum(workers, (each) => each.running),
    slots: sum(workers, (each) => each.credits),
    kvActive: blocks ? (100 * sum(workers, (each) => each.active_blocks)) / blocks : null,
    kvCached: blocks ? (100 * sum(workers, (each) => each.cached_blocks)) / blocks : null,
  };
}

function charts() {
  const percentiles = (name) => ["50", "90", "99"].map((each) => [`p${each}`, (point) => point[`${name}${each}`]]);
  return [
    new Chart("Time to first token", "ms, last 10 s", percentiles("ttft"), milliseconds),
    new Chart("Time between tokens", "ms, last 10 s", percentiles("itl"), milliseconds),
    new Chart("Tokens", "per second", [["produced", (point) => point.tokens]], figure),
    new Chart("Jobs", "", [["running", (point) => point.running], ["queued", (point) => point.queued]], count),
    new Chart("KV memory", "% of blocks", [["in use", (point) => point.kvActive], ["cached", (point) => point.kvCached]], (value) => percent(value / 100)),
    new Chart("Requests", "ended per second", [["all", (point) => point.requests], ["failed", (point) => point.failed]], figure),
  ];
}

function tiles(point) {
  if (!point) return [];
  const found = [
    ["tokens/s", figure(point.tokens)],
    ["requests/s", figure(point.requests)],
    ["running", `${count(point.running)} of ${count(point.slots)}`],
    ["queued", count(point.queued)],
    ["to first token, p50", point.ttft50 === null ? "–" : milliseconds(point.ttft50)],
    ["per token, p50", point.itl50 === null ? "–" : milliseconds(point.itl50)],
    ["of prompts cached", percent(point.cached)],
    ["result cache hits", percent(point.hits)],
  ];
  return found.map(([name, value]) => el("p", { class: "tile" }, el("b", { text: value }), name));
}

function services(snapshot, state) {
  const service = (name, words, kind, more) =>
    el("article", { class: "service" }, el("h3", { text: name }), el("span", { class: `badge ${kind}`, text: words }), el("p", { class: "hint", text: more }));
  const connected = snapshot.scheduler_connected;
  const [cache, kind] = CACHES[snapshot.cache] ?? ["unknown", "warn"];
  return [
    service("scheduler", connected ? "connected" : "not reachable", connected ? "good" : "bad", "places jobs"),
    service("cache", cache, kind, "results and KV blocks"),
    ...snapshot.gateways.map((gateway) => {
      const mine = gateway.gateway_id === snapshot.gateway_id;
      const load = `${count(gateway.running)} running, ${figure(gateway.requests_per_s)} requests/s, ${figure(gateway.tokens_per_s)} tokens/s`;
      const reachable = !mine || state === "open";
      return service(gateway.gateway_id, reachable ? (mine ? "answers this page" : "attached") : "not reachable", reachable ? "good" : "bad", load);
    }),
  ];
}

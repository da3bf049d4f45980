// Shows the workers of the mesh as cards, those that are gone for a while longer. Knows snapshots, no connection.

import { bar, el } from "./dom.js";
import { ago, count, figure, percent } from "./format.js";

const PHASES = {
  PHASE_READY: ["ready", "good"],
  PHASE_LOADING: ["loading", "busy"],
  PHASE_DRAINING: ["draining", "warn"],
  PHASE_SILENT: ["makes no progress", "bad"],
  PHASE_DETACHED: ["connection lost", "bad"],
};
const ROLES = { WORKER_ROLE_PREFILL: "prompts", WORKER_ROLE_DECODE: "answers" };
const GONE_S = 120;

/** The workers of all snapshots: those present and those that left. */
export class Workers {
  constructor() {
    this.root = el("div", { class: "workers" });
    this._cards = new Map();
  }

  /** Shows a snapshot. -> what has changed since the one before, in words. */
  show(snapshot, before) {
    const changes = [];
    const present = new Set(snapshot.workers.map((worker) => worker.worker_id));
    for (const worker of snapshot.workers) {
      const id = worker.worker_id;
      const known = this._cards.get(id);
      const phase = (PHASES[worker.phase] ?? ["unknown"])[0];
      if (!known || known.phase !== phase) changes.push(`${id}: ${phase}`);
      const earlier = before?.workers.find((each) => each.worker_id === id);
      this._put(id, { phase, goneAt: null }, card(worker, earlier, snapshot.at_s - (before?.at_s ?? 0)));
    }
    for (const [id, known] of this._cards) {
      if (present.has(id)) continue;
      if (known.goneAt === null) {
        changes.push(`${id}: gone`);
        known.goneAt = snapshot.at_s;
      }
      if (snapshot.at_s - known.goneAt > GONE_S) {
        known.node.remove();
        this._cards.delete(id);
      } else this._put(id, { phase: "gone", goneAt: known.goneAt }, goneCard(id, snapshot.at_s - known.goneAt));
    }
    return changes;
  }

  _put(id, state, node) {
    const known = this._cards.get(id);
    if (known) known.node.replaceWith(node);
    else this.root.append(node);
    this._cards.set(id, { ...state, node });
  }
}

function heading(id, model, phase, kind) {
  const badge = el("span", { class: `badge ${kind}`, text: phase });
  return el("header", {}, el("h3", { text: id }), badge, el("p", { class: "hint", text: model }));
}

function goneCard(id, seconds) {
  return el("article", { class: "worker gone", "data-worker": id, "data-phase": "gone" }, heading(id, ago(seconds), "gone", "bad"));
}

function card(worker, earlier, sinceS) {
  const [phase, kind] = PHASES[worker.phase] ?? ["unknown", "warn"];
  const attributes = { class: "worker", "data-worker": worker.worker_id, "data-phase": phase };
  const role = ROLES[worker.role];
  const head = heading(worker.worker_id, role ? `${worker.model}, for ${role}` : worker.model, phase, kind);
  if (worker.phase !== "PHASE_LOADING") return el("article", attributes, head, ...load(worker), figures(worker, earlier, sinceS));
  return el("article", attributes, head, measure(worker.step, [["active", worker.percent / 100, `${worker.percent}%`]]));
}

function load(worker) {
  const blocks = worker.active_blocks + worker.cached_blocks + worker.free_blocks;
  const share = (part) => (blocks ? part / blocks : 0);
  const slots = worker.credits || 1;
  const running = Math.min(1, worker.running / slots);
  const waiting = Math.min(1 - running, worker.waiting / slots);
  const [active, cached] = [share(worker.active_blocks), share(worker.cached_blocks)];
  return [
    measure(`Batch, ${count(worker.credits)} slots`, [
      ["active", running, `${count(worker.running)} running`],
      ["waiting", waiting, `${count(worker.waiting)} waiting`],
    ]),
    measure(`KV, ${count(blocks)} blocks`, [
      ["active", active, `${percent(active)} in use`],
      ["cached", cached, `${percent(cached)} cached`],
    ]),
  ];
}

/** A named bar with its legend; `parts` are [class, share, words]. */
function measure(name, parts) {
  const legend = el("span", { class: "legend" }, ...parts.map(([kind, , words]) => el("span", {}, el("i", { class: kind }), words)));
  const words = `${name}: ${parts.map((part) => part[2]).join(", ")}`;
  return el("div", { class: "measure" }, el("p", {}, el("span", { text: name }), legend), bar(parts, words));
}

function figures(worker, earlier, sinceS) {
  const steps = earlier && sinceS > 0 ? Math.max(0, worker.steps - earlier.steps) / sinceS : 0;
  const rows = [
    ["step", worker.decode_s ? `${figure(worker.decode_s * 1e3)} ms` : "–"],
    ["steps/s", earlier ? figure(steps) : "–"],
    ["to prefill", count(worker.prefill_backlog)],
    ["prefill tok/s", worker.prefill_rate ? figure(worker.prefill_rate) : "–"],
    ["preempted", count(worker.preemptions)],
  ];
  return el("dl", { class: "figures" }, ...rows.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
}

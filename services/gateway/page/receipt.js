// Shows a receipt: where the time of a request went, and what it cost. Knows receipts, no requests.

import { bar, el } from "./dom.js";
import { count, hundredths, percent } from "./format.js";

// In the order of a request's life. The last three occur throughout it and are drawn at its end.
const HOPS = [
  ["tokenize", "Waiting for the tokenizer, and tokenizing, at the gateway"],
  ["cache", "Waiting for the result cache"],
  ["queue", "Waiting for a worker and for a place in its batch"],
  ["prefill", "Computing the prompt, at the worker"],
  ["decode", "From the first to the last token, at the worker"],
  ["detokenize", "Converting tokens to text, at the gateway"],
  ["network", "In transit between processes, and waiting for the client to read"],
  ["unaccounted", "The rest"],
];

/** A table with a row for each hop of a request, which begins where the one before ends; the last row is their sum. */
export function waterfall(timings) {
  const present = HOPS.filter(([name]) => timings[`${name}_s`] > 0);
  const wall = timings.wall_s ?? 0;
  const parts = present.map(([name]) => timings[`${name}_s`]);
  const shown = hundredths(parts, wall);
  const body = el("tbody");
  let before = 0;
  present.forEach(([name, explanation], index) => {
    const share = wall ? parts[index] / wall : 0;
    const span = bar([["gap", before], [`hop-${name}`, share]], `${percent(share)} of the time`);
    body.append(
      el(
        "tr",
        { "data-hop": name, "data-hundredths": shown[index] },
        el("th", { scope: "row", title: explanation, text: name }),
        el("td", { class: "wide" }, span),
        el("td", { text: milliseconds(shown[index]) }),
        el("td", { text: percent(share) }),
      ),
    );
    before += share;
  });
  const total = Math.round(wall * 1e5);
  const sum = el(
    "tr",
    { "data-hop": "wall", "data-hundredths": total },
    el("th", { scope: "row", text: "wall" }),
    el("td", { class: "wide" }),
    el("td", { text: milliseconds(total) }),
    el("td"),
  );
  const head = el("tr", {}, ...["hop", "", "ms", "share"].map((text) => el("th", { scope: "col", text })));
  const caption = el("caption", { text: "Where the time went" });
  return el("table", { class: "waterfall" }, caption, el("thead", {}, head), body, el("tfoot", {}, sum));
}

const milliseconds = (value) => (value / 100).toLocaleString("en-US", { minimumFractionDigits: 2 });

/** The other facts of a receipt as a list of terms. */
export function facts(receipt) {
  const list = el("dl", { class: "facts" });
  const tokens = `${count(receipt.prompt_tokens ?? 0)} in, ${count(receipt.completion_tokens ?? 0)} out`;
  const found = [["cached", receipt.cached_tokens], ["fetched", receipt.fetched_tokens], ["computed", receipt.prefill_tokens]];
  const prompt = found.filter(([, tokens]) => tokens).map(([name, tokens]) => `${count(tokens)} ${name}`).join(", ");
  const rows = [
    ["model", receipt.model],
    ["tokens", tokens],
    ["prompt", receipt.result_hit ? "not computed: the result cache had the answer" : prompt],
    ["workers", (receipt.workers ?? []).join(", ")],
    ["attempts", receipt.attempts > 1 ? `${receipt.attempts}: a worker was lost` : ""],
    ["preempted", receipt.preemptions],
    ["joined", receipt.joined ? "the generation of an equal request" : ""],
    ["seed", receipt.seed],
    ["request id", receipt.request_id],
    ["trace id", receipt.trace_id],
  ];
  for (const [name, value] of rows) {
    if (value) list.append(el("div", {}, el("dt", { text: name }), el("dd", { text: String(value) })));
  }
  return list;
}

/** The tokens of a prompt, those marked that were not computed; `pieces` are their texts. */
export function promptTokens(pieces, receipt) {
  const cached = receipt.result_hit ? pieces.length : Math.min(pieces.length, receipt.cached_tokens ?? 0);
  const fetched = Math.min(pieces.length - cached, receipt.fetched_tokens ?? 0);
  const kind = (index) => (index < cached ? "cached" : index < cached + fetched ? "fetched" : "computed");
  const tokens = pieces.map((text, index) => el("span", { class: `piece ${kind(index)}`, title: kind(index), text }));
  const computed = pieces.length - cached - fetched;
  const parts = [["cached", cached], ["fetched", fetched], ["computed", computed]];
  const shares = parts.map(([name, tokens]) => [name, pieces.length ? tokens / pieces.length : 0]);
  const words = parts.filter(([, tokens]) => tokens).map(([name, tokens]) => `${count(tokens)} ${name}`).join(", ");
  const several = receipt.attempts > 1 || receipt.preemptions ? " (over several attempts)" : "";
  const legend = el("ul", { class: "legend" });
  for (const [name, tokens] of parts) {
    if (tokens) legend.append(el("li", {}, el("i", { class: name }), `${count(tokens)} ${name}`));
  }
  return el("div", { class: "prompt-tokens" }, bar(shares, words + several), legend, el("p", { class: "pieces" }, ...tokens));
}

// The controls of a request's sampling: what they are called, their limits, and the fields that they become.

import { byId, el } from "./dom.js";

const STORED = "weft-settings";

// [field, label, explanation, attributes of the input, its value at first]. An empty value sends no field.
const BASIC = [
  ["temperature", "Temperature", "0 is greedy", { min: 0, max: 2, step: 0.01 }, "0.8"],
  ["max_tokens", "Most tokens", "", { min: 1, step: 1 }, "256"],
  ["top_p", "Top p", "keeps the likeliest tokens of this share", { min: 0.01, max: 1, step: 0.01 }, "1"],
  ["seed", "Seed", "empty: random", { min: 0, step: 1 }, ""],
];
const MORE = [
  ["top_k", "Top k", "0 keeps all", { min: 0, step: 1 }, "0"],
  ["min_p", "Min p", "of the likeliest token's share", { min: 0, max: 1, step: 0.01 }, "0"],
  ["repetition_penalty", "Repetition penalty", "1 is none", { min: 0.01, max: 10, step: 0.01 }, "1"],
  ["presence_penalty", "Presence penalty", "-2 to 2", { min: -2, max: 2, step: 0.01 }, "0"],
  ["frequency_penalty", "Frequency penalty", "-2 to 2", { min: -2, max: 2, step: 0.01 }, "0"],
];
const CACHES = [["read_write", "read and write"], ["read_only", "read only"], ["bypass", "bypass"]];

/** Builds the controls in the page, with the values of this tab. */
export function build() {
  const stop = el("textarea", { id: "stop", rows: 2, spellcheck: "false" });
  const cache = el("select", { id: "cache" }, ...CACHES.map(([value, text]) => el("option", { value, text })));
  byId("sampling").append(
    ...BASIC.map(numeric),
    checkbox("logprobs", "Token probabilities", "the five likeliest at each place"),
    el(
      "details",
      { class: "more" },
      el("summary", { text: "More" }),
      ...MORE.map(numeric),
      el("label", { class: "field" }, "Stop strings, one a line", stop),
      el("label", { class: "field" }, "Caches", cache),
      checkbox("ignore_eos", "Ignore end tokens", "answer to the last token"),
    ),
  );
  restore();
  byId("settings").addEventListener("change", store);
}

function numeric([name, label, explanation, limits, value]) {
  const id = `option-${name}`;
  const input = el("input", { id, type: "number", inputmode: "decimal", value, "data-initial": value, ...limits });
  return el("label", { class: "field number", for: id }, named(label, explanation), input);
}

function checkbox(id, label, explanation) {
  return el("label", { class: "field check" }, el("input", { type: "checkbox", id }), named(label, explanation));
}

function named(label, explanation) {
  return el("span", { class: "name" }, label, explanation ? el("small", { text: explanation }) : null);
}

const inputs = () => [...byId("sampling").querySelectorAll("input, textarea, select")];

function store() {
  const values = Object.fromEntries(inputs().map((each) => [each.id, each.type === "checkbox" ? each.checked : each.value]));
  sessionStorage.setItem(STORED, JSON.stringify(values));
}

function restore() {
  const values = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
  for (const input of inputs()) {
    if (!(input.id in values)) continue;
    if (input.type === "checkbox") input.checked = values[input.id];
    else input.value = values[input.id];
  }
}

/** The first control whose value is not permitted, with its problem shown by the browser; undefined if all are. */
export function invalid() {
  const wrong = inputs().find((input) => !input.checkValidity());
  const details = wrong?.closest("details");
  if (details) details.open = true;
  wrong?.reportValidity();
  return wrong;
}

/** The fields of a request. Values that change nothing are left out. */
export function fields() {
  const found = {};
  for (const [name, , , , initial] of [...BASIC, ...MORE]) {
    const value = byId(`option-${name}`).value;
    const neutral = MORE.some(([other]) => other === name) && value === initial;
    if (value !== "" && !neutral) found[name] = Number(value);
  }
  const stops = byId("stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) found.stop = stops;
  if (byId("ignore_eos").checked) found.ignore_eos = true;
  found.cache = byId("cache").value;
  return found;
}

export const wantsProbabilities = () => byId("logprobs").checked;

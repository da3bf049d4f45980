// Shows one answer: its text as it grows, the probabilities of its tokens, its receipt. Sends no generation itself.

import { json } from "./api.js";
import { bar, el } from "./dom.js";
import { count, figure, percent } from "./format.js";
import { facts, promptTokens, waterfall } from "./receipt.js";

const FINISH = { stop: "ended", length: "token limit", error: "failed" };
const LEVELS = [0.9, 0.6, 0.3, 0.1];
const LEGEND = "Underlined tokens had less than 90%, shaded ones less than 60, 30 or 10%. Point at one, or use Tab and the arrow keys.";

export class AnswerView {
  /** `actions` are called by the buttons: regenerate, probabilities. */
  constructor(prompt, actions) {
    this.text = "";
    this.answer = null;
    this._prompt = prompt;
    this._actions = actions;
    this._body = el("div", { class: "text" });
    this._node = document.createTextNode("");
    this._body.append(this._node);
    this._tokens = el("div", { class: "tokens", role: "group", "aria-label": "Tokens: use the arrow keys", hidden: true });
    this._token = el("div", { class: "token-panel", hidden: true, "aria-live": "polite" });
    this._token.append(el("p", { class: "hint", text: LEGEND }));
    this._problem = el("p", { class: "problem", hidden: true });
    this._stats = el("p", { class: "stats" });
    this._buttons = el("div", { class: "buttons" });
    this._details = el("details", { class: "receipt", hidden: true }, el("summary", { text: "Receipt" }));
    this.root = el(
      "article",
      { class: "answer", "aria-busy": "true", "aria-label": "Answer" },
      this._body,
      this._tokens,
      this._token,
      this._problem,
      el("div", { class: "answer-foot" }, this._stats, this._buttons),
      this._details,
    );
    this._tokens.addEventListener("keydown", (event) => this._onKey(event));
    this._stats.textContent = "Waiting for the first token …";
  }

  /** Shows what has arrived so far; `problem` is shown until the next part arrives. */
  update(answer, problem) {
    this._problem.hidden = !problem;
    this._problem.textContent = problem;
    if (!answer) return;
    this.answer = answer;
    this._problem.classList.remove("error");
    this.text = answer.text;
    this._node.data = answer.text;
    this._showTokens(answer.tokens);
    this._stats.textContent = `${count(answer.count)} tokens`;
  }

  /** The answer is whole. */
  finish(answer) {
    this.update(answer, "");
    this._end(this._summary(answer));
    this.root.dataset.finish = answer.finish ?? "";
    if (answer.receipt) this._showReceipt(answer.receipt);
  }

  /** It ended before it was whole: stopped, or with an error. */
  fail(words, isError) {
    const tokens = this.answer?.count ?? 0;
    this._problem.hidden = !isError;
    this._problem.textContent = words;
    this._problem.classList.toggle("error", isError);
    this._end(isError ? `${count(tokens)} tokens` : `${words} after ${count(tokens)} tokens`);
    this.root.dataset.finish = isError ? "failed" : "stopped";
  }

  /** Closes the receipt: a later answer shows its own. */
  fold() {
    this._details.open = false;
  }

  /** Removes the buttons that only the last answer of a chat has. */
  retire() {
    this._buttons.querySelector("[data-action=regenerate]")?.remove();
  }

  _end(words) {
    this.root.setAttribute("aria-busy", "false");
    this._stats.textContent = words;
    const button = (action, text, title) =>
      el("button", { type: "button", class: "quiet", "data-action": action, title, text, onclick: () => this._actions[action]() });
    const again = "Sends the prompt again with the same seed, and shows the likeliest tokens";
    const buttons = [button("regenerate", "Regenerate", "Sends the same prompt again")];
    if (!this.answer?.tokens.length) buttons.push(button("probabilities", "Probabilities", again));
    if (navigator.clipboard && this.text) buttons.push(this._copyButton());
    this._buttons.replaceChildren(...buttons);
  }

  _copyButton() {
    const button = el("button", { type: "button", class: "quiet", text: "Copy" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.text);
      button.textContent = "Copied";
    });
    return button;
  }

  _summary(answer) {
    const { receipt } = answer;
    const parts = [`${count(answer.count)} tokens`];
    const decodeS = receipt?.timings?.decode_s ?? 0;
    if (decodeS && answer.count > 1) parts.push(`${figure((answer.count - 1) / decodeS)} tokens/s`);
    const firstS = receipt?.timings?.first_token_s;
    if (firstS) parts.push(`first after ${figure(firstS * 1e3)} ms`);
    if (receipt?.result_hit) parts.push("from the result cache");
    else if (receipt?.cached_tokens) parts.push(`${count(receipt.cached_tokens)} prompt tokens cached`);
    if (receipt?.attempts > 1) parts.push(`${receipt.attempts} attempts`);
    const why = typeof answer.stopReason === "string" ? `stopped at “${answer.stopReason}”` : FINISH[answer.finish];
    if (why) parts.push(why);
    return parts.join(" · ");
  }

  // ---- receipt ----

  _showReceipt(receipt) {
    const tokens = el("details", { class: "prompt-part" }, el("summary", { text: "Prompt tokens" }));
    tokens.addEventListener("toggle", () => this._showPrompt(tokens, receipt), { once: true });
    const parts = el("div", { class: "receipt-parts" }, waterfall(receipt.timings ?? {}), facts(receipt));
    this._details.replaceChildren(this._details.firstChild, parts, tokens);
    this._details.hidden = false;
    this._details.open = true;
  }

  async _showPrompt(details, receipt) {
    const note = el("p", { class: "hint", text: "Tokenizing …" });
    details.append(note);
    try {
      const reply = await json("tokenize", { body: this._prompt });
      note.replaceWith(promptTokens(reply.token_strs, receipt));
    } catch (error) {
      note.textContent = error.message;
    }
  }

  // ---- probabilities ----

  _showTokens(tokens) {
    if (!tokens.length) return;
    this._tokens.hidden = this._token.hidden = false;
    this._body.hidden = true;
    if (this._tokens.childElementCount > tokens.length) this._tokens.replaceChildren(); // Resumed from the start.
    for (let index = this._tokens.childElementCount; index < tokens.length; index += 1) {
      this._tokens.append(this._tokenSpan(tokens[index], index));
    }
  }

  _tokenSpan(token, index) {
    const probability = Math.exp(token.logprob);
    const level = LEVELS.findIndex((limit) => probability >= limit);
    const span = el("span", {
      class: `token p${level < 0 ? LEVELS.length : level}`,
      role: "button",
      tabindex: index === 0 ? 0 : -1,
      "aria-label": `${JSON.stringify(token.text)}, ${percent(probability)}`,
      text: token.text,
    });
    span.addEventListener("focus", () => this._explain(index));
    span.addEventListener("pointerenter", () => this._explain(index));
    return span;
  }

  _onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const spans = [...this._tokens.children];
    const at = spans.indexOf(document.activeElement);
    if (step === undefined || at < 0) return;
    event.preventDefault();
    const next = spans[Math.min(spans.length - 1, Math.max(0, at + step))];
    spans[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  _explain(index) {
    const token = this.answer.tokens[index];
    for (const span of this._tokens.querySelectorAll(".shown")) span.classList.remove("shown");
    this._tokens.children[index].classList.add("shown");
    const rows = token.top.map((top) => {
      const share = Math.exp(top.logprob);
      const chosen = top.text === token.text;
      return el(
        "tr",
        { class: chosen ? "chosen" : "" },
        el("th", { scope: "row" }, el("code", { text: JSON.stringify(top.text) }), chosen ? " chosen" : null),
        el("td", { class: "wide" }, bar([["cached", share]], percent(share))),
        el("td", { text: percent(share) }),
      );
    });
    const title = `Token ${index + 1}: ${JSON.stringify(token.text)}, ${percent(Math.exp(token.logprob))}`;
    const note = "The model's own probabilities, before temperature and penalties.";
    const table = el("table", {}, el("caption", { text: title }), el("tbody", {}, ...rows));
    this._token.replaceChildren(table, el("p", { class: "hint", text: note }));
  }
}

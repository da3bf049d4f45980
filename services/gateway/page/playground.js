// The playground: sends prompts and shows their answers. Knows the form and the log, not how an answer is drawn.

import { AnswerView } from "./answer.js";
import { ApiError, json, randomId, randomSeed } from "./api.js";
import { byId, el } from "./dom.js";
import { duration } from "./format.js";
import * as options from "./options.js";
import { answer } from "./stream.js";

const POLL_MS = 1500;
const TOP_LOGPROBS = 5;
const EXAMPLES = {
  text: ["Once upon a time there was a fox", "The old mill by the river", "It was a dark winter night when"],
  chat: ["Tell me a story about a fox.", "What happened at the old mill?", "Write three lines about winter."],
};

export class Playground {
  /** `onDenied` is called when the gateway asks for a key, with what to do once there is one. */
  constructor(onDenied) {
    this._onDenied = onDenied;
    this._models = [];
    this._turns = [];
    this._abort = null;
    options.build();
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    byId("stop-button").addEventListener("click", () => this._abort?.abort());
    byId("clear-button").addEventListener("click", () => this._clear());
    byId("prompt").addEventListener("keydown", (event) => this._onKey(event));
    byId("settings-button").addEventListener("click", () => this._toggleSettings());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("model").addEventListener("change", () => this._modelChanged());
    byId("mode").addEventListener("change", () => this._modeChanged());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this._abort && !document.querySelector("dialog[open]")) this._abort.abort();
    });
    this._modeChanged();
    this.refresh();
  }

  /** Reads the list of models again; repeats it while there are none. */
  async refresh() {
    clearTimeout(this._timer);
    try {
      this._models = (await json("v1/models")).data;
      this._showModels();
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        byId("log-empty-text").textContent = "This mesh asks for an API key.";
        this._onDenied(() => this.refresh());
        return;
      }
      byId("log-empty-text").textContent = `${error.message}: trying again …`;
    }
    if (this._models.length) return;
    await this._showLoading();
    this._timer = setTimeout(() => this.refresh(), POLL_MS);
  }

  // ---- models ----

  _showModels() {
    const chosen = byId("model").value;
    byId("model").replaceChildren(...this._models.map((model) => el("option", { value: model.id, text: model.id })));
    if (this._models.some((model) => model.id === chosen)) byId("model").value = chosen;
    byId("model").disabled = !this._models.length;
    const model = this._model();
    if (!model) {
      byId("log-empty-text").textContent = "No model is served yet.";
      return;
    }
    byId("loading-list").replaceChildren();
    const words = `${model.id}: up to ${model.max_model_len.toLocaleString("en-US")} tokens of prompt and answer.`;
    byId("log-empty-text").textContent = words;
    if (model.id !== chosen) this._modelChanged();
  }

  async _showLoading() {
    let loading = [];
    try {
      const response = await fetch(new URL("startupz", document.baseURI), { cache: "no-store" });
      loading = (await response.json()).loading;
    } catch {
      return; // The gateway does not answer, which is shown already.
    }
    const bars = loading.map(({ phase, percent }) =>
      el("label", {}, `${phase} ${percent}%`, el("progress", { max: 100, value: percent })),
    );
    byId("loading-list").replaceChildren(...bars);
  }

  _model() {
    return this._models.find((model) => model.id === byId("model").value);
  }

  _modelChanged() {
    const chat = this._model()?.chat ?? true;
    byId("mode").querySelector("[value=chat]").disabled = !chat;
    byId("mode-hint").hidden = chat;
    this._setMode(chat ? this._mode() : "text");
  }

  _mode() {
    return byId("mode").querySelector(":checked").value;
  }

  _setMode(mode) {
    byId("mode").querySelector(`[value=${mode}]`).checked = true;
    this._modeChanged();
  }

  _modeChanged() {
    const chat = this._mode() === "chat";
    byId("system-field").hidden = !chat;
    byId("prompt-label").textContent = chat ? "Message" : "Prompt";
    byId("prompt").placeholder = chat ? "Tell me a story about a fox." : "Once upon a time";
    const examples = EXAMPLES[this._mode()].map((text) =>
      el("button", { type: "button", class: "quiet", text, onclick: () => this._take(text) }),
    );
    byId("examples").replaceChildren(...examples);
    byId("send-hint").textContent = "Enter sends, Shift+Enter breaks the line, Esc stops";
  }

  /** Puts an example into the prompt. */
  _take(text) {
    byId("prompt").value = text;
    byId("prompt").focus();
  }

  // ---- sending ----

  _onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this._send();
  }

  _send() {
    const text = byId("prompt").value;
    if (!text || this._abort || options.invalid()) return;
    const mode = this._mode();
    byId("prompt").value = "";
    this._run({ mode, text, system: mode === "chat" ? byId("system").value : "" });
  }

  /** Sends a turn and shows it at the end of the log. */
  async _run(turn, changes = {}) {
    const history = turn.mode === "chat" ? this._turns.filter((each) => each.mode === "chat" && each.view.text) : [];
    for (const each of this._turns) {
      each.view.fold();
      if (turn.mode === "chat" && each.mode === "chat") each.view.retire();
    }
    turn.body = { ...this._body(turn, history), ...changes };
    const { model, prompt, messages } = turn.body;
    turn.view = new AnswerView(prompt === undefined ? { model, messages } : { model, prompt }, {
      regenerate: () => this._again(turn, {}),
      probabilities: () => this._again(turn, { ...probabilities(turn.mode), seed: turn.body.seed }),
    });
    turn.root = el("div", { class: `turn ${turn.mode}` }, el("p", { class: "prompt", text: turn.text }), turn.view.root);
    byId("log-empty").hidden = true;
    byId("log").append(turn.root);
    this._turns.push(turn);
    byId("log").scrollTop = byId("log").scrollHeight;
    await this._receive(turn);
  }

  _body(turn, history) {
    const body = { model: byId("model").value, ...options.fields(), stream: true, return_token_ids: true };
    if (body.seed === undefined) {
      // A seed of the page's own lets a broken stream resume. Nobody will draw it again, so its result is not stored.
      body.seed = randomSeed();
      if (body.cache === "read_write") body.cache = "read_only";
    }
    body.request_id = randomId();
    if (options.wantsProbabilities()) Object.assign(body, probabilities(turn.mode));
    if (turn.mode === "text") return { ...body, prompt: turn.text };
    const messages = turn.system ? [{ role: "system", content: turn.system }] : [];
    for (const each of history) {
      messages.push({ role: "user", content: each.text }, { role: "assistant", content: each.view.text });
    }
    return { ...body, messages: [...messages, { role: "user", content: turn.text }] };
  }

  /** Sends a turn again, in its place if it is the last one. */
  _again(turn, changes) {
    if (this._abort || options.invalid()) return;
    const { mode, text, system } = turn;
    if (this._turns.at(-1) === turn) {
      this._turns.pop();
      turn.root.remove();
    }
    byId("prompt").focus();
    this._run({ mode, text, system }, changes);
  }

  async _receive(turn) {
    const began = performance.now();
    const { view, mode, body } = turn;
    this._abort = new AbortController();
    this._busy(true);
    try {
      const whole = await answer(mode, body, this._abort.signal, (part, problem) => {
        this._following(() => view.update(part, problem));
      });
      this._following(() => view.finish(whole));
      this._announce(`The answer is complete: ${whole.count} tokens in ${duration((performance.now() - began) / 1e3)}.`);
    } catch (error) {
      const stopped = this._abort.signal.aborted;
      this._following(() => (stopped ? view.fail("Stopped", false) : this._fail(view, error)));
      this._announce(stopped ? "Stopped." : `Failed: ${error.message}`);
    }
    this._abort = null;
    this._busy(false);
  }

  _fail(view, error) {
    const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
    view.fail(`${error.message}.${wait}`, true);
    if (error.status === 401) this._onDenied(() => this.refresh());
    if (error.status === 404) this.refresh();
  }

  // ---- view ----

  _busy(busy) {
    byId("stop-button").hidden = !busy;
    byId("send-button").hidden = busy;
  }

  _clear() {
    this._abort?.abort();
    for (const turn of this._turns) turn.root.remove();
    this._turns = [];
    byId("log-empty").hidden = false;
    byId("prompt").focus();
  }

  /** Makes a change, and keeps the end of the log in view unless the reader has scrolled away from it. */
  _following(change) {
    const log = byId("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  _announce(words) {
    byId("announcer").textContent = words;
  }

  _toggleSettings() {
    const open = byId("settings").classList.toggle("open");
    byId("settings-button").setAttribute("aria-expanded", String(open));
    if (open) byId("model").focus();
  }
}

function probabilities(mode) {
  return mode === "chat" ? { logprobs: true, top_logprobs: TOP_LOGPROBS } : { logprobs: TOP_LOGPROBS };
}

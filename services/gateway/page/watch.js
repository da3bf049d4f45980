// Follows the mesh: one stream of snapshots while the page is visible, opened again whenever it breaks. Draws nothing.

import { ApiError, events, request } from "./api.js";

const PAUSE_MS = 1000;

export class Watch extends EventTarget {
  /** "connecting", "open", "lost", "denied" (no valid key) or "forbidden" (not an operator's key). */
  state = "connecting";
  /** What went wrong, for people. */
  problem = "";
  snapshot = null;

  constructor() {
    super();
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Connects; also with another key. */
  restart() {
    this._abort?.abort();
    if (document.visibilityState === "visible") this._follow((this._abort = new AbortController()).signal);
  }

  async _follow(signal) {
    while (!signal.aborted) {
      try {
        const response = await request("mesh/events", { signal });
        for await (const { data } of events(response, signal)) {
          if (data === undefined) continue;
          this.snapshot = JSON.parse(data);
          this._enter("open", "");
        }
        this._enter("lost", "the gateway closed the connection");
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError && [401, 403].includes(error.status)) {
          this._enter(error.status === 401 ? "denied" : "forbidden", error.message);
          return;
        }
        this._enter("lost", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }

  _enter(state, problem) {
    this.state = state;
    this.problem = problem;
    this.dispatchEvent(new Event("change"));
  }
}

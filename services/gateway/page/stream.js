// One answer as it arrives, the same for chats and texts. A broken stream is resumed with the same id and seed.

import { ApiError, Unreachable, events, request } from "./api.js";

const PATHS = { chat: "v1/chat/completions", text: "v1/completions" };
const PATIENCE_MS = 60_000;
const PAUSE_MS = 500;
const RETRYABLE = new Set(["shutting_down", "no_scheduler", "no_worker", "worker_lost"]);

/** What has arrived of an answer. */
export class Answer {
  text = "";
  /** Each {text, logprob, top: [{text, logprob}]}; empty unless log-probabilities were asked for. */
  tokens = [];
  /** Number of tokens so far. */
  count = 0;
  finish = null;
  stopReason = null;
  receipt = null;
  /** Milliseconds from the request to the first token, and to the end, as this page measured them. */
  firstMs = null;
  endMs = null;

  add(choice, kind) {
    this.text += (kind === "chat" ? choice.delta?.content : choice.text) ?? "";
    this.count += choice.token_ids?.length ?? 0;
    this.tokens.push(...tokensOf(choice.logprobs, kind));
    this.finish = choice.finish_reason ?? this.finish;
    this.stopReason = choice.stop_reason ?? this.stopReason;
  }
}

function tokensOf(logprobs, kind) {
  if (!logprobs) return [];
  if (kind === "chat") {
    return logprobs.content.map((entry) => ({
      text: entry.token,
      logprob: entry.logprob,
      top: entry.top_logprobs.map((top) => ({ text: top.token, logprob: top.logprob })),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([top, logprob]) => ({ text: top, logprob })),
  }));
}

/**
 * Streams the answer to a request and calls `notify(answer, problem)` as it grows. -> the whole answer.
 *
 * While the gateway does not answer, the request is sent again with its id and seed: it joins the running generation, or
 * produces the same tokens again. `problem` says so meanwhile. Throws ApiError, Unreachable and AbortError.
 */
export async function answer(kind, body, signal, notify) {
  const began = performance.now();
  let lostAt = null;
  let shown = 0;
  for (;;) {
    const attempt = new Answer();
    try {
      for await (const choice of choices(kind, body, signal, attempt)) {
        attempt.add(choice, kind);
        lostAt = null;
        if (attempt.count) attempt.firstMs ??= performance.now() - began;
        if (attempt.text.length < shown) continue; // A resumed answer repeats what is shown already.
        shown = attempt.text.length;
        notify(attempt, "");
      }
      attempt.endMs = performance.now() - began;
      return attempt;
    } catch (error) {
      lostAt ??= performance.now();
      const again = error instanceof Unreachable || (error instanceof ApiError && RETRYABLE.has(error.code));
      if (!again || signal.aborted || performance.now() - lostAt > PATIENCE_MS) throw error;
      notify(null, `${error.message}: trying again`);
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      if (signal.aborted) throw error;
    }
  }
}

async function* choices(kind, body, signal, attempt) {
  const response = await request(PATHS[kind], { body, signal });
  for await (const { data, comment } of events(response, signal)) {
    if (comment?.startsWith("receipt ")) attempt.receipt = JSON.parse(comment.slice(8));
    if (data === undefined) continue;
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(0, event.error);
    yield* event.choices;
  }
  throw new Unreachable("the gateway closed the connection");
}

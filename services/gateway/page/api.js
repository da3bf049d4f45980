// Requests to the gateway: the key, errors, server-sent events. Knows no view.

const KEY = "weft-api-key";

/** The API key of this tab; empty without one. */
export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** An error that the gateway answered with. `status` is 0 for one that ended a stream. */
export class ApiError extends Error {
  constructor(status, error = {}) {
    super(error.message ?? `the gateway answered with status ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? "";
    this.retryAfterS = 0;
  }
}

/** The gateway did not answer, or the connection broke. */
export class Unreachable extends Error {}

/** The response to a request; `path` is relative to the page. Throws ApiError and Unreachable. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body) headers["content-type"] = "application/json";
  const options = { headers, signal, cache: "no-store", method: body ? "POST" : "GET" };
  if (body) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("the gateway does not answer");
  }
  if (response.ok) return response;
  const failed = new ApiError(response.status, await errorOf(response));
  failed.retryAfterS = Number(response.headers.get("retry-after") ?? 0);
  throw failed;
}

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return undefined;
  }
}

export const json = async (path, options) => (await request(path, options)).json();

/** The events of a stream, as {data} or {comment}. Throws Unreachable if the connection breaks. */
export async function* events(response, signal) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new Unreachable("the connection to the gateway broke");
      }
      if (chunk.done) return;
      buffer += decoder.decode(chunk.value, { stream: true });
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data: ")) yield { data: block.slice(6) };
        else if (block.startsWith(": ")) yield { comment: block.slice(2) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A random number below 2 to the power of 48, which JSON carries exactly. */
export function randomSeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (high % 65536) * 2 ** 32 + low;
}

export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Calls of the server's API. Every address is relative to this file, so a path prefix in front of the server works.
// @ts-check

/** The address of the server's root, with a slash at its end. */
export const ROOT = new URL("../../", import.meta.url).href;

/** @param {string} path such as v1/models */
export const address = (path) => new URL(path.replace(/^\/+/, ""), ROOT).href;

/** A part of an address without its escapes. @param {string} text */
export function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // not an escape: the text as it is
  }
}

/** Text for a path's segment. @param {string} name */
export const segment = (name) => name.split("/").map(encodeURIComponent).join("/");

const NEXT = {
  0: "Check that the server runs and that its address is right, then try again.",
  401: "Sign in with an API key. On the server's machine, 'inferd keys create --tenant NAME --scopes admin' makes one.",
  403: "Sign in with a key that has the scope, or ask the operator for one.",
  404: "Reload the page: the list may have changed.",
  429: "Wait for the time in Retry-After, or ask the operator for a larger quota.",
  503: "Wait a moment and try again. The page Models shows the states of the replicas.",
};

/** A call that failed, with the next step. */
export class ApiError extends Error {
  /** @param {number} status 0: no answer @param {string} message @param {string} [param] @param {string} [requestId] */
  constructor(status, message, param, requestId) {
    super(message);
    this.status = status;
    this.param = param || "";
    this.requestId = requestId || "";
    this.title = status ? `Status ${status}.` : "No answer.";
    this.next = NEXT[status] || "";
  }
}

/** The message of an error body, in any of the server's dialects. @param {any} body @param {string} text */
export function messageOf(body, text) {
  const error = body && body.error;
  if (error && typeof error === "object") return { message: String(error.message ?? text), param: error.param };
  if (typeof error === "string") return { message: error, param: "" };
  if (body && typeof body.message === "string") return { message: body.message, param: "" };
  return { message: text || "The answer has no text.", param: "" };
}

/** Called when a call is refused because nobody is signed in. */
export const onRefused = { call: () => {} };

/**
 * Send a request. Raises ApiError for every status outside of 200 to 299.
 * @param {string} method @param {string} path
 * @param {{body?: any, raw?: BodyInit, headers?: Record<string, string>, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
export async function send(method, path, options = {}) {
  const headers = { ...(options.headers || {}) };
  let body = options.raw;
  if (options.body !== undefined) {
    body = JSON.stringify(options.body);
    headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(address(path), { method, headers, body, signal: options.signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server did not answer.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let parsed = null;
  try {
    parsed = JSON.parse(text);
  } catch {
    // not JSON: the text itself is the message
  }
  if (response.status === 401) onRefused.call();
  const { message, param } = messageOf(parsed, text.slice(0, 500));
  throw new ApiError(response.status, message, param, response.headers.get("x-request-id") || "");
}

/** @param {string} method @param {string} path @param {any} [body] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function call(method, path, body, signal) {
  const response = await send(method, path, { body, signal });
  return response.status === 204 ? null : response.json();
}

/** @param {string} path @returns {Promise<any>} */
export const get = (path) => call("GET", path);

/**
 * The events of a stream of server-sent events: the text of each event's data.
 * @param {Response} response @returns {AsyncGenerator<string>}
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop() || "";
    for (const block of blocks) {
      const data = block
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).replace(/^ /, ""));
      if (data.length) yield data.join("\n");
    }
  }
}

/** A command that sends the same request. @param {string} method @param {string} path @param {any} [body] */
export function curl(method, path, body) {
  const lines = [`curl -sS ${method === "GET" ? "" : `-X ${method} `}${quoted(address(path))}`];
  lines.push(`-H "authorization: Bearer $INFERD_API_KEY"`);
  if (body !== undefined) lines.push(`-H 'content-type: application/json'`, `-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

/** A word of a shell. @param {string} text */
export const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

// The server as the console sees it: the same routes that every other client uses. Where the server wants an API key
// the browser has asked for it with the page, and sends it along.

import { readEvents } from "./sse.js";

/** What the server, or the network, said no with. `status` 0: nothing answered. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`.trim();
  try {
    const body = await response.json();
    message = body.error?.message ?? body.error ?? message;
  } catch {
    // No JSON: the status line says what there is to say.
  }
  return new ApiError(response.status, String(message), response.headers.get("Retry-After"));
}

export const getJson = async (path) => (await request(path)).json();
export const models = async () => (await getJson("v1/models")).data;
export const memory = () => getJson("sysmem");

/** Yields the chunks of a streamed reply until it ends; one with `smoe` in it says where the request stands. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, include_progress: true } }),
    signal,
  });
  let ended = false;
  try {
    for await (const { data } of readEvents(response.body)) {
      if (data === "[DONE]") {
        ended = true;
        return;
      }
      const value = JSON.parse(data);
      if (value.error)
        throw new ApiError(Number(value.error.code) || 500, value.error.message ?? "the server reports an error");
      yield value;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "the connection to the server broke off");
  }
  if (!ended) throw new ApiError(0, "the server ended the reply without finishing it");
}

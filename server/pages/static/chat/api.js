import { events } from "./sse.js";

/** A request that the server refused, or that did not reach it (status 0). `param` is the field at fault, if any. */
export class RequestFailed extends Error {
  constructor(status, message, { param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

/** Return the served models. */
export async function listModels(key) {
  const response = await ask("v1/models", { headers: headers(key), cache: "no-store" });
  return (await response.json()).data;
}

/** Return why the model can't chat; null if it can, or if this can't be known. */
export async function chatRefusal(key) {
  try {
    const response = await ask("tokenizer_info", { headers: headers(key), cache: "no-store" });
    return (await response.json()).chat_template ? null : "no chat template";
  } catch (error) {
    if (!(error instanceof RequestFailed)) throw error;
    return error.status === 400 ? "no tokenizer" : null;
  }
}

/** Yield the chunks of an answer as they arrive. Aborting `signal` ends the request on the server too. */
export async function* streamChat(body, key, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new RequestFailed(response.status, chunk.error.message, chunk.error);
      yield chunk;
    }
  } catch (error) {
    throw unreachable(error, "The connection ended before the answer was complete.");
  }
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw unreachable(error, "The server can't be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = response.headers.get("Retry-After");
  let error = { message: `the server answers ${response.status} ${response.statusText}` };
  if (response.headers.get("Content-Type")?.startsWith("application/json")) error = (await response.json()).error ?? error;
  return new RequestFailed(response.status, error.message, { ...error, retryAfter });
}

/** fetch and its streams report a broken connection as TypeError; other errors are returned as they are. */
function unreachable(error, message) {
  return error instanceof TypeError ? new RequestFailed(0, message) : error;
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

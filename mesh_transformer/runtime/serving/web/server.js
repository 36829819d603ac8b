// The server of this page: its model, requests and streams.

export const server = { model: null, context: null, key: "" };
const WARMING_UP = "the server is warming up: what you send now is answered when it is ready";

// An answer with an error status, or an error in a stream.
class ServerError extends Error {
  constructor(status, error) {
    super(error?.message ?? "the server answered " + status);
    Object.assign(this, { status, code: error?.code, param: error?.param });
  }
}

// The prompt, or the prompt and max_tokens, are longer than the context.
export const exceedsContext = error => error.code === "context_length_exceeded";

async function request(path, body = null, signal = null) {
  const headers = { "Content-Type": "application/json", ...(server.key ? { Authorization: "Bearer " + server.key } : {}) };
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal };
  const response = await fetch(path, options).catch(error => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer: does it run?");
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(response.status, answer?.error);
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

// Learn the name of the model and its context.
export async function findModel(signal = null) {
  const found = (await (await request("v1/models", null, signal)).json()).data[0];
  Object.assign(server, { model: found.id, context: found.max_model_len });
  document.dispatchEvent(new CustomEvent("model", { detail: found }));
}

// Wait for the end of the warm-up: before it, the server does not know its context.
export async function ready(say, signal = null) {
  if (!server.context) await findModel(signal);
  while (!server.context) {
    say(WARMING_UP);
    await pause(1, signal);
    await findModel(signal);
  }
}

// Wait for the server of a page that was just opened. A browser aborts requests when the computer's network changes.
export async function reached(say) {
  for (;;) {
    try {
      return await ready(say);
    } catch (error) {
      if (error.status) throw error;
      say(error.message);
      await pause(1);
    }
  }
}

// The response to a request. During a warm-up it waits and asks again.
export async function post(path, body, say, signal) {
  for (;;) {
    try {
      return await request(path, body, signal);
    } catch (error) {
      if (error.code !== "warming_up") throw error;
      say(WARMING_UP);
      await pause(1, signal);
    }
  }
}

// The events of a stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch(error => {
      throw error.name === "AbortError" ? error : new Error("the connection to the server was lost");
    });
    if (done) return;
    buffer += value;
    const parts = buffer.split(/\r?\n\r?\n/);
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(200, event.error);
      yield event;
    }
  }
}

// One request at a time: its start, its answer and its end.

import { refused } from "./access.js";
import { at } from "./dom.js";
import { events, post, ready } from "./server.js";
import { hideProgress, Progress, say } from "./status.js";

const WAITING = "waiting for the first token";
let running = null;

export const isRunning = () => running !== null;
export const stop = () => running?.abort();

function busy(on) {
  for (const id of ["go", "send", "new", "other", "forget-all", "chats", "rename", "remove", "import"]) at(id).disabled = on;
  at("stop").disabled = at("halt").disabled = !on;
  at("messages").setAttribute("aria-busy", on);
  document.dispatchEvent(new CustomEvent("busy", { detail: on }));
}

// Do a request, and report its end. `offers(error)` lists what can be done about an error, or after a stop.
export async function run(work, offers = () => []) {
  if (running) return;
  running = new AbortController();
  busy(true);
  hideProgress();
  say(WAITING);
  try {
    await ready(say, running.signal);
    say(WAITING);
    await work();
  } catch (error) {
    if (error.name === "AbortError") say("stopped", { offers: offers(error) });
    else if (error.status === 401) refused();
    else say(error.message, { bad: true, offers: offers(error) });
  } finally {
    running = null;
    busy(false);
  }
}

// The answer to a request of the work of `run`.
export const ask = (path, request) => post(path, request, say, running.signal);

// The choices of a streamed answer, one after the other. Its end is reported by `ended(progress, reason)`.
export async function* choices(path, request, ended) {
  const progress = new Progress();
  let reason = null;
  try {
    for await (const event of events(await ask(path, request))) {
      if (event.usage) {
        if (!progress.usage) say("streaming");
        progress.take(event.usage);
      }
      for (const choice of event.choices) {
        yield choice;
        reason = choice.finish_reason || reason;
      }
    }
    ended(progress, reason);
  } finally {
    progress.end();
  }
}

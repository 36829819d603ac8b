// The lines below the text: what happens, what can be done about it, and the progress of an answer.

import { at, make, number, tokens } from "./dom.js";
import { server } from "./server.js";

const SHOW_MS = 150;

// Show a line, and buttons for what can be done: [label, function].
export function say(message, { bad = false, offers = [] } = {}) {
  at("status").textContent = message;
  at("status").className = bad ? "bad" : "";
  const buttons = offers.map(([label, act]) => {
    const button = make("button", { type: "button", className: "small", textContent: label });
    button.addEventListener("click", () => { at("offers").hidden = true; act(); });
    return button;
  });
  at("offers").replaceChildren(...buttons);
  at("offers").hidden = !buttons.length;
}

// Clear the line if it still has this text.
export function unsay(message) {
  if (at("status").textContent === message) say("");
}

const perSecond = rate => rate < 10 ? rate.toFixed(1) : number(Math.round(rate));

function showContext(used) {
  at("context").hidden = !server.context;
  Object.assign(at("used"), { max: server.context, high: 0.9 * server.context, value: used });
  at("used-words").textContent = number(used) + " of " + tokens(server.context) + " of the context";
}

export function hideProgress() {
  at("progress").hidden = true;
}

// The progress of one answer.
export class Progress {
  constructor() {
    this.usage = null;
    this.began = performance.now();
    at("progress").hidden = false;
    at("context").hidden = true;
    at("rate").textContent = "";
    // a long prompt, or a queue, takes seconds
    this.timer = setInterval(() => { at("rate").textContent = Math.round((performance.now() - this.began) / 1000) + " s"; }, 1000);
  }

  // Take the usage of an event.
  take(usage) {
    const now = performance.now();
    if (!this.usage) {
      clearInterval(this.timer);
      Object.assign(this, { first: usage, firstAt: now, shownAt: -Infinity });
    }
    Object.assign(this, { usage, at: now });
    if (now - this.shownAt < SHOW_MS) return;
    this.shownAt = now;
    this.show();
  }

  // Tokens per second since the first ones. The computation of the prompt does not count.
  get rate() {
    const count = this.usage.completion_tokens, later = count - this.first.completion_tokens;
    const [made, ms] = later > 0 ? [later, this.at - this.firstAt] : [count, this.at - this.began];
    return 1000 * made / Math.max(ms, 1);
  }

  show() {
    const count = this.usage.completion_tokens;
    at("rate").textContent = tokens(count) + (count > 1 ? ", " + perSecond(this.rate) + " tokens/s" : "");
    showContext(this.usage.total_tokens);
  }

  end() {
    clearInterval(this.timer);
    at("rate").textContent = "";
    if (this.usage) showContext(this.usage.total_tokens);
    else hideProgress();
  }

  get full() {
    return this.usage.total_tokens >= server.context;
  }

  // The whole answer in words.
  summary(reason, atStop) {
    const count = this.usage.completion_tokens, parts = [tokens(count)];
    if (count > 1) parts.push(perSecond(this.rate) + "/s");
    if (reason === "stop") parts.push(atStop);
    else parts.push(this.full ? "stopped at the end of the context (" + tokens(server.context) + ")" : "stopped at max tokens");
    return parts.join(", ");
  }
}

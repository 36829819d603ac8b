// The mode of completions: a prompt, and the tokens after it with their probabilities.

import { at, make, tokens } from "./dom.js";
import { ask, choices, isRunning, run } from "./generation.js";
import { keep, kept } from "./kept.js";
import { exceedsContext, server } from "./server.js";
import { body } from "./settings.js";
import { say } from "./status.js";

const PATH = "v1/completions";
const text = at("text"), tip = at("tip"), prompt = at("prompt");
// an explicit number of tokens that does not fit is refused by the server; the one of a new page is lowered
const DEFAULT = at("controls").elements.max_tokens.defaultValue;

export function restore() {
  prompt.value = kept("prompt") ?? prompt.defaultValue;
}

// The number of tokens that fit in the context after a prompt. The server caches the prompt for the completion.
async function roomAfter(prompt) {
  try {
    const response = await ask(PATH, { model: server.model, prompt, max_tokens: 0 });
    return server.context - (await response.json()).usage.prompt_tokens;
  } catch (error) {
    if (exceedsContext(error)) return 0;
    throw error;
  }
}

function percent(logprob) {
  const p = 100 * Math.exp(logprob);
  return (p >= 10 ? p.toFixed(0) : p >= 0.1 ? p.toFixed(1) : p.toExponential(0)) + " %";
}

function addToken(piece, logprob, alternatives) {
  // Tab skips the tokens; arrow keys move between them
  const token = make("span", { textContent: piece, tabIndex: -1 });
  token.setAttribute("aria-describedby", "tip");
  const lines = Object.entries(alternatives || {}).sort((a, b) => b[1] - a[1])
    .map(([other, value]) => percent(value).padStart(8) + "  " + JSON.stringify(other));
  token.dataset.p = percent(logprob);
  token.dataset.tip = JSON.stringify(piece) + "  " + percent(logprob) + (lines.length ? "\n\n" + lines.join("\n") : "");
  text.append(token);
}

function show(choice) {
  const logprobs = choice.logprobs;
  // tokens with incomplete characters are shown together
  if (!logprobs || logprobs.tokens.join("") !== choice.text) {
    const values = logprobs ? logprobs.token_logprobs : [];
    if (choice.text && values.length) {
      addToken(choice.text, values.reduce((sum, value) => sum + value, 0), values.length === 1 ? logprobs.top_logprobs[0] : null);
    } else if (choice.text) text.append(choice.text);
    return;
  }
  logprobs.tokens.forEach((piece, i) => addToken(piece, logprobs.token_logprobs[i], logprobs.top_logprobs && logprobs.top_logprobs[i]));
}

function setPrompt(value) {
  prompt.value = value;
  keep("prompt", value);
}

function begin(start) {
  setPrompt(start);
  text.replaceChildren(make("span", { className: "prompt", textContent: start }));
}

const ended = (progress, reason) => say(progress.summary(reason, "stopped at a stop text or the end of text"));

// Complete the prompt, or with `more` the text. What the context has no room for is not asked for.
export function complete(more = false) {
  if (!isRunning() && !more) begin(prompt.value);
  return run(async () => {
    const request = { ...body(), prompt: more ? text.textContent : prompt.value, logprobs: 5 };
    const chosen = request.max_tokens !== Number(DEFAULT);
    if (more || !chosen) {
      const room = await roomAfter(request.prompt);
      if (room < 1) return full(request.prompt);
      request.max_tokens = Math.min(request.max_tokens || room, room);
    }
    if (more) begin(request.prompt);
    for await (const choice of choices(PATH, request, ended)) show(choice);
  });
}

// The context has no room after a text: the reader may go on with its end.
function full(words) {
  const slide = () => run(async () => {
    const { tokens: ids } = await (await ask("tokenize", { model: server.model, prompt: words, add_special_tokens: false })).json();
    const end = { model: server.model, tokens: ids.slice(-Math.max(1, server.context >> 1)) };
    const { prompt: rest } = await (await ask("detokenize", end)).json();
    // a character may begin in what is dropped
    begin(rest.replace(/^\ufffd+/, ""));
    say("");
  }).then(() => complete());
  say("the context is full (" + tokens(server.context) + "): shorten the text, or go on with its second half", { offers: [["Drop the beginning and go on", slide]] });
}

export function clear() {
  text.replaceChildren();
  at("more").disabled = true;
}

function goTo(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tokens = step ? text.querySelectorAll("span[data-p]") : [];
  if (!tokens.length) return;
  const next = [...tokens].indexOf(document.activeElement) + step;
  tokens[Math.max(0, Math.min(next, tokens.length - 1))].focus();
  event.preventDefault();
}

function showTip(event) {
  const token = event.target.closest && event.target.closest("span[data-tip]");
  if (!token) { tip.style.display = "none"; return; }
  tip.textContent = token.dataset.tip;
  tip.style.display = "block";
  const box = token.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4)) + "px";
  const below = box.bottom + 4;
  tip.style.top = (below + tip.offsetHeight > innerHeight ? Math.max(4, box.top - tip.offsetHeight - 4) : below) + "px";
}

document.addEventListener("busy", event => { at("more").disabled = event.detail || !text.querySelector("span[data-p]"); });
prompt.addEventListener("input", () => keep("prompt", prompt.value));
at("more").addEventListener("click", () => complete(true));
text.addEventListener("keydown", goTo);
for (const kind of ["mouseover", "focusin", "click"]) text.addEventListener(kind, showTip);
for (const kind of ["mouseleave", "focusout"]) text.addEventListener(kind, () => { tip.style.display = "none"; });

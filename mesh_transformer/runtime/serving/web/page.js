// The page: it chooses the mode, and connects keys and buttons.

import { accepted, forgetKey, refused, restoreKey } from "./access.js";
import * as chat from "./chat.js";
import * as completions from "./completions.js";
import { at } from "./dom.js";
import { stop } from "./generation.js";
import { forgetAll, keep, kept, onRefusal } from "./kept.js";
import { reached } from "./server.js";
import * as settings from "./settings.js";
import { hideProgress, say, unsay } from "./status.js";

const REFUSALS = {
  full: "This browser's storage is full: what is new stays in this tab alone. Export the chats, then delete some.",
  off: "This browser keeps nothing: its storage is switched off.",
};
let chatting = false;

// Show the chat or the completions.
function view(asChat) {
  chatting = asChat;
  at("chat").hidden = at("system").hidden = !asChat;
  at("completions").hidden = asChat;
  document.title = at("title").textContent = asChat ? "Chat" : "Completions";
  at("other").textContent = asChat ? "Completions" : "Chat";
  history.replaceState(null, "", asChat ? "#chat" : "#completions");
  keep("mode", asChat ? "chat" : "completions");
  settings.setMode(asChat ? "chat" : "completions");
  at(asChat ? "message" : "prompt").focus();
}

function switchMode() {
  view(!chatting);
  hideProgress();
  say("");
}

// Until the server says whether the model has chats, the page shows what it showed last.
const lastMode = () => location.hash.slice(1) || kept("mode");

const submit = () => chatting ? chat.send() : completions.complete();

document.addEventListener("model", ({ detail: found }) => {
  const asked = !at("access").hidden;
  at("model").textContent = found.id;
  accepted();
  if (found.chat === at("other").hidden) {
    at("other").hidden = !found.chat;
    view(found.chat && lastMode() !== "completions");
  } else if (chatting && !found.chat) view(false);
  else if (asked) at(chatting ? "message" : "prompt").focus();
});

function forget() {
  forgetAll();
  forgetKey();
  for (const part of [settings, completions, chat]) part.restore();
  completions.clear();
  hideProgress();
  say("this browser keeps nothing of this page now");
}

at("other").addEventListener("click", switchMode);
at("forget-all").addEventListener("click", () => {
  say("Forget all chats, the texts, the settings and the API key?", { offers: [["Forget all", forget], ["Keep them", () => say("")]] });
});
for (const id of ["stop", "halt"]) at(id).addEventListener("click", stop);
at("controls").addEventListener("submit", event => { event.preventDefault(); submit(); });
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.defaultPrevented) { event.preventDefault(); submit(); }
  if (event.key === "Escape" && !event.defaultPrevented) stop();
});

async function start() {
  const note = at("kept").firstElementChild, notes = { "": note.textContent, ...REFUSALS };
  onRefusal(reason => { note.textContent = notes[reason]; note.className = reason && "bad"; });
  restoreKey();
  for (const part of [settings, completions, chat]) part.restore();
  if (lastMode() === "chat") view(true);
  let words = "";
  try {
    await reached(message => { words = message; say(message); });
    unsay(words);
  } catch (error) {
    if (error.status === 401) refused();
    else say(error.message, { bad: true });
  }
}

start();

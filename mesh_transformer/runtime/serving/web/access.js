// The API key: the form that asks for it, and the browser's copy.

import { at } from "./dom.js";
import { keepKey, keptKey } from "./kept.js";
import { findModel, server } from "./server.js";
import { say } from "./status.js";

// the key of the request that runs
let trying = null;
const ABSENT = "This server needs an API key. Type it here.";
const WRONG = "The server refused this API key. Check it and type it again.";
const UNREADABLE = "An API key has only letters, digits and signs of ASCII. Check it and type it again.";

function show(note) {
  at("access").hidden = false;
  at("access-note").textContent = note;
  at("key").focus();
  at("access").scrollIntoView({ block: "nearest" });
}

function showKept() {
  at("kept-key").hidden = at("forget-key").hidden = !keptKey();
}

// The server answered 401.
export function refused() {
  say("");
  show(server.key ? WRONG : ABSENT);
}

async function tryKey() {
  const key = at("key").value.trim();
  // Enter in the field is a change and a submission
  if (key && key === trying) return;
  if (!/^[\x21-\x7e]*$/.test(key)) return show(UNREADABLE);
  if (!key) return show(ABSENT);
  server.key = trying = key;
  try {
    await findModel();
  } catch (error) {
    if (error.status === 401) refused();
    else say(error.message, { bad: true });
  } finally {
    trying = null;
  }
}

// The server answered with this key: the browser keeps it.
export function accepted() {
  if (server.key) keepKey(server.key);
  at("access").hidden = true;
  showKept();
}

export function forgetKey() {
  keepKey("");
  server.key = at("key").value = "";
  showKept();
}

export function restoreKey() {
  server.key = at("key").value = keptKey();
  showKept();
}

at("access").addEventListener("submit", event => { event.preventDefault(); tryKey(); });
at("key").addEventListener("change", tryKey);
at("forget-key").addEventListener("click", () => { forgetKey(); say("this browser keeps no key now"); });

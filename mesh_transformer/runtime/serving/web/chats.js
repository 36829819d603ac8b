// The chats that the browser keeps, and files of them. A chat is {id, name, messages, version, changed}. A tab has a copy
// of its open chat. `version` is what the tab has seen last: if another tab has changed the chat meanwhile, this tab's
// copy becomes a chat of its own, so that nothing is lost.

import { keepHere, keptHere, share, shared, sharedNames, unshare } from "./kept.js";

const START = "chat.", MOST_NAME = 60, MOST_BYTES = 20_000_000;
const ROLES = ["user", "assistant"];
const draw = () => crypto.getRandomValues(new Uint32Array(2)).join("");

const isMessage = message => ROLES.includes(message?.role) && typeof message.content === "string";
const valid = chat => typeof chat?.id === "string" && Array.isArray(chat.messages);

export const fresh = (name = "", messages = []) => ({ id: draw(), name, messages, version: null, changed: 0 });

function read(chat) {
  return valid(chat) ? { ...fresh(String(chat.name ?? "")), ...chat, messages: chat.messages.filter(isMessage) } : null;
}

// The name of a chat, or the beginning of its first message.
export function nameOf(chat) {
  const first = chat.messages.find(({ role }) => role === "user")?.content.trim().split("\n")[0] ?? "";
  const name = chat.name || first || "New chat";
  return name.length > MOST_NAME ? name.slice(0, MOST_NAME - 1) + "…" : name;
}

// All chats, the newest first.
export function all() {
  return sharedNames(START).map(name => read(shared(name))).filter(chat => chat).sort((a, b) => b.changed - a.changed);
}

export const find = id => read(shared(START + id));

// Keep a chat. Returns it as it is kept: with another id and name if another tab has changed it. The browser may refuse
// to keep it; this tab has it then.
export function store(chat) {
  const known = shared(START + chat.id);
  if (known && known.version !== chat.version) chat = { ...chat, id: draw(), name: nameOf(chat) + " (2)" };
  const next = { ...chat, version: draw(), changed: Date.now() };
  const isKept = (next.messages.length > 0 || next.name !== "") && share(START + next.id, next);
  return opened(isKept ? next : chat);
}

// Note which chat this tab has open.
export function opened(chat) {
  keepHere("open", chat);
  return chat;
}

export const remove = id => unshare(START + id);

// The chat with which a tab begins: its own, or the newest. A page of an earlier version kept one chat, as messages.
export function restore() {
  const older = keptHere("chat") ?? (sharedNames(START).length ? null : shared("chat"));
  if (Array.isArray(older)) {
    keepHere("chat", null);
    unshare("chat");
    const messages = older.filter(isMessage);
    if (messages.length) return store(fresh("", messages));
  }
  const chat = read(keptHere("open")) ?? all()[0] ?? fresh();
  return chat.messages.length ? opened(chat) : chat;
}

// A file with a chat on each line, as `mesh-transformer prepare --instructions` reads it.
export function toFile(chats) {
  const lines = chats.filter(({ messages }) => messages.length)
    .map(chat => JSON.stringify({ name: nameOf(chat), messages: chat.messages.map(({ role, content }) => ({ role, content })) }));
  return new Blob(lines.map(line => line + "\n"), { type: "application/jsonl" });
}

// The chats of such a file.
export async function fromFile(file) {
  if (file.size > MOST_BYTES) throw new Error(file.name + " has over " + MOST_BYTES / 1e6 + " MB: split it");
  const lines = (await file.text()).split("\n").filter(line => line.trim());
  return lines.map((line, i) => {
    const where = file.name + ", line " + (i + 1) + ": ";
    let chat;
    try {
      chat = JSON.parse(line);
    } catch {
      throw new Error(where + "this is not JSON; a file of chats has {\"messages\": [...]} on each line");
    }
    const messages = Array.isArray(chat?.messages) ? chat.messages.filter(message => message?.role !== "system") : [];
    if (!messages.length || !messages.every(isMessage)) {
      throw new Error(where + "expected messages, each with the role user or assistant and a text as content");
    }
    return fresh(typeof chat.name === "string" ? chat.name : "", messages.map(({ role, content }) => ({ role, content })));
  });
}

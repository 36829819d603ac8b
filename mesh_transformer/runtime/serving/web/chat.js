// The mode of chats.

import { at, copy, make } from "./dom.js";
import { ask, choices, isRunning, run } from "./generation.js";
import { keep, kept } from "./kept.js";
import { MarkdownView } from "./markdown.js";
import { exceedsContext, server } from "./server.js";
import { body, systemMessage } from "./settings.js";
import { hideProgress, say } from "./status.js";

const PATH = "v1/chat/completions";
const NAMES = { user: "You", assistant: "Model" };
const DROP = "Drop the oldest messages";
const log = at("messages"), field = at("message");
// {role, content, dropped}: a dropped message stays in the page, and is not sent to the model
let chat = [];
// the number of the message that is being edited
let edited = null;
// the Markdown of each message of the model, so that it is made once
const views = new WeakMap();
// the element of each message, and what it was made from
const articles = new WeakMap();

const isMessage = message => typeof message?.role === "string" && typeof message.content === "string";

export function restore() {
  const old = kept("chat");
  chat = Array.isArray(old) ? old.filter(isMessage) : [];
  field.value = kept("draft") ?? "";
  draw();
}

const save = () => keep("chat", chat);

function setField(value) {
  field.value = value;
  keep("draft", value);
}

// The elements

function act(name, label) {
  const button = make("button", { type: "button", textContent: label });
  button.dataset.act = name;
  return button;
}

function actions(message, i) {
  const acts = [act("copy", "Copy"), act("edit", "Edit"), act("delete", "Delete")];
  if (i === chat.length - 1) acts.push(act("regenerate", message.role === "user" ? "Answer" : "Regenerate"));
  return make("div", { className: "acts" }, ...acts);
}

function editor(message) {
  const words = make("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
  words.setAttribute("aria-label", "Edited message");
  const acts = [act("save", "Save"), act("cancel", "Cancel")];
  if (message.role === "user") acts.unshift(act("again", "Save and ask again"));
  return [words, make("div", { className: "acts" }, ...acts)];
}

function contentOf(message) {
  if (message.role !== "assistant") return make("div", { className: "content" }, make("p", { className: "plain", textContent: message.content }));
  if (!views.has(message)) views.set(message, new MarkdownView());
  const view = views.get(message);
  view.show(message.content);
  return view.element;
}

function articleOf(message, i, complete = true) {
  const source = JSON.stringify([message, i === edited, i === chat.length - 1, complete]);
  if (articles.get(message)?.source === source) return articles.get(message).element;
  const name = (NAMES[message.role] ?? message.role) + (message.dropped ? " (not sent to the model any more)" : "");
  const element = make("article", { className: message.role }, make("h2", { textContent: name }));
  element.classList.toggle("dropped", Boolean(message.dropped));
  element.classList.toggle("editing", i === edited);
  element.append(...(i === edited ? editor(message) : [contentOf(message), ...(complete ? [actions(message, i)] : [])]));
  articles.set(message, { element, source });
  return element;
}

const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
const toEnd = () => { log.scrollTop = log.scrollHeight; };

// Show all messages. An element that stays is not touched: a screen reader would read it again.
function draw() {
  const follow = atEnd(), elements = chat.map((message, i) => articleOf(message, i));
  for (const element of [...log.children]) if (!elements.includes(element)) element.remove();
  elements.forEach((element, i) => { if (log.children[i] !== element) log.insertBefore(element, log.children[i] ?? null); });
  if (follow) toEnd();
  if (edited !== null) log.querySelector(".editing textarea").focus();
}

// A function that does `work` soon: at most once a frame, and less often if it takes long.
function paced(work) {
  let timer = null, pause = 16;
  const now = () => {
    const began = performance.now();
    work();
    timer = null;
    pause = Math.max(16, 5 * (performance.now() - began));
  };
  return () => { timer ??= setTimeout(now, pause); };
}

// The answers

const sent = messages => messages.filter(message => !message.dropped).map(({ role, content }) => ({ role, content }));

function withSystem(messages) {
  const system = systemMessage();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

// Drop the fewest of the oldest messages so that the rest fits the context, and an answer after it. A chat begins with
// a message of the user.
async function makeRoom() {
  const asked = body(), left = chat.filter(message => !message.dropped);
  const starts = left.flatMap(({ role }, i) => i > 0 && role === "user" ? [i] : []);
  const fits = async (start, room) => {
    const response = await ask("tokenize", { model: server.model, messages: withSystem(sent(left.slice(start))) });
    return (await response.json()).count + room <= server.context;
  };
  // without max tokens, an answer gets a quarter of the context
  const room = asked.max_tokens ?? Math.ceil(server.context / 4);
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(starts[middle], room)) high = middle;
    else low = middle + 1;
  }
  const start = starts[Math.min(low, starts.length - 1)];
  if (start === undefined || (low === starts.length && !await fits(start, asked.max_tokens ?? 1))) {
    throw new Error("the last message alone is too long for the context: shorten it" + (asked.max_tokens ? ", or lower max tokens" : ""));
  }
  for (const message of left.slice(0, start)) message.dropped = true;
  draw();
}

// Ask for the next message.
//   giveBack: restores what was there before, if no message comes
//   again: does the same, with its argument true: after dropping messages
//   before: the chat that the reader can return to
function answer({ giveBack, again, dropping, before = null }) {
  const canDrop = chat.filter(message => !message.dropped && message.role === "user").length > 1;
  const undo = before ? [["Undo", () => { set(before); say(""); }]] : [];
  const offers = error => exceedsContext(error) && canDrop ? [[DROP, () => again(true)], ["New chat", newChat]] : undo;
  const ended = (progress, reason) => {
    const cut = reason === "length" && progress.full && canDrop ? [[DROP + " and answer again", () => regenerate({ dropping: true })]] : [];
    say(progress.summary(reason, "the answer is complete"), { offers: [...cut, ...undo] });
  };
  return run(async () => {
    const made = { role: "assistant", content: "" };
    let begun = false;
    const paint = paced(() => {
      // follow the answer, unless the reader has scrolled up
      const follow = atEnd();
      contentOf(made);
      if (follow) toEnd();
    });
    try {
      if (dropping) await makeRoom();
      const request = { ...body(), messages: withSystem(sent(chat)) };
      for await (const { delta } of choices(PATH, request, ended)) {
        made.content += delta.content ?? "";
        if (begun) paint();
        else {
          begun = true;
          chat.push(made);
          log.append(articleOf(made, chat.length - 1, false));
          toEnd();
        }
      }
    } finally {
      if (!begun) giveBack();
      save();
      draw();
    }
  }, offers);
}

export function send(dropping = false) {
  const content = field.value;
  if (isRunning() || !content.trim()) return;
  edited = null;
  chat.push({ role: "user", content });
  draw();
  toEnd();
  setField("");
  const giveBack = () => {
    chat.pop();
    // more may have been typed meanwhile
    setField([content, field.value].filter(text => text).join("\n"));
  };
  return answer({ giveBack, again: send, dropping });
}

// Answer the last message of the user again. `before` is the chat that the reader can return to.
function regenerate({ dropping = false, before = null } = {}) {
  if (isRunning()) return;
  const old = chat;
  if (chat.at(-1)?.role === "assistant") [chat, before] = [chat.slice(0, -1), before ?? chat];
  draw();
  toEnd();
  return answer({ giveBack: () => { chat = old; }, again: () => regenerate({ dropping: true, before }), dropping, before });
}

// Changes of the chat

function change(messages, words) {
  const before = chat;
  set(messages);
  say(words, { offers: [["Undo", () => { set(before); say(""); }]] });
}

function set(messages) {
  chat = messages;
  edited = null;
  save();
  draw();
  hideProgress();
  field.focus();
}

export function newChat() {
  if (chat.length) change([], "a new chat");
  else set([]);
}

function saveEdit(i, content, again) {
  const before = chat, changed = chat.with(i, { ...chat[i], content });
  if (!again) return change(changed, "the message is changed");
  set(changed.slice(0, i + 1));
  regenerate({ before });
}

async function copyFrom(button, text) {
  button.textContent = await copy(text) ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

const ACTS = {
  edit: i => { edited = i; draw(); },
  cancel: () => { edited = null; draw(); field.focus(); },
  save: (i, words) => saveEdit(i, words, false),
  again: (i, words) => saveEdit(i, words, true),
  delete: i => change(chat.toSpliced(i, 1), "the message is deleted"),
  regenerate: () => regenerate(),
};

function perform(name, article) {
  if (isRunning()) return;
  ACTS[name]([...log.children].indexOf(article), article.querySelector("textarea")?.value);
}

log.addEventListener("click", event => {
  const button = event.target.closest("button"), article = event.target.closest("article");
  if (!button) return;
  if (button.className === "copy-code") copyFrom(button, button.closest(".code").querySelector("code").textContent);
  else if (button.dataset.act === "copy") copyFrom(button, chat[[...log.children].indexOf(article)].content);
  else perform(button.dataset.act, article);
});
log.addEventListener("keydown", event => {
  const article = event.target.matches(".editing textarea") && event.target.closest("article");
  const name = event.key === "Escape" ? "cancel" : event.key === "Enter" && (event.ctrlKey || event.metaKey) ? "save" : null;
  if (!article || !name) return;
  event.preventDefault();
  perform(name, article);
});
field.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
field.addEventListener("input", () => keep("draft", field.value));
// the part of an answer that a closed tab has shown
addEventListener("pagehide", () => { if (isRunning()) save(); });
at("send").addEventListener("click", () => send());
at("new").addEventListener("click", newChat);

// The mode of chats.

import * as chats from "./chats.js";
import { at, copy, make } from "./dom.js";
import { ask, choices, isRunning, run } from "./generation.js";
import { keep, kept } from "./kept.js";
import { MarkdownView } from "./markdown.js";
import { exceedsContext, server } from "./server.js";
import { body, systemMessage } from "./settings.js";
import { hideProgress, say } from "./status.js";
import { split } from "./thoughts.js";

const PATH = "v1/chat/completions";
const NAMES = { user: "You", assistant: "Model" };
const DROP = "Drop the oldest messages";
const log = at("messages"), field = at("message");
// the open chat, and its messages: {role, content, dropped}. A dropped message stays in the page, and is not sent to the
// model
let open = chats.fresh(), chat = [];
// the number of the message that is being edited
let edited = null;
// the Markdown of each message of the model, so that it is made once, and the element of its thoughts
const views = new WeakMap();
// the element of each message, and what it was made from
const articles = new WeakMap();

export function restore() {
  show(chats.restore());
  field.value = kept("draft") ?? "";
}

function save() {
  open = chats.store({ ...open, messages: chat });
  list();
}

// The list of chats

function list() {
  const known = chats.all();
  if (!known.some(({ id }) => id === open.id)) known.unshift({ ...open, messages: chat });
  const options = known.map(each => make("option", { value: each.id, textContent: chats.nameOf(each), selected: each.id === open.id }));
  at("chats").replaceChildren(...options);
}

// Show a chat, and open it in this tab.
function show(next) {
  open = next;
  chat = next.messages;
  edited = null;
  list();
  draw();
  toEnd();
}

function openChat(next) {
  show(chats.opened(next));
  hideProgress();
  field.focus();
}

function rename(on) {
  at("naming").hidden = !on;
  at("shelf").hidden = on;
  if (!on) return at("chats").focus();
  at("chat-name").value = chats.nameOf({ ...open, messages: chat });
  at("chat-name").select();
}

function named(event) {
  event.preventDefault();
  open = { ...open, name: at("chat-name").value.trim() };
  save();
  rename(false);
}

function removeChat() {
  const before = { ...open, messages: chat };
  chats.remove(before.id);
  openChat(chats.all()[0] ?? chats.fresh());
  say("the chat is deleted", { offers: [["Undo", () => { openChat(chats.store(before)); say(""); }]] });
}

function exportAll() {
  const known = chats.all(), here = { ...open, messages: chat };
  // this tab's copy may be newer, or the browser may have refused to keep it
  const others = known.filter(({ id }) => id !== open.id);
  const link = make("a", { href: URL.createObjectURL(chats.toFile([here, ...others])), download: "chats.jsonl" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function importFrom(file) {
  try {
    const found = await chats.fromFile(file);
    const refused = found.filter(each => chats.store(each).version === null).length;
    const kept = found.length - refused;
    openChat(refused ? open : chats.all()[0]);
    const words = `${kept} of ${found.length} chats are imported`;
    say(refused ? words + ": the browser's storage is full" : words, { bad: refused > 0 });
  } catch (error) {
    say(error.message, { bad: true });
  }
}

function setField(value) {
  field.value = value;
  keep("draft", value);
}

// The elements

// A button of the message with this number. Its name for a screen reader says which message it is of.
function act(name, label, number) {
  const button = make("button", { type: "button", textContent: label });
  button.dataset.act = name;
  button.setAttribute("aria-label", label + ", message " + number);
  return button;
}

function actions(message, i) {
  const acts = [["copy", "Copy"], ["edit", "Edit"], ["delete", "Delete"]];
  if (i === chat.length - 1) acts.push(["regenerate", message.role === "user" ? "Answer" : "Regenerate"]);
  if (i === chat.length - 1 && message.role === "assistant" && message.content.trim()) acts.push(["continue", "Continue"]);
  return make("div", { className: "acts" }, ...acts.map(([name, label]) => act(name, label, i + 1)));
}

function editor(message, i) {
  const words = make("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
  words.setAttribute("aria-label", "Text of message " + (i + 1));
  const acts = [["save", "Save"], ["cancel", "Cancel"]];
  if (message.role === "user") acts.unshift(["again", "Save and ask again"]);
  return [words, make("div", { className: "acts" }, ...acts.map(([name, label]) => act(name, label, i + 1)))];
}

function contentOf(message) {
  if (message.role !== "assistant") return make("div", { className: "content" }, make("p", { className: "plain", textContent: message.content }));
  if (!views.has(message)) views.set(message, new AnswerView());
  const view = views.get(message);
  view.show(message.content);
  return view.element;
}

// An answer: its thoughts, folded, and its Markdown.
class AnswerView {
  constructor() {
    this.markdown = new MarkdownView();
    this.thoughts = make("details", { className: "thoughts", hidden: true }, make("summary"), make("p", { className: "plain" }));
    this.element = make("div", {}, this.thoughts, this.markdown.element);
  }

  show(text) {
    const { thoughts, answer, open: unfinished } = split(text);
    this.thoughts.hidden = !thoughts;
    this.thoughts.firstChild.textContent = unfinished ? "Thinking …" : "Thoughts";
    this.thoughts.lastChild.textContent = thoughts;
    this.markdown.show(answer);
  }
}

function articleOf(message, i, complete = true) {
  const source = JSON.stringify([message, i === edited, i === chat.length - 1, complete]);
  if (articles.get(message)?.source === source) return articles.get(message).element;
  const name = (NAMES[message.role] ?? message.role) + (message.dropped ? " (not sent to the model any more)" : "");
  const element = make("article", { className: message.role }, make("h2", { textContent: name }));
  element.classList.toggle("dropped", Boolean(message.dropped));
  element.classList.toggle("editing", i === edited);
  element.append(...(i === edited ? editor(message, i) : [contentOf(message), ...(complete ? [actions(message, i)] : [])]));
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

// The messages for a request. Thoughts are no part of the history.
function sent(messages) {
  const words = ({ role, content }) => role === "assistant" ? split(content).answer : content;
  return messages.filter(message => !message.dropped).map(message => ({ role: message.role, content: words(message) }));
}

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
//   continued: the last message, which the model continues
function answer({ giveBack, again, dropping, before = null, continued = null }) {
  const canDrop = chat.filter(message => !message.dropped && message.role === "user").length > 1;
  const undo = before ? [["Undo", () => { set(before); say(""); }]] : [];
  const offers = error => exceedsContext(error) && canDrop ? [[DROP, () => again(true)], ["New chat", newChat]] : undo;
  const ended = (progress, reason) => {
    const cut = reason === "length" && progress.full && canDrop ? [[DROP + " and answer again", () => regenerate({ dropping: true })]] : [];
    say(progress.summary(reason, "the answer is complete"), { offers: [...cut, ...undo] });
  };
  return run(async () => {
    const made = continued ?? { role: "assistant", content: "" };
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
      if (continued) {
        // with its thoughts: the model goes on where it stopped
        request.messages.at(-1).content = continued.content;
        Object.assign(request, { add_generation_prompt: false, continue_final_message: true });
      }
      for await (const { delta } of choices(PATH, request, ended)) {
        made.content += delta.content ?? "";
        if (continued) begun = true;
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

// Let the model continue its last message.
function goOn() {
  const before = chat, continued = { ...chat.at(-1) };
  chat = [...chat.slice(0, -1), continued];
  draw();
  return answer({ giveBack: () => { chat = before; }, again: () => {}, before, continued });
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
  const before = { ...open, messages: chat };
  openChat(chats.fresh());
  if (before.messages.length) say("a new chat", { offers: [["Undo", () => { openChat(before); say(""); }]] });
}

function saveEdit(i, content, again) {
  const before = chat, changed = chat.with(i, { ...chat[i], content });
  if (!again) return change(changed, "the message is changed");
  set(changed.slice(0, i + 1));
  regenerate({ before });
}

async function copyFrom(button, text) {
  const name = button.getAttribute("aria-label");
  button.textContent = await copy(text) ? "Copied" : "Not copied";
  button.setAttribute("aria-label", name.replace("Copy", button.textContent));
  setTimeout(() => { button.textContent = "Copy"; button.setAttribute("aria-label", name); }, 1500);
}

const ACTS = {
  edit: i => { edited = i; draw(); },
  cancel: () => { edited = null; draw(); field.focus(); },
  save: (i, words) => saveEdit(i, words, false),
  again: (i, words) => saveEdit(i, words, true),
  delete: i => change(chat.toSpliced(i, 1), "the message is deleted"),
  regenerate: () => regenerate(),
  continue: () => goOn(),
};

function perform(name, article) {
  if (isRunning()) return;
  ACTS[name]([...log.children].indexOf(article), article.querySelector("textarea")?.value);
}

log.addEventListener("click", event => {
  const button = event.target.closest("button"), article = event.target.closest("article");
  if (!button) return;
  if (button.className === "copy-code") copyFrom(button, button.closest(".code").querySelector("code").textContent);
  else if (button.dataset.act === "copy") copyFrom(button, split(chat[[...log.children].indexOf(article)].content).answer);
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
at("chats").addEventListener("change", () => openChat(chats.find(at("chats").value) ?? open));
// another tab may have made or changed chats
at("chats").addEventListener("focus", list);
at("rename").addEventListener("click", () => rename(true));
at("remove").addEventListener("click", removeChat);
at("export").addEventListener("click", exportAll);
at("import").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => { importFrom(at("file").files[0]); at("file").value = ""; });
at("naming").addEventListener("submit", named);
at("keep-name").addEventListener("click", () => rename(false));
at("naming").addEventListener("keydown", event => { if (event.key === "Escape") { event.preventDefault(); rename(false); } });


// Markdown of a model, which is text from a stranger. It has no HTML of its own: HTML in it is shown as text. What
// `marked` makes goes through DOMPurify, with few elements and attributes. The page's Content-Security-Policy is the
// third guard.

import { make } from "./dom.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

// a longer text, or one that takes longer, is shown as it is
const MOST_CHARS = 200_000, MOST_MS = 1000;
const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote",
    "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "data-language"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  // the rule for addresses would apply to their values
  ADD_URI_SAFE_ATTR: ["start", "align", "data-language"],
  RETURN_DOM_FRAGMENT: true,
};
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = text => text.replace(/[&<>"']/g, sign => ENTITIES[sign]);

// A formula is shown as it was written: its signs are not Markdown's. A bound keeps the search for its end short.
const INLINE = /^(?:\\\([\s\S]{0,1000}?\\\)|\\\[[\s\S]{0,1000}?\\\]|\$\$[^$]{1,1000}\$\$|\$(?=[^\s$])[^$\n]{0,200}(?<=[^\s$])\$(?!\d))/;
const BLOCK = /^(?:\\\[[\s\S]{0,4000}?\\\]|\$\$[^$]{1,4000}\$\$)[ \t]*(?:\n|$)/;
const shown = text => escaped(text).replaceAll("\n", "<br>");

function formula(name, level, pattern, start, html) {
  const tokenizer = source => {
    const found = pattern.exec(source);
    return found ? { type: name, raw: found[0] } : undefined;
  };
  return { name, level, start: source => source.match(start)?.index, tokenizer, renderer: ({ raw }) => html(raw) };
}

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  extensions: [
    formula("formula", "inline", INLINE, /\\[([]|\$/, shown),
    formula("formulas", "block", BLOCK, /^(?:\\\[|\$\$)/m, text => `<p>${shown(text.trimEnd())}</p>`),
  ],
  // HTML is no kind of token; a bracket that begins or ends a formula keeps its backslash
  tokenizer: {
    html() {},
    tag() {},
    escape: source => /^\\[()[\]]/.test(source) ? { type: "escape", raw: source.slice(0, 2), text: source.slice(0, 2) } : false,
  },
  renderer: {
    code: ({ text, lang }) => `<pre data-language="${escaped((lang ?? "").split(/\s/)[0].slice(0, 30))}"><code>${escaped(text)}</code></pre>`,
    checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
    // an image would be a request: it is shown as a link
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

// The HTML of each block of a text.
const blocks = text => marked.lexer(text).map(token => marked.parser([token])).filter(html => html);

// The elements of HTML, without what can run, load or send.
export function clean(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  for (const code of fragment.querySelectorAll("pre")) {
    const button = make("button", { type: "button", textContent: "Copy", className: "copy-code" });
    button.setAttribute("aria-label", "Copy code");
    const bar = make("div", { className: "bar" }, make("span", { textContent: code.dataset.language ?? "" }), button);
    const box = make("div", { className: "code" }, bar);
    code.replaceWith(box);
    box.append(code);
    code.tabIndex = 0;
  }
  return fragment;
}

// A text that grows, as Markdown in an element. Only blocks that change are made again.
export class MarkdownView {
  constructor() {
    this.element = make("div", { className: "content" });
    this.text = "";
    // the HTML of each block, or null: the text is shown as it is
    this.shown = [];
  }

  show(text) {
    if (text === this.text) return;
    this.text = text;
    const began = performance.now();
    try {
      if (this.shown && text.length <= MOST_CHARS) this.showBlocks(blocks(text));
      else this.showPlain();
    } catch (error) {
      // a stack that overflows
      if (!(error instanceof RangeError)) throw error;
      this.showPlain();
    }
    if (this.shown && performance.now() - began > MOST_MS) this.showPlain();
  }

  showBlocks(made) {
    made.forEach((html, i) => {
      if (html === this.shown[i]) return;
      const block = make("div", {}, clean(html));
      if (i < this.shown.length) this.element.children[i].replaceWith(block);
      else this.element.append(block);
    });
    while (this.element.children.length > made.length) this.element.lastChild.remove();
    this.shown = made;
  }

  showPlain() {
    if (this.shown) this.element.replaceChildren(make("p", { className: "plain" }));
    this.shown = null;
    this.element.firstChild.textContent = this.text;
  }
}

// Elements of the page.

export const at = id => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const number = value => value.toLocaleString("en-US");
export const tokens = count => count === 1 ? "1 token" : number(count) + " tokens";

// The clipboard's own interface needs HTTPS or this machine; the older way works everywhere.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make("textarea", { value: text }), focused = document.activeElement;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return copied;
  }
}

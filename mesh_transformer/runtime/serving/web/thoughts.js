// The thoughts of a model: the part of an answer in <think> and </think>. They are shown folded, and are not sent to the
// model again, as its chat template would leave them out.

// the template may have the opening tag in the prompt
const THOUGHTS = /^\s*(?:<think>)?([\s\S]*?)<\/think>\s*/;
const OPEN = /^\s*<think>/;

// {thoughts, answer, open}: `open` says that the thoughts have no end yet.
export function split(text) {
  const closed = THOUGHTS.exec(text);
  if (closed) return { thoughts: closed[1].trim(), answer: text.slice(closed[0].length), open: false };
  if (OPEN.test(text)) return { thoughts: text.replace(OPEN, "").trim(), answer: "", open: true };
  return { thoughts: "", answer: text, open: false };
}

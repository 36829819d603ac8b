// What the browser keeps. A tab has its own copy, so that two tabs do not disturb each other; a new tab begins with the
// newest copy of all tabs. The API key is the same in all tabs.

const PREFIX = "mesh-transformer.";
let refused = null;

// Call `whenRefused` once if the browser keeps nothing: storage is switched off, or full.
export function onRefusal(whenRefused) { refused = whenRefused; }

function attempt(work) {
  try {
    return work();
  } catch {
    refused?.();
    refused = null;
    return null;
  }
}

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

export function kept(name) {
  return attempt(() => {
    const own = read(sessionStorage, name);
    if (own !== null) return own;
    const newest = read(localStorage, name);
    if (newest !== null) sessionStorage.setItem(PREFIX + name, JSON.stringify(newest));
    return newest;
  });
}

export function keep(name, value) {
  const text = JSON.stringify(value);
  attempt(() => { for (const storage of [sessionStorage, localStorage]) storage.setItem(PREFIX + name, text); });
}

export const keptKey = () => attempt(() => read(localStorage, "key")) ?? "";

export function keepKey(key) {
  attempt(() => key ? localStorage.setItem(PREFIX + "key", JSON.stringify(key)) : localStorage.removeItem(PREFIX + "key"));
}

export function forgetAll() {
  attempt(() => {
    for (const storage of [sessionStorage, localStorage]) {
      for (const name of Object.keys(storage).filter(name => name.startsWith(PREFIX))) storage.removeItem(name);
    }
  });
}

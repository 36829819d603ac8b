// What the browser keeps. A tab has its own copy, so that two tabs do not disturb each other; a new tab begins with the
// newest copy of all tabs. The API key and the chats are the same in all tabs.

const PREFIX = "mesh-transformer.";
let report = () => {};

// Call `whenRefused(reason)` if the browser keeps something or refuses to: "" (it keeps it), "full", or "off".
export function onRefusal(whenRefused) { report = whenRefused; }

function attempt(work) {
  try {
    return work();
  } catch (error) {
    report(error.name === "QuotaExceededError" ? "full" : "off");
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

// What only this tab has.
export const keptHere = name => attempt(() => read(sessionStorage, name));
export const keepHere = (name, value) => attempt(() => sessionStorage.setItem(PREFIX + name, JSON.stringify(value)));

// What all tabs share, by name. `share` returns whether it is kept; what was there before stays if it is not.
export const shared = name => attempt(() => read(localStorage, name));
export const unshare = name => attempt(() => localStorage.removeItem(PREFIX + name));
export const sharedNames = start => attempt(() => Object.keys(localStorage).filter(name => name.startsWith(PREFIX + start)).map(name => name.slice(PREFIX.length))) ?? [];

export function share(name, value) {
  return attempt(() => {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    report("");
    return true;
  }) ?? false;
}

export const keptKey = () => shared("key") ?? "";

export function keepKey(key) {
  if (key) share("key", key);
  else unshare("key");
}

export function forgetAll() {
  attempt(() => {
    for (const storage of [sessionStorage, localStorage]) {
      for (const name of Object.keys(storage).filter(name => name.startsWith(PREFIX))) storage.removeItem(name);
    }
  });
}

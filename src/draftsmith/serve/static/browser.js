// What the page asks of its browser.

const KEY = "draftsmith-live";

export const byId = (id) => document.getElementById(id);
export const query = new URLSearchParams(location.search);

/** A place on this server, with the token that the page was opened with. */
export function address(path, parameters = {}) {
  const url = new URL(path, location.href);
  url.search = new URLSearchParams(parameters);
  if (query.has("token")) url.searchParams.set("token", query.get("token"));
  return url;
}

export function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

export function after(milliseconds, then) {
  const timer = setTimeout(then, milliseconds);
  return () => clearTimeout(timer);
}

/** What the client needs of the world outside (see client.js). */
export const world = {
  after,
  random: Math.random,
  now: () => performance.now() / 1000,

  open() {
    const url = address("ws");
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    return new WebSocket(url);
  },

  load() {
    try {
      return JSON.parse(sessionStorage.getItem(KEY));
    } catch {
      return null; // no storage, or not ours: begin anew
    }
  },

  save(remembered) {
    try {
      sessionStorage.setItem(KEY, JSON.stringify(remembered));
    } catch {
      // without storage a reload begins a new session
    }
  },
};

export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  link.download = name;
  link.click();
  after(10_000, () => URL.revokeObjectURL(link.href));
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // pages without https have no clipboard, others may not use it: the old way
  }
  const area = make("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// A WebSocket that comes back: longer and longer waits, each a little random, so that all readers
// of a server that was restarted do not knock at the same moment.

const FIRST_MS = 500;
const MOST_MS = 15_000;
const SILENT_BEATS = 2;

/** How long to wait before the next try; `random` lies between 0 and 1. */
export function delay(tries, random) {
  return Math.min(MOST_MS, FIRST_MS * 2 ** tries) * (0.5 + random / 2);
}

export class Connection {
  #socket = null;
  #cancel = () => {};
  #waiting = false;
  #tries = 0;
  #silent = 0;

  /**
   * @param world open(): a new WebSocket; after(milliseconds, function): gives what cancels it;
   *   random(): between 0 and 1
   * @param handlers opened(), heard(message), status(name): "connecting", "open",
   *   "away", or what `close` was given
   */
  constructor(world, handlers) {
    Object.assign(this, { world, handlers });
  }

  connect() {
    this.#leave();
    const socket = this.world.open();
    this.#socket = socket;
    this.handlers.status("connecting");
    socket.onopen = () => this.handlers.opened();
    socket.onmessage = ({ data }) => {
      this.#silent = 0;
      this.handlers.heard(JSON.parse(data));
    };
    socket.onclose = () => this.#lost();
  }

  /** The server took us in; only now the next wait is a short one again. */
  settled() {
    this.#tries = 0;
    this.handlers.status("open");
  }

  send(message) {
    this.#socket?.send(JSON.stringify(message));
  }

  /** Called now and then: a connection that does not answer pings is given up. */
  beat() {
    if (this.#socket?.readyState !== 1) return;
    this.#silent += 1;
    if (this.#silent > SILENT_BEATS) this.#lost();
    else this.send({ type: "ping" });
  }

  /** The next try is now, if one is waited for. */
  hurry() {
    if (this.#waiting) this.connect();
  }

  /** For good, or until `connect`. */
  close(status) {
    this.#leave();
    this.handlers.status(status);
  }

  #lost() {
    this.#leave();
    this.#cancel = this.world.after(delay(this.#tries, this.world.random()), () => this.connect());
    this.#tries += 1;
    this.#waiting = true;
    this.handlers.status("away");
  }

  #leave() {
    this.#cancel();
    this.#waiting = false;
    this.#silent = 0;
    const socket = this.#socket;
    this.#socket = null;
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }
}

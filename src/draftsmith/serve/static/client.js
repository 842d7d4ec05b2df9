// One side of the conversation: numbers what is heard, keeps what was not answered, and takes a
// session over again after a lost connection.
//
//     hear        0.0  0.1  0.2 final  |lost|  1.0  1.1            segment.revision
//     unanswered                               1.0  1.1            the newest of a segment
//     resumed                                       1.1

import { Connection } from "./connection.js";
import { initialState, reduce } from "./state.js";

const VERSION = 1;
const MOST_UNANSWERED = 60; // segments; the server lets 64 wait
const TIRED = "idle"; // the server closes a connection on which nothing was said for long
const HOPELESS = ["token", "origin", "host", "faults"]; // trying again would not help
// what was sent twice, around a lost connection or from two windows
const OUTRUN = ["stale_rev", "conflict", "segment_closed"];

export class Client {
  #ready = false;
  #unanswered = new Map();
  #open = null; // the newest `source` of the segment that is spoken
  #used; // the highest number of a segment, also of earlier pages
  #wanted; // settings the reader chose
  #toConfigure = {};
  #before = {}; // settings that the server accepted
  #resting = false;

  /**
   * @param world see Connection; and now(): seconds; load() and save(object): what
   *   outlives the page
   * @param changed is called with the state whenever it is another one
   * @param connection is called with its status
   */
  constructor(world, { changed, status }) {
    Object.assign(this, { world, changed });
    this.state = initialState();
    const { session = null, used = -1, wanted = {} } = world.load() ?? {};
    this.state.session = session;
    this.#used = used;
    this.#wanted = wanted;
    this.connection = new Connection(world, {
      opened: () => this.#greet(),
      heard: (message) => this.#heard(message),
      status: (name) => {
        this.#ready = name === "open";
        status(name);
      },
    });
  }

  get ready() {
    return this.#ready;
  }

  /** The open segment is held to be this now. Final without a text: it is over as it is. */
  hear(text, final) {
    if (!text.trim() && (this.#open === null || !final)) return;
    if (this.#open === null) {
      this.#used = Math.max(this.#used, this.state.segments.at(-1)?.seg ?? -1) + 1;
      this.#save();
    } else if (this.#open.text === text && !final) {
      return;
    }
    const [seg, rev] = [this.#used, this.#open === null ? 0 : this.#open.rev + 1];
    const t = Math.round(this.world.now() * 1000) / 1000;
    const source = { type: "source", seg, rev, text: text.trim() || this.#open.text, final, t };
    this.#open = final ? null : source;
    this.#unanswered.set(seg, source);
    if (this.#unanswered.size > MOST_UNANSWERED) {
      this.#unanswered.delete(this.#unanswered.keys().next().value);
    }
    this.#take({ ...source, type: "heard" });
    if (this.#ready) this.connection.send(source);
    else this.wake();
  }

  /** Go on after a silence. */
  wake() {
    if (this.#resting) this.connection.connect();
    this.#resting = false;
  }

  /** Other settings from now on. */
  configure(settings) {
    if (!Object.keys(this.#toConfigure).length) this.#before = this.state.settings;
    this.#wanted = { ...this.#wanted, ...settings };
    this.#toConfigure = { ...this.#toConfigure, ...settings };
    this.#save();
    this.#take({ type: "configured", settings });
    if (this.#ready) this.#sendSettings();
  }

  measure() {
    if (!this.#ready) return;
    this.#take({ type: "measuring" });
    this.connection.send({ type: "measure" });
  }

  /** End this session and begin another; what was said is forgotten. */
  restart() {
    if (this.#ready) this.connection.send({ type: "stop" });
    this.state = initialState();
    this.#unanswered.clear();
    this.#open = null;
    this.#used = -1;
    this.#save();
    this.changed(this.state);
    this.connection.connect();
  }

  // ------------------------------------------------------------------ what the server says

  #greet() {
    const { session, lastId } = this.state;
    if (session !== null) this.connection.send({ type: "resume", session, last_id: lastId });
    else {
      this.connection.send({ type: "start", v: VERSION, ...this.#wanted });
      this.#toConfigure = {};
    }
  }

  #heard(message) {
    if (message.type === "error" && this.#answered(message)) return;
    this.#take(message);
    if (message.type === "ready") this.#begin(message);
    if (message.type === "update") this.#settle(message);
  }

  #begin({ settings }) {
    this.#before = settings;
    this.#save();
    this.connection.settled();
    if (Object.keys(this.#toConfigure).length) {
      this.#take({ type: "configured", settings: this.#toConfigure });
      this.#sendSettings();
    }
    for (const source of this.#unanswered.values()) this.connection.send(source);
  }

  #sendSettings() {
    this.connection.send({ type: "config", ...this.#toConfigure });
    this.#toConfigure = {};
  }

  /** Segments are answered in order: what is older than an answer waits for none. */
  #settle({ seg, rev }) {
    for (const [number, source] of this.#unanswered) {
      if (number < seg || (number === seg && source.rev <= rev)) this.#unanswered.delete(number);
    }
  }

  /** True: the reader need not know of this error. */
  #answered({ code, seg, rev }) {
    if (code === "unknown_session") {
      this.state = { ...this.state, session: null };
      this.connection.connect();
      return true;
    }
    if (OUTRUN.includes(code)) {
      this.#outrun(seg, rev);
      return true;
    }
    if (code === TIRED) {
      this.#resting = true;
      this.connection.close("resting");
      return true;
    }
    if (HOPELESS.includes(code)) this.connection.close("closed");
    if (code === "bad_settings") this.#revoke();
    this.#drop(seg, rev);
    return false;
  }

  #drop(seg, rev) {
    if (this.#unanswered.get(seg)?.rev === rev) this.#unanswered.delete(seg);
  }

  /**
   * The server had it already, or someone else spoke in this session: then the open hypothesis is
   * said again, as a new segment.
   */
  #outrun(seg, rev) {
    this.#drop(seg, rev);
    const open = this.#open;
    if (open?.seg !== seg || open.rev !== rev) return;
    this.#open = null;
    this.hear(open.text, false);
  }

  /** Back to the settings before. */
  #revoke() {
    const chosen = Object.keys(this.#wanted);
    this.#wanted = this.#ready
      ? Object.fromEntries(chosen.map((name) => [name, this.#before[name]]))
      : {};
    this.#save();
    if (this.#ready) this.#take({ type: "configured", settings: this.#before });
    else if (chosen.length) this.#greet();
    else this.connection.close("closed");
  }

  // ------------------------------------------------------------------ what is remembered

  #take(message) {
    this.state = reduce(this.state, message, this.world.now());
    this.changed(this.state);
  }

  #save() {
    const { session } = this.state;
    this.world.save({ session, used: this.#used, wanted: this.#wanted });
  }
}

import { Client } from "../page/client.js";
import { delay } from "../page/connection.js";
import { equal } from "./check.js";

class FakeSocket {
  readyState = 1;
  sent = [];
  send(frame) {
    this.sent.push(JSON.parse(frame));
  }
  close() {
    this.readyState = 3;
  }
}

/** A client whose sockets and clock are a test's. */
function scene(stored = null) {
  const parts = { sockets: [], waits: [], status: [], stored };
  const world = {
    open() {
      parts.sockets.push(new FakeSocket());
      return parts.sockets.at(-1);
    },
    after(ms, then) {
      const one = { ms, then };
      parts.waits.push(one);
      return () => (parts.waits = parts.waits.filter((other) => other !== one));
    },
    random: () => 1,
    now: () => 2.5,
    load: () => parts.stored,
    save: (remembered) => (parts.stored = remembered),
  };
  parts.client = new Client(world, { changed() {}, status: (name) => parts.status.push(name) });
  parts.client.connection.connect();
  parts.sent = () => parts.sockets.at(-1).sent;
  parts.say = (message) => parts.sockets.at(-1).onmessage({ data: JSON.stringify(message) });
  parts.open = () => parts.sockets.at(-1).onopen();
  const settings = { bias: 0.2, target: "German" };
  parts.ready = (session = "a") => parts.say({ type: "ready", session, model: "m", settings });
  parts.lose = () => parts.sockets.at(-1).onclose();
  parts.again = () => parts.waits.shift().then();
  parts.update = (id, seg, rev) =>
    parts.say({
      ...{ type: "update", id, seg, rev, source: "s", text: "t", stable: 0, hidden: "" },
      ...{ final: false, stats: { ms: 1, ne: null, ad: null, ao: null } },
    });
  return parts;
}

function connected(stored) {
  const parts = scene(stored);
  parts.open();
  parts.ready();
  return parts;
}

function error(code, others = {}) {
  return { type: "error", code, message: code, fatal: false, ...others };
}

const sources = (messages) =>
  messages
    .filter(({ type }) => type === "source")
    .map(({ seg, rev, text, final }) => `${seg}.${rev} ${text}${final ? "|" : ""}`);

export const tests = {
  "a session begins"() {
    const { sent, stored, status, client } = connected();
    equal(sent(), [{ type: "start", v: 1 }]);
    equal(stored, { session: "a", used: -1, wanted: {} });
    equal([status, client.ready], [["connecting", "open"], true]);
  },

  "hypotheses are numbered"() {
    const { client, sent } = connected();
    for (const text of ["a", "a", "a b", "a b.", "c"]) client.hear(text, text.endsWith("."));
    equal(sources(sent()), ["0.0 a", "0.1 a b", "0.2 a b.|", "1.0 c"]);
    equal(sent()[1].t, 2.5);
  },

  "no text ends what is open, and nothing else"() {
    const { client, sent } = connected();
    client.hear("", true);
    client.hear("a", false);
    client.hear(" ", false);
    client.hear("", true);
    client.hear("", true);
    equal(sources(sent()), ["0.0 a", "0.1 a|"]);
  },

  "while there is no connection, only the newest waits, and no final is lost"() {
    const { client, sent, open, ready } = scene();
    for (const [text, final] of [["a", false], ["a b", true], ["c", false], ["c d", false]]) {
      client.hear(text, final);
    }
    equal(sent(), []);
    open();
    equal(sources(sent()), []);
    ready();
    equal(sources(sent()), ["0.1 a b|", "1.1 c d"]);
  },

  "a lost session is taken over, and what was not answered is said again"() {
    const parts = connected();
    parts.client.hear("a", true);
    parts.client.hear("b", false);
    parts.update(5, 0, 0);
    parts.lose();
    parts.client.hear("b c", false);
    parts.again();
    parts.open();
    equal(parts.sent(), [{ type: "resume", session: "a", last_id: 5 }]);
    parts.ready();
    equal(sources(parts.sent()), ["1.1 b c"]);
    equal(parts.status, ["connecting", "open", "away", "connecting", "open"]);
  },

  "what was answered is not said again"() {
    const parts = connected();
    parts.client.hear("a", false);
    parts.update(1, 0, 0);
    parts.lose();
    parts.again();
    parts.open();
    parts.ready();
    equal(sources(parts.sent()), []);
  },

  "waits grow, and are short again after a welcome"() {
    const parts = scene();
    const waits = [];
    for (let tries = 0; tries < 7; tries += 1) {
      parts.lose();
      waits.push(parts.waits[0].ms);
      parts.again();
    }
    equal(waits, [500, 1000, 2000, 4000, 8000, 15000, 15000]);
    parts.open();
    parts.ready();
    parts.lose();
    equal(parts.waits[0].ms, 500);
  },

  "waits are random, but never nothing"() {
    equal([delay(0, 0), delay(0, 0.5), delay(99, 0)], [250, 375, 7500]);
  },

  "a page that is loaded again goes on with its session"() {
    const { client, sent, ready } = (() => {
      const parts = scene({ session: "a", used: 4, wanted: { bias: 0.3 } });
      parts.open();
      return parts;
    })();
    equal(sent(), [{ type: "resume", session: "a", last_id: 0 }]);
    ready();
    client.hear("x", false);
    equal(sources(sent()), ["5.0 x"]);
  },

  "a session that is gone is begun anew, with the settings that were chosen"() {
    const parts = scene({ session: "a", used: 4, wanted: { bias: 0.3 } });
    parts.open();
    parts.say(error("unknown_session", { fatal: true }));
    equal(parts.sockets.length, 2);
    parts.open();
    equal(parts.sent(), [{ type: "start", v: 1, bias: 0.3 }]);
    parts.ready("b");
    equal(parts.stored, { session: "b", used: 4, wanted: { bias: 0.3 } });
    equal(parts.client.state.notice, null);
  },

  "settings that were changed while away are sent later, before anything else"() {
    const parts = connected();
    parts.lose();
    parts.client.configure({ bias: 0.1 });
    parts.client.configure({ mask_k: 3 });
    parts.client.hear("a", false);
    parts.again();
    parts.open();
    parts.ready();
    equal(parts.sent()[1], { type: "config", bias: 0.1, mask_k: 3 });
    equal(sources(parts.sent()), ["0.0 a"]);
    equal(parts.client.state.settings, { bias: 0.1, target: "German", mask_k: 3 });
  },

  "settings that are refused are taken back"() {
    const parts = connected();
    parts.client.configure({ target: "??" });
    parts.say(error("bad_settings"));
    equal(parts.client.state.settings, { bias: 0.2, target: "German" });
    equal(parts.client.state.notice.code, "bad_settings");
    equal(parts.stored.wanted, { target: "German" });
  },

  "a session that cannot begin with the settings begins without"() {
    const stored = { session: null, used: -1, wanted: { target: "??" } };
    const { sent, open, say, status } = scene(stored);
    open();
    say(error("bad_settings"));
    equal(sent().at(-1), { type: "start", v: 1 });
    say(error("bad_settings"));
    equal(status.at(-1), "closed");
  },

  "someone else spoke in the session: the open hypothesis becomes a new segment"() {
    const { client, say, sent, update } = connected();
    client.hear("mine", false);
    update(1, 3, 0);
    say(error("stale_rev", { seg: 0, rev: 0 }));
    equal(sources(sent()), ["0.0 mine", "4.0 mine"]);
    equal(client.state.notice, null);
  },

  "a final that the server had already is no reason to speak again"() {
    const parts = connected();
    parts.client.hear("a", true);
    parts.client.hear("b", false);
    parts.lose();
    parts.again();
    parts.open();
    parts.ready();
    parts.say(error("segment_closed", { seg: 0, rev: 0 }));
    equal(sources(parts.sent()), ["0.0 a|", "1.0 b"]);
    parts.lose();
    parts.again();
    parts.open();
    parts.ready();
    equal(sources(parts.sent()), ["1.0 b"]);
  },

  "what was said twice once is no reason to hold one's tongue later"() {
    const parts = connected();
    parts.client.hear("x", false);
    parts.client.hear("x y", true);
    parts.lose();
    parts.again();
    parts.open();
    parts.ready();
    parts.update(1, 0, 1);
    parts.client.hear("b", false);
    parts.client.hear("b c", false);
    parts.say(error("segment_closed", { seg: 1, rev: 1 }));
    equal(sources(parts.sent()).at(-1), "2.0 b c");
  },

  "after a silence it goes on when someone speaks"() {
    const parts = connected();
    parts.say(error("idle", { fatal: true }));
    equal([parts.status.at(-1), parts.waits.length], ["resting", 0]);
    parts.client.hear("a", false);
    parts.open();
    parts.ready();
    equal(sources(parts.sent()), ["0.0 a"]);
  },

  "a stranger is told, and does not knock again"() {
    const parts = scene();
    parts.open();
    parts.say(error("token", { fatal: true }));
    equal([parts.status.at(-1), parts.waits.length], ["closed", 0]);
    equal(parts.client.state.notice.message, "token");
  },

  "a connection that does not answer is given up"() {
    const parts = connected();
    const { connection } = parts.client;
    for (let beats = 0; beats < 2; beats += 1) connection.beat();
    parts.say({ type: "pong" });
    for (let beats = 0; beats < 2; beats += 1) connection.beat();
    equal(parts.status.at(-1), "open");
    connection.beat();
    equal(parts.status.at(-1), "away");
  },

  "a new session forgets"() {
    const parts = connected();
    parts.client.hear("a", true);
    parts.client.restart();
    equal(parts.sockets[0].sent.at(-1), { type: "stop" });
    parts.open();
    parts.ready("b");
    parts.client.hear("x", false);
    equal(sources(parts.sent()), ["0.0 x"]);
    equal(parts.client.state.segments.map(({ source }) => source), ["x"]);
  },
};

import { initialState, reduce } from "../page/state.js";
import { equal } from "./check.js";

const STATS = { ms: 10, ne: 0.5, ad: null, ao: null };

function update(id, seg, rev, text, others = {}) {
  const said = { source: `s${seg}.${rev}`, stable: 0, hidden: "", final: false, stats: STATS };
  return { type: "update", id, seg, rev, text, ...said, ...others };
}

function ready(session) {
  return { type: "ready", session, model: "m", settings: { bias: 0.2 } };
}

function after(...messages) {
  return messages.reduce((state, message, place) => reduce(state, message, place), initialState());
}

function texts(state) {
  return state.segments.map(({ seg, text }) => [seg, text]);
}

export const tests = {
  "an update is the whole text"() {
    const state = after(ready("a"), update(1, 0, 0, "Das"), update(2, 0, 1, "Der Mann"));
    equal(texts(state), [[0, "Der Mann"]]);
    equal([state.updates, state.ms, state.figures], [2, [10, 10], { ne: 0.5, ad: null, ao: null }]);
  },

  "what comes twice or late changes nothing"() {
    const [first, second] = [update(1, 0, 0, "Das"), update(2, 0, 1, "Der Mann")];
    const state = after(ready("a"), first, second);
    for (const late of [first, second, update(3, 0, 0, "old")]) {
      equal(texts(reduce(state, late, 9)), [[0, "Der Mann"]]);
    }
    equal(reduce(state, second, 9) === state, true);
  },

  "segments that do not change are the same objects"() {
    const state = after(ready("a"), update(1, 0, 0, "Eins", { final: true }), update(2, 1, 0, "Z"));
    const next = reduce(state, update(3, 1, 1, "Zwei"), 9);
    equal(next.segments[0] === state.segments[0], true);
    equal(next.segments[1] === state.segments[1], false);
  },

  "the full state adds what was missed and takes nothing away"() {
    const first = update(1, 0, 0, "Eins", { final: true });
    const state = after(ready("a"), first, update(2, 1, 0, "Zw"));
    const segments = [
      { seg: 1, rev: 3, source: "two", text: "Zwei", stable: 4, final: true },
      { seg: 2, rev: 0, source: "th", text: "Dr", stable: 0, final: false },
    ];
    const full = { type: "full_state", session: "a", id: 7, settings: {}, segments, stats: STATS };
    const next = reduce(state, full, 9);
    equal(texts(next), [[0, "Eins"], [1, "Zwei"], [2, "Dr"]]);
    equal(next.settings, { bias: 0.2 });
    equal(texts(reduce(next, update(7, 2, 0, "old"), 10)), texts(next));
    equal(texts(reduce(next, full, 10)), texts(next));
  },

  "a viewer has its settings from the full state"() {
    const settings = { target: "German" };
    const full = { type: "full_state", session: "a", id: 0, settings, segments: [], stats: STATS };
    equal(after(full).settings, settings);
  },

  "another session counts anew and texts stay"() {
    const state = after(ready("a"), update(9, 0, 5, "Eins"), ready("b"), update(1, 0, 6, "Eins!"));
    equal(texts(state), [[0, "Eins!"]]);
  },

  "a warning is shown"() {
    const state = after(ready("a"), { type: "warning", message: "mistakes stay" });
    equal(state.notice, { code: "warning", message: "mistakes stay", fatal: false });
  },

  "one's own source shows before its translation"() {
    const state = after(
      ready("a"),
      { type: "heard", seg: 0, rev: 0, text: "one" },
      { type: "heard", seg: 0, rev: 1, text: "one two" },
      update(1, 0, 0, "Eins", { source: "one" }),
    );
    equal(state.segments[0].source, "one two");
    equal(reduce(state, update(2, 0, 1, "Eins zwei", { source: "one two" }), 9).segments[0].rev, 1);
  },

  "a revision that is shown in another way is no update"() {
    const masked = update(2, 0, 0, "Ei", { hidden: "ns" });
    const state = after(ready("a"), update(1, 0, 0, "Eins"), masked);
    equal([texts(state), state.updates, state.ms], [[[0, "Ei"]], 1, [10]]);
  },

  "times are those of the first word and of the final"() {
    const state = after(
      ready("a"), // at second 0, the others follow
      { type: "heard", seg: 0, rev: 0, text: "one" },
      update(1, 0, 0, "Eins"),
      update(2, 0, 1, "Eins.", { final: true }),
      update(3, 0, 1, "Eins.", { final: true }),
    );
    equal([state.segments[0].from, state.segments[0].to], [1, 3]);
  },

  "a segment that failed says so until it is translated"() {
    const error = { type: "error", code: "backend", message: "no", fatal: false, seg: 0, rev: 0 };
    const state = after(ready("a"), { type: "heard", seg: 0, rev: 0, text: "one" }, error);
    equal([state.segments[0].failed, state.notice.message], [true, "no"]);
    equal(reduce(state, update(1, 0, 1, "Eins"), 9).segments[0].failed, false);
  },

  "overtaken hypotheses are counted, measurements kept"() {
    const measured = { type: "measured", updates: 3, speedup: 1.5, tps: 30, tps_ar: 20 };
    const coalesced = { type: "coalesced", seg: 0, revs: [1, 2] };
    const state = after(ready("a"), { type: "measuring" }, coalesced, coalesced, measured);
    equal([state.coalesced, state.measured.speedup, state.measuring], [4, 1.5, false]);
  },

  "unknown messages are no harm"() {
    const state = after(ready("a"));
    for (const type of ["pong", "constructor", "toString"]) {
      equal(reduce(state, { type }, 1), state);
    }
  },

  "the history is long, not endless"() {
    let state = after(ready("a"));
    for (let seg = 0; seg < 5050; seg += 1) {
      state = reduce(state, update(seg + 1, seg, 0, "x"), seg);
    }
    equal([state.segments.length, state.segments[0].seg], [5000, 50]);
  },
};

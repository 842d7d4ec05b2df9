// What the page knows, and how each message changes it. No message is harmful when it comes twice
// or late: an update is the whole text of its segment, and an older one is recognised by its id.

const KEPT_SEGMENTS = 5000; // for the downloads; the page itself shows fewer
const KEPT_MS = 60;

export function initialState() {
  return {
    session: null,
    model: "",
    settings: {},
    lastId: 0,
    /** Ascending by `seg`. An object is replaced when its segment changes, never altered. */
    segments: [],
    figures: { ne: null, ad: null, ao: null },
    updates: 0,
    coalesced: 0,
    ms: [],
    measured: null,
    measuring: false,
    notice: null,
  };
}

/** The state after a message of the server, or of the page itself; `now` is in seconds. */
export function reduce(state, message, now) {
  if (!Object.hasOwn(REDUCERS, message.type)) return state;
  return REDUCERS[message.type](state, message, now);
}

/** The segment of this number. */
export function findSegment(state, seg) {
  return state.segments.findLast((one) => one.seg === seg);
}

const REDUCERS = {
  ready(state, { session, model, settings }) {
    return { ...enter(state, session), model, settings, measuring: false, notice: null };
  },

  full_state(state, message, now) {
    const { session, id, settings, segments, stats } = message;
    // `ready` has newer settings; only viewers, who get none, need these
    let next = state.session === session ? state : { ...enter(state, session), settings };
    if (id < next.lastId) return next;
    for (const one of segments) next = place(next, { hidden: "", ...one, id }, now);
    return { ...next, lastId: id, figures: figures(stats) };
  },

  update(state, message, now) {
    if (message.id <= state.lastId) return state;
    const { stats } = message;
    const known = findSegment(state, message.seg);
    // other settings show the same revision anew: nothing was translated
    const again = known !== undefined && known.rev === message.rev && known.final === message.final;
    const next = { ...place(state, message, now), lastId: message.id, figures: figures(stats) };
    if (again) return next;
    return { ...next, updates: state.updates + 1, ms: [...state.ms, stats.ms].slice(-KEPT_MS) };
  },

  coalesced: (state, { revs }) => ({ ...state, coalesced: state.coalesced + revs.length }),

  measured: (state, message) => ({ ...state, measured: message, measuring: false }),

  warning(state, { message }) {
    return { ...state, notice: { code: "warning", message, fatal: false } };
  },

  error(state, { code, message, fatal, seg }) {
    const next = { ...state, measuring: false, notice: { code, message, fatal: Boolean(fatal) } };
    const known = seg === undefined ? undefined : findSegment(state, seg);
    return known ? put(next, { ...known, failed: true }) : next;
  },

  // ---- what the page says to itself

  /** A hypothesis of one's own: its source shows at once. */
  heard(state, { seg, rev, text }, now) {
    const known = findSegment(state, seg) ?? fresh(seg, now);
    return put(state, { ...known, source: text, sourceRev: rev, to: now, failed: false });
  },

  configured: (state, { settings }) => ({ ...state, settings: { ...state.settings, ...settings } }),
  measuring: (state) => ({ ...state, measuring: true }),
};

/** Numbers of updates count from 1 in every session; texts of an earlier one stay. */
function enter(state, session) {
  return state.session === session ? state : { ...state, session, lastId: 0 };
}

function figures({ ne, ad, ao }) {
  return { ne, ad, ao };
}

function fresh(seg, now) {
  return {
    ...{ seg, rev: -1, source: "", sourceRev: -1, text: "", stable: 0, hidden: "" },
    ...{ final: false, degenerate: false, failed: false, from: now, to: now },
  };
}

/** What the server says of a segment, unless something newer is known. */
function place(state, said, now) {
  const known = findSegment(state, said.seg) ?? fresh(said.seg, now);
  if (said.rev < known.rev) return state;
  const { rev, text, stable, hidden, final, degenerate = false } = said;
  const newer = known.sourceRev > rev;
  const [source, sourceRev] = newer ? [known.source, known.sourceRev] : [said.source, rev];
  const to = known.final ? known.to : now;
  const told = { rev, text, stable, hidden, final, degenerate, failed: false };
  return put(state, { ...known, ...told, source, sourceRev, to });
}

function put(state, segment) {
  const at = state.segments.findLastIndex((one) => one.seg <= segment.seg);
  const same = at >= 0 && state.segments[at].seg === segment.seg;
  const segments = state.segments.toSpliced(same ? at : at + 1, same ? 1 : 0, segment);
  if (segments.length > KEPT_SEGMENTS) segments.shift();
  return { ...state, segments };
}

// The last lines of a translation for OBS and other screens: reads the event stream, says nothing.
//
//     ?view=overlay&session=ID&lines=2&bg=transparent

import { address, after, byId, make, query } from "./browser.js";
import { Caption } from "./caption.js";
import { delay } from "./connection.js";
import { codeOf } from "./languages.js";

import { initialState, reduce } from "./state.js";

const MOST_LINES = 8;
const SEGMENTS = 8; // more than fill the lines; what is above is cut off

export function startOverlay() {
  const lines = Math.min(MOST_LINES, Math.max(1, Math.floor(Number(query.get("lines")) || 2)));
  const background = query.get("bg") ?? "transparent";
  const root = document.documentElement;
  root.style.setProperty("--lines", lines);
  if (CSS.supports("color", background)) root.style.setProperty("--overlay-bg", background);
  new Overlay(byId("overlay")).connect(query.get("session") ?? "");
}

class Overlay {
  #state = initialState();
  #captions = new Map();
  #tries = 0;

  constructor(box) {
    this.box = box;
  }

  connect(session) {
    const events = new EventSource(address("events", { session }));
    events.onopen = () => (this.#tries = 0);
    events.onmessage = ({ data }) => {
      this.#state = reduce(this.#state, JSON.parse(data), performance.now() / 1000);
      this.#render();
    };
    events.onerror = () => {
      if (events.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      after(delay(this.#tries, Math.random()), () => this.connect(session));
      this.#tries += 1;
    };
  }

  #render() {
    const visible = this.#state.segments.filter((one) => one.text).slice(-SEGMENTS);
    const wanted = new Set(visible.map((one) => one.seg));
    for (const [seg, caption] of this.#captions) {
      if (wanted.has(seg)) continue;
      caption.element.remove();
      this.#captions.delete(seg);
    }
    for (const segment of visible) {
      if (!this.#captions.has(segment.seg)) {
        const paragraph = make("p", "translation");
        paragraph.dir = "auto";
        paragraph.lang = codeOf(this.#state.settings.target);
        this.box.append(paragraph);
        this.#captions.set(segment.seg, new Caption(paragraph));
      }
      this.#captions.get(segment.seg).show(segment);
    }
  }
}

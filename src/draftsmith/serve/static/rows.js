// Source and translation side by side, a row per segment, the newest at the bottom.

import { make } from "./browser.js";
import { Caption } from "./caption.js";

export const MOST_ROWS = 200;
const NEAR_PX = 48;
const ANNOUNCED = 3;

class Row {
  #shown = null;

  constructor({ seg }, language) {
    this.element = make("li", "row");
    this.element.dataset.seg = seg;
    this.source = make("p", "source");
    const translation = make("p", "translation");
    this.source.dir = translation.dir = "auto";
    translation.lang = language;
    this.note = make("p", "note");
    this.caption = new Caption(translation);
    const right = make("div", "right");
    right.append(translation, this.note);
    this.element.append(this.source, right);
  }

  /** True: the segment has become final before the reader's eyes. */
  show(segment) {
    const before = this.#shown;
    if (before === segment) return false;
    this.#shown = segment;
    if (this.source.textContent !== segment.source) this.source.textContent = segment.source;
    this.caption.show(segment);
    this.element.classList.toggle("open", !segment.final && !segment.failed);
    this.note.textContent = note(segment);
    return before !== null && !before.final && segment.final;
  }
}

function note({ failed, degenerate }) {
  if (failed) return "could not be translated";
  return degenerate ? "no usable answer: the text before stays" : "";
}

export class Rows {
  #rows = new Map();
  #following = true;

  /** @param parts elements: list, scroll, newest (a button), older, announcer */
  constructor(parts) {
    Object.assign(this, parts);
    this.scroll.addEventListener("scroll", () => {
      const below = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight;
      this.#following = below < NEAR_PX;
      this.newest.hidden = this.#following;
    });
    this.newest.addEventListener("click", () => this.#follow(true));
    new ResizeObserver(() => this.#follow(this.#following)).observe(this.scroll);
  }

  render(segments, language) {
    const visible = segments.slice(-MOST_ROWS);
    this.older.hidden = segments.length <= MOST_ROWS;
    const wanted = new Set(visible.map((one) => one.seg));
    for (const [seg, row] of this.#rows) {
      if (wanted.has(seg)) continue;
      row.element.remove();
      this.#rows.delete(seg);
    }
    let cursor = this.list.firstElementChild;
    for (const segment of visible) {
      const row = this.#rows.get(segment.seg) ?? new Row(segment, language);
      if (row.element === cursor) cursor = cursor.nextElementSibling;
      else this.list.insertBefore(row.element, cursor);
      this.#rows.set(segment.seg, row);
      if (row.show(segment)) this.#announce(segment.text);
    }
    this.#follow(this.#following);
  }

  /** Screen readers hear a text once, when it will not change any more. */
  #announce(text) {
    this.announcer.append(make("p", "", text));
    while (this.announcer.children.length > ANNOUNCED) this.announcer.firstChild.remove();
  }

  #follow(wanted) {
    if (!wanted) return;
    this.#following = true;
    this.newest.hidden = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

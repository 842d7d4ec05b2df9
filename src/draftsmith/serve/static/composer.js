// What someone types becomes hypotheses: at a pause and every few words; a sentence that ends is
// final and leaves the box.

import { countWords, takeSentences } from "./text.js";

const PAUSE_MS = 400;
const FEW_WORDS = 3;

export class Composer {
  #sent = 0;
  #cancel = () => {};

  /**
   * @param hear takes (text, final); no text and final: what was heard last is final
   * @param keep is told what is to stay in the box
   * @param after takes (milliseconds, function), gives what cancels it
   */
  constructor({ hear, keep, after }) {
    Object.assign(this, { hear, keep, after });
  }

  /** The text of the box is this now. */
  typed(text) {
    this.#cancel();
    const rest = this.#finish(text, false);
    if (/\s$/u.test(rest) && countWords(rest) >= this.#sent + FEW_WORDS) this.#say(rest);
    this.#cancel = this.after(PAUSE_MS, () => {
      const open = this.#finish(rest, true);
      if (open.trim()) this.#say(open);
    });
  }

  /** Enter: what is there is final. */
  entered(text) {
    this.#cancel();
    this.hear(this.#finish(text, true).trim(), true);
    this.#sent = 0;
    this.keep("");
  }

  #finish(text, paused) {
    const { done, rest } = takeSentences(text, paused);
    if (!done.length) return text;
    for (const sentence of done) this.hear(sentence, true);
    this.#sent = 0;
    this.keep(rest);
    return rest;
  }

  #say(text) {
    this.#sent = countWords(text);
    this.hear(text.trim(), false);
  }
}

// A transcript as a recogniser would have sent it: hypotheses that grow, then a final one.

import { countWords, pieces, takeSentences } from "./text.js";

const LONGEST = 60; // words; a transcript without full stops must not become one endless segment

/** All hypotheses of a transcript, each `lag` words longer than the one before. */
export function replaySteps(transcript, lag) {
  const { done, rest } = takeSentences(transcript.replaceAll("\r\n", "\n"), true);
  const sentences = rest.trim() ? [...done, rest.trim()] : done;
  return sentences.flatMap(shorten).flatMap((sentence) => grow(sentence, lag));
}

function shorten(sentence) {
  const parts = [""];
  for (const piece of pieces(sentence)) {
    if (countWords(piece) && countWords(parts.at(-1)) === LONGEST) parts.push("");
    parts[parts.length - 1] += piece;
  }
  return parts.map((part) => part.trim()).filter(Boolean);
}

function grow(sentence, lag) {
  const steps = [];
  let [text, words] = ["", 0];
  for (const piece of pieces(sentence)) {
    if (countWords(piece) && words === lag) {
      steps.push({ text: text.trim(), words, final: false });
      words = 0;
    }
    text += piece;
    words += countWords(piece);
  }
  return [...steps, { text: text.trim(), words, final: true }];
}

/** Says the steps one after the other, at so many words per second. */
export class Player {
  #cancel = null;
  #open = "";

  /**
   * @param hear takes (text, final)
   * @param connected while it says no, the player waits
   * @param after takes (milliseconds, function), gives what cancels it
   * @param ended is called after the last step
   */
  constructor({ hear, connected, after, ended }) {
    Object.assign(this, { hear, connected, after, ended });
  }

  get playing() {
    return this.#cancel !== null;
  }

  play(steps, wordsPerSecond) {
    this.stop();
    const next = (place) => {
      if (!this.connected()) {
        this.#cancel = this.after(250, () => next(place));
        return;
      }
      const { text, final } = steps[place];
      this.hear(text, final);
      this.#open = final ? "" : text;
      if (place + 1 === steps.length) {
        this.#cancel = null;
        this.ended();
        return;
      }
      const wait = (1000 * steps[place + 1].words) / wordsPerSecond();
      this.#cancel = this.after(wait, () => next(place + 1));
    };
    if (steps.length) this.#cancel = this.after(0, () => next(0));
  }

  /** What was said so far becomes final. */
  stop() {
    if (!this.playing) return;
    this.#cancel();
    this.#cancel = null;
    if (this.#open) this.hear(this.#open, true);
    this.#open = "";
    this.ended();
  }
}

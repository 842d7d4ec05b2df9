// A text that changes under the reader's eyes: an element per word. Words that stay keep theirs,
// so that their underline fades in peace while others change.

import { make } from "./browser.js";
import { align, changes, pieces, splitAt } from "./text.js";

export class Caption {
  #pieces = [];
  #nodes = [];
  #held = make("span", "held");

  constructor(element) {
    this.element = element;
    element.replaceChildren(this.#held);
  }

  show({ text, stable, hidden, final }) {
    const after = pieces(text);
    const match = align(this.#pieces, after);
    const changed = changes(this.#pieces, after, match);
    const stableEnd = final ? text.length : splitAt(text, stable)[0].length;
    let cursor = this.element.firstChild;
    let start = 0;
    const nodes = after.map((piece, place) => {
      let node = this.#nodes[match[place]];
      if (node) {
        while (cursor !== node) cursor = removed(cursor);
        cursor = node.nextSibling;
      } else {
        node = make("span", changed[place] ? "changed" : "");
        this.element.insertBefore(node, cursor);
      }
      fill(node, piece, stableEnd - start);
      start += piece.length;
      return node;
    });
    while (cursor !== this.#held) cursor = removed(cursor);
    this.#held.textContent = hidden;
    [this.#pieces, this.#nodes] = [after, nodes];
  }
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

/** The first `stable` units of a word are not expected to change. Blanks are not underlined. */
function fill(node, piece, stable) {
  const word = node.className ? piece.trimEnd().length : piece.length;
  const cuts = [0, Math.min(Math.max(stable, 0), piece.length), word, piece.length];
  cuts.sort((one, other) => one - other);
  const parts = cuts.slice(1).flatMap((end, place) => {
    const start = cuts[place];
    if (start === end) return [];
    const name = start < stable ? "stable" : "tail";
    return [[start < word ? name : `${name} blank`, piece.slice(start, end)]];
  });
  const same =
    node.children.length === parts.length &&
    parts.every(
      ([name, text], place) =>
        node.children[place].className === name && node.children[place].textContent === text,
    );
  if (!same) node.replaceChildren(...parts.map(([name, text]) => make("span", name, text)));
}

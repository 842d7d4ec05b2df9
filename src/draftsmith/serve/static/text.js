// Places, words and sentences of a text. Nothing here touches the page.

/** The first `count` characters and the rest. Characters are code points, as in the protocol. */
export function splitAt(text, count) {
  let at = 0;
  for (let left = count; left > 0 && at < text.length; left -= 1) {
    at += text.codePointAt(at) > 0xffff ? 2 : 1;
  }
  return [text.slice(0, at), text.slice(at)];
}

// Scripts without blanks between words: every character counts as a word.
const SCRIPTS = ["Hani", "Hira", "Kana", "Bopo", "Thai", "Lao", "Khmr", "Mymr", "Tibt", "Yiii"];
const UNSPACED = new RegExp(`[${SCRIPTS.map((name) => `\\p{scx=${name}}`).join("")}]`, "u");
const RUN = /\s*(?:[\p{L}\p{N}\p{M}'’_-]+|[^\p{L}\p{N}\p{M}'’_\s-]+)\s*|\s+/gu;
const graphemes = new Intl.Segmenter(undefined, { granularity: "grapheme" });

/** Words and punctuation, each with the blanks behind it; together they are the text. */
export function pieces(text) {
  return (text.match(RUN) ?? []).flatMap((run) => (UNSPACED.test(run) ? characters(run) : [run]));
}

function characters(run) {
  const parts = [];
  for (const { segment } of graphemes.segment(run)) {
    if (parts.length && !segment.trim()) parts[parts.length - 1] += segment;
    else parts.push(segment);
  }
  return parts;
}

/** Words alone: what a reader counts. */
export function countWords(text) {
  return pieces(text).filter((piece) => /[\p{L}\p{N}]/u.test(piece)).length;
}

const MOST_COMPARED = 400;

/** For every new piece the place of the old one that it is (longest common subsequence), or -1. */
export function align(before, after) {
  const same = (i, j) => before[i].trim() === after[j].trim();
  const match = new Array(after.length).fill(-1);
  let start = 0;
  while (start < Math.min(before.length, after.length) && same(start, start)) {
    match[start] = start;
    start += 1;
  }
  let [endBefore, endAfter] = [before.length, after.length];
  while (endBefore > start && endAfter > start && same(endBefore - 1, endAfter - 1)) {
    endBefore -= 1;
    endAfter -= 1;
    match[endAfter] = endBefore;
  }
  const [rows, columns] = [endBefore - start, endAfter - start];
  if (Math.max(rows, columns) > MOST_COMPARED) return match;
  const common = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      common[i][j] = same(start + i, start + j)
        ? common[i + 1][j + 1] + 1
        : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  let [i, j] = [0, 0];
  while (i < rows && j < columns) {
    if (same(start + i, start + j)) match[start + j++] = start + i++;
    else if (common[i + 1][j] >= common[i][j + 1]) i += 1;
    else j += 1;
  }
  return match;
}

/** Which new pieces a reader of the old text sees change. What only grows at the end does not. */
export function changes(before, after, match) {
  const changed = new Array(after.length).fill(false);
  let gone = 0; // old pieces up to here are accounted for
  let next = 0;
  while (next < after.length) {
    if (match[next] >= 0) {
      gone = match[next] + 1;
      next += 1;
      continue;
    }
    const first = next;
    while (next < after.length && match[next] < 0) next += 1;
    const atEnd = next === after.length;
    const replaced = before.slice(gone, atEnd ? before.length : match[next]);
    for (let place = first; place < next; place += 1) {
      const old = replaced[place - first]?.trim();
      changed[place] = old === undefined ? !atEnd : !after[place].trim().startsWith(old);
    }
  }
  return changed;
}

const END = /[.!?…؟۔।]+["'”’»)\]]*(?=\s|$)|[。！？｡]+["'”’»）」』]*|\n+/gu;
const SHORT = "Dr|Mr|Mrs|Ms|Prof|St|vs|etc|e\\.g|i\\.e|z\\.B|d\\.h|u\\.a|bzw|ca|Nr|No";
const GOES_ON = new RegExp(`(?:^|[\\s(])(?:\\p{Lu}|\\d{1,2}|${SHORT})\\.$`, "u");

/**
 * Sentences that are over, and what follows them.
 * `paused`: a full stop at the very end counts, too; while one types, "3." may become "3.5".
 */
export function takeSentences(text, paused) {
  const done = [];
  let start = 0;
  for (const found of text.matchAll(END)) {
    const end = found.index + found[0].length;
    const sentence = text.slice(start, end).trim();
    const last = end === text.length && /[^\n。！？｡]$/u.test(found[0]);
    if (GOES_ON.test(sentence) || (last && !paused)) continue;
    if (sentence) done.push(sentence);
    start = end;
  }
  return { done, rest: text.slice(start).trimStart() };
}

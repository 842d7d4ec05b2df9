import { align, changes, countWords, pieces, splitAt, takeSentences } from "../page/text.js";
import { equal } from "./check.js";

function marked(before, after) {
  const [old, now] = [pieces(before), pieces(after)];
  const flags = changes(old, now, align(old, now));
  return now.filter((_, place) => flags[place]).map((piece) => piece.trim());
}

export const tests = {
  "characters are code points"() {
    equal(splitAt("a😀b", 2), ["a😀", "b"]);
    equal(splitAt("日本語", 1), ["日", "本語"]);
    equal(splitAt("ab", 9), ["ab", ""]);
    equal(splitAt("ab", 0), ["", "ab"]);
  },

  "pieces are the text"() {
    const blanks = ["", " ", "  Das ist, glaube ich,  gut.\n"];
    for (const text of [...blanks, "日本語。です", "a👩‍👩‍👧b c", "สวัสดี ครับ", "-"]) {
      equal(pieces(text).join(""), text);
    }
  },

  "a word is a piece, and so is a character of a script without blanks"() {
    equal(pieces("Das ist gut."), ["Das ", "ist ", "gut", "."]);
    equal(pieces("我 爱你"), ["我 ", "爱", "你"]);
    equal(countWords("Well, 3 words."), 3);
    equal(countWords("我爱你。"), 3);
  },

  "a cluster of code points stays whole"() {
    equal(pieces("か\u3099き"), ["か\u3099", "き"]);
  },

  "the longest common part is found"() {
    equal(align(["a ", "b ", "c"], ["a ", "x ", "c"]), [0, -1, 2]);
    equal(align(["b ", "a ", "b"], ["a ", "b "]), [1, 2]);
    equal(align([], ["a"]), [-1]);
    equal(align(["a"], []), []);
  },

  "very long texts are not compared word by word, but end"() {
    const [old, now] = ["x", "y"].map((letter) => new Array(3000).fill(letter));
    equal(new Set(align(old, now)), new Set([-1]));
  },

  "what replaces a word is marked, what grows is not"() {
    equal(marked("Das ist", "Das ist eine Prüfung."), []);
    equal(marked("Das ist eine Prüf", "Das ist eine Prüfung"), []);
    equal(marked("Das ist eine Prüfung", "Das ist ein Beispiel."), ["ein", "Beispiel"]);
    equal(marked("Ich gehe", "Ich ging nach Hause"), ["ging"]);
    equal(marked("Ich habe gesehen", "Ich habe ihn gesehen"), ["ihn"]);
    equal(marked("", "Guten Tag"), []);
    equal(marked("我爱你", "我恨你"), ["恨"]);
  },

  "sentences that are over leave"() {
    equal(takeSentences("One. Two? Thr", false), { done: ["One.", "Two?"], rest: "Thr" });
    equal(takeSentences("「はい。」いいえ", false), { done: ["「はい。」"], rest: "いいえ" });
    equal(takeSentences("你好。", false), { done: ["你好。"], rest: "" });
    equal(takeSentences("no end\nnext", false), { done: ["no end"], rest: "next" });
    equal(takeSentences("\n\n", true), { done: [], rest: "" });
  },

  "a full stop at the end may go on until there is a pause"() {
    equal(takeSentences("It is 3.", false), { done: [], rest: "It is 3." });
    equal(takeSentences("It is good.", false), { done: [], rest: "It is good." });
    equal(takeSentences("It is good.", true), { done: ["It is good."], rest: "" });
  },

  "a short word with a full stop is no end"() {
    equal(takeSentences("Dr. Smith met J. Doe on 3. May. Then", true).done, [
      "Dr. Smith met J. Doe on 3. May.",
    ]);
  },
};

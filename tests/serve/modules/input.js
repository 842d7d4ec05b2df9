import { Composer } from "../page/composer.js";
import { Player, replaySteps } from "../page/replay.js";
import { equal } from "./check.js";

/** A clock that a test winds on. */
function clock() {
  let waiting = [];
  return {
    after(ms, then) {
      const one = { ms, then };
      waiting.push(one);
      return () => (waiting = waiting.filter((other) => other !== one));
    },
    next() {
      const one = waiting.shift();
      one.then();
      return one.ms;
    },
    get waits() {
      return waiting.length;
    },
  };
}

function composer() {
  const [said, kept, time] = [[], [], clock()];
  const hear = (text, final) => said.push(final ? `${text}|` : text);
  const keep = (text) => kept.push(text);
  return { said, kept, time, one: new Composer({ hear, keep, after: time.after }) };
}

function player() {
  const [said, time] = [[], clock()];
  const parts = { said, time, connected: true, ended: 0 };
  parts.one = new Player({
    hear: (text, final) => said.push(final ? `${text}|` : text),
    connected: () => parts.connected,
    after: time.after,
    ended: () => (parts.ended += 1),
  });
  return parts;
}

export const tests = {
  "hypotheses grow by the lag and end whole"() {
    equal(
      replaySteps("a b c d e. Next one", 2).map(({ text, final }) => (final ? `${text}|` : text)),
      ["a b", "a b c d", "a b c d e.|", "Next one|"],
    );
    equal(replaySteps("我爱你。", 2).map(({ text }) => text), ["我爱", "我爱你。"]);
    equal(replaySteps(" \r\n \n", 3), []);
  },

  "every step tells how many words are new"() {
    equal(replaySteps("a b c d e.", 2).map(({ words }) => words), [2, 2, 1]);
  },

  "a transcript without full stops is cut"() {
    const words = Array.from({ length: 130 }, (_, number) => `w${number}`).join(" ");
    const finals = replaySteps(words, 5).filter(({ final }) => final);
    equal(finals.map(({ text }) => text.split(" ").length), [60, 60, 10]);
    equal(finals.map(({ text }) => text).join(" "), words);
  },

  "the player keeps its pace"() {
    const { one, said, time } = player();
    one.play(replaySteps("a b c.", 2), () => 4);
    equal([time.next(), time.next()], [0, 250]);
    equal([said, one.playing, time.waits], [["a b", "a b c.|"], false, 0]);
  },

  "it waits for the connection"() {
    const parts = player();
    parts.connected = false;
    parts.one.play(replaySteps("a.", 2), () => 1);
    for (let tries = 0; tries < 3; tries += 1) parts.time.next();
    equal(parts.said, []);
    parts.connected = true;
    parts.time.next();
    equal(parts.said, ["a.|"]);
  },

  "what it left open is final when it stops"() {
    const parts = player();
    parts.one.play(replaySteps("a b c.", 2), () => 1);
    parts.time.next();
    parts.one.stop();
    parts.one.stop();
    equal([parts.said, parts.ended, parts.time.waits], [["a b", "a b|"], 1, 0]);
  },

  "typing is heard at a pause"() {
    const { one, said, time } = composer();
    for (const text of ["H", "He", "Hello"]) one.typed(text);
    equal([said, time.waits], [[], 1]);
    time.next();
    equal(said, ["Hello"]);
  },

  "typing is heard every few words, when a word is over"() {
    const { one, said } = composer();
    const texts = ["a ", "a b ", "a b c", "a b c ", "a b c d ", "a b c d e f "];
    for (const text of texts) one.typed(text);
    equal(said, ["a b c", "a b c d e f"]);
  },

  "a sentence that ends leaves the box"() {
    const { one, said, kept } = composer();
    one.typed("All good. No");
    equal([said, kept], [["All good.|"], ["No"]]);
  },

  "a full stop and a pause end a sentence"() {
    const { one, said, kept, time } = composer();
    one.typed("All good.");
    equal([said, kept], [[], []]);
    time.next();
    equal([said, kept], [["All good.|"], [""]]);
  },

  "enter ends it, whatever there is"() {
    const { one, said, kept, time } = composer();
    one.typed("no full stop");
    one.entered("no full stop");
    equal([said, kept, time.waits], [["no full stop|"], [""], 0]);
  },

  "several lines that were pasted are several segments"() {
    const { one, said } = composer();
    one.entered("one\ntwo. three");
    equal(said, ["one|", "two.|", "three|"]);
  },
};

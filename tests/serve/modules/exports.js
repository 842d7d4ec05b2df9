import { toJsonLines, toSrt, toText, toVtt } from "../page/exports.js";
import { equal } from "./check.js";

const SEGMENTS = [
  { seg: 0, rev: 2, source: "One", text: "Eins <b>&", final: true, from: 0.5, to: 2.25 },
  { seg: 1, rev: 0, source: "...", text: "  ", final: true, from: 2, to: 2 },
  { seg: 2, rev: 1, source: "Two", text: "Zwei\n\n--> drei", final: false, from: 2, to: 3661.0016 },
];

export const tests = {
  "text: a line per segment that says something"() {
    equal(toText(SEGMENTS), "Eins <b>&\nZwei --> drei\n");
  },

  "srt: numbered, with commas, and no cue breaks the next"() {
    equal(
      toSrt(SEGMENTS),
      "1\n00:00:00,500 --> 00:00:02,250\nEins <b>&\n\n" +
        "2\n00:00:02,250 --> 01:01:01,002\nZwei -> drei\n",
    );
  },

  "vtt: with points, and markup is text"() {
    equal(
      toVtt(SEGMENTS),
      "WEBVTT\n\n00:00:00.500 --> 00:00:02.250\nEins &lt;b&gt;&amp;\n\n" +
        "00:00:02.250 --> 01:01:01.002\nZwei --&gt; drei\n",
    );
  },

  "subtitles follow one another, however fast they came"() {
    const at = (seg) => ({ seg, rev: 0, source: "", text: `t${seg}`, final: true, from: 5, to: 5 });
    const found = [...toVtt([at(0), at(1)]).matchAll(/(\S+) --> (\S+)/g)];
    const times = found.map((one) => one.slice(1));
    equal(times, [["00:00:05.000", "00:00:06.000"], ["00:00:06.000", "00:00:07.000"]]);
  },

  "jsonl: source and translation as they are"() {
    const lines = toJsonLines(SEGMENTS).trimEnd().split("\n").map((line) => JSON.parse(line));
    equal(lines.length, 3);
    const { from, to, ...said } = SEGMENTS[2];
    equal(lines[2], { ...said, start: 2, end: 3661.002 });
  },

  "nothing was said"() {
    equal([toText([]), toSrt([]), toVtt([]), toJsonLines([])], ["", "", "WEBVTT\n", ""]);
  },
};

// The history as files. A segment has `from` and `to`, in seconds.

const SHORTEST = 1; // seconds of a subtitle

/** All formats of a download: file ending -> what makes it. */
export const FORMATS = {
  txt: { type: "text/plain", make: toText },
  srt: { type: "application/x-subrip", make: toSrt },
  vtt: { type: "text/vtt", make: toVtt },
  jsonl: { type: "application/jsonl", make: toJsonLines },
};

/** The translation, a line per segment. */
export function toText(segments) {
  return spoken(segments)
    .map((one) => `${oneLine(one.text)}\n`)
    .join("");
}

export function toSrt(segments) {
  return cues(segments)
    .map(({ from, to, text }, place) => {
      const times = `${clock(from, ",")} --> ${clock(to, ",")}`;
      return `${place + 1}\n${times}\n${text.replaceAll("-->", "->")}\n`;
    })
    .join("\n");
}

export function toVtt(segments) {
  const escape = (text) =>
    text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const parts = cues(segments).map(
    ({ from, to, text }) => `${clock(from, ".")} --> ${clock(to, ".")}\n${escape(text)}\n`,
  );
  return ["WEBVTT\n", ...parts].join("\n");
}

/** Source and translation, an object per line. */
export function toJsonLines(segments) {
  return segments
    .map(({ seg, rev, source, text, final, from, to }) => {
      const [start, end] = [from, to].map((seconds) => Math.round(seconds * 1000) / 1000);
      return `${JSON.stringify({ seg, rev, source, text, final, start, end })}\n`;
    })
    .join("");
}

function spoken(segments) {
  return segments.filter((one) => one.text.trim());
}

/** One after the other: subtitles that overlap would hide each other. */
function cues(segments) {
  let ended = 0;
  return spoken(segments).map((one) => {
    const from = Math.max(one.from, ended);
    const to = Math.max(one.to, from + SHORTEST);
    ended = to;
    return { from, to, text: oneLine(one.text) };
  });
}

// an empty line inside a subtitle would end it
function oneLine(text) {
  return text.trim().replace(/\s*[\r\n\u2028\u2029]+\s*/gu, " ");
}

function clock(seconds, point) {
  const ms = Math.round(seconds * 1000);
  const pad = (value, digits = 2) => String(Math.floor(value)).padStart(digits, "0");
  const [hours, minutes] = [ms / 3_600_000, (ms / 60_000) % 60];
  return `${pad(hours)}:${pad(minutes)}:${pad((ms / 1000) % 60)}${point}${pad(ms % 1000, 3)}`;
}

import { canListen, Listener } from "../page/speech.js";
import { equal } from "./check.js";

class FakeRecogniser {
  static newest;
  calls = [];
  constructor() {
    FakeRecogniser.newest = this;
  }
  start() {
    this.calls.push("start");
  }
  abort() {
    this.calls.push("abort");
  }
}

function listening() {
  globalThis.SpeechRecognition = FakeRecogniser;
  const [said, ends] = [[], []];
  const hear = (text, final) => said.push(final ? `${text}|` : text);
  const one = new Listener({ hear, ended: (why) => ends.push(why) });
  one.start("en-GB");
  return { one, said, ends, recogniser: FakeRecogniser.newest };
}

const result = (transcript, isFinal) => Object.assign([{ transcript }], { isFinal });

export const tests = {
  "it knows whether the browser can"() {
    globalThis.SpeechRecognition = globalThis.webkitSpeechRecognition = undefined;
    equal(canListen(), false);
    globalThis.webkitSpeechRecognition = FakeRecogniser;
    equal(canListen(), true);
  },

  "what is open is one hypothesis, what is final comes first"() {
    const { recogniser, said } = listening();
    const finals = [result("old", true), result(" One.", true)];
    const results = [...finals, result("two", false), result(" th", false)];
    recogniser.onresult({ resultIndex: 1, results });
    equal(said, ["One.|", "two th"]);
    const { lang, continuous, interimResults } = recogniser;
    equal([lang, continuous, interimResults], ["en-GB", true, true]);
  },

  "after a silence it listens again"() {
    const { one, recogniser, ends } = listening();
    recogniser.onend();
    equal([recogniser.calls, one.listening, ends], [["start", "start"], true, []]);
  },

  "stopped, it ends what is open and hears no more"() {
    const { one, recogniser, said, ends } = listening();
    one.stop();
    equal([recogniser.calls, said, ends], [["start", "abort"], ["|"], [null]]);
    equal([recogniser.onresult, recogniser.onend, one.listening], [null, null, false]);
  },

  "a browser that refuses is not asked again"() {
    const { one, recogniser, ends } = listening();
    recogniser.onerror({ error: "no-speech" });
    equal(one.listening, true);
    recogniser.onerror({ error: "not-allowed" });
    equal([one.listening, ends.length], [false, 1]);
  },
};

// The browser's own recogniser, where it has one.

const recognition = () => globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;

export const canListen = () => recognition() !== undefined;

const REFUSED = ["not-allowed", "service-not-allowed", "audio-capture", "network"];

/**
 * Listens until it is told not to. `hear` takes (text, final); no text and final: what was heard
 * last is final. `ended` takes why, if nobody asked for it.
 */
export class Listener {
  #recogniser = null;

  constructor({ hear, ended }) {
    Object.assign(this, { hear, ended });
  }

  get listening() {
    return this.#recogniser !== null;
  }

  start(language) {
    const recogniser = new (recognition())();
    recogniser.lang = language;
    recogniser.continuous = true;
    recogniser.interimResults = true;
    recogniser.onresult = ({ resultIndex, results }) => this.#take([...results].slice(resultIndex));
    recogniser.onerror = ({ error }) => {
      if (REFUSED.includes(error)) this.#stop(`The browser does not listen: ${error}.`);
    };
    // browsers stop after a silence; the reader did not ask for that
    recogniser.onend = () => recogniser.start();
    this.#recogniser = recogniser;
    recogniser.start();
  }

  stop() {
    this.#stop(null);
  }

  #take(results) {
    const open = [];
    for (const result of results) {
      if (result.isFinal) this.hear(result[0].transcript.trim(), true);
      else open.push(result[0].transcript.trim());
    }
    if (open.length) this.hear(open.join(" "), false);
  }

  #stop(why) {
    const recogniser = this.#recogniser;
    this.#recogniser = null;
    if (recogniser) {
      recogniser.onresult = recogniser.onerror = recogniser.onend = null;
      recogniser.abort();
      this.hear("", true);
    }
    this.ended(why);
  }
}

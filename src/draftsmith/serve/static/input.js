// Where the source comes from: typing, a transcript, or speech. One of them speaks at a time.

import { address, after, byId } from "./browser.js";
import { Composer } from "./composer.js";
import { Player, replaySteps } from "./replay.js";
import { canListen, Listener } from "./speech.js";

/** @param tell shows the reader a sentence */
export function startInput(client, tell) {
  const isFirst = client.state.session === null;
  const hear = (text, final) => client.hear(text, final);
  const hush = [
    startTyping(hear),
    startReplay(hear, () => client.ready, tell),
    startListening(hear, tell),
  ];
  const quiet = () => hush.forEach((stop) => stop());

  for (const choice of document.querySelectorAll("[name=mode]")) {
    choice.addEventListener("change", () => {
      quiet();
      for (const name of ["type", "replay", "speak"]) {
        byId(`panel-${name}`).hidden = name !== choice.value;
      }
    });
  }
  byId("restart").addEventListener("click", () => {
    if (!confirm("Begin a new session? What was said leaves the page.")) return;
    quiet();
    client.restart();
  });
  if (isFirst) openSample(); // a first visit has something to play
}

// Each of these gives back what stops it.

function startTyping(hear) {
  const box = byId("typed");
  const composer = new Composer({ hear, after, keep: (text) => (box.value = text) });
  box.addEventListener("input", (event) => event.isComposing || composer.typed(box.value));
  box.addEventListener("compositionend", () => composer.typed(box.value));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    composer.entered(box.value);
  });
  return () => composer.entered(box.value);
}

function startReplay(hear, connected, tell) {
  const play = byId("play");
  const ended = () => (play.textContent = "Play");
  const player = new Player({ hear, connected, after, ended });
  play.addEventListener("click", () => {
    if (player.playing) {
      player.stop();
      return;
    }
    const steps = replaySteps(byId("transcript").value, Number(byId("lag").value));
    if (!steps.length) {
      tell("Paste a transcript first, or load the sample.");
      return;
    }
    play.textContent = "Stop";
    player.play(steps, () => Number(byId("speed").value));
  });
  for (const id of ["lag", "speed"]) {
    const label = () => (byId(`${id}-value`).textContent = byId(id).value);
    byId(id).addEventListener("input", label);
    label();
  }

  byId("sample").addEventListener("click", async () => {
    byId("transcript").value = await sample();
  });
  byId("try").addEventListener("click", async () => {
    byId("transcript").value = "";
    await openSample();
    play.click();
  });
  return () => player.stop();
}

/** The transcript's panel, with the sample in it unless there is something else. */
async function openSample() {
  document.querySelector("[name=mode][value=replay]").click();
  const text = await sample();
  byId("transcript").value ||= text;
}

async function sample() {
  const answer = await fetch(address("page/sample.txt"));
  return answer.ok ? await answer.text() : "";
}

function startListening(hear, tell) {
  const button = byId("listen");
  const ended = (why) => {
    button.textContent = "Start listening";
    if (why) tell(why);
  };
  const listener = new Listener({ hear, ended });
  byId("speak-tab").hidden = !canListen();
  byId("spoken").value = navigator.language;
  button.addEventListener("click", () => {
    if (listener.listening) {
      listener.stop();
      return;
    }
    button.textContent = "Stop listening";
    listener.start(byId("spoken").value.trim());
  });
  return () => listener.listening && listener.stop();
}

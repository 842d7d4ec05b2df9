// Language, bias and mask. What the reader sets goes to the server; what it says comes back.

import { after, byId } from "./browser.js";
import { LANGUAGES } from "./languages.js";

const SETTLE_MS = 150; // while a slider moves, not every step is sent
const WALL = 0.5;

/** What a bias does, in words. */
export function biasMeaning(bias) {
  if (bias === 0) return "Exact: the text is what translating anew would give.";
  if (bias >= WALL) {
    return "The wall: text only grows. Nothing shown is ever corrected, mistakes included.";
  }
  const gap = Math.round((100 * bias) / (1 - bias));
  return `A drafted token stays unless another is over ${gap} points likelier.`;
}

export class Dials {
  #cancel = {};

  /** @param configure takes settings */
  constructor(configure) {
    for (const name of Object.keys(LANGUAGES)) {
      const option = document.createElement("option");
      option.value = name;
      byId("languages").append(option);
    }
    byId("target").addEventListener("change", ({ target }) => {
      if (target.value.trim()) configure({ target: target.value.trim() });
    });
    const slider = (id, setting) =>
      byId(id).addEventListener("input", () => {
        this.#label();
        this.#cancel[id]?.();
        this.#cancel[id] = after(SETTLE_MS, () => {
          this.#cancel[id] = null;
          configure({ [setting]: Number(byId(id).value) });
        });
      });
    slider("bias", "bias");
    slider("mask", "mask_k");
    byId("held").addEventListener("change", ({ target }) => {
      document.body.classList.toggle("show-held", target.checked);
    });
  }

  render({ target, bias, mask_k: mask }) {
    if (document.activeElement !== byId("target")) byId("target").value = target ?? "";
    if (!this.#cancel.bias) byId("bias").value = bias ?? 0;
    if (!this.#cancel.mask) byId("mask").value = mask ?? 0;
    byId("target-head").textContent = target || "Translation";
    this.#label();
  }

  #label() {
    const [bias, mask] = [Number(byId("bias").value), Number(byId("mask").value)];
    byId("bias-value").textContent = bias.toFixed(2);
    byId("bias-meaning").textContent = biasMeaning(bias);
    byId("bias-meaning").classList.toggle("wall", bias >= WALL);
    byId("mask-value").textContent = mask === 1 ? "1 token" : `${mask} tokens`;
  }
}

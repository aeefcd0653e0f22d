/** The box that questions are written in. */

import { byId } from "./words.js";

const isTouched = matchMedia("(pointer: coarse)"); // whose keyboards have no Shift+Enter: the button asks

export class Composer extends EventTarget {
  /** Fires `ask` when the reader wants to, and `input` when the question has changed. */
  constructor() {
    super();
    this.box = byId("question");
    this.box.addEventListener("input", () => {
      this.#fit();
      this.dispatchEvent(new Event("input"));
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
      if (isTouched.matches && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.dispatchEvent(new Event("ask"));
    });
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.dispatchEvent(new Event("ask"));
    });
  }

  get question() {
    return this.box.value.trim();
  }

  set question(text) {
    this.box.value = text;
    this.#fit();
    this.dispatchEvent(new Event("input"));
  }

  /** As high as what is in it; the style sheet has the bounds. */
  #fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}

/** How questions are asked: what the reader sets, and this browser keeps. */

import { byId } from "./words.js";

const KEY = "longreach-settings";
const KEPT = ["system", "temperature", "top-p", "max-tokens", "stop", "remember", "places"];

export class Settings extends EventTarget {
  /** Fires `change`. */
  constructor() {
    super();
    this.#load();
    byId("settings").addEventListener("input", () => {
      this.#save();
      this.#show();
      this.dispatchEvent(new Event("change"));
    });
  }

  /**
   * The settings as values: null for the server's default, or for an answer of any length that fits. `form` is "chat" or "plain": a prompt
   * that ends in "Answer:".
   */
  get values() {
    const form = byId("form").value;
    return {
      form,
      system: form === "chat" ? byId("system").value.trim() : "", // a completion has no place for it
      temperature: numberOf("temperature"),
      topP: numberOf("top-p"),
      maxTokens: numberOf("max-tokens"),
      stop: byId("stop-words").value.split("\n").filter(Boolean),
      remember: form === "chat" && byId("remember").checked,
      places: byId("places").checked,
    };
  }

  /** The form of prompts that suits the model best, unless the reader has chosen another one for it. */
  suit(model, form) {
    this.model = model;
    byId("form").value = this.kept.forms?.[model] ?? form;
    this.#show();
  }

  forget() {
    localStorage.removeItem(KEY);
  }

  #load() {
    try {
      this.kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      this.kept = {}; // what another program has written there
    }
    for (const id of KEPT) {
      const field = byId(FIELDS[id] ?? id);
      if (!(id in this.kept)) continue;
      if (field.type === "checkbox") field.checked = this.kept[id];
      else field.value = this.kept[id];
    }
    this.#show();
  }

  #save() {
    const values = KEPT.map((id) => {
      const field = byId(FIELDS[id] ?? id);
      return [id, field.type === "checkbox" ? field.checked : field.value];
    });
    const forms = { ...this.kept.forms, ...(this.model ? { [this.model]: byId("form").value } : {}) };
    this.kept = { ...Object.fromEntries(values), forms };
    localStorage.setItem(KEY, JSON.stringify(this.kept));
  }

  #show() {
    const isChat = byId("form").value === "chat";
    for (const id of ["system", "remember"]) byId(id).closest("label").hidden = !isChat;
  }
}

const FIELDS = { stop: "stop-words" };

function numberOf(id) {
  const value = byId(id).valueAsNumber;
  return Number.isNaN(value) ? null : value;
}

/** The chooser of attention policies, with a picture of what each computes. Absent where the server has no policies. */

import { drawMask } from "./mask.js";
import { getJson } from "./server.js";
import { byId, count, debounced, element, percent, tell } from "./words.js";

const DRAW_AFTER_MS = 200;

export class AttentionPanel extends EventTarget {
  /** Fires `change` when another policy or parameter is chosen. */
  constructor() {
    super();
    this.policies = [];
    this.length = 0;
    this.draw = debounced(() => this.#draw(), DRAW_AFTER_MS);
    byId("policy").addEventListener("change", () => this.#choose());
    document.addEventListener("theme", () => this.#paint());
  }

  /** Ask the server for its policies; the panel stays hidden if it has no such endpoint. */
  async load() {
    try {
      this.policies = (await getJson("v1/attention/policies")).data;
    } catch (error) {
      if (error.status === 404) return;
      throw error;
    }
    byId("policy").replaceChildren(...this.policies.map(({ policy }) => element("option", { value: policy }, policy.replaceAll("_", " "))));
    byId("attention").hidden = false;
    document.documentElement.classList.add("has-attention");
    this.#choose();
  }

  /** The request's `attention`: the policy with its parameters, or null for the server's own choice. */
  get chosen() {
    if (!this.policies.length) return null;
    const parameters = [...byId("parameters").querySelectorAll("input")].filter((input) => input.value.trim() !== "");
    return Object.fromEntries([["policy", byId("policy").value], ...parameters.map((input) => [input.name, valueOf(input)])]);
  }

  /** The chosen policy in a few words. */
  get words() {
    if (!this.chosen) return "";
    const { policy, ...parameters } = this.chosen;
    const shown = Object.entries(parameters).map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? count(value) : JSON.stringify(value)}`);
    return [policy.replaceAll("_", " "), ...shown].join(", ");
  }

  /** Draw the mask for a prompt of so many tokens. */
  setLength(length) {
    this.length = length;
    this.draw();
  }

  #choose() {
    const policy = this.policies.find((one) => one.policy === byId("policy").value);
    byId("policy-description").textContent = policy.description;
    byId("parameters").replaceChildren(...Object.entries(policy.parameters ?? {}).map(([name, about]) => this.#field(name, about)));
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  #field(name, about) {
    const isNumber = about.type === "integer" || about.type === "number";
    const given = about.default ?? null;
    const input = element("input", {
      name,
      type: isNumber ? "number" : "text",
      step: about.type === "integer" ? 1 : "any",
      min: about.minimum ?? null,
      max: about.maximum ?? null,
      value: given === null ? "" : isNumber ? given : JSON.stringify(given),
      placeholder: given === null ? "default" : null,
      title: about.description ?? null,
    });
    input.addEventListener("input", () => {
      this.draw();
      this.dispatchEvent(new Event("change"));
    });
    return element("label", {}, name.replaceAll("_", " "), " ", input);
  }

  async #draw() {
    if (!this.policies.length || !this.length) return;
    this.drawing?.abort();
    this.drawing = new AbortController();
    const query = new URLSearchParams({ length: this.length });
    for (const [name, value] of Object.entries(this.chosen)) query.set(name, typeof value === "object" ? JSON.stringify(value) : value);
    try {
      this.mask = await getJson(`v1/attention/mask?${query}`, this.drawing.signal);
      tell(byId("attention-error"), null);
      this.#paint();
    } catch (error) {
      if (error.name !== "AbortError") tell(byId("attention-error"), error.message);
    }
  }

  #paint() {
    if (!this.mask) return;
    const { grid, density, tiles_visited: visited, tiles_total: total, flops_saved_share: saved, length } = this.mask;
    const canvas = byId("mask");
    drawMask(canvas, grid);
    const computed = `${percent(density)} of ${count(length)} \u00d7 ${count(length)} is computed`;
    canvas.setAttribute("aria-label", `Mask of ${this.words}: ${computed}`);
    byId("mask-words").replaceChildren(
      element("strong", {}, percent(density)), ` of the causal half at ${count(length)} tokens: ${count(visited)} of ${count(total)} tiles. `,
      saved > 0 ? `Saves ${percent(saved)} of attention\u2019s work.` : "Nothing is left out.");
  }
}

function valueOf(input) {
  if (input.type === "number") return input.valueAsNumber;
  try {
    return JSON.parse(input.value);
  } catch {
    return input.value; // the server says what is wrong with it
  }
}

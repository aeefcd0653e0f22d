/** The chooser of attention policies, with a picture of what each computes. Absent where the server has no policies. */

import { drawMask } from "./mask.js";
import { nameOf, plain, sentenceOf, targetsOf } from "./policies.js";
import { getJson } from "./server.js";
import { byId, count, debounced, element, percent, tell } from "./words.js";

const DRAW_AFTER_MS = 200;
const CELLS = 128;

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
      ({ data: this.policies, default: this.default } = await getJson("v1/attention/policies"));
    } catch (error) {
      if (error.status === 404) return;
      throw error;
    }
    byId("policy").replaceChildren(...this.policies.map(({ policy }) => element("option", { value: policy }, policy === "dense" ? "dense: exact" : nameOf(policy))));
    byId("attention").hidden = false;
    byId("policy").value = this.#servers().policy;
    this.#choose();
  }

  /** The request's `attention`: the policy with its parameters, or null for the server's own choice. */
  get chosen() {
    if (!this.policies.length) return null;
    const parameters = [...byId("parameters").querySelectorAll("[data-type]:not(:disabled)")].map((input) => [input.name, valueOf(input)]);
    return Object.fromEntries([["policy", byId("policy").value], ...parameters.filter(([, value]) => value !== null)]);
  }

  /** Whether nothing is left out, as far as the page knows. */
  get isExact() {
    return !this.chosen || this.chosen.policy === "dense";
  }

  /** The chosen policy in a few words. */
  get words() {
    if (!this.chosen) return "";
    const { policy, ...parameters } = this.chosen;
    const shown = Object.entries(parameters).map(([name, value]) => `${name.replaceAll("_", " ")} ${inWords(value)}`);
    return [policy.replaceAll("_", " "), ...shown].join(", ");
  }

  /** Draw the mask for a prompt of so many tokens. */
  setLength(length) {
    this.length = length;
    this.draw();
  }

  /** The policy of requests that name none, from its short form, such as window:4096:4. */
  #servers() {
    const [policy, ...values] = (this.default ?? this.policies[0].policy).split(":");
    return { policy, values };
  }

  #choose() {
    const policy = this.policies.find((one) => one.policy === byId("policy").value);
    const given = this.#servers().policy === policy.policy ? this.#servers().values : [];
    byId("policy-description").textContent = sentenceOf(policy);
    byId("policy-source").textContent = plain(policy.description);
    const fields = Object.entries(policy.parameters).map(([name, about], i) => [name, this.#field(name, about, given[i] ?? about.default)]);
    const targets = targetsOf(policy);
    const others = fields.filter(([name]) => !targets.includes(name)).map(([, field]) => field);
    byId("parameters").replaceChildren(...(targets.length ? [this.#targets(fields.filter(([name]) => targets.includes(name)))] : []), ...others);
    this.#changed();
  }

  #changed() {
    byId("attention-words").textContent = this.isExact ? "exact" : this.words;
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  /** Fields of which only one has a value. */
  #targets(fields) {
    const choose = (chosen) => {
      for (const [name, field] of fields) field.querySelector("[data-type]").disabled = name !== chosen;
      this.#changed();
    };
    const isGiven = ([, field]) => field.querySelector("[data-type]").value !== "";
    const [first] = fields.find(isGiven) ?? fields[0];
    const choices = fields.map(([name, field]) => {
      const radio = element("input", { type: "radio", name: "target", value: name, checked: name === first, "aria-label": `by ${name}` });
      radio.addEventListener("change", () => choose(name));
      field.querySelector("[data-type]").disabled = name !== first;
      field.prepend(radio);
      field.classList.add("target");
      return field;
    });
    return element("fieldset", {}, element("legend", {}, "How much is read: one of"), ...choices);
  }

  #field(name, about, given) {
    const isNumber = about.type === "integer" || about.type === "number";
    const isSwitch = about.type === "boolean";
    const id = `parameter-${name}`;
    const kind = about.values ? "select" : "input";
    const input = element(kind, {
      id,
      name,
      type: about.values ? null : isSwitch ? "checkbox" : isNumber ? "number" : "text",
      "data-type": about.type,
      step: isNumber ? (about.type === "integer" ? 1 : "any") : null,
      min: isNumber ? about.minimum : null,
      max: isNumber ? about.maximum : null,
      checked: isSwitch && String(given) === "true",
      value: isSwitch ? null : given,
      placeholder: given === null ? "not set" : null,
      "aria-describedby": `${id}-about`,
    }, ...(about.values ?? []).map((value) => element("option", { selected: value === given }, value)));
    input.addEventListener("input", () => this.#changed());
    const label = element("label", { for: id }, name.replaceAll("_", " "));
    return element("div", { class: "parameter" }, label, input, element("p", { id: `${id}-about`, class: "muted" }, plain(about.description)));
  }

  async #draw() {
    if (!this.policies.length || !this.length) return;
    this.drawing?.abort();
    this.drawing = new AbortController();
    const query = new URLSearchParams({ length: this.length });
    for (const [name, value] of Object.entries(this.chosen)) query.set(name, value); // lists become commas
    try {
      this.mask = this.chosen.policy === "dense" ? causal(this.length) : await getJson(`v1/attention/mask?${query}`, this.drawing.signal);
      tell(byId("attention-error"), null);
      this.#paint();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.mask = null;
      byId("mask-figure").hidden = true;
      // A policy that depends on the text has no picture, and nothing is wrong with it.
      const hasNoPicture = error.details?.param === "policy";
      byId("attention-error").classList.toggle("error", !hasNoPicture);
      tell(byId("attention-error"), hasNoPicture ? error.message.replace(/^`policy`: /, "").replaceAll("`", "") : error.message);
    }
  }

  #paint() {
    if (!this.mask) return;
    const { grid, density, tiles_visited: visited, tiles_total: total, flops_saved_share: saved, length } = this.mask;
    const canvas = byId("mask");
    byId("mask-figure").hidden = false;
    drawMask(canvas, grid);
    canvas.setAttribute("aria-label", `Mask of ${this.words}, ${percent(density)} seen`);
    if (density === 1) {
      byId("mask-words").replaceChildren(element("strong", {}, "Exact."), ` At ${count(length)} tokens nothing is left out.`);
      return;
    }
    byId("mask-words").replaceChildren(
      element("strong", {}, percent(density)), ` of what exact attention sees at ${count(length)} tokens, in ${count(visited)} of ${count(total)} tiles. `,
      `Predicted to save ${percent(saved)} of its work.`);
  }
}

/** The mask of exact attention; the server would start a process to draw it. */
function causal(length) {
  const grid = Array.from({ length: CELLS }, (_, i) => Array.from({ length: CELLS }, (_, j) => (j < i ? 100 : j === i ? 50 : 0)));
  return { grid, density: 1, length };
}

/** A parameter as JSON, or null for the server's default; what cannot be read stays as it is, for the server to refuse. */
function valueOf(input) {
  if (input.type === "checkbox") return input.checked;
  const text = input.value.trim();
  if (input.dataset.type.startsWith("list")) return text ? text.split(",").map((part) => numberOr(part.trim())) : [];
  return text === "" ? null : numberOr(text);
}

const numberOr = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

const inWords = (value) => (typeof value === "number" ? count(value) : typeof value === "boolean" ? (value ? "on" : "off") : String(value));

/** The needle test: a map of lengths and depths whose cells fill as the answers come. */

import { postEvents } from "./events.js";
import { fresh, haystack, sampleText } from "./haystack.js";
import { pieceOf, requestFor } from "./prompt.js";
import { Refusal } from "./server.js";
import { countTokens } from "./tokens.js";
import { announce, byId, count, duration, element, tell } from "./words.js";

const SHORTEST = 1024;
const CHOSEN_AT_FIRST = 3;
const KEPT_RUNS = 4;
const ANSWER_TOKENS = 24;
const MARGIN_TOKENS = 96; // the question, the template and the answer
const SHARE = 0.985; // tokens a character differ a little along the text

export class NeedlePanel {
  /** `context()` gives model, limit, options, and the attention with its words. */
  constructor(context) {
    this.context = context;
    this.aborting = null;
    byId("needle-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.running) this.#run();
    });
    byId("needle-stop").addEventListener("click", () => this.stop());
  }

  get running() {
    return this.aborting !== null;
  }

  stop() {
    this.aborting?.abort();
  }

  /** Offer the lengths that the model takes. */
  setLimit(limit) {
    const lengths = [];
    for (let length = SHORTEST; length < limit; length *= 4) lengths.push(length);
    lengths.push(limit);
    byId("needle-lengths").replaceChildren(...lengths.map((length, i) =>
      element("label", { class: "check" }, element("input", { type: "checkbox", value: length, checked: i < CHOSEN_AT_FIRST }), ` ${count(length)}`)));
  }

  async #run() {
    const lengths = [...byId("needle-lengths").querySelectorAll("input:checked")].map((input) => Number(input.value));
    tell(byId("needle-error"), lengths.length ? null : "Choose at least one length.");
    if (!lengths.length) return;
    const depths = Number(byId("needle-depths").value);
    const map = new NeedleMap(lengths, Array.from({ length: depths }, (_, i) => i / (depths - 1)), this.context().attentionWords);
    byId("needle-runs").prepend(map.node);
    while (byId("needle-runs").children.length > KEPT_RUNS) byId("needle-runs").lastChild.remove();
    this.aborting = new AbortController();
    this.#show(true);
    try {
      await this.#fillAll(map, this.aborting.signal);
      announce(map.summary());
    } catch (error) {
      map.abandon();
      if (error.name === "AbortError") announce("Needle test stopped");
      else if (error instanceof Refusal) tell(byId("needle-error"), error.message);
      else throw error;
    } finally {
      this.aborting = null;
      this.#show(false);
    }
  }

  async #fillAll(map, signal) {
    const sample = sampleText();
    const charactersPerToken = sample.length / (await countTokens(sample, signal)).count;
    const draw = fresh();
    const context = this.context();
    for (const cell of map.cells) {
      const characters = (cell.length - MARGIN_TOKENS) * charactersPerToken * SHARE;
      const hidden = haystack(characters, cell.depth, draw);
      map.begin(cell);
      const options = { form: context.options.form, temperature: 0, maxTokens: ANSWER_TOKENS };
      const { path, body } = requestFor({ ...context, ...hidden, options });
      const started = performance.now();
      let answer = "";
      let usage = null;
      for await (const chunk of postEvents(path, body, signal)) {
        if (chunk.prompt_progress) map.progress(cell, chunk.prompt_progress);
        if (chunk.usage) usage = chunk.usage;
        answer += pieceOf(chunk).text;
      }
      map.fill(cell, { ...hidden, answer: answer.trim(), usage, seconds: (performance.now() - started) / 1000 });
    }
  }

  #show(running) {
    const [shown, hidden] = running ? ["needle-stop", "needle-run"] : ["needle-run", "needle-stop"];
    const hadFocus = document.activeElement === byId(hidden);
    byId(hidden).hidden = true;
    byId(shown).hidden = false;
    if (hadFocus) byId(shown).focus({ preventScroll: true });
  }
}

/** One test's table: a column for each length, a row for each depth. */
class NeedleMap {
  constructor(lengths, depths, attention) {
    this.cells = lengths.flatMap((length) => depths.map((depth) => ({ length, depth, node: element("td", {}) })));
    this.caption = element("figcaption", { class: "small" });
    this.details = element("p", { class: "small muted details" }, "Choose a cell to see its answer.");
    this.attention = attention || "the server\u2019s attention";
    const heads = lengths.map((length) => element("th", { scope: "col" }, count(length)));
    const rows = depths.map((depth) => element("tr", {},
      element("th", { scope: "row" }, `${Math.round(depth * 100)}%`),
      ...this.cells.filter((cell) => cell.depth === depth).map((cell) => cell.node)));
    this.node = element("figure", { class: "run" }, this.caption,
      element("div", { class: "table-frame" }, element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, element("span", { class: "hidden" }, "Depth")), ...heads)),
        element("tbody", {}, ...rows))),
      this.details);
    this.caption.textContent = this.summary();
  }

  summary() {
    const done = this.cells.filter((cell) => cell.found !== undefined);
    const found = done.filter((cell) => cell.found).length;
    return `${this.attention}: ${done.length ? `${found} of ${done.length} found` : "running"}`;
  }

  begin(cell) {
    cell.node.className = "asking";
    cell.node.textContent = "\u2026";
  }

  progress(cell, { processed, total }) {
    cell.node.textContent = `${Math.floor((processed / total) * 100)}%`;
  }

  fill(cell, { key, answer, question, usage, seconds }) {
    cell.found = answer.includes(key);
    const depth = `${Math.round(cell.depth * 100)}%`;
    const words = `${count(cell.length)} tokens, depth ${depth}: ${cell.found ? "found" : "not found"}`;
    const button = element("button", { type: "button", "aria-label": words }, cell.found ? "\u2713" : "\u2717");
    button.addEventListener("click", () => {
      const cached = usage?.prompt_tokens_details?.cached_tokens;
      const tokens = usage ? `${count(usage.prompt_tokens)} tokens${cached ? `, ${count(cached)} of them from the cache` : ""}, ` : "";
      this.details.textContent = `${question} The key is ${key}, at ${depth}. The answer: \u201c${answer}\u201d (${tokens}${duration(seconds)})`;
    });
    cell.node.className = cell.found ? "found" : "missed";
    cell.node.replaceChildren(button);
    this.caption.textContent = this.summary();
  }

  /** What has no answer yet will not get any. */
  abandon() {
    for (const cell of this.cells) {
      if (cell.found === undefined) cell.node.replaceChildren();
      if (cell.found === undefined) cell.node.className = "";
    }
    this.caption.textContent = `${this.summary().replace("running", "none asked")}, stopped`;
  }
}

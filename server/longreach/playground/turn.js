/** One question on the page: how far the document has been read, the answer as it comes, and what it took. */

import { Answer } from "./answer.js";
import { copyBy } from "./clipboard.js";
import { postEvents } from "./events.js";
import { attentionWords, figuresOf, firstLine } from "./figures.js";
import { Places } from "./places.js";
import { pieceOf } from "./prompt.js";
import { quoteLine, quotesOf } from "./quotes.js";
import { Reading } from "./reading.js";
import { Refusal } from "./server.js";
import { Sparkline } from "./sparkline.js";
import { Timing } from "./timing.js";
import { announce, count, duration, element, tell } from "./words.js";

const ANNOUNCED = 400;
const DRAW_MS = 250; // figures change with each token, and are read by people
const NOT_STATED = "Not stated.";

export class Turn extends EventTarget {
  /**
   * `about` says what the question is about, and `epoch` which turns belong together. `isDemonstration`: the embedded model answers.
   * Fires `grown` when there is more to see, `edit` and `again` when the reader wants to ask otherwise, or once more.
   */
  constructor({ question, about, epoch, isDemonstration = false }) {
    super();
    Object.assign(this, { question, about, epoch, isDemonstration });
    this.reasoning = "";
    this.usage = null;
    this.finished = false;
    this.notes = [];
    this.quotes = [];
    this.first = "";
    this.figures = [];
    this.#build();
  }

  /** The turn that `data` was; its document's text is there to show places with. */
  static from(data, documentText = "") {
    const turn = new Turn(data);
    turn.#restore(data, documentText);
    return turn;
  }

  /** What is kept of it: plain data. */
  get data() {
    const { question, about, epoch, isDemonstration, answer, reasoning, usage, finished, notes, first, figures, quotes, message } = this;
    return { question, about, epoch, isDemonstration, answer, reasoning, usage, finished, notes, first, figures, quotes, message, error: this.error.textContent };
  }

  get answer() {
    return this.text.source;
  }

  /** Send the request and show what comes, until its end. Throws nothing: what goes wrong is shown. */
  async run({ path, body, message }, documentText, signal) {
    this.message = message;
    this.timing = new Timing();
    this.node.setAttribute("aria-busy", "true");
    this.reading.begin();
    try {
      for await (const chunk of postEvents(path, body, signal)) this.#take(chunk);
      this.finished = true;
      announce(`Answer: ${this.answer.slice(0, ANNOUNCED)}`);
    } catch (error) {
      if (error.name === "AbortError") this.#note("Stopped.");
      else this.#fail(error);
    } finally {
      this.node.removeAttribute("aria-busy");
      this.#end(documentText);
    }
  }

  #build() {
    this.reading = new Reading();
    this.thoughts = element("p", { class: "reasoning" });
    this.thinkingWords = element("summary", {}, "Thinking\u2026");
    this.thinking = element("details", { class: "thinking", hidden: true }, this.thinkingWords, this.thoughts);
    const answer = element("div", { class: "answer" });
    this.text = new Answer(answer);
    this.noted = element("p", { class: "note", hidden: true });
    this.error = element("p", { class: "error", role: "alert", hidden: true });
    this.quoted = element("div", { class: "quotes small" });
    this.firstWords = element("span", { class: "first" });
    this.list = element("dl", { class: "figures" });
    this.sparkline = new Sparkline("Time between tokens");
    this.left = element("p", { class: "small muted left-out", hidden: true });
    this.details = element("details", { class: "took small muted", hidden: true }, element("summary", {}, this.firstWords), this.list, this.left);
    this.copy = element("button", { type: "button", class: "quiet copy-answer" }, "Copy");
    this.copy.addEventListener("click", () => copyBy(this.copy, this.answer));
    this.again = this.#button("Regenerate", "again");
    this.actions = element("div", { class: "row turn-actions", hidden: true }, this.copy, this.again);
    this.edit = this.#button("Edit", "edit");
    this.asked = element("div", { class: "asked" }, element("h3", {}, this.question), this.edit);
    this.node = element("article", { class: "turn" },
      element("p", { class: "small muted about" }, this.about),
      this.asked,
      this.reading.node, this.thinking, answer, this.noted, this.error, this.quoted, this.actions, this.details);
  }

  #button(words, event) {
    const button = element("button", { type: "button", class: `quiet ${event}` }, words);
    button.addEventListener("click", () => this.dispatchEvent(new Event(event)));
    return button;
  }

  #take(chunk) {
    if (chunk.prompt_progress) this.reading.read(chunk.prompt_progress);
    if (chunk.usage) this.usage = chunk.usage;
    const { text, reasoning } = pieceOf(chunk);
    this.finishReason = chunk.choices?.[0]?.finish_reason ?? this.finishReason;
    if (!text && !reasoning) return;
    this.timing.arrived(chunk.usage?.completion_tokens ?? this.timing.tokens + 1);
    if (reasoning) this.#think(reasoning);
    if (text) this.#say(text);
    if (performance.now() - (this.drawn ?? -Infinity) > DRAW_MS) this.#draw();
  }

  #think(reasoning) {
    this.reasoning += reasoning;
    this.thoughts.append(reasoning);
    this.thinking.hidden = false;
    this.thinkingWords.textContent = `Thinking\u2026 ${count(this.timing.tokens)} tokens`;
    this.#grown();
  }

  #say(text) {
    if (this.reasoning && !this.text.source) this.thinkingWords.textContent = `Thought for ${duration((performance.now() / 1000) - this.timing.sent - this.timing.firstToken)}`;
    this.text.push(text, () => this.#grown());
  }

  #draw() {
    this.drawn = performance.now();
    this.reading.done();
    this.first = firstLine(this.timing, this.usage, this.reading.progress);
    this.figures = figuresOf(this.timing, this.usage, this.reading.progress);
    this.#showFigures();
    const { gaps } = this.timing;
    if (!gaps.length) return;
    this.list.lastChild.append(this.sparkline.node);
    this.sparkline.draw(gaps);
  }

  #showFigures() {
    this.firstWords.textContent = this.first;
    this.list.replaceChildren(...this.figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    this.details.hidden = !this.first;
  }

  #end(documentText) {
    this.text.draw();
    this.reading.end();
    if (this.timing.firstToken === null) {
      if (this.finished) this.#note("The answer is empty.");
    } else this.#draw();
    if (this.finishReason === "length") this.#note("Cut off at the longest answer that Settings allow.");
    if (this.isDemonstration && this.answer.trim() === NOT_STATED) {
      this.#note("This is the demonstration model\u2019s usual answer. It says nothing about your text.");
    }
    if (!this.usage?.places?.length) this.quotes = quotesOf(this.answer, documentText);
    this.#showEnd(documentText);
    this.#grown();
  }

  /** Show what is there once an answer has ended. */
  #showEnd(documentText) {
    this.reading.node.hidden = this.reading.node.hidden || this.finished || Boolean(this.error.textContent);
    this.actions.hidden = false;
    this.copy.hidden = !this.answer;
    if (this.usage?.places?.length) {
      this.quoted.replaceChildren(new Places(this.text.node, this.answer, this.usage.places, documentText, this.message).node);
    } else this.quoted.replaceChildren(...this.quotes.map(quoteLine));
    if (this.usage?.attention) tell(this.left, attentionWords(this.usage.attention).join(" \u00b7 "));
  }

  #note(words) {
    this.notes.push(words);
    tell(this.noted, this.notes.join(" "));
    announce(words);
  }

  #fail(error) {
    this.refusal = error;
    tell(this.error, error instanceof Refusal ? error.message : `This page failed: ${error.message}`);
    if (!(error instanceof Refusal)) throw error;
  }

  #grown() {
    this.dispatchEvent(new Event("grown"));
  }

  #restore(data, documentText) {
    const { answer, reasoning, usage, finished, notes, first, figures, quotes, message, error } = data;
    Object.assign(this, { reasoning, usage, finished, notes, first, figures, quotes, message });
    this.text.source = answer;
    this.text.draw();
    if (reasoning) {
      this.thinking.hidden = false;
      this.thinkingWords.textContent = "Thought";
      this.thoughts.append(reasoning);
    }
    tell(this.error, error || null);
    if (!finished && !error && !notes.length) this.notes = ["Broken off when the page was left."];
    tell(this.noted, this.notes.join(" "));
    this.reading.node.hidden = true;
    this.#showFigures();
    this.#showEnd(documentText);
  }
}

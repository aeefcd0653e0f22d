/** The conversation: questions and answers, the newest at its end, each to be asked again or otherwise. */

import { copyBy } from "./clipboard.js";
import { Follower } from "./follow.js";
import { Turn } from "./turn.js";
import { announce, byId, element } from "./words.js";

const SURE_MS = 4000;

export class Conversation extends EventTarget {
  /**
   * `context()` gives what the next question is about: `about`, `epoch`, `isDemonstration`, `documentText`, `isChained` (whether questions go
   * along with those before them), and `request(question, turns)`. Fires `state` when a question begins or ends, `change` when there is
   * something new to keep, and `answered` with a turn.
   */
  constructor(context) {
    super();
    this.context = context;
    this.turns = [];
    this.asking = null; // what stops the question that is being answered
    this.follower = new Follower();
    byId("conversation").addEventListener("click", (event) => copyCode(event));
  }

  /** Ask a question at a place in the conversation: its end, or that of a turn that it replaces. */
  async ask(question, place = this.turns.length) {
    const context = this.context();
    for (const gone of this.turns.splice(place, context.isChained ? Infinity : 1)) gone.node.remove();
    const turn = new Turn({ question, about: context.about, epoch: context.epoch, isDemonstration: context.isDemonstration });
    const before = this.turns.slice(0, place).filter(({ epoch, finished }) => finished && epoch === context.epoch);
    const request = context.request(question, context.isChained ? before : []);
    this.#put(turn, place);
    this.asking = new AbortController();
    this.dispatchEvent(new Event("state"));
    this.dispatchEvent(new Event("change"));
    if (place === this.turns.length - 1) this.follower.toEnd();
    try {
      await turn.run(request, context.documentText, this.asking.signal);
    } finally {
      this.asking = null;
      this.dispatchEvent(new Event("change"));
      this.dispatchEvent(new CustomEvent("answered", { detail: turn }));
      this.dispatchEvent(new Event("state"));
    }
  }

  stop() {
    this.asking?.abort();
  }

  /** Characters of the questions and answers that the next question goes along with. */
  get charactersBefore() {
    const { epoch, isChained } = this.context();
    if (!isChained) return 0;
    const before = this.turns.filter((turn) => turn.finished && turn.epoch === epoch);
    return before.reduce((sum, { question, answer }) => sum + question.length + answer.length, 0);
  }

  get data() {
    return this.turns.map((turn) => turn.data);
  }

  /** Show the turns that these data are of; those of the present `epoch` have the document's text. */
  restore(all, documentText, epoch) {
    for (const data of all) this.#put(Turn.from(data, data.epoch === epoch ? documentText : ""), this.turns.length);
    if (all.length) this.follower.toEnd();
  }

  clear() {
    this.stop();
    for (const turn of this.turns.splice(0)) turn.node.remove();
    this.dispatchEvent(new Event("change"));
  }

  #put(turn, place) {
    this.turns.splice(place, 0, turn);
    byId("conversation").insertBefore(turn.node, byId("conversation").children[place] ?? null);
    this.turns.forEach(({ node, about }, i) => node.classList.toggle("same", about === this.turns[i - 1]?.about));
    turn.addEventListener("grown", () => {
      this.follower.grown();
      this.dispatchEvent(new Event("change"));
    });
    turn.addEventListener("again", () => this.#again(turn));
    turn.addEventListener("edit", () => this.#edit(turn));
  }

  /** How many turns go when this one is asked again: those that went along with it. */
  #laterThan(turn) {
    return this.context().isChained ? this.turns.length - 1 - this.turns.indexOf(turn) : 0;
  }

  /** Ask the same once more; where later turns go with it, the first press asks whether that is meant. */
  #again(turn) {
    if (this.asking) return;
    const later = this.#laterThan(turn);
    const button = turn.again;
    clearTimeout(button.sparing);
    if (later && button.textContent === "Regenerate") {
      button.textContent = `Also remove ${questions(later)} below?`;
      announce(`Press again to regenerate this answer and remove ${questions(later)} below`);
      button.sparing = setTimeout(() => { button.textContent = "Regenerate"; }, SURE_MS);
      return;
    }
    this.ask(turn.question, this.turns.indexOf(turn));
  }

  #edit(turn) {
    if (this.asking || turn.node.querySelector("form")) return;
    const later = this.#laterThan(turn);
    const field = element("textarea", { rows: 3, "aria-label": "The question" });
    field.value = turn.question;
    const cancel = element("button", { type: "button", class: "quiet" }, "Cancel");
    const form = element("form", { class: "editing" }, field,
      element("div", { class: "row" }, element("button", { type: "submit", class: "primary" }, "Ask again"), cancel,
        element("span", { class: "small muted" }, later ? `Removes ${questions(later)} below.` : "")));
    const close = () => {
      form.replaceWith(turn.asked);
      turn.edit.focus();
    };
    const submit = () => {
      const question = field.value.trim();
      if (question && !this.asking) this.ask(question, this.turns.indexOf(turn));
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
    cancel.addEventListener("click", close);
    turn.asked.replaceWith(form);
    field.focus();
  }
}

const questions = (n) => (n === 1 ? "the question" : `the ${n} questions`);

function copyCode(event) {
  const button = event.target.closest(".copy-code");
  if (button) copyBy(button, button.closest(".code").querySelector("code").textContent);
}

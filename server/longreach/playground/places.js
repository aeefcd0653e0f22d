/** What of the prompt each sentence of an answer attended to: sentences that can be pointed at, and the places of one of them, marked. */

import { element, percent } from "./words.js";

const CONTEXT_CHARACTERS = 70;

export class Places {
  /**
   * `answer` is the text that was told, `found` the answer's `usage.places`, `documentText` the text that the page has sent, or "".
   * `sentences` are nodes in place of the answer's text, and `node` shows the places of the sentence that is pointed at.
   */
  constructor(answer, found, documentText) {
    this.documentText = documentText;
    this.node = element("div", { class: "places small", role: "region", "aria-live": "polite", "aria-label": "What this sentence attended to" });
    this.sentences = [];
    let at = 0;
    for (const { sentence, places } of found) {
      const start = answer.indexOf(sentence, at);
      if (start < 0) continue; // reasoning, which stands elsewhere
      this.sentences.push(answer.slice(at, start), this.#sentence(sentence, places));
      at = start + sentence.length;
    }
    this.sentences.push(answer.slice(at));
    this.sentences.find((node) => node.classList)?.dispatchEvent(new Event("show"));
  }

  #sentence(words, places) {
    const node = element("span", { class: "sentence", role: "button", tabindex: 0, "aria-pressed": "false" }, words);
    for (const event of ["mouseenter", "focus", "click", "show"]) node.addEventListener(event, () => this.#show(node, places));
    return node;
  }

  #show(shown, places) {
    for (const node of this.sentences) node.setAttribute?.("aria-pressed", String(node === shown));
    const lines = places.map((place) => {
      const { where, before, after } = this.#around(place);
      const weight = `, ${percent(place.weight)} of the weight`;
      return element("p", {}, `${where}${weight}: \u201c${before}`, element("mark", {}, place.text), `${after}\u201d`);
    });
    if (!lines.length) lines.push(element("p", { class: "muted" }, "This sentence attended to no place more than to others."));
    this.node.replaceChildren(...lines, element("p", { class: "muted" }, "Attention shows where the model looked. It proves nothing."));
  }

  /** Where a place stands, for people, and what is around it if the page has the document. */
  #around({ field, message, offset, text }) {
    const isInDocument = field === "document" || field === "prompt" || (field === "content" && message === 0);
    const start = isInDocument && this.documentText ? indexAt(this.documentText, offset) : -1;
    if (start < 0 || !this.documentText.startsWith(text, start)) {
      return { where: field === "document" ? "In the document" : "In the question", before: "", after: "" };
    }
    const end = start + text.length;
    return {
      where: `At ${percent(start / this.documentText.length)} of the document`,
      before: this.documentText.slice(Math.max(start - CONTEXT_CHARACTERS, 0), start).split("\n").at(-1),
      after: this.documentText.slice(end, end + CONTEXT_CHARACTERS).split("\n")[0],
    };
  }
}

/** The index in a string of the character with this number: offsets count characters, and a string's indices count halves of some. */
function indexAt(text, characters) {
  if (!/[\ud800-\udbff]/.test(text)) return characters;
  let index = 0;
  for (let left = characters; left > 0 && index < text.length; left -= 1) index += text.codePointAt(index) > 0xffff ? 2 : 1;
  return index;
}

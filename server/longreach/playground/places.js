/** What of the prompt each sentence of an answer attended to: sentences that can be pointed at, and the places of one of them, marked. */

import { element, percent } from "./words.js";

const CONTEXT_CHARACTERS = 70;
const SAID = /[\p{L}\p{N}]/u; // what of a sentence stands on the page, too, whatever Markdown makes of its signs

export class Places {
  /**
   * `answer` is the node that shows the answer, `source` the text that was told, and `found` the answer's `usage.places`. `documentText` is the
   * text that the page has sent, or "", and `message` the number of the one that it stands in. `node` shows the places of the
   * sentence that is pointed at.
   */
  constructor(answer, source, found, documentText, message = 0) {
    this.documentText = documentText;
    this.message = message;
    this.node = element("div", { class: "places small", role: "region", "aria-live": "polite", "aria-label": "What this sentence attended to" });
    const told = found.filter(({ sentence }) => source.includes(sentence)); // and not in the reasoning, which stands elsewhere
    let spans = spansOf(answer, told.map(({ sentence }) => sentence));
    if (!spans) {
      answer.replaceChildren(element("p", {}, source)); // Markdown that hides words of a sentence gives way to its places
      spans = spansOf(answer, told.map(({ sentence }) => sentence)) ?? [];
    }
    // From the back: what is put into an element takes the text behind it to another node.
    const sentences = spans.map((pieces, i) => [pieces, told[i].places]).reverse().map(([pieces, places]) => this.#sentence(pieces, places));
    sentences.at(-1)?.dispatchEvent(new Event("show"));
  }

  /** Make pieces of text one sentence; the first one is reached with Tab. */
  #sentence(pieces, places) {
    const button = { role: "button", tabindex: 0, "aria-pressed": "false" };
    const nodes = pieces.map((piece, i) => wrapped(piece, element("span", { class: "sentence", ...(i === 0 ? button : {}) })));
    const show = () => this.#show(nodes, places);
    for (const node of nodes) for (const event of ["mouseenter", "click"]) node.addEventListener(event, show);
    for (const event of ["focus", "show"]) nodes[0].addEventListener(event, show);
    return nodes[0];
  }

  #show(nodes, places) {
    for (const node of this.shown ?? []) node.classList.remove("shown");
    this.shown?.[0].setAttribute("aria-pressed", "false");
    this.shown = nodes;
    for (const node of nodes) node.classList.add("shown");
    nodes[0].setAttribute("aria-pressed", "true");
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
    const isInDocument = field === "document" || field === "prompt" || (field === "content" && message === this.message);
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

/**
 * What of which text nodes each sentence is: `{ node, start, end }`, in their order; null if a sentence is not there. Letters and digits are
 * compared: Markdown has made something else of other signs.
 */
function spansOf(root, sentences) {
  let said = "";
  const units = []; // the text node and the offset of each letter
  for (const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT); walker.nextNode(); ) {
    const node = walker.currentNode;
    if (node.parentElement.closest(".code-head, .task")) continue;
    for (let i = 0; i < node.data.length; i++) {
      if (!SAID.test(node.data[i])) continue;
      said += node.data[i];
      units.push([node, i]);
    }
  }
  const spans = [];
  let from = 0;
  for (const sentence of sentences) {
    const wanted = [...sentence].filter((sign) => sign.length === 1 && SAID.test(sign)).join("");
    const at = wanted ? said.indexOf(wanted, from) : -1;
    if (at < 0) return null;
    from = at + wanted.length;
    spans.push(piecesOf(units.slice(at, from)));
  }
  return spans;
}

function piecesOf(units) {
  const pieces = [];
  for (const [node, at] of units) {
    if (pieces.at(-1)?.node === node) pieces.at(-1).end = at + 1;
    else pieces.push({ node, start: at, end: at + 1 });
  }
  const last = pieces.at(-1);
  while (/[^\s\p{L}\p{N}]/u.test(last.node.data[last.end] ?? " ")) last.end += 1; // its full stop
  return pieces;
}

/** Put a piece of a text node into an element; what stands before it stays in the node. */
function wrapped({ node, start, end }, wrapper) {
  const middle = node.splitText(start);
  middle.splitText(end - start);
  middle.replaceWith(wrapper);
  wrapper.append(middle);
  return wrapper;
}

/** The index in a string of the character with this number: offsets count characters, and a string's indices count halves of some. */
function indexAt(text, characters) {
  if (!/[\ud800-\udbff]/.test(text)) return characters;
  let index = 0;
  for (let left = characters; left > 0 && index < text.length; left -= 1) index += text.codePointAt(index) > 0xffff ? 2 : 1;
  return index;
}

/** The document's part of the page: the preview, and the gauge of the context. `arriving.js` has how a document comes. */

import { Book } from "./book.js";
import { exampleText } from "./example.js";
import { countTokens } from "./tokens.js";
import { announce, byId, count, debounced, tell } from "./words.js";

const COUNT_AFTER_MS = 150;
const USUAL_CHARACTERS = 3.2; // of a token, in English; a model with much less needs a word
const EXAMPLE = "The log of the light at Hollin Point";
const ABOUT = 0.03; // what an estimate may be wrong by: the server judges what is that near
const CUT_MARGIN = 0.97; // tokens are not spread evenly over a text

export class DocumentPanel extends EventTarget {
  /** Fires `change` when another document is there, `counted` when its tokens are known, `gauged` when that may have changed whether it
   * fits, and `keep` when the server is to keep it. `reserve()` is how many tokens question and answer need. */
  constructor(reserve) {
    super();
    this.book = null;
    this.tokens = null; // { count, exact, withQuestion }
    this.limit = null;
    this.over = 0; // tokens that are too many
    this.reserve = reserve;
    this.count = debounced(() => this.#count(), COUNT_AFTER_MS);
    this.#listen();
  }

  get isExample() {
    return this.book?.name === EXAMPLE;
  }

  get text() {
    return this.book?.text ?? "";
  }

  /** The id of the document that the server keeps of this one, or null. */
  get reference() {
    return this.book?.kept?.id ?? null;
  }

  /** The server keeps this book as this document; or, where that is null, no longer. */
  setKept(book, kept) {
    book.kept = kept;
    if (book !== this.book) return;
    if (!kept && !book.text) this.open(null);
    else this.#showKept();
  }

  /** The context's length in tokens, once the server has told it. */
  setLimit(limit) {
    this.limit = limit;
    this.count();
  }

  /** What the server has counted for the document and a question, in place of an estimate. */
  learn(promptTokens) {
    if (!this.book || this.tokens?.exact) return;
    this.tokens = { count: promptTokens, exact: true, withQuestion: true };
    this.drawGauge();
  }

  open(book) {
    this.book = book;
    this.tokens = null;
    tell(byId("document-error"), null);
    byId("drop").hidden = book !== null;
    byId("book").hidden = book === null;
    this.counting?.abort();
    if (book !== null) {
      byId("book-name").textContent = book.name;
      byId("book-beginning").textContent = book.beginning;
      byId("book-end").textContent = book.end;
      byId("pages").hidden = !book.text;
      tell(byId("skipped"), book.skipped);
      this.#showKept();
      this.count();
    }
    this.dispatchEvent(new Event("change"));
  }

  #showKept() {
    const { kept, text } = this.book;
    byId("keep").hidden = Boolean(kept);
    byId("is-kept").hidden = !kept;
    if (!text && kept.tokens) this.tokens = { count: kept.tokens, exact: true };
    this.drawGauge();
    if (!text && kept.tokens) this.dispatchEvent(new Event("counted"));
  }

  drawGauge() {
    this.#judge();
    this.dispatchEvent(new Event("gauged"));
    const { book, tokens, limit, over } = this;
    if (!book) return;
    const about = tokens?.exact === false ? "about " : "";
    const size = book.text ? [`${count(book.text.length)} characters`] : [];
    if (tokens) size.push(`${about}${count(tokens.count)} tokens${tokens.withQuestion ? " with the question" : ""}`);
    if (book.remark) size.push(book.remark);
    byId("book-size").textContent = size.join(" \u00b7 ");
    if (!tokens || !limit) {
      byId("gauge-words").textContent = limit ? "Counting tokens\u2026" : "";
      byId("cut").hidden = true;
      return;
    }
    const share = tokens.count / limit;
    byId("gauge-fill").style.width = `${Math.min(share, 1) * 100}%`;
    byId("gauge").classList.toggle("over", over > 0);
    byId("gauge").setAttribute("aria-valuemax", limit);
    byId("gauge").setAttribute("aria-valuenow", Math.min(tokens.count, limit));
    byId("gauge-words").textContent = over > 0
      ? `${about}${count(over)} tokens too long: the model reads ${count(limit)}, with question and answer.`
      : `${Math.max(Math.round(share * 100), 1)}% of the ${count(limit)} tokens that the model reads at once`;
    const each = book.text && !tokens.withQuestion ? book.text.length / tokens.count : Infinity;
    tell(byId("token-length"), each < USUAL_CHARACTERS ? `This model\u2019s tokens are short: ${each.toFixed(1)} characters each here, where 4 are usual.` : null);
    byId("gauge").setAttribute("aria-valuetext", byId("gauge-words").textContent);
    byId("cut").hidden = over <= 0 || !book.text;
  }

  /** How many tokens are too many, if any. */
  #judge() {
    const { tokens, limit } = this;
    const over = tokens && limit ? tokens.count + this.reserve() - limit : 0;
    this.over = tokens && (over > 0) && (tokens.exact || over > ABOUT * limit) ? over : 0;
  }

  /** Cut the end of the document off, so that it fits. */
  cut() {
    this.open(this.book.cut(((this.limit - this.reserve()) / this.tokens.count) * CUT_MARGIN));
    byId("question").focus();
  }

  openExample() {
    this.open(new Book(EXAMPLE, exampleText()));
    byId("question").focus();
  }

  async #count() {
    const { book } = this;
    if (!book?.text || !this.limit) return;
    this.counting?.abort();
    this.counting = new AbortController();
    try {
      const tokens = await countTokens(book.text, this.counting.signal, this.limit);
      if (book !== this.book) return;
      this.tokens = tokens;
      this.drawGauge();
      announce(`${book.name}: ${byId("book-size").textContent}`);
      this.dispatchEvent(new Event("counted"));
    } catch (error) {
      if (error.name !== "AbortError") tell(byId("document-error"), `Its tokens could not be counted. ${error.message}`);
    }
  }

  #listen() {
    byId("keep").addEventListener("click", () => this.dispatchEvent(new Event("keep")));
    byId("remove").addEventListener("click", () => {
      this.open(null);
      byId("example").focus();
    });
    byId("example").addEventListener("click", () => this.openExample());
    byId("cut").addEventListener("click", () => this.cut());
  }
}

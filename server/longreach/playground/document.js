/** The document's part of the page: choosing, dropping, pasting, the preview, and the gauge of the context. */

import { Book } from "./book.js";
import { exampleText } from "./example.js";
import { countTokens } from "./tokens.js";
import { announce, byId, count, debounced, tell } from "./words.js";

const QUESTION_CHARACTERS = 4000; // what is longer and pasted as a question is a document
const COUNT_AFTER_MS = 150;
const CUT_MARGIN = 0.97; // tokens are not spread evenly over a text

export class DocumentPanel extends EventTarget {
  /** Fires `change` when another document is there, `counted` when its tokens are known, and `keep` when the server is to keep it. */
  constructor(reserve) {
    super();
    this.book = null;
    this.tokens = null; // { count, exact, withQuestion }
    this.limit = null;
    this.isExample = false;
    this.reserve = reserve;
    this.count = debounced(() => this.#count(), COUNT_AFTER_MS);
    this.#listen();
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

  open(book, isExample = false) {
    this.book = book;
    this.isExample = isExample;
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
    const { book, tokens, limit } = this;
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
    const room = limit - this.reserve();
    const over = tokens.count - room;
    const share = tokens.count / limit;
    byId("gauge-fill").style.width = `${Math.min(share, 1) * 100}%`;
    byId("gauge").classList.toggle("over", over > 0);
    byId("gauge").setAttribute("aria-valuemax", limit);
    byId("gauge").setAttribute("aria-valuenow", Math.min(tokens.count, limit));
    byId("gauge-words").textContent = over > 0
      ? `${about}${count(over)} tokens too long: the model reads ${count(limit)}, with question and answer.`
      : `${Math.max(Math.round(share * 100), 1)}% of the ${count(limit)} tokens that the model reads at once`;
    byId("gauge").setAttribute("aria-valuetext", byId("gauge-words").textContent);
    byId("cut").hidden = over <= 0 || !book.text;
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

  async #read(file) {
    try {
      const book = await Book.fromFile(file);
      if (!book.text.trim()) throw new Error(`${file.name} is empty.`);
      this.open(book);
    } catch (error) {
      tell(byId("document-error"), error.message);
    }
  }

  #pasted(text) {
    if (text.trim()) this.open(new Book("Pasted text", text));
    else tell(byId("document-error"), "There is no text to paste.");
  }

  #listen() {
    const file = byId("file");
    file.addEventListener("change", () => {
      if (file.files[0]) this.#read(file.files[0]);
      file.value = ""; // the same file may be chosen again after it has changed
    });
    byId("choose").addEventListener("click", () => file.click());
    byId("replace").addEventListener("click", () => file.click());
    byId("keep").addEventListener("click", () => this.dispatchEvent(new Event("keep")));
    byId("remove").addEventListener("click", () => {
      this.open(null);
      byId("example").focus();
    });
    byId("example").addEventListener("click", () => {
      this.open(new Book("The log of the light at Hollin Point", exampleText()), true);
      byId("question").focus();
    });
    byId("cut").addEventListener("click", () => {
      this.open(this.book.cut(((this.limit - this.reserve()) / this.tokens.count) * CUT_MARGIN));
      byId("question").focus();
    });
    this.#listenToPaste();
    this.#listenToDrops();
  }

  #listenToPaste() {
    const paste = byId("paste");
    paste.hidden = !navigator.clipboard?.readText;
    paste.addEventListener("click", async () => {
      try {
        this.#pasted(await navigator.clipboard.readText());
      } catch {
        tell(byId("document-error"), "The browser did not allow reading the clipboard. Press Ctrl+V instead.");
      }
    });
    document.addEventListener("paste", (event) => {
      const text = event.clipboardData?.getData("text/plain") ?? "";
      const [pasted] = event.clipboardData?.files ?? [];
      const isField = event.target.matches?.("input, textarea, select");
      if (isField && text.length <= QUESTION_CHARACTERS) return;
      event.preventDefault();
      if (pasted && !text) this.#read(pasted);
      else this.#pasted(text);
    });
  }

  #listenToDrops() {
    const root = document.documentElement;
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      root.classList.add("dragging");
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) root.classList.remove("dragging");
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      root.classList.remove("dragging");
      const [file] = event.dataTransfer.files;
      if (file) this.#read(file);
      else this.#pasted(event.dataTransfer.getData("text/plain"));
    });
  }
}

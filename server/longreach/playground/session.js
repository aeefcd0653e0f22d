/** What a reload of the page keeps, in this browser only: the document and the conversation, within bounds. */

import { forget, load, save } from "./store.js";
import { count, debounced, tell, byId } from "./words.js";

const MOST_TEXT = 20_000_000; // characters of a document
const MOST_TURNS = 200;
const MOST_SAID = 5_000_000; // characters of the conversation; its oldest turns go first
const SAVE_AFTER_MS = 400;
const KEPT = "This browser keeps the document and the conversation until you forget them. They are sent to this server only.";

export class Session {
  /** `look()` gives the book or null, the turns' data, and the epoch. */
  constructor(look) {
    this.look = look;
    this.savedBook = undefined;
    this.save = debounced(() => this.#save(), SAVE_AFTER_MS);
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "hidden") this.#save();
    });
  }

  /** What was kept: `{ book, turns, epoch }`, where `book` has the fields of one; null for nothing. */
  async load() {
    try {
      const [book, said] = [await load("book"), await load("conversation")];
      this.#say(null);
      return book || said ? { book: book ?? null, turns: said?.turns ?? [], epoch: said?.epoch ?? 0 } : null;
    } catch (error) {
      this.#say(error);
      return null;
    }
  }

  /** Forget all of it. */
  async forget() {
    try {
      await forget();
      this.savedBook = undefined;
    } catch (error) {
      this.#say(error);
    }
  }

  async #save() {
    const { book, turns, epoch } = this.look();
    try {
      if (book !== this.savedBook || book?.kept !== this.savedKept) {
        const isKept = book && book.text.length <= MOST_TEXT;
        await save("book", isKept ? { name: book.name, text: book.text, remark: book.remark, skipped: book.skipped, kept: book.kept } : null);
        [this.savedBook, this.savedKept] = [book, book?.kept];
      }
      await save("conversation", { turns: bounded(turns), epoch });
      this.#say(null, book);
    } catch (error) {
      this.#say(error);
    }
  }

  #say(error, book = null) {
    const isTooLong = book && book.text.length > MOST_TEXT;
    tell(byId("stored"), error
      ? "This browser keeps nothing of this page: a reload loses the document and the conversation."
      : isTooLong ? `This browser keeps the conversation, and no document of more than ${count(MOST_TEXT)} characters.` : KEPT);
  }
}

/** The newest turns that are within the bounds. */
function bounded(turns) {
  let said = 0;
  const newest = turns.slice(-MOST_TURNS).toReversed();
  const over = newest.findIndex(({ question, answer, reasoning }) => (said += question.length + answer.length + reasoning.length) > MOST_SAID);
  return (over < 0 ? newest : newest.slice(0, over)).toReversed();
}

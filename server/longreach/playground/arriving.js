/** How a document comes to the page: files and folders that are chosen or dropped, and text that is pasted. */

import { Book } from "./book.js";
import { bookOf, filesOf, filesOfDrop } from "./files.js";
import { byId, tell } from "./words.js";

const QUESTION_CHARACTERS = 4000; // what is longer and pasted as a question is a document
const PATIENCE_MS = 300;

/** Let documents come to a panel. */
export function listenForDocuments(panel) {
  const arrivals = new Arrivals(panel);
  listenToInputs(arrivals);
  listenToPaste(arrivals);
  listenToDrops(arrivals);
}

/** Documents on their way, of which the last one counts. */
class Arrivals {
  constructor(panel) {
    this.panel = panel;
  }

  /** Read files, or what will be files. */
  async read(files) {
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    const telling = setTimeout(() => tell(byId("arriving"), "Reading\u2026"), PATIENCE_MS);
    try {
      const all = await files;
      const book = await bookOf(all, reading.signal);
      if (reading.signal.aborted) return;
      if (!book.text.trim()) throw new Error(`${book.name} is empty.`);
      this.panel.open(book);
    } catch (error) {
      if (error.name !== "AbortError") tell(byId("document-error"), error.message);
    } finally {
      clearTimeout(telling);
      if (reading === this.reading) tell(byId("arriving"), null);
    }
  }

  pasted(text) {
    if (text.trim()) this.panel.open(new Book("Pasted text", text));
    else tell(byId("document-error"), "There is no text to paste.");
  }
}

function listenToInputs(arrivals) {
  for (const id of ["file", "folder"]) {
    const input = byId(id);
    input.addEventListener("change", () => {
      if (input.files.length) arrivals.read(filesOf(input.files));
      input.value = ""; // the same file may be chosen again after it has changed
    });
  }
  byId("choose").addEventListener("click", () => byId("file").click());
  byId("choose-folder").addEventListener("click", () => byId("folder").click());
  byId("replace").addEventListener("click", () => byId("file").click());
}

function listenToPaste(arrivals) {
  const paste = byId("paste");
  paste.hidden = !navigator.clipboard?.readText;
  paste.addEventListener("click", async () => {
    try {
      arrivals.pasted(await navigator.clipboard.readText());
    } catch {
      tell(byId("document-error"), "The browser did not allow reading the clipboard. Press Ctrl+V instead.");
    }
  });
  document.addEventListener("paste", (event) => {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    const files = event.clipboardData?.files ?? [];
    const isField = event.target.matches?.("input, textarea, select");
    if (isField && text && (text.length <= QUESTION_CHARACTERS || event.target.id !== "question")) return;
    event.preventDefault();
    if (files.length && !text) arrivals.read(filesOf(files));
    else arrivals.pasted(text);
  });
}

function listenToDrops(arrivals) {
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
    if (event.dataTransfer.files.length) arrivals.read(filesOfDrop(event.dataTransfer));
    else arrivals.pasted(event.dataTransfer.getData("text/plain"));
  });
}

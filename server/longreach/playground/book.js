/** A document: its text, its name, and how it came to be read. Never put into a form field, which long texts would freeze. */

const PREVIEW_CHARACTERS = 420;
const BINARY = new Map([["%PDF-", "a PDF"], ["PK\u0003\u0004", "an archive (EPUB, DOCX and ZIP files are)"]]);
const HEAD_BYTES = 4096;

export class Book {
  /** `remark` says what was done to the text, if anything was; `kept` is the document that the server keeps of it, or null. */
  constructor(name, text, remark = "", kept = null) {
    this.name = name;
    this.text = text.toWellFormed(); // JSON for this server has no halves of characters
    this.remark = remark;
    this.kept = kept;
  }

  /** A document that the server keeps, and whose text stays there. */
  static ofKept(kept) {
    return new Book(kept.name ?? kept.id, "", "", kept);
  }

  /**
   * Read a file as UTF-8, or with its byte order mark as UTF-16.
   * Throws an Error whose message is for the reader if it holds no text.
   */
  static async fromFile(file) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const head = new TextDecoder("latin1").decode(bytes.subarray(0, HEAD_BYTES));
    for (const [mark, kind] of BINARY) {
      if (head.startsWith(mark)) throw new Error(`${file.name} is ${kind}, not plain text. Export it as text first.`);
    }
    const utf16 = head.startsWith("\u00ff\u00fe") ? "utf-16le" : head.startsWith("\u00fe\u00ff") ? "utf-16be" : null;
    if (utf16) return new Book(file.name, new TextDecoder(utf16).decode(bytes));
    if (head.includes("\u0000")) throw new Error(`${file.name} is not a text file.`);
    try {
      return new Book(file.name, new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    } catch {
      const text = new TextDecoder("windows-1252").decode(bytes);
      return new Book(file.name, text, "not UTF-8, read as Windows-1252");
    }
  }

  get beginning() {
    return this.text.slice(0, PREVIEW_CHARACTERS).trim();
  }

  get end() {
    return `${this.text.length > PREVIEW_CHARACTERS ? "\u2026" : ""}${this.text.slice(-PREVIEW_CHARACTERS).trim()}`;
  }

  /** The first `share` of it. */
  cut(share) {
    return new Book(this.name, this.text.slice(0, Math.floor(this.text.length * share)), `the first ${Math.floor(share * 100)}%`);
  }
}

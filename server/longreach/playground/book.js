/** A document: its text, its name, and how it came to be read. Never put into a form field, which long texts would freeze. */

import { postBytes } from "./server.js";

const PREVIEW_CHARACTERS = 420;
const PDF = "%PDF-";
const ARCHIVE = "PK\u0003\u0004";
const HEAD_BYTES = 4096;

export class Book {
  /**
   * `remark` says what was done to the text, if anything was, and `skipped` what is not in it; `kept` is the document that the server keeps
   * of it, or null.
   */
  constructor(name, text, remark = "", kept = null, skipped = "") {
    this.name = name;
    this.text = text.toWellFormed(); // JSON for this server has no halves of characters
    this.remark = remark;
    this.kept = kept;
    this.skipped = skipped;
  }

  /** A document that the server keeps, and whose text stays there. */
  static ofKept(kept) {
    return new Book(kept.name ?? kept.id, "", "", kept);
  }

  /**
   * Read a file: a text, or a PDF, which the server reads. Throws an Error whose message is for the reader if it holds no text.
   */
  static async fromFile(file, signal) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    if (isPdf(bytes)) {
      return ofPdf(file.name, bytes, signal);
    }
    if (headOf(bytes).startsWith(ARCHIVE)) {
      throw new Error(`${file.name} is an archive (EPUB, DOCX and ZIP files are), not plain text. Export it as text or as a PDF first.`);
    }
    const read = textOf(bytes);
    if (!read) throw new Error(`${file.name} is not a text file.`);
    return new Book(file.name, read.text, read.remark);
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

async function ofPdf(name, bytes, signal) {
  try {
    const { text, pages, pages_without_text: empty } = await postBytes("v1/text", bytes, "application/pdf", signal);
    const remark = `${pages} ${pages === 1 ? "page" : "pages"}`;
    return new Book(name, text, remark, null, empty ? `${empty} of the pages ${empty === 1 ? "has" : "have"} no text.` : "");
  } catch (error) {
    if (error.name !== "AbortError") error.message = `${name}: ${error.message}`;
    throw error;
  }
}

export const isPdf = (bytes) => headOf(bytes).startsWith(PDF);

/** What bytes say in UTF-8, or with a byte order mark in UTF-16, or else in Windows-1252; null if they are no text. */
export function textOf(bytes) {
  const head = headOf(bytes);
  const utf16 = head.startsWith("\u00ff\u00fe") ? "utf-16le" : head.startsWith("\u00fe\u00ff") ? "utf-16be" : null;
  if (utf16) return { text: new TextDecoder(utf16).decode(bytes), remark: "" };
  if (head.includes("\u0000") || head.startsWith(PDF) || head.startsWith(ARCHIVE)) return null;
  try {
    return { text: new TextDecoder("utf-8", { fatal: true }).decode(bytes), remark: "" };
  } catch {
    return { text: new TextDecoder("windows-1252").decode(bytes), remark: "not UTF-8, read as Windows-1252" };
  }
}

const headOf = (bytes) => new TextDecoder("latin1").decode(bytes.subarray(0, HEAD_BYTES));

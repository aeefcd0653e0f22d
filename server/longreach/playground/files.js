/** Files and folders that are chosen or dropped, joined to one text under their paths. `longreach chat` joins folders by the same rules. */

import { Book, isPdf, textOf } from "./book.js";
import { count } from "./words.js";

const LARGEST_BYTES = 1_000_000; // of a file in a folder; one that is chosen by itself may be a book
const MOST_FILES = 20_000;
const MOST_BYTES = 200_000_000; // of all, as long as a string may become
const LEFT_OUT = ["node_modules", "__pycache__"];
// Of what is left out files are counted; folders are not looked into.
const COUNTED = {
  binary: (n) => counted(n, "binary file"), lock: (n) => counted(n, "lock file"), large: (n) => `${counted(n, "file")} over 1 MB`,
};
const LOCKS = ["package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "bun.lockb", "go.sum"];

/** The files of a file input: `{ path, file, inFolder }` of each. */
export function filesOf(list) {
  return [...list].map((file) => ({ path: file.webkitRelativePath || file.name, file, inFolder: Boolean(file.webkitRelativePath) }));
}

/** The files of a drop, folders included. Call it within the event: what was dropped is gone once that has passed. */
export function filesOfDrop(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some(({ isDirectory }) => isDirectory)) return Promise.resolve(filesOf(transfer.files));
  return allOf(entries);
}

/** One book of all files, its `skipped` saying what is not in it. Throws an Error for the reader if nothing is left. */
export async function bookOf(files, signal) {
  if (files.length === 1 && !files[0].inFolder) return Book.fromFile(files[0].file, signal);
  if (files.length > MOST_FILES) throw new Error(`These are more than ${count(MOST_FILES)} files. Choose a folder inside.`);
  const skipped = new Map();
  const [parts, paths] = [[], []];
  let bytes = 0;
  for (const { path, file, inFolder } of files.toSorted((a, b) => byCodePoint(a.path, b.path))) {
    let kind = kindOf(path, file?.size, inFolder);
    const text = kind ? null : await readable(file, inFolder, signal);
    if (text === null) {
      kind ??= "binary";
      skipped.set(kind, (skipped.get(kind) ?? 0) + 1);
    } else {
      bytes += file.size;
      if (bytes > MOST_BYTES) throw new Error(`These files are larger than ${count(MOST_BYTES / 1e6)} MB. Choose a folder inside.`);
      parts.push(joined(path, text));
      paths.push(path);
    }
  }
  const words = [...skipped].map(([kind, n]) => COUNTED[kind]?.(n) ?? kind).join(", ");
  if (!parts.length) throw new Error(files.length ? `There is no text in these files: ${words}.` : "There are no files in this folder.");
  return new Book(nameOf(paths), parts.join(""), counted(parts.length, "file"), null, words ? `Skipped: ${words}.` : "");
}

/** A file's part of a joined text. */
export const joined = (path, text) => `=== ${path} ===\n${text.replace(/\n+$/, "")}\n\n`;

/** Why a file is left out before it is read, or null. */
export function kindOf(path, size, inFolder) {
  const folders = path.split("/").slice(0, -1);
  const name = path.split("/").at(-1);
  if (folders.some((folder) => folder.startsWith("."))) return "hidden folders";
  const generated = folders.find((folder) => LEFT_OUT.includes(folder));
  if (generated) return generated;
  if (name.endsWith(".lock") || LOCKS.includes(name)) return "lock";
  return inFolder && size > LARGEST_BYTES ? "large" : null;
}

/** A file's text, or null if it has none. PDFs are read where they were chosen one by one. */
async function readable(file, inFolder, signal) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (isPdf(bytes)) return inFolder ? null : (await Book.fromFile(file, signal)).text;
  return textOf(bytes)?.text ?? null;
}

async function allOf(entries) {
  const found = [];
  const waiting = entries.map((entry) => ({ entry, inFolder: false }));
  while (waiting.length && found.length <= MOST_FILES) {
    const { entry, inFolder } = waiting.pop();
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      found.push({ path: entry.fullPath.replace(/^\//, ""), file, inFolder });
    } else if (isLeftOut(entry.name)) {
      found.push({ path: `${entry.fullPath.replace(/^\//, "")}/`, file: null, inFolder: true });
    } else {
      waiting.push(...(await listed(entry)).map((inner) => ({ entry: inner, inFolder: true })));
    }
  }
  return found;
}

// What such folders hold is not worth the wait.
const isLeftOut = (name) => name.startsWith(".") || LEFT_OUT.includes(name);

/** What a folder holds; a reader gives it in parts. */
async function listed(folder) {
  const reader = folder.createReader();
  const all = [];
  while (true) {
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) return all;
    all.push(...part);
  }
}

const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

function nameOf(paths) {
  const tops = [...new Set(paths.map((path) => path.split("/")[0]))];
  return tops.length === 1 ? tops[0] : `${tops[0]} and ${count(tops.length - 1)} more`;
}

/** As Python sorts strings. */
function byCodePoint(a, b) {
  const [one, other] = [[...a], [...b]];
  for (let i = 0; i < Math.min(one.length, other.length); i++) {
    if (one[i] !== other[i]) return one[i].codePointAt(0) - other[i].codePointAt(0);
  }
  return one.length - other.length;
}

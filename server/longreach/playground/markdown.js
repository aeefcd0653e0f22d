/** Markdown as elements: headings, lists, tables, quotes, code, paragraphs. Text is never read as HTML. */

import { inline } from "./inline.js";
import { element } from "./words.js";

const DEEPEST = 12; // lists and quotes in one another
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: {1,4}|$)(?=(.*))/;
const INDENTED = /^ {4}/;
const LONGEST_RULE = 200;

/** The lines of a text, with spaces for the tabs that they begin with. */
export const linesOf = (text) => text.split("\n").map((line) => line.replace(/^[ \t]+/, (blank) => blank.replaceAll("\t", "    ")).replace(/\r$/, ""));

/** The elements of a whole text. */
export function markdown(text) {
  return [...blocks(linesOf(text))].map(({ make }) => make());
}

/** The blocks of some lines: the number of the line that each begins at, and what makes its element. */
export function* blocks(lines, depth = 0) {
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { next, make } = block(lines, at, depth);
    yield { at, make };
    at = next;
  }
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { next: at + 1, make: () => headingOf(heading[1].length, heading[2] ?? "") };
  if (isRule(line)) return { next: at + 1, make: () => element("hr") };
  if (INDENTED.test(line)) return indented(lines, at);
  if (depth < DEEPEST && QUOTE.test(line)) return quoted(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listed(lines, at, depth);
  if (isTable(lines, at)) return tabled(lines, at);
  return paragraph(lines, at);
}

function fenced(lines, at, [, indent, ticks, words]) {
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end].trim();
    if (line.startsWith(ticks) && line === ticks[0].repeat(line.length) && spacesOf(lines[end]) < 4) break;
  }
  const content = lines.slice(at + 1, end).map((line) => line.slice(Math.min(spacesOf(line), indent.length)));
  return { next: end + 1, make: () => codeOf(content.join("\n"), words.trim().split(/\s/)[0]) };
}

function indented(lines, at) {
  let end = at;
  while (end < lines.length && (INDENTED.test(lines[end]) || isBlank(lines[end]))) end += 1;
  const content = lines.slice(at, end).map((line) => line.slice(4)).join("\n").trimEnd();
  return { next: end, make: () => codeOf(content, "") };
}

function codeOf(text, language) {
  const label = language ? `Code, ${language}` : "Code";
  return element("div", { class: "code" },
    element("div", { class: "code-head" }, element("span", { class: "muted" }, language),
      element("button", { type: "button", class: "quiet copy-code", "aria-label": `Copy the code${language ? `, ${language}` : ""}` }, "Copy")),
    element("pre", { tabindex: 0, role: "region", "aria-label": label }, element("code", {}, text)));
}

function headingOf(level, text) {
  const words = text.replace(/ #+ *$/, "").trim();
  return element(level < 4 ? "h4" : "h5", { class: `level-${level}` }, inline(words));
}

function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end]) || !interrupts(lines, end))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { next: end, make: () => filled("blockquote", {}, contentOf(inner, depth + 1)) };
}

/** A list: items whose markers are of one kind, each with the lines that are indented below it. */
function listed(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const kind = first.at(-1);
  const items = [];
  let isLoose = false;
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    if (!found || found[2].at(-1) !== kind || isRule(lines[next])) break;
    const item = itemAt(lines, next, found);
    items.push(item.lines);
    isLoose ||= item.lines.some((line, i, all) => isBlank(line) && i < all.length - 1 && !INDENTED.test(all[i + 1]));
    next = item.next;
    let behind = next;
    while (behind < lines.length && isBlank(lines[behind])) behind += 1;
    const again = behind < lines.length ? ITEM.exec(lines[behind]) : null;
    if (!again || again[2].at(-1) !== kind) break;
    isLoose ||= behind > next;
    next = behind;
  }
  const isOrdered = /\d/.test(first);
  const start = isOrdered && Number.parseInt(first, 10) !== 1 ? Number.parseInt(first, 10) : null;
  return { next, make: () => filled(isOrdered ? "ol" : "ul", { start }, items.map((item) => itemOf(item, isLoose, depth + 1))) };
}

function itemAt(lines, at, [head, margin, marker, rest]) {
  const inner = rest === "" ? margin.length + marker.length + 1 : head.length;
  const least = margin.length + 2; // models indent numbered lists by less than the rules ask for
  const content = [rest];
  let next = at + 1;
  while (next < lines.length) {
    const line = lines[next];
    if (isBlank(line)) {
      let behind = next;
      while (behind < lines.length && isBlank(lines[behind])) behind += 1;
      if (behind === lines.length || spacesOf(lines[behind]) < least) break;
      for (; next < behind; next++) content.push("");
    } else if (spacesOf(line) >= least) {
      content.push(line.slice(Math.min(spacesOf(line), inner)));
      next += 1;
    } else if (!isBlank(lines[next - 1]) && !interrupts(lines, next) && !ITEM.test(line)) {
      content.push(line.trimStart());
      next += 1;
    } else break;
  }
  return { lines: content, next };
}

function itemOf(lines, isLoose, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const own = task ? [lines[0].slice(4), ...lines.slice(1)] : lines;
  const box = task ? [element("span", { class: "task", role: "img", "aria-label": task[1] === " " ? "open" : "done" }, task[1] === " " ? "\u2610 " : "\u2611 ")] : [];
  const content = contentOf(own, depth);
  const [head] = content;
  const nodes = !isLoose && head?.localName === "p" ? [...head.childNodes].concat(content.slice(1)) : content;
  return filled("li", { class: task ? "has-task" : null }, box.concat(nodes));
}

const contentOf = (lines, depth) => [...blocks(lines, depth)].map(({ make }) => make());

function tabled(lines, at) {
  const aligns = cellsOf(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].includes("|")) end += 1;
  // Cells that a row does not have are left out: a wide head over many short rows would be a page of them.
  const row = (line, name) => filled("tr", {},
    cellsOf(line).slice(0, aligns.length).map((cell, i) => element(name, { class: aligns[i], scope: name === "th" ? "col" : null }, inline(cell))));
  return {
    next: end,
    make: () => element("div", { class: "table-frame", tabindex: 0, role: "region", "aria-label": "Table" }, element("table", {},
      element("thead", {}, row(lines[at], "th")),
      filled("tbody", {}, lines.slice(at + 2, end).map((line) => row(line, "td"))))),
  };
}

/** The cells of a table's row, parted by bars that have no backslash before them. */
function cellsOf(line) {
  const cells = [""];
  const row = line.trim();
  for (let i = row.startsWith("|") ? 1 : 0; i < row.length; i++) {
    if (row[i] === "\\" && row[i + 1] === "|") cells[cells.length - 1] += row[++i];
    else if (row[i] !== "|") cells[cells.length - 1] += row[i];
    else if (i < row.length - 1) cells.push("");
  }
  return cells.map((cell) => cell.trim());
}

function isTable(lines, at) {
  const [head, rule] = [lines[at], lines[at + 1] ?? ""];
  if (!head.includes("|") || !rule.includes("-") || !/^[ |:-]+$/.test(rule)) return false;
  const marks = cellsOf(rule);
  return marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === cellsOf(head).length;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
  return { next: end, make: () => element("p", {}, inline(text)) };
}

/** Whether a line ends the paragraph before it. A number does only if a list can begin with it. */
function interrupts(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  if (item && item[3] !== "" && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1)) return true;
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || isRule(line) || isTable(lines, at);
}

function isRule(line) {
  if (line.length > LONGEST_RULE || spacesOf(line) > 3) return false;
  const signs = line.replaceAll(" ", "");
  return signs.length >= 3 && "-*_".includes(signs[0]) && signs === signs[0].repeat(signs.length);
}

/** An element with any number of children: a call takes some ten thousand arguments at most. */
function filled(name, attributes, children) {
  const node = element(name, attributes);
  for (const child of children) node.append(child);
  return node;
}

const isBlank = (line) => line.trim() === "";
const spacesOf = (line) => line.length - line.trimStart().length;

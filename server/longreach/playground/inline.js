/**
 * The Markdown inside a line: emphasis, code, links. Everything takes time in proportion to the text, however it is written, and
 * elements are nested a few levels deep at most. Emphasis follows CommonMark 0.31.2, "Emphasis and strong emphasis".
 */

import { element } from "./words.js";

const LONGEST = 100_000; // more in one paragraph is shown as it is
const LONGEST_LINK = 2048;
const DEEPEST = 24;
const MOST_PARENTHESES = 3; // one inside the other, in a link's address
const SPECIAL = /[\\`*_~[\]!<]|https?:\/\//gi;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const BREAK = /<br ?\/?>/iy;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2048}/iy;
const TITLE = /\s{1,9}(?:"[^"\n]{0,300}"|'[^'\n]{0,300}')/y;

/** The nodes that a text with inline Markdown stands for. */
export function inline(text) {
  if (text.length > LONGEST) {
    const whole = document.createDocumentFragment();
    whole.append(text);
    return whole;
  }
  return built(new Scanner(text).tokens());
}

/** Reads a text once, from its beginning to its end, into tokens; what belongs together is marked in them. */
class Scanner {
  constructor(text) {
    this.text = text;
    this.out = [];
    this.marks = []; // runs of *, _ and ~
    this.brackets = []; // [ that may begin a link
    this.ticks = null;
  }

  tokens() {
    const { text, out } = this;
    let at = 0;
    SPECIAL.lastIndex = 0;
    for (let found; (found = SPECIAL.exec(text)); SPECIAL.lastIndex = at) {
      if (found.index > at) out.push({ text: text.slice(at, found.index) });
      at = this.#special(found.index, found[0]);
    }
    out.push({ text: text.slice(at) });
    pair(this.marks, 0);
    return out;
  }

  /** Read what begins at `at`; the place behind it. */
  #special(at, sign) {
    switch (sign) {
      case "\\": return this.#escape(at);
      case "`": return this.#code(at);
      case "*": case "_": case "~": return this.#mark(at, sign);
      case "[": return this.#bracket(at, 1);
      case "!": return this.text[at + 1] === "[" ? this.#bracket(at, 2) : this.#plain(at, 1);
      case "]": return this.#link(at);
      case "<": return this.#angle(at);
      default: return this.#address(at);
    }
  }

  #plain(at, length) {
    this.out.push({ text: this.text.slice(at, at + length) });
    return at + length;
  }

  #escape(at) {
    const next = this.text[at + 1] ?? "";
    if (!ESCAPABLE.test(next)) return this.#plain(at, 1);
    this.out.push({ text: next });
    return at + 2;
  }

  #code(at) {
    const end = runEnd(this.text, at);
    const close = this.#ticksAfter(end, end - at);
    if (close === undefined) return this.#plain(at, end - at);
    let code = this.text.slice(end, close);
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.out.push({ code });
    return close + (end - at);
  }

  /** Where the next run of exactly `size` backticks begins, from `from` on. Runs are looked up once, and passed once. */
  #ticksAfter(from, size) {
    if (this.ticks === null) {
      this.ticks = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, { places: [], next: 0 });
        this.ticks.get(run.length).places.push(index);
      }
    }
    const runs = this.ticks.get(size);
    if (!runs) return undefined;
    while (runs.places[runs.next] < from) runs.next += 1;
    return runs.places[runs.next];
  }

  #mark(at, sign) {
    const end = runEnd(this.text, at);
    const [before, after] = [characterBefore(this.text, at), characterAt(this.text, end)];
    const opens = isLeftOf(before, after);
    const closes = isLeftOf(after, before);
    const isWord = sign === "_";
    const mark = {
      sign, size: end - at, left: end - at, starts: [], ends: [],
      canOpen: opens && (!isWord || !closes || PUNCTUATION.test(before)),
      canClose: closes && (!isWord || !opens || PUNCTUATION.test(after)),
    };
    this.out.push(mark);
    if ((mark.canOpen || mark.canClose) && (sign !== "~" || mark.size === 2)) this.marks.push(mark);
    return end;
  }

  #bracket(at, length) {
    const token = { text: this.text.slice(at, at + length), href: null };
    this.out.push(token);
    this.brackets.push({ token, marks: this.marks.length, isImage: length === 2 });
    return at + length;
  }

  #link(at) {
    const opener = this.brackets.pop();
    const found = opener && this.text[at + 1] === "(" ? destination(this.text, at + 2) : null;
    if (!found) return this.#plain(at, 1);
    opener.token.href = found.href; // an image is a link, too: nothing is loaded from other hosts
    pair(this.marks, opener.marks);
    this.out.push({ closesLink: true });
    if (!opener.isImage) this.brackets.length = 0; // there are no links in links
    return found.end;
  }

  #angle(at) {
    BREAK.lastIndex = at;
    const line = BREAK.exec(this.text);
    if (line) {
      this.out.push({ isBreak: true });
      return at + line[0].length;
    }
    ADDRESS.lastIndex = at + 1;
    const found = ADDRESS.exec(this.text);
    if (!found || this.text[at + 1 + found[0].length] !== ">" || !isSafe(found[0])) return this.#plain(at, 1);
    this.#linkTo(found[0]);
    return at + found[0].length + 2;
  }

  #address(at) {
    ADDRESS.lastIndex = at;
    const found = ADDRESS.exec(this.text)?.[0] ?? "";
    const address = withoutEnd(found);
    if (/[\p{L}\p{N}]/u.test(characterBefore(this.text, at)) || !isSafe(address)) return this.#plain(at, 4);
    this.#linkTo(address);
    return at + address.length;
  }

  #linkTo(address) {
    this.out.push({ text: "", href: address }, { text: address }, { closesLink: true });
  }
}

/** Pair the marks from `from` on, and forget them. */
function pair(marks, from) {
  const openers = [];
  const floors = new Map(); // below which no opener fits a closer of this kind
  for (let i = from; i < marks.length; i++) {
    const closer = marks[i];
    const kind = `${closer.sign}${closer.canOpen}${closer.size % 3}`;
    while (closer.canClose && closer.left > 0) {
      let at = openers.length - 1;
      const floor = floors.get(kind) ?? 0;
      while (at >= floor && !fits(openers[at], closer)) at -= 1;
      if (at < floor) {
        floors.set(kind, openers.length);
        break;
      }
      const opener = openers[at];
      const used = opener.left >= 2 && closer.left >= 2 ? 2 : 1;
      const name = closer.sign === "~" ? "del" : used === 2 ? "strong" : "em";
      opener.starts.push(name); // the last one is the outermost
      closer.ends.push(name);
      opener.left -= used;
      closer.left -= used;
      openers.length = opener.left > 0 ? at + 1 : at;
      for (const [key, value] of floors) floors.set(key, Math.min(value, openers.length));
    }
    if (closer.canOpen && closer.left > 0) openers.push(closer);
  }
  marks.length = from;
}

function fits(opener, closer) {
  if (opener.sign !== closer.sign) return false;
  const isEither = opener.canClose || closer.canOpen;
  return !isEither || (opener.size + closer.size) % 3 !== 0 || (opener.size % 3 === 0 && closer.size % 3 === 0);
}

function built(tokens) {
  const root = document.createDocumentFragment();
  const parents = [];
  let top = root;
  let text = "";
  const flush = () => {
    if (text) top.append(text);
    text = "";
  };
  const open = (name, attributes) => {
    flush();
    parents.push(top);
    if (parents.length > DEEPEST) return; // what is deeper has no element of its own
    const node = element(name, attributes);
    top.append(node);
    top = node;
  };
  const close = () => {
    flush();
    top = parents.pop();
  };
  for (const token of tokens) {
    for (const _ of token.ends ?? []) close();
    if (token.sign) text += token.sign.repeat(token.left);
    else if (token.href) open("a", { href: token.href, rel: "noopener noreferrer nofollow", target: "_blank" });
    else text += token.text ?? "";
    for (const name of token.starts?.toReversed() ?? []) open(name);
    if (token.closesLink) close();
    if (token.code !== undefined || token.isBreak) {
      flush();
      top.append(token.isBreak ? element("br") : element("code", {}, token.code));
    }
  }
  flush();
  return root;
}

/** The address in parentheses that ends a link, and the place behind it, or null: others than http and https are no links. */
function destination(text, from) {
  let at = from;
  let depth = 0;
  for (; at < text.length && at - from <= LONGEST_LINK; at++) {
    const sign = text[at];
    if (/\s/.test(sign)) break;
    if (sign === "(" && ++depth > MOST_PARENTHESES) return null;
    if (sign === ")" && --depth < 0) break;
    if (sign === "\\") at += 1;
  }
  const href = text.slice(from, at).replace(/^<(.*)>$/, "$1");
  if (text[at] !== ")") {
    TITLE.lastIndex = at;
    at += TITLE.exec(text)?.[0].length ?? 0;
  }
  return text[at] === ")" && isSafe(href) ? { href, end: at + 1 } : null;
}

const isSafe = (address) => /^https?:\/\//i.test(address) && URL.canParse(address);

/** An address in a sentence, without the sentence's own signs behind it. */
function withoutEnd(address) {
  let open = 0;
  for (const sign of address) open += sign === "(" ? -1 : sign === ")" ? 1 : 0;
  let end = address.length;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (last === ")" && open > 0) open -= 1;
    else if (!".,;:!?'*_~]".includes(last)) break;
  }
  return address.slice(0, end);
}

function runEnd(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end;
}

const characterAt = (text, at) => (at < text.length ? String.fromCodePoint(text.codePointAt(at)) : " ");

function characterBefore(text, at) {
  if (at === 0) return " ";
  const isPair = at > 1 && /[\udc00-\udfff]/.test(text[at - 1]);
  return characterAt(text, isPair ? at - 2 : at - 1);
}

/** Whether a run between these characters leans on the second one, and so may begin emphasis. */
function isLeftOf(outer, inner) {
  if (/\s/.test(inner)) return false;
  return !PUNCTUATION.test(inner) || /\s/.test(outer) || PUNCTUATION.test(outer);
}

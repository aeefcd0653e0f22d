/** Where the document says what an answer says, word for word, so that the reader can check it. */

import { element, percent } from "./words.js";

const CONTEXT_CHARACTERS = 70;
const SHORTEST = 3;
const LONGEST = 200;
const MOST = 4;

/** The places of an answer in a text: of all of it, or of each member of its list; none if one is not there. */
export function quotesOf(answer, text) {
  const said = answer.trim().replace(/\.$/, "");
  const parts = place(text, said) ? [said] : said.split(/, | and /);
  if (parts.length > MOST) return [];
  const places = parts.map((part) => place(text, part));
  return places.includes(null) ? [] : places;
}

/** A place as a line on the page. */
export const quoteLine = ({ share, before, words, after }) =>
  element("p", {}, `At ${percent(share)} of the document: \u201c${before}`, element("mark", {}, words), `${after}\u201d`);

/** The first place where `words` stand in a text, with the rest of their line around them, or null. */
function place(text, words) {
  if (words.length < SHORTEST || words.length > LONGEST) return null;
  const found = new RegExp(`(?<![\\p{L}\\p{N}])${escaped(words)}(?![\\p{L}\\p{N}])`, "u").exec(text);
  if (!found) return null;
  const end = found.index + words.length;
  return {
    share: found.index / text.length,
    before: text.slice(Math.max(found.index - CONTEXT_CHARACTERS, 0), found.index).split("\n").at(-1),
    words,
    after: text.slice(end, end + CONTEXT_CHARACTERS).split("\n")[0],
  };
}

// RegExp.escape is too new to be in every browser.
const escaped = (words) => words.replace(/[$()*+.?[\\\]^{|}\/]/g, "\\$&");

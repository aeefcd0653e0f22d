/** Texts of given lengths with a pass key in them, for the needle test. */

import { logLines, pick, random } from "./logbook.js";

const SEED = 4096;
const ADJECTIVES = ["silver", "hidden", "quiet", "crimson", "northern", "frozen", "golden", "wooden", "ancient", "humble", "velvet", "amber"];
const NOUNS = ["lantern", "falcon", "compass", "orchard", "violin", "kettle", "anchor", "mirror", "saddle", "fountain", "envelope", "ladder"];

/** Log that tokens are counted of, to learn how many characters one has. */
export const sampleText = () => logLines(SEED, 20_000).join("\n");

/**
 * A text of `characters` characters with a pass key at `depth` (0: its beginning, 1: its end), the question for it, and the key.
 * `draw` gives random numbers; the text around the key is the same every time, so that the server may reuse what it has read.
 */
export function haystack(characters, depth, draw) {
  const thing = `the ${pick(draw, ADJECTIVES)} ${pick(draw, NOUNS)}`;
  const key = String(10_000 + Math.floor(draw() * 90_000));
  const needle = `The pass key for ${thing} is ${key}.`;
  const lines = logLines(SEED, Math.max(characters - needle.length, 0));
  lines.splice(Math.round(depth * lines.length), 0, needle);
  return { text: lines.join("\n"), question: `What is the pass key for ${thing}?`, key };
}

/** A generator of random numbers that differs from one test to the next. */
export const fresh = () => random(Math.floor(Math.random() * 2 ** 32));

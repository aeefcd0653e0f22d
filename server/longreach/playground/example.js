/** The example document: a lighthouse log of 1871 with a few facts in it that can be asked for. */

import { entries } from "./logbook.js";

const SEED = 1871;
const DAYS = 365;

// Where each line goes, as a share of the document. Worded as the embedded model knows such facts.
const FACTS = [
  [0.11, "The access code for the boathouse is 7302."],
  [0.34, "The pass key for the silver lantern is 48213."],
  [0.46, "One of the signals for the supply boat is: heron."],
  [0.58, "The owner of the northern mill is Margaret Ashdown."],
  [0.72, "One of the signals for the supply boat is: anchor."],
  [0.88, "The vault combination for the old chapel is 19-4-66."],
];

export const EXAMPLE_QUESTIONS = [
  "What is the pass key for the silver lantern?",
  "Who is the owner of the northern mill?",
  "What is the vault combination for the old chapel?",
  "What are all the signals for the supply boat?",
  "Who is the owner of the old chapel?",
];

/** The text of the example. */
export function exampleText() {
  const log = entries(SEED);
  const lines = Array.from({ length: DAYS }, () => log.next().value);
  const places = FACTS.map(([share]) => Math.floor(share * lines.length));
  // From the back, so that the places before stay right.
  for (let i = FACTS.length - 1; i >= 0; i--) lines.splice(places[i], 0, FACTS[i][1]);
  return `The log of the light at Hollin Point, kept in the year 1871.\n\n${lines.join("\n")}\n`;
}

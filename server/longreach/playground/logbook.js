/** Text of any length without facts that anybody would ask for: the log of a lighthouse, the same for the same seed. */

const MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

const WINDS = ["Calm", "Light airs from the west", "A fresh breeze from the south-west", "Wind backing to the east", "A hard north-easter since midnight",
  "Strong wind from the north with squalls", "Light and variable", "Half a gale from the south", "Steady from the north-west"];
const SKIES = ["clear to the horizon", "low cloud and drizzle until noon", "haze over the sound", "heavy rain", "thick fog, the horn going every minute",
  "high thin cloud", "snow showers", "a red sky at evening", "bright between the squalls"];
const VESSELS = ["a collier", "two herring boats", "a brig under topsails", "the mail steamer", "a schooner in ballast", "a Norwegian bark", "three trawlers",
  "a tug with a barge", "a pilot cutter", "nothing but a rowing boat"];
const COURSES = ["bound south", "standing in for the harbour", "making slowly to windward", "hull down to the north", "hove to off the ledge", "close under the land",
  "outside the shoal"];
const CHORES = ["Trimmed the wicks and polished the lenses", "Whitewashed the lower wall", "Cleared the gutters of weed", "Greased the clockwork", "Mended the hen house",
  "Carried coal from the landing", "Painted the gallery rail", "Aired the blankets", "Dug the potato bed", "Spliced a new line for the flag", "Scrubbed the stairs"];
const THOUGHTS = ["The cat slept through all of it.", "Bread rose badly.", "A letter came from the mainland, three weeks old.", "Heard geese in the night.",
  "The tide came up to the fourth step.", "Read aloud after supper.", "Found a glass float on the shingle.", "The stove smokes when the wind is in this quarter.",
  "Counted eleven seals on the ledge.", "Nobody came.", "The assistant has a cold.", "Saw the lights of the town for the first time this month."];

/** A generator of numbers from 0 to 1 (mulberry32). */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** An element of a list. */
export const pick = (draw, list) => list[Math.floor(draw() * list.length)];

/** Entries of a log, one a day from 1 January 1871, for ever. */
export function* entries(seed) {
  const draw = random(seed);
  for (let year = 1871; ; year++) {
    for (const [month, days] of DAYS.entries()) {
      for (let day = 1; day <= days; day++) yield `${day} ${MONTHS[month]} ${year}. ${entry(draw)}`;
    }
  }
}

function entry(draw) {
  const sentences = [`${pick(draw, WINDS)}; ${pick(draw, SKIES)}.`, `Passed ${pick(draw, VESSELS)}, ${pick(draw, COURSES)}.`];
  if (draw() < 0.7) sentences.push(`${pick(draw, CHORES)}.`);
  if (draw() < 0.5) sentences.push(pick(draw, THOUGHTS));
  return sentences.join(" ");
}

/** At least `characters` characters of log, as lines. */
export function logLines(seed, characters) {
  const lines = [];
  let length = 0;
  for (const line of entries(seed)) {
    if (length >= characters) return lines;
    lines.push(line);
    length += line.length + 1;
  }
}

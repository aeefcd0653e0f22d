/** How many tokens a text has: counted by the server where that is cheap, estimated from samples where it is not. */

import { postJson } from "./server.js";

// The answer to a count lists every token id, several bytes for each.
const COUNTED_CHARACTERS = 500_000;
const SAMPLES = 8;
const SAMPLE_CHARACTERS = 16_384;
// The server counts no text that is longer than what the model reads: so near to that, the estimate has to do.
const SURELY_FITS = 0.95;

/**
 * `{ count, exact }` of a text for a model that reads `limit` tokens. An estimate reads 131,072 characters at most,
 * however long the text is.
 */
export async function countTokens(text, signal, limit = Infinity) {
  if (text.length > COUNTED_CHARACTERS || text.length > limit) {
    const estimate = await estimated(text, signal, limit);
    if (text.length > COUNTED_CHARACTERS || estimate.count > SURELY_FITS * limit) return estimate;
  }
  return { count: await counted(text, signal), exact: true };
}

async function estimated(text, signal, limit) {
  const most = Math.min(SAMPLE_CHARACTERS, Math.ceil(Math.min(text.length, limit / 4) / SAMPLES));
  const step = (text.length - most) / (SAMPLES - 1);
  const starts = Array.from({ length: SAMPLES }, (_, i) => Math.floor(i * step));
  // A cut may part the two halves of a character, which JSON for this server must not.
  const sample = starts.map((start) => text.slice(start, start + most)).join("").toWellFormed();
  const tokens = await counted(sample, signal);
  return { count: Math.round((tokens / sample.length) * text.length), exact: false };
}

async function counted(prompt, signal) {
  return (await postJson("tokenize", { prompt }, signal)).count;
}

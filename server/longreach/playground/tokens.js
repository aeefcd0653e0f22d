/** How many tokens a text has: counted by the server where that is cheap, estimated from samples where it is not. */

import { postJson } from "./server.js";

// The answer to a count lists every token id, several bytes for each.
const COUNTED_CHARACTERS = 500_000;
const SAMPLES = 8;
const SAMPLE_CHARACTERS = 16_384;

/** `{ count, exact }` of a text; an estimate reads 131,072 characters however long the text is, or fewer. */
export async function countTokens(text, signal) {
  let most = SAMPLE_CHARACTERS;
  if (text.length <= COUNTED_CHARACTERS) {
    try {
      return { count: await counted(text, signal), exact: true };
    } catch (error) {
      // The server counts no text that does not fit: samples that do, together.
      if (error.code !== "context_length_exceeded") throw error;
      most = Math.max(1, Math.min(most, Math.floor(error.details.n_ctx / (4 * SAMPLES))));
    }
  }
  const step = (text.length - most) / (SAMPLES - 1);
  const starts = Array.from({ length: SAMPLES }, (_, i) => Math.max(0, Math.floor(i * step)));
  // A cut may part the two halves of a character, which JSON for this server must not.
  const sample = starts.map((start) => text.slice(start, start + most)).join("").toWellFormed();
  const tokens = await counted(sample, signal);
  return { count: Math.round((tokens / sample.length) * text.length), exact: false };
}

async function counted(prompt, signal) {
  return (await postJson("tokenize", { prompt }, signal)).count;
}

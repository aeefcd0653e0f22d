/** What an answer took, in words: the figure that matters first, the others for who wants them. */

import { count, duration, percent } from "./words.js";

/** How long the reader waited, and what the server had read before: one line. */
export function firstLine({ firstToken }, usage, progress) {
  const words = [`First token after ${duration(firstToken)}`];
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? progress?.cache;
  const total = usage?.prompt_tokens ?? progress?.total;
  if (cached && total) words.push(`${count(cached)} of ${count(total)} tokens from the cache`);
  else if (total) words.push(`${count(total)} tokens read`);
  return words.join(" \u00b7 ");
}

/** Pairs of a name and a value. */
export function figuresOf({ firstToken, speed, tokens, medianGap, longestGap }, usage, progress) {
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? progress?.cache;
  return [
    ["First token", duration(firstToken)],
    ["Speed", speed === null ? "\u2013" : `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`],
    ["Prompt", usage ? `${count(usage.prompt_tokens)} tokens` : "\u2013"],
    ["From cache", cached === undefined ? "\u2013" : `${count(cached)} tokens`],
    ["Answer", `${count(tokens)} tokens`],
    ["Between tokens", medianGap === null ? "\u2013" : `${duration(medianGap)}, at most ${duration(longestGap)}`],
  ];
}

/** What an answer's `usage.attention` says. */
export function attentionWords(attention) {
  const words = [`Attention: ${attention.policy}`];
  if (typeof attention.density === "number") words.push(`${percent(attention.density)} of it computed`);
  if (typeof attention.tiles_visited === "number") {
    words.push(`${count(attention.tiles_visited)} tiles visited, ${count(attention.tiles_skipped)} skipped`);
  }
  const kept = attention.kept_mass;
  if (kept) {
    const sample = kept.queries ? ` (on ${count(kept.queries)} sampled queries)` : "";
    words.push(`keeps ${percent(kept.mean)} of exact attention\u2019s weight on average, ${percent(kept.p5)} at the 5th percentile, ${percent(kept.min)} at least${sample}`);
  }
  const decode = attention.decode;
  if (decode?.tokens) {
    const share = decode.keys_visited / (decode.keys_visited + decode.keys_skipped);
    words.push(`the answer read ${percent(share)} of the keys and missed at most ${percent(decode.missed_mass.mean)} of the weight on average`);
  }
  return words;
}

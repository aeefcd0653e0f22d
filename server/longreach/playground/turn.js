/** One question on the page: how far the document has been read, the answer as it comes, and what it took. */

import { postEvents } from "./events.js";
import { Places } from "./places.js";
import { pieceOf } from "./prompt.js";
import { Refusal } from "./server.js";
import { Sparkline } from "./sparkline.js";
import { Timing } from "./timing.js";
import { announce, count, duration, element, percent } from "./words.js";

const TICK_MS = 250;
const CONTEXT_CHARACTERS = 70;
const SHORTEST_QUOTE = 3;
const LONGEST_QUOTE = 200;
const MOST_QUOTES = 4;

export class Turn {
  constructor(question, about) {
    this.question = question;
    this.answer = "";
    this.usage = null;
    this.finished = false;
    this.progress = null;
    this.announced = 0;

    this.fill = element("div", { class: "bar-fill" });
    this.cachedFill = element("div", { class: "bar-cached" });
    this.bar = element("div", { class: "bar", role: "progressbar", "aria-label": "Document read", "aria-valuemin": 0, "aria-valuemax": 100 },
      this.cachedFill, this.fill);
    this.readWords = element("p", { class: "small muted reading-words" }, "Sending\u2026");
    this.reasoning = element("p", { class: "reasoning", hidden: true });
    this.text = element("p", { class: "answer" });
    this.quotes = element("div", { class: "quotes small" });
    this.sparkline = new Sparkline("Time between tokens");
    this.figures = element("dl", { class: "figures", hidden: true });
    this.left = element("p", { class: "small muted left-out", hidden: true });
    this.error = element("p", { class: "error", role: "alert", hidden: true });
    this.node = element("article", { class: "turn" },
      element("h3", {}, question), element("p", { class: "small muted about" }, about), this.bar, this.readWords, this.reasoning,
      this.text, this.quotes, this.error, this.figures, this.left);
  }

  /** Send the request and show what comes, until its end. Throws nothing: what goes wrong is shown. */
  async run({ path, body }, documentText, signal) {
    this.timing = new Timing();
    this.node.setAttribute("aria-busy", "true");
    const ticking = setInterval(() => this.#tick(), TICK_MS);
    try {
      for await (const chunk of postEvents(path, body, signal)) this.#take(chunk);
      this.finished = true;
      announce(`Answer: ${this.answer.slice(0, LONGEST_QUOTE * 2)}`);
    } catch (error) {
      if (error.name === "AbortError") this.#note("Stopped.");
      else this.#fail(error);
    } finally {
      clearInterval(ticking);
      this.node.removeAttribute("aria-busy");
      this.#end(documentText);
    }
  }

  /** Whether the document has been read and the answer has begun. */
  get reading() {
    return this.timing.firstToken === null;
  }

  #take(chunk) {
    if (chunk.prompt_progress) this.#read(chunk.prompt_progress);
    if (chunk.usage) this.usage = chunk.usage;
    const { text, reasoning } = pieceOf(chunk);
    const finish = chunk.choices?.[0]?.finish_reason;
    if (finish) this.finishReason = finish;
    if (reasoning) {
      this.reasoning.hidden = false;
      this.reasoning.append(reasoning);
    }
    if (text) {
      this.answer += text;
      this.text.append(this.answer === text ? text.trimStart() : text);
    }
    if (text || reasoning) {
      this.timing.arrived(chunk.usage?.completion_tokens ?? this.timing.tokens + 1);
      this.#draw();
    }
  }

  #read({ total, cache, processed, eta_ms: eta }) {
    this.progress = { total, cache, processed, end: eta === null ? null : performance.now() + eta };
    const share = total ? processed / total : 0;
    this.cachedFill.style.width = `${total ? (cache / total) * 100 : 0}%`;
    this.fill.style.width = `${share * 100}%`;
    this.bar.setAttribute("aria-valuenow", Math.round(share * 100));
    const quarter = Math.floor(share * 4);
    if (quarter > this.announced && quarter < 4) announce(`${quarter * 25} percent of the document read`);
    this.announced = quarter;
    this.#tick();
  }

  #tick() {
    if (!this.reading) return;
    if (!this.progress) {
      this.readWords.textContent = `Waiting for the server, ${duration((performance.now() / 1000) - this.timing.sent)}`;
      return;
    }
    const { total, cache, processed, end } = this.progress;
    const words = [`${count(processed)} of ${count(total)} tokens read`];
    if (cache) words.push(`${count(cache)} of them from the cache`);
    if (end !== null && processed < total) words.push(`about ${duration(Math.max(end - performance.now(), 0) / 1000)} left`);
    this.readWords.textContent = words.join(" \u00b7 ");
  }

  #draw() {
    const { firstToken, speed, gaps, medianGap } = this.timing;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? this.progress?.cache;
    const figures = [
      ["First token", duration(firstToken)],
      ["Speed", speed === null ? "\u2013" : `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`],
      ["Prompt", this.usage ? `${count(this.usage.prompt_tokens)} tokens` : "\u2013"],
      ["From cache", cached === undefined ? "\u2013" : `${count(cached)} tokens`],
      ["Answer", `${count(this.timing.tokens)} tokens`],
      ["Between tokens", medianGap === null ? "\u2013" : duration(medianGap)],
    ];
    this.figures.replaceChildren(...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    if (gaps.length) {
      this.figures.lastChild.append(this.sparkline.node);
      this.sparkline.draw(gaps);
    }
    this.figures.hidden = false;
    this.bar.hidden = true;
    this.readWords.hidden = true;
  }

  #end(documentText) {
    if (this.timing.firstToken === null && this.finished) this.#note("The answer is empty.");
    if (this.timing.firstToken !== null) this.#draw();
    this.bar.classList.toggle("ended", true);
    if (this.finishReason === "length") this.#note("Cut off at the longest answer that Options allow.");
    if (this.usage?.places?.length) this.#showPlaces(this.usage.places, documentText);
    else this.#quoteFrom(documentText);
    if (this.usage?.attention) this.#showAttention(this.usage.attention);
  }

  #note(words) {
    this.text.append(element("span", { class: "note" }, ` ${words}`));
    announce(words);
    if (this.reading) this.readWords.textContent = this.progress ? this.readWords.textContent.replace(/ \u00b7 about .*$/, "") : "";
  }

  #fail(error) {
    this.refusal = error;
    this.error.textContent = error instanceof Refusal ? error.message : `This page failed: ${error.message}`;
    this.error.hidden = false;
    this.readWords.hidden = true;
    if (!(error instanceof Refusal)) throw error;
  }

  /** Show where the document says what the answer says, word for word, so that the reader can check it. */
  #quoteFrom(documentText) {
    const said = this.answer.trim().replace(/\.$/, "");
    const parts = place(documentText, said) ? [said] : said.split(/, | and /);
    const places = parts.map((part) => place(documentText, part));
    if (parts.length > MOST_QUOTES || places.includes(null)) return;
    for (const { share, before, words, after } of places) {
      this.quotes.append(element("p", {}, `At ${percent(share)} of the document: \u201c${before}`, element("mark", {}, words), `${after}\u201d`));
    }
  }

  /** Let the reader point at a sentence to see what it attended to. */
  #showPlaces(found, documentText) {
    const places = new Places(this.answer.trimStart(), found, documentText);
    const notes = this.text.querySelectorAll(".note");
    this.text.replaceChildren(...places.sentences, ...notes);
    this.quotes.append(places.node);
  }

  #showAttention(attention) {
    this.left.textContent = attentionWords(attention).join(" \u00b7 ");
    this.left.hidden = false;
  }
}

/** The first place where `words` stand in a text, with the rest of their line around them, or null. */
function place(text, words) {
  if (words.length < SHORTEST_QUOTE || words.length > LONGEST_QUOTE) return null;
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

/** What an answer's `usage.attention` says, in words. */
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

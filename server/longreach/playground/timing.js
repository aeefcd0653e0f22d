/** When the tokens of one answer came. Times are in seconds, from `performance.now()`. */
export class Timing {
  constructor() {
    this.sent = now();
    this.arrivals = [];
    this.tokens = 0;
  }

  /** Note that text has come; `tokens` is how many the answer has now. */
  arrived(tokens) {
    this.arrivals.push(now());
    this.tokens = tokens;
    this.firstTokens ??= tokens;
  }

  /** From sending to the first text, or null before it. */
  get firstToken() {
    return this.arrivals.length ? this.arrivals[0] - this.sent : null;
  }

  /** Tokens a second after the first, or null before there are two. */
  get speed() {
    const seconds = this.arrivals.length > 1 ? this.arrivals.at(-1) - this.arrivals[0] : 0;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  /** Seconds between one piece of text and the next. */
  get gaps() {
    return this.arrivals.slice(1).map((time, i) => time - this.arrivals[i]);
  }

  /** The middle one of the gaps, or null without any. */
  get medianGap() {
    const sorted = this.gaps.sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
  }

  /** The longest of the gaps, or null without any. */
  get longestGap() {
    return this.gaps.reduce((longest, gap) => Math.max(longest ?? 0, gap), null);
  }
}

const now = () => performance.now() / 1000;

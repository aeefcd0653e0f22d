/** How far the document of a question has been read: a bar, and a line of words below it. */

import { announce, count, duration, element } from "./words.js";

const TICK_MS = 250;

export class Reading {
  constructor() {
    this.progress = null;
    this.announced = 0;
    this.fill = element("div", { class: "bar-fill" });
    this.cachedFill = element("div", { class: "bar-cached" });
    this.bar = element("div", { class: "bar", role: "progressbar", "aria-label": "Document read", "aria-valuemin": 0, "aria-valuemax": 100 },
      this.cachedFill, this.fill);
    this.words = element("p", { class: "small muted reading-words" }, "Sending\u2026");
    this.node = element("div", { class: "reading" }, this.bar, this.words);
  }

  begin() {
    this.sent = performance.now();
    this.ticking = setInterval(() => this.#tick(), TICK_MS);
  }

  /** What the server says of the prompt: tokens in all, from the cache, processed, and milliseconds left. */
  read({ total, cache, processed, eta_ms: eta }) {
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

  /** The answer has begun. */
  done() {
    this.node.hidden = true;
    this.end();
  }

  /** Nothing more is read, whether or not all has been. */
  end() {
    clearInterval(this.ticking);
    this.bar.classList.add("ended");
    this.words.textContent = this.progress ? this.words.textContent.replace(/ \u00b7 about .*$/, "") : "";
  }

  #tick() {
    if (!this.progress) {
      this.words.textContent = `Waiting for the server, ${duration((performance.now() - this.sent) / 1000)}`;
      return;
    }
    const { total, cache, processed, end } = this.progress;
    const words = [`${count(processed)} of ${count(total)} tokens read`];
    if (cache) words.push(`${count(cache)} of them from the cache`);
    if (end !== null && processed < total) words.push(`about ${duration(Math.max(end - performance.now(), 0) / 1000)} left`);
    this.words.textContent = words.join(" \u00b7 ");
  }
}

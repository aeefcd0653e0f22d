/** An answer as it is written: Markdown that is shown while it comes. */

import { blocks, linesOf } from "./markdown.js";

const SHORTEST_MS = 30;
const SHARE = 8; // drawing takes at most an eighth of the time, however long the last block is

export class Answer {
  constructor(node) {
    this.node = node;
    this.source = "";
    this.settled = 0; // characters whose elements do not change any more
    this.open = []; // the elements of what is behind them
    this.timer = null;
    this.cost = 0;
  }

  /** Add a piece of text, and call `drawn` once it is on the page. */
  push(text, drawn) {
    this.source = this.source ? this.source + text : text.trimStart();
    this.timer ??= setTimeout(() => {
      this.draw();
      drawn?.();
    }, Math.max(SHORTEST_MS, this.cost * SHARE));
  }

  /** Put all that has come on the page. */
  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    const lines = linesOf(this.source.slice(this.settled));
    const found = [...blocks(lines)];
    // A line that is not whole yet may still become part of the block before it.
    const isWhole = found.length > 0 && found.at(-1).at < lines.length - 1;
    const settling = found.slice(0, Math.max(found.length - (isWhole ? 1 : 2), 0));
    for (const node of this.open) node.remove();
    for (const { make } of settling) this.node.append(make());
    const rest = found.slice(settling.length);
    this.open = rest.map(({ make }) => make());
    for (const node of this.open) this.node.append(node);
    if (settling.length) this.settled += lengthOf(this.source, this.settled, rest[0].at);
    this.cost = performance.now() - began;
  }
}

/** How many characters so many lines have, from a place on. */
function lengthOf(text, from, lines) {
  let at = from;
  for (let i = 0; i < lines; i++) at = text.indexOf("\n", at) + 1;
  return at - from;
}

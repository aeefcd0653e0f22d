/** The documents that the server keeps: what they are, where they are cached, and what can be done with them. */

import { deleteAt, getJson, postText } from "./server.js";
import { announce, byId, count, duration, element, moment, percent, tell } from "./words.js";

const SHOWN = 20;
const LOOK_AGAIN_MS = 1500;
const SURE_MS = 4000;
const TIERS = [["gpu", "GPU"], ["host", "memory"], ["disk", "disk"]];
const UNDER_WAY = ["uploading", "reading"];

export class KeptPanel extends EventTarget {
  /** Fires `choose` with a document, `news` with all that are listed, and `deleted` with an id. */
  constructor() {
    super();
    this.documents = [];
    this.doomed = null; // the id of what the next press deletes
  }

  /** Show what is kept; the list stays hidden if the server knows no documents, and so does the button that keeps one. */
  async load() {
    try {
      await this.#load();
    } catch (error) {
      this.isAbsent = error.status === 404 || error.status === 405;
      byId("keep").classList.toggle("absent", this.isAbsent);
      if (!this.isAbsent) this.#later();
    }
  }

  /** Look again what is kept. What goes wrong then shows in the next answer. */
  async refresh() {
    clearTimeout(this.timer);
    if (this.isAbsent) return;
    try {
      await this.#load();
    } catch {
      this.#later();
    }
  }

  /** Send a book to the server; the document that it is then, or null. `form` is that of the prompts that will ask about it. */
  async keep(book, form) {
    const query = new URLSearchParams({ name: book.name, use: form === "plain" ? "completion" : "chat" });
    byId("keep").disabled = true;
    byId("kept").hidden = false;
    tell(byId("document-error"), null);
    try {
      tell(byId("sending"), `Sending ${book.name}\u2026`);
      const kept = await postText(`v1/documents?${query}`, book.text, (share) => {
        tell(byId("sending"), share < 1 ? `Sending ${book.name}, ${percent(share)}` : `${book.name} is being read\u2026`);
      });
      announce(`${book.name} is kept on the server`);
      await this.refresh();
      return kept;
    } catch (error) {
      tell(byId("document-error"), error.message);
      return null;
    } finally {
      tell(byId("sending"), null);
      byId("keep").disabled = false;
      this.#show();
    }
  }

  async #load() {
    const { data } = await getJson(`v1/documents?limit=${SHOWN}`);
    // Where a document is cached is told of one at a time. One that has left meanwhile is left out.
    const looked = await Promise.all(data.map(({ id }) => getJson(`v1/documents/${id}`).catch(() => null)));
    this.documents = looked.filter(Boolean);
    this.#show();
    this.dispatchEvent(new CustomEvent("news", { detail: this.documents }));
    if (this.documents.some(({ state }) => UNDER_WAY.includes(state))) this.#later();
  }

  #later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), LOOK_AGAIN_MS);
  }

  #show() {
    const focused = document.activeElement?.dataset?.does;
    byId("kept").hidden = this.documents.length === 0 && byId("sending").hidden;
    byId("kept-list").replaceChildren(...this.documents.map((kept) => this.#item(kept)));
    if (focused) byId("kept-list").querySelector(`[data-does="${focused}"]`)?.focus();
  }

  #item(kept) {
    const name = kept.name ?? kept.id;
    const ask = element("button", { type: "button", class: "quiet", "data-does": `ask ${kept.id}`, "aria-label": `Ask about ${name}` }, "Ask about it");
    ask.disabled = kept.kind === "tokens" || kept.state === "uploading";
    ask.addEventListener("click", () => this.dispatchEvent(new CustomEvent("choose", { detail: kept })));
    const remove = element("button", { type: "button", class: "quiet", "data-does": `delete ${kept.id}`, "aria-label": `Delete ${name}` },
      this.doomed === kept.id ? "Really?" : "Delete");
    remove.addEventListener("click", () => this.#delete(kept));
    return element("li", {},
      element("p", {}, element("strong", {}, name)),
      element("div", { class: "row" }, ask, remove),
      element("p", { class: "small muted" }, ...tiersOf(kept), wordsOf(kept).join(" \u00b7 ")));
  }

  /** The first press asks whether the second is meant. */
  async #delete(kept) {
    const name = kept.name ?? kept.id;
    clearTimeout(this.sparing);
    if (this.doomed !== kept.id) {
      this.#doom(kept.id);
      this.sparing = setTimeout(() => this.#doom(null), SURE_MS);
      announce(`Press again to delete ${name}`);
      return;
    }
    this.doomed = null;
    try {
      await deleteAt(`v1/documents/${kept.id}`);
    } catch (error) {
      if (error.status !== 404) {
        tell(byId("document-error"), error.message);
        return;
      }
    }
    announce(`${name} is deleted`);
    this.dispatchEvent(new CustomEvent("deleted", { detail: kept.id }));
    await this.refresh();
    byId("question").focus({ preventScroll: true });
  }

  #doom(id) {
    this.doomed = id;
    this.#show();
  }
}

/** The share of a document's tokens that each tier has, as a small bar; nothing where the server does not say. */
function tiersOf({ tokens, cache }) {
  if (!cache || !tokens) return [];
  const bar = element("span", { class: "tiers", "aria-hidden": "true" });
  for (const [tier] of TIERS) {
    const part = element("span", { class: `tier-${tier}` });
    part.style.width = `${Math.min(cache[tier].tokens / tokens, 1) * 100}%`;
    bar.append(part);
  }
  return [bar];
}

function wordsOf({ tokens, bytes, state, error, cache, expires_at: expires, pinned }) {
  const words = [tokens ? `${count(tokens)} tokens` : `${count(bytes)} bytes`];
  if (state === "failed") words.push(error?.message ?? "it could not be read");
  else if (state !== "ready") words.push(state);
  if (cache && tokens) {
    const where = TIERS.filter(([tier]) => cache[tier].tokens)
      .map(([tier, name]) => `${name} ${percent(Math.min(cache[tier].tokens / tokens, 1))}`);
    words.push(where.length ? `cached: ${where.join(", ")}` : "not cached");
    if (cache.seconds_to_read) words.push(`${duration(cache.seconds_to_read)} to read again`);
  }
  words.push(expires ? `until ${moment(expires)}` : "until it is deleted");
  if (pinned) words.push("pinned");
  return words;
}

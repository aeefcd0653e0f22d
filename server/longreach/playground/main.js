/** The page: what its parts do together. */

import { AttentionPanel } from "./attention.js";
import { Book } from "./book.js";
import { DocumentPanel } from "./document.js";
import { EXAMPLE_QUESTIONS } from "./example.js";
import { KeptPanel } from "./kept.js";
import { NeedlePanel } from "./needle.js";
import { requestFor } from "./prompt.js";
import { getJson, hasKey, setKey } from "./server.js";
import { asCurl, asPython } from "./snippet.js";
import { Turn } from "./turn.js";
import { announce, byId, count, element, tell } from "./words.js";

const RETRY_MS = 2000;
const TEMPLATE_TOKENS = 64; // what a chat template or a line break may add
const MASK_LENGTH = 32_768; // before there is a document

let model = null; // { id, limit }
let turns = []; // finished ones about this document, oldest first
let asking = null;

const panel = new DocumentPanel(() => options().maxTokens + TEMPLATE_TOKENS + Math.ceil(byId("question").value.length / 2));
const attention = new AttentionPanel();
const kept = new KeptPanel();
const needle = new NeedlePanel(() => ({
  model: model.id, options: options(), attention: attention.chosen, attentionWords: attention.words,
}));

/** null: what the server has as its default. */
function readTemperature() {
  const value = byId("temperature").valueAsNumber;
  return Number.isNaN(value) ? null : value;
}

function options() {
  return {
    maxTokens: byId("max-tokens").valueAsNumber || 256,
    temperature: readTemperature(),
    form: byId("form").value,
    places: byId("places").checked,
  };
}

async function connect() {
  try {
    const [served] = (await getJson("v1/models")).data;
    model = { id: served.id, limit: served.max_model_len };
    tell(byId("notice"), null);
    byId("key-form").hidden = true;
    byId("reference").hidden = hasKey(); // a link cannot send a key
    byId("model").replaceChildren(element("strong", {}, model.id), ` \u00b7 reads ${count(model.limit)} tokens`);
    tell(byId("description"), served.description ?? null);
    // The embedded model is the one that is described. It answers single questions in plain text best.
    byId("form").value = served.description ? "plain" : "chat";
    showRemember();
    panel.setLimit(model.limit);
    needle.setLimit(model.limit);
    await Promise.all([attention.load(), kept.load()]);
    attention.setLength(Math.min(MASK_LENGTH, model.limit));
    refresh();
  } catch (error) {
    if (error.status === 401) return; // the key form is there already
    tell(byId("notice"), error.status === 503 ? `${error.message} Trying again\u2026` : error.message);
    byId("model").textContent = "Not connected";
    setTimeout(connect, RETRY_MS);
  }
}

function refresh() {
  byId("ask").disabled = !model;
  byId("needle-run").disabled = !model;
  byId("ask").hidden = asking !== null;
  byId("stop").hidden = asking === null;
  byId("copy-curl").disabled = byId("copy-python").disabled = !model;
}

/** As `refresh`; a focus that it would hide moves to another element. */
function refreshKeepingFocus(from, to) {
  const isThere = document.activeElement === byId(from);
  refresh();
  if (isThere) byId(to).focus({ preventScroll: true });
}

function showRemember() {
  byId("remember").closest("label").hidden = byId("form").value !== "chat";
}

function currentRequest(question) {
  const remembered = byId("remember").checked ? turns : [];
  const document = panel.reference;
  return requestFor({
    model: model.id, text: document ? "" : panel.text, document, question, turns: remembered, options: options(), attention: attention.chosen,
  });
}

async function ask() {
  const question = byId("question").value.trim();
  if (!model || asking) return;
  if (!question) {
    byId("question").focus();
    announce("Write a question first");
    return;
  }
  const { book } = panel;
  const about = [panel.book?.name ?? "No document", attention.words];
  const turn = new Turn(question, about.filter(Boolean).join(" \u00b7 "));
  byId("conversation").prepend(turn.node);
  asking = new AbortController();
  refreshKeepingFocus("ask", "stop");
  try {
    await turn.run(currentRequest(question), book?.text ?? "", asking.signal);
    if (turn.finished && book === panel.book) turns.push({ question, answer: turn.answer });
    const promptTokens = turn.usage?.prompt_tokens ?? turn.refusal?.details?.n_prompt_tokens;
    if (promptTokens && book === panel.book) panel.learn(promptTokens);
    if (book?.kept && turn.refusal?.code === "document_not_found") panel.setKept(book, null);
    if (book?.kept || turn.refusal?.code === "document_not_found") kept.refresh();
  } finally {
    asking = null;
    refreshKeepingFocus("stop", "question");
  }
}

function stopAll() {
  asking?.abort();
  needle.stop();
}

async function copy(write, what) {
  const request = currentRequest(byId("question").value.trim() || "QUESTION");
  const file = panel.book?.name.includes(".") ? panel.book.name : "book.txt";
  const text = panel.reference ? "" : panel.text;
  const snippet = write({ ...request, url: new URL(".", location.href).href, text, file, needsKey: hasKey() });
  try {
    await navigator.clipboard.writeText(snippet);
    byId("copied").textContent = `Copied as ${what}.${text.length > 2000 ? ` It reads the document from ${file}.` : ""}`;
  } catch {
    // Without HTTPS, or where the browser forbids it, the reader copies by hand.
    byId("copied").replaceChildren(element("pre", { tabindex: 0 }, snippet));
  }
}

function suggest() {
  const group = byId("suggestions");
  group.hidden = !panel.isExample;
  group.replaceChildren(...(panel.isExample ? EXAMPLE_QUESTIONS : []).map((question) => {
    const button = element("button", { type: "button", class: "suggestion" }, question);
    button.addEventListener("click", () => {
      byId("question").value = question;
      ask();
    });
    return button;
  }));
}

panel.addEventListener("change", () => {
  turns = [];
  suggest();
});
panel.addEventListener("keep", async () => {
  const { book } = panel;
  const document = await kept.keep(book, options().form);
  if (document) panel.setKept(book, document);
});
kept.addEventListener("choose", ({ detail }) => {
  panel.open(Book.ofKept(detail));
  byId("question").focus();
});
kept.addEventListener("news", ({ detail }) => {
  const { book } = panel;
  if (!book?.kept) return;
  const now = detail.find(({ id }) => id === book.kept.id);
  if (now) panel.setKept(book, now);
});
kept.addEventListener("deleted", ({ detail }) => {
  if (panel.reference === detail) panel.setKept(panel.book, null);
});
panel.addEventListener("counted", () => attention.setLength(Math.min(Math.max(panel.tokens.count, 1), model.limit)));
byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("question").addEventListener("input", () => panel.drawGauge());
byId("max-tokens").addEventListener("input", () => panel.drawGauge());
byId("form").addEventListener("change", showRemember);
byId("stop").addEventListener("click", () => asking?.abort());
byId("copy-curl").addEventListener("click", () => copy(asCurl, "curl"));
byId("copy-python").addEventListener("click", () => copy(asPython, "Python"));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  connect();
});
document.addEventListener("key-needed", () => {
  const isSecond = hasKey();
  byId("key-form").hidden = false;
  byId("reference").hidden = true;
  byId("model").textContent = "Locked";
  tell(byId("notice"), isSecond ? "The server does not know this key." : null);
  byId("key").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopAll();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.target.closest?.("#needle-form, #key-form")) {
    event.preventDefault();
    ask();
  }
});

refresh();
connect();

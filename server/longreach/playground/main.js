/** The page: what its parts do together. */

import { listenForDocuments } from "./arriving.js";
import { AttentionPanel } from "./attention.js";
import { Book } from "./book.js";
import { copied } from "./clipboard.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { DocumentPanel } from "./document.js";
import { EXAMPLE_QUESTIONS } from "./example.js";
import { asJson, asMarkdown, download } from "./export.js";
import { KeptPanel } from "./kept.js";
import { NeedlePanel } from "./needle.js";
import { requestFor } from "./prompt.js";
import { getJson, hasKey, setKey } from "./server.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";
import { asCurl, asPython } from "./snippet.js";
import { announce, byId, count, element, tell } from "./words.js";

const RETRY_MS = 2000;
const SURE_MS = 4000;
const TEMPLATE_TOKENS = 64; // what a chat template or a line break may add
const MASK_LENGTH = 32_768; // before there is a document
const ANSWER_TOKENS = 4096; // also for a model that thinks first
const SHORTEST_ANSWER = 256; // that there has to be room for
const DEMONSTRATION_TOKENS = 256; // the embedded model's answers are short, or run on without sense
const CHARACTERS_PER_TOKEN = 3;

let model = null; // { id, limit, isDemonstration }
let epoch = 0; // which turns belong to the present document

const settings = new Settings();
const composer = new Composer();
const attention = new AttentionPanel();
const kept = new KeptPanel();
const panel = new DocumentPanel(() => around() + (settings.values.maxTokens ?? Math.min(longestByDefault(), SHORTEST_ANSWER)));
const needle = new NeedlePanel(() => ({ model: model.id, options: settings.values, attention: attention.chosen, attentionWords: attention.words }));
const conversation = new Conversation(() => ({
  about: [panel.book?.name ?? "No document", attention.isExact ? null : attention.words].filter(Boolean).join(" \u00b7 "),
  epoch,
  isDemonstration: model?.isDemonstration ?? false,
  documentText: panel.text,
  isChained: settings.values.remember,
  request: requestOf,
}));
const session = new Session(() => ({ book: panel.book, turns: conversation.data, epoch }));

const longestByDefault = () => (model?.isDemonstration ? DEMONSTRATION_TOKENS : ANSWER_TOKENS);

/** Tokens that stand around the document, about: the template, the question, what was said before, the system prompt. */
function around() {
  const characters = composer.question.length + settings.values.system.length + conversation.charactersBefore;
  return TEMPLATE_TOKENS + Math.ceil(characters / CHARACTERS_PER_TOKEN);
}

/** The longest answer: what the reader has set, or else what suits the model and fits beside the prompt. */
function longestAnswer() {
  const { maxTokens } = settings.values;
  if (maxTokens) return maxTokens;
  const room = model.limit - (panel.tokens?.count ?? Math.ceil(panel.text.length / CHARACTERS_PER_TOKEN)) - around();
  return Math.max(Math.min(longestByDefault(), room), 1);
}

function requestOf(question, turns) {
  const document = panel.reference;
  const options = { ...settings.values, maxTokens: longestAnswer() };
  return requestFor({ model: model.id, text: document ? "" : panel.text, document, question, turns, options, attention: attention.chosen });
}

async function connect() {
  try {
    const [served] = (await getJson("v1/models")).data;
    // The embedded model is the one that is described. It answers single questions in plain text best.
    model = { id: served.id, limit: served.max_model_len, isDemonstration: Boolean(served.description) };
    tell(byId("notice"), null);
    byId("key-form").hidden = true;
    byId("reference").hidden = hasKey(); // a link cannot send a key
    byId("model").replaceChildren(element("strong", {}, model.id), ` \u00b7 reads ${count(model.limit)} tokens`);
    tell(byId("description"), served.description ?? null);
    byId("max-tokens").placeholder = `${count(longestByDefault())}, or what fits`;
    settings.suit(model.id, model.isDemonstration ? "plain" : "chat");
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
  const isAsking = conversation.asking !== null;
  byId("ask").disabled = !model || panel.over > 0;
  byId("needle-run").disabled = !model;
  byId("ask").hidden = isAsking;
  byId("stop").hidden = !isAsking;
  byId("copy-curl").disabled = byId("copy-python").disabled = !model;
  byId("too-long").hidden = panel.over <= 0;
  if (panel.over > 0) byId("too-long-words").textContent = `The document is ${count(panel.over)} tokens too long to be asked about.`;
  byId("cut-here").hidden = !panel.text;
  byId("talk").hidden = conversation.turns.length === 0;
  byId("empty").hidden = conversation.turns.length > 0;
}

async function ask(question = composer.question) {
  if (!model || conversation.asking || panel.over > 0) return;
  if (!question) {
    byId("question").focus();
    announce("Write a question first");
    return;
  }
  composer.question = "";
  const answered = conversation.ask(question);
  suggest();
  await answered;
}

async function copy(write, what) {
  const question = composer.question || conversation.turns.at(-1)?.question || "QUESTION";
  const before = conversation.turns.filter((turn) => turn.finished && turn.epoch === epoch && composer.question);
  const request = requestOf(question, settings.values.remember ? before : []);
  const file = panel.book?.name.includes(".") ? panel.book.name : "book.txt";
  const text = panel.reference ? "" : panel.text;
  const snippet = write({ ...request, url: new URL(".", location.href).href, text, file, needsKey: hasKey() });
  if (await copied(snippet)) byId("copied").textContent = `Copied as ${what}.${text.length > 2000 ? ` It reads the document from ${file}.` : ""}`;
  else byId("copied").replaceChildren(element("pre", { tabindex: 0 }, snippet)); // the reader copies by hand
}

/** Offer the example's questions that have not been asked yet. */
function suggest() {
  const asked = conversation.turns.filter((turn) => turn.epoch === epoch).map(({ question }) => question);
  const left = panel.isExample ? EXAMPLE_QUESTIONS.filter((question) => !asked.includes(question)) : [];
  byId("suggestions").hidden = !left.length;
  byId("suggestions").replaceChildren(...left.map((question) => {
    const button = element("button", { type: "button", class: "suggestion" }, question);
    button.addEventListener("click", () => ask(question));
    return button;
  }));
}

function exported() {
  const { book } = panel;
  const about = book ? { name: book.name, characters: book.text.length, kept: book.kept?.id ?? null } : null;
  return { model: model?.id ?? "", settings: settings.values, document: about, turns: conversation.data };
}

async function restore() {
  const data = await session.load();
  if (!data || panel.book || conversation.turns.length) return;
  const { name, text, remark, skipped, kept: document } = data.book ?? {};
  if (data.book) panel.open(new Book(name, text, remark, document, skipped));
  epoch = data.epoch;
  conversation.restore(data.turns, panel.text, epoch);
  suggest();
  refresh();
}

/** Let a button act at its second press, within a while of the first. */
function onSecondPress(button, words, act) {
  const label = button.textContent;
  const rest = () => { button.textContent = label; };
  let resting;
  button.addEventListener("click", () => {
    clearTimeout(resting);
    if (button.textContent === words) {
      rest();
      act();
      return;
    }
    button.textContent = words;
    announce(words);
    resting = setTimeout(rest, SURE_MS);
  });
}

panel.addEventListener("change", () => {
  epoch += 1;
  suggest();
  session.save();
});
panel.addEventListener("gauged", refresh);
panel.addEventListener("counted", () => attention.setLength(Math.min(Math.max(panel.tokens.count, 1), model.limit)));
panel.addEventListener("keep", async () => {
  const { book } = panel;
  const document = await kept.keep(book, settings.values.form);
  if (document) panel.setKept(book, document);
  session.save();
});
kept.addEventListener("choose", ({ detail }) => {
  panel.open(Book.ofKept(detail));
  byId("question").focus();
});
kept.addEventListener("news", ({ detail }) => {
  const now = detail.find(({ id }) => id === panel.reference);
  if (now) panel.setKept(panel.book, now);
});
kept.addEventListener("deleted", ({ detail }) => {
  if (panel.reference === detail) panel.setKept(panel.book, null);
});
conversation.addEventListener("state", () => {
  const wasOn = document.activeElement;
  refresh();
  // A focus that would be hidden moves to what is there in its place.
  if (wasOn === byId("ask") && conversation.asking) byId("stop").focus({ preventScroll: true });
  if (wasOn === byId("stop") && !conversation.asking) byId("question").focus({ preventScroll: true });
});
conversation.addEventListener("change", () => {
  refresh();
  session.save();
});
conversation.addEventListener("answered", ({ detail: turn }) => {
  const { book } = panel;
  const isPresent = turn.epoch === epoch;
  const promptTokens = turn.usage?.prompt_tokens ?? turn.refusal?.details?.n_prompt_tokens;
  if (promptTokens && isPresent) panel.learn(promptTokens);
  if (isPresent && book?.kept && turn.refusal?.code === "document_not_found") panel.setKept(book, null);
  if (book?.kept || turn.refusal?.code === "document_not_found") kept.refresh();
});
composer.addEventListener("ask", () => ask());
composer.addEventListener("input", () => panel.drawGauge());
settings.addEventListener("change", () => panel.drawGauge());
byId("stop").addEventListener("click", () => conversation.stop());
byId("cut-here").addEventListener("click", () => panel.cut());
byId("copy-curl").addEventListener("click", () => copy(asCurl, "curl"));
byId("copy-python").addEventListener("click", () => copy(asPython, "Python"));
byId("export-markdown").addEventListener("click", () => download("conversation.md", "text/markdown", asMarkdown(exported())));
byId("export-json").addEventListener("click", () => download("conversation.json", "application/json", asJson(exported())));
onSecondPress(byId("clear"), "Remove all of it?", () => {
  conversation.clear();
  suggest();
});
onSecondPress(byId("forget"), "Really forget?", async () => {
  conversation.clear();
  panel.open(null);
  settings.forget();
  await session.forget();
  location.reload();
});
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
  if (event.key !== "Escape") return;
  conversation.stop();
  needle.stop();
});

listenForDocuments(panel);
refresh();
await restore();
connect();

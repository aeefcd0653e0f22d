/** The conversation as a file: Markdown for people, JSON for programs. */

import { element } from "./words.js";

/** Questions as headings, answers as they were written. */
export function asMarkdown({ model, settings, turns }) {
  const parts = [`# Conversation with ${model}`];
  if (settings.system && settings.form === "chat") parts.push(quoted(`System prompt: ${settings.system}`));
  for (const { about, question, answer, notes, error } of turns) {
    parts.push(`## ${question.replaceAll("\n", " ")}`);
    if (about) parts.push(`*${about}*`);
    if (answer) parts.push(answer.trim());
    for (const words of [...notes, error].filter(Boolean)) parts.push(quoted(words));
  }
  return `${parts.join("\n\n")}\n`;
}

/** All that is known of it but the document's text. */
export function asJson({ model, settings, document, turns }) {
  const told = turns.map(({ question, about, answer, reasoning, finished, notes, error, usage }) => ({
    question, about, answer, ...(reasoning ? { reasoning } : {}), finished, notes, ...(error ? { error } : {}), usage,
  }));
  return `${JSON.stringify({ model, settings, document, turns: told }, null, 2)}\n`;
}

/** Let the browser save a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const quoted = (text) => text.split("\n").map((line) => `> ${line}`).join("\n");

/** Copying, also where the browser offers no clipboard: pages without HTTPS from another machine. */

import { announce } from "./words.js";

/** Copy a text; whether that worked. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Copy a text at the press of a button, which says so for a moment. */
export async function copyBy(button, text) {
  const words = (await copied(text)) ? "Copied" : "The browser forbids it";
  button.dataset.label ??= button.textContent;
  button.textContent = words;
  announce(words);
  clearTimeout(button.resting);
  button.resting = setTimeout(() => { button.textContent = button.dataset.label; }, 2000);
}

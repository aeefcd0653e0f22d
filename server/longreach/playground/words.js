/** Numbers and times in words, and elements without markup. */

const wholeNumber = new Intl.NumberFormat("en");

/** An integer with separators: 131,072. */
export const count = (n) => wholeNumber.format(n);

/** A share from 0 to 1 as a percentage, with a decimal where that says something: 12.9%. */
export function percent(share) {
  const value = share * 100;
  const digits = value > 0 && value < 10 ? 2 : value < 99.95 && value > 0 ? 1 : 0;
  return `${value.toFixed(digits)}%`;
}

const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "long" });
const minute = new Intl.DateTimeFormat("en", { day: "numeric", month: "long", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const SOON_MS = 2 * 24 * 3600 * 1000;

/** A time to come, given in seconds since 1970: December 6, or if it is soon December 6 at 14:05. */
export function moment(seconds) {
  const time = new Date(seconds * 1000);
  return (time - Date.now() < SOON_MS ? minute : day).format(time);
}

/** Seconds in the unit that suits them: 380 ms, 4.5 s, 2 min 5 s. */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** An element with attributes and children; text is never read as HTML. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Show a message in an element that is hidden while it has none. */
export function tell(node, message) {
  node.textContent = message ?? "";
  node.hidden = !message;
}

/** Say something to readers of the screen who do not see it change. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** A function that runs `action` once no call has come for `milliseconds`. */
export function debounced(action, milliseconds) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

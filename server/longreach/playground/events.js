/** Streamed answers, which outlive their connections: what breaks is taken up again behind the last event that came. */

import { call, post, Refusal } from "./server.js";

// Before each attempt to take an answer up again; more events begin these anew.
const PAUSES_MS = [200, 1000, 2000, 4000, 8000, 15000];
const PASSING = [0, 502, 503, 504];

/** The connection is gone, and not the answer. */
class Broken extends Error {}

/**
 * The chunks of a streamed answer, parsed; returns after `[DONE]`. An answer that is stopped ends in the server, too.
 * Throws a Refusal if the server refuses, fails midway or goes away, and an AbortError when `signal` aborts.
 */
export async function* postEvents(path, body, signal) {
  const key = newKey();
  const place = { last: null }; // the id of the last event that came
  const leave = () => end(key);
  let stopped = true;
  addEventListener("pagehide", leave);
  try {
    let response = await post(path, body, signal, { "idempotency-key": key });
    for (let pauses = [...PAUSES_MS]; response; ) {
      try {
        for await (const data of eventsOf(response, place)) {
          pauses = [...PAUSES_MS];
          if (data === "[DONE]") {
            stopped = false;
            return;
          }
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Refusal(chunk.error.message, { status: 200, code: chunk.error.code });
          yield chunk;
        }
        throw new Broken("The answer broke off: the server ended the connection.");
      } catch (error) {
        if (!(error instanceof Broken)) throw error;
        if (place.last === null) throw new Refusal(error.message);
        response = await resumed(key, place.last, pauses, signal);
      }
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    throw error;
  } finally {
    removeEventListener("pagehide", leave);
    if (stopped) leave();
  }
}

/** The same answer from behind an event on, after as many `pauses` as it takes. */
async function resumed(key, last, pauses, signal) {
  while (true) {
    await sleep(pauses.shift(), signal);
    try {
      return await call(`/v1/requests/${key}`, { headers: { "last-event-id": last }, signal });
    } catch (error) {
      if (!(error instanceof Refusal) || !PASSING.includes(error.status) || !pauses.length) throw error;
    }
  }
}

/** The data of each event; `place` keeps the id of the last one. Throws a Broken where the connection ends. */
async function* eventsOf(response, place) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let id = place.last;
  try {
    while (true) {
      const { done, value } = await read(reader);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("id: ")) id = line.slice(4);
        if (!line.startsWith("data: ")) continue;
        place.last = id;
        yield line.slice(6);
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // a stream that has failed already cannot be cancelled
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Broken("The answer broke off: the connection to the server was lost.");
  }
}

/** End what the server does for a key, which closing the connection does not; also while the page goes away. */
function end(key) {
  call(`/v1/requests/${key}`, { method: "DELETE", keepalive: true }).catch(() => undefined);
}

// crypto.randomUUID is there for pages from this machine or over TLS only.
const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => reject(new DOMException("stopped", "AbortError")), { once: true });
  });
}

/** The server that this page came from: JSON, texts, and every failure in words. `events.js` has its streams. */

const KEY = "longreach-api-key";

/** What went wrong, in a sentence for the reader; `status` is 0 where there was no answer at all. */
export class Refusal extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null, details = {} } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
    this.details = details;
  }
}

/** Use an API key from now on, until the tab is closed. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

export async function getJson(path, signal) {
  return (await call(path, { signal })).json();
}

export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

/** Delete what has this path. */
export async function deleteAt(path) {
  await call(path, { method: "DELETE" });
}

/**
 * Send a text of any length, and return the parsed answer. `onProgress` is called with the share that has been sent, which `fetch` does
 * not tell. Throws a Refusal if the server refuses it or goes away.
 */
export function postText(path, text, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.setRequestHeader("content-type", "text/plain;charset=utf-8");
    const key = sessionStorage.getItem(KEY);
    if (key) request.setRequestHeader("authorization", `Bearer ${key}`);
    request.upload.onprogress = ({ loaded, total }) => onProgress(total ? loaded / total : 0);
    request.onerror = () => reject(new Refusal("The server does not answer. Is it still running?"));
    request.onload = async () => {
      const response = new Response(request.response, { status: request.status });
      if (response.ok) resolve(await response.json());
      else reject(await refusalOf(response));
    };
    request.responseType = "blob";
    request.send(new Blob([text]));
  });
}

/** Send bytes of a media type; the parsed answer. */
export async function postBytes(path, bytes, type, signal) {
  return (await call(path, { method: "POST", headers: { "content-type": type }, body: bytes, signal })).json();
}

/** Send a body as JSON, with more `headers`; the response, if it is none of a refusal. */
export function post(path, body, signal, more = {}) {
  const headers = { "content-type": "application/json", ...more };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** As `fetch`, with the API key, if there is one. Throws a Refusal if the server refuses or does not answer. */
export async function call(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await refusalOf(response);
  return response;
}

async function refusalOf(response) {
  const status = response.status;
  let details = {};
  try {
    details = (await response.json()).error ?? {};
  } catch {
    // Something between the page and the server answered, and not in JSON.
    return new Refusal(`The server answered with status ${status}.`, { status });
  }
  if (status === 401) document.dispatchEvent(new Event("key-needed"));
  const after = Number(response.headers.get("retry-after")) || null;
  const again = status === 429 && after ? ` Try again in ${after} s.` : "";
  const message = `${details.message ?? `The server answered with status ${status}.`}${again}`;
  return new Refusal(message, { status, code: details.code, retryAfter: after, details });
}

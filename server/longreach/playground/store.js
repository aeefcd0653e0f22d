/** A few values in the browser's database, which a reload leaves there. Where a browser has none, nothing is kept. */

const DATABASE = "longreach";
const STORE = "session";

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function inStore(mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** The value of a name, or undefined. Each of these throws a DOMException where the browser allows no database, or has no room. */
export const load = (name) => inStore("readonly", (store) => store.get(name));

export const save = (name, value) => inStore("readwrite", (store) => store.put(value, name));

export const forget = () => inStore("readwrite", (store) => store.clear());

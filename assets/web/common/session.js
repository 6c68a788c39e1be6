// The page's key, by which the program knows whose it is: sent with each request, and kept for this origin alone. It is
// no cookie, since browsers send those to every port of a host.

import { browserStorage } from "../compose/drafts.js";

export const SESSION = "qwen35mm-session";
/** Names who is logged in: what the browser keeps under it, and the channel of its tabs. */
export const PERSON = "qwen35mm-person";
/** The key of a guest who has logged in, for when they log out. */
export const GUEST = "qwen35mm-guest";
const NOBODY = { key: "1", ticket: "" };
/** Of a page whose browser keeps nothing. @type {{ key: string, ticket: string }} */
let session = NOBODY;

/** @type {BroadcastChannel | undefined} */
let tabs;

/** How the browser's tabs tell each other that somebody else is there. One a page: a page doesn't hear itself. */
export const otherTabs = () => (tabs ??= new BroadcastChannel(PERSON));

/** Takes the key and the ticket for files that the program has given. */
export function keepSession(/** @type {{ key: string | null, ticket: string | null }} */ { key, ticket }) {
  session = key && ticket ? { key, ticket } : NOBODY;
  try {
    browserStorage()?.setItem(SESSION, JSON.stringify(session));
  } catch {
    // It is full: the key lasts as long as the page.
  }
}

/** Takes those of a person who has logged in; whether the browser keeps them. */
export function logInAs(/** @type {{ key: string, ticket: string }} */ person) {
  const storage = browserStorage();
  const before = storage?.getItem(SESSION);
  if (before && !storage?.getItem(GUEST)) storage?.setItem(GUEST, before);
  keepSession(person);
  // Other tabs of the browser are this person's now.
  otherTabs().postMessage(null);
  return Boolean(storage);
}

/** Forgets who has logged in. */
export function endSession() {
  const storage = browserStorage();
  const guest = storage?.getItem(GUEST);
  storage?.removeItem(GUEST);
  storage?.removeItem(SESSION);
  session = NOBODY;
  if (guest) storage?.setItem(SESSION, guest);
}

/** Whether the browser has a key from before. */
function recall() {
  const kept = browserStorage()?.getItem(SESSION);
  if (kept) session = JSON.parse(kept);
  return Boolean(session.ticket);
}

/** The headers of each request; another tab may have a newer key. */
export function sessionHeaders() {
  recall();
  return { "x-qwen35mm": session.key };
}

/** The address of a file, with what opens it: a picture is asked for without headers. */
export function withTicket(/** @type {URL} */ url) {
  if (session.ticket) url.searchParams.set("ticket", session.ticket);
  return url.href;
}

/**
 * Gets a key where the page has none, or was opened by an address that brings a code for one.
 * @param {URL} address where it is asked for
 */
export async function beginSession(address) {
  const once = /^#once=(.+)$/.exec(location.hash)?.[1] ?? null;
  if (once) history.replaceState(null, "", location.pathname + location.search);
  if (recall() && !once) return;
  const response = await fetch(address, {
    method: "POST",
    headers: { "x-qwen35mm": "1", "content-type": "application/json" },
    body: JSON.stringify({ once }),
  }).catch(() => null);
  // What it refuses is told by the next request.
  if (response?.ok) keepSession(await response.json());
}

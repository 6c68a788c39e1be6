// What the page of `qwen35mm review` asks the program.

/** @import { Item } from "./review.d.ts" */

import { sessionHeaders, withTicket } from "../common/session.js";
import { said, t } from "../common/words.js";

const MAX_KEPT_BYTES = 60_000;

/** What was refused; with the item as it is now where somebody else has changed it. */
export class Refused extends Error {
  constructor(/** @type {string} */ words, /** @type {Item | undefined} */ item) {
    super(words);
    this.item = item;
  }
}

/**
 * The address of a medium, or of a small picture of it.
 * @param {"media" | "small"} kind
 * @param {Pick<Item, "number" | "version">} item
 */
export const fileUrl = (kind, { number, version }) =>
  withTicket(new URL(`${kind}/${number}?v=${version}`, document.baseURI));

/**
 * What the program answers. Raises Refused.
 * @param {string} name
 * @param {object} args
 * @param {AbortSignal} [signal]
 */
export async function call(name, args = {}, signal) {
  const body = JSON.stringify(args);
  // A change of a caption is kept also where the page is closed. Browsers take 64 KiB for all such requests together.
  const keepalive = (name === "save" || name === "accept") && new Blob([body]).size < MAX_KEPT_BYTES;
  const how = { method: "POST", headers: sessionHeaders(), body, signal, keepalive };
  const answer = await fetch(`api/${name}`, how).catch((error) => {
    if (signal?.aborted) throw error;
    throw new Refused(t("The program can't be reached. Is it still running?"), undefined);
  });
  const reply = await answer.json().catch(() => ({ error: { message: answer.statusText } }));
  if (!answer.ok) throw new Refused(said(reply.error.message), reply.error.item);
  return reply;
}

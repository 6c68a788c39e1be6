// The stream of answers in progress. On ZeroGPU it goes through Gradio's queue, by which a Space counts GPU time.

/** @import { News } from "../common/types.d.ts" */

import { inTurn } from "../common/api.js";
import { sessionHeaders } from "../common/session.js";

const TIMEOUT_MS = 30000;
const WATCH = new URL("../../watch", import.meta.url);
const GRADIO = new URL("../../../gradio_api/call/watch", import.meta.url);
const HUB = "https://huggingface.co";
const OFFER = "supports-zerogpu-headers";

// On ZeroGPU the site around the page gives each call a token of the person who is logged in there.
const isFramed = globalThis.window && window.parent !== window && location.hostname.endsWith(".hf.space");
let hasTokens = false;
if (isFramed) {
  window.addEventListener("message", ({ origin, data }) => {
    if (origin === HUB && data === OFFER) hasTokens = true;
  });
  window.parent.postMessage(OFFER, HUB);
}

/** @returns {Promise<Record<string, string>>} */
async function tokens() {
  if (!hasTokens) return {};
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    port1.onmessage = ({ data }) => {
      port1.close();
      resolve(data);
    };
    window.parent.postMessage("zerogpu-headers", HUB, [port2]);
  });
}

/**
 * The events of a stream that is sent, as they come.
 * @param {ReadableStream<Uint8Array>} body
 */
async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const events = text.split(/\r?\n\r?\n/);
      text = events.pop() ?? "";
      for (const event of events) {
        const name = /^event: (.*)$/m.exec(event)?.[1] ?? "message";
        const data = [...event.matchAll(/^data: (.*)$/gm)].map((line) => line[1]).join("\n");
        if (data) yield { name, data: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export class AnswerStream {
  /** Ends the one that is read. @type {AbortController | null} */
  #reading = null;

  /**
   * Watches answers instead of those that were watched before: a browser has few connections to a program.
   */
  watch = inTurn((/** @type {string[]} */ ids) => this.#watch(ids));

  /**
   * @param {object} on
   * @param {(answers: Record<string, News>, asked: string[]) => void} on.news what there is to see of the answers that
   *   were asked for, by id, whenever one has changed
   * @param {() => void} on.lost the stream broke off, or there was none: whether the program is there isn't known
   * @param {(words: string) => void} on.refused the program doesn't send them now, and says why
   * @param {() => boolean} throughGradio whether it goes through Gradio's queue
   */
  constructor(on, throughGradio) {
    this.on = on;
    this.throughGradio = throughGradio;
  }

  async #watch(/** @type {string[]} */ ids) {
    const reading = new AbortController();
    const late = setTimeout(() => reading.abort(), TIMEOUT_MS);
    const response = await this.#ask(ids, reading.signal).catch(() => null);
    clearTimeout(late);
    if (!response?.ok || !response.body) return this.on.lost();
    // Only now, so that no answer is without a page that watches it.
    this.#reading?.abort();
    this.#reading = reading;
    this.#read(response.body, ids);
  }

  async #ask(/** @type {string[]} */ ids, /** @type {AbortSignal} */ signal) {
    const json = { "content-type": "application/json" };
    if (!this.throughGradio()) {
      const body = JSON.stringify({ answers: ids });
      return fetch(WATCH, { method: "POST", headers: { ...json, ...sessionHeaders() }, body, signal });
    }
    const headers = { ...json, "x-gradio-user": "app", ...sessionHeaders(), ...(await tokens()) };
    const begun = await fetch(GRADIO, { method: "POST", headers, body: JSON.stringify({ data: [ids] }), signal });
    return fetch(`${GRADIO}/${(await begun.json()).event_id}`, { headers: sessionHeaders(), signal });
  }

  async #read(/** @type {ReadableStream<Uint8Array>} */ body, /** @type {string[]} */ ids) {
    const reading = this.#reading;
    try {
      for await (const { name, data } of eventsOf(body)) {
        if (name === "complete") return;
        if (name !== "message" && name !== "generating") break;
        const { answers, refused } = name === "generating" ? data[0] : data;
        if (refused) this.on.refused(refused);
        else this.on.news(answers, ids);
      }
    } catch {
      // Told below.
    }
    // Another one has taken its place otherwise.
    if (reading === this.#reading && !reading?.signal.aborted) this.on.lost();
  }
}

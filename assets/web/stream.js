// The stream of answers in progress. It goes through Gradio's queue, which is what a Space counts GPU time by.

/** @import { News } from "./types.d.ts" */

import { inTurn } from "./api.js";

const TIMEOUT_MS = 30000;
const CALLS = new URL("../../gradio_api/call/watch", import.meta.url);
const HUB = "https://huggingface.co";
const OFFER = "supports-zerogpu-headers";

// On ZeroGPU the site around the page gives each call a token of the person who is logged in there.
const isFramed = window.parent !== window && location.hostname.endsWith(".hf.space");
let hasTokens = false;
if (isFramed) {
  window.addEventListener("message", ({ origin, data }) => {
    if (origin === HUB && data === OFFER) hasTokens = true;
  });
  window.parent.postMessage(OFFER, HUB);
}

/** @returns {Promise<Record<string, string>>} */
async function headers() {
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

export class AnswerStream {
  /** @type {EventSource | null} */
  #source = null;

  /**
   * Watches answers instead of those that were watched before: a browser has few connections to a program. One that is
   * asked for and not read would go on without this page, and the answers with it: the next is asked for when the one
   * before is read.
   */
  watch = inTurn((/** @type {string[]} */ ids) => this.#watch(ids));

  /**
   * @param {object} on
   * @param {(answers: Record<string, News>, asked: string[]) => void} on.news what there is to see of the answers that
   *   were asked for, by id, whenever one has changed
   * @param {() => void} on.lost the stream broke off, or there was none: whether the program is there isn't known
   * @param {(words: string) => void} on.refused the program doesn't send them now, and says why
   */
  constructor(on) {
    this.on = on;
  }

  async #watch(/** @type {string[]} */ ids) {
    let event;
    try {
      const response = await fetch(CALLS, {
        method: "POST",
        headers: { "content-type": "application/json", "x-gradio-user": "app", ...(await headers()) },
        body: JSON.stringify({ data: [ids] }),
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      event = (await response.json()).event_id;
    } catch {
      // Told below.
    }
    if (!event) return this.on.lost();
    // Only now, so that no answer is without a page that watches it.
    this.#source?.close();
    const source = new EventSource(`${CALLS}/${event}`);
    this.#source = source;
    source.addEventListener("generating", ({ data }) => {
      const [{ answers, refused }] = JSON.parse(data);
      if (refused) this.on.refused(refused);
      else this.on.news(answers, ids);
    });
    source.addEventListener("complete", () => source.close());
    source.addEventListener("error", () => {
      source.close();
      // Another one has taken its place otherwise.
      if (source === this.#source) this.on.lost();
    });
  }
}

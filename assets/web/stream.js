// The stream of answers in progress. It goes through Gradio's queue, which is what a Space counts GPU time by.

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

function tokens() {
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

let source = null;
let newest = 0;

/**
 * Follows answers instead of those that were followed before: a browser has few connections to a program.
 * `onNews` gets what there is to see of them, by id, whenever one has changed. A stream that is lost ends without a word.
 */
export async function follow(ids, onNews) {
  const mine = ++newest;
  let event;
  try {
    const response = await fetch(CALLS, {
      method: "POST",
      headers: { "content-type": "application/json", "x-gradio-user": "app", ...(await tokens()) },
      body: JSON.stringify({ data: [ids] }),
    });
    event = (await response.json()).event_id;
  } catch {
    return;
  }
  if (mine !== newest || !event) return;
  // Only now, so that no answer is without a page that watches it.
  source?.close();
  const stream = new EventSource(`${CALLS}/${event}`);
  source = stream;
  const close = () => stream.close();
  stream.addEventListener("generating", ({ data }) => onNews(JSON.parse(data)[0]));
  stream.addEventListener("complete", close);
  stream.addEventListener("error", close);
}

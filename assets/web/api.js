// Requests to the program: JSON, and files.

import { t } from "./words.js";

const BASE = new URL("../", import.meta.url);
const HEADERS = { "x-qwen35mm": "1" };

/** What went wrong, in words for a person; `kind` and `offers` are the program's. */
export class Problem extends Error {
  constructor({ message, kind = "lost", offers = [] }) {
    super(message);
    this.kind = kind;
    this.offers = offers;
  }
}

const lost = () => new Problem({ message: t("The program can't be reached. Is it still running?"), kind: "lost" });

async function read(response) {
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  throw body?.error ? new Problem(body.error) : lost();
}

/** Calls a method by name. */
export async function call(name, args = {}) {
  let response;
  try {
    response = await fetch(new URL(`api/${name}`, BASE), {
      method: "POST",
      headers: { ...HEADERS, "content-type": "application/json" },
      body: JSON.stringify(args),
    });
  } catch {
    throw lost();
  }
  return read(response);
}

/** Sends a file; `onProgress` gets the share that is sent. `cancel` of the result ends it. */
export function send(path, file, onProgress = () => {}) {
  const request = new XMLHttpRequest();
  const promise = new Promise((resolve, reject) => {
    request.upload.onprogress = (event) => onProgress(event.lengthComputable ? event.loaded / event.total : null);
    request.onload = () => {
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        /* not ours */
      }
      if (request.status === 200 && body) resolve(body);
      else reject(body?.error ? new Problem(body.error) : lost());
    };
    request.onerror = () => reject(lost());
    request.onabort = () => reject(new Problem({ message: "", kind: "cancelled" }));
  });
  request.open("POST", new URL(path, BASE));
  for (const [name, value] of Object.entries(HEADERS)) request.setRequestHeader(name, value);
  request.send(file);
  return { promise, cancel: () => request.abort() };
}

export const upload = (file, onProgress) =>
  send(`upload?name=${encodeURIComponent(file.name || "pasted")}`, file, onProgress);
export const takeIn = (file) => send("import", file).promise;
export const pdfPages = (digest, name) => send(`pages?digest=${digest}&name=${encodeURIComponent(name)}`, null).promise;
export const mediaUrl = (digest) => new URL(`media/${digest}`, BASE).href;
export const thumbnailUrl = (digest) => new URL(`thumbnail/${digest}`, BASE).href;
export const exportUrl = (form, ids) => new URL(`export?form=${form}&ids=${ids.join(",")}`, BASE).href;

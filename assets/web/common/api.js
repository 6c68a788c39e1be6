// Requests to the program: JSON and files. Late answers are dropped here.

/** @import { Arguments, Name, Offer, Post, Reply, Said, Upload } from "./types.d.ts" */

import { sessionHeaders, withTicket } from "./session.js";
import { said, t } from "./words.js";

const BASE = new URL("../../", import.meta.url);

/** What went wrong, in words for a person; the rest is the program's. Without words, nothing is said. */
export class Problem extends Error {
  /** @param {{ message: Said, kind?: string, offers?: Offer[], answers?: string[] }} problem */
  constructor({ message, kind = "lost", offers = [], answers = [] }) {
    super(said(message));
    this.kind = kind;
    this.offers = offers;
    /** Those in progress that must end first. */
    this.answers = answers;
  }
}

/**
 * The page's requests. Each request for a topic gets a token. An answer is late once its topic has a newer token: the
 * page has moved on.
 */
export class Requests {
  /** @type {Map<string, number>} */
  #newest = new Map();
  /** @type {Promise<unknown>} */
  #last = Promise.resolve();

  /**
   * @param {(problem: Problem) => void} onProblem tells the person
   * @param {Post} send
   */
  constructor(onProblem, send = post) {
    this.onProblem = onProblem;
    this.send = send;
  }

  /** A new token for a topic: earlier ones are late from now on. A token is a function that says whether it is late. */
  begin(/** @type {string} */ topic) {
    this.#newest.set(topic, (this.#newest.get(topic) ?? 0) + 1);
    return this.newest(topic);
  }

  /** The token that is the newest one now, for a request that overtakes no other. */
  newest(/** @type {string} */ topic) {
    const token = this.#newest.get(topic);
    return () => this.#newest.get(topic) !== token;
  }

  /**
   * The answer of a method. Rejected with a Problem; with one that has no words where it comes too late for its topic.
   * @template {Name} N
   * @param {N} name
   * @param {Arguments<N>} args
   * @param {string} [topic]
   * @returns {Promise<Reply<N>>}
   */
  async call(name, args, topic) {
    const isLate = topic ? this.begin(topic) : () => false;
    const [outcome] = await Promise.allSettled([this.send(name, args)]);
    if (isLate()) throw new Problem({ message: "", kind: "late" });
    if (outcome.status === "rejected") throw outcome.reason;
    return outcome.value;
  }

  /**
   * The answer of a method, or null where there is none, and the person was told why.
   * @template {Name} N
   * @param {N} name
   * @param {Arguments<N>} args
   * @param {string} [topic]
   * @returns {Promise<Reply<N> | null>}
   */
  ask(name, args, topic) {
    return this.told(this.call(name, args, topic));
  }

  /**
   * Like `ask`, one after the other, so that none overtakes a later one.
   * @template {Name} N
   * @param {N} name
   * @param {Arguments<N>} args
   * @returns {Promise<Reply<N> | null>}
   */
  inOrder(name, args) {
    const answered = this.#last.then(() => this.ask(name, args));
    this.#last = answered;
    return answered;
  }

  /**
   * What a request gives, or null where it fails, and the person was told why.
   * @template T
   * @param {Promise<T>} request
   * @returns {Promise<T | null>}
   */
  async told(request) {
    try {
      return await request;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.onProblem(problem);
      return null;
    }
  }
}

/** An id for a message: 32 random hex digits. From random numbers: a page without HTTPS has no `randomUUID`. */
export const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const lost = () => new Problem({ message: t("The program can't be reached. Is it still running?") });

/** Sends a request of the page. @type {Post} */
export const post = (name, args, signal) => postTo(`api/${name}`, args, signal);

/** @type {(path: string, args: object, how: RequestInit) => Promise<Response>} */
const send = (path, args, how) =>
  fetch(new URL(path, BASE), {
    method: "POST",
    headers: { ...sessionHeaders(), "content-type": "application/json" },
    body: JSON.stringify(args),
    ...how,
  });

/**
 * Posts an object. Resolves to the program's answer, and rejects with a Problem.
 * @param {string} path
 * @param {object} args
 * @param {AbortSignal} [signal]
 */
export async function postTo(path, args, signal) {
  let response;
  try {
    response = await send(path, args, { signal });
  } catch {
    const isGivenUp = signal?.aborted && signal.reason?.name !== "TimeoutError";
    throw isGivenUp ? new Problem({ message: "", kind: "cancelled" }) : lost();
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  throw body?.error ? new Problem(body.error) : lost();
}

/**
 * Sends a file; `onProgress` gets the share that is sent.
 * @param {string} path
 * @param {File | null} file
 * @param {(share: number | null) => void} onProgress
 */
function sendFile(path, file, onProgress = () => {}) {
  const request = new XMLHttpRequest();
  const promise = new Promise((resolve, reject) => {
    request.upload.onprogress = (event) => onProgress(event.lengthComputable ? event.loaded / event.total : null);
    request.onload = () => {
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        // Not ours.
      }
      if (request.status === 200 && body) resolve(body);
      else reject(body?.error ? new Problem(body.error) : lost());
    };
    request.onerror = () => reject(lost());
    request.onabort = () => reject(new Problem({ message: "", kind: "cancelled" }));
  });
  request.open("POST", new URL(path, BASE));
  for (const [name, value] of Object.entries(sessionHeaders())) request.setRequestHeader(name, value);
  request.send(file);
  return { promise, cancel: () => request.abort() };
}

/** @type {(file: File, onProgress: (share: number | null) => void) => Upload} */
export const upload = (file, onProgress) =>
  sendFile(
    `upload?name=${encodeURIComponent(file.name || "pasted")}${isTemporary ? "&temporary=1" : ""}`,
    file,
    onProgress,
  );

/** Reads a web address, as if its text and pictures were uploaded. @type {(address: string) => Upload} */
export const readPage = (address) =>
  sendFile(`web_page?address=${encodeURIComponent(address)}${isTemporary ? "&temporary=1" : ""}`, null);

/** Whether files that are uploaded from now on are a temporary conversation's. */
let isTemporary = false;
export function uploadFor(/** @type {boolean} */ temporary) {
  isTemporary = temporary;
}

/** Tells the program something while the page closes; no answer is read. */
export const tellAtEnd = (/** @type {Name} */ name, /** @type {object} */ args) =>
  send(`api/${name}`, args, { keepalive: true }).catch(() => {});
/** @type {(file: File) => Promise<{ conversations: object[], num_extended: number, num_known: number }>} */
export const takeIn = (file) => sendFile("import", file).promise;
/** @type {(digest: string, name: string, encoding: string) => Upload["promise"]} */
export const inEncoding = (digest, name, encoding) =>
  sendFile(`recode?digest=${digest}&name=${encodeURIComponent(name)}&encoding=${encoding}`, null).promise;
/** @type {(digest: string, name: string) => Upload["promise"]} */
export const pdfPages = (digest, name) =>
  sendFile(`pages?digest=${digest}&name=${encodeURIComponent(name)}`, null).promise;
export const mediaUrl = (/** @type {string} */ digest) => withTicket(new URL(`media/${digest}`, BASE));
/** A picture as browsers show it, upright, in its own size. */
export const pictureUrl = (/** @type {string} */ digest) => withTicket(new URL(`picture/${digest}`, BASE));
/** What a video shows at a time, in its own size. */
export const frameUrl = (/** @type {string} */ digest, /** @type {number} */ time_s) =>
  withTicket(new URL(`frame/${digest}?time_s=${time_s}`, BASE));
export const thumbnailUrl = (/** @type {string} */ digest) => withTicket(new URL(`thumbnail/${digest}`, BASE));
export const previewUrl = () => new URL("preview", BASE).href;
/** The address of an archive; `code` opens it once. */
export const exportUrl = (/** @type {"md" | "zip"} */ form, /** @type {string[]} */ ids, /** @type {string} */ code) =>
  new URL(`export?form=${form}&ids=${ids.join(",")}&code=${code}`, BASE).href;
/** Where a page without a key asks for one. */
export const SESSION_ADDRESS = new URL("session", BASE);

/**
 * Runs once the calls have paused for `ms`, with the last one's arguments; `flush` runs at once what waits.
 * @template {unknown[]} A
 * @param {number} ms
 * @param {(...args: A) => void} run
 */
export function debounce(ms, run) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  /** @type {A | null} */
  let waiting = null;
  const flush = () => {
    clearTimeout(timer);
    const args = waiting;
    waiting = null;
    if (args) run(...args);
  };
  const later = (/** @type {A} */ ...args) => {
    clearTimeout(timer);
    waiting = args;
    timer = setTimeout(flush, ms);
  };
  return Object.assign(later, { flush });
}

/**
 * Runs one call at a time; of those that wait, only the last.
 * @template {unknown[]} A
 * @param {(...args: A) => Promise<unknown>} run
 */
export function inTurn(run) {
  /** @type {A | null} */
  let waiting = null;
  let isRunning = false;
  return async (/** @type {A} */ ...args) => {
    waiting = args;
    if (isRunning) return;
    isRunning = true;
    try {
      while (waiting) {
        const next = waiting;
        waiting = null;
        await run(...next);
      }
    } finally {
      isRunning = false;
    }
  };
}

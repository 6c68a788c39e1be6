// Whether the program can be reached, and lets this page in; it is asked again and again until it does. Draws nothing.

/** @import { Post, Start } from "../common/types.d.ts" */

import { Problem } from "../common/api.js";

// Short at first, for a network that hiccups; long for a program that has ended.
export const PAUSES_MS = [1000, 2000, 4000, 8000, 16000, 30000];
// A connection can be gone without a word.
const PATIENCE_MS = 15000;
const SLOW_MS = 2500;
/** Requests that the person sees nothing of until they are answered. */
const UNSEEN = [
  "open",
  "again",
  "continue",
  "branch",
  "example",
  "delete_message",
  "edit_answer",
  "shorten",
  "summarise",
];
/** Kinds of problems that stop all requests until the program is there, or lets the page in again. */
const AWAY = ["lost", "token", "login", "unknown person"];

/** Whether a problem concerns all requests. The page's connection line tells it. */
export const isAway = (/** @type {unknown} */ problem) => problem instanceof Problem && AWAY.includes(problem.kind);

export class Connection {
  /** Why nothing can be asked for; null where it can. @type {Problem | null} */
  problem = null;
  /** When it is tried again; null while it is tried. @type {number | null} */
  nextMs = null;
  #numTried = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** @type {Promise<void> | null} */
  #checking = null;
  #numSlow = 0;
  /** Who waits for it. @type {(() => void)[]} */
  #waiting = [];

  /**
   * @param {object} on
   * @param {() => void} on.changed it is lost, tried, or there again
   * @param {(isSlow: boolean) => void} on.slow what the person asked for takes long, or has come
   * @param {(begun: Start) => void} on.reached the program was asked how everything is now, and has answered
   * @param {Post} post
   */
  constructor(on, post) {
    this.on = on;
    this.post = post;
  }

  /** Sends a request, and takes note of whether it came through. @type {Post} */
  send = async (name, args, signal) => {
    let isSlow = false;
    const late = () => {
      isSlow = true;
      this.#numSlow++;
      this.on.slow(true);
    };
    const timer = UNSEEN.includes(name) ? setTimeout(late, SLOW_MS) : undefined;
    try {
      const answer = await this.post(name, args, signal);
      if (this.problem) this.check();
      return answer;
    } catch (problem) {
      if (isAway(problem)) this.#lose(/** @type {Problem} */ (problem));
      throw problem;
    } finally {
      clearTimeout(timer);
      if (isSlow) this.on.slow(--this.#numSlow > 0);
    }
  };

  /** Until the program can be reached; at once where it can, as far as is known. @returns {Promise<void>} */
  whenThere() {
    return this.problem ? new Promise((go) => this.#waiting.push(go)) : Promise.resolve();
  }

  /** Asks the program now whether it is there. */
  check() {
    this.#checking ??= this.#check().finally(() => {
      this.#checking = null;
    });
    return this.#checking;
  }

  async #check() {
    clearTimeout(this.#timer);
    this.nextMs = null;
    if (this.problem) this.on.changed();
    try {
      const begun = await this.post("start", {}, AbortSignal.timeout(PATIENCE_MS));
      this.#find();
      this.on.reached(begun);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (isAway(problem)) this.#lose(problem, true);
      else this.#find();
    }
  }

  /** `isAgain`: where it was lost before, the next pause is longer. */
  #lose(/** @type {Problem} */ problem, isAgain = false) {
    const wasThere = !this.problem;
    this.problem = problem;
    if (wasThere) this.#numTried = 0;
    else if (!isAgain) return;
    else this.#numTried++;
    const pauseMs = PAUSES_MS[Math.min(this.#numTried, PAUSES_MS.length - 1)];
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.check(), pauseMs);
    this.nextMs = Date.now() + pauseMs;
    this.on.changed();
  }

  #find() {
    if (!this.problem) return;
    this.problem = null;
    this.on.changed();
    for (const go of this.#waiting.splice(0)) go();
  }
}

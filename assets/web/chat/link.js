// The page's link with the program: what happens when it is lost or back, and the line that shows it.

/** @import { News, Start } from "../common/types.d.ts" */

import { post } from "../common/api.js";
import { button, h, setText } from "../common/dom.js";
import { said, t } from "../common/words.js";
import { personKept } from "./account.js";
import { Connection } from "./connection.js";
import { askToLogIn } from "./login.js";
import { AnswerStream } from "./stream.js";

// How long it says that the connection is back.
const SHOWN_MS = 2500;
const TICK_MS = 250;
const LOOK_AFTER_ANSWERS_MS = 2000;
const LOOK_AFTER_STREAM_MS = 5000;

/**
 * What the link has the page do.
 * @typedef {object} LinkDesk
 * @property {() => boolean} throughGradio whether answers come through Gradio's queue
 * @property {() => boolean} isSilent whether there are answers that say nothing any more
 * @property {() => void} changed the connection is lost, tried, or there again
 * @property {(now: Start) => void} reached the program has told how things are now
 * @property {(answers: Record<string, News>, asked: string[]) => void} news of the answers that were asked for
 * @property {(words: string) => void} say
 * @property {() => void} toComposer gives it the focus
 */

export class Link {
  /** When the program said last how things are. */
  #reachedMs = 0;
  /** Why it doesn't send answers. */
  #refusal = "";
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #ticking;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #leaving;

  constructor(/** @type {LinkDesk} */ desk) {
    this.desk = desk;
    this.connection = new Connection(this, post);
    this.stream = new AnswerStream(this, desk.throughGradio);
    this.words = h("span", { role: "status" });
    // It changes each second: nothing to be read out.
    this.countdown = h("span.countdown");
    const hidden = { hidden: true };
    this.logIn = button("plain", t("Log in"), () => this.#logIn(), hidden);
    this.reload = button("plain", t("Reload page"), () => location.reload(), hidden);
    this.tryNow = button("plain", t("Retry now"), () => this.connection.check(), hidden);
    const buttons = [this.logIn, this.reload, this.tryNow];
    // There from the beginning, so that a screen reader hears what comes into it.
    this.element = h("div.connection.row.wrap.gone", this.words, this.countdown, buttons);
  }

  /** Begins to look after the connection. */
  keep() {
    setInterval(() => this.desk.isSilent() && this.connection.check(), LOOK_AFTER_ANSWERS_MS);
    // The program may be on this very machine, and need no network.
    for (const event of ["online", "offline"]) window.addEventListener(event, () => this.connection.check());
    // The person comes back from where the program was started again.
    window.addEventListener("focus", () => this.connection.problem && this.connection.check());
  }

  get isLost() {
    return this.connection.problem !== null;
  }

  // What the connection tells

  changed() {
    this.#draw();
    this.desk.changed();
  }

  slow(/** @type {boolean} */ isSlow) {
    if (this.isLost) return;
    clearTimeout(this.#leaving);
    this.element.classList.remove("back");
    this.element.classList.toggle("gone", !isSlow);
    setText(this.words, isSlow ? waitingWords() : "");
  }

  /** The program answers, again perhaps, and has told how things are now. */
  reached(/** @type {Start} */ now) {
    this.#reachedMs = Date.now();
    this.desk.reached(now);
  }

  // What the stream of answers tells

  news(/** @type {Record<string, News>} */ answers, /** @type {string[]} */ asked) {
    this.#refusal = "";
    this.desk.news(answers, asked);
  }

  lost() {
    // One that breaks at once is checked later, when its answers stay silent.
    if (Date.now() - this.#reachedMs > LOOK_AFTER_STREAM_MS) this.connection.check();
  }

  /** Says a refusal once, though each retry brings it again. */
  refused(/** @type {string} */ words) {
    if (words !== this.#refusal) this.desk.say(said(words));
    this.#refusal = words;
  }

  // Drawing

  #draw() {
    const { problem } = this.connection;
    clearTimeout(this.#leaving);
    clearInterval(this.#ticking);
    const kind = problem?.kind;
    this.element.classList.toggle("back", !problem);
    this.element.classList.remove("gone");
    setText(this.words, kind ? wordsOf(kind) : t("Reconnected"));
    this.logIn.hidden = kind !== "login";
    this.reload.hidden = kind !== "unknown person";
    this.tryNow.hidden = kind !== "lost" && kind !== "token";
    this.#count();
    if (problem) this.#ticking = setInterval(() => this.#count(), TICK_MS);
    else this.#leaving = setTimeout(() => this.#leave(), SHOWN_MS);
    if (!problem && this.element.contains(document.activeElement)) this.desk.toComposer();
  }

  /** Draws attention to the line when somebody tries what can't be done now. */
  insist() {
    this.element.animate({ scale: [1, 1.04, 1] }, 250);
    const words = this.words.textContent ?? "";
    setText(this.words, "");
    setText(this.words, words);
  }

  #leave() {
    this.element.classList.add("gone");
    setText(this.words, "");
  }

  #count() {
    const { problem, nextMs } = this.connection;
    const seconds = nextMs === null ? 0 : Math.max(Math.ceil((nextMs - Date.now()) / 1000), 1);
    const words = nextMs === null ? t("Connecting") : t("Retrying in {s} s", { s: seconds });
    this.countdown.textContent = problem?.kind === "lost" ? words : "";
    this.tryNow.disabled = nextMs === null;
  }

  async #logIn() {
    if (await askToLogIn(personKept())) await this.connection.check();
  }
}

export const waitingWords = () => t("Waiting for the program. It may be busy, or the connection slow.");

function wordsOf(/** @type {string} */ kind) {
  if (kind === "login") return t("You are logged out. What you typed is still here.");
  if (kind === "unknown person") return t("This browser is no longer known here.");
  if (kind === "lost") return t("The connection is lost.");
  return t(
    "The program was restarted with a new address. Open the address it printed in this browser. This " +
      "page then continues.",
  );
}

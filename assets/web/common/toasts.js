// Notices in the page's corner: errors stay until they are closed, the others go by themselves.

/** @import { Tone } from "./types.d.ts" */

import { button, h, iconButton } from "./dom.js";
import { t } from "./words.js";

const SHOWN_MS = 6000;
// One that offers something has to be read first.
const OFFERED_MS = 10000;
const MAX_SHOWN = 4;

export class Toasts {
  /** What had the focus before it came here. @type {HTMLElement | null} */
  #from = null;

  constructor() {
    this.element = h("div.toasts", { "aria-live": "polite" });
    this.element.addEventListener("focusin", ({ relatedTarget }) => {
      if (relatedTarget instanceof HTMLElement && !this.element.contains(relatedTarget)) this.#from = relatedTarget;
    });
  }

  /**
   * Says something; nothing where there are no words.
   * @param {string} words
   * @param {Tone} tone
   * @param {{ label: string, run: () => unknown } | null} offer what can be done about it
   */
  say(words, tone = "bad", offer = null) {
    if (!words) return;
    const same = offer ? null : [...this.element.children].find((each) => each.firstChild?.textContent === words);
    if (same && isHeld(same)) return;
    // Shown anew: a screen reader says it again.
    same?.remove();
    if (this.element.children.length >= MAX_SHOWN) this.leastNeeded().remove();
    const close = iconButton("close", t("Dismiss"), () => this.close(toast));
    const take = () => {
      this.close(toast);
      offer?.run();
    };
    const offered = offer && button("link", offer.label, take);
    const toast = h("div.toast.row.card", { class: tone }, h("span", words), offered, close);
    this.element.append(toast);
    if (tone !== "bad") goLater(toast, offer ? OFFERED_MS : SHOWN_MS);
  }

  /** The focus goes on to the next notice, or back to where it came from. */
  close(/** @type {Element} */ toast) {
    const next = toast.nextElementSibling ?? toast.previousElementSibling;
    if (toast.contains(document.activeElement)) (next?.querySelector("button") ?? this.#from)?.focus();
    toast.remove();
  }

  /** Takes back what is offered, once something else would come of it. */
  withdraw() {
    for (const toast of this.element.querySelectorAll(".toast:has(.link)")) this.close(toast);
  }

  /** The oldest one without the pointer or the focus; errors last. */
  leastNeeded() {
    const free = [...this.element.children].filter((each) => !isHeld(each));
    return free.find((each) => !each.matches(".bad")) ?? free[0];
  }
}

/** Whether the pointer or the focus is on it. */
const isHeld = (/** @type {Element} */ toast) => toast.matches(":hover, :focus-within");

function goLater(/** @type {Element} */ toast, /** @type {number} */ ms) {
  setTimeout(() => (isHeld(toast) ? goLater(toast, ms) : toast.remove()), ms);
}

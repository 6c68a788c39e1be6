// Notices in the page's corner: errors stay until they are closed, the others go by themselves.

import { h, iconButton } from "./dom.js";
import { t } from "./words.js";

const SHOWN_MS = 6000;
const MAX_SHOWN = 4;

export class Toasts {
  constructor() {
    this.element = h("div.toasts", {
      "aria-live": "polite",
      onfocusin: ({ relatedTarget }) => {
        if (!this.element.contains(relatedTarget)) this.from = relatedTarget;
      },
    });
    this.from = null;
  }

  /** `kind` is "bad" for an error, else "note" or "good". */
  say(words, kind = "bad") {
    if (!words) return;
    const same = [...this.element.children].find((each) => each.firstChild.textContent === words);
    if (same && isHeld(same)) return;
    // Shown anew: a screen reader says it again.
    same?.remove();
    if (this.element.children.length >= MAX_SHOWN) this.leastNeeded().remove();
    const toast = h(
      `div.toast.${kind}`,
      {},
      h("span", {}, words),
      iconButton("close", t("Close the notice"), () => this.close(toast)),
    );
    this.element.append(toast);
    if (kind !== "bad") goLater(toast);
  }

  /** The focus goes on to the next notice, or back to where it came from. */
  close(toast) {
    const next = toast.nextElementSibling ?? toast.previousElementSibling;
    if (toast.contains(document.activeElement)) (next?.querySelector("button") ?? this.from)?.focus();
    toast.remove();
  }

  /** The oldest one that nobody is at; errors last. */
  leastNeeded() {
    const free = [...this.element.children].filter((each) => !isHeld(each));
    return free.find((each) => !each.matches(".bad")) ?? free[0];
  }
}

/** Whether the pointer or the focus is on it. */
const isHeld = (toast) => toast.matches(":hover, :focus-within");

function goLater(toast) {
  setTimeout(() => (isHeld(toast) ? goLater(toast) : toast.remove()), SHOWN_MS);
}

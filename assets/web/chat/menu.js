// A menu behind three dots.

/** @import { Drawing } from "../common/dom.js" */

import { h, icon } from "../common/dom.js";

/**
 * Only one menu is open at a time.
 * @param {string} label
 * @param {[Drawing, string, () => unknown][]} entries
 */
export function menu(label, entries) {
  const summary = h("summary.icon-button", { "aria-label": label }, icon("more"));
  const close = () => {
    details.open = false;
    // Where a dialog returns the focus to.
    summary.focus();
  };
  const rows = entries.map(([drawing, words, run]) => {
    const choose = () => {
      close();
      run();
    };
    return h("button.row", { type: "button", onclick: choose }, icon(drawing), words);
  });
  const list = h("div.menu-list.card", rows);
  // Details of one name close each other.
  const details = h("details.menu", { name: "conversation" }, summary, list);
  details.addEventListener("toggle", () => {
    if (details.open) list.scrollIntoView({ block: "nearest" });
  });
  details.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget instanceof Node && !details.contains(relatedTarget)) details.open = false;
  });
  details.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !details.open) return;
    event.stopPropagation();
    close();
  });
  return details;
}

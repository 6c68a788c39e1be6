// Something small over the page, at the button that opens it. Escape and a click elsewhere close it.

/** @import { Child } from "./types.d.ts" */
/** @import { Drawing } from "./dom.js" */

import { button, h, icon } from "./dom.js";

const GAP_PX = 6;
const EDGE_PX = 8;

/**
 * @param {HTMLButtonElement} trigger
 * @param {string} label
 * @param {(content: HTMLElement) => unknown} draw what is in it, whenever it opens
 * @returns {HTMLElement} what stands beside the button
 */
export function popover(trigger, label, draw) {
  const content = h("div.popover.card", { role: "dialog", "aria-label": label, popover: "auto" });
  trigger.popoverTargetElement = content;
  trigger.setAttribute("aria-haspopup", "dialog");
  trigger.setAttribute("aria-expanded", "false");
  // Content that comes later changes its size.
  const size = new ResizeObserver(() => place(trigger, content));
  content.addEventListener("beforetoggle", (event) => {
    if (/** @type {ToggleEvent} */ (event).newState === "open") draw(content);
  });
  content.addEventListener("toggle", (event) => {
    const isOpen = /** @type {ToggleEvent} */ (event).newState === "open";
    trigger.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) {
      size.disconnect();
      return content.replaceChildren();
    }
    place(trigger, content);
    size.observe(content);
    const held = content.contains(document.activeElement);
    if (!held) /** @type {HTMLElement | null} */ (content.querySelector("[autofocus], button, textarea"))?.focus();
  });
  return content;
}

/**
 * An entry of a menu, which closes it.
 * @param {HTMLElement} content
 * @param {Drawing} drawing
 * @param {Child} words
 * @param {() => unknown} run
 */
export function entry(content, drawing, words, run) {
  return button("row", [icon(drawing), words], () => {
    content.hidePopover();
    run();
  });
}

/** Below the button, or above it where there is more room; within the window. */
function place(/** @type {HTMLElement} */ trigger, /** @type {HTMLElement} */ content) {
  const { left, top, bottom } = trigger.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height, style } = content;
  const below = bottom + GAP_PX;
  const y = below + height + EDGE_PX <= innerHeight ? below : top - GAP_PX - height;
  style.left = `${Math.max(Math.min(left, innerWidth - width - EDGE_PX), EDGE_PX)}px`;
  style.top = `${Math.max(y, EDGE_PX)}px`;
}

// A menu behind three dots.

/** @import { Drawing } from "../common/dom.js" */

import { iconButton, redraw } from "../common/dom.js";
import { entry, popover } from "../common/popover.js";

/**
 * The button, and its menu.
 * @param {string} label
 * @param {[Drawing, string, () => unknown][]} entries
 */
export function menu(label, entries) {
  const more = iconButton("more", label, () => {});
  const draw = (/** @type {HTMLElement} */ content) =>
    redraw(
      content,
      entries.map(([drawing, words, run]) => entry(content, drawing, words, run)),
    );
  return [more, popover(more, label, draw)];
}

// A list of any length: only the rows that can be seen are there.

/** @import { Item } from "./review.d.ts" */

import { arrange, button, h, icon, redraw } from "../common/dom.js";
import { t } from "../common/words.js";
import { fileUrl } from "./calls.js";

// As in review.css.
const ROW_PX = 68;
const BEYOND = 6;

export class Gallery {
  /** @type {number[]} */
  #numbers = [];
  #at = 0;
  /** @type {Map<number, HTMLElement>} */
  #rows = new Map();

  /**
   * @param {(number: number) => Item | undefined} itemOf
   * @param {(from: number, to: number) => unknown} onSeen needs the items of these places
   * @param {(at: number) => unknown} onChoose
   * @param {(number: number) => boolean} isSelected
   * @param {(at: number, withShift: boolean) => unknown} onSelect selects a place or, with Shift, all up to there
   */
  constructor(itemOf, onSeen, onChoose, isSelected, onSelect) {
    this.itemOf = itemOf;
    this.onSeen = onSeen;
    this.onChoose = onChoose;
    this.isSelected = isSelected;
    this.onSelect = onSelect;
    this.rows = h("ul.rows");
    this.element = h("nav.gallery", { "aria-label": t("Pictures and clips") }, this.rows);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** Shows other items. */
  show(/** @type {number[]} */ numbers, /** @type {number} */ at) {
    this.#numbers = numbers;
    this.#rows.clear();
    this.rows.style.height = `${numbers.length * ROW_PX}px`;
    this.goTo(at);
  }

  /** Marks the item that is looked at, and brings it into view. */
  goTo(/** @type {number} */ at) {
    this.#at = at;
    const { scrollTop, clientHeight } = this.element;
    const top = at * ROW_PX;
    // One more beside it, where there is room.
    const beside = Math.max(0, Math.min(ROW_PX, (clientHeight - ROW_PX) / 2));
    const lowest = top + ROW_PX + beside - clientHeight;
    if (top - beside < scrollTop) this.element.scrollTop = top - beside;
    else if (lowest > scrollTop) this.element.scrollTop = lowest;
    this.draw();
  }

  /** Draws what can be seen. */
  draw() {
    const { scrollTop, clientHeight } = this.element;
    const from = Math.max(0, Math.floor(scrollTop / ROW_PX) - BEYOND);
    const to = Math.min(this.#numbers.length, Math.ceil((scrollTop + clientHeight) / ROW_PX) + BEYOND);
    /** @type {Map<number, HTMLElement>} */
    const seen = new Map();
    for (let at = from; at < to; at++) seen.set(at, this.#rows.get(at) ?? this.#made(at));
    this.#rows = seen;
    for (const [at, row] of seen) this.#fill(row, at);
    arrange(this.rows, [...seen.values()]);
    if (to > from) this.onSeen(from, to);
  }

  #made(/** @type {number} */ at) {
    const choose = button("row", "", (event) => {
      if (event.shiftKey || event.ctrlKey || event.metaKey) this.onSelect(at, event.shiftKey);
      else this.onChoose(at);
    });
    const select = h("input.select", { type: "checkbox", onclick: (event) => this.onSelect(at, event.shiftKey) });
    const places = { "aria-setsize": String(this.#numbers.length), "aria-posinset": String(at + 1) };
    const row = h("li", places, choose, select);
    row.style.transform = `translateY(${at * ROW_PX}px)`;
    return row;
  }

  #fill(/** @type {HTMLElement} */ row, /** @type {number} */ at) {
    const number = this.#numbers[at];
    const item = this.itemOf(number);
    const choose = row.querySelector("button");
    const select = row.querySelector("input");
    if (!choose || !select) return;
    select.checked = this.isSelected(number);
    select.ariaLabel = t("Select {name}", { name: item?.name ?? String(at + 1) });
    select.tabIndex = at === this.#at ? 0 : -1;
    choose.setAttribute("aria-current", at === this.#at ? "true" : "false");
    // Arrows go through the list: Tab stops at one of them.
    choose.tabIndex = at === this.#at ? 0 : -1;
    // Only redrawn where it has changed, or the pictures would flicker.
    const shown = item ? `${item.version} ${item.digest} ${item.accepted}` : "";
    if (row.dataset.shown === shown) return;
    row.dataset.shown = shown;
    if (!item) return void redraw(choose, h("span.small"), h("span.lines", "…"));
    const small = h("img.small", { src: fileUrl("small", item), alt: "", loading: "lazy" });
    const lines = h(
      "span.lines",
      h("span.name", item.name),
      h("span.quiet", { dir: "auto" }, item.text || t("No caption")),
    );
    redraw(choose, small, lines, item.accepted && [icon("check"), h("span.unseen", t("Accepted"))]);
  }
}

// Marks on a picture, and the list of them beside it.

/** @import { Grounding, Mark, Unit } from "../common/types.d.ts" */
/** @import { Rectangle } from "./rectangle.js" */

import { h, iconButton, redraw } from "../common/dom.js";
import { t } from "../common/words.js";
import { colourOf, insetOf, percent, shares } from "./shapes.js";

// With more of them only those that are looked at have their words on the picture.
const MANY = 16;

/** One picture's marks: on it, and as a list; each lights up with the other. */
export class Marks {
  /** @type {HTMLElement[]} */
  #drawn = [];
  /** @type {HTMLElement[]} */
  #lines = [];

  /**
   * @param {(at: number) => void} choose takes a mark whose line is pressed
   * @param {(part: Rectangle) => unknown} ask what is in a box
   */
  constructor(choose, ask) {
    this.choose = choose;
    this.ask = ask;
    // The list says it all.
    this.layer = h("span.marks", { "aria-hidden": "true" });
    this.list = h("ol.mark-list", { role: "list", "aria-label": t("Found here") });
  }

  draw(/** @type {Grounding} */ grounding, /** @type {Unit} */ unit) {
    const { marks } = grounding;
    this.layer.classList.toggle("many", marks.length > MANY);
    const held = this.#lines.findIndex((line) => line.contains(document.activeElement));
    this.#drawn = marks.map((mark, at) => this.#mark(mark, at, (numbers) => shares(numbers, unit, grounding)));
    this.#lines = marks.map((mark, at) => this.#line(mark, at, mark.box && shares(mark.box, unit, grounding)));
    redraw(this.layer, this.#drawn);
    redraw(this.list, this.#lines);
    if (held >= 0) this.#lines[held]?.querySelector("button")?.focus();
  }

  /** Lights one up; null none. */
  light(/** @type {number | null} */ lit) {
    for (const each of [this.#drawn, this.#lines])
      each.forEach((element, at) => {
        element.classList.toggle("lit", at === lit);
      });
    this.layer.classList.toggle("lighting", lit !== null);
  }

  #mark(
    /** @type {Mark} */ { label, box, point },
    /** @type {number} */ at,
    /** @type {(numbers: number[]) => number[]} */ place,
  ) {
    const words = h("span.mark-name", [String(at + 1), label].filter(Boolean).join(" "));
    const element = h("span.pointed", { style: `--colour: ${colourOf(at)}`, onmouseenter: () => this.light(at) }, [
      box && h("span.mark-box"),
      point && h("span.mark-point"),
      words,
    ]);
    element.addEventListener("mouseleave", () => this.light(null));
    const [left, top, right, bottom] = place(box ?? [...(point ?? []), ...(point ?? [])]);
    element.style.inset = insetOf({ left, top, right, bottom });
    // What is inside another one can be pointed at.
    element.style.zIndex = String(1000 - Math.round(999 * (right - left) * (bottom - top)));
    words.classList.toggle("inside", top < 0.06);
    words.classList.toggle("leftwards", left > 0.7);
    const spot = element.querySelector(".mark-point");
    if (point && box && spot instanceof HTMLElement) {
      const [x, y] = place(point);
      Object.assign(spot.style, {
        left: percent((x - left) / (right - left || 1)),
        top: percent((y - top) / (bottom - top || 1)),
      });
    }
    return element;
  }

  #line(/** @type {Mark} */ { label, details }, /** @type {number} */ at, /** @type {number[] | null} */ box) {
    const more = details.map(([key, value]) => `${key}: ${value}`).join(", ");
    const line = h(
      "button.mark-line",
      { type: "button", onclick: () => this.choose(at) },
      h("span.swatch", { style: `--colour: ${colourOf(at)}` }),
      h("span.mark-number", String(at + 1)),
      h("span.mark-words", label || t("unnamed"), more && h("small", more)),
    );
    const [light, dim] = [() => this.light(at), () => this.light(null)];
    const events = { mouseenter: light, focus: light, mouseleave: dim, blur: dim };
    for (const [name, act] of Object.entries(events)) line.addEventListener(name, act);
    const [left, top, right, bottom] = box ?? [];
    const ask = box && iconButton("ask", t("What is this?"), () => this.ask({ left, top, right, bottom }));
    return h("li.row", line, ask);
  }
}

// What an answer points at, drawn on its pictures, beside lists of it.

/** @import { Grounding, Unit } from "../common/types.d.ts" */
/** @import { Item } from "./items.js" */
/** @import { MediaDesk } from "./viewer.js" */

import { button, h, icon, redraw, select } from "../common/dom.js";
import { save } from "../common/files.js";
import { number, t } from "../common/words.js";
import { askWhat } from "./closer.js";
import { pictureOf, titleOf } from "./items.js";
import { Marks } from "./marks.js";
import { colourOf, saved, shares, unitsOf } from "./shapes.js";
import { Viewer } from "./viewer.js";

/** All that an answer points at, below it. */
export class Groundings {
  #drawn = JSON.stringify([[], null]);
  /** The unit that the person chose. @type {Unit | null} */
  #chosen = null;
  /** By file and time, so that a picture isn't drawn anew while its marks come. @type {Map<string, Figure>} */
  #figures = new Map();

  constructor(/** @type {MediaDesk} */ desk) {
    this.desk = desk;
    this.element = h("div.groundings", { hidden: true });
    this.figures = h("div.figures");
    this.units = h("label.row.quiet");
    this.element.append(this.figures, this.units);
  }

  /** @type {Grounding[]} */
  groundings = [];

  /** The unit of the numbers. */
  get unit() {
    const units = unitsOf(this.groundings);
    const wanted = this.#chosen ?? this.groundings[0]?.unit;
    return units.includes(wanted) ? wanted : units[0];
  }

  show(/** @type {Grounding[]} */ groundings) {
    const drawn = JSON.stringify([groundings, this.#chosen]);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.groundings = groundings;
    this.element.hidden = !groundings.length;
    const figures = new Map();
    for (const grounding of groundings) {
      const key = `${grounding.digest} ${grounding.time_s}`;
      const figure = this.#figures.get(key) ?? new Figure(grounding, this);
      figures.set(key, figure);
      figure.draw(grounding, this.unit);
    }
    this.#figures = figures;
    const elements = [...figures.values()].map(({ element }) => element);
    if (elements.some((element, at) => this.figures.children[at] !== element)) redraw(this.figures, elements);
    while (this.figures.children.length > elements.length) this.figures.lastChild?.remove();
    this.#drawUnits();
  }

  #drawUnits() {
    const names = {
      thousandth: t("0 to 1000"),
      "shown pixel": t("Pixels the model saw"),
      pixel: t("Pixels of the file"),
      whole: t("0 to 1"),
    };
    const options = unitsOf(this.groundings).map((unit) =>
      h("option", { value: unit, selected: unit === this.unit }, names[unit]),
    );
    const choose = (/** @type {string} */ unit) => {
      this.#chosen = /** @type {Unit} */ (unit);
      this.show(this.groundings);
    };
    redraw(this.units, h("span", t("Coordinates")), select({}, choose, options));
  }

  /** Shows a figure on the whole screen, among those of this answer, with one of its marks. */
  look(/** @type {Figure} */ figure, /** @type {number | null} */ mark = null) {
    const figures = [...this.#figures.values()];
    const items = figures.map((each) => each.item(this.unit, each === figure ? mark : null));
    new Viewer(this.desk, items, figures.indexOf(figure)).open();
  }
}

/** One picture with its marks. */
class Figure {
  constructor(/** @type {Grounding} */ grounding, /** @type {Groundings} */ all) {
    this.grounding = grounding;
    this.all = all;
    const look = (/** @type {number} */ at) => all.look(this, at);
    this.marks = new Marks(look, (part) => askWhat(all.desk, pictureOf(this.grounding), part));
    const { size } = grounding;
    const { src, poster, label: title } = pictureOf(grounding);
    const image = h("img", { src: poster ?? src, alt: title });
    if (size) image.style.aspectRatio = `${size[1]} / ${size[0]}`;
    const onclick = () => all.look(this);
    const picture = h(
      "button.picture",
      { type: "button", title, "aria-label": title, onclick },
      image,
      this.marks.layer,
    );
    this.title = h("figcaption.quiet");
    const tools = h(
      "div.row",
      button("plain", [icon("download"), "JSON"], () => this.saveJson(), { title: t("Save marks as JSON") }),
      button("plain", [icon("download"), "PNG"], () => this.savePicture(), {
        title: t("Save picture with marks"),
      }),
    );
    this.element = h("figure.grounding.card", picture, h("div.mark-side", this.title, this.marks.list, tools));
  }

  draw(/** @type {Grounding} */ grounding, /** @type {Unit} */ unit) {
    this.grounding = grounding;
    const [title, n] = [titleOf(grounding.name, grounding.time_s), number(grounding.marks.length)];
    this.title.textContent = t("Marks in {title}: {n}", { title, n });
    this.marks.draw(grounding, unit);
  }

  /** It, to be looked at on the whole screen. @returns {Item} */
  item(/** @type {Unit} */ unit, /** @type {number | null} */ lit) {
    return { ...pictureOf(this.grounding), marked: { grounding: this.grounding, unit, lit } };
  }

  /** For files that are made of it. */
  get name() {
    const { name, time_s } = this.grounding;
    const stem = name.replace(/\.\w{1,5}$/, "");
    return titleOf(stem, time_s).replaceAll(":", ".");
  }

  saveJson() {
    const text = JSON.stringify(saved(this.grounding, this.all.unit), null, 2);
    save(`${this.name}.json`, text, "application/json");
  }

  async savePicture() {
    const { grounding, all } = this;
    const image = new Image();
    image.src = pictureOf(grounding).src;
    const blob = await image.decode().then(
      () => paint(image, grounding, all.unit),
      () => null,
    );
    if (blob) save(`${this.name}.png`, blob);
    else all.desk.say(t("The picture can't be drawn: it was deleted, or it is too large for this browser."));
  }
}

/**
 * The picture with its marks, in its own size; null where the browser has no canvas as large.
 * @param {HTMLImageElement} image
 * @param {Grounding} grounding
 * @param {Unit} unit
 * @returns {Promise<Blob | null>}
 */
function paint(image, grounding, unit) {
  const { naturalWidth: width, naturalHeight: height } = image;
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  if (!context) return Promise.resolve(null);
  context.drawImage(image, 0, 0);
  const pixels = (/** @type {number[]} */ numbers) =>
    shares(numbers, unit, grounding).map((share, at) => share * (at % 2 ? height : width));
  const letter = Math.max(12, Math.round(Math.max(width, height) / 64));
  const line = Math.max(2, letter / 6);
  context.font = `600 ${letter}px system-ui, sans-serif`;
  context.textBaseline = "top";
  grounding.marks.forEach(({ label, box, point }, at) => {
    context.strokeStyle = context.fillStyle = colourOf(at);
    context.lineWidth = line;
    const [left, top, right, bottom] = pixels(box ?? [...(point ?? []), ...(point ?? [])]);
    if (box) context.strokeRect(left, top, right - left, bottom - top);
    if (point) {
      const [x, y] = pixels(point);
      context.beginPath();
      context.arc(x, y, 2.5 * line, 0, 2 * Math.PI);
      context.fill();
    }
    const words = [String(at + 1), label].filter(Boolean).join(" ");
    const [wide, high] = [context.measureText(words).width + letter / 2, letter * 1.3];
    const x = Math.max(Math.min(left - line / 2, width - wide), 0);
    const y = top - high < 0 ? Math.min(top, height - high) : top - high;
    context.fillRect(x, y, wide, high);
    context.fillStyle = "#000";
    context.fillText(words, x + letter / 4, y + letter * 0.15);
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

// Where marks lie, and what is saved of them. Draws nothing.

/** @import { Grounding, Mark, Unit } from "../common/types.d.ts" */
/** @import { Rectangle } from "./rectangle.js" */

/**
 * The sides of the picture in a unit, [width, height]; null where they aren't known.
 * @param {Unit} unit
 * @param {Pick<Grounding, "size" | "shown_size">} grounding
 * @returns {[number, number] | null}
 */
function sides(unit, { size, shown_size }) {
  if (unit === "thousandth") return [1000, 1000];
  if (unit === "whole") return [1, 1];
  const known = unit === "pixel" ? size : shown_size;
  return known && [known[1], known[0]];
}

/** @type {Unit[]} */
const UNITS = ["thousandth", "shown pixel", "pixel", "whole"];

/** The units that the numbers of some groundings can be taken for. */
export const unitsOf = (/** @type {Grounding[]} */ groundings) =>
  UNITS.filter((unit) => groundings.every((grounding) => sides(unit, grounding)));

/**
 * Numbers of a mark, x and y in turns, as shares of the picture's sides; points outside lie on its edge.
 * @param {number[]} numbers
 * @param {Unit} unit
 * @param {Pick<Grounding, "size" | "shown_size">} grounding
 */
export function shares(numbers, unit, grounding) {
  const lengths = sides(unit, grounding) ?? [1000, 1000];
  return numbers.map((value, at) => Math.min(Math.max(value / lengths[at % 2], 0), 1));
}

/** A share of a picture's side, as styles have it. */
export const percent = (/** @type {number} */ share) => `${(100 * share).toFixed(3)}%`;

/** Where an element lies over a part of its picture, as the style `inset`; edges are shares of the sides. */
export const insetOf = (/** @type {Rectangle} */ { left, top, right, bottom }) =>
  [top, 1 - right, 1 - bottom, left].map(percent).join(" ");

/** Colours of marks, by their places: neighbours are far apart, and black text is readable on all of them. */
export const colourOf = (/** @type {number} */ at) => `oklch(0.8 0.18 ${Math.round(at * 137.508 + 145) % 360})`;

/**
 * Marks to be kept elsewhere: pixels of the file, or thousandths of its sides where those aren't known.
 * @param {Grounding} grounding
 * @param {Unit} unit
 */
export function saved(grounding, unit) {
  const { name, size, time_s, marks } = grounding;
  const [height, width] = size ?? [1000, 1000];
  const of = (/** @type {number[]} */ numbers) =>
    shares(numbers, unit, grounding).map((share, at) => Math.round(share * (at % 2 ? height : width)));
  const object = (/** @type {Mark} */ { label, box, point, details }) => ({
    label,
    ...(box ? { bbox_2d: of(box) } : {}),
    ...(point ? { point_2d: of(point) } : {}),
    ...Object.fromEntries(details.filter(([key]) => !["label", "bbox_2d", "point_2d"].includes(key))),
  });
  return {
    file: name,
    ...(time_s === null ? {} : { time_s }),
    unit: size ? "pixel" : "thousandth",
    width,
    height,
    objects: marks.map(object),
  };
}

// A rectangle that is drawn on a picture, moved and pulled at its edges. Draws nothing.

/** @import { Point } from "./viewport.js" */

/**
 * Edges as shares of the picture's sides.
 * @typedef {{ left: number, top: number, right: number, bottom: number }} Rectangle
 */

/**
 * The part of a rectangle that is held: edges, all of it, or nothing, which begins a new one.
 * @typedef {{ x: "left" | "right" | null, y: "top" | "bottom" | null } | "all" | null} Grip
 */

const within = (/** @type {number} */ value, low = 0, high = 1) => Math.min(Math.max(value, low), high);

/** The rectangle between two points. @returns {Rectangle} */
export const between = (/** @type {Point} */ one, /** @type {Point} */ two) => ({
  left: within(Math.min(one.x, two.x)),
  top: within(Math.min(one.y, two.y)),
  right: within(Math.max(one.x, two.x)),
  bottom: within(Math.max(one.y, two.y)),
});

/**
 * What is held at a point.
 * @param {Rectangle} rectangle
 * @param {Point} point
 * @param {Point} reach how far from an edge it is held
 * @returns {Grip}
 */
export function gripAt({ left, top, right, bottom }, { x, y }, reach) {
  if (x < left - reach.x || x > right + reach.x || y < top - reach.y || y > bottom + reach.y) return null;
  // Of a small one the nearer edge.
  const [toLeft, toRight] = [Math.abs(x - left), Math.abs(x - right)];
  const [toTop, toBottom] = [Math.abs(y - top), Math.abs(y - bottom)];
  const across = Math.min(toLeft, toRight) > reach.x ? null : toLeft < toRight ? "left" : "right";
  const down = Math.min(toTop, toBottom) > reach.y ? null : toTop < toBottom ? "top" : "bottom";
  return across || down ? { x: across, y: down } : "all";
}

/** Moved, within the picture. @returns {Rectangle} */
export function moved(/** @type {Rectangle} */ { left, top, right, bottom }, /** @type {Point} */ { x, y }) {
  const [across, down] = [within(x, -left, 1 - right), within(y, -top, 1 - bottom)];
  return { left: left + across, top: top + down, right: right + across, bottom: bottom + down };
}

/**
 * Pulled at what is held; an edge that is pulled over the other one takes its place.
 * @param {Rectangle} rectangle
 * @param {Exclude<Grip, null>} grip
 * @param {Point} by
 * @returns {Rectangle}
 */
export function pulled(rectangle, grip, by) {
  if (grip === "all") return moved(rectangle, by);
  const { left, top, right, bottom } = rectangle;
  const edges = { left, top, right, bottom };
  if (grip.x) edges[grip.x] += by.x;
  if (grip.y) edges[grip.y] += by.y;
  return between({ x: edges.left, y: edges.top }, { x: edges.right, y: edges.bottom });
}

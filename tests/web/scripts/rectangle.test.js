import assert from "node:assert/strict";
import { suite, test } from "node:test";

import { between, gripAt, moved, pulled } from "../../../assets/web/media/rectangle.js";

const BOX = { left: 0.25, top: 0.25, right: 0.5, bottom: 0.75 };
const REACH = { x: 0.02, y: 0.02 };

suite("a rectangle on a picture", () => {
  test("lies between two points, and in the picture", () => {
    assert.deepEqual(between({ x: 0.5, y: 0.75 }, { x: 0.25, y: 0.25 }), BOX);
    assert.deepEqual(between({ x: -1, y: 0.5 }, { x: 2, y: 7 }), { left: 0, top: 0.5, right: 1, bottom: 1 });
  });

  test("is held at its edges, its corners, or as a whole", () => {
    const at = (/** @type {number} */ x, /** @type {number} */ y) => gripAt(BOX, { x, y }, REACH);
    assert.deepEqual(at(0.26, 0.5), { x: "left", y: null });
    assert.deepEqual(at(0.51, 0.76), { x: "right", y: "bottom" });
    assert.deepEqual(at(0.4, 0.24), { x: null, y: "top" });
    assert.equal(at(0.4, 0.5), "all");
    assert.equal(at(0.6, 0.5), null);
    assert.equal(at(0.26, 0.9), null);
  });

  test("moves until the picture's edges, as large as it is", () => {
    assert.deepEqual(moved(BOX, { x: 9, y: -9 }), { left: 0.75, top: 0, right: 1, bottom: 0.5 });
    assert.deepEqual(pulled(BOX, "all", { x: 0.25, y: 0 }), { ...BOX, left: 0.5, right: 0.75 });
  });

  test("is pulled at what is held, over its other side too", () => {
    assert.deepEqual(pulled(BOX, { x: "left", y: null }, { x: 0.125, y: 9 }), { ...BOX, left: 0.375 });
    assert.deepEqual(pulled(BOX, { x: "left", y: "bottom" }, { x: 0.5, y: 9 }), {
      left: 0.5,
      top: 0.25,
      right: 0.75,
      bottom: 1,
    });
  });
});

import assert from "node:assert/strict";
import { suite, test } from "node:test";

import { Viewport } from "../../../assets/web/media/viewport.js";

const STAGE = { width: 1000, height: 500 };
const large = () => new Viewport({ width: 4000, height: 1000 }, STAGE);

suite("what is seen of a picture", () => {
  test("is all of it at first, in the middle, and a small one isn't blown up without end", () => {
    assert.deepEqual(large().view, { x: 0, y: 125, scale: 0.25 });
    assert.deepEqual(new Viewport({ width: 10, height: 10 }, STAGE).view, { x: 480, y: 230, scale: 4 });
  });

  test("grows and shrinks around a point, which stays where it is", () => {
    const port = large();
    const at = { x: 200, y: 250 };
    const before = port.pixelAt(at);
    port.zoomTo(1, at);
    assert.deepEqual(port.pixelAt(at), before);
    assert.equal(port.isWhole, false);
    port.zoomBy(0.001, at);
    assert.deepEqual(port.view, large().view, "never smaller than all of it");
    port.zoomBy(1e6, at);
    assert.equal(port.view.scale, 32);
  });

  test("can be moved until its edges, and only where it is larger", () => {
    const port = large();
    port.panBy(50, 50);
    assert.deepEqual(port.view, large().view);
    port.zoomTo(1);
    port.panBy(1e6, -1e6);
    assert.deepEqual(port.view, { x: 0, y: -500, scale: 1 });
    assert.deepEqual(port.pixelAt({ x: -50, y: 500 }), { x: 0, y: 1000 });
  });

  test("toggles between all of it and its own pixels", () => {
    const port = large();
    port.toggle({ x: 0, y: 250 });
    assert.deepEqual(port.view, { x: 0, y: -250, scale: 1 });
    port.toggle({ x: 0, y: 0 });
    assert.deepEqual(port.view, large().view);
    const small = new Viewport({ width: 500, height: 250 }, STAGE);
    small.toggle(small.middle);
    assert.equal(small.view.scale, 4);
  });

  test("shows a part from near, in the middle where there is as much beside it", () => {
    const port = large();
    port.show({ left: 0.4, top: 0.4, right: 0.6, bottom: 0.6 });
    assert.deepEqual(port.pixelAt(port.middle), { x: 2000, y: 500 });
    assert.equal(port.view.scale.toFixed(6), "0.750000");
    port.show({ left: 0, top: 0, right: 0, bottom: 0 });
    assert.deepEqual(port.view, { x: 0, y: 0, scale: 1 });
    port.show({ left: 0, top: 0, right: 1, bottom: 1 });
    assert.deepEqual(port.view, large().view);
  });

  test("stays whole, or keeps its middle, on a stage of another size", () => {
    const port = large();
    port.resize({ width: 500, height: 500 });
    assert.deepEqual(port.view, { x: 0, y: 187.5, scale: 0.125 });
    port.zoomTo(1);
    const middle = port.pixelAt(port.middle);
    port.resize(STAGE);
    assert.deepEqual(port.pixelAt(port.middle), middle);
  });
});

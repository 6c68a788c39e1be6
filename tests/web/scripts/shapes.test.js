import assert from "node:assert/strict";
import { suite, test } from "node:test";

import { colourOf, saved, shares, unitsOf } from "../../../assets/web/media/shapes.js";

/** @import { Grounding } from "../../../assets/web/common/types.d.ts" */

/** @type {Grounding} */
const GROUNDING = {
  digest: "ab".repeat(32),
  kind: "image",
  name: "a.png",
  time_s: null,
  size: [600, 800],
  shown_size: [300, 400],
  unit: "thousandth",
  marks: [{ label: "cat", box: [100, 200, 500, 1200], point: [1, 2], details: [["sure", "0.5"]] }],
};
const UNKNOWN = { ...GROUNDING, size: null, shown_size: null };

suite("where marks lie", () => {
  test("is told by what their numbers are, and never beside the picture", () => {
    const numbers = [200, 150, 400, 900];
    assert.deepEqual(shares(numbers, "thousandth", GROUNDING), [0.2, 0.15, 0.4, 0.9]);
    assert.deepEqual(shares(numbers, "shown pixel", GROUNDING), [0.5, 0.5, 1, 1]);
    assert.deepEqual(shares(numbers, "pixel", GROUNDING), [0.25, 0.25, 0.5, 1]);
    assert.deepEqual(shares([-1, 0.5], "whole", GROUNDING), [0, 0.5]);
  });

  test("can be in pixels only of pictures whose sizes are known", () => {
    assert.deepEqual(unitsOf([GROUNDING]), ["thousandth", "shown pixel", "pixel", "whole"]);
    assert.deepEqual(unitsOf([GROUNDING, UNKNOWN]), ["thousandth", "whole"]);
  });

  test("is saved in pixels of the file where they are known", () => {
    const object = { label: "cat", bbox_2d: [80, 120, 400, 600], point_2d: [1, 1], sure: "0.5" };
    const about = { file: "a.png", unit: "pixel", width: 800, height: 600 };
    assert.deepEqual(saved(GROUNDING, "thousandth"), { ...about, objects: [object] });
    const frame = saved({ ...UNKNOWN, time_s: 1.5 }, "thousandth");
    assert.deepEqual([frame.unit, frame.time_s, frame.objects[0].bbox_2d], ["thousandth", 1.5, [100, 200, 500, 1000]]);
  });

  test("is seen by colours of their own", () => {
    assert.equal(new Set([...Array(40).keys()].map(colourOf)).size, 40);
  });
});

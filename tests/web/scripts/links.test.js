import assert from "node:assert/strict";
import { test } from "node:test";

import { linksOf } from "../../../assets/web/compose/links.js";

test("a web address ends before the signs of its sentence, and keeps brackets of its own", () => {
  const text = "See https://a.example/wiki/Mercury_(planet), (https://b.example/x). And [https://c.example/y?z=[1]]!";
  assert.deepEqual(linksOf(text), [
    "https://a.example/wiki/Mercury_(planet)",
    "https://b.example/x",
    "https://c.example/y?z=[1]",
  ]);
});

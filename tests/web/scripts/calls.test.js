// What of the review page outlives it.

import assert from "node:assert/strict";
import test from "node:test";
import { call } from "../../../assets/web/review/calls.js";

test("what is saved outlives the page as far as browsers allow, in bytes", async () => {
  /** @type {RequestInit[]} */
  const sent = [];
  globalThis.fetch = async (_address, how) => {
    sent.push(/** @type {RequestInit} */ (how));
    return new Response("{}");
  };
  for (const text of ["short", "字".repeat(19_000), "字".repeat(21_000)]) await call("save", { text });
  await call("accept", { number: 1 });
  await call("items", { numbers: [1] });
  assert.deepEqual(
    sent.map(({ keepalive }) => keepalive),
    [true, true, false, true, false],
  );
});

import assert from "node:assert/strict";
import { test } from "node:test";

import { differing } from "../../../assets/web/chat/compare.js";
import { calledAmong } from "../../../assets/web/model/models.js";

test("what two answers were made with differently", () => {
  assert.deepEqual(differing({ seed: 1, top_k: 20 }, { seed: 2, top_k: 20, system: "Hi" }), ["seed", "system"]);
  assert.deepEqual(differing({ temperature: 0 }, {}), ["temperature"]);
  assert.deepEqual(differing({ thinking: false }, { thinking: false }), []);
  // Answers of earlier versions don't say.
  assert.deepEqual(differing(null, { seed: 1 }), []);
});

test("the practice model has its name, also while another one answers", () => {
  const known = [
    { name: "Qwen3.5-2B", is_demo: false },
    { name: "demo", is_demo: true },
  ];
  const names = ["demo", "Qwen3.5-2B", "elsewhere", null].map((name) => calledAmong(known, name));
  assert.deepEqual(names, ["Practice model", "Qwen3.5-2B", "elsewhere", null]);
});

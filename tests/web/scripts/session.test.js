import assert from "node:assert/strict";
import { test } from "node:test";

import { logInAs, otherTabs, PERSON } from "../../../assets/web/common/session.js";

test("a page that stays doesn't hear of its own login, and other tabs do", async () => {
  let heard = 0;
  otherTabs().addEventListener("message", () => heard++);
  const other = new BroadcastChannel(PERSON);
  const told = new Promise((resolve) => other.addEventListener("message", resolve));
  logInAs({ key: "a key", ticket: "a ticket" });
  await told;
  // What comes to this page comes on the same way, and would have come before.
  other.postMessage(null);
  await new Promise((resolve) => otherTabs().addEventListener("message", resolve));
  assert.equal(heard, 1);
  other.close();
  otherTabs().close();
});

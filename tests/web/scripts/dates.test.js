// The headings of the sidebar, by the calendar of whoever looks.

import assert from "node:assert/strict";
import { test } from "node:test";
import { groupOf } from "../../../assets/web/chat/sidebar.js";

const NOW = "2026-03-30T00:30:00";

/** @param {string} zone @param {string} moment @param {boolean} pinned */
function group(zone, moment, pinned = false) {
  process.env.TZ = zone;
  return groupOf({ pinned, updated_s: Date.parse(moment) / 1000 }, new Date(NOW));
}

test("days are the person's own, also where the clocks change", () => {
  // The night before had 23 hours there.
  assert.equal(group("Europe/Berlin", "2026-03-30T00:00:00"), "Today");
  assert.equal(group("Europe/Berlin", "2026-03-29T23:59:00"), "Yesterday");
  assert.equal(group("Europe/Berlin", "2026-03-29T00:01:00"), "Yesterday");
  assert.equal(group("Europe/Berlin", "2026-03-28T23:59:00"), "Last 7 days");
  // One moment, two calendars.
  process.env.TZ = "UTC";
  const moment = new Date("2026-03-29T20:00:00Z");
  const now = new Date("2026-03-29T23:00:00Z");
  const headings = ["Asia/Tokyo", "UTC", "America/New_York", "Asia/Kolkata"].map((zone) => {
    process.env.TZ = zone;
    return groupOf({ pinned: false, updated_s: moment.getTime() / 1000 - 3 * 3600 }, now);
  });
  assert.deepEqual(headings, ["Today", "Today", "Today", "Yesterday"]);
});

test("older ones stand under their months, and pinned ones above all", () => {
  assert.equal(group("UTC", "2026-03-23T10:00:00Z"), "Last 7 days");
  assert.equal(group("UTC", "2026-03-22T10:00:00Z"), "Last 30 days");
  assert.equal(group("UTC", "2026-02-28T10:00:00Z"), "Last 30 days");
  assert.equal(group("UTC", "2026-02-27T10:00:00Z"), "February 2026");
  assert.equal(group("UTC", "2025-02-27T10:00:00Z"), "February 2025");
  assert.equal(group("UTC", "2025-02-27T10:00:00Z", true), "Pinned");
  // Another machine's clock is ahead.
  assert.equal(group("UTC", "2026-04-02T10:00:00Z"), "Today");
});

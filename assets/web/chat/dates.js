// Under which heading a conversation stands: by the person's own calendar.

/** @import { ChatLine } from "../shared/types.d.ts" */

import { month, t } from "../shared/words.js";

/** How many midnights lie between two moments. */
function daysBetween(/** @type {Date} */ from, /** @type {Date} */ to) {
  // In UTC every day has 24 hours.
  const [start, end] = [from, to].map((date) => Date.UTC(date.getFullYear(), date.getMonth(), date.getDate()));
  return Math.round((end - start) / 86400000);
}

/** The heading above a conversation. */
export function groupOf(/** @type {Pick<ChatLine, "pinned" | "updated_s">} */ chat, now = new Date()) {
  if (chat.pinned) return t("Pinned");
  const date = new Date(1000 * chat.updated_s);
  const days = daysBetween(date, now);
  // Another machine's clock may be ahead.
  if (days <= 0) return t("Today");
  if (days === 1) return t("Yesterday");
  if (days <= 7) return t("Last 7 days");
  return days <= 30 ? t("Last 30 days") : month(date);
}

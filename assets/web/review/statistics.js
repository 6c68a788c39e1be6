// Statistics of the captions in the list: their lengths, and their most frequent tags or words.

/** @import { Statistics } from "./review.d.ts" */

import { button, h, redraw, select, showDialog } from "../common/dom.js";
import { number, t } from "../common/words.js";

/**
 * Shows them in a dialog. A tag leads to the captions that have it.
 * @param {(trainer: string) => Promise<Statistics | null>} load null if they can't be had, which is said
 * @param {(words: string) => unknown} search
 */
export async function showStatistics(load, search) {
  const first = await load("");
  if (!first) return;
  const body = h("div.statistics");
  const options = [h("option", { value: "" }, t("Words"))];
  options.push(...first.trainers.map((each) => h("option", { value: each }, t("Tokens for {name}", { name: each }))));
  const trainer = select(
    { "aria-label": t("Length in") },
    async (value) => {
      const found = await load(value);
      if (found && value === trainer.value) draw(found);
    },
    options,
  );
  const close = button("plain", t("Close"), () => dialog.close());
  const draw = (/** @type {Statistics} */ found) => {
    const most = Math.max(1, ...found.bars.map((bar) => bar.num));
    const bars = found.bars.map(({ low, high, num, over }) => {
      const style = `width: ${(num / most) * 100}%`;
      return [
        h("dt", low === high ? number(low) : `${number(low)}–${number(high)}`),
        h("dd", h(over ? "span.bar.over" : "span.bar", { style }), h("span", number(num))),
      ];
    });
    const counts = found.counts.map(([name, num]) => {
      const take = () => {
        dialog.close();
        search(name);
      };
      const share = `${number(num)} (${Math.round((num / found.counted) * 100)} %)`;
      return h("li.row", button("link", name, take), h("span.quiet", share));
    });
    redraw(
      body,
      h("p", t("{n} {n|caption|captions}, median length {m}", { n: found.captions, m: found.median })),
      h("dl.bars", bars),
      h("h3", found.tags ? t("Most frequent tags") : t("Most frequent words")),
      h("ul.counts", counts),
    );
  };
  draw(first);
  const dialog = h(
    "dialog.dialog.card",
    { "aria-label": t("Statistics") },
    h("h2", t("Statistics")),
    trainer,
    body,
    h("div.dialog-buttons.row.wrap.end", close),
  );
  showDialog(dialog);
}

// Offers that make a message fit, and those that were taken for this message only.

/** @import { Cost, Offer } from "../common/types.d.ts" */
/** @import { Composer } from "./composer.js" */

import { button, h, iconButton, redraw } from "../common/dom.js";
import { number, said, t } from "../common/words.js";

export class Offers {
  /** What the trouble says and offers; drawn anew, an alert is read out anew. */
  #trouble = "";
  #taken = "";

  constructor(/** @type {Pick<Composer, "take" | "makeDefault" | "leave" | "text">} */ composer) {
    this.composer = composer;
    this.trouble = h("div.trouble.row.wrap", { hidden: true, role: "alert" });
    this.taken = h("ul.taken", { role: "list", "aria-label": t("For this message only"), hidden: true });
    this.element = h("div.offers", this.taken, this.trouble);
  }

  drawCost(/** @type {Cost | null} */ cost) {
    if (!cost || cost.fits) return this.drawTrouble("", []);
    const { all, context, reserve } = cost.tokens;
    const words = t(
      "This doesn't fit: it takes {a} tokens. The context holds {c}, and {r} are reserved for the answer.",
      { a: number(all), c: number(context), r: number(reserve) },
    );
    this.drawTrouble(words, cost.offers);
  }

  drawTrouble(/** @type {string} */ words, /** @type {Offer[]} */ offers) {
    this.trouble.hidden = !words;
    const drawn = words && JSON.stringify([words, offers]);
    if (drawn === this.#trouble) return;
    this.#trouble = drawn;
    redraw(
      this.trouble,
      words && h("span", words),
      words && offers.map((offer) => button("plain", said(offer.label), () => this.composer.take(offer))),
    );
  }

  drawTaken(/** @type {Offer[]} */ offers) {
    this.taken.hidden = !offers.length;
    const drawn = JSON.stringify(offers);
    if (drawn === this.#taken) return;
    this.#taken = drawn;
    redraw(
      this.taken,
      offers.map((offer) => this.line(offer)),
    );
  }

  line(/** @type {Offer} */ offer) {
    const what = said(offer.label);
    const { composer } = this;
    const labels = { title: t("Also for later messages"), "aria-label": `${t("Make default")}: ${what}` };
    return h(
      "li.row.wrap.end",
      h("span", t("For this message only: {what}", { what })),
      button("plain", t("Make default"), () => composer.makeDefault(offer), labels),
      iconButton("close", t("Remove for this message: {what}", { what }), () => {
        composer.leave(offer);
        composer.text.focus();
      }),
    );
  }
}

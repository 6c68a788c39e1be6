// How much of the context is taken, and by what.

/** @import { Requests } from "../common/api.js" */
/** @import { App, Chat, Cost } from "../common/types.d.ts" */

import { h, redraw } from "../common/dom.js";
import { number, said, t } from "../common/words.js";
import { estimated } from "../model/servers.js";

// Of the context; from here on it says its number.
const NEARLY_FULL = 0.7;
const PARTS = "qwen35mm-context";

export class ContextGauge {
  /** What the conversation takes, as far as its last answer knows. */
  #used = 0;
  /** What the next prompt takes. @type {Cost["tokens"] | null} */
  #next = null;
  #memory = "";
  /** The chat that is shown. @type {string | null} */
  #chat = null;

  constructor(/** @type {App} */ app, /** @type {Requests} */ requests) {
    this.app = app;
    this.requests = requests;
    this.percent = h("span.percent", { "aria-hidden": "true" });
    this.ring = h("span.ring");
    // Not a button: it does nothing, but its parts are seen where it has the focus.
    const about = { tabindex: "0", role: "note", "aria-describedby": PARTS };
    this.number = h("span.row.quiet", about, this.percent, this.ring);
    this.parts = h("div.parts.card", { id: PARTS, role: "tooltip" });
    this.element = h("div.gauge", this.number, this.parts);
    this.number.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.number.blur();
    });
  }

  drawChat(/** @type {Chat} */ { id, context }) {
    this.#chat = id;
    this.#used = context?.used ?? 0;
    this.draw();
  }

  drawCost(/** @type {Cost | null} */ cost) {
    this.#next = cost?.tokens ?? null;
    this.draw();
  }

  async look() {
    const isLate = this.requests.begin("memory");
    // That the program can't be reached is said elsewhere.
    const memory = await this.requests.call("memory", { conversation: this.#chat }).catch(() => null);
    if (isLate()) return;
    this.#memory = memory ? said(memory.words) : "";
    this.draw();
  }

  draw() {
    const { context_length: length, answer_reserve: reserve } = this.app;
    const history = this.#next?.history ?? this.#used;
    const used = this.#next?.all ?? this.#used;
    const share = used / length;
    const isExact = this.#next?.exact ?? true;
    this.percent.textContent = said({ share });
    this.number.ariaLabel = t("{u} of {l} context tokens", { u: number(used), l: number(length) });
    this.ring.style.setProperty("--share", `${Math.min(100 * share, 100).toFixed(1)}%`);
    this.element.classList.toggle("full", share >= NEARLY_FULL);
    const rows = [
      [t("Chat so far"), history],
      [t("This message"), used - history],
      [t("Reserved for the answer"), reserve],
      [t("Available"), Math.max(length - used - reserve, 0)],
    ];
    redraw(
      this.parts,
      h("b", this.number.ariaLabel),
      h(
        "dl",
        rows.map(([name, tokens]) => [h("dt", String(name)), h("dd", number(Number(tokens)))]),
      ),
      !isExact && h("p.quiet", estimated()),
      this.#memory && h("p.quiet", this.#memory),
    );
  }
}

// The calls at the end of an answer: each with all its arguments, and asked for until the person allows its tool.

/** @import { AnswerView, CallAnswer } from "../common/types.d.ts" */

import { button, h, icon, redraw } from "../common/dom.js";
import { t } from "../common/words.js";

/** A tool's name for the person: its server, and its own. */
export const toolName = (/** @type {string} */ name) => name.replace("__", " · ");

/** Why the person is asked, where that isn't plain. */
const why = (/** @type {string} */ reason) =>
  reason === "changed"
    ? t("This tool's description has changed since you allowed it.")
    : reason === "budget"
      ? t("This question has used up its calls that run without asking.")
      : reason === "waiting"
        ? t("You allowed this tool, but this call hasn't run yet.")
        : null;

export class Calls {
  /** @type {Record<string, CallAnswer>} */
  #answers = {};
  #drawn = "";
  /** @type {Pick<AnswerView, "calls" | "asks">} */
  #shown = { calls: [] };

  constructor(/** @type {(answers: Record<string, CallAnswer>) => unknown} */ run) {
    this.run = run;
    this.element = h("div.calls");
  }

  /** Has the calls run. What the person said of those that are still asked for then, they say again. */
  async #run() {
    await this.run(this.#answers);
    this.#answers = {};
    this.draw(this.#shown);
  }

  draw(/** @type {Pick<AnswerView, "calls" | "asks">} */ shown) {
    this.#shown = shown;
    const { calls, asks = {} } = shown;
    const drawn = JSON.stringify([calls, asks, this.#answers]);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    const open = calls.filter(({ id }) => id in asks && !this.#answers[id]);
    redraw(
      this.element,
      calls.map(({ id, name, arguments: given }) => {
        const isOpen = open.some((call) => call.id === id);
        const answer = (/** @type {CallAnswer} */ said) => {
          this.#answers[id] = said;
          if (open.length === 1) this.#run();
          this.draw(shown);
        };
        const reason = isOpen && why(asks[id]);
        return h(
          "details.call.card",
          { open: isOpen },
          h("summary", icon("tool"), toolName(name)),
          h("pre", { tabindex: "0", "aria-label": t("Arguments") }, given),
          reason && h("p.quiet", reason),
          isOpen &&
            h(
              "div.row.wrap",
              { role: "group", "aria-label": t("Allow {tool}?", { tool: toolName(name) }) },
              button("strong", t("Allow once"), () => answer("once")),
              button("plain", t("Always allow this tool"), () => answer("always")),
              button("plain", t("Don't allow"), () => answer("no")),
            ),
        );
      }),
    );
  }
}

// Sliders for media limits, which open from a file's cost.

/** @import { Composer } from "./composer.js" */
/** @import { Kind } from "../common/types.d.ts" */

import { h, redraw } from "../common/dom.js";
import { number, said, t } from "../common/words.js";
import { amountAt, LIMITS_OF, NUM_POSITIONS, positionOf } from "./limits.js";
import { onceOf, withoutLimit } from "./once.js";

const ID = "qwen35mm-limits";

export class Sliders {
  /** The kind of media whose sliders are seen. @type {Kind | null} */
  #open = null;
  #drawn = "";

  constructor(/** @type {Pick<Composer, "app" | "draft" | "state" | "strip">} */ composer) {
    this.composer = composer;
    this.element = h("div.limits.row.wrap.quiet", { id: ID, role: "group", "aria-label": t("Media limits") });
  }

  /** The button with a medium's cost, which opens its sliders. */
  trigger(/** @type {Kind} */ kind) {
    const labels = { "aria-controls": ID, "aria-expanded": String(kind === this.#open), "data-kind": kind };
    const toggle = () => {
      this.#open = this.#open === kind ? null : kind;
      this.draw();
    };
    return h("button.label.quiet", { type: "button", onclick: toggle, title: t("Change limits"), ...labels });
  }

  draw() {
    const { draft, strip } = this.composer;
    const names = draft.limits.filter((name) => this.#open && LIMITS_OF[this.#open]?.includes(name));
    this.element.hidden = !names.length;
    for (const trigger of strip.querySelectorAll("button.label"))
      trigger.setAttribute("aria-expanded", String(trigger.getAttribute("data-kind") === this.#open));
    if (this.#drawn === names.join()) return;
    this.#drawn = names.join();
    redraw(
      this.element,
      names.map((name) => this.slider(name)),
    );
  }

  /** Draws them again after a change elsewhere. */
  redraw() {
    this.#drawn = "";
    this.draw();
  }

  slider(/** @type {string} */ name) {
    const { app, draft, state } = this.composer;
    const { fields, defaults } = app.settings;
    const { label } = fields[name];
    const isFrames = name === "max_frames";
    const range = { low: isFrames ? 2 : 64, high: isFrames ? 768 : app.context_length };
    const kept = onceOf(draft.taken).limits[name] ?? state.settings[name] ?? defaults[name];
    const value = Number(kept ?? app.context_length);
    const output = h("output", { "aria-hidden": "true" });
    const input = h("input", { type: "range", min: "0", max: String(NUM_POSITIONS), "aria-label": said(label) });
    input.value = String(positionOf(value, range));
    // The slider's own value is a position.
    const tell = (/** @type {number} */ amount) => {
      output.textContent = number(amount);
      input.setAttribute("aria-valuetext", number(amount));
    };
    // Moving one counts again at once.
    input.addEventListener("input", () => {
      const amount = amountAt(Number(input.value), range);
      tell(amount);
      draft.taken = withoutLimit(draft.taken, name);
      state.changeSettings({ ...state.settings, [name]: amount });
    });
    tell(value);
    return h("label.row", h("span", said(label)), input, output);
  }
}

// Answer options beside the message: thinking, the system prompt, a preset.

/** @import { App, Settings } from "../common/types.d.ts" */
/** @import { Presets } from "../chat/presets.js" */
/** @import { PageState } from "../chat/state.js" */

import { withSetting } from "../chat/presets.js";
import { button, h, iconButton, redraw, select } from "../common/dom.js";
import { opensAt, popover } from "../common/popover.js";
import { t } from "../common/words.js";

// On a narrow page the row is a menu.
const IS_NARROW = matchMedia("(max-width: 760px)");
// No preset's name: those are never empty.
const SAVE = "";
const NONE = " ";

export class Quick {
  /**
   * @param {App} app
   * @param {PageState} state
   * @param {Presets} presets
   * @param {(values: Settings) => void} change
   */
  constructor(app, state, presets, change) {
    this.app = app;
    this.state = state;
    this.presets = presets;
    this.change = change;
    this.thinking = button("pill", t("Think first"), () => this.set("thinking", !this.thinks), {
      hidden: !app.settings.thinking,
      title: t("Slower, but better at hard questions."),
    });
    this.system = button("pill", t("System prompt"), () => {});
    const prompt = popover(this.system, t("System prompt"), (content) => this.drawPrompt(content));
    const choose = { class: "pill", "aria-label": t("Choose a preset") };
    this.preset = select(choose, (name) => this.choose(name), []);
    this.element = h("div.quick.row", { role: "group", "aria-label": t("Answer options") }, [
      this.thinking,
      this.system,
      prompt,
      this.preset,
    ]);
    this.more = iconButton("settings", t("Answer options"), () => {}, { class: "quick-menu" });
    opensAt(this.more, this.element, () => {});
    const fold = () => {
      this.element.popover = IS_NARROW.matches ? "auto" : null;
    };
    IS_NARROW.addEventListener("change", fold);
    fold();
  }

  get thinks() {
    const { app, state } = this;
    return Boolean(state.settings.thinking ?? app.settings.defaults.thinking);
  }

  draw() {
    const { presets, state } = this;
    this.thinking.setAttribute("aria-pressed", String(this.thinks));
    this.system.classList.toggle("set", Boolean(state.settings.system));
    const chosen = presets.nameOf(state.settings);
    this.preset.classList.toggle("set", chosen !== undefined);
    redraw(
      this.preset,
      h("option", { value: NONE, selected: chosen === undefined }, t("Preset")),
      presets.names.map((name) => h("option", { value: name, selected: name === chosen }, name)),
      h("option", { value: SAVE }, t("Save as preset")),
    );
  }

  drawPrompt(/** @type {HTMLElement} */ content) {
    const placeholder = t("How the model should behave (optional)");
    const text = h("textarea", { rows: 6, placeholder, "aria-label": t("System prompt") });
    text.value = String(this.state.settings.system ?? "");
    text.addEventListener("input", () => this.set("system", text.value));
    redraw(content, h("h3.quiet", t("System prompt")), text);
  }

  async choose(/** @type {string} */ name) {
    if (name === SAVE) await this.presets.save(this.state.settings);
    else if (name !== NONE) this.change(this.presets.of(name));
    this.draw();
  }

  set(/** @type {string} */ name, /** @type {string | boolean} */ value) {
    const { app, state } = this;
    this.change(withSetting(state.settings, app.settings.defaults, name, value));
  }
}

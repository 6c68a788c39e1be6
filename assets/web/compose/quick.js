// How to answer, at hand where the message is written: thinking, the system prompt, a preset.

/** @import { Settings } from "../shared/types.d.ts" */
/** @import { Page } from "../main.js" */

import { button, h, iconButton, redraw, select } from "../shared/dom.js";
import { opensAt, popover } from "../shared/popover.js";
import { isSame, withSetting } from "../shared/values.js";
import { t } from "../shared/words.js";

// There the row is a menu.
const IS_NARROW = matchMedia("(max-width: 760px)");
// No preset's name: those are never empty.
const SAVE = "";
const NONE = " ";

export class Quick {
  constructor(/** @type {Page} */ page) {
    this.page = page;
    this.thinking = button("pill", t("Think first"), () => this.set("thinking", !this.thinks), {
      hidden: page.app.server?.thinking === false,
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
    const { app, state } = this.page;
    return Boolean(state.settings.thinking ?? app.settings.defaults.thinking);
  }

  draw() {
    const { state, panel } = this.page;
    this.thinking.setAttribute("aria-pressed", String(this.thinks));
    this.system.classList.toggle("set", Boolean(state.settings.system));
    const names = Object.keys(panel.presets);
    const chosen = names.find((name) => isSame(panel.presets[name], state.settings));
    this.preset.classList.toggle("set", chosen !== undefined);
    redraw(
      this.preset,
      h("option", { value: NONE, selected: chosen === undefined }, t("Preset")),
      names.map((name) => h("option", { value: name, selected: name === chosen }, name)),
      h("option", { value: SAVE }, t("Save as preset")),
    );
  }

  drawPrompt(/** @type {HTMLElement} */ content) {
    const placeholder = t("How the model should behave (optional)");
    const text = h("textarea", { rows: 6, placeholder, "aria-label": t("System prompt") });
    text.value = String(this.page.state.settings.system ?? "");
    text.addEventListener("input", () => this.set("system", text.value));
    redraw(content, h("h3.quiet", t("System prompt")), text);
  }

  async choose(/** @type {string} */ name) {
    const { panel, state } = this.page;
    if (name === SAVE) {
      panel.values = state.settings;
      await panel.savePreset();
    } else if (name !== NONE) this.change(panel.presets[name]);
    this.draw();
  }

  set(/** @type {string} */ name, /** @type {string | boolean} */ value) {
    const { app, state } = this.page;
    this.change(withSetting(state.settings, app.settings.defaults, name, value));
  }

  change(/** @type {Settings} */ values) {
    const { page } = this;
    page.changeSettings(values);
    if (page.areSettingsOpen) page.panel.show(values);
  }
}

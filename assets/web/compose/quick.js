// The menu behind "+": what is added to a message, and how it is answered. What is switched on stands beside it.

/** @import { App, Settings } from "../common/types.d.ts" */
/** @import { Presets } from "../chat/presets.js" */
/** @import { PageState } from "../chat/state.js" */
/** @import { Toasts } from "../common/toasts.js" */

import { withPreset, withSetting } from "../chat/presets.js";
import { button, h, icon, iconButton, redraw } from "../common/dom.js";
import { entry, popover } from "../common/popover.js";
import { t } from "../common/words.js";

/**
 * What the menu needs of the page.
 * @typedef {object} Needs
 * @property {App} app
 * @property {PageState} state
 * @property {Presets} presets
 * @property {(values: Settings) => void} change
 * @property {Toasts["say"]} say
 * @property {() => void} addFiles
 * @property {() => void} shoot
 */

export class Quick {
  constructor(/** @type {Needs} */ needs) {
    this.needs = needs;
    const plus = iconButton("plus", t("Add to message"), () => {});
    this.menu = popover(plus, t("Add to message"), (content) => this.drawMenu(content));
    this.chips = h("div.row.wrap", { role: "group", "aria-label": t("Switched on") });
    this.element = h("div.quick.row", plus, this.menu, this.chips);
  }

  get thinks() {
    const { app, state } = this.needs;
    return Boolean(state.settings.thinking ?? app.settings.defaults.thinking);
  }

  /** The tool servers that are switched on. */
  get chosenTools() {
    return String(this.needs.state.settings.tools ?? "")
      .split(",")
      .filter(Boolean);
  }

  toggleTools(/** @type {string} */ name) {
    const chosen = this.chosenTools;
    const others = chosen.filter((each) => each !== name);
    this.set("tools", (others.length < chosen.length ? others : [...chosen, name]).join(","));
  }

  draw() {
    const { app, state, presets, change, say } = this.needs;
    const { settings } = state;
    const preset = presets.nameOf(settings);
    const { id } = state.chat;
    const forget = () => {
      this.set("system", "");
      // It comes back in its own chat only.
      const run = () => (id ?? state.chat.id) === state.chat.id && this.set("system", settings.system ?? "");
      say(t("System prompt removed."), "note", { label: t("Undo"), run });
    };
    const hadFocus = this.chips.contains(document.activeElement);
    redraw(
      this.chips,
      app.settings.thinking && this.thinks && chip(t("Think first"), () => this.set("thinking", false)),
      this.chosenTools.map((name) => chip(t("Tools: {name}", { name }), () => this.toggleTools(name))),
      Boolean(settings.system) && chip(t("System prompt"), forget),
      preset !== undefined && chip(preset, () => change(withPreset(settings, {}))),
    );
    if (hadFocus) this.element.querySelector("button")?.focus();
  }

  drawMenu(/** @type {HTMLElement} */ content) {
    const { app, state, presets, change, addFiles, shoot } = this.needs;
    const prompt = button("row", [icon("edit"), t("System prompt")], () => this.drawPrompt(content));
    const chosen = presets.nameOf(state.settings);
    redraw(
      content,
      entry(content, "clip", h("span", t("Add files"), h("small", t("Pictures, videos, texts and PDFs"))), addFiles),
      entry(content, "camera", t("Take a photo or record a clip"), shoot),
      app.settings.thinking &&
        !this.thinks &&
        entry(content, "eye", t("Think first"), () => this.set("thinking", true)),
      state.tools.map((name) =>
        entry(content, this.chosenTools.includes(name) ? "check" : "tool", t("Tools: {name}", { name }), () =>
          this.toggleTools(name),
        ),
      ),
      prompt,
      presets.names.map((name) =>
        entry(content, name === chosen ? "check" : "settings", name, () =>
          change(withPreset(state.settings, presets.of(name))),
        ),
      ),
      entry(content, "plus", t("Save as preset"), () => presets.save(state.settings)),
    );
  }

  drawPrompt(/** @type {HTMLElement} */ content) {
    const placeholder = t("How the model should behave (optional)");
    const text = h("textarea", { rows: 6, dir: "auto", placeholder, "aria-label": t("System prompt") });
    text.value = String(this.needs.state.settings.system ?? "");
    text.addEventListener("input", () => this.set("system", text.value));
    redraw(content, h("h3.quiet", t("System prompt")), text);
    text.focus();
  }

  set(/** @type {string} */ name, /** @type {string | number | boolean} */ value) {
    const { app, state, change } = this.needs;
    change(withSetting(state.settings, app.settings.defaults, name, value));
  }
}

/** What is switched on, with a button that switches it off. */
function chip(/** @type {string} */ name, /** @type {() => void} */ remove) {
  const label = t("Remove {name}", { name });
  return h("span.chip.row", h("span", name), iconButton("close", label, remove));
}

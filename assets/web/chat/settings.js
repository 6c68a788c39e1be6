// What can be set: how to answer, what media may cost, language and colours.

/** @import { App, Child, Field, Preferences, Settings } from "../common/types.d.ts" */
/** @import { Models } from "../model/models.js" */
/** @import { Presets } from "./presets.js" */
/** @import { ToolPanel } from "./tools.js" */

import { button, h, iconButton, redraw, select } from "../common/dom.js";
import { LANGUAGES, said, t } from "../common/words.js";
import { copy } from "./blocks.js";
import { withPreset, withSetting } from "./presets.js";
import { showShortcuts } from "./shortcuts.js";

// Fields with at most this many values have a slider.
const MAX_SLIDER = 200;
// What most people change.
const FIRST = ["temperature", "max_tokens"];

/**
 * @typedef {object} Needs
 * @property {App} app
 * @property {Preferences} preferences
 * @property {Models} models
 * @property {Presets} presets
 * @property {ToolPanel} [tools]
 * @property {Child} [archives] to import and export chats
 * @property {(values: Settings) => void} change
 * @property {(values: Preferences) => void} prefer
 * @property {() => void} close
 */

export class SettingsPanel {
  /** Those that differ from the defaults. @type {Settings} */
  values = {};

  constructor(/** @type {Needs} */ { app, preferences, models, presets, tools, archives, change, prefer, close }) {
    this.app = app;
    this.preferences = preferences;
    this.models = app.models ? models : null;
    this.presets = presets;
    this.tools = tools;
    this.archives = archives;
    this.changed = () => change(this.values);
    this.prefer = prefer;
    this.fields = app.settings.fields;
    this.defaults = app.settings.defaults;
    this.body = h("div.settings-body");
    this.presetRow = h("div.presets.row.wrap");
    this.rest = h("div.rest");
    // Open or folded, it stays so.
    this.advanced = h("details", h("summary", t("Advanced")), this.rest);
    this.element = h(
      "aside.settings",
      { id: "qwen35mm-settings", "aria-label": t("Settings"), hidden: true },
      h("header.row", h("h2", t("Settings")), iconButton("close", t("Close settings"), close)),
      this.body,
    );
  }

  show(/** @type {Settings} */ values) {
    this.values = values;
    this.draw();
  }

  set(/** @type {string} */ name, /** @type {number | string | boolean | null} */ value) {
    this.values = withSetting(this.values, this.defaults, name, value);
    this.drawPresets();
    this.changed();
  }

  take(/** @type {Settings} */ values) {
    this.show(values);
    this.changed();
  }

  draw() {
    this.models?.load();
    this.tools?.load(this.numbers("tools"));
    this.drawPresets();
    redraw(
      this.rest,
      this.systemPrompt(),
      this.switches(),
      fieldset(t("Sampling"), this.numbers("sampling")),
      fieldset(t("Length"), this.numbers("length")),
      fieldset(t("Pictures and videos"), this.numbers("media")),
      this.client(),
      button("plain reset", t("Reset to model defaults"), () => this.take(withPreset(this.values, {}))),
    );
    redraw(
      this.body,
      this.models?.element,
      fieldset(t("Answers"), [this.first(), this.presetRow, this.advanced]),
      fieldset(t("This page"), [
        this.choice("language", t("Language"), { "": t("Browser default"), ...LANGUAGES }),
        this.choice("colours", t("Theme"), { "": t("System default"), light: t("Light"), dark: t("Dark") }),
        button("plain reset", t("Keyboard shortcuts"), showShortcuts),
      ]),
      fieldset(t("Chats"), [this.app.titles && this.titles(), this.app.web !== null && this.web(), this.archives]),
      this.network(),
      // It comes late: below it nothing moves.
      this.tools?.element,
    );
  }

  first() {
    const fields = FIRST.filter((name) => this.fields[name]);
    return [this.thinking(), fields.map((name) => this.number(name, this.fields[name]))];
  }

  /** The other fields of a group. */
  numbers(/** @type {Field["group"]} */ wanted) {
    return Object.entries(this.fields)
      .filter(([name, { group }]) => group === wanted && !FIRST.includes(name))
      .map(([name, field]) => this.number(name, field));
  }

  /** How other devices reach the page. */
  network() {
    const { network } = this.app;
    if (network === null) return null;
    const code = h("img.qr", { src: network.qr, alt: t("QR code of the address") });
    return fieldset(t("On other devices"), [code, toCopy(t("Address"), network.url)]);
  }

  /** How a program asks the page's model. */
  client() {
    const { client } = this.app;
    if (client === null) return null;
    const code = `gradio_client.Client("${new URL(client, document.baseURI)}")`;
    return fieldset(t("From Python"), [toCopy(t("From Python"), code)]);
  }

  systemPrompt() {
    const text = h("textarea", { rows: 4, dir: "auto", placeholder: t("How the model should behave (optional)") });
    text.value = String(this.values.system ?? "");
    text.addEventListener("input", () => this.set("system", text.value));
    return h("label.block-field", h("span", t("System prompt")), text);
  }

  thinking() {
    if (!this.app.settings.thinking) return null;
    const box = h("input", { type: "checkbox", checked: this.values.thinking ?? this.defaults.thinking });
    box.addEventListener("change", () => this.set("thinking", box.checked));
    const hint = h("small", t("Slower, but better at hard questions."));
    return h("label.check.row", box, h("span", t("Think first"), hint));
  }

  /** What the model's chat template can be told. */
  switches() {
    return Object.entries(this.app.settings.switches).map(([name, { label, hint, values }]) => {
      const chosen = values.findIndex(({ value }) => value === this.values[name]);
      const options = values.map((each, at) =>
        h("option", { value: String(at), selected: at === chosen }, said(each.label)),
      );
      const change = (/** @type {string} */ at) => this.set(name, at === "" ? null : values[Number(at)].value);
      const standard = h("option", { value: "", selected: chosen < 0 }, t("Model default"));
      return h(
        "label.number",
        h("span", said(label), h("small", said(hint))),
        select({}, change, [standard, ...options]),
      );
    });
  }

  titles() {
    const box = h("input", { type: "checkbox", checked: this.preferences.titles ?? true });
    box.addEventListener("change", () => this.prefer({ titles: box.checked }));
    const hint = h("small", t("After the first answer, while the model is idle."));
    return h("label.check.row", box, h("span", t("Generate chat titles"), hint));
  }

  web() {
    const box = h("input", { type: "checkbox", checked: this.preferences.read_web ?? this.app.web ?? false });
    box.addEventListener("change", () => this.prefer({ read_web: box.checked }));
    const hint = h("small", t("Offers to read links in a message: the text and pictures of the page are added."));
    return h("label.check.row", box, h("span", t("Read web addresses"), hint));
  }

  /** A field, and a slider beside it where the range is small. */
  number(/** @type {string} */ name, /** @type {Field} */ field) {
    const { low, high, step, label, hint } = field;
    const standard = this.defaults[name];
    const range = { min: String(low), max: String(high) };
    const placeholder = String(standard ?? (name === "seed" ? t("random") : t("no limit")));
    const box = h("input", { type: "number", ...range, step: step < 1 ? "any" : String(step), placeholder });
    box.value = String(this.values[name] ?? "");
    const hidden = { tabindex: "-1", "aria-hidden": "true" };
    const slider = high <= MAX_SLIDER ? h("input", { type: "range", ...range, step: String(step), ...hidden }) : null;
    const place = () => String(this.values[name] ?? standard ?? low);
    if (slider) slider.value = place();
    box.addEventListener("input", () => {
      const value = box.value === "" ? null : Number(box.value);
      const isValid = value === null || isWithin(value, field);
      box.setCustomValidity(isValid ? "" : t("From {low} to {high}", { low, high }));
      if (!isValid) return;
      this.set(name, value);
      if (slider) slider.value = place();
    });
    slider?.addEventListener("input", () => {
      box.setCustomValidity("");
      box.value = slider.value;
      this.set(name, Number(slider.value));
    });
    return h("label.number", h("span", said(label), hint !== null && h("small", said(hint))), box, slider);
  }

  choice(
    /** @type {"language" | "colours"} */ name,
    /** @type {string} */ label,
    /** @type {Record<string, string>} */ words,
  ) {
    const chosen = this.preferences[name] ?? "";
    const options = Object.entries(words).map(([value, each]) =>
      h("option", { value, selected: value === chosen }, each),
    );
    const change = (/** @type {string} */ value) => this.prefer({ [name]: value });
    return h("label.number", h("span", label), select({}, change, options));
  }

  drawPresets() {
    const { names } = this.presets;
    // The preset that matches all settings, which can be deleted.
    const chosen = this.presets.nameOf(this.values);
    const none = h("option", { value: "" }, names.length ? t("Choose a preset") : t("No presets yet"));
    const presets = select(
      { "aria-label": t("Choose a preset") },
      (name) => name && this.take(withPreset(this.values, this.presets.of(name))),
      [none, names.map((name) => h("option", { value: name, selected: name === chosen }, name))],
    );
    redraw(
      this.presetRow,
      presets,
      button("plain", t("Save as preset"), () => this.savePreset()),
      chosen !== undefined && iconButton("trash", t("Delete preset"), () => this.deletePreset(chosen)),
    );
  }

  async savePreset() {
    await this.presets.save(this.values);
    this.drawPresets();
  }

  async deletePreset(/** @type {string} */ name) {
    await this.presets.delete(name);
    this.drawPresets();
  }
}

/** Whether a number is one that a field takes. */
export function isWithin(/** @type {number} */ value, /** @type {Field} */ { low, high, step }) {
  return value >= low && value <= high && (step < 1 || Number.isInteger(value));
}

/** A line of text with a button that copies it. */
const toCopy = (/** @type {string} */ label, /** @type {string} */ text) =>
  h(
    "div.row",
    h("input", { readOnly: true, value: text, "aria-label": label }),
    iconButton("copy", t("Copy"), ({ currentTarget }) => copy(currentTarget, text)),
  );

const fieldset = (/** @type {string} */ title, /** @type {Child[]} */ fields) =>
  h("fieldset", h("legend", title), fields);

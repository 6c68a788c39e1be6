// What can be set: how to answer, what media may cost, language and colours.

import { call } from "./api.js";
import { ask, clear, h, iconButton } from "./dom.js";
import { LANGUAGES, said, t } from "./words.js";

export class SettingsPanel {
  /** `page`: `changed(values)`, `changePreferences(values)`, `say(words)`, `close()`, `switchModel(...)`. */
  constructor(page, { fields, defaults }, presets, preferences) {
    Object.assign(this, { page, fields, defaults, presets, preferences, values: {} });
    this.save = () => this.page.changed(this.values);
    this.body = h("div.settings-body");
    this.element = h(
      "aside.settings",
      { id: "qwen35mm-settings", "aria-label": t("Settings"), hidden: true },
      h(
        "header",
        {},
        h("h2", {}, t("Settings")),
        iconButton("close", t("Close the settings"), () => this.page.close()),
      ),
      this.body,
    );
  }

  /** Shows settings; they are only the values that differ from the defaults. */
  show(values) {
    this.values = { ...values };
    this.draw();
  }

  set(name, value) {
    if (value === null || value === "" || value === this.defaults[name]) delete this.values[name];
    else this.values[name] = value;
    this.save();
  }

  draw() {
    this.models?.load();
    const groups = { sampling: t("How words are chosen"), length: t("Lengths"), media: t("Pictures and videos") };
    clear(
      this.body,
      this.models?.element,
      this.presetRow(),
      h(
        "label.block-field",
        {},
        h("span", {}, t("System prompt")),
        h(
          "textarea",
          {
            rows: 4,
            placeholder: t("How the model should behave; empty for none"),
            oninput: (event) => this.set("system", event.target.value),
          },
          this.values.system ?? "",
        ),
      ),
      h(
        "label.check",
        {},
        h("input", {
          type: "checkbox",
          checked: this.values.thinking ?? this.defaults.thinking,
          onchange: (event) => this.set("thinking", event.target.checked),
        }),
        h("span", {}, t("Think first"), h("small", {}, t("Slower, and better at hard questions."))),
      ),
      Object.entries(groups).map(([group, title]) =>
        h(
          "fieldset",
          {},
          h("legend", {}, title),
          Object.entries(this.fields)
            .filter(([, field]) => field.group === group)
            .map(([name, field]) => this.number(name, field)),
        ),
      ),
      h("button.plain.reset", { type: "button", onclick: () => this.reset() }, t("Back to the model's own settings")),
      h(
        "fieldset",
        {},
        h("legend", {}, t("Page")),
        this.choice("language", t("Language"), { "": t("As the browser"), ...LANGUAGES }),
        this.choice("colours", t("Colours"), { "": t("As the system"), light: t("Light"), dark: t("Dark") }),
      ),
    );
  }

  number(name, { low, high, step, label, hint }) {
    const given = this.values[name];
    const standard = this.defaults[name];
    const box = h("input", {
      type: "number",
      min: String(low),
      max: String(high),
      step: step < 1 ? "any" : String(step),
      placeholder: standard !== null ? String(standard) : name === "seed" ? t("random") : t("no limit"),
    });
    if (given !== undefined) box.value = String(given);
    const slider =
      high <= 200
        ? h("input", {
            type: "range",
            min: String(low),
            max: String(high),
            step: String(step),
            tabindex: "-1",
            "aria-hidden": "true",
          })
        : null;
    if (slider) slider.value = String(given ?? standard ?? low);
    const take = (text, from) => {
      const value = text === "" ? null : Number(text);
      const bad = value !== null && !(value >= low && value <= high && (step < 1 || Number.isInteger(value)));
      box.setCustomValidity(bad ? t("From {low} to {high}", { low, high }) : "");
      if (bad) return;
      if (from === "slider") box.value = text;
      else if (slider) slider.value = String(value ?? standard ?? low);
      this.set(name, value);
    };
    box.addEventListener("input", () => take(box.value, "box"));
    slider?.addEventListener("input", () => take(slider.value, "slider"));
    return h("label.number", {}, h("span", {}, said(label), hint ? h("small", {}, said(hint)) : null), box, slider);
  }

  choice(name, label, options) {
    const select = h(
      "select",
      { onchange: () => this.page.changePreferences({ [name]: select.value }) },
      Object.entries(options).map(([value, words]) =>
        h("option", { value, selected: (this.preferences[name] ?? "") === value }, words),
      ),
    );
    return h("label.number", {}, h("span", {}, label), select);
  }

  presetRow() {
    const names = Object.keys(this.presets);
    const select = h(
      "select",
      {
        "aria-label": t("Take a preset"),
        onchange: () => {
          if (select.value) this.take(this.presets[select.value]);
        },
      },
      h("option", { value: "" }, names.length ? t("Take a preset") : t("No presets yet")),
      names.map((name) => h("option", { value: name }, name)),
    );
    return h(
      "div.presets",
      {},
      select,
      h("button.plain", { type: "button", onclick: () => this.savePreset() }, t("Save as preset")),
      names.length
        ? iconButton("trash", t("Delete the chosen preset"), () => select.value && this.deletePreset(select.value))
        : null,
    );
  }

  take(values) {
    this.show(values);
    this.save();
  }

  reset() {
    this.take({});
  }

  async savePreset() {
    const input = h("input", { "aria-label": t("Name"), placeholder: t("Name"), maxlength: "100" });
    const name = await ask(t("Save these settings"), input, [
      { label: t("Cancel"), value: null },
      { label: t("Save"), value: () => input.value.trim(), kind: "strong" },
    ]);
    if (name) await this.change("save_preset", { name, settings: this.values });
  }

  deletePreset(name) {
    return this.change("delete_preset", { name });
  }

  async change(method, args) {
    try {
      this.presets = (await call(method, args)).presets;
      this.draw();
    } catch (problem) {
      this.page.say(problem.message);
    }
  }
}

// Settings as values, and those that are kept by a name.

/** @import { Requests } from "../common/api.js" */
/** @import { Settings } from "../common/types.d.ts" */

import { askText } from "../common/dom.js";
import { t } from "../common/words.js";

/**
 * Settings with one of them changed: a default isn't kept, and neither is nothing.
 * @param {Settings} values
 * @param {Settings} defaults
 * @param {string} name
 * @param {number | string | boolean | null} value
 * @returns {Settings}
 */
export function withSetting(values, defaults, name, value) {
  const { [name]: _, ...others } = values;
  return value === null || value === "" || value === defaults[name] ? others : { ...others, [name]: value };
}

// A chat's own: its tools are switched on in it alone.
const OF_ONE_CHAT = ["tools", "max_calls"];

/** What other chats may take over of a chat's settings. @returns {Settings} */
export const forAnyChat = (/** @type {Settings} */ values) =>
  Object.fromEntries(Object.entries(values).filter(([name]) => !OF_ONE_CHAT.includes(name)));

/** A chat's settings replaced by a preset's, but for what is its own. @returns {Settings} */
export const withPreset = (/** @type {Settings} */ values, /** @type {Settings} */ preset) => ({
  ...forAnyChat(preset),
  ...Object.fromEntries(Object.entries(values).filter(([name]) => OF_ONE_CHAT.includes(name))),
});

const isSame = (/** @type {Settings} */ one, /** @type {Settings} */ other) =>
  Object.keys(one).length === Object.keys(other).length &&
  Object.entries(one).every(([name, value]) => other[name] === value);

export class Presets {
  /**
   * @param {Requests} requests
   * @param {Record<string, Settings>} all by their names
   * @param {() => void} onChange one was saved or deleted
   */
  constructor(requests, all, onChange) {
    this.requests = requests;
    this.all = all;
    this.onChange = onChange;
  }

  get names() {
    return Object.keys(this.all);
  }

  of(/** @type {string} */ name) {
    return this.all[name];
  }

  /** The name of the one with these values, if there is one. */
  nameOf(/** @type {Settings} */ values) {
    return this.names.find((name) => isSame(this.all[name], forAnyChat(values)));
  }

  /** Asks for a name, and saves settings by it. */
  async save(/** @type {Settings} */ settings) {
    const field = { "aria-label": t("Name"), placeholder: t("Name"), maxlength: "100" };
    const name = await askText(t("Save settings as preset"), null, field, t("Save"));
    if (name) this.#take(await this.requests.ask("save_preset", { name, settings }, "presets"));
  }

  async delete(/** @type {string} */ name) {
    this.#take(await this.requests.ask("delete_preset", { name }, "presets"));
  }

  #take(/** @type {{ presets: Record<string, Settings> } | null} */ answer) {
    if (!answer) return;
    this.all = answer.presets;
    this.onChange();
  }
}

// Which adapter answers in this chat, beside the model's name. Drawn where the program has some.

/** @import { App, Settings } from "../common/types.d.ts" */
/** @import { PageState } from "../chat/state.js" */

import { withSetting } from "../chat/presets.js";
import { h, redraw, select } from "../common/dom.js";
import { t } from "../common/words.js";

export class AdapterMenu {
  constructor(
    /** @type {App} */ app,
    /** @type {PageState} */ state,
    /** @type {(values: Settings) => void} */ change,
  ) {
    this.app = app;
    this.state = state;
    const choose = (/** @type {string} */ name) =>
      change(withSetting(state.settings, app.settings.defaults, "adapter", name));
    this.element = select({ class: "adapter quiet", "aria-label": t("Adapter"), title: t("Adapter") }, choose, []);
  }

  draw() {
    const names = this.app.settings.adapters;
    this.element.hidden = names.length === 0;
    // One that isn't there any more answers no more.
    const chosen = names.find((name) => name === this.state.settings.adapter) ?? "";
    const options = [["", t("No adapter")], ...names.map((name) => [name, name])];
    redraw(
      this.element,
      options.map(([value, label]) => h("option", { value, selected: value === chosen }, label)),
    );
  }
}

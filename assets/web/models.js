// Which model answers: those of this machine, and others by their Hugging Face id.

import { call } from "./api.js";
import { ask, clear, h } from "./dom.js";
import { said, t } from "./words.js";

const LOOK_MS = 400;

export class Models {
  /** `page`: `say(words)`, and `changed()` once another model answers. */
  constructor(page) {
    this.page = page;
    this.element = h("label.block-field", {}, h("span", {}, t("Model")));
  }

  async load() {
    let found;
    try {
      found = await call("models");
    } catch (problem) {
      return this.page.say(problem.message);
    }
    const select = h(
      "select",
      { onchange: () => this.chosen(select.value, found) },
      found.models.map((each) =>
        h(
          "option",
          { value: each.source, selected: each.current, disabled: Boolean(each.reason), title: each.reason ?? "" },
          `${each.name} (${each.reason ? t("not usable") : said(each.size)})`,
        ),
      ),
      h("option", { value: "" }, t("Another one from Hugging Face")),
    );
    clear(this.element, h("span", {}, t("Model")), select);
  }

  async chosen(source, { models }) {
    if (source) return models.find((each) => each.source === source)?.current ? null : this.change({ source });
    const input = h("input", { "aria-label": t("Hugging Face id"), placeholder: "Qwen/Qwen3.5-2B" });
    const id = await ask(
      t("Get a model from Hugging Face"),
      [h("p", {}, t("It is downloaded once, and kept.")), input],
      [
        { label: t("Cancel"), value: null },
        { label: t("Download"), value: () => input.value.trim(), kind: "strong" },
      ],
    );
    if (id) return this.change({ source: id, is_new: true });
    return this.load();
  }

  /** Has another model loaded, and shows how far that is; a download can be stopped. */
  async change(args) {
    const bar = h("progress");
    const label = h("p", { role: "status" });
    const stop = h("button.plain", { type: "button", onclick: () => call("cancel_change") }, t("Stop the download"));
    const dialog = h(
      "dialog.dialog",
      { "aria-label": t("Another model") },
      h("h2", {}, t("Another model")),
      label,
      bar,
      args.is_new ? h("div.dialog-buttons", {}, stop) : null,
    );
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    document.querySelector("#qwen35mm .app").append(dialog);
    dialog.showModal();
    let state = { error: null };
    try {
      state = await call("change_model", args);
      while (state.busy) {
        label.textContent = said(state.label);
        if (state.share === null) bar.removeAttribute("value");
        else bar.value = state.share;
        await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
        state = await call("change_state");
      }
    } catch (problem) {
      state = { error: problem.message };
    }
    dialog.close();
    dialog.remove();
    if (!state.error) return this.page.changed();
    this.page.say(state.error);
    return this.load();
  }
}

// Tool servers in the settings: which there are, the person's own as JSON, and the tools that run without asking.

/** @import { Child, ToolServers } from "../common/types.d.ts" */
/** @import { PageState } from "./state.js" */
/** @import { Requests } from "../common/api.js" */

import { button, h, iconButton, redraw } from "../common/dom.js";
import { t } from "../common/words.js";

export class ToolPanel {
  constructor(/** @type {Requests} */ requests, /** @type {PageState} */ state, /** @type {() => void} */ changed) {
    this.requests = requests;
    this.state = state;
    this.changed = changed;
    this.element = h("fieldset", { hidden: true });
  }

  /** Asks how things are; `limit` is the field of the calls that run without asking. */
  async load(/** @type {Child} */ limit) {
    const found = await this.requests.ask("tool_servers", {}, "tool servers");
    if (found) this.#draw(found, limit);
  }

  #draw(/** @type {ToolServers} */ { servers, allowed, text }, /** @type {Child} */ limit) {
    this.state.tools = servers.map(({ name }) => name);
    this.changed();
    this.element.hidden = !servers.length && text === null;
    const forget = async (/** @type {string} */ tool) => {
      if (await this.requests.ask("forget_tool", { tool })) await this.load(limit);
    };
    redraw(
      this.element,
      h("legend", t("Tools")),
      servers.length > 0 &&
        h(
          "dl.servers",
          servers.map(({ name, runs }) => [h("dt", name), h("dd.quiet", runs)]),
        ),
      allowed.map((tool) =>
        h("div.row", h("span", t("Runs without asking: {tool}", { tool })), this.#forgetButton(tool, forget)),
      ),
      limit,
      text !== null && this.#editor(text, limit),
    );
  }

  #forgetButton(/** @type {string} */ tool, /** @type {(tool: string) => unknown} */ forget) {
    return iconButton("trash", t("Ask again before {tool}", { tool }), () => forget(tool));
  }

  #editor(/** @type {string} */ text, /** @type {Child} */ limit) {
    const box = h("textarea.code", { rows: 8, spellcheck: false, "aria-label": t("MCP servers") });
    box.value = text;
    const trouble = h("p.refused", { role: "alert" });
    const save = async () => {
      try {
        this.#draw(await this.requests.call("save_tool_servers", { text: box.value }), limit);
      } catch (problem) {
        trouble.textContent = problem instanceof Error ? problem.message : "";
      }
    };
    const hint = t(
      "JSON as other programs have it. A server is a program that can do what you can: add only what you trust.",
    );
    return h(
      "details",
      h("summary", t("MCP servers")),
      h("p.quiet", hint),
      box,
      trouble,
      button("plain", t("Save"), save),
    );
  }
}

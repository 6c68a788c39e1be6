// The model's name, which opens the list of models: on this machine, on servers, and available to download.

/** @import { Server } from "./library.d.ts" */
/** @import { App, Child, Download, Model } from "../common/types.d.ts" */
/** @import { Models } from "./models.js" */
/** @import { Requests } from "../common/api.js" */

import { button, h, redraw } from "../common/dom.js";
import { popover } from "../common/popover.js";
import { said, t } from "../common/words.js";
import { nameOf } from "./plan.js";
import { removeButton } from "./servers.js";

export class Switcher {
  constructor(/** @type {App} */ app, /** @type {Requests} */ requests, /** @type {Models} */ models) {
    this.app = app;
    this.requests = requests;
    this.models = models;
    this.element = h("div.switcher");
    const { model, is_demo, server } = app;
    const name = [h("span.name", nameOf({ name: model, is_demo })), server && h("small", server.host)];
    if (app.models) {
      const trigger = h("button.model.card.quiet", { type: "button", title: t("Change model") }, name);
      this.content = popover(trigger, t("Models"), (content) => this.draw(content));
      this.element.append(models.progress, trigger, this.content);
    } else this.element.append(h("span.model.card.quiet", { title: t("Current model") }, name));
  }

  async draw(/** @type {HTMLElement} */ content) {
    redraw(content, h("p.quiet", t("Looking for models")));
    // Opened again meanwhile, the list is the later drawing's.
    const isLate = this.requests.begin("switcher");
    const found = await this.requests.ask("models", {});
    if (isLate()) return;
    if (!found) return content.hidePopover();
    const hadFocus = content.contains(document.activeElement) || document.activeElement === document.body;
    redraw(
      content,
      section(
        t("On this machine"),
        found.models.map((model) => this.installed(model)),
      ),
      section(t("On servers"), [
        found.servers_problem !== null && h("p.refused", said(found.servers_problem)),
        ...found.servers.map((server) => this.server(server)),
        button("link", t("Add a server"), () => this.#close(() => this.models.addServer())),
      ]),
      section(
        t("Available to download"),
        found.downloads.map((model) => this.downloadable(model)),
      ),
      button("link", t("Another model from Hugging Face"), () => this.#close(() => this.models.getAnother())),
    );
    if (hadFocus) content.querySelector("button")?.focus();
  }

  installed(/** @type {Model} */ model) {
    const { source, size, reason, usable, current, is_loaded } = model;
    const note = current ? t("In use") : is_loaded ? t("Ready") : said(reason ?? "");
    const choose = () => this.#close(() => current || this.models.propose({ source }, model));
    return line(nameOf(model), said(size), note, choose, { "aria-current": current && "true", disabled: !usable });
  }

  server(/** @type {Server} */ server) {
    const { id, name, host, current, kept } = server;
    const choose = () => this.#close(() => current || this.models.change({ server: id }));
    const note = current ? t("In use") : "";
    const attributes = { "aria-current": current && "true" };
    return h(
      "div.server",
      line(name, host, note, choose, attributes),
      kept && removeButton(this.requests, server, () => this.models.load()),
    );
  }

  downloadable(/** @type {Download} */ download) {
    const { source, size, fit } = download;
    const choose = () => this.#close(() => this.models.propose({ source, is_new: true }));
    return line(source, said(size), said(fit), choose, {});
  }

  #close(/** @type {() => unknown} */ then) {
    this.content?.hidePopover();
    then();
  }
}

const section = (/** @type {string} */ title, /** @type {Child[]} */ lines) =>
  lines.length > 0 && h("section", { "aria-label": title }, h("h3.quiet", title), lines);

/**
 * A model, with its size and what is to be said of it.
 * @param {string} name
 * @param {string} size
 * @param {string} note
 * @param {() => unknown} onclick
 * @param {object} attributes
 */
function line(name, size, note, onclick, attributes) {
  const words = h("span.words", h("span.name", name), note && h("small", note));
  return h("button.row", { type: "button", onclick, ...attributes }, words, h("span.quiet", size));
}

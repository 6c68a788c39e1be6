// Servers whose models can be chosen: listed, added by an address and a key, forgotten.

/** @import { ModelChange, Server, ServerInfo } from "./library.d.ts" */
/** @import { Requests } from "../common/api.js" */

import { askToDelete, button, h, iconButton, redraw, showDialog } from "../common/dom.js";
import { said, t } from "../common/words.js";

/**
 * Asks for a server until there is one that answers, and has its model answer.
 * @param {Requests} requests
 * @param {(change: ModelChange) => unknown} change
 */
export function addServer(requests, change) {
  const address = h("input", { required: true, placeholder: "http://localhost:8000/v1", spellcheck: false });
  const key = h("input", { type: "password", autocomplete: "off", placeholder: t("none") });
  const model = h("select");
  const models = h("label.block-field", { hidden: true }, h("span", t("Model")), model);
  const trouble = h("p.refused", { role: "alert" });
  const take = h("button.strong", { type: "submit" }, t("Add"));
  const leave = button("plain", t("Cancel"), () => dialog.close());
  const form = h(
    "form.server-form",
    h("h2", t("Add a server")),
    h("p.quiet", t("Any server with an OpenAI-compatible API: vLLM, llama-server, Ollama or qwen35mm serve.")),
    h("label.block-field", h("span", t("Address")), address),
    h("label.block-field", h("span", t("API key")), key),
    models,
    trouble,
    h("div.dialog-buttons.row.wrap.end", leave, take),
  );
  const dialog = h("dialog.dialog.card", { "aria-label": t("Add a server") }, form);
  // Another address has other models.
  address.addEventListener("input", () => {
    models.hidden = true;
    redraw(model);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    trouble.textContent = t("Contacting the server");
    take.disabled = true;
    const asked = { address: address.value.trim(), key: key.value.trim() || null, model: model.value || null };
    const found = await requests.call("add_server", asked).catch((problem) => {
      trouble.textContent = problem.message;
      return null;
    });
    take.disabled = false;
    if (!found || !dialog.open) return;
    if (found.server) {
      dialog.close();
      change({ server: found.server });
      return;
    }
    trouble.textContent = t("The server has several models. Choose one.");
    redraw(
      model,
      found.names.map((name) => h("option", { value: name }, name)),
    );
    models.hidden = false;
    model.focus();
  });
  showDialog(dialog);
  address.focus();
}

/**
 * The button that removes a server, and its key.
 * @param {Requests} requests
 * @param {Server} server
 * @param {() => unknown} onRemoved
 */
export function removeButton(requests, { id, name, host }, onRemoved) {
  return iconButton("trash", t("Remove {name}", { name }), async () => {
    const words = t("Its address and key are deleted here. Chats stay.");
    if (!(await askToDelete(t("Remove {name} on {host}?", { name, host }), words))) return;
    await requests.ask("remove_server", { server: id });
    await onRemoved();
  });
}

/** Where a server's model answers, and what it can't do; nothing of one on this machine. */
export function serverNotes(/** @type {ServerInfo | null} */ server) {
  if (!server) return null;
  return h(
    "div.server-notes.quiet",
    h("p", t("Runs on {host}", { host: server.host })),
    server.notes.length > 0 &&
      h(
        "ul",
        server.notes.map((note) => h("li", said(note))),
      ),
  );
}

/** What is said of numbers of tokens that aren't exact. */
export const estimated = () => t("These are estimates: the server doesn't count tokens.");

// Which model answers: those of this machine, and others by their Hugging Face id.

/** @import { App, ChangeState, Chat, Model, ModelChange, ModelsFound } from "../common/types.d.ts" */
/** @import { PageState } from "../chat/state.js" */
/** @import { Requests } from "../common/api.js" */
/** @import { Toasts } from "../common/toasts.js" */

import { isAway } from "../chat/connection.js";
import { ask, askText, button, cancel, h, icon, redraw, select, setProgress, showDialog } from "../common/dom.js";
import { said, t } from "../common/words.js";
import { askSettings, nameOf } from "./plan.js";
import { addServer, serverNotes } from "./servers.js";

const LOOK_MS = 400;
// The chat in which a model was chosen last: the page reloads for that, and it isn't changed back.
const CHOSEN_IN = "qwen35mm.chosen-in";
// The prefix of a server's id, among folders and Hugging Face ids. Alone, it means a new server.
const SERVER = "server:";

/**
 * What the model of an answer is called, among the models that are known here.
 * @param {{ name: string, is_demo: boolean }[]} known
 * @param {string | null} name
 */
export const calledAmong = (known, name) => {
  const demo = known.find((model) => model.is_demo && model.name === name);
  return demo ? nameOf(demo) : name;
};

/** The options of a choice among all models: `changeTo` says what each value means. */
export const modelOptions = (/** @type {ModelsFound} */ { models, servers }) => [
  models.map((model) => {
    const { source, current, reason, usable, size } = model;
    const attributes = { value: source, selected: current, disabled: !usable, title: said(reason ?? "") };
    return h("option", attributes, `${nameOf(model)} (${usable ? said(size) : t("not usable")})`);
  }),
  servers.map(({ id, name, host, current }) =>
    h("option", { value: SERVER + id, selected: current }, `${name} (${host})`),
  ),
];

/** The change that takes what was chosen; null where it answers now. @returns {ModelChange | null} */
export function changeTo(/** @type {string} */ chosen, /** @type {ModelsFound} */ { models, servers }) {
  const server = servers.find(({ id }) => SERVER + id === chosen);
  if (server) return server.current ? null : { server: server.id };
  return models.find(({ source }) => source === chosen)?.current ? null : { source: chosen };
}

export class Models {
  /** @type {ModelsFound} */
  #found = { models: [], servers: [], servers_problem: null, downloads: [] };

  /**
   * @param {App} app
   * @param {Requests} requests
   * @param {Toasts["say"]} say
   * @param {PageState} state
   */
  constructor(app, requests, say, state) {
    this.app = app;
    this.state = state;
    this.requests = requests;
    this.say = say;
    const { model: name, is_demo, server, taken, context_length } = app;
    // The one that answers; the others come once they are known, and move nothing.
    this.select = select({}, (chosen) => this.choose(chosen), [h("option", nameOf({ name, is_demo }))]);
    this.element = h(
      "div.models",
      h("label.block-field", h("span", t("Model")), this.select),
      serverNotes(server),
      taken !== null && h("small", said(taken)),
      // The context stays as it is.
      server === null && button("plain", t("Context and memory"), () => this.propose({ context_length })),
    );
    // Opens the download's dialog again.
    const title = t("Show the download");
    this.progress = h("button.card.quiet", { type: "button", title, "aria-label": title, hidden: true });
  }

  async load() {
    const found = await this.requests.ask("models", {}, "models");
    if (!found) return;
    this.#found = found;
    const another = h("option", { value: "" }, t("Another model from Hugging Face"));
    const onServer = h("option", { value: SERVER }, t("A model on a server"));
    redraw(this.select, modelOptions(found), another, onServer);
  }

  /** What the model of an answer is called here; null where that isn't known. */
  called(/** @type {string | null} */ name) {
    const { model, is_demo } = this.app;
    return calledAmong([{ name: model, is_demo }, ...this.#found.models], name);
  }

  /** The button that leads from the practice model to a real one; nothing without one that fits. */
  offer() {
    if (!this.app.suggestion) return null;
    const { name, source, size, fit, is_new } = this.app.suggestion;
    const words = is_new ? t("Get a real model") : t("Use {name}", { name });
    const go = () => this.propose({ source, is_new }, { name, is_demo: false, is_offered: false, is_loaded: false });
    return button("strong", [is_new && icon("download"), h("span", `${words} · ${said(size)} · ${said(fit)}`)], go);
  }

  /** Switches to what was chosen, or asks for what is missing; then shows the old or the new choice. */
  async choose(/** @type {string} */ chosen) {
    if (chosen === SERVER) {
      this.addServer();
      return this.load();
    }
    if (!chosen) return this.getAnother();
    const change = changeTo(chosen, this.#found);
    const model = this.#found.models.find(({ source }) => source === chosen);
    return change && this.propose(change, model);
  }

  /** Has a chat that was opened answered by the model that it used; asks where another one would have to leave. */
  async followChat(/** @type {Chat} */ { id, messages }) {
    const used = messages.findLast((message) => message.role === "assistant")?.model;
    const { app } = this;
    if (sessionStorage.getItem(CHOSEN_IN) === id) return;
    sessionStorage.removeItem(CHOSEN_IN);
    // Where one was replaced by another on the page, nobody expects the old one.
    if (!used || used === app.model || !app.has_several || app.server || !this.progress.hidden) return;
    const found = await this.requests.ask("models", {}, "models of a chat");
    const offered = found?.models.filter(({ is_offered }) => is_offered) ?? [];
    if (!found || this.state.chat.id !== id) return;
    const model = offered.find(({ name }) => name === used);
    const server = found.servers.find(({ name }) => name === used);
    const name = calledAmong(offered, used) ?? used;
    const use = () => this.change(model ? { source: model.source } : { server: server?.id }, true);
    if (model && !model.displaces) await use();
    else if (model || server)
      this.say(t("This chat used {name}.", { name }), "note", { label: t("Use {name}", { name }), run: use });
    else
      this.say(
        t("This chat used {name}, which isn't here any more. {model} answers now.", {
          name,
          model: this.called(app.model) ?? "",
        }),
        "note",
      );
  }

  addServer() {
    addServer(this.requests, (change) => this.change(change));
  }

  async getAnother() {
    const field = { "aria-label": t("Hugging Face id"), placeholder: "Qwen/Qwen3.5-2B" };
    const words = h("p", t("It is downloaded once and kept."));
    const id = await askText(t("Download from Hugging Face"), words, field, t("Continue"));
    return id ? this.propose({ source: id, is_new: true }) : this.load();
  }

  /**
   * Makes a change once the person has seen what memory it takes, and agrees. A server's model takes none, and one that
   * the program has in hand was planned before.
   * @param {ModelChange} change
   * @param {Pick<Model, "name" | "is_demo" | "is_offered" | "is_loaded">} [model]
   */
  async propose(change, model) {
    if (change.server || model?.is_offered) return this.change(change, model?.is_offered, model?.is_loaded);
    const name = model ? nameOf(model) : (change.source ?? "");
    // One at a time.
    if (change.is_new && !this.progress.hidden) return this.progress.click();
    const stay = this.state.chat.temporary ? t("This temporary chat ends.") : t("This chat and your draft stay.");
    const kept = h("p", t("It is downloaded once and kept."), " ", stay);
    const texts = change.is_new
      ? { title: t("Download {name} from Hugging Face?", { name }), words: kept, label: t("Download") }
      : change.source
        ? { title: t("Use {name}", { name }), words: h("p", stay), label: t("Load") }
        : { title: t("Context and memory"), label: t("Apply") };
    const meant = await askSettings(this.requests, change, texts);
    return meant ? this.change(meant, meant.is_new, "words" in texts) : this.load();
  }

  /**
   * Loads another model and shows the progress; an answer in progress is stopped first, if the person agrees.
   * Resolves to whether the page reloads.
   * @param {ModelChange} change
   * @param {boolean} [goOn] whether answers in progress go on
   * @param {boolean} [isKnown] whether the person knows that a temporary chat ends, or it doesn't
   */
  async change(change, goOn = change.is_new, isKnown = false) {
    if (this.state.chat.temporary && !isKnown && !(await askToEnd())) return this.load();
    const answers = goOn ? [] : [...this.state.live.keys()];
    if (answers.length && !(await askToStop())) return this.load();
    await Promise.all(answers.map((node) => this.requests.ask("stop", { node })));
    const state = await this.requests.ask("change_model", change);
    return this.follow(state, change);
  }

  /**
   * Shows a change until it ends. A download can be hidden, then the top line shows it, and cancelled.
   * @param {ChangeState | null} state
   * @param {ModelChange | null} change null where it began before this page did
   */
  async follow(state, change) {
    const bar = h("progress");
    const label = h("h2", t("Changing the model"));
    const detail = h("p.quiet");
    const stop = button("plain", "", () => this.requests.ask("cancel_change", {}));
    const hide = button("strong", t("Keep chatting"), () => dialog.close());
    const foot = h("div.dialog-buttons.row.wrap.end", stop, hide);
    const title = h("div", { role: "status" }, label);
    const dialog = h("dialog.dialog.card", { "aria-label": t("Changing the model") }, title, bar, detail, foot);
    dialog.addEventListener("cancel", (event) => foot.hidden && event.preventDefault());
    this.progress.onclick = () => showDialog(dialog);
    if (state?.busy && (change || !state.is_download)) showDialog(dialog);
    while (state?.busy) {
      // Only a new text is spoken.
      if (label.textContent !== said(state.label)) label.textContent = said(state.label);
      detail.textContent = said(state.detail);
      setProgress(bar, state.share);
      hide.hidden = this.progress.hidden = !state.is_download;
      foot.hidden = !state.is_download && !state.is_waiting;
      stop.textContent = state.is_download ? t("Cancel download") : t("Cancel");
      redraw(this.progress, icon("download"), said({ share: state.share ?? 0 }));
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      const asked = this.requests.call("change_state", {});
      state = await asked.catch((problem) => {
        if (!isAway(problem)) return this.requests.told(asked);
        // A program that is away for a moment goes on with it. Nobody is held here until then.
        if (foot.hidden) dialog.close();
        return state;
      });
    }
    const wasSeen = dialog.open;
    this.progress.hidden = true;
    dialog.close();
    if (state?.is_cancelled) {
      await this.load();
      return false;
    }
    if (state && !state.error) {
      if (this.state.chat.id) sessionStorage.setItem(CHOSEN_IN, this.state.chat.id);
      // Somebody who goes on with a chat that a reload would end isn't interrupted.
      if (wasSeen || !this.state.chat.temporary) location.reload();
      else this.say(t("The model is ready."), "good", { label: t("Reload page"), run: () => location.reload() });
      return true;
    }
    const again = change?.is_new ? { label: t("Resume download"), run: () => this.change(change) } : null;
    this.say(said(state?.error ?? ""), "bad", again);
    await this.load();
    return false;
  }
}

function askToEnd() {
  const go = { label: t("Continue"), kind: "strong", value: () => true };
  return ask(t("Changing the model"), h("p", t("This temporary chat ends.")), [cancel(), go]);
}

function askToStop() {
  const words = h("p", t("An answer is still being written. It keeps what it has so far."));
  return ask(t("Stop the answer?"), words, [
    cancel(),
    { label: t("Stop and change"), kind: "strong", value: () => true },
  ]);
}

// Answers to the same question beside each other: of two models, or with other settings. They are branches of the
// conversation, so a comparison is there whenever it is opened again.

/** @import { Answer, Choice, Field, Message, ModelChange, News } from "../common/types.d.ts" */
/** @import { Reply, Settings, Switch } from "../common/types.d.ts" */
/** @import { Models } from "../model/models.js" */
/** @import { MessageDesk } from "./message.js" */
/** @import { Presets } from "./presets.js" */
/** @import { Needs } from "./settings.js" */
/** @import { Requests } from "../common/api.js" */

import { ask, button, cancel, h, icon, iconButton, redraw, select, showDialog } from "../common/dom.js";
import { number, said, t } from "../common/words.js";
import { changeTo, modelOptions } from "../model/models.js";
import { allow, Plan } from "../model/plan.js";
import { copy } from "./blocks.js";
import { AnswerRow } from "./message.js";
import { SettingsPanel } from "./settings.js";

// What to ask once another model is loaded; the page reloads for that.
const ASKED = "qwen35mm.compare";

/**
 * The names of what two answers were made with differently; none where that isn't known of both.
 * @param {Settings | null} one
 * @param {Settings | null} other
 */
export function differing(one, other) {
  if (!one || !other) return [];
  const names = new Set([...Object.keys(one), ...Object.keys(other)]);
  return [...names].filter((name) => (one[name] ?? null) !== (other[name] ?? null));
}

/** An answer in a comparison. It can be chosen; nothing else can be done to it here. */
class ComparedRow extends AnswerRow {
  /** @override */
  draw(/** @type {Answer} */ message) {
    this.update(message);
    const copyText = iconButton("copy", t("Copy"), ({ currentTarget }) => copy(currentTarget, message.text));
    const cost = this.cost(message)?.at(-1);
    if (cost) cost.hidden = false;
    redraw(this.tools, message.status !== "running" && [copyText, cost]);
  }

  /** Two at one time can't be followed. @override */
  readOut() {}
}

/** Settings for one answer, and a model where one can be chosen. */
class OwnSettings extends SettingsPanel {
  /** The model change that comes first. @type {ModelChange | null} */
  change = null;
  /** Whether answers go on meanwhile: see Models. */
  goesOn = false;

  constructor(/** @type {Needs} */ needs, /** @type {Requests} */ requests) {
    super(needs);
    this.requests = requests;
  }

  /** @override */
  draw() {
    this.drawPresets();
    redraw(this.rest, this.systemPrompt(), this.switches(), this.numbers("sampling"), this.numbers("length"));
    redraw(this.body, this.presetRow, this.first(), this.advanced);
  }

  /** Asks the person; null where they have changed their mind. @returns {Promise<Settings | null>} */
  async ask() {
    // Of the model that is there now. The context stays as it is.
    const { context_length } = this.app;
    const [listed, now] = this.models
      ? await Promise.all([
          this.requests.ask("models", {}),
          this.requests.call("plan", { context_length }).catch(() => null),
        ])
      : [null, null];
    const model = listed && this.model(listed, now?.weights ?? []);
    const body = h("div.own-settings", model, this.body);
    const begin = { label: t("Answer"), kind: "strong", value: () => this.values };
    return ask(t("Another answer to compare"), body, [cancel(), begin]);
  }

  /** The model, or the format of its weights, and the memory that a change takes. */
  model(/** @type {Reply<"models">} */ found, /** @type {Choice[]} */ formats) {
    const { context_length } = this.app;
    const plan = new Plan(this.requests, (found) => {
      if (!plan.element.hidden) allow(plan.element, Boolean(found?.fits));
    });
    const hint = h("p.quiet", t("The model is loaded first, for all chats."));
    const loading = h("div", { hidden: true }, hint, plan.element);
    const take = (/** @type {ModelChange | null} */ change) => {
      this.change = change;
      loading.hidden = !change;
      this.goesOn = found.models.some(({ source, is_offered }) => is_offered && source === change?.source);
      const isPlanned = change && !change.server && !this.goesOn;
      plan.element.hidden = !isPlanned;
      allow(plan.element, true);
      if (isPlanned) plan.look(change);
    };
    const weights = formats.map(({ value, label, chosen }) =>
      h("option", { value: chosen ? "" : value, selected: chosen }, said(label)),
    );
    const takeWeights = (/** @type {string} */ chosen) => take(chosen ? { weights: chosen, context_length } : null);
    const weightsRow = h("label.block-field", h("span", t("Weights")), select({}, takeWeights, weights));
    weightsRow.hidden = weights.length < 2;
    const takeModel = (/** @type {string} */ chosen) => {
      const change = changeTo(chosen, found);
      weightsRow.hidden = Boolean(change) || weights.length < 2;
      take(change);
    };
    const choice = select({}, takeModel, modelOptions(found));
    return [h("label.block-field", h("span", t("Model")), choice), weightsRow, loading];
  }
}

export class Comparison {
  /** All answers to the question. @type {Answer[]} */
  #answers = [];
  /** The ids of the two that are seen. @type {string[]} */
  #seen = [];
  /** @type {Map<string, ComparedRow>} */
  #rows = new Map();
  /** Answers that ended since the last comparison was requested. @type {Map<string, News>} */
  #ended = new Map();
  /** The last message that was shown before, which is returned to. @type {string | undefined} */
  #before;
  #isGoingOn = false;

  constructor(/** @type {MessageDesk} */ desk, /** @type {Models} */ models, /** @type {Presets} */ presets) {
    this.desk = desk;
    this.requests = desk.requests;
    this.state = desk.state;
    this.models = models;
    this.presets = presets;
    this.question = h("p.question", { dir: "auto" });
    this.sides = h("div.sides");
    const close = iconButton("close", t("Close comparison"), () => this.dialog.close());
    this.another = button("plain", [icon("plus"), t("Another answer")], () => this.ask(this.#answers[0]));
    const head = h("header.row", h("h2", t("Compare answers")), this.another, close);
    const labels = { "aria-label": t("Compare answers") };
    this.dialog = h("dialog.dialog.card.comparison", labels, head, this.question, this.sides);
    this.dialog.addEventListener("close", () => this.#closed());
  }

  /** Shows an answer beside another one to its question; where there is none yet, one is asked for. */
  async open(/** @type {Answer} */ answer) {
    this.#before = this.state.chat.messages.at(-1)?.id;
    this.#ended.clear();
    if (!(await this.#load(answer.id))) return;
    if (this.#answers.length < 2) return this.ask(answer);
    const others = this.#answers.filter(({ id }) => id !== answer.id);
    const other = others.at(-1);
    if (other) this.#show(answer.id, other.id);
  }

  /** Asks how to answer the question once more, and does it. */
  async ask(/** @type {Answer} */ answer) {
    const { models, presets, state } = this;
    const none = () => {};
    const needs = { app: this.desk.app, preferences: state.preferences, models, presets };
    const form = new OwnSettings({ ...needs, change: none, prefer: none, close: none }, this.requests);
    form.show(state.settings);
    const own = await form.ask();
    if (!own) return;
    const asked = { conversation: this.state.chat.id, answer: answer.id, before: this.#before, own };
    if (!form.change) return this.#begin(asked);
    sessionStorage.setItem(ASKED, JSON.stringify(asked));
    if (!(await models.change(form.change, form.goesOn))) sessionStorage.removeItem(ASKED);
  }

  /** Continues a comparison for which another model was loaded. */
  async resume() {
    const asked = JSON.parse(sessionStorage.getItem(ASKED) ?? "null");
    sessionStorage.removeItem(ASKED);
    if (!asked || asked.conversation !== this.state.chat.id) return;
    this.#before = asked.before;
    await this.#begin(asked);
  }

  /**
   * Has the question answered once more, and shows both.
   * @param {{ answer: string, own: Settings }} asked
   */
  async #begin({ answer, own }) {
    this.#ended.clear();
    if (!(await this.#load(answer))) return;
    const [{ parent }] = this.#answers;
    if (!(await this.state.answer(parent, own))) return;
    const begun = this.state.chat.messages.at(-1)?.id;
    if (begun && (await this.#load(begun))) this.#show(this.#seen[0] ?? answer, begun);
  }

  async #load(/** @type {string} */ node) {
    const args = { conversation: this.state.chat.id, node };
    const found = await this.requests.ask("answers", args, "comparison");
    if (!found) return false;
    this.#answers = found.answers;
    for (const { id } of found.answers) {
      const news = this.state.live.get(id) ?? this.#ended.get(id);
      if (news) this.#take(news);
    }
    return true;
  }

  /** What is new of an answer. */
  update(/** @type {News} */ news) {
    if (news.status !== "running") this.#ended.set(news.id, news);
    if (!this.dialog.open || !this.#take(news)) return;
    const row = this.#rows.get(news.id);
    if (news.status === "running") row?.update(news);
    else this.#draw();
  }

  #take(/** @type {News} */ news) {
    const answer = this.#answers.find(({ id }) => id === news.id);
    return answer && Object.assign(answer, news);
  }

  #show(/** @type {string[]} */ ...ids) {
    // In the order in which they came.
    this.#seen = this.#answers.map(({ id }) => id).filter((id) => ids.includes(id));
    const question = this.state.chat.messages.find(({ id }) => id === this.#answers[0].parent);
    this.question.textContent = question?.text ?? "";
    if (!this.dialog.isConnected) showDialog(this.dialog);
    this.#draw();
  }

  #draw() {
    const seen = this.#seen.map((id) => this.#answers.find((answer) => answer.id === id)).filter((each) => !!each);
    const isRunning = this.#answers.some(({ status }) => status === "running");
    this.another.disabled = isRunning;
    const held = this.#pickers().indexOf(/** @type {HTMLSelectElement} */ (document.activeElement));
    redraw(
      this.sides,
      seen.map((answer, at) => this.#side(answer, seen[1 - at], isRunning)),
    );
    // An answer may end while another one is looked for.
    this.#pickers()[held]?.focus();
  }

  #side(/** @type {Answer} */ answer, /** @type {Answer} */ other, /** @type {boolean} */ isRunning) {
    const row = this.#rows.get(answer.id) ?? new ComparedRow(answer, this.desk);
    this.#rows.set(answer.id, row);
    row.show({ ...answer, kept: true });
    const names = differing(answer.settings, other.settings);
    const goOn = button("strong", [icon("check"), t("Continue with this answer")], () => this.#goOn(answer), {
      disabled: isRunning,
    });
    return h(
      "section.side.card",
      { "aria-label": t("Answer {n}", { n: this.#answers.indexOf(answer) + 1 }) },
      h(
        "header",
        h("div.row", h("strong", this.models.called(answer.model) ?? t("Unknown model")), this.#picker(answer, other)),
        h(
          "dl.made",
          names.map((name) => h("div", h("dt", this.#label(name)), h("dd", shown(answer.settings?.[name])))),
        ),
        !names.length && h("p.quiet", sameness(answer, other)),
      ),
      row.element,
      h("div.dialog-buttons.row.wrap.end", goOn),
    );
  }

  #pickers() {
    return [.../** @type {NodeListOf<HTMLSelectElement>} */ (this.sides.querySelectorAll(".side > header select"))];
  }

  /** Which of several answers stands here; the other side's can't. */
  #picker(/** @type {Answer} */ answer, /** @type {Answer} */ other) {
    const words = (/** @type {Answer} */ { model }, /** @type {number} */ at) =>
      `${at + 1}/${this.#answers.length}${model ? ` · ${this.models.called(model)}` : ""}`;
    if (this.#answers.length < 3)
      return h("span.quiet", `${this.#answers.indexOf(answer) + 1}/${this.#answers.length}`);
    const options = this.#answers.map((each, at) =>
      h("option", { value: each.id, selected: each.id === answer.id, disabled: each.id === other.id }, words(each, at)),
    );
    const pick = (/** @type {string} */ id) => {
      this.#show(id, other.id);
      this.#pickers()[this.#seen.indexOf(id)].focus();
    };
    return select({ "aria-label": t("Choose an answer") }, pick, options);
  }

  #label(/** @type {string} */ name) {
    const { fields, switches } = this.desk.app.settings;
    /** @type {Field | Switch | undefined} */
    const field = fields[name] ?? switches[name];
    if (field) return said(field.label);
    const others = {
      thinking: t("Think first"),
      system: t("System prompt"),
      adapter: t("Adapter"),
      tools: t("Tools"),
      weights: t("Weights"),
    };
    // An earlier version's, perhaps.
    return others[/** @type {keyof typeof others} */ (name)] ?? name;
  }

  #goOn(/** @type {Message} */ { id }) {
    this.#isGoingOn = true;
    this.dialog.close();
    this.state.showBranch(id);
  }

  /** Shows what was shown before, unless an answer was chosen or is still being written. */
  #closed() {
    const isBusy = this.#isGoingOn || this.#answers.some(({ status }) => status === "running");
    const isElsewhere = this.#before && this.state.chat.messages.at(-1)?.id !== this.#before;
    if (!isBusy && isElsewhere && this.#before) this.state.showBranch(this.#before);
    this.#isGoingOn = false;
    this.#rows.clear();
    this.#seen = [];
  }
}

function shown(/** @type {Settings[string] | undefined} */ value) {
  if (typeof value === "number") return number(value);
  if (typeof value === "boolean") return value ? t("yes") : t("no");
  return value ?? t("none");
}

function sameness(/** @type {Answer} */ one, /** @type {Answer} */ other) {
  if (one.edited || other.edited) return one.edited ? t("Edited") : "";
  if (!one.settings || !other.settings) return t("Its settings are unknown.");
  return one.model === other.model ? t("Same model and settings") : t("Same settings");
}

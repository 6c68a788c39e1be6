// What is done with all selected captions at once: a card with its form and a preview of the changes.

/** @import { BulkEdit, Planned } from "./review.d.ts" */

import { button, h, redraw, select } from "../common/dom.js";
import { t } from "../common/words.js";
import { key } from "./captioned.js";

const PREVIEW_AFTER_MS = 300;

/**
 * @typedef {object} Doing what the card has the page do
 * @property {() => unknown} accept
 * @property {() => unknown} all selects everything that was found
 * @property {() => unknown} clear
 * @property {(edit: BulkEdit) => Promise<Planned | null>} plan null if it can't be
 * @property {(planned: Planned) => unknown} carryOut
 */

export class Bulk {
  #num = 0;
  #later = 0;
  #num_plans = 0;
  /** @type {Planned | null} */
  #planned = null;

  constructor(/** @type {Doing} */ doing) {
    this.doing = doing;
    const changed = () => this.#changed();
    const field = (/** @type {string} */ label, attributes = {}) =>
      h("input", {
        type: "text",
        "aria-label": label,
        placeholder: label,
        dir: "auto",
        oninput: changed,
        ...attributes,
      });
    const box = (/** @type {string} */ label) => {
      const input = h("input", { type: "checkbox", onchange: changed });
      return { input, label: h("label.row", input, label) };
    };
    this.find = field(t("Find"));
    this.by = field(t("Replace with"));
    this.tags = field(t("Tags, with commas between them"));
    this.regex = box(t("Regular expression"));
    this.ignoreCase = box(t("Ignore case"));
    this.words = box(t("Whole words"));
    this.last = box(t("At the end"));
    const options = [
      h("option", { value: "replace" }, t("Find and replace")),
      h("option", { value: "add" }, t("Add tags")),
      h("option", { value: "remove" }, t("Remove tags")),
      h("option", { value: "sort" }, t("Sort tags")),
      h("option", { value: "deduplicate" }, t("Remove duplicate tags")),
    ];
    this.action = select({ "aria-label": t("Action") }, () => this.#choose(), options);
    this.replacing = h(
      "div.fields",
      this.find,
      this.by,
      h("div.row.wrap", this.regex.label, this.ignoreCase.label, this.words.label),
    );
    this.tagging = h("div.fields", this.tags, this.last.label);
    this.preview = h("div.preview", { role: "status" });
    this.carryOut = button("strong", "", () => {}, { type: "submit" });
    this.title = h("strong");
    this.acceptButton = button("strong", t("Accept selected"), () => this.doing.accept());
    this.editButton = button("plain", t("Edit selected"), () => this.open());
    this.bar = h(
      "div.row.wrap",
      this.acceptButton,
      this.editButton,
      button("plain", [t("Select all"), key("Ctrl+A")], () => this.doing.all()),
      button("plain", [t("Clear selection"), key("Esc")], () => this.doing.clear()),
    );
    const onsubmit = (/** @type {SubmitEvent} */ event) => {
      event.preventDefault();
      this.#submit();
    };
    const onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    };
    this.form = h(
      "form.bulk",
      { hidden: true, onsubmit, onkeydown },
      this.action,
      this.replacing,
      this.tagging,
      this.preview,
      h(
        "div.row.wrap",
        this.carryOut,
        button("plain", t("Cancel"), () => this.close()),
      ),
    );
    this.element = h("section.card.selection", { hidden: true, "aria-label": t("Selection") });
    this.element.append(this.title, this.bar, this.form);
    this.#choose();
  }

  /** How many captions are selected; `changed` if they aren't the same ones or have changed. */
  show(/** @type {number} */ num, /** @type {boolean} */ changed) {
    this.#num = num;
    this.element.hidden = !num;
    this.title.textContent = t("{n} selected", { n: num });
    if (!num) this.close();
    else if (changed && !this.form.hidden) this.#changed();
  }

  open() {
    this.form.hidden = false;
    this.bar.hidden = true;
    this.#choose();
    this.action.focus();
  }

  close() {
    clearTimeout(this.#later);
    this.#num_plans++;
    if (this.form.contains(document.activeElement)) /** @type {HTMLElement} */ (document.activeElement).blur();
    this.form.hidden = true;
    this.bar.hidden = false;
  }

  #choose() {
    const { value } = this.action;
    this.replacing.hidden = value !== "replace";
    this.tagging.hidden = value !== "add" && value !== "remove";
    this.last.label.hidden = value !== "add";
    this.#changed();
  }

  #changed() {
    clearTimeout(this.#later);
    this.#num_plans++;
    this.#draw(null);
    if (this.#isWhole()) this.#later = window.setTimeout(() => this.#plan(), PREVIEW_AFTER_MS);
  }

  /** Whether the form says what to do. */
  #isWhole() {
    const needed = { replace: this.find.value, add: this.tags.value.trim(), remove: this.tags.value.trim() };
    return this.#num > 0 && (needed[/** @type {keyof typeof needed} */ (this.action.value)] ?? "x") !== "";
  }

  async #plan() {
    clearTimeout(this.#later);
    const mine = ++this.#num_plans;
    const planned = await this.doing.plan({
      action: /** @type {BulkEdit["action"]} */ (this.action.value),
      find: this.find.value,
      by: this.by.value,
      tags: this.tags.value,
      regex: this.regex.input.checked,
      ignore_case: this.ignoreCase.input.checked,
      words: this.words.input.checked,
      last: this.last.input.checked,
    });
    if (mine === this.#num_plans) this.#draw(planned);
  }

  /** Makes the changes that are shown; shows them first where they aren't yet. */
  async #submit() {
    if (!this.#planned && this.#isWhole()) await this.#plan();
    else if (this.#planned?.num) {
      const planned = this.#planned;
      this.close();
      this.doing.carryOut(planned);
    }
  }

  #draw(/** @type {Planned | null} */ planned) {
    this.#planned = planned;
    const num = planned?.num ?? 0;
    this.carryOut.textContent = planned ? t("Change {n} {n|caption|captions}", { n: num }) : t("Preview");
    this.carryOut.disabled = planned ? !num : !this.#isWhole();
    if (!planned) return void redraw(this.preview);
    const left = planned.others && t("{n} {n|is a sentence|are sentences} and {n|stays|stay}", { n: planned.others });
    const more = num > planned.shown.length && t("{n} more", { n: num - planned.shown.length });
    redraw(
      this.preview,
      !num && h("p", t("Nothing would change")),
      planned.shown.map(({ name, parts }) => h("div", h("p.quiet", name), h("p", { dir: "auto" }, parts.map(drawn)))),
      h("p.quiet", [more, left].filter(Boolean).join(", ")),
    );
  }
}

/** A part of a diff; a screen reader says what is removed and added. */
const drawn = (/** @type {[string, string, string]} */ [kept, before, after]) => [
  kept,
  before && h("del", before),
  after && h("ins", after),
];

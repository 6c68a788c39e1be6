// How much memory a model will take, shown before it is loaded, and the settings that decide it.

/** @import { Choice, Model, ModelChange, PlanFound } from "./library.d.ts" */
/** @import { Requests } from "../common/api.js" */
/** @import { Child } from "../common/types.d.ts" */

import { ask, button, cancel, h, redraw, select } from "../common/dom.js";
import { number, said, t } from "../common/words.js";

const WAIT_MS = 300;
// Fewer tokens hold no conversation.
const SHORTEST = 256;

/** The bundled model is known by what it is for. */
export const nameOf = (/** @type {Pick<Model, "name" | "is_demo">} */ { name, is_demo }) =>
  is_demo ? t("Practice model") : name;

const size = (/** @type {number} */ bytes) => said({ bytes });
const sum = (/** @type {number[]} */ values) => values.reduce((all, each) => all + each, 0);

/** The plan of a change: drawn, and in words. */
export class Plan {
  /**
   * @param {Requests} requests
   * @param {(plan: PlanFound | null) => unknown} onPlan told of each, and that none is known for now
   * @param {(settings: ModelChange) => unknown} [take] what would fit; it isn't offered without this
   */
  constructor(requests, onPlan, take) {
    this.requests = requests;
    this.onPlan = onPlan;
    this.take = take;
    this.bar = h("div.memory-bar", { "aria-hidden": "true" });
    // Told again when it has changed.
    this.words = h("div", { role: "status" });
    this.parts = h("ul.memory-parts", { role: "list" });
    this.details = h("details", h("summary", t("Advanced")), this.parts);
    this.element = h("div.plan", this.words, this.bar, this.details);
  }

  async look(/** @type {ModelChange} */ change) {
    this.onPlan(null);
    this.element.classList.add("old");
    if (!this.bar.firstChild) redraw(this.words, h("p.quiet", t("Checking the model")));
    try {
      this.draw(await this.requests.call("plan", change, "plan"));
    } catch (problem) {
      if (!(problem instanceof Error)) throw problem;
      // A later one is on its way.
      if (!problem.message) return;
      redraw(this.bar);
      redraw(this.parts);
      redraw(this.words, h("p.refused", problem.message));
    }
    this.element.classList.remove("old");
  }

  draw(/** @type {PlanFound} */ plan) {
    const { parts, memory, fits, leaving, largest_context: longest, suggestion } = plan;
    const names = {
      weights: t("Weights"),
      kv: t("KV cache"),
      states: t("States of {n} {n|reply|replies}", { n: plan.slots }),
      work: t("Working memory"),
      program: t("Tokenizer and texts"),
      kept: t("Cache for later turns, up to"),
    };
    const kinds = /** @type {(keyof typeof names)[]} */ (Object.keys(names)).filter((kind) => parts[kind] > 0);
    const all = sum(Object.values(parts));
    const widest = Math.max(all, memory);
    const width = (/** @type {HTMLElement} */ element, /** @type {number} */ bytes) => {
      element.style.width = `${(100 * bytes) / widest}%`;
      return element;
    };
    const end = width(h("span.memory-end", { hidden: fits }), memory);
    const segments = kinds.map((kind) => width(h("span", { class: `of-${kind}` }), parts[kind]));
    const legend = kinds.map((kind) =>
      h("li.row", h("span", { class: `sign of-${kind}` }), h("span", names[kind]), h("span.quiet", size(parts[kind]))),
    );
    redraw(this.bar, segments, end);
    redraw(
      this.parts,
      legend,
      longest !== null && h("li", t("Longest context that fits: {n} tokens.", { n: longest })),
    );
    const [needed, had] = [size(all - parts.kept), size(memory)];
    const download = plan.download !== null && `${said(plan.download)} `;
    const left = leaving.length > 0 && ` ${t("Unloaded for it: {names}.", { names: leaving.map(nameOf).join(", ") })}`;
    // Its settings decide.
    this.details.open ||= !fits;
    redraw(
      this.words,
      fits
        ? h("p", download, t("Needs {size} of memory; {memory} is available.", { size: needed, memory: had }), left)
        : h(
            "p.refused",
            t("Doesn't fit: needs {size} of memory, {memory} is available.", { size: needed, memory: had }),
          ),
      !fits && suggestion && h("p", t("This fits: {settings}.", { settings: said(suggestion.label) })),
      !fits && suggestion && this.take && button("plain", t("Use these settings"), () => this.take?.(suggestion)),
      !fits &&
        !suggestion &&
        h("p", t("No other settings fit either. Choose a smaller model, or close other programs.")),
    );
    this.onPlan(plan);
  }
}

/**
 * Asks for the settings of a change and shows what they take; null where it is cancelled.
 * @param {Requests} requests
 * @param {ModelChange} change
 * @param {{ title: string, words?: Child, label: string }} texts
 * @returns {Promise<ModelChange | null>}
 */
export function askSettings(requests, change, { title, words, label }) {
  let wanted = { ...change };
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const length = h("input", { type: "number", min: String(SHORTEST), step: "1" });
  length.value = String(change.context_length ?? "");
  const plan = new Plan(requests, onPlan, ({ context_length, weights, kv_dtype }) => {
    wanted = { ...wanted, context_length, weights, kv_dtype };
    length.value = String(context_length);
    plan.look(wanted);
  });

  const choice = (/** @type {"weights" | "kv_dtype" | "kv_keep"} */ name, /** @type {string} */ label) => {
    /** The value at first, which isn't sent. @type {string | undefined} */
    let first;
    const take = (/** @type {string} */ value) => {
      wanted = { ...wanted, [name]: value === first ? undefined : value };
      plan.look(wanted);
    };
    const values = select({}, take, []);
    // Its room is kept: few models lack a choice.
    const element = h("label.number", h("span", label), values);
    const draw = (/** @type {Choice[]} */ choices) => {
      first ??= choices.find(({ chosen }) => chosen)?.value;
      element.hidden = choices.length < 2;
      redraw(
        values,
        choices.map(({ value, label, chosen }) => h("option", { value, selected: chosen }, said(label))),
      );
    };
    return { element, draw };
  };
  const weights = choice("weights", t("Weights"));
  const kvTypes = choice("kv_dtype", t("KV cache"));
  const kvKeeps = choice("kv_keep", t("Kept of earlier turns"));
  const hint = h("small", t("Fewer bits take less memory, and answers become slightly less accurate."));
  const context = h("label.number", h("span", t("Context length in tokens")), length);
  const body = h("div", words, plan.element);
  plan.details.open = !change.source;
  plan.parts.before(h("div.model-settings", context, weights.element, kvTypes.element, kvKeeps.element, hint));
  const asked = ask(title, body, [cancel(), { label, kind: "strong", value: () => wanted }]);

  function onPlan(/** @type {PlanFound | null} */ found) {
    allow(body, Boolean(found?.fits));
    if (!found) return;
    length.max = String(found.num_positions);
    length.placeholder = number(found.context_length);
    weights.draw(found.weights);
    kvTypes.draw(found.kv_types);
    kvKeeps.draw(found.kv_keeps);
    hint.hidden = weights.element.hidden && kvTypes.element.hidden;
  }

  length.addEventListener("input", () => {
    clearTimeout(timer);
    onPlan(null);
    timer = setTimeout(() => {
      if (!length.reportValidity()) return;
      wanted = { ...wanted, context_length: length.value ? Number(length.value) : undefined };
      plan.look(wanted);
    }, WAIT_MS);
  });
  plan.look(wanted);
  return asked;
}

/** Enables or disables the last button of the dialog around an element. */
export function allow(/** @type {Element} */ inside, /** @type {boolean} */ isAllowed) {
  const go = inside.closest("form")?.querySelector("button[type=submit]");
  if (go instanceof HTMLButtonElement) go.disabled = !isAllowed;
}

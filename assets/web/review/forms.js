// The forms of `qwen35mm review`: the search, the prompt and the keyboard shortcuts.

/** @import { Search } from "./review.d.ts" */

import { button, h, iconButton, isComposing, select, showKeys } from "../common/dom.js";
import { t } from "../common/words.js";

const OWN_WORDS = "";
const SIDECAR = "{sidecar}";

/**
 * The search.
 * @param {HTMLSelectElement} flags the flags that there are
 * @param {(change: Partial<Search>) => unknown} filter
 * @param {Search} search what is searched for at the beginning
 * @param {() => unknown} count shows statistics
 * @param {() => unknown} train shows the training on the captions
 */
export function searchForm(flags, filter, search, count, train) {
  const field = h("input", {
    type: "search",
    value: search.words,
    placeholder: t("Search captions and names"),
    "aria-label": t("Search"),
    title: t("-word finds captions that lack the word"),
    oninput: ({ currentTarget }) => filter({ words: currentTarget.value }),
  });
  const shown = [
    h("option", { value: "all" }, t("All")),
    h("option", { value: "open" }, t("Not accepted yet")),
    h("option", { value: "accepted" }, t("Accepted")),
    h("option", { value: "empty" }, t("Without a caption")),
    h("option", { value: "similar" }, t("Near-duplicates")),
  ];
  const show = select({ "aria-label": t("Show") }, (value) => filter({ show: asShow(value) }), shown);
  show.value = search.show;
  const length = (/** @type {"min_chars" | "max_chars"} */ name, /** @type {string} */ label) =>
    h("input", {
      type: "number",
      min: "0",
      value: String(search[name] ?? ""),
      placeholder: label,
      title: t("In characters"),
      "aria-label": label,
      oninput: ({ currentTarget: { valueAsNumber: n } }) => filter({ [name]: Number.isFinite(n) ? n : null }),
    });
  const lengths = [length("min_chars", t("Minimum length")), length("max_chars", t("Maximum length"))];
  const counted = iconButton("numbers", t("Statistics"), () => count());
  const trained = iconButton("learn", t("Train on these captions"), () => train());
  const help = iconButton("more", t("Keyboard shortcuts"), () => showReviewKeys());
  const onsubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    field.blur();
  };
  return h(
    "form.search.row.wrap.end",
    { role: "search", onsubmit },
    field,
    show,
    flags,
    lengths,
    counted,
    trained,
    help,
  );
}

/**
 * The prompt for another caption; it is kept for the next time.
 * @param {string[]} presets
 * @param {(how: { prompt?: string, preset?: string }) => unknown} again
 * @param {() => unknown} close
 */
export function askForm(presets, again, close) {
  const kept = localStorage.getItem("review-prompt") ?? "";
  const prompt = h("textarea", { rows: "3", "aria-label": t("Prompt"), placeholder: t("What to ask the model") });
  prompt.value = kept;
  const options = [h("option", { value: OWN_WORDS }, t("Custom prompt"))];
  options.push(...presets.map((each) => h("option", { value: each }, each)));
  const preset = select({ "aria-label": t("Prompt") }, () => changed(), options);
  preset.value = localStorage.getItem("review-preset") ?? (kept ? OWN_WORDS : (presets[0] ?? OWN_WORDS));
  const changed = () => {
    prompt.hidden = preset.value !== OWN_WORDS;
  };
  changed();
  const onsubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    localStorage.setItem("review-prompt", prompt.value);
    localStorage.setItem("review-preset", preset.value);
    again(preset.value === OWN_WORDS ? { prompt: prompt.value } : { preset: preset.value });
  };
  const onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && !event.shiftKey && !isComposing(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  const hint = h("p.quiet", t("{name} stands for the current caption.", { name: SIDECAR }));
  const row = h(
    "div.row.wrap",
    button("strong", t("Ask"), () => {}, { type: "submit" }),
  );
  row.append(button("plain", t("Cancel"), () => close()));
  const form = h("form.card.asking", { hidden: true, onsubmit, onkeydown }, preset, prompt, hint, row);
  return form;
}

/** Shows the keyboard shortcuts. Letters can be switched off, since programs for dictation type them. */
export function showReviewKeys() {
  const isOn = localStorage.getItem("review-keys") !== "off";
  const onchange = (/** @type {Event & { currentTarget: HTMLInputElement }} */ { currentTarget }) =>
    localStorage.setItem("review-keys", currentTarget.checked ? "on" : "off");
  const letters = h(
    "label.row",
    h("input", { type: "checkbox", checked: isOn, onchange }),
    t("Use letters as shortcuts"),
  );
  showKeys(
    [
      ["j ↓ →", t("Next")],
      ["k ↑ ←", t("Previous")],
      ["a Enter", t("Accept and go to the next")],
      ["A", t("Mark as not accepted")],
      ["e", t("Edit")],
      ["r", t("Ask again")],
      ["t", t("Use the model's caption")],
      ["u", t("Undo")],
      ["/", t("Search")],
      ["x", t("Select, or no longer select")],
      ["Shift+↓ Shift+↑", t("Select while moving")],
      ["Ctrl+A", t("Select all")],
      ["Home End", t("First, last")],
    ],
    letters,
  );
}

/** @returns {Search["show"]} */
const asShow = (/** @type {string} */ value) => /** @type {Search["show"]} */ (value);

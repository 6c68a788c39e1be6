// The box that takes an answer's place while a person changes its words.

/** @import { Answer } from "../common/types.d.ts" */
/** @import { PageState } from "./state.js" */

import { button, h, isComposing } from "../common/dom.js";
import { t } from "../common/words.js";
import { browserStorage } from "../compose/drafts.js";

const KEPT = "qwen35mm-edit:";
const MOST_OF_SCREEN = 0.6;

/** Unsaved edits of answers, by their ids. They survive a reload, and a look at another chat. */
const written = {
  /** @type {Map<string, string>} */
  here: new Map(),
  get(/** @type {string} */ id) {
    return this.here.get(id) ?? browserStorage()?.getItem(KEPT + id) ?? null;
  },
  set(/** @type {string} */ id, /** @type {string} */ text, isKept = true) {
    this.here.set(id, text);
    if (!isKept) return;
    try {
      browserStorage()?.setItem(KEPT + id, text);
    } catch {
      // Storage is full: it lasts as long as the page.
    }
  },
  forget(/** @type {string} */ id) {
    this.here.delete(id);
    browserStorage()?.removeItem(KEPT + id);
  },
};

/** Whether an answer is being changed. */
export const isEdited = (/** @type {string} */ id) => written.get(id) !== null;

/**
 * The box that stands in the answer's place.
 * @param {PageState} state
 * @param {Answer} answer
 * @param {() => void} close when the box isn't needed any more
 * @param {() => void} onSaved
 */
export function answerEditor(state, { id, text }, close, onSaved) {
  const box = h("textarea", { "aria-label": t("Answer"), dir: "auto", spellcheck: true });
  box.value = written.get(id) ?? text;
  const isKept = !state.chat.temporary;
  written.set(id, box.value, isKept);
  const grow = () => {
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, MOST_OF_SCREEN * window.innerHeight)}px`;
  };
  const leave = () => {
    written.forget(id);
    close();
  };
  const save = async () => {
    if (!box.value.trim() || saveButton.disabled) return;
    saveButton.disabled = true;
    const isSaved = await state.editAnswer(id, box.value);
    saveButton.disabled = false;
    if (!isSaved) return;
    leave();
    onSaved();
  };
  const saveButton = button("strong", t("Save"), save);
  box.addEventListener("input", () => {
    written.set(id, box.value, isKept);
    saveButton.disabled = !box.value.trim();
    grow();
  });
  box.addEventListener("keydown", (event) => {
    if (isComposing(event)) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    if (event.key !== "Escape") return;
    event.stopPropagation();
    leave();
  });
  const words = t("Saved as a new branch. The next answer builds on it.");
  const buttons = h("div.row.wrap.end", h("span.quiet", words), button("plain", t("Cancel"), leave), saveButton);
  const element = h("div.answer-editor", box, buttons);
  const begin = () => {
    grow();
    box.focus();
    box.setSelectionRange(0, 0);
    box.scrollTop = 0;
  };
  return { element, begin };
}

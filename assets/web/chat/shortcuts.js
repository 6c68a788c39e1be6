// The keys that work anywhere on the page.

import { showKeys } from "../common/dom.js";
import { t } from "../common/words.js";

const IS_MAC = /^(Mac|iP)/.test(navigator.platform);
// Keyboards for other scripts have no such letters: there the place of the key counts.
const PLACES = new Map([
  ["KeyE", "e"],
  ["KeyK", "k"],
  ["KeyO", "o"],
  ["Slash", "/"],
]);

/** What is pressed with Ctrl, such as "k" or "shift o". On a Mac that is Cmd: Ctrl moves the cursor there. */
export function shortcutOf(/** @type {KeyboardEvent} */ { altKey, code, ctrlKey, key, metaKey, shiftKey }) {
  const [isHeld, isOther] = IS_MAC ? [metaKey, ctrlKey] : [ctrlKey, metaKey];
  if (!isHeld || isOther || altKey) return "";
  const letter = /^[a-z/]$/i.test(key) ? key.toLowerCase() : PLACES.get(code);
  // Some keyboards write a slash with Shift.
  return shiftKey && letter !== "/" ? `shift ${letter}` : (letter ?? "");
}

export function showShortcuts() {
  const main = IS_MAC ? "⌘" : "Ctrl";
  const shift = IS_MAC ? "⇧" : "Shift";
  showKeys([
    [`${main} K`, t("Search chats")],
    [`${main} ${shift} O`, t("New chat")],
    [`${main} ${shift} E`, t("Edit last message")],
    [`${main} /`, t("Keyboard shortcuts")],
    ["Enter", t("Send")],
    [`${shift} Enter`, t("New line")],
    ["Esc", t("Stop")],
  ]);
}

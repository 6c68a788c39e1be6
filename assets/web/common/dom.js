// Small helpers for building the page. Nothing here takes HTML from outside.

/** @import { Attributes, Child, ElementOf } from "./types.d.ts" */

import { t } from "./words.js";

/**
 * An element: `h("button.small", { onclick, "aria-label": "..." }, "text", child)`. Attributes are optional;
 * those, and children, that are null or false are skipped.
 * @template {string} Selector
 * @param {Selector} selector
 * @param {Attributes<ElementOf<Selector>> | Child} [first]
 * @param {Child[]} children
 * @returns {ElementOf<Selector>}
 */
export function h(selector, first, ...children) {
  const [tag, ...classes] = selector.split(".");
  /** @type {any} */
  const element = document.createElement(tag);
  element.classList.add(...classes);
  const hasAttributes = first?.constructor === Object;
  for (const [name, value] of Object.entries(hasAttributes ? first : {})) {
    if (value === null || value === undefined || value === false) continue;
    // The page's policy refuses the attribute.
    if (name === "style") element.style.cssText = value;
    else if (name === "class") element.classList.add(.../** @type {string} */ (value).split(" "));
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(hasAttributes ? children : [/** @type {Child} */ (first), ...children]));
  return element;
}

/**
 * Draws an element's children anew.
 * @template {Element} E
 * @param {E} element
 * @param {Child[]} children
 */
export function redraw(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

/**
 * Puts elements into a parent, in this order. Elements that are already in place aren't moved, so that the scroll
 * position and the focus stay.
 * @param {Element} parent
 * @param {Element[]} elements
 */
export function arrange(parent, elements) {
  const held = document.activeElement;
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
  if (held instanceof HTMLElement && held !== document.activeElement && parent.contains(held))
    held.focus({ preventScroll: true });
}

/** @type {(children: Child[]) => (Element | string)[]} */
const present = (children) =>
  children.flatMap((child) => (Array.isArray(child) ? present(child) : child || child === "" ? [child] : []));

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 6h16M4 12h16M4 18h16",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  play: "M8 5l11 7-11 7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  again: "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
  goOn: "M5 12h14M13 6l6 6-6 6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  clip: "M20 12l-8 8a5 5 0 0 1-7-7l9-9a3.5 3.5 0 0 1 5 5l-9 9a2 2 0 0 1-3-3l8-8",
  camera: "M4 8h3l2-3h6l2 3h3v11H4zM12 10a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7",
  close: "M6 6l12 12M18 6L6 18",
  crop: "M7 3v14h14M3 7h14v14",
  find: "M12 5a7 7 0 1 0 0 14 7 7 0 0 0 0-14M12 2v5M12 17v5M2 12h5M17 12h5",
  minus: "M5 12h14",
  fit: "M4 9V4h5M15 4h5v5M20 15v5h-5M9 20H4v-5",
  pixels: "M4 7h1.5v10M4 17h3M17 7h1.5v10M17 17h3M12 9.5h.01M12 14.5h.01",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12M20 20l-4.5-4.5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  eye: "M3 12s3.5-6 9-6 9 6 9 6-3.5 6-9 6-9-6-9-6M12 9.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5",
  ask: "M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 18h.01",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  larger: "M14 4h6v6M10 20H4v-6M20 4l-6.5 6.5M4 20l6.5-6.5",
  smaller: "M20 10h-6V4M4 14h6v6M14 10l6.5-6.5M10 14l-6.5 6.5",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  hourglass: "M6 3h12M6 21h12M8 3v3c0 3 8 5 8 9v6M16 3v3c0 3-8 5-8 9v6",
  person: "M12 4a4 4 0 1 0 0 8 4 4 0 0 0 0-8M4 21a8 8 0 0 1 16 0",
  pin: "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v5",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  numbers: "M5 20v-7M12 20V4M19 20v-11",
  tool: "M14.5 6a4 4 0 0 1 5-1.5L17 7l2 2 2.5-2.5a4 4 0 0 1-5.5 5L8 19.5a2 2 0 0 1-3-3l8-8a4 4 0 0 1 1.5-2.5",
  learn: "M3 9l9-4 9 4-9 4zM7 11v5c3 2.5 7 2.5 10 0v-5M21 9v6",
};

/** @typedef {keyof typeof PATHS} Drawing */

/** A line drawing; it says nothing to a screen reader. */
export function icon(/** @type {Drawing} */ name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }))
    svg.setAttribute(key, value);
  return svg;
}

/**
 * A button; `kind` is its class: "plain", "strong" or "danger".
 * @param {string} kind
 * @param {Child} label
 * @param {(event: MouseEvent & { currentTarget: HTMLButtonElement }) => unknown} onclick
 * @param {Attributes<HTMLButtonElement>} attributes
 */
export function button(kind, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: kind, onclick, ...attributes }, label);
}

/**
 * A button that is only a drawing, with its words for a screen reader and a pointer that rests on it.
 * @param {Drawing} name
 * @param {string} label
 * @param {(event: MouseEvent & { currentTarget: HTMLButtonElement }) => unknown} onclick
 * @param {Attributes<HTMLButtonElement> & { class?: string }} attributes a class is one more
 */
export function iconButton(name, label, onclick, { class: more, ...attributes } = {}) {
  const names = more ? `icon-button ${more}` : "icon-button";
  return button(names, icon(name), onclick, { title: label, "aria-label": label, ...attributes });
}

/**
 * A choice of one among several.
 * @param {Attributes<HTMLSelectElement>} attributes
 * @param {(value: string) => unknown} onChange
 * @param {Child[]} options
 */
export function select(attributes, onChange, options) {
  return h("select", { ...attributes, onchange: ({ currentTarget }) => onChange(currentTarget.value) }, options);
}

/** Whether a key belongs to an input method that composes a word. Safari tells it of the last key only by its code. */
export const isComposing = (/** @type {KeyboardEvent} */ event) => event.isComposing || event.keyCode === 229;

/** A bar that shows a share, or that none is known. */
export function setProgress(/** @type {HTMLProgressElement} */ bar, /** @type {number | null} */ share) {
  if (share === null) bar.removeAttribute("value");
  else bar.value = share;
}

/** What is the same stays untouched: a selection in it too, and nothing is read out. */
export function setText(/** @type {Element} */ element, /** @type {string} */ words) {
  if (element.textContent !== words) element.textContent = words;
}

/** Resolves to whether the text could be copied. */
export async function copyText(/** @type {string} */ text) {
  if (navigator.clipboard && window.isSecureContext)
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  const before = document.activeElement;
  const area = h("textarea", { style: "position:fixed;opacity:0" });
  area.value = text;
  // What lies outside an open dialog takes no focus.
  ([...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body).append(area);
  area.select();
  const isCopied = document.activeElement === area && document.execCommand("copy");
  area.remove();
  if (before instanceof HTMLElement) before.focus({ preventScroll: true });
  return isCopied;
}

/** Shows a dialog over the page; closed, it is gone. */
export function showDialog(/** @type {HTMLDialogElement} */ dialog) {
  dialog.addEventListener("close", () => dialog.remove());
  document.querySelector("#qwen35mm .app")?.append(dialog);
  dialog.showModal();
}

/**
 * Asks, in a dialog that closes with Escape. Enter in a field takes the last button.
 * @template T
 * @param {string} title
 * @param {Child} body
 * @param {{ label: string, kind?: string, value: () => T }[]} buttons
 * @returns {Promise<T | null>} what the chosen button gives
 */
export function ask(title, body, buttons) {
  return new Promise((resolve) => {
    /** @type {T | null} */
    let answer = null;
    const row = buttons.map(({ label, kind = "plain", value }, at) => {
      const choose = () => {
        answer = value();
        dialog.close();
      };
      // The first one that submits is what Enter takes.
      return button(kind, label, choose, { type: at === buttons.length - 1 ? "submit" : "button" });
    });
    const form = h("form", { method: "dialog" }, h("h2", title), body, h("div.dialog-buttons.row.wrap.end", row));
    const dialog = h("dialog.dialog.card", { "aria-label": title }, form);
    showDialog(dialog);
    dialog.addEventListener("close", () => resolve(answer));
  });
}

/**
 * Shows keyboard shortcuts.
 * @param {[string, string][]} shortcuts keys with spaces between them, and what they do
 * @param {Child} [more]
 */
export function showKeys(shortcuts, more) {
  const rows = shortcuts.map(([keys, words]) => [
    h(
      "dt",
      keys.split(" ").map((key) => h("kbd", key)),
    ),
    h("dd", words),
  ]);
  return ask(t("Keyboard shortcuts"), [h("dl.keys", rows), more ?? ""], [{ label: t("Close"), value: () => null }]);
}

/** A button that changes nothing. */
export const cancel = () => ({ label: t("Cancel"), value: () => null });

/** Asks whether something may be deleted. */
export async function askToDelete(/** @type {string} */ title, /** @type {string} */ words) {
  const buttons = [cancel(), { label: t("Delete"), kind: "danger", value: () => true }];
  return Boolean(await ask(title, h("p", words), buttons));
}

/**
 * Asks for a line of text; null where none is given.
 * @param {string} title
 * @param {Child} words
 * @param {Attributes<HTMLInputElement>} attributes of the field
 * @param {string} label of the button
 */
export function askText(title, words, attributes, label) {
  const input = h("input", attributes);
  return ask(title, [words, input], [cancel(), { label, kind: "strong", value: () => input.value.trim() || null }]);
}

/** Light or dark; as the system where neither is chosen. */
export function useColours(/** @type {string | undefined} */ colours) {
  document.documentElement.style.colorScheme = colours || "light dark";
}

// The blocks of an answer as the program rendered them, and what can be done with code and tables.

/** @import { Requests } from "../common/api.js" */

import { button, copyText, h, icon, iconButton } from "../common/dom.js";
import { cellsOf, codeFileName, csvOf, save, tableFileName } from "../common/files.js";
import { t } from "../common/words.js";
import { Preview, previewKind } from "./preview.js";

const COPIED_MS = 1200;

/**
 * A block as it was drawn.
 * @typedef {object} Drawn
 * @property {string} html
 * @property {boolean} isFinished
 * @property {Map<number, Preview | null>} previews those that are open, by the number of their code; null until it is
 *   drawn again
 */

/** The blocks of one text. Those that stay the same are left as they are: selections and previews in them too. */
export class Blocks {
  /** @type {Drawn[]} */
  #drawn = [];

  /**
   * @param {Element} element
   * @param {Requests} requests
   * @param {(block: Element) => unknown} finish what else is to be done with one that was drawn
   */
  constructor(element, requests, finish) {
    this.element = element;
    this.requests = requests;
    this.finish = finish;
  }

  /** Draws them; the last one of an answer in progress has no tools yet. The program made them safe. */
  draw(/** @type {string[]} */ blocks, /** @type {boolean} */ isRunning) {
    blocks.forEach((html, at) => {
      this.#drawn[at] ??= { html: "", isFinished: false, previews: new Map() };
      this.#drawBlock(this.#drawn[at], at, html, !isRunning || at < blocks.length - 1);
    });
    for (const gone of this.#drawn.splice(blocks.length)) closePreviews(gone);
    while (this.element.children.length > blocks.length) this.element.lastChild?.remove();
  }

  #drawBlock(
    /** @type {Drawn} */ drawn,
    /** @type {number} */ at,
    /** @type {string} */ html,
    /** @type {boolean} */ isFinished,
  ) {
    const isSame = drawn.html === html;
    if (isSame && drawn.isFinished === isFinished) return;
    const block = this.element.children[at] ?? this.element.appendChild(h("div.block", { dir: "auto" }));
    if (!isSame || drawn.isFinished) {
      closePreviews(drawn);
      const wereOpen = [...block.querySelectorAll("details")].map((each) => each.open);
      block.innerHTML = html;
      block.querySelectorAll("details").forEach((each, number) => {
        each.open = wereOpen[number] ?? false;
      });
      this.finish(block);
    }
    drawn.html = html;
    drawn.isFinished = isFinished;
    if (!isFinished) return;
    block.querySelectorAll(".code").forEach((element, number) => {
      this.#drawCodeTools(element, drawn.previews, number);
    });
    for (const table of block.querySelectorAll("table")) table.parentElement?.after(tableTools(table));
  }

  #drawCodeTools(
    /** @type {Element} */ element,
    /** @type {Drawn["previews"]} */ previews,
    /** @type {number} */ number,
  ) {
    const language = element.querySelector(".code-bar span")?.textContent ?? "";
    const code = element.querySelector("code")?.textContent ?? "";
    const ending = element.getAttribute("data-ending") ?? "txt";
    const kind = previewKind(language, code);
    const label = h("span");
    const toggle = button("plain", [icon("eye"), label], () => show(!previews.has(number)));
    const show = (/** @type {boolean} */ isShown) => {
      previews.get(number)?.close();
      previews.delete(number);
      if (isShown && kind) {
        const preview = new Preview(this.requests, kind, code);
        previews.set(number, preview);
        element.append(preview.element);
      }
      label.textContent = isShown ? t("Close preview") : t("Preview");
      toggle.setAttribute("aria-expanded", String(isShown));
    };
    show(previews.has(number));
    // Without the last newline, at which a terminal would run it.
    const copyCode = iconButton("copy", t("Copy code"), ({ currentTarget }) =>
      copy(currentTarget, code.replace(/\n$/, "")),
    );
    const saveCode = iconButton("download", t("Save code"), () => save(codeFileName(ending, code), code));
    element.querySelector(".code-bar")?.append(h("span.row", kind && toggle, copyCode, saveCode));
  }
}

/** Closes its previews; they open again with the next drawing. */
function closePreviews(/** @type {Drawn} */ { previews }) {
  for (const [number, preview] of previews) {
    preview?.close();
    previews.set(number, null);
  }
}

function tableTools(/** @type {HTMLTableElement} */ table) {
  const rows = () => cellsOf(table);
  // Excel recognises UTF-8 by the byte order mark.
  const saveTable = () => save(tableFileName(rows()), `\ufeff${csvOf(rows())}`, "text/csv");
  return h(
    "div.table-tools.row",
    iconButton("copy", t("Copy table as CSV"), ({ currentTarget }) => copy(currentTarget, csvOf(rows()))),
    iconButton("download", t("Save table as CSV"), saveTable),
  );
}

/** Copies a text, and has the button say so for a moment. */
export async function copy(/** @type {Element} */ button, /** @type {string} */ text) {
  if (!(await copyText(text)) || button.classList.contains("done")) return;
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  button.classList.add("done");
  setTimeout(() => {
    button.replaceChildren(...before);
    button.classList.remove("done");
  }, COPIED_MS);
}

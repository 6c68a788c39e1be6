// A picture or a clip with its caption, which is edited in place.

/** @import { Item, Proposal } from "./review.d.ts" */

import { button, h, isComposing, redraw } from "../common/dom.js";
import { said, t } from "../common/words.js";
import { fileUrl } from "./calls.js";

const SAVE_AFTER_MS = 600;

/**
 * @typedef {object} Doing what the pane has the page do
 * @property {(item: Item, text: string, editing: string) => Promise<Item | null>} save null where it couldn't be
 * @property {(editing: string) => unknown} takeBack what was saved of an edit
 * @property {() => unknown} accept
 * @property {(item: Item, proposal: Proposal) => unknown} take
 * @property {(item: Item) => unknown} leave
 * @property {(item: Item) => unknown} stop asking
 * @property {(item: Item) => unknown} unsaved its caption can't be saved, while another is shown or written
 *
 * @typedef {{ name: string, item: Item, saved: boolean }} Editing
 * @typedef {{ editing: Editing, text: string, theirs?: Item }} Written `theirs` is what somebody else wrote meanwhile
 */

/** A button's key, which isn't part of its name. */
export const key = (/** @type {string} */ name) => h("kbd", { "aria-hidden": "true" }, name);

/** @param {Item} item */
const addressOf = (item) => fileUrl("media", item);

export class Captioned {
  /** @type {Item | null} */
  #item = null;
  /** What is being written, and what was there. @type {Editing | null} */
  #editing = null;
  /** What is being saved, by its item's number. @type {Map<number, Written>} */
  #closing = new Map();
  /** What couldn't be saved: it is open again when its item is shown. @type {Map<number, Written>} */
  #unsaved = new Map();
  /** Whether what was closed last is on the disk. @type {Promise<boolean>} */
  #finished = Promise.resolve(true);
  #later = 0;
  /** @type {Promise<unknown>} */
  #saving = Promise.resolve();

  constructor(/** @type {Doing} */ doing) {
    this.doing = doing;
    this.figure = h("figure.medium");
    this.name = h("h2");
    this.facts = h("p.facts.row.wrap.quiet");
    this.text = h("p.caption", { dir: "auto", onclick: () => getSelection()?.isCollapsed && this.edit() });
    this.area = h("textarea", {
      dir: "auto",
      "aria-label": t("Caption"),
      rows: "8",
      oninput: () => this.#wrote(),
      onkeydown: (event) => this.#onKey(event),
    });
    const row = [button("strong", t("Save"), () => this.finish()), button("plain", t("Cancel"), () => this.abandon())];
    const keys = t("Enter saves, Shift+Enter starts a new line, Escape cancels.");
    this.editor = h("div.editing", { hidden: true }, this.area, h("div.row.wrap", row), h("p.quiet", keys));
    this.changed = h("div.card.changed", { hidden: true, role: "alert" });
    this.proposal = h("div.card.proposal", { hidden: true });
    this.words = h("section.words", this.name, this.facts, this.text, this.editor, this.changed, this.proposal);
    addEventListener("pagehide", () => this.flush());
  }

  get isEditing() {
    return this.#editing !== null;
  }

  /** Shows an item, or how it is now. */
  show(/** @type {Item | null} */ item) {
    const before = this.#item;
    this.#item = item;
    if (before?.number !== item?.number || before?.version !== item?.version) this.#drawMedium();
    if (before?.number !== item?.number) this.changed.hidden = true;
    if (before?.number !== item?.number) this.finish();
    this.#drawText();
    this.#reopen();
  }

  /** What the model proposes; "asking" while it is at it. */
  propose(/** @type {Proposal | "asking" | null} */ proposal) {
    const item = this.#item;
    this.proposal.hidden = !proposal || !item;
    if (!proposal || !item) return;
    if (proposal === "asking") {
      const words = t("Asking the model. The first time, it also has to load.");
      redraw(
        this.proposal,
        h("p", { role: "status" }, words),
        button("plain", t("Stop"), () => this.doing.stop(item)),
      );
      return;
    }
    const row = [
      button("strong", [t("Use it"), key("t")], () => this.doing.take(item, proposal)),
      button("plain", t("Discard"), () => this.doing.leave(item)),
    ];
    const flags = proposal.flags.map((flag) => h("span.flag", flag));
    redraw(
      this.proposal,
      h("h3", t("New caption")),
      h("p.caption", { dir: "auto" }, proposal.text),
      h("p", flags),
      h("div.row.wrap", row),
    );
  }

  edit() {
    if (!this.#item || this.#item.problem || this.isEditing) return;
    const closing = this.#closing.get(this.#item.number);
    if (closing) this.#open(closing.editing, closing.text);
    else this.#open({ name: `${Date.now()} ${Math.random()}`, item: this.#item, saved: false }, this.#item.text);
  }

  /** Whether an item's caption was written and isn't on the disk yet. */
  isSaving(/** @type {Item} */ { number }) {
    return this.#closing.has(number);
  }

  /**
   * Closes the editor and saves what was written. The keys that follow belong to the page, not to the caption. What
   * can't be saved is opened again. Resolves to whether the caption is on the disk.
   */
  finish() {
    const editing = this.#editing;
    if (!editing) return this.#finished;
    const written = { editing, text: trimmed(this.area.value) };
    const saving = this.#save();
    this.#end();
    this.changed.hidden = true;
    this.#closing.set(editing.item.number, written);
    this.#drawText();
    this.#finished = saving.then(() => this.#closed(written));
    return this.#finished;
  }

  /** Leaves the caption as it was before. */
  async abandon() {
    const editing = this.#editing;
    if (!editing) return;
    this.#end();
    this.changed.hidden = true;
    await this.#saving;
    if (editing.saved) await this.doing.takeBack(editing.name);
    this.#drawText();
  }

  /** What waits to be saved is saved at once. */
  flush() {
    if (this.#editing && this.#later) this.#save();
  }

  /** Somebody else has changed the caption: shows theirs, and offers both. */
  conflict(/** @type {Item} */ theirs, /** @type {string} */ mine) {
    const closing = this.#closing.get(theirs.number);
    if (closing) closing.theirs = theirs;
    if (closing || this.#item?.number !== theirs.number) return;
    const keep = async () => {
      this.changed.hidden = true;
      if (this.#editing) {
        this.#editing.item = theirs;
        await this.finish();
      } else await this.doing.save(theirs, mine, "");
    };
    const take = () => {
      this.changed.hidden = true;
      this.#end();
      this.show(theirs);
    };
    const row = [button("strong", t("Use theirs"), take), button("plain", t("Keep mine"), keep)];
    this.changed.hidden = false;
    const words = t("{name} has changed on disk. It now says:", { name: theirs.file });
    redraw(
      this.changed,
      h("p", words),
      h("p.caption", { dir: "auto" }, said(theirs.problem ?? theirs.text)),
      h("div.row.wrap", row),
    );
  }

  #open(/** @type {Editing} */ editing, /** @type {string} */ text) {
    this.#editing = editing;
    this.area.value = text;
    this.#drawText();
    this.area.focus();
    this.area.setSelectionRange(text.length, text.length);
  }

  /** Whether what was written is on the disk. */
  #closed(/** @type {Written} */ written) {
    const { editing, text } = written;
    const { number } = editing.item;
    const saved = trimmed(editing.item.text) === text;
    // Opened and closed again meanwhile: the later one counts.
    if (this.#closing.get(number) === written) {
      this.#closing.delete(number);
      if (!saved && this.#editing !== editing) this.#unsaved.set(number, written);
    }
    if (!saved) this.#finished = Promise.resolve(true);
    this.#drawText();
    this.#reopen();
    if (this.#unsaved.has(number)) this.doing.unsaved(editing.item);
    return saved;
  }

  /** Opens again what couldn't be saved of the item that is shown. */
  #reopen() {
    const unsaved = this.#item && this.#unsaved.get(this.#item.number);
    if (!this.#item || !unsaved || this.isEditing) return;
    this.#unsaved.delete(this.#item.number);
    this.#open(unsaved.editing, unsaved.text);
    if (unsaved.theirs) this.conflict(unsaved.theirs, unsaved.text);
  }

  #end() {
    clearTimeout(this.#later);
    this.#later = 0;
    this.#editing = null;
    if (this.editor.contains(document.activeElement)) this.area.blur();
  }

  #wrote() {
    clearTimeout(this.#later);
    this.#later = window.setTimeout(() => this.#save(), SAVE_AFTER_MS);
  }

  #save() {
    clearTimeout(this.#later);
    this.#later = 0;
    const editing = this.#editing;
    const text = trimmed(this.area.value);
    if (!editing) return this.#saving;
    // One after the other: each save names the text that it replaces.
    this.#saving = this.#saving.then(async () => {
      if (text === trimmed(editing.item.text)) return;
      const item = await this.doing.save(editing.item, text, editing.name);
      if (item) [editing.item, editing.saved] = [item, true];
    });
    return this.#saving;
  }

  #onKey(/** @type {KeyboardEvent} */ event) {
    if (isComposing(event)) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      this.abandon();
    } else if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      event.stopPropagation();
      if (event.ctrlKey || event.metaKey) this.doing.accept();
      else this.finish();
    }
  }

  #drawMedium() {
    const item = this.#item;
    if (!item) return void redraw(this.figure);
    const src = addressOf(item);
    const failed = () => this.#tell(item);
    if (item.kind === "image") {
      const picture = h("img", { src, alt: item.name, onerror: failed });
      redraw(this.figure, h("a", { href: src, target: "_blank", title: t("Open in actual size") }, picture));
      return;
    }
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const how = { controls: true, loop: true, muted: true, autoplay: !still, playsInline: true };
    redraw(this.figure, h("video", { src, ...how, "aria-label": item.name, onerror: failed }));
  }

  /** Says why a medium can't be seen; a clip that the browser can't play shows its first frame. */
  async #tell(/** @type {Item} */ item) {
    const answer = await fetch(addressOf(item)).catch(() => null);
    const problem = answer?.ok ? null : await answer?.json().catch(() => null);
    if (this.#item?.number !== item.number) return;
    const words = problem ? said(problem.error.message) : t("This browser can't play this clip.");
    const small = !problem && h("img", { src: fileUrl("small", item), alt: item.name });
    redraw(this.figure, small, h("p", words));
  }

  #drawText() {
    const item = this.#item;
    this.text.hidden = this.isEditing || !item;
    this.editor.hidden = !this.isEditing;
    redraw(this.name, item?.name ?? "");
    if (!item) return void redraw(this.facts);
    const text = this.#closing.get(item.number)?.text ?? item.text;
    const flags = item.flags.map((flag) => h("span.flag", flag === "edited" ? t("edited") : flag));
    const length = t("{n} {n|character|characters}", { n: [...text].length });
    redraw(this.facts, item.accepted && h("span.flag.good", t("Accepted")), flags, item.model, h("span", length));
    this.facts.title = item.prompt ?? "";
    this.text.classList.toggle("none", !text);
    redraw(this.text, said(item.problem ?? (text || t("No caption"))));
  }
}

/** As a text field holds it and the program writes it. */
const trimmed = (/** @type {string} */ text) => text.replace(/\r\n?/g, "\n").replace(/\n+$/, "");

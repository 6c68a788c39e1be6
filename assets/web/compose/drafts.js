// What is written for each conversation and not sent yet; the browser keeps it, so that a reload finds it again.

/** @import { Attachment, Clip, Crop, Kind, Offer, Outgoing, Question, Said } from "../common/types.d.ts" */
/** @import { Begun } from "./draft.js" */

import { onceOf } from "./once.js";

const KEPT = "qwen35mm-draft:";
/** Stands for the id of a temporary conversation that hasn't begun. */
export const TEMPORARY = "temporary";

/**
 * A file of the message. While it is sent it has no digest yet, and `ready` says whether the message may go without it.
 * @typedef {object} DraftFile
 * @property {string} name
 * @property {string | null} digest
 * @property {Kind | null} kind
 * @property {number} [num_bytes]
 * @property {number | null} [share] what is sent of it
 * @property {() => void} [cancel]
 * @property {Promise<boolean>} [ready]
 * @property {string} [pdf] the digest of the file that this is the text of
 * @property {string} [svg] the digest of the drawing that this is the picture of
 * @property {string} [encoding] of a text
 * @property {string | null} [raw] the digest of its file, which may be in another encoding
 * @property {Attachment["form"]} [form]
 * @property {Said} [label] what it costs
 * @property {Said | null} [error]
 * @property {Said[]} [notes]
 * @property {Crop | null} [crop_of] where a picture was cut out
 * @property {Clip | null} [clip] what is chosen of a video
 * @property {number} [num_tokens]
 * @property {number | null} [step_s] between two frames of a video
 * @property {boolean} [twice] see `asksTwice`, where the person chose
 */

/**
 * A message that isn't sent yet; `editing` is the earlier message that it takes the place of.
 * @typedef {object} Writing
 * @property {string} text
 * @property {DraftFile[]} files
 * @property {Pick<Question, "id" | "parent"> | null} editing
 * @property {Offer[]} taken what of the offers holds for it alone, one of a kind
 */

/** What is written for one conversation. @implements {Writing} */
export class Sheet {
  text = "";
  /** @type {DraftFile[]} */
  files = [];
  /** @type {Writing["editing"]} */
  editing = null;
  /** @type {Offer[]} */
  taken = [];
  /** The new message, while an earlier one is changed. @type {Writing | null} */
  aside = null;
  #unchanged = "";

  constructor(/** @type {string | null} */ id) {
    /** Null before the conversation's first message is sent. */
    this.id = id;
  }

  get isEmpty() {
    return !this.text.trim() && !this.files.length;
  }

  /** Changes an earlier message; the new one waits aside. */
  edit(/** @type {Question} */ { id, parent, text, attachments }) {
    this.write({ text, files: attachments.map((each) => ({ ...each })), editing: { id, parent }, taken: [] });
    this.#unchanged = shape(this);
  }

  /** Whether an earlier message isn't as it was; a reload forgets how that was. */
  get isChanged() {
    return shape(this) !== this.#unchanged;
  }

  /** Goes on with what was written; a new message waits aside. */
  write(/** @type {Writing} */ writing) {
    this.#layAside(writing.editing);
    Object.assign(this, writing);
  }

  #layAside(/** @type {Writing["editing"]} */ editing) {
    if (!this.editing) this.aside = this.#content();
    this.editing = editing;
  }

  #content() {
    const { text, files, editing, taken } = this;
    return { text, files, editing, taken };
  }

  /** Takes the message out; one that waited aside comes back. */
  take() {
    const taken = this.#content();
    Object.assign(this, this.aside ?? { text: "", files: [], editing: null, taken: [] }, { aside: null });
    return taken;
  }

  /** Puts a message back, before what was written since. */
  putBack(/** @type {Writing} */ { text, files, editing, taken }) {
    if (editing && !this.editing) {
      this.#layAside(editing);
      [this.text, this.files, this.taken] = ["", [], []];
    }
    const place = (!editing && this.aside) || this;
    place.text = [text, place.text].filter(Boolean).join("\n\n");
    place.files = [...files, ...place.files];
    const isNew = (/** @type {Offer} */ { kind }) => !taken.some((each) => each.kind === kind);
    place.taken = [...taken, ...place.taken.filter(isNew)];
  }

  /** Puts all of another one before what is written here. */
  absorb(/** @type {Sheet} */ other) {
    if (other.aside) this.putBack(other.aside);
    this.putBack(other.#content());
  }
}

/** @returns {Storage | null} */
export function browserStorage() {
  try {
    return localStorage;
  } catch {
    // Not allowed: what is written lasts as long as the page.
    return null;
  }
}

export class Drafts {
  /** By their conversations. @type {Map<string | null, Sheet>} */
  #sheets = new Map();

  constructor(/** @type {Pick<Storage, "getItem" | "setItem" | "removeItem"> | null} */ storage) {
    this.storage = storage;
  }

  /** All that were looked at. */
  get all() {
    return [...this.#sheets.values()];
  }

  /** What is written for a conversation; null is a new one. */
  of(/** @type {string | null} */ id) {
    let sheet = this.#sheets.get(id);
    if (!sheet) {
      sheet = Object.assign(new Sheet(id), this.#read(id));
      this.#sheets.set(id, sheet);
    }
    return sheet;
  }

  /** Those of temporary conversations, which the browser doesn't keep. @type {Set<string | null>} */
  #unkept = new Set([TEMPORARY]);

  /** Another new conversation, beside one whose first message is on its way. */
  begin() {
    this.#sheets.set(null, new Sheet(null));
  }

  /** What is written goes along to another conversation, or to the one that it begins. */
  move(/** @type {Sheet} */ sheet, /** @type {string | null} */ id) {
    if (this.#unkept.has(sheet.id)) this.#unkept.add(id);
    if (this.#sheets.get(sheet.id) === sheet) this.forget(sheet.id);
    sheet.absorb(this.of(id));
    sheet.id = id;
    this.#sheets.set(id, sheet);
  }

  /** Takes `forget` back. */
  putBack(/** @type {string} */ id, /** @type {Sheet} */ sheet) {
    this.#sheets.set(id, sheet);
    this.write(id, sheet);
  }

  forget(/** @type {string | null} */ id) {
    this.#sheets.delete(id);
    this.write(id, new Sheet(id));
  }

  /** Keeps what is written; a file that isn't uploaded yet can't be. */
  write(/** @type {string | null} */ id, /** @type {Sheet} */ sheet) {
    if (this.#unkept.has(id)) return;
    const { aside, editing } = sheet;
    const kept = [sheet, ...(aside ? [aside] : [])].map(({ text, files, taken }) => ({
      text,
      taken,
      files: files.filter(uploaded).map(withoutCost),
    }));
    const isEmpty = !editing && !kept.some(({ text, files }) => text || files.length);
    try {
      if (isEmpty) this.storage?.removeItem(KEPT + (id ?? ""));
      else
        this.storage?.setItem(
          KEPT + (id ?? ""),
          JSON.stringify({ ...kept[0], editing: place(editing), aside: kept[1] }),
        );
    } catch {
      // Storage is full: it lasts as long as the page.
    }
  }

  /** @returns {Partial<Sheet>} */
  #read(/** @type {string | null} */ id) {
    try {
      const { editing, aside, ...kept } = JSON.parse(this.storage?.getItem(KEPT + (id ?? "")) ?? "{}");
      if (typeof kept.text !== "string" || !Array.isArray(kept.files)) return {};
      // Earlier versions kept nothing that was taken.
      const { text, files, taken = [] } = kept;
      return {
        text,
        files,
        taken,
        editing: editing ?? null,
        aside: aside ? { taken: [], ...aside, editing: null } : null,
      };
    } catch {
      return {};
    }
  }
}

/** What is compared of a message. */
const shape = (/** @type {Writing} */ { text, files }) => JSON.stringify([text, files.map(({ digest }) => digest)]);
const place = (/** @type {Writing["editing"]} */ editing) => editing && { id: editing.id, parent: editing.parent };
// Costs are counted again.
const withoutCost = (/** @type {DraftFile} */ file) => {
  const { digest, kind, name, num_bytes, pdf, svg, clip, crop_of, encoding, raw, form, twice } = file;
  const chosen = { ...(clip ? { clip } : {}), ...(crop_of ? { crop_of } : {}) };
  return { digest, kind, name, num_bytes, pdf, svg, encoding, raw, form, twice, ...chosen };
};
const uploaded = (/** @type {DraftFile} */ file) => file.digest !== null;

/**
 * A message as it is sent.
 * @param {Writing} writing
 * @param {Begun["place"]} place
 * @returns {Outgoing}
 */
export function outgoing({ text, files, editing, taken }, place) {
  const uploaded = /** @type {Attachment[]} */ (files.filter((file) => file.digest));
  const attachments = uploaded.map(({ digest, kind, name, num_bytes, clip, crop_of }) => {
    return { digest, kind, name, num_bytes, ...(clip ? { clip } : {}), ...(crop_of ? { crop_of } : {}) };
  });
  const where = editing ? { parent: editing.parent } : { at_end: true };
  return { ...place, ...where, text, attachments, once: onceOf(taken) };
}

// The message that is being written: its text, its files, and what it will cost. Draws nothing.

/** @import { Attachment, Cost, Kind, Offer, Outgoing, Question, Said, Tone, Upload } from "./types.d.ts" */
/** @import { Requests } from "./api.js" */

import { debounce, Problem, pdfPages, upload } from "./api.js";
import { said, t } from "./words.js";

const MEASURE_AFTER_MS = 150;
// One topic for all that says what the message costs.
const COST = "cost";

/**
 * A file of the message. While it is sent it has no digest yet, and `ready` says whether the message may go without it.
 * @typedef {object} DraftFile
 * @property {string} name
 * @property {string | null} digest
 * @property {Kind | null} kind
 * @property {number | null} [share] what is sent of it
 * @property {() => void} [cancel]
 * @property {Promise<boolean>} [ready]
 * @property {string} [pdf] the digest of the file that this is the text of
 * @property {Said} [label] what it costs
 * @property {string | null} [error]
 * @property {string[]} [notes]
 */

/**
 * What draws the draft, and sends it.
 * @typedef {object} Desk
 * @property {() => Omit<Outgoing, "text" | "attachments">} place where the message goes
 * @property {(message: Outgoing) => Promise<boolean>} send
 * @property {(words: string, tone?: Tone) => void} say
 * @property {() => void} draw the files, the text, or what can be done with them is another
 * @property {(cost: Cost | null) => void} drawCost null where there is nothing to measure
 * @property {(words: string, offers: Offer[]) => void} drawTrouble
 */

export class Draft {
  text = "";
  /** @type {DraftFile[]} */
  files = [];
  /** The earlier message that is being changed. @type {Question | null} */
  editing = null;
  /** An answer is in progress. */
  isRunning = false;
  isSending = false;
  measureSoon = debounce(MEASURE_AFTER_MS, () => this.measure());

  /**
   * @param {Desk} desk
   * @param {Requests} requests
   * @param {(file: File, onProgress: (share: number | null) => void) => Upload} send
   */
  constructor(desk, requests, send = upload) {
    this.desk = desk;
    this.requests = requests;
    this.upload = send;
  }

  get isEmpty() {
    return !this.text.trim() && !this.files.length;
  }

  // Its files

  /** Uploads files, each with its own progress; one that can't be read says why and keeps nobody waiting. */
  attach(/** @type {Iterable<File>} */ files) {
    for (const file of files) {
      /** @type {DraftFile} */
      const entry = { name: file.name || t("pasted"), share: 0, kind: null, digest: null };
      this.files.push(entry);
      const { promise, cancel } = this.upload(file, (share) => {
        entry.share = share;
        this.desk.draw();
      });
      entry.cancel = cancel;
      entry.ready = this.#arrive(entry, promise);
    }
    this.desk.draw();
  }

  /** Whether the message may be sent when the file has come, or was taken out. */
  async #arrive(/** @type {DraftFile} */ entry, /** @type {Upload["promise"]} */ coming) {
    try {
      this.#replace(entry, await coming);
      return true;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      const wasCancelled = problem.kind === "cancelled";
      if (!wasCancelled) this.desk.say(`${entry.name}: ${problem.message}`);
      this.files = this.files.filter((each) => each !== entry);
      this.desk.draw();
      return wasCancelled;
    }
  }

  #replace(/** @type {DraftFile} */ entry, /** @type {Awaited<Upload["promise"]>} */ { attachments, note }) {
    const at = this.files.indexOf(entry);
    // Taken out meanwhile.
    if (at < 0) return;
    this.files.splice(at, 1, ...attachments);
    if (note) this.desk.say(said(note));
    this.desk.draw();
    this.measureSoon();
  }

  /** Takes a PDF's pages as pictures, in place of its text. */
  async usePages(/** @type {DraftFile} */ file) {
    const found = await this.requests.told(pdfPages(file.pdf ?? "", file.name));
    if (found) this.#replace(file, found);
  }

  remove(/** @type {DraftFile} */ file) {
    file.cancel?.();
    this.files = this.files.filter((each) => each !== file);
    this.desk.draw();
    this.measureSoon();
  }

  // What it costs

  async measure() {
    if (!this.text && !this.files.length) return this.#measured(null);
    try {
      this.#measured(await this.requests.call("measure", this.message, COST), false);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (problem.kind !== "late") this.desk.drawTrouble(problem.message, []);
    }
  }

  /** What is known now; `isLast` where no estimate on its way may change it. */
  #measured(/** @type {Cost | null} */ cost, isLast = true) {
    if (isLast) this.requests.begin(COST);
    for (const media of cost?.media ?? [])
      Object.assign(this.files.find((file) => file.digest === media.digest) ?? {}, media);
    this.desk.draw();
    this.desk.drawCost(cost);
  }

  /** The names of the settings that limit what its media may cost. */
  get limits() {
    const kinds = new Set(this.files.map((file) => file.kind));
    return [
      ...(kinds.has("video") ? ["max_frames", "max_video_tokens"] : []),
      ...(kinds.has("image") ? ["max_image_tokens"] : []),
    ];
  }

  // Sending, and changing an earlier one

  /** @returns {Outgoing} */
  get message() {
    const place = this.desk.place();
    const uploaded = /** @type {Attachment[]} */ (this.files.filter((file) => file.digest));
    const attachments = uploaded.map(({ digest, kind, name, num_bytes }) => ({ digest, kind, name, num_bytes }));
    return { ...place, ...(this.editing ? { parent: this.editing.parent } : {}), text: this.text, attachments };
  }

  async submit() {
    if (this.isRunning || this.isSending) return;
    if (this.isEmpty) return this.desk.say(t("Type a question, or add a picture or a video."), "note");
    this.isSending = true;
    this.desk.draw();
    try {
      const ready = await Promise.all(this.files.map((file) => file.ready));
      // A message never goes without a file that its author saw in it.
      if (ready.includes(false)) return;
      const { text, editing } = this;
      const files = [...this.files];
      const isSent = await this.desk.send(this.message);
      if (isSent && this.editing === editing) this.clear(text, files);
    } finally {
      this.isSending = false;
      this.desk.draw();
    }
  }

  /** Takes this text and these files out of it, by default all: what came while they were sent stays. */
  clear(text = this.text, files = this.files) {
    if (this.text.startsWith(text)) this.text = this.text.slice(text.length).trimStart();
    this.files = this.files.filter((each) => !files.includes(each));
    this.editing = null;
    this.#measured(null);
    if (!this.isEmpty) this.measureSoon();
  }

  /** Takes an earlier message up, with its files; sending it begins a branch. */
  edit(/** @type {Question} */ message) {
    this.editing = message;
    this.text = message.text;
    this.files = message.attachments.map((each) => ({ ...each }));
    this.desk.draw();
    this.measureSoon();
  }

  stopEditing() {
    if (this.editing) this.clear();
  }
}

// A slider's positions go by powers: 16 and 16,000 are both within reach.
export const NUM_POSITIONS = 100;

/** @typedef {{ low: number, high: number }} Range */

/** The amount that a slider's position stands for. */
export const amountAt = (/** @type {number} */ position, /** @type {Range} */ { low, high }) =>
  Math.round(low * (high / low) ** (position / NUM_POSITIONS));

export function positionOf(/** @type {number} */ amount, /** @type {Range} */ { low, high }) {
  const position = Math.round((NUM_POSITIONS * Math.log(Math.max(amount, low) / low)) / Math.log(high / low));
  return Math.min(position, NUM_POSITIONS);
}

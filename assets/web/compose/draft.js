// The message that is being written: its text, its files, and what it will cost. Draws nothing.

/** @import { Changed, Clip, Cost, Kind, Offer, Outgoing, Question } from "../common/types.d.ts" */
/** @import { Tone, Upload } from "../common/types.d.ts" */
/** @import { Requests } from "../common/api.js" */
/** @import { Writing } from "./drafts.js" */

import { isAway } from "../chat/connection.js";
import { debounce, Problem, readPage, upload } from "../common/api.js";
import { said, t } from "../common/words.js";
import { asksTwice } from "../media/times.js";
import { browserStorage, Drafts, outgoing, Sheet } from "./drafts.js";
import { LIMITS_OF } from "./limits.js";

const MEASURE_AFTER_MS = 150;
// One topic for all that says what the message costs.
const COST = "cost";

/** @typedef {import("./drafts.js").DraftFile} DraftFile */
/** @typedef {(onProgress: (share: number | null) => void) => Upload} Start */

/**
 * A message that was sent by the person, and waits for its files or for an answer. Its place, text and files are those
 * of that moment, whatever is done and shown meanwhile.
 * @typedef {Writing & Begun & { sheet: Sheet, isOnItsWay: boolean }} Waiting
 */

/**
 * Where a message goes that is sent now.
 * @typedef {object} Begun
 * @property {Omit<Outgoing, "text" | "attachments">} place
 * @property {string[]} answers those in progress there, which it waits for
 * @property {() => boolean} isLate whether the person has gone on to something else since
 */

/**
 * What draws the draft, and sends it.
 * @typedef {object} Desk
 * @property {() => Begun["place"]} place where a message would go
 * @property {() => Begun} begin
 * @property {(ids: string[]) => Promise<boolean>} answered until none of these answers is in progress; false where the
 *   person is asked about a call first
 * @property {() => Promise<void>} whenThere until the program can be reached
 * @property {(message: Outgoing, isLate: () => boolean) => Promise<Changed | { answers: string[] } | null>} send null
 *   where it is refused, and `answers` where it has to wait for these first
 * @property {(reply: string) => void} lookCloser has the parts that an answer names looked at when it is there
 * @property {(words: string, tone?: Tone, offer?: { label: string, run: () => unknown } | null) => void} say
 * @property {() => void} draw the files, the text, or what can be done with them is another
 * @property {(cost: Cost | null) => void} drawCost null where there is nothing to measure
 * @property {(words: string, offers: Offer[]) => void} drawTrouble
 */

export class Draft {
  /** Messages that are to be sent, the oldest first. @type {Waiting[]} */
  outbox = [];
  /** @type {Map<Sheet, Promise<void>>} */
  #sending = new Map();
  measureSoon = debounce(MEASURE_AFTER_MS, () => this.measure());

  /**
   * @param {Desk} desk
   * @param {Requests} requests
   * @param {(file: File, onProgress: (share: number | null) => void) => Upload} send
   * @param {ConstructorParameters<typeof Drafts>[0]} storage
   * @param {(address: string) => Upload} read
   */
  constructor(desk, requests, send = upload, storage = browserStorage(), read = readPage) {
    this.desk = desk;
    this.requests = requests;
    this.upload = send;
    this.readPage = read;
    this.drafts = new Drafts(storage);
    this.sheet = this.drafts.of(null);
  }

  get text() {
    return this.sheet.text;
  }

  set text(text) {
    this.sheet.text = text;
    this.#keep();
  }

  get files() {
    return this.sheet.files;
  }

  /** The earlier message that is being changed. */
  get editing() {
    return this.sheet.editing;
  }

  get isEmpty() {
    return this.sheet.isEmpty;
  }

  /** Queued messages of the chat that is shown, or that begin one. */
  get waiting() {
    return this.outbox.filter(({ sheet }) => sheet === this.sheet || sheet.id === null);
  }

  // Which conversation it is for

  /** Goes on with what is written for a conversation; null is a new one. */
  open(/** @type {string | null} */ id) {
    if (id === null && this.outbox.some(({ sheet }) => sheet === this.drafts.of(null))) this.drafts.begin();
    this.sheet = this.drafts.of(id);
    this.desk.draw();
  }

  /** What is written for a conversation goes along to another, or to the one that it begins. */
  move(/** @type {string | null} */ from, /** @type {string | null} */ to) {
    this.#move(this.drafts.of(from), to);
  }

  #move(/** @type {Sheet} */ sheet, /** @type {string | null} */ id) {
    const from = sheet.id;
    const isShown = this.sheet === this.drafts.of(id);
    this.drafts.move(sheet, id);
    if (isShown) this.sheet = sheet;
    this.#keep(this.drafts.of(from));
    this.#keep(sheet);
  }

  #changed(sheet = this.sheet) {
    this.#keep(sheet);
    this.desk.draw();
  }

  /** Has the browser keep what is written for a conversation; what is to be sent would be put back by a reload. */
  #keep({ id } = this.sheet) {
    const waiting = this.outbox.filter(({ sheet }) => sheet.id === id);
    const kept = new Sheet(id);
    for (const sheet of new Set([this.drafts.of(id), ...waiting.map((each) => each.sheet)])) kept.absorb(sheet);
    for (const each of waiting.reverse()) kept.putBack(each);
    this.drafts.write(id, kept);
  }

  // Its files

  /** Uploads files, each with its own progress; one that can't be read says why and keeps nobody waiting. */
  attach(/** @type {Iterable<File>} */ files) {
    for (const file of files) {
      /** @type {DraftFile} */
      const entry = { name: file.name || t("pasted"), share: 0, kind: null, digest: null };
      this.#expect(entry, (onProgress) => this.upload(file, onProgress));
    }
    this.desk.draw();
  }

  /** Reads a web address: its text and pictures become files of the message. */
  read(/** @type {string} */ address) {
    this.#expect({ name: new URL(address).host, kind: null, digest: null }, () => this.readPage(address));
    this.desk.draw();
  }

  #expect(/** @type {DraftFile} */ entry, /** @type {Start} */ start) {
    this.sheet.files = [...this.files, entry];
    entry.ready = this.#arrive(entry, start);
  }

  /** Whether the message may be sent when the file has come, or was taken out. */
  async #arrive(/** @type {DraftFile} */ entry, /** @type {Start} */ start) {
    try {
      this.#replace(entry, await this.#uploaded(entry, start));
      return true;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      const wasCancelled = problem.kind === "cancelled";
      const { message } = problem;
      if (!wasCancelled) this.desk.say(message.includes(entry.name) ? message : `${entry.name}: ${message}`);
      this.#put(entry, []);
      this.desk.draw();
      return wasCancelled;
    }
  }

  /** Uploads a file, from its beginning again where the connection is lost. */
  async #uploaded(/** @type {DraftFile} */ entry, /** @type {Start} */ start) {
    for (;;) {
      const { promise, cancel } = start((share) => {
        entry.share = share;
        this.desk.draw();
      });
      entry.cancel = cancel;
      try {
        return await promise;
      } catch (problem) {
        if (!isAway(problem)) throw problem;
        if (entry.share !== undefined) entry.share = 0;
        await Promise.race([this.desk.whenThere(), this.#takenOut(entry)]);
      }
    }
  }

  /** Rejected when a file is taken out that isn't on its way. @returns {Promise<never>} */
  #takenOut(/** @type {DraftFile} */ entry) {
    return new Promise((_, reject) => {
      entry.cancel = () => reject(new Problem({ message: "", kind: "cancelled" }));
    });
  }

  /** Puts files in the place of one, wherever it is by now; whether it was anywhere. */
  #put(/** @type {DraftFile} */ entry, /** @type {DraftFile[]} */ files) {
    const sheets = [...new Set([...this.drafts.all, ...this.outbox.map(({ sheet }) => sheet)])];
    for (const each of [...this.outbox, ...sheets, ...sheets.map(({ aside }) => aside)]) {
      const at = each?.files.indexOf(entry) ?? -1;
      if (!each || at < 0) continue;
      each.files = each.files.toSpliced(at, 1, ...files);
      for (const sheet of sheets) this.#keep(sheet);
      return true;
    }
    return false;
  }

  #replace(/** @type {DraftFile} */ entry, /** @type {Awaited<Upload["promise"]>} */ { attachments, note }) {
    // Taken out meanwhile.
    if (!this.#put(entry, attachments)) return;
    if (note) this.desk.say(said(note));
    this.desk.draw();
    this.measureSoon();
  }

  /** Adds a file that the program has already; added twice, it is two files. */
  add(/** @type {DraftFile} */ file) {
    this.sheet.files = [...this.files, { ...file }];
    this.#changed();
    this.measureSoon();
  }

  /** Replaces a file by another form of it: a PDF's pages, or a text in another encoding. */
  async replaceBy(/** @type {DraftFile} */ file, /** @type {Upload["promise"]} */ coming) {
    const found = await this.requests.told(coming);
    if (found) this.#replace(file, found);
  }

  /** Chooses a part of a video; null is all of it. */
  choose(/** @type {DraftFile} */ file, /** @type {Clip | null} */ clip) {
    file.clip = clip;
    this.#changed();
    this.measureSoon();
  }

  /** The message with only one of its files. */
  alone(/** @type {DraftFile} */ file) {
    const { editing, taken } = this.sheet;
    return outgoing({ text: "", files: [file], editing, taken }, this.desk.place());
  }

  remove(/** @type {DraftFile} */ file) {
    file.cancel?.();
    this.#put(file, []);
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
      if (problem.kind !== "late" && !isAway(problem)) this.desk.drawTrouble(problem.message, []);
    }
  }

  /** What is known now; `isLast` where no estimate on its way may change it. */
  #measured(/** @type {Cost | null} */ cost, isLast = true) {
    if (isLast) this.requests.begin(COST);
    // The same file may be there twice, and costs as much again.
    const files = [...this.files];
    for (const media of cost?.media ?? []) {
      const at = files.findIndex((file) => file.digest === media.digest);
      if (at >= 0) Object.assign(files.splice(at, 1)[0], media);
    }
    this.desk.draw();
    this.desk.drawCost(cost);
  }

  /** The names of the settings that limit what its media may cost. */
  get limits() {
    const kinds = new Set(this.files.map((file) => file.kind));
    return Object.entries(LIMITS_OF).flatMap(([kind, names]) => (kinds.has(/** @type {Kind} */ (kind)) ? names : []));
  }

  /** The offers that were taken for this message only. */
  get taken() {
    return this.sheet.taken;
  }

  set taken(taken) {
    if (taken.length === this.sheet.taken.length && taken.every((each) => this.sheet.taken.includes(each))) return;
    this.sheet.taken = taken;
    this.#changed();
    this.measureSoon();
  }

  // Sending, and changing an earlier one

  get message() {
    return outgoing(this.sheet, this.desk.place());
  }

  /** Sends the message as it stands, to where it stands, as soon as its files and the answers before it are there. */
  submit() {
    const { sheet } = this;
    if (sheet.isEmpty) {
      if (!this.waiting.length) this.desk.say(t("Type a question, or add a picture or a video."), "note");
      return this.#sending.get(sheet);
    }
    return this.queue(sheet.take());
  }

  /** Sends a message; what else is being written stays. */
  queue(/** @type {Writing} */ writing) {
    const { sheet } = this;
    this.outbox.push({ ...this.desk.begin(), ...writing, sheet, isOnItsWay: false });
    this.#keep();
    this.#measured(null);
    if (!this.isEmpty) this.measureSoon();
    if (!this.#sending.has(sheet))
      this.#sending.set(
        sheet,
        this.#sendAll(sheet).finally(() => this.#sending.delete(sheet)),
      );
    return this.#sending.get(sheet);
  }

  /** Sends what waits for a conversation, one after the other. */
  async #sendAll(/** @type {Sheet} */ sheet) {
    for (;;) {
      const message = this.outbox.find((each) => each.sheet === sheet);
      if (!message) return;
      const ready = await Promise.all(message.files.map((file) => file.ready));
      // A message never goes without a file that its author saw in it.
      const isWhole = !ready.includes(false);
      const isFree = isWhole && (await this.desk.answered(message.answers));
      if (isFree) await this.desk.whenThere();
      // Taken back meanwhile.
      if (!this.outbox.includes(message)) continue;
      if (isWhole && !isFree) this.desk.say(t("The model asks for something first. Your message waits."), "note");
      message.isOnItsWay = true;
      this.desk.draw();
      const sent = isFree && (await this.desk.send(outgoing(message, message.place), message.isLate));
      if (!sent) this.#refused(sheet);
      else if ("answers" in sent) {
        Object.assign(message, { answers: sent.answers, isOnItsWay: false });
        this.desk.draw();
      } else this.#sent(message, sent);
    }
  }

  #sent(/** @type {Waiting} */ message, /** @type {Changed} */ { chat, reply }) {
    const { sheet } = message;
    this.outbox = this.outbox.filter((each) => each !== message);
    if (chat.id && sheet.id === null) this.#move(sheet, chat.id);
    if (reply && message.files.some((file) => asksTwice(file, message.text))) this.desk.lookCloser(reply);
    for (const next of this.outbox.filter((each) => each.sheet === sheet)) {
      next.place = { ...next.place, conversation: chat.id, parent: reply };
      next.answers = reply ? [reply] : [];
    }
    this.#changed(sheet);
  }

  /** Puts queued messages back into the box: a message isn't sent without the one before it. */
  #refused(/** @type {Sheet} */ sheet) {
    const back = this.outbox.filter((each) => each.sheet === sheet);
    this.outbox = this.outbox.filter((each) => each.sheet !== sheet);
    const box = this.drafts.of(sheet.id);
    if (box !== sheet) box.absorb(sheet);
    for (const each of back.reverse()) box.putBack(each);
    this.#changed(box);
    this.measureSoon();
  }

  /** Takes a message that isn't on its way yet back into the box. */
  takeBack(/** @type {Waiting} */ message) {
    if (message.isOnItsWay) return;
    this.outbox = this.outbox.filter((each) => each !== message);
    const isHere = message.sheet === this.sheet;
    this.sheet.putBack(isHere ? message : { ...message, editing: null });
    this.#keep(message.sheet);
    this.#changed();
    this.measureSoon();
  }

  /** Takes an earlier message up, with its files; sending it begins a branch. */
  edit(/** @type {Question} */ message) {
    if (this.editing?.id === message.id) return;
    this.stopEditing();
    this.sheet.edit(message);
    this.#changed();
    this.measureSoon();
  }

  /** Leaves an earlier message as it is; what was changed of it can be had back. */
  stopEditing() {
    if (!this.editing) return;
    const { sheet } = this;
    const { isChanged } = sheet;
    const left = sheet.take();
    if (isChanged)
      this.desk.say(t("Your change of the message isn't sent."), "note", {
        label: t("Undo"),
        run: () => {
          if (this.sheet === sheet) this.stopEditing();
          sheet.write(left);
          this.#changed(sheet);
          this.measureSoon();
        },
      });
    this.#keep();
    this.#measured(null);
    if (!this.isEmpty) this.measureSoon();
  }
}

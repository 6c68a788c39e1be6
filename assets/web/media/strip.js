// What the model sees of a video: its sampled frames, each with its time, and what a person chooses of them.

/** @import { Requests } from "../common/api.js" */
/** @import { Attachment, Chapter, Clip, Strip } from "../common/types.d.ts" */
/** @import { Draft, DraftFile } from "../compose/draft.js" */
/** @import { MediaDesk } from "./viewer.js" */

import { debounce, Problem } from "../common/api.js";
import { button, h, redraw } from "../common/dom.js";
import { number, t } from "../common/words.js";
import { amountAt, NUM_POSITIONS, positionOf } from "../compose/limits.js";
import { pictureOf } from "./items.js";
import { rangeOf, secondsOf, timeOf } from "./times.js";
import { Viewer } from "./viewer.js";

const LOAD_AFTER_MS = 250;
const STEP_S = 0.1;
// Pictures behind the handles.
const NUM_BEHIND = 12;
// Shorter videos have no chapters.
const HAS_CHAPTERS_S = 60;
/** @type {Clip} */
const WHOLE = { start_s: 0, end_s: null, num_frames: null, drop_similar: false };

/** A folded part of the page; nothing is requested before it is opened. */
class Fold {
  #asking = new AbortController();

  /**
   * @param {string} title
   * @param {MediaDesk} desk
   * @param {Pick<Attachment, "digest" | "name">} file
   */
  constructor(title, desk, file) {
    this.desk = desk;
    this.file = file;
    this.about = h("span.quiet");
    this.words = h("p.quiet", { role: "status" });
    this.film = h("ol.film", { "aria-label": title });
    const bar = h("progress", { "aria-hidden": "true" });
    this.work = h("div.work.row.quiet", { hidden: true, role: "status" }, bar, h("span", t("Reading the frames")));
    const summary = h("summary.quiet", h("span", title), this.about);
    this.element = h("details.frames", summary, this.film, this.work, this.words);
    this.element.addEventListener("toggle", () => this.element.open && this.load());
  }

  load() {}

  /**
   * Asks for a strip; an earlier one that is still made ends.
   * @param {(signal: AbortSignal) => Promise<Strip>} ask
   * @returns {Promise<Strip | null>} null where there is none, or where it comes too late
   */
  async ask(ask) {
    this.#asking.abort();
    const asking = new AbortController();
    this.#asking = asking;
    this.film.setAttribute("aria-busy", "true");
    // Where frames are seen already, nothing may move below a handle that is held.
    this.work.hidden = this.film.children.length > 0;
    const [outcome] = await Promise.allSettled([ask(asking.signal)]);
    if (asking.signal.aborted) return null;
    this.film.removeAttribute("aria-busy");
    this.work.hidden = true;
    if (outcome.status === "fulfilled") return outcome.value;
    if (!(outcome.reason instanceof Problem)) throw outcome.reason;
    this.film.replaceChildren();
    this.words.textContent = outcome.reason.message;
    return null;
  }

  /** Draws the frames; a click shows one on the whole screen. */
  draw(/** @type {Strip} */ { frames, size }) {
    const { digest, name } = this.file;
    const items = frames.map(({ time_s, picture }) => ({
      ...pictureOf({ digest, name, time_s, size: null }),
      poster: picture,
    }));
    const shape = { style: `aspect-ratio: ${size[1]} / ${size[0]}` };
    const drawn = frames.map(({ time_s, is_kept, picture }, at) => {
      const time = timeOf(time_s);
      const label = is_kept ? t("Frame at {time}", { time }) : t("Frame at {time}, left out: same as before", { time });
      const show = () => new Viewer(this.desk, items, at).open();
      const image = h("img", { src: picture, alt: "", ...shape });
      return h("li", { class: is_kept ? null : "same" }, [
        button("frame", image, show, { title: label, "aria-label": label }),
        this.time(time_s, time),
      ]);
    });
    redraw(this.film, drawn);
    const numSame = frames.filter(({ is_kept }) => !is_kept).length;
    const [n, m] = [frames.length - numSame, numSame];
    const words = t("Shown to the model: {n}. Left out as similar: {m}.", { n, m });
    this.words.textContent = numSame ? words : "";
  }

  time(/** @type {number} */ _seconds, /** @type {string} */ written) {
    return h("span.time.quiet", written);
  }
}

/** What the model was shown of a video that was sent. */
export class ShownStrip extends Fold {
  /**
   * @param {MediaDesk} desk
   * @param {(signal: AbortSignal) => Promise<Strip>} send asks for it
   * @param {Attachment} file
   * @param {(seconds: number) => unknown} seek shows the video at a time
   */
  constructor(desk, send, file, seek) {
    super(t("What the model saw"), desk, file);
    this.send = send;
    this.seek = seek;
    const { clip, num_frames: count } = file;
    const frames = count ? [t("{n} {n|frame|frames}", { n: count })] : [];
    this.about.textContent = [...frames, ...partOf(clip, file.duration_s)].join(", ");
    const again = { ...file, clip: clip ?? WHOLE };
    this.element.append(button("link", t("Ask about a part"), () => desk.attach([again])));
  }

  /** @override */
  async load() {
    if (this.film.children.length) return;
    const strip = await this.ask(this.send);
    if (strip) this.draw(strip);
  }

  /** @override */
  time(/** @type {number} */ seconds, /** @type {string} */ written) {
    return button("time quiet", written, () => this.seek(seconds), { title: t("Play from {time}", { time: written }) });
  }
}

/** What the model will see of a video, and the choice of it. */
export class ClipEditor extends Fold {
  #asked = "";
  /** @type {Strip | null} */
  #strip = null;
  /** @type {Chapter[] | null} */
  #chapters = null;
  #loadSoon = debounce(LOAD_AFTER_MS, () => this.load());

  /**
   * @param {MediaDesk} desk
   * @param {Requests} requests
   * @param {Draft} draft
   * @param {DraftFile} file
   * @param {string} digest
   */
  constructor(desk, requests, draft, file, digest) {
    super(t("What the model will see of {name}", { name: file.name }), desk, { name: file.name, digest });
    this.requests = requests;
    this.draft = draft;
    this.chosen = file;
    this.chapters = h("div.chapters", { role: "group", "aria-label": t("Chapters") });
    this.behind = h("div.behind", { "aria-hidden": "true", onpointerdown: (event) => this.drag(event) });
    const begin = (/** @type {number} */ seconds) => this.choose({ start_s: Math.min(seconds, this.end_s - STEP_S) });
    const end = (/** @type {number} */ seconds) =>
      this.choose({ end_s: seconds >= this.duration_s ? null : Math.max(seconds, this.clip.start_s + STEP_S) });
    this.start = this.handle(t("From"), begin);
    this.end = this.handle(t("To"), end);
    this.track = h("div.track", { hidden: true }, this.behind, h("div.chosen"), this.start, this.end);
    this.from = this.field(t("From"), begin);
    this.to = this.field(t("To"), end);
    const max = String(NUM_POSITIONS);
    this.count = h("input", { type: "range", min: "0", max, "aria-label": t("Number of frames") });
    this.count.addEventListener("input", () => {
      this.choose({ num_frames: amountAt(Number(this.count.value), this.counts) });
    });
    this.number = h("output", { "aria-hidden": "true" });
    this.same = h("input", { type: "checkbox" });
    this.numSame = h("output");
    this.same.addEventListener("change", () => this.choose({ drop_similar: this.same.checked }));
    this.whole = button("link", t("Use whole video"), () => {
      this.choose(WHOLE);
      this.start.focus();
    });
    const toText = () => this.element.closest("form")?.querySelector("textarea")?.focus();
    this.part = button("plain", t("Ask about this part"), toText);
    this.controls = h("div.controls.row.wrap.quiet", { hidden: true }, [
      h("label.row", h("span", t("From")), this.from),
      h("label.row", h("span", t("To")), this.to),
      h("label.row", h("span", t("Frames")), this.count, this.number),
      h("label.row", this.same, h("span", t("Leave out similar frames")), this.numSame),
      this.part,
      this.whole,
    ]);
    this.film.before(this.chapters, this.track, this.controls);
    new ResizeObserver(() => this.arrange()).observe(this.element);
    this.drawChoice();
  }

  get clip() {
    return this.chosen.clip ?? WHOLE;
  }

  get duration_s() {
    return this.#strip ? Math.max(Math.floor(this.#strip.duration_s / STEP_S + 1e-6), 1) * STEP_S : 0;
  }

  get end_s() {
    return this.clip.end_s ?? this.duration_s;
  }

  get counts() {
    return { low: 1, high: Math.max(this.#strip?.most ?? 2, 2) };
  }

  handle(/** @type {string} */ label, /** @type {(value: number) => unknown} */ move) {
    const input = h("input", { type: "range", min: "0", step: String(STEP_S), "aria-label": label });
    input.addEventListener("input", () => move(Number(input.value)));
    return input;
  }

  field(/** @type {string} */ label, /** @type {(seconds: number) => unknown} */ take) {
    const input = h("input.seconds", { inputMode: "decimal", autocomplete: "off", "aria-label": label });
    input.addEventListener("change", () => {
      const seconds = secondsOf(input.value);
      if (seconds !== null) take(Math.min(seconds, this.duration_s));
      this.drawChoice();
    });
    return input;
  }

  /** Chooses what a pointer is drawn over on the pictures of the whole video. */
  drag(/** @type {PointerEvent} */ { currentTarget, pointerId, clientX }) {
    const behind = /** @type {HTMLElement} */ (currentTarget);
    const { left, width } = behind.getBoundingClientRect();
    const at = (/** @type {number} */ x) => Math.min(Math.max((x - left) / width, 0), 1) * this.duration_s;
    const from = at(clientX);
    behind.setPointerCapture(pointerId);
    behind.onpointermove = (event) => {
      const [start_s, end_s] = [from, at(event.clientX)].sort((a, b) => a - b);
      if (end_s - start_s >= STEP_S) this.chooseRange(start_s, end_s);
    };
    behind.onlostpointercapture = () => {
      behind.onpointermove = null;
    };
  }

  chooseRange(/** @type {number} */ start_s, /** @type {number} */ end_s) {
    this.choose({ start_s, end_s: end_s >= this.duration_s ? null : end_s });
  }

  choose(/** @type {Partial<Clip>} */ part) {
    const rounded = (/** @type {number | null} */ seconds) => seconds && Math.max(Number(seconds.toFixed(3)), 0);
    const clip = { ...this.clip, ...part };
    clip.start_s = rounded(clip.start_s) ?? 0;
    clip.end_s = rounded(clip.end_s);
    this.draft.choose(this.chosen, JSON.stringify(clip) === JSON.stringify(WHOLE) ? null : clip);
    this.drawChoice();
  }

  /** What the model would be shown may be another. */
  refresh() {
    if (this.element.open && this.#asked !== JSON.stringify(this.draft.alone(this.chosen))) this.#loadSoon();
  }

  /** @override */
  async load() {
    const message = this.draft.alone(this.chosen);
    const asked = JSON.stringify(message);
    if (this.#asked === asked && this.film.children.length) return;
    this.#asked = asked;
    const strip = await this.ask((signal) => this.requests.send("strip", message, signal));
    if (!strip) return this.#offerLess();
    this.#strip = strip;
    this.draw(strip);
    this.drawChoice();
    this.arrange();
    // What came of it: a part may have fewer.
    this.tellCount(strip.frames.length);
    const numSame = strip.frames.filter(({ is_same }) => is_same).length;
    this.numSame.textContent = numSame ? number(numSame) : "";
    if (this.behind.children.length) return;
    const { start_s, end_s } = this.clip;
    const behind = start_s || end_s !== null ? await this.#overview() : strip;
    if (behind) this.drawBehind(behind);
    this.loadChapters();
  }

  /** Those of a long video, where they are found in time. */
  async loadChapters() {
    if (this.#chapters || this.duration_s < HAS_CHAPTERS_S) return;
    this.#chapters = [];
    const found = await this.requests.send("chapters", this.draft.alone(this.chosen)).catch(() => null);
    this.#chapters = found?.chapters ?? [];
    const drawn = this.#chapters.map(({ start_s, end_s, picture }) => {
      const time = timeOf(start_s, 0);
      const label = t("Chapter {from} to {to}", { from: time, to: timeOf(end_s, 0) });
      const choose = () => this.chooseRange(start_s, end_s);
      const looks = { "aria-label": label, title: label, style: `flex-grow: ${(end_s - start_s).toFixed(1)}` };
      return button("chapter", [h("img", { src: picture, alt: "" }), h("span.badge", time)], choose, looks);
    });
    redraw(this.chapters, drawn);
    this.drawChoice();
  }

  /** Some frames of the whole video. */
  #overview() {
    const whole = this.draft.alone({ ...this.chosen, clip: { ...WHOLE, num_frames: NUM_BEHIND } });
    return this.ask((signal) => this.requests.send("strip", whole, signal));
  }

  /** Where not everything can be read, as in hours of video, a part can still be chosen. */
  async #offerLess() {
    const why = this.words.textContent;
    if (!why || this.#strip) return;
    const some = await this.#overview();
    if (!some) return;
    this.#strip = some;
    this.drawBehind(some);
    this.drawChoice();
    this.words.textContent = why;
  }

  /** Pictures of the whole video behind the handles. */
  drawBehind(/** @type {Strip} */ { frames }) {
    const num = Math.min(NUM_BEHIND, frames.length);
    const chosen = Array.from({ length: num }, (_, at) => frames[Math.floor(((at + 0.5) * frames.length) / num)]);
    redraw(
      this.behind,
      chosen.map(({ picture }) => h("img", { src: picture, alt: "", draggable: "false" })),
    );
  }

  /** In as many rows as make the frames of a large strip largest, beside chapters and controls of any height. */
  arrange() {
    if (!this.#strip) return;
    const { frames, size } = this.#strip;
    const shape = size[1] / size[0];
    const { clientWidth, clientHeight } = this.element.parentElement ?? this.element;
    const beside = this.element.offsetHeight - this.film.offsetHeight + 16;
    const room = clientWidth / Math.max(clientHeight - beside, 1);
    const across = (/** @type {number} */ rows) => Math.ceil(frames.length / rows);
    const height = (/** @type {number} */ rows) => Math.min(1 / rows, room / across(rows) / shape);
    let rows = 1;
    while (height(rows + 1) > height(rows)) rows++;
    const looks = { "--rows": rows, "--across": across(rows), "--shape": shape, "--beside": `${beside}px` };
    for (const [name, value] of Object.entries(looks)) this.film.style.setProperty(name, String(value));
  }

  tellCount(/** @type {number} */ count) {
    this.count.setAttribute("aria-valuetext", number(count));
    this.number.textContent = number(count);
  }

  drawChoice() {
    const { clip, duration_s } = this;
    this.about.textContent = partOf(this.chosen.clip, duration_s).join();
    this.track.hidden = this.controls.hidden = !this.#strip;
    if (!this.#strip) return;
    for (const [handle, field, seconds] of /** @type {const} */ ([
      [this.start, this.from, clip.start_s],
      [this.end, this.to, this.end_s],
    ])) {
      handle.max = String(duration_s);
      handle.value = String(seconds);
      handle.setAttribute("aria-valuetext", timeOf(seconds));
      field.value = timeOf(seconds);
    }
    this.track.style.setProperty("--from", String(clip.start_s / duration_s));
    this.track.style.setProperty("--to", String(this.end_s / duration_s));
    const count = clip.num_frames ?? this.#strip.frames.length;
    this.count.value = String(positionOf(count, this.counts));
    this.tellCount(count);
    this.same.checked = clip.drop_similar;
    this.whole.hidden = this.part.hidden = !this.chosen.clip;
    this.#chapters?.forEach(({ start_s, end_s }, at) => {
      const isChosen = Math.abs(clip.start_s - start_s) < STEP_S && Math.abs(this.end_s - end_s) < STEP_S;
      this.chapters.children[at]?.setAttribute("aria-pressed", String(isChosen));
    });
  }
}

/** The part that was chosen, in words, where one was. */
function partOf(/** @type {Clip | null | undefined} */ clip, /** @type {number | null | undefined} */ duration_s) {
  if (!clip || (!clip.start_s && clip.end_s === null)) return [];
  return [rangeOf(clip.start_s, clip.end_s ?? (duration_s || null))];
}

// Pictures, videos and their frames on the whole screen, one after the other, with zoom.

/** @import { DraftFile } from "../compose/draft.js" */
/** @import { Attachment, CropArguments, Message } from "../common/types.d.ts" */
/** @import { Item } from "./items.js" */
/** @import { Point } from "./viewport.js" */

import { h, icon, iconButton, redraw, showDialog } from "../common/dom.js";
import { number, t } from "../common/words.js";
import { askWhat, Closer, canCut } from "./closer.js";
import { askToFind } from "./find.js";
import { itemOf, pictureOf } from "./items.js";
import { Marks } from "./marks.js";
import { shares } from "./shapes.js";
import { Viewport } from "./viewport.js";

const ZOOM_STEP = 1.4;
const PAN_STEP_PX = 80;
// A sideways swipe longer than this goes to the next one.
const SWIPE_PX = 60;

/**
 * What the viewer and its tools need of the page.
 * @typedef {object} MediaDesk
 * @property {Element} notices the page's notices, which the viewer shows above itself
 * @property {(words: string) => void} say
 * @property {() => Message[]} messages those of the chat that is shown
 * @property {(part: CropArguments) => Promise<Attachment | null>} crop null where that fails, which is said
 * @property {(text: string, files: DraftFile[]) => void} send a question about files, beside what is being written
 * @property {(files: DraftFile[], text?: string) => void} attach adds files to the message that is being written, and
 *   a text where there is none
 */

/**
 * Shows one of some files on the whole screen, among all pictures and videos of them.
 * @param {MediaDesk} desk
 * @param {Pick<Attachment, "digest" | "kind" | "name" | "size">[]} files
 * @param {string} digest
 * @param {{ closer?: boolean, time_s?: number }} [how] to draw a rectangle on it; a video's time
 */
export function lookAt(desk, files, digest, { closer = false, time_s = 0 } = {}) {
  const items = files.filter(({ kind }) => kind !== "text").map(itemOf);
  const at = items.findIndex((item) => item.digest === digest);
  const viewer = new Viewer(desk, items, Math.max(at, 0));
  viewer.open();
  if (viewer.shown instanceof HTMLVideoElement) viewer.shown.currentTime = time_s;
  if (closer) viewer.closer.set(true);
}

/** Those of the chat. */
export const sentFiles = (/** @type {MediaDesk} */ desk) =>
  desk.messages().flatMap((message) => ("attachments" in message ? message.attachments : []));

export class Viewer {
  /** Fingers and buttons that are down, where they are. @type {Map<number, Point>} */
  #pointers = new Map();
  /** Where the first one went down; none any more once it can't be a swipe. @type {Point | null} */
  #start = null;
  /** @type {Viewport | null} */
  port = null;
  /** @type {Marks | null} */
  marks = null;
  /** What is shown: a picture, a video, or words on why there is none. @type {HTMLElement} */
  shown = h("span");

  /**
   * @param {MediaDesk} desk
   * @param {Item[]} items
   * @param {number} at the one that is shown first
   */
  constructor(desk, items, at) {
    this.desk = desk;
    this.items = items;
    this.at = at;
    this.title = h("span", { role: "status" });
    this.percent = h("span.percent.quiet");
    this.picture = h("div.view");
    this.stage = h("div.stage", { tabindex: "0", role: "group" }, this.picture);
    this.previous = iconButton("left", t("Previous"), () => this.go(-1), { class: "step before" });
    this.next = iconButton("right", t("Next"), () => this.go(1), { class: "step after" });
    this.zooms = h(
      "div.zooms.row",
      iconButton("minus", t("Zoom out"), () => this.zoom(1 / ZOOM_STEP)),
      this.percent,
      iconButton("plus", t("Zoom in"), () => this.zoom(ZOOM_STEP)),
      iconButton("fit", t("Fit"), () => this.fit()),
      iconButton("pixels", t("Actual size"), () => this.zoomTo(1)),
    );
    this.closer = new Closer(this);
    this.finder = iconButton("find", t("Find something in this picture"), () => this.find());
    this.tools = h("div.tools.row", this.closer.toggle, this.finder);
    const save = h("a.icon-button", { title: t("Save"), "aria-label": t("Save") }, icon("download"));
    this.save = save;
    const close = iconButton("close", t("Close"), () => this.dialog.close());
    const bar = h("header.row.wrap.end", h("h2", this.title), this.tools, this.zooms, save, close);
    const middle = h("div.middle", this.stage, this.closer.words, this.previous, this.next);
    this.side = h("aside.beside", { hidden: true });
    this.dialog = h("dialog.viewer", { "aria-label": t("Viewer") }, bar, middle, this.side, this.closer.form);
    this.dialog.addEventListener("keydown", (event) => this.key(event));
    this.listen();
  }

  get item() {
    return this.items[this.at];
  }

  /** Opens it; closed, it gives the focus back. */
  open() {
    const opener = document.activeElement;
    const resized = new ResizeObserver(() => this.resize());
    resized.observe(this.stage);
    this.dialog.addEventListener("close", () => {
      resized.disconnect();
      place?.append(notices);
      // What opened it may have been drawn anew meanwhile.
      if (!opener?.isConnected) /** @type {HTMLElement | null} */ (document.querySelector(".transcript"))?.focus();
    });
    showDialog(this.dialog);
    // Below it they would not be seen.
    const { notices } = this.desk;
    const place = notices.parentElement;
    this.dialog.append(notices);
    this.stage.focus();
    this.show();
  }

  /** Asks for what to find in the picture. */
  async find() {
    if (await askToFind(this.desk, this.item)) this.dialog.close();
  }

  /** One further, or back. */
  go(/** @type {number} */ step) {
    this.goTo(this.at + step);
  }

  goTo(/** @type {number} */ at) {
    if (at === this.at || !this.items[at]) return;
    if (this.closer.isOn) this.closer.set(false);
    this.at = at;
    this.show();
  }

  show() {
    const { item, items, at } = this;
    const { label, name, kind, size, poster, time_s, href = item.src } = item;
    const place = items.length > 1 ? t("{label}, {n} of {m}", { label, n: at + 1, m: items.length }) : label;
    this.title.textContent = place;
    this.stage.setAttribute("aria-label", place);
    this.save.setAttribute("href", href);
    this.save.setAttribute("download", typeof time_s === "number" ? `${label}.jpg` : (name ?? label));
    const [first, last] = [at === 0, at === items.length - 1];
    // A button that can't be pressed any more has no keys.
    if (document.activeElement === (first ? this.previous : last && this.next)) this.stage.focus();
    this.previous.disabled = first;
    this.next.disabled = last;
    this.closer.toggle.hidden = !canCut(item);
    this.finder.hidden = !canCut(item) || kind === "video";
    this.zooms.hidden = kind === "video";
    this.port = null;
    this.picture.style.cssText = poster && kind === "image" ? `background-image: url("${poster}")` : "";
    this.shown = kind === "video" ? this.video(item) : this.image(item);
    redraw(this.picture, this.shown);
    this.showMarks(item);
    if (size && kind === "image") this.measure({ width: size[1], height: size[0] });
    else this.place();
  }

  /** What an answer points at: on the picture, and in a list beside it, from which each can be zoomed to. */
  showMarks(/** @type {Item} */ { marked }) {
    this.side.hidden = !marked;
    this.marks = null;
    if (!marked) return;
    const { grounding, unit, lit } = marked;
    const near = (/** @type {number} */ at) => {
      const { box, point } = grounding.marks[at];
      const [left, top, right = left, bottom = top] = shares(box ?? point ?? [], unit, grounding);
      this.port?.show({ left, top, right, bottom });
      this.place();
      marks.light(at);
    };
    const marks = new Marks(near, async (part) => (await askWhat(this.desk, this.item, part)) && this.dialog.close());
    marks.draw(grounding, unit);
    marks.light(lit);
    this.marks = marks;
    this.picture.append(marks.layer);
    redraw(this.side, marks.list);
  }

  /** The pixels of what is shown are known: it gets its place. */
  measure(/** @type {{ width: number, height: number }} */ size) {
    const isKnown = this.port && this.port.picture.width === size.width && this.port.picture.height === size.height;
    if (!isKnown && size.width && size.height) this.port = new Viewport(size, this.room);
    this.place();
  }

  image(/** @type {Item} */ { src, label }) {
    const image = h("img", { src, alt: label, draggable: "false" });
    image.addEventListener("load", () => {
      // An earlier picture may load late.
      if (this.shown === image) this.measure({ width: image.naturalWidth, height: image.naturalHeight });
      this.picture.style.backgroundImage = "";
    });
    image.addEventListener("error", () => this.shown === image && this.lack());
    return image;
  }

  video(/** @type {Item} */ { src, label, poster, digest, name = label }) {
    const video = h("video", { src, poster, controls: true, muted: true, playsInline: true, "aria-label": label });
    video.addEventListener("error", () => {
      if (this.shown !== video) return;
      if (!digest) return this.lack();
      // What a browser can't play, the program can show.
      this.items[this.at] = { ...pictureOf({ digest, name, time_s: 0, size: null }), href: src };
      this.show();
    });
    return video;
  }

  /** The browser can't show it. */
  lack() {
    this.port = null;
    this.picture.style.cssText = "";
    this.shown = h("p.none", { role: "alert" }, t("Browsers can't show this format."));
    redraw(this.picture, this.shown);
    this.zooms.hidden = true;
    this.place();
  }

  // How near

  get room() {
    return { width: this.stage.clientWidth, height: this.stage.clientHeight };
  }

  resize() {
    this.port?.resize(this.room);
    this.place();
  }

  /** Places the picture. */
  place() {
    const { port, picture } = this;
    this.stage.classList.toggle("movable", port !== null && !port.isWhole);
    picture.classList.toggle("placed", port !== null);
    if (!port) return;
    const { x, y, scale } = port.view;
    const { width, height } = port.picture;
    Object.assign(picture.style, {
      width: `${width * scale}px`,
      height: `${height * scale}px`,
      transform: `translate(${x}px, ${y}px)`,
    });
    // From here on, single pixels are to be seen.
    picture.classList.toggle("pixels", scale >= 4);
    this.percent.textContent = `${number(Math.round(scale * 100))} %`;
  }

  fit() {
    this.port?.fit();
    this.place();
  }

  zoom(/** @type {number} */ factor, /** @type {Point | undefined} */ at = undefined) {
    this.port?.zoomBy(factor, at);
    this.place();
  }

  zoomTo(/** @type {number} */ scale) {
    this.port?.zoomTo(scale);
    this.place();
  }

  pan(/** @type {number} */ x, /** @type {number} */ y) {
    this.port?.panBy(x, y);
    this.place();
  }

  // Keys, wheel and fingers

  key(/** @type {KeyboardEvent} */ event) {
    if (this.closer.key(event)) return;
    const { key, shiftKey, target } = event;
    const isOwn = target instanceof Element && target.matches("input, textarea, select, video");
    if (isOwn || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = this.keys(shiftKey)[key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /**
   * What keys do; arrows go from one to the next, and with Shift over what is larger than the screen.
   * @returns {Record<string, () => void>}
   */
  keys(/** @type {boolean} */ isShifted) {
    const pan = (/** @type {number} */ x, /** @type {number} */ y) => () => this.pan(x * PAN_STEP_PX, y * PAN_STEP_PX);
    /** @type {Record<string, () => void>} */
    const arrows = isShifted
      ? { ArrowLeft: pan(1, 0), ArrowRight: pan(-1, 0), ArrowUp: pan(0, 1), ArrowDown: pan(0, -1) }
      : { ArrowLeft: () => this.go(-1), ArrowRight: () => this.go(1) };
    return {
      ...arrows,
      "+": () => this.zoom(ZOOM_STEP),
      "=": () => this.zoom(ZOOM_STEP),
      "-": () => this.zoom(1 / ZOOM_STEP),
      0: () => this.fit(),
      1: () => this.zoomTo(1),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.items.length - 1),
    };
  }

  /** Where an event is on the stage. @returns {Point} */
  pointOf(/** @type {MouseEvent} */ { clientX, clientY }) {
    const { left, top } = this.stage.getBoundingClientRect();
    return { x: clientX - left, y: clientY - top };
  }

  listen() {
    const { stage } = this;
    const wheel = (/** @type {WheelEvent} */ event) => {
      if (!this.port) return;
      event.preventDefault();
      // Lines of some mice are many pixels; two fingers on a touchpad come as few of them, with Ctrl.
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 20 : 1;
      this.zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), this.pointOf(event));
    };
    stage.addEventListener("wheel", wheel, { passive: false });
    stage.addEventListener("dblclick", (event) => {
      if (this.closer.isOn) return;
      this.port?.toggle(this.pointOf(event));
      this.place();
    });
    stage.addEventListener("pointerdown", (event) => this.down(event));
    stage.addEventListener("pointermove", (event) => this.move(event));
    for (const name of /** @type {const} */ (["pointerup", "pointercancel"]))
      stage.addEventListener(name, (event) => this.up(event));
  }

  down(/** @type {PointerEvent} */ event) {
    // A video has its own controls there.
    if (event.button || !this.port) return;
    this.stage.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, this.pointOf(event));
    if (this.closer.isOn) {
      if (this.#pointers.size === 1) this.closer.down(this.pointOf(event), event.pointerType);
      else this.closer.cancel();
      return;
    }
    const isFinger = event.pointerType !== "mouse" && this.#pointers.size === 1;
    this.#start = isFinger && this.port.isWhole ? this.pointOf(event) : null;
  }

  move(/** @type {PointerEvent} */ event) {
    const before = this.#pointers.get(event.pointerId);
    if (!before) return;
    const [one, two] = this.#pointers.values();
    const after = this.pointOf(event);
    if (two) {
      const other = before === one ? two : one;
      this.zoom(distance(after, other) / Math.max(distance(before, other), 1), middle(before, other));
      this.pan((after.x - before.x) / 2, (after.y - before.y) / 2);
    } else if (this.closer.isOn) this.closer.move(after);
    else this.pan(after.x - before.x, after.y - before.y);
    this.#pointers.set(event.pointerId, after);
  }

  up(/** @type {PointerEvent} */ event) {
    if (!this.#pointers.delete(event.pointerId)) return;
    this.closer.up(event.pointerType);
    const start = this.#start;
    this.#start = null;
    if (!start || this.#pointers.size) return;
    const { x, y } = this.pointOf(event);
    const [right, down] = [x - start.x, y - start.y];
    if (Math.abs(right) > Math.max(SWIPE_PX, 2 * Math.abs(down))) this.go(right < 0 ? 1 : -1);
  }
}

const distance = (/** @type {Point} */ one, /** @type {Point} */ two) => Math.hypot(one.x - two.x, one.y - two.y);
const middle = (/** @type {Point} */ one, /** @type {Point} */ two) => ({
  x: (one.x + two.x) / 2,
  y: (one.y + two.y) / 2,
});

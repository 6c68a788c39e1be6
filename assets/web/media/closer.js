// A part of a picture or of a video's frame, drawn on it in the viewer, and asked about.

/** @import { Attachment } from "../common/types.d.ts" */
/** @import { Item } from "./items.js" */
/** @import { Grip, Rectangle } from "./rectangle.js" */
/** @import { MediaDesk, Viewer } from "./viewer.js" */
/** @import { Point } from "./viewport.js" */

import { button, h, iconButton, isComposing } from "../common/dom.js";
import { number, t } from "../common/words.js";
import { between, gripAt, moved, pulled } from "./rectangle.js";
import { insetOf } from "./shapes.js";

/** Questions that were written and not sent, by the files that they are about. @type {Map<string, string>} */
const written = new Map();

// Where a rectangle drawn by keys begins, and how far a key moves it.
const MIDDLE = { left: 0.25, top: 0.25, right: 0.75, bottom: 0.75 };
const KEY_STEP = 0.02;
const REACH_PX = { mouse: 8, finger: 22 };
// A smaller rectangle was a click.
const LEAST_PX = 6;

/**
 * A part of what is looked at, as a file of a message; null where that isn't possible, and the person was told why.
 * @param {MediaDesk} desk
 * @param {Item} item
 * @param {Rectangle} part
 * @param {number | null} time_s of a video's frame
 * @returns {Promise<Attachment | null>}
 */
export function cutOut(desk, { digest = "", name = "" }, { left, top, right, bottom }, time_s) {
  const named = { digest, source: name, name: t("Part of {name}", { name }) };
  return desk.crop({ ...named, box: [left, top, right, bottom], time_s });
}

/** Asks what a part shows; whether that was sent. */
export async function askWhat(/** @type {MediaDesk} */ desk, /** @type {Item} */ item, /** @type {Rectangle} */ part) {
  const file = await cutOut(desk, item, part, item.time_s ?? null);
  if (file) desk.send(t("What is this?"), [file]);
  return file !== null;
}

/** Whether a part can be cut out; not of an animation. */
export const canCut = (/** @type {Item} */ { digest, name, isAnimated }) => Boolean(digest && name && !isAnimated);

export class Closer {
  /** @type {Rectangle | null} */
  #part = null;
  /**
   * What is held, since which point, and what was there then.
   * @type {{ grip: Grip, from: Point, before: Rectangle | null } | null}
   */
  #held = null;
  /** @type {Rectangle | null} */
  #cancelled = null;

  constructor(/** @type {Viewer} */ viewer) {
    this.viewer = viewer;
    this.toggle = iconButton("crop", t("Look closer"), () => this.set(!this.isOn), {
      "aria-pressed": "false",
    });
    this.frame = h("div.cut", { hidden: true });
    // Over the stage, so that nothing moves below a drawing hand.
    this.words = h("p.stage-words", { role: "status", hidden: true });
    this.question = h("input", {
      type: "text",
      required: true,
      maxLength: 10_000,
      placeholder: t("What do you want to know about this part?"),
      "aria-label": t("What do you want to know about this part?"),
      oninput: ({ currentTarget }) => written.set(viewer.item.digest ?? "", currentTarget.value),
    });
    this.buttons = [
      button("plain", t("What is this?"), () => {
        this.question.value = t("What is this?");
        this.use(true);
      }),
      button("plain", t("Add to the message"), () => this.use(false)),
      button("strong", t("Ask"), () => {}, { type: "submit" }),
    ];
    this.form = h("form.closer", { hidden: true, "aria-label": t("Look closer") }, [
      h("div.row.wrap", this.question, this.buttons),
    ]);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.use(true);
    });
  }

  get isOn() {
    return !this.form.hidden;
  }

  get video() {
    const { shown } = this.viewer;
    return shown instanceof HTMLVideoElement ? shown : null;
  }

  /** Begins, or ends without a question. */
  async set(/** @type {boolean} */ isOn) {
    const { viewer, video } = this;
    if (isOn && video && !video.videoWidth) {
      // Its size isn't known before.
      video.addEventListener("loadedmetadata", () => viewer.shown === video && this.set(true), { once: true });
      return;
    }
    this.form.hidden = this.words.hidden = !isOn;
    this.toggle.setAttribute("aria-pressed", String(isOn));
    viewer.stage.classList.toggle("drawing", isOn);
    this.part = null;
    this.question.value = written.get(viewer.item.digest ?? "") ?? "";
    if (video) {
      video.pause();
      video.controls = !isOn;
      viewer.port = null;
      if (isOn) viewer.measure({ width: video.videoWidth, height: video.videoHeight });
      else viewer.picture.style.cssText = "";
      viewer.zooms.hidden = !isOn;
    }
    viewer.place();
    if (isOn) viewer.picture.append(this.frame);
    viewer.stage.focus();
  }

  get part() {
    return this.#part;
  }

  set part(part) {
    this.#part = part;
    this.frame.hidden = !part;
    for (const each of [this.question, ...this.buttons]) each.disabled = !part;
    if (part) this.frame.style.inset = insetOf(part);
    const hint = t(
      "Draw a rectangle. On the keyboard, arrows move it, Shift with arrows resizes it, and Enter goes " +
        "to the question.",
    );
    this.words.textContent = part ? "" : hint;
  }

  /** Says where it is, for people who move it by keys. */
  tell(/** @type {Rectangle} */ { left, top, right, bottom }) {
    const whole = (/** @type {number} */ share) => number(Math.round(100 * share));
    const [a, b, c, d] = [left, right, top, bottom].map(whole);
    this.words.textContent = t("From {a} to {b} % across, from {c} to {d} % down", { a, b, c, d });
  }

  // Fingers and mouse, from the viewer

  /** A point of the stage as shares of the picture's sides. @returns {Point} */
  #share(/** @type {Point} */ point) {
    const { port } = this.viewer;
    if (!port) return { x: 0, y: 0 };
    const { x, y } = port.pixelAt(point);
    return { x: x / port.picture.width, y: y / port.picture.height };
  }

  /** Pixels of the page as shares. @returns {Point} */
  #length(/** @type {number} */ pixels) {
    const { port } = this.viewer;
    const scale = port?.view.scale ?? 1;
    const { width = 1, height = 1 } = port?.picture ?? {};
    return { x: pixels / scale / width, y: pixels / scale / height };
  }

  down(/** @type {Point} */ point, /** @type {string} */ pointerType) {
    const from = this.#share(point);
    const reach = this.#length(pointerType === "mouse" ? REACH_PX.mouse : REACH_PX.finger);
    const grip = this.part && gripAt(this.part, from, reach);
    this.#held = { grip, from, before: this.part };
    this.#cancelled = this.part;
  }

  move(/** @type {Point} */ point) {
    if (!this.#held) return;
    const { grip, from, before } = this.#held;
    const to = this.#share(point);
    this.part = grip && before ? pulled(before, grip, { x: to.x - from.x, y: to.y - from.y }) : between(from, to);
  }

  up(/** @type {string} */ pointerType) {
    if (!this.#held) return;
    this.#held = null;
    const { part } = this;
    const least = this.#length(LEAST_PX);
    if (part && (part.right - part.left < least.x || part.bottom - part.top < least.y)) this.part = null;
    // A keyboard on the screen would lie over what is drawn.
    else if (part && pointerType === "mouse") this.question.focus();
  }

  /** A second finger came down: this is no drawing. */
  cancel() {
    if (!this.#held) return;
    this.#held = null;
    this.part = this.#cancelled;
  }

  /** Whether it has a use for a key. */
  key(/** @type {KeyboardEvent} */ event) {
    if (!this.isOn || isComposing(event)) return false;
    const { key, shiftKey, target } = event;
    if (key === "Escape") this.set(false);
    else if (target !== this.viewer.stage) return false;
    else if (key === "Enter" && this.part) this.question.focus();
    else if (!this.#pull(key, shiftKey)) return false;
    event.preventDefault();
    return true;
  }

  #pull(/** @type {string} */ key, /** @type {boolean} */ isShifted) {
    /** @type {Record<string, Point>} */
    const ways = {
      ArrowLeft: { x: -KEY_STEP, y: 0 },
      ArrowRight: { x: KEY_STEP, y: 0 },
      ArrowUp: { x: 0, y: -KEY_STEP },
      ArrowDown: { x: 0, y: KEY_STEP },
    };
    const way = ways[key];
    if (!way && key !== "Enter") return false;
    const before = this.part;
    if (!before || !way) this.part = MIDDLE;
    else {
      const next = isShifted ? pulled(before, { x: "right", y: "bottom" }, way) : moved(before, way);
      // Never to nothing.
      if (next.right - next.left > KEY_STEP / 2 && next.bottom - next.top > KEY_STEP / 2) this.part = next;
    }
    if (this.part) this.tell(this.part);
    return true;
  }

  /** Sends the part with its question, or puts it into the message that is written. */
  async use(/** @type {boolean} */ isSent) {
    const { viewer, part, video } = this;
    const text = this.question.value.trim();
    if (!part) return;
    if (isSent && !text) return this.question.focus();
    for (const each of this.buttons) each.disabled = true;
    const { desk, item } = viewer;
    const file = await cutOut(desk, item, part, video ? video.currentTime : (item.time_s ?? null));
    for (const each of this.buttons) each.disabled = false;
    if (!file) return;
    viewer.dialog.close();
    if (!isSent) return desk.attach([file]);
    written.delete(item.digest ?? "");
    desk.send(text, [file]);
  }
}

// Which part of a picture is seen, and how large. Draws nothing.

/**
 * A width and a height, or a place, in pixels of the page or of a picture.
 * @typedef {{ width: number, height: number }} Size
 * @typedef {{ x: number, y: number }} Point
 */

/**
 * How a picture lies on a stage: its left upper corner there, and pixels of the page for one of its own.
 * @typedef {Point & { scale: number }} View
 */

// A small picture isn't enlarged too far by itself; a single pixel can still be inspected.
const MAX_FIT = 4;
const MAX_SCALE = 32;
// The share of the stage that a part takes, and how far it is enlarged at most beyond the whole picture.
const ROOM = 0.6;
const NEAR = 4;

export class Viewport {
  /** @type {View} */
  view = { x: 0, y: 0, scale: 1 };
  #isFitted = true;

  constructor(/** @type {Size} */ picture, /** @type {Size} */ stage) {
    this.picture = picture;
    this.stage = stage;
    this.fit();
  }

  /** The scale at which all of the picture is seen. */
  get fitting() {
    const { picture, stage } = this;
    return Math.min(stage.width / picture.width, stage.height / picture.height, MAX_FIT);
  }

  /** Whether it is seen whole, and there is nothing to be moved. */
  get isWhole() {
    return this.view.scale <= this.fitting * 1.001;
  }

  get middle() {
    return { x: this.stage.width / 2, y: this.stage.height / 2 };
  }

  /** Shows all of it. */
  fit() {
    this.#isFitted = true;
    this.#set(this.fitting, this.middle);
  }

  /** The stage has another size; what was seen whole still is, and the middle stays in the middle. */
  resize(/** @type {Size} */ stage) {
    const { x, y, scale } = this.view;
    const moved = { x: x + (stage.width - this.stage.width) / 2, y: y + (stage.height - this.stage.height) / 2 };
    this.stage = stage;
    if (this.#isFitted) return this.fit();
    this.view = { ...moved, scale };
    this.#set(scale, this.middle);
  }

  /** Another scale; what is at a point of the stage stays there. */
  zoomTo(/** @type {number} */ scale, /** @type {Point} */ at = this.middle) {
    this.#isFitted = false;
    this.#set(scale, at);
  }

  zoomBy(/** @type {number} */ factor, /** @type {Point} */ at = this.middle) {
    this.zoomTo(this.view.scale * factor, at);
  }

  /** Shows a part of it from near, with some room around; its edges are shares of the picture's sides. */
  show(/** @type {{ left: number, top: number, right: number, bottom: number }} */ { left, top, right, bottom }) {
    const { picture, stage, middle } = this;
    const [width, height] = [(right - left) * picture.width, (bottom - top) * picture.height];
    const near = ROOM * Math.min(stage.width / Math.max(width, 1), stage.height / Math.max(height, 1));
    const scale = within(near, this.fitting, Math.max(NEAR * this.fitting, 1));
    this.#isFitted = false;
    const [x, y] = [((left + right) / 2) * picture.width, ((top + bottom) / 2) * picture.height];
    this.view = { scale, x: middle.x - x * scale, y: middle.y - y * scale };
    this.#set(scale, middle);
  }

  /** Switches between all of it and its actual size; what is seen whole at its actual size is enlarged twofold. */
  toggle(/** @type {Point} */ at) {
    if (this.isWhole) this.zoomTo(Math.max(1, this.fitting * 2), at);
    else this.fit();
  }

  panBy(/** @type {number} */ x, /** @type {number} */ y) {
    const { view } = this;
    this.view = { ...view, x: view.x + x, y: view.y + y };
    this.#set(view.scale, this.middle);
  }

  /** The picture's pixel at a point of the stage; the nearest one beside it. */
  pixelAt(/** @type {Point} */ { x, y }) {
    const { view, picture } = this;
    return {
      x: within((x - view.x) / view.scale, 0, picture.width),
      y: within((y - view.y) / view.scale, 0, picture.height),
    };
  }

  #set(/** @type {number} */ wanted, /** @type {Point} */ at) {
    const { view, picture, stage } = this;
    const scale = within(wanted, Math.min(this.fitting, 1), MAX_SCALE);
    const ratio = scale / view.scale;
    this.view = {
      scale,
      x: placed(at.x + (view.x - at.x) * ratio, picture.width * scale, stage.width),
      y: placed(at.y + (view.y - at.y) * ratio, picture.height * scale, stage.height),
    };
  }
}

/** What is smaller than the stage lies in its middle; what is larger leaves no gap beside it. */
function placed(/** @type {number} */ start, /** @type {number} */ length, /** @type {number} */ room) {
  return length <= room ? (room - length) / 2 : within(start, room - length, 0);
}

const within = (/** @type {number} */ value, /** @type {number} */ low, /** @type {number} */ high) =>
  Math.min(Math.max(value, low), high);

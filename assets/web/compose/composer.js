// Where the message is written: draws the draft, and tells it what the person does.

/** @import { App, Cost, Offer, Question, Settings } from "../common/types.d.ts" */
/** @import { Desk, DraftFile, Waiting } from "./draft.js" */
/** @import { Link } from "../chat/link.js" */
/** @import { Idea } from "../chat/welcome.js" */
/** @import { PageState } from "../chat/state.js" */
/** @import { Presets } from "../chat/presets.js" */
/** @import { Toasts } from "../common/toasts.js" */
/** @import { MediaDesk } from "../media/viewer.js" */
/** @import { Requests } from "../common/api.js" */

import { inEncoding, pdfPages, thumbnailUrl } from "../common/api.js";
import { arrange, button, h, icon, iconButton, isComposing, redraw, setText } from "../common/dom.js";
import { said, t } from "../common/words.js";
import { ClipEditor } from "../media/strip.js";
import { textTools } from "../media/texts.js";
import { asksTwice, COARSE_S } from "../media/times.js";
import { lookAt } from "../media/viewer.js";
import { takePicture } from "./camera.js";
import { Draft } from "./draft.js";
import { linksOf } from "./links.js";
import { Offers } from "./offers.js";
import { withOffer } from "./once.js";
import { Quick } from "./quick.js";
import { Sliders } from "./sliders.js";

// Systems know few of these by their types; formats.py has the list.
const CLIPS =
  ".3g2,.3gp,.asf,.avi,.dv,.flv,.m2ts,.m2v,.m4v,.mkv,.mov,.mp4,.mpeg,.mpg,.mts,.mxf,.ogv,.qt,.ts,.vob,.webm,.wmv";
const ACCEPTED = `image/*,video/*,${CLIPS},.avif,.pdf,text/*,.md,.csv,.json,.log,.py,.js,.html,.xml,.yaml,.toml`;

// Enter on a screen's keyboard begins a line: there is no Shift+Enter.
const IS_PHONE = matchMedia("(hover: none) and (pointer: coarse)");

/**
 * What the composer needs of the page.
 * @typedef {object} Needs
 * @property {App} app
 * @property {PageState} state
 * @property {Requests} requests
 * @property {Link} link
 * @property {MediaDesk} media
 * @property {Presets} presets
 * @property {(values: Settings) => void} change settings
 * @property {Toasts["say"]} say
 * @property {(reply: string) => void} lookCloser see Desk
 * @property {(cost: Cost | null) => void} onCost what the message costs is known, or isn't any more
 */

/** @implements {Desk} */
export class Composer {
  #isRunning = false;
  #suggested = "";
  /** Addresses in the message that were read already. @type {Set<string>} */
  #read = new Set();
  #links = "";
  /** What is drawn of each file. @type {WeakMap<DraftFile, { drawn: string, element: HTMLElement }>} */
  #thumbnails = new WeakMap();
  /** What is chosen of each video. @type {WeakMap<DraftFile, ClipEditor>} */
  #editors = new WeakMap();

  constructor(/** @type {Needs} */ { app, state, requests, link, media, presets, change, say, lookCloser, onCost }) {
    this.app = app;
    this.state = state;
    this.requests = requests;
    this.link = link;
    this.media = media;
    this.say = say;
    this.onCost = onCost;
    // What the draft needs besides: see its Desk.
    this.place = () => state.place;
    this.begin = () => state.begin();
    this.answered = state.answered.bind(state);
    this.send = state.send.bind(state);
    this.lookCloser = lookCloser;
    this.whenThere = () => link.connection.whenThere();
    this.draft = new Draft(this, requests);
    this.text = h("textarea", {
      rows: 1,
      dir: "auto",
      placeholder: t("Ask about a picture or a video"),
      "aria-label": t("Message"),
      autofocus: true,
      spellcheck: true,
      oninput: () => this.typed(),
      onkeydown: (event) => this.key(event),
    });
    this.picker = h("input", { type: "file", multiple: true, hidden: true, accept: ACCEPTED });
    this.picker.addEventListener("change", () => {
      this.attach(this.picker.files ?? []);
      this.picker.value = "";
    });
    this.links = h("div.links.row.wrap", { hidden: true });
    this.strip = h("div.strip.row.wrap", { role: "group", "aria-label": t("Attached files") });
    this.films = h("div.films");
    this.twice = h("input", { type: "checkbox" });
    this.twiceWords = h("span");
    this.twice.addEventListener("change", () => {
      for (const file of this.draft.files) file.twice = this.twice.checked;
      this.typed();
    });
    this.twiceLine = h("label.twice.row.quiet", { hidden: true }, this.twice, this.twiceWords);
    this.sliders = new Sliders(this);
    const addFiles = () => this.picker.click();
    this.quick = new Quick({ app, state, presets, change, say, addFiles, shoot: () => this.shoot() });
    this.banner = h(
      "div.editing.row",
      { hidden: true },
      h("span", t("Editing an earlier message. Sending it starts a new branch.")),
      iconButton("close", t("Cancel editing"), () => this.draft.stopEditing()),
    );
    this.outbox = h("ul.outbox", { role: "list", "aria-label": t("Queued messages") });
    this.offers = new Offers(this);
    this.sendButton = iconButton("send", t("Send"), () => this.submit(), { class: "round send" });
    this.stopButton = iconButton("stop", t("Stop"), () => state.stop(), { class: "round stop", hidden: true });
    const bar = h("div.bar.row", this.quick.element, this.sendButton, this.stopButton);
    const about = { "aria-label": t("Message"), onsubmit: (/** @type {Event} */ event) => event.preventDefault() };
    this.element = h("form.composer.card", about, [
      this.outbox,
      this.banner,
      this.offers.element,
      this.strip,
      this.films,
      this.twiceLine,
      this.sliders.element,
      this.text,
      this.links,
      bar,
      this.picker,
    ]);
  }

  // What the person does

  typed() {
    this.draft.text = this.text.value;
    this.draft.measureSoon();
    this.drawText();
  }

  key(/** @type {KeyboardEvent} */ event) {
    if (isComposing(event)) return;
    const { draft } = this;
    if (event.key === "Enter" && !event.shiftKey && !IS_PHONE.matches) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !draft.text && !draft.files.length && !draft.editing) {
      event.preventDefault();
      this.editLast();
    } else if (event.key === "Escape" && draft.editing) {
      event.stopPropagation();
      draft.stopEditing();
    }
  }

  /** Takes what is pasted anywhere: files, and a text unless another field is there for it. */
  paste(/** @type {ClipboardEvent} */ event) {
    const { clipboardData: data, target } = event;
    if (!data || document.querySelector("dialog[open]")) return;
    const isInField = target instanceof Element && target.matches("input, textarea");
    const text = data.getData("text/plain");
    if (data.files.length && !isText(data) && !(isInField && target !== this.text && text)) {
      event.preventDefault();
      this.attach(data.files);
    } else if (text && !isInField) {
      event.preventDefault();
      this.text.setRangeText(text, this.text.selectionStart, this.text.selectionEnd, "end");
      this.typed();
      this.text.focus();
    }
  }

  attach(/** @type {Iterable<File>} */ files) {
    this.draft.attach(files);
    this.text.focus();
  }

  /** Puts a question into the box, after what was written there, and asks for the files that it is about. */
  suggest(/** @type {Idea} */ { text, kind, n = 1, blank = "" }) {
    const own = this.text.value.replace(this.#suggested, "").trim();
    this.text.value = own ? `${own}\n${text}` : text;
    this.#suggested = text;
    this.typed();
    this.text.focus();
    const at = this.text.value.lastIndexOf(blank);
    this.text.setSelectionRange(at, at + blank.length);
    // What a file is may still have to be found out.
    if (this.draft.files.filter((file) => [kind, null].includes(file.kind)).length < n) this.picker.click();
  }

  async shoot() {
    const file = await takePicture();
    if (file) this.attach([file]);
  }

  submit() {
    if (document.activeElement === this.sendButton) this.text.focus();
    return this.draft.submit();
  }

  /** Puts an earlier message into the box. */
  edit(/** @type {Question} */ message) {
    this.draft.edit(message);
    this.text.focus();
    this.text.setSelectionRange(message.text.length, message.text.length);
  }

  editLast() {
    const last = this.state.chat.messages.findLast((message) => message.role === "user");
    if (last) this.edit(last);
  }

  /** Does what makes a message fit; where that can hold for one message alone, it does. */
  async take(/** @type {Offer} */ offer) {
    const { draft } = this;
    if (offer.kind === "media" || offer.kind === "shorten") draft.taken = withOffer(draft.taken, offer);
    else await this.state.take(offer);
    this.sliders.redraw();
  }

  /** Makes an offer that was taken for one message hold for all. */
  async makeDefault(/** @type {Offer} */ offer) {
    if (await this.state.take(offer)) this.leave(offer);
    this.sliders.redraw();
  }

  /** Drops an offer that was taken for one message. */
  leave(/** @type {Offer} */ offer) {
    this.draft.taken = this.draft.taken.filter((each) => each !== offer);
  }

  setRunning(/** @type {boolean} */ isRunning) {
    this.#isRunning = isRunning;
    this.drawButtons();
  }

  // Drawing

  draw() {
    const { files, editing, waiting } = this.draft;
    redraw(
      this.outbox,
      waiting.map((message) => this.toBeSent(message)),
    );
    this.banner.hidden = !editing;
    arrange(
      this.strip,
      files.map((file) => this.thumbnail(file)),
    );
    this.drawFilms();
    this.sliders.draw();
    // Limits of media that it hasn't mean nothing.
    this.offers.drawTaken(this.draft.taken.filter(({ kind }) => kind !== "media" || this.draft.limits.length));
    this.drawText();
  }

  /** A video of which the model sees frames that are far apart. */
  get coarse() {
    return this.draft.files.find(({ step_s }) => (step_s ?? 0) > COARSE_S);
  }

  drawText() {
    const { coarse } = this;
    this.twiceLine.hidden = !coarse;
    if (coarse) {
      this.twice.checked = asksTwice(coarse, this.draft.text);
      const n = coarse.num_tokens ?? 0;
      this.twiceWords.textContent = t("Then look closer at the times in the answer: about {n} more tokens", { n });
    }
    const { style } = this.text;
    if (this.text.value !== this.draft.text) this.text.value = this.draft.text;
    style.height = "auto";
    style.height = `${Math.min(this.text.scrollHeight, window.innerHeight * 0.35)}px`;
    this.drawLinks();
    this.drawButtons();
  }

  /** Offers to read the addresses that the message has. */
  drawLinks() {
    const { draft, state, app } = this;
    if (draft.isEmpty) this.#read.clear();
    const reads = app.web !== null && (state.preferences.read_web ?? app.web);
    const offered = reads ? linksOf(draft.text).filter((each) => !this.#read.has(each)) : [];
    const drawn = offered.join("\n");
    this.links.hidden = !drawn;
    if (drawn === this.#links) return;
    this.#links = drawn;
    const read = (/** @type {string} */ address) => {
      this.#read.add(address);
      draft.read(address);
      this.text.focus();
    };
    redraw(
      this.links,
      offered.map((address) =>
        button("plain", [icon("file"), t("Read {name}", { name: new URL(address).host })], () => read(address), {
          title: address,
        }),
      ),
    );
  }

  /** During an answer a message can be sent too: it waits for the answer's end. */
  drawButtons() {
    const { isEmpty } = this.draft;
    const { sendButton, stopButton } = this;
    const held = document.activeElement;
    stopButton.hidden = !this.#isRunning;
    sendButton.hidden = this.#isRunning && isEmpty;
    sendButton.disabled = isEmpty;
    if (held === stopButton && stopButton.hidden) (isEmpty ? this.text : sendButton).focus();
    if (held === sendButton && sendButton.hidden) stopButton.focus();
  }

  /** A message that waits: what it says, what it waits for, and a way back. */
  toBeSent(/** @type {Waiting} */ message) {
    const { text, files, isOnItsWay } = message;
    const isUploading = files.some(({ digest }) => digest === null);
    const here = this.state.chat.running.length ? t("Waiting for the answer") : t("Waiting for another chat's answer");
    const waits = isUploading ? t("Waiting for files") : here;
    const state = this.link.isLost ? t("Waiting for the connection") : isOnItsWay ? t("Sending") : waits;
    const words = [text, ...files.map(({ name }) => name)].filter(Boolean).join(" · ");
    return h(
      "li.row",
      h("span.words", { title: words, dir: "auto" }, words),
      h("span.quiet", state),
      !isOnItsWay &&
        iconButton("edit", t("Edit before sending"), () => {
          this.draft.takeBack(message);
          this.text.focus();
        }),
    );
  }

  /** Only its words change with its cost: it keeps the focus, and what is open at it. */
  thumbnail(/** @type {DraftFile} */ file) {
    const { name, kind, digest, share, label, error, notes = [], encoding, raw } = file;
    const drawn = JSON.stringify([kind, digest, encoding, raw]);
    const before = this.#thumbnails.get(file);
    const element = before?.drawn === drawn ? before.element : this.drawThumbnail(file);
    this.#thumbnails.set(file, { drawn, element });
    const sent = t("Uploading, {p}%", { p: Math.round(100 * (share ?? 0)) });
    const uploading = share === undefined ? t("Reading") : sent;
    const words = error || digest ? said(error ?? label ?? "") : uploading;
    element.classList.toggle("bad", Boolean(error));
    element.title = [name, words, ...notes.map(said)].join("\n");
    const cost = element.querySelector(".label");
    if (cost) setText(cost, words);
    return element;
  }

  drawThumbnail(/** @type {DraftFile} */ file) {
    const { name, kind, digest, pdf, svg } = file;
    const isSeen = digest && kind !== "text";
    const picture = isSeen ? h("img", { src: thumbnailUrl(digest), alt: t("View {name}", { name }) }) : icon("file");
    const badge = kind === "video" && h("span.badge", t("clip"));
    const recode = (/** @type {string} */ raw, /** @type {string} */ encoding) =>
      this.draft.replaceBy(file, inEncoding(raw, name, encoding));
    const source = name.replace(/png$/, "svg");
    const look = () => lookAt(this.media, this.draft.message.attachments, digest ?? "");
    return h(
      "div.thumbnail.row.card",
      isSeen ? h("button.shot", { type: "button", onclick: look }, picture, badge) : h("div.shot", picture),
      h(
        "div.about",
        h("span.name", { dir: "auto" }, name),
        digest && (kind === "image" || kind === "video") ? this.sliders.trigger(kind) : h("span.label.quiet"),
        kind === "text" && textTools(this.requests, file, this.app.encodings, recode),
        pdf && button("link", t("Use pages as pictures"), () => this.draft.replaceBy(file, pdfPages(pdf, name))),
        svg && button("link", t("Use its source"), () => this.draft.replaceBy(file, inEncoding(svg, source, "UTF-8"))),
      ),
      iconButton("close", t("Remove {name}", { name }), () => {
        this.draft.remove(file);
        this.text.focus();
      }),
    );
  }

  /** What the model will see of each video. */
  drawFilms() {
    const isFirst = !this.state.chat.messages.length;
    const videos = this.draft.files.filter(({ kind, digest }) => kind === "video" && digest);
    const editors = videos.map((file, at) => {
      const before = this.#editors.get(file);
      const editor = before ?? new ClipEditor(this.media, this.requests, this.draft, file, file.digest ?? "");
      this.#editors.set(file, editor);
      if (!before) editor.element.open = Boolean(file.clip) || (isFirst && at === 0);
      return editor;
    });
    // In the place of the examples.
    this.element.classList.toggle("filming", isFirst && editors.length > 0);
    arrange(
      this.films,
      editors.map(({ element }) => element),
    );
    for (const editor of editors) editor.refresh();
  }

  drawCost(/** @type {Cost | null} */ cost) {
    this.offers.drawCost(cost);
    this.onCost(cost);
  }

  drawTrouble(/** @type {string} */ words, /** @type {Offer[]} */ offers) {
    this.offers.drawTrouble(words, offers);
  }
}

/** Whether what is pasted is a text, such as a table, that only comes with a picture of itself. */
function isText(/** @type {DataTransfer} */ data) {
  const html = new DOMParser().parseFromString(data.getData("text/html"), "text/html");
  return Boolean(data.getData("text/plain").trim() && html.body.textContent?.trim());
}

/**
 * Takes files that are dropped anywhere on the page.
 * @param {HTMLElement} element shows by the class `dropping` that they can be let go
 * @param {(files: Iterable<File>) => void} take
 */
export function takeDrops(element, take) {
  const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
  let depth = 0;
  const mark = (/** @type {number} */ change) => {
    depth = Math.max(depth + change, 0);
    element.classList.toggle("dropping", depth > 0);
  };
  element.addEventListener("dragenter", (event) => hasFiles(event) && mark(1));
  element.addEventListener("dragleave", (event) => hasFiles(event) && mark(-1));
  element.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  element.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(-depth);
    take(event.dataTransfer?.files ?? []);
  });
}

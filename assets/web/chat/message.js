// A message of the conversation: what was asked or answered, and what can be done with it.

/** @import { Answer, AnswerView, App, Attachment, Child, Message, Question } from "../common/types.d.ts" */
/** @import { Said, ToolResult, Work } from "../common/types.d.ts" */
/** @import { MediaDesk } from "../media/viewer.js" */
/** @import { Requests } from "../common/api.js" */
/** @import { PageState } from "./state.js" */
/** @import { Player } from "../media/player.js" */

import { button, h, icon, iconButton, redraw, setProgress, setText } from "../common/dom.js";
import { number, said, t } from "../common/words.js";
import { Groundings } from "../media/grounding.js";
import { itemOf } from "../media/items.js";
import { withTools } from "../media/medium.js";
import { ShownStrip } from "../media/strip.js";
import { textCard } from "../media/texts.js";
import { lookAt, sentFiles } from "../media/viewer.js";
import { Blocks, copy } from "./blocks.js";
import { Calls, toolName } from "./calls.js";
import { answerEditor, isEdited } from "./editor.js";

/**
 * What a message needs of the page.
 * @typedef {object} MessageDesk
 * @property {App} app
 * @property {PageState} state
 * @property {Requests} requests
 * @property {MediaDesk} media
 * @property {Player} player
 * @property {(message: Message) => unknown} remove
 * @property {(question: Question) => unknown} edit puts it into the composer
 * @property {(answer: Answer) => unknown} compare
 * @property {() => boolean} isLost whether the connection is
 * @property {() => void} toComposer gives it the focus
 * @property {() => Child} offer of a real model instead of the practice model
 * @property {(words: string) => void} speak tells a screen reader
 */

/**
 * Shows a message; drawn again only where it has changed.
 * @template {Message} M
 */
export class Row {
  #drawn = "";

  /**
   * @param {M} message
   * @param {MessageDesk} desk
   */
  constructor({ id, role }, desk) {
    this.desk = desk;
    this.id = id;
    this.body = h("div.body");
    this.tools = h("div.tools.row.wrap.quiet");
    const label = role === "user" ? t("You") : role === "tool" ? t("Result of a tool") : t("Answer");
    this.element = h("article.message", { class: role, "data-id": id, "aria-label": label }, this.body, this.tools);
  }

  show(/** @type {M} */ message) {
    this.element.classList.toggle("left-out", !message.kept);
    const drawn = JSON.stringify(message);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.draw(message);
  }

  draw(/** @type {M} */ _message) {}

  /** What can be done with any message, around what can be done with this kind. */
  drawTools(/** @type {M} */ message, /** @type {Child[]} */ ...own) {
    redraw(
      this.tools,
      this.branches(message),
      message.text && iconButton("copy", t("Copy"), ({ currentTarget }) => copy(currentTarget, message.text)),
      own,
    );
  }

  branches(/** @type {M} */ { branch: { at, of, previous, next } }) {
    if (of < 2) return null;
    const go = (/** @type {string | null} */ node) => node && this.desk.state.showBranch(node);
    return h(
      "span.branches.row",
      { role: "group", "aria-label": t("Branches") },
      iconButton("left", t("Previous branch"), () => go(previous), { disabled: !previous }),
      h("span.count", `${at}/${of}`),
      iconButton("right", t("Next branch"), () => go(next), { disabled: !next }),
    );
  }

  deleteButton(/** @type {M} */ message) {
    return iconButton("trash", t("Delete"), () => this.desk.remove(message));
  }
}

/**
 * A message with files.
 * @template {Question | ToolResult} M
 * @extends {Row<M>}
 */
class FilesRow extends Row {
  /** By the places of their videos. @type {Map<number, { of: string, strip: ShownStrip }>} */
  #strips = new Map();

  files(/** @type {M} */ { attachments }) {
    return (
      attachments.length > 0 &&
      h(
        "div.files.row.wrap",
        attachments.map((each, at) => this.file(each, at)),
      )
    );
  }

  file(/** @type {Attachment} */ file, /** @type {number} */ at) {
    const { digest, name, size } = file;
    if (file.kind === "text") return textCard(this.desk.requests, file);
    const { kind, src, poster } = itemOf(file);
    const labels = { title: name, "aria-label": name };
    if (kind === "video") {
      const video = h("video", { src, poster, controls: true, muted: true, preload: "none", ...labels });
      if (size) video.style.setProperty("--shape", String(size[1] / size[0]));
      return this.withStrip(withTools(this.desk.media, video, file), file, at);
    }
    const image = h("img", { src: file.kind === "video" ? src : poster, alt: name, loading: "lazy" });
    // Known before it is loaded, so that nothing jumps.
    if (size) image.style.aspectRatio = `${size[1]} / ${size[0]}`;
    const onclick = () => lookAt(this.desk.media, sentFiles(this.desk.media), digest);
    const picture = withTools(
      this.desk.media,
      h("button.picture", { type: "button", onclick, ...labels }, image),
      file,
    );
    return file.kind === "video" ? this.withStrip(picture, file, at) : picture;
  }

  /** A video, and what the model was shown of it, which stays open while the message is drawn again. */
  withStrip(/** @type {HTMLElement} */ shown, /** @type {Attachment} */ file, /** @type {number} */ at) {
    const [of, before] = [JSON.stringify(file), this.#strips.get(at)];
    if (before?.of === of) return h("div.video", { "data-at": String(at) }, shown, before.strip.element);
    const { media, player, requests, state } = this.desk;
    const seek = (/** @type {number} */ from_s) => player.play({ node: this.id, at, file }, from_s);
    const send = (/** @type {AbortSignal} */ signal) =>
      requests.send("shown_strip", { conversation: state.chat.id, node: this.id, at }, signal);
    const strip = new ShownStrip(media, send, file, seek);
    // What it left out is known once it was read.
    strip.element.open = before?.strip.element.open ?? false;
    this.#strips.set(at, { of, strip });
    return h("div.video", { "data-at": String(at) }, shown, strip.element);
  }
}

/** @extends {FilesRow<Question>} */
export class QuestionRow extends FilesRow {
  /** @override */
  draw(/** @type {Question} */ message) {
    redraw(
      this.body,
      this.files(message),
      message.text && h("div.bubble", { dir: "auto" }, message.text),
      leftOut(message.left_out),
    );
    const answer = () => this.desk.state.answer(message.id);
    this.drawTools(
      message,
      message.unanswered && button("plain", [icon("goOn"), t("Answer this question")], answer),
      iconButton("edit", t("Edit"), () => this.desk.edit(message)),
      this.deleteButton(message),
    );
  }
}

/** What a tool gave, for the person to unfold; its pictures are seen at once. @extends {FilesRow<ToolResult>} */
export class ResultRow extends FilesRow {
  #isOpen = false;

  /** @override */
  draw(/** @type {ToolResult} */ message) {
    const { status, text, name } = message;
    const tool = toolName(name);
    const title =
      status === "running"
        ? t("Waiting for {tool}", { tool })
        : status === "finished"
          ? t("Result of {tool}", { tool })
          : t("No result of {tool}", { tool });
    const fold = h("details.fold.quiet.result", { open: this.#isOpen }, h("summary", title), h("pre", text));
    fold.addEventListener("toggle", () => {
      this.#isOpen = fold.open;
    });
    redraw(this.body, text ? fold : h("p.quiet", title), this.files(message));
    const answer = () => this.desk.state.answer(message.id);
    redraw(this.tools, message.unanswered && button("plain", [icon("goOn"), t("Answer with this result")], answer));
  }
}

// The practice model's words for all that it doesn't know, such as photographs.
const UNKNOWN = "I can't tell.";

/** @extends {Row<Answer>} */
export class AnswerRow extends Row {
  /** The person opened or folded the thinking. */
  #wasToggled = false;
  #isToggling = false;
  /** What it points at is drawn. */
  #hasMarks = false;
  #isJsonOpen = false;
  #notes = "";
  /** How much of its text a screen reader was told. */
  #told = 0;
  /** What is going on for it. @type {Work} */
  #work = { label: "", share: null };

  /**
   * @param {Answer} message
   * @param {MessageDesk} desk
   */
  constructor(message, desk) {
    super(message, desk);
    this.notes = h("details.fold.quiet.notes", { hidden: true });
    this.thoughtTitle = h("span");
    this.thoughtText = h("div.prose");
    this.thought = h(
      "details.fold.quiet.thinking",
      { hidden: true },
      h("summary", this.thoughtTitle),
      this.thoughtText,
    );
    this.thought.addEventListener("toggle", () => {
      if (!this.#isToggling) this.#wasToggled = true;
      this.#isToggling = false;
    });
    const linkTimes = (/** @type {Element} */ block) => desk.player.link(block, this.id);
    this.thoughtBlocks = new Blocks(this.thoughtText, desk.requests, linkTimes);
    this.answer = h("div.prose.answer");
    this.blocks = new Blocks(this.answer, desk.requests, (block) => {
      if (this.#hasMarks) this.#foldMarks(block);
      linkTimes(block);
    });
    this.calls = new Calls((answers) => desk.state.runCalls(this.id, answers));
    this.groundings = new Groundings(desk.media);
    this.offer = h("div.offer");
    this.problem = h("div.problem", { hidden: true });
    this.bar = h("progress", { "aria-hidden": "true" });
    this.label = h("span");
    // Many times a second another number: nothing to be read out.
    this.pace = h("small.pace", { "aria-live": "off" });
    this.work = h("div.work.row.quiet", { hidden: true }, this.bar, this.label, this.pace);
    const { element } = this.groundings;
    this.body.append(this.notes, this.thought, this.answer, element, this.offer, this.calls.element);
    this.body.append(this.problem, this.work);
  }

  /** Folds a block that is nothing but marks, which are drawn on their pictures. */
  #foldMarks(/** @type {Element} */ block) {
    const text = block.textContent ?? "";
    if (!/["'](?:bbox_2d|point_2d)["']/.test(text) || !(block.querySelector("pre") || /^\s*[[{]/.test(text))) return;
    const fold = h("details.fold.quiet.json", { open: this.#isJsonOpen }, h("summary", "JSON"));
    fold.append(...block.childNodes);
    fold.addEventListener("toggle", () => {
      this.#isJsonOpen = fold.open;
    });
    block.append(fold);
  }

  /** @override */
  draw(/** @type {Answer} */ message) {
    this.update(message);
    if (message.status === "running") return this.tools.replaceChildren();
    if (isEdited(message.id)) this.edit(message);
    const { state, app } = this.desk;
    const look = this.desk.player.closer(message);
    const attach = () => look && this.desk.media.attach(look.files, look.text);
    redraw(
      this.offer,
      this.desk.app.is_demo && message.text.startsWith(UNKNOWN) && this.desk.offer(),
      look && button("plain", t("Look closer at {times}", { times: look.times }), attach),
    );
    const isCutOff = message.status !== "finished" && (message.text || message.reasoning.length > 0);
    const canGoOn = isCutOff && app.server?.continues !== false;
    const hasFailed = message.error || (!message.text && !message.calls.length);
    const again = () => state.answer(message.parent);
    this.drawTools(
      message,
      message.edited && h("span.edited", t("Edited")),
      !message.calls.length &&
        iconButton("edit", t("Edit"), () => this.edit(message)?.begin(), { class: "edit-answer" }),
      !hasFailed && iconButton("again", t("Regenerate"), again),
      message.branch.of < 2 && this.compareButton(message),
      this.deleteButton(message),
      this.cost(message),
    );
    this.tools.prepend(
      ...(canGoOn ? [button("plain", [icon("goOn"), t("Continue")], () => state.goOn(message))] : []),
      ...(hasFailed ? [button("plain", [icon("again"), t("Try again")], again)] : []),
    );
  }

  /** Puts a box with its words in its place; nothing where it stands there already. */
  edit(/** @type {Answer} */ message) {
    if (this.element.classList.contains("is-edited")) return null;
    const close = () => {
      this.element.classList.remove("is-edited");
      editor.element.remove();
      /** @type {HTMLElement | null} */ (this.tools.querySelector(".edit-answer"))?.focus();
    };
    const editor = answerEditor(this.desk.state, message, close, this.desk.toComposer);
    this.element.classList.add("is-edited");
    this.answer.after(editor.element);
    return editor;
  }

  /** @override */
  branches(/** @type {Answer} */ message) {
    const branches = super.branches(message);
    branches?.append(this.compareButton(message));
    return branches;
  }

  compareButton(/** @type {Answer} */ message) {
    return iconButton("columns", t("Compare"), () => this.desk.compare(message));
  }

  /** Draws what is new of it. */
  update(/** @type {AnswerView} */ view) {
    const isRunning = view.status === "running";
    const wasRunning = this.element.classList.contains("running");
    this.element.classList.toggle("running", isRunning);
    // What stood there before it is continued was read.
    if (isRunning && !wasRunning) this.#told = this.#readable().length;
    this.#hasMarks = view.groundings.length > 0;
    this.blocks.draw(view.blocks, isRunning);
    if (isRunning || wasRunning) this.readOut(isRunning);
    this.groundings.show(view.groundings);
    this.calls.draw(view);
    // An answer that is nothing but marks lies folded below its picture.
    const isFolded =
      this.#hasMarks && [...this.answer.children].every((block) => block.firstElementChild?.matches(".json"));
    if (isFolded !== (this.answer.nextSibling !== this.groundings.element))
      if (isFolded) this.answer.before(this.groundings.element);
      else this.answer.after(this.groundings.element);
    this.drawThinking(view, isRunning);
    this.drawNotes(view.notes);
    this.work.hidden = !isRunning;
    this.#work = view.work ?? { label: t("Waiting for the model"), share: null };
    if (isRunning) this.drawWork();
    const words = endingOf(view);
    this.problem.hidden = !words;
    this.problem.classList.toggle("mild", !view.error && !view.unsaved);
    setText(this.problem, words);
  }

  /** The text without code, which is only there to be read slowly. */
  #readable() {
    const { children } = this.answer;
    return [...children].map((block) => (block.querySelector("pre, .json") ? "" : block.textContent)).join("\n");
  }

  /** Tells a screen reader the sentences that are finished. */
  readOut(/** @type {boolean} */ isRunning) {
    const text = this.#readable().slice(this.#told);
    const sentences = [...new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(text)];
    if (isRunning) sentences.pop();
    const words = sentences.map(({ segment }) => segment).join("");
    this.#told += words.length;
    if (words.trim()) this.desk.speak(words.replace(/\s+/g, " ").trim());
  }

  drawThinking(/** @type {AnswerView} */ { reasoning, thinking_s: seconds, blocks }, /** @type {boolean} */ isRunning) {
    this.thought.hidden = !reasoning.length;
    if (!reasoning.length) return;
    this.thoughtBlocks.draw(reasoning, isRunning && !blocks.length);
    const isLive = isRunning && !blocks.length;
    const done = seconds === null ? t("Thought") : t("Thought for {s} s", { s: number(seconds, 1) });
    setText(this.thoughtTitle, isLive ? t("Thinking") : done);
    this.thought.classList.toggle("live", isLive);
    // Open while it is written, then folded, unless the person decided otherwise.
    if (!this.#wasToggled && this.thought.open !== isLive) {
      this.#isToggling = true;
      this.thought.open = isLive;
    }
  }

  drawNotes(/** @type {Said[]} */ notes) {
    this.notes.hidden = !notes.length;
    const drawn = JSON.stringify(notes);
    if (drawn === this.#notes) return;
    this.#notes = drawn;
    const lines = notes.map((note) => h("li", said(note)));
    redraw(this.notes, h("summary", t("Notes on the files")), h("ul", lines));
  }

  drawWork() {
    const paused = { label: t("Paused until the connection is back"), share: 0, pace: [] };
    const { label, share, pace = [] } = this.desk.isLost() ? paused : this.#work;
    setProgress(this.bar, share);
    setText(this.label, said(label));
    setText(this.pace, pace.map(said).join(" · "));
  }

  /** The button that shows what the answer cost, and the numbers. */
  cost(/** @type {Answer} */ { stats, model }) {
    if (!stats) return null;
    const rows = model ? [...stats, [t("Model"), model]] : stats;
    const numbers = h(
      "dl.cost",
      { hidden: true },
      rows.map(([name, value]) => [h("dt", said(name)), h("dd", said(value))]),
    );
    const toggle = (/** @type {MouseEvent & { currentTarget: HTMLElement }} */ { currentTarget }) => {
      numbers.hidden = !numbers.hidden;
      currentTarget.setAttribute("aria-expanded", String(!numbers.hidden));
    };
    return [iconButton("numbers", t("Cost of this answer"), toggle, { "aria-expanded": "false" }), numbers];
  }
}

/** What a question's prompt didn't hold, where that was said for it alone. */
function leftOut(/** @type {number} */ n) {
  if (!n) return null;
  const words =
    n === 1 ? t("Asked without the oldest message") : t("Asked without the oldest {n} messages", { n: number(n) });
  return h("p.asked-without.quiet", words);
}

/** What is to be said of how an answer ended; nothing where it is all there. */
export function endingOf(/** @type {AnswerView} */ { status, error, blocks, calls, unsaved }) {
  if (unsaved) return t("This answer isn't saved: {why}", { why: said(unsaved) });
  if (error) return said(error);
  if (status === "length") return t("The answer reached its limit.");
  if (status === "interrupted") return t("The program stopped during this answer.");
  if (status === "stopped" && blocks.length) return t("Stopped");
  if (status === "stopped") return t("Stopped before the answer. The model won't see this question again.");
  if (blocks.length || calls.length) return "";
  return status === "finished" ? t("The model gave no answer.") : "";
}

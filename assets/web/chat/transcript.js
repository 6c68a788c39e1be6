// The conversation: its messages in their order, and which part of them is seen.

/** @import { Chat, Message, News } from "../common/types.d.ts" */
/** @import { Row } from "./message.js" */

import { h, iconButton } from "../common/dom.js";
import { t } from "../common/words.js";
import { AnswerRow } from "./message.js";

// Nearer to the end than this, the view follows what is written.
const FOLLOW_PX = 90;
// Messages that are drawn at one time: more than a screen holds.
const AT_ONCE = 40;

export class Transcript {
  /** By their messages' ids. @type {Map<string, Row<any>>} */
  #rows = new Map();
  /** What draws the earlier messages of a long conversation. @type {ReturnType<typeof setTimeout> | undefined} */
  #earlier;
  /** A message to go to, which is still to be drawn. @type {string | null} */
  #wanted = null;
  /** The message that was gone to, until somebody scrolls: what is around it has its real height only when it is near.
   * @type {Element | null} */
  #held = null;
  #isFollowing = true;
  #top = 0;
  #height = 0;

  /**
   * @param {(message: Message) => Row<any>} makeRow
   * @param {(chat: Chat) => Element} welcome what an empty chat shows
   */
  constructor(makeRow, welcome) {
    this.makeRow = makeRow;
    this.welcome = welcome;
    this.list = h("div.messages", { role: "log", "aria-live": "off", "aria-label": t("Chat") });
    this.leftOut = h("p.left-out-above.row.quiet", t("Messages above are left out of the prompt"));
    const labels = { tabindex: "0", role: "region", "aria-label": t("Chat") };
    this.element = h("div.transcript", labels, this.list);
    const goToEnd = () => {
      this.toEnd();
      this.element.focus();
    };
    this.endButton = iconButton("down", "", goToEnd, { class: "to-end card", hidden: true });
    const scrolled = () => {
      const { scrollHeight, scrollTop, clientHeight } = this.element;
      if (this.#held && (scrollHeight !== this.#height || Math.abs(scrollTop - this.#top) <= 2)) return;
      this.#held = null;
      if (scrollHeight - scrollTop - clientHeight < FOLLOW_PX) this.#isFollowing = true;
      // Pictures that come in push the end away: nobody has scrolled.
      else if (scrollTop < this.#top - 2) this.#isFollowing = false;
      this.#top = scrollTop;
      this.#drawEnd();
    };
    this.element.addEventListener("scroll", scrolled, { passive: true });
    const letGo = () => {
      this.#held = null;
    };
    for (const kind of ["wheel", "pointerdown", "keydown"])
      this.element.addEventListener(kind, letGo, { passive: true });
    new ResizeObserver(() => this.follow()).observe(this.list);
  }

  /** Draws a conversation: only messages that changed are touched. Of a long one the end comes first, at once. */
  show(/** @type {Chat} */ chat) {
    const { messages } = chat;
    clearTimeout(this.#earlier);
    const giveFocusBack = heldFocus(this.list);
    const shown = new Set(messages.map((message) => message.id));
    for (const [id, row] of this.#rows) {
      if (shown.has(id)) continue;
      row.element.remove();
      this.#rows.delete(id);
    }
    this.list.classList.toggle("empty", !messages.length);
    this.list.querySelector(".welcome")?.remove();
    if (!messages.length) this.list.append(this.welcome(chat));
    this.leftOut.remove();
    let start = Math.max(messages.length - AT_ONCE, 0);
    while (start > 0 && this.#rows.has(messages[start - 1].id)) start--;
    // Those before it that are drawn already, of another branch, come again in their turn.
    for (const { id } of messages.slice(0, start)) this.#rows.get(id)?.element.remove();
    const drawn = this.list.getElementsByClassName("message");
    messages.slice(start).forEach((message, at) => {
      const { element } = this.#shown(message);
      const place = drawn[at];
      if (!place) this.list.append(element);
      else if (place !== element) place.before(element);
    });
    for (const part of this.list.querySelectorAll(".part:empty")) part.remove();
    this.#markLeftOut(messages, start);
    giveFocusBack(this.element);
    this.follow();
    this.#drawEarlier(messages, start);
  }

  /** Draws the messages before `end`, some at a time, above what is seen, which stays where it is. */
  #drawEarlier(/** @type {Message[]} */ messages, /** @type {number} */ end) {
    if (!end) return;
    this.#earlier = setTimeout(() => {
      const start = Math.max(end - AT_ONCE, 0);
      const toEnd = this.element.scrollHeight - this.element.scrollTop;
      // In parts, so that a browser passes over what is out of sight by parts too, and not by thousands of messages.
      this.list.prepend(h("div.part", ...messages.slice(start, end).map((message) => this.#shown(message).element)));
      this.#markLeftOut(messages, start);
      this.element.scrollTop = this.element.scrollHeight - toEnd;
      this.follow();
      this.#toWanted();
      this.#drawEarlier(messages, start);
    });
  }

  /** Marks where the messages begin that are in the prompt, once it is drawn. */
  #markLeftOut(/** @type {Message[]} */ messages, /** @type {number} */ start) {
    const first = messages.findIndex((message) => message.kept);
    if (first > 0 && first >= start) this.#rows.get(messages[first].id)?.element.before(this.leftOut);
  }

  #shown(/** @type {Message} */ message) {
    let row = this.#rows.get(message.id);
    if (!row) {
      row = this.makeRow(message);
      this.#rows.set(message.id, row);
    }
    row.show(message);
    return row;
  }

  /** Answers in progress stand still while the program can't be reached. */
  connectionChanged() {
    for (const row of this.#rows.values()) if (row instanceof AnswerRow) row.drawWork();
  }

  /** Draws what is new of an answer in progress. */
  update(/** @type {News} */ news) {
    const row = this.#rows.get(news.id);
    if (row instanceof AnswerRow) row.update(news);
    this.follow();
    if (news.blocks.length) this.#drawEnd(true);
  }

  /** Goes to a message, and stays there; to the end where it is gone. */
  toMessage(/** @type {string} */ id) {
    this.toEnd();
    this.#wanted = id;
    this.#toWanted();
  }

  /** Goes to the message that is wanted, once it is drawn. */
  #toWanted() {
    const element = this.#wanted ? this.#rows.get(this.#wanted)?.element : null;
    if (!element?.isConnected) return;
    this.#wanted = null;
    this.#isFollowing = false;
    this.#held = element;
    element.classList.add("found");
    this.follow();
  }

  /** Goes to the end, and stays there. */
  toEnd() {
    for (const { element } of this.#rows.values()) element.classList.remove("found");
    this.#wanted = null;
    this.#held = null;
    this.#isFollowing = true;
    this.#top = 0;
    this.follow();
  }

  /** Stays at the message that was gone to, or at the end, whatever has grown. */
  follow() {
    if (!this.#held?.isConnected) this.#held = null;
    else {
      this.#held.scrollIntoView({ block: "start" });
      this.#top = this.element.scrollTop;
      this.#height = this.element.scrollHeight;
      this.#drawEnd();
      return;
    }
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    const end = scrollHeight - clientHeight;
    // Somebody has scrolled up, and the event that says so is still to come.
    if (this.#isFollowing && scrollTop < Math.min(this.#top, end) - 2) this.#isFollowing = false;
    if (this.#isFollowing && this.#rows.size) this.element.scrollTop = end;
    this.#top = this.element.scrollTop;
    this.#drawEnd();
  }

  /** Shows the button that leads to the end, where that is out of sight; it marks text that has come since. */
  #drawEnd(isFresh = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    const { classList } = this.endButton;
    this.endButton.hidden = this.#isFollowing || scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
    classList.toggle("fresh", !this.endButton.hidden && (isFresh || classList.contains("fresh")));
    const words = classList.contains("fresh") ? t("New text below") : t("To the end");
    this.endButton.title = words;
    this.endButton.ariaLabel = words;
  }
}

/**
 * What gives the focus back after a redrawing: to the button of the same name in the same place, or to `otherwise`.
 * @param {Element} list
 * @returns {(otherwise: HTMLElement) => void}
 */
function heldFocus(list) {
  const button = document.activeElement;
  if (!button || !list.contains(button)) return () => {};
  const nameOf = (/** @type {Element} */ each) => each.getAttribute("aria-label") ?? each.textContent;
  const name = nameOf(button);
  const message = button.closest(".message");
  const at = message ? [...list.querySelectorAll(".message")].indexOf(message) : -1;
  const isBranch = button.closest(".branches") !== null;
  return (otherwise) => {
    if (button.isConnected) return;
    const row = list.querySelectorAll(".message")[at];
    /** @type {HTMLElement[]} */
    const buttons = [...(row?.querySelectorAll("button") ?? [])].filter((each) => !each.disabled);
    const isSame = (/** @type {Element} */ each) =>
      nameOf(each) === name || (isBranch && each.closest(".branches") !== null);
    (buttons.find(isSame) ?? otherwise).focus({ preventScroll: true });
  };
}

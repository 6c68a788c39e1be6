// Times in answers that play the video they are about: in its place or, out of sight, in a player above the page.

/** @import { Answer, Attachment } from "../common/types.d.ts" */
/** @import { MediaDesk } from "./viewer.js" */

import { mediaUrl, thumbnailUrl } from "../common/api.js";
import { h, iconButton } from "../common/dom.js";
import { t } from "../common/words.js";
import { ANIMATED, pictureOf } from "./items.js";
import { COARSE_S, findTimes, meantAt, rangeOf, timeOf } from "./times.js";
import { Viewer } from "./viewer.js";

// The share of its height from which a player counts as in sight.
const IN_SIGHT = 0.6;
// How much text before a time may say which video is meant.
const CONTEXT_CHARS = 4000;
// Parts that are looked at again for one answer.
const MAX_PARTS = 3;
// A time of the prompt is rounded, and may be a little after the last frame.
const ROUNDED_S = 0.5;
const NO_TIMES = "code, pre, a, math, svg, button, .moment";

/**
 * A video of a message.
 * @typedef {object} Sent
 * @property {string} node
 * @property {number} at of the message's files
 * @property {Attachment} file
 */

export class Player {
  /** Ends what is watched of a range. */
  #range = new AbortController();

  /** `place` is where the messages are. */
  constructor(/** @type {MediaDesk} */ desk, /** @type {HTMLElement} */ place) {
    this.desk = desk;
    this.place = place;
    this.title = h("span.name");
    this.screen = h("div.screen");
    const close = iconButton("close", t("Close"), () => this.close());
    this.element = h("aside.player.card", { hidden: true, "aria-label": t("Player") }, [
      h("header.row", this.title, close),
      this.screen,
    ]);
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
  }

  /** Makes the times in a drawn block of a message play the video that they are about. */
  link(/** @type {Element} */ block, /** @type {string} */ id) {
    if (!/\d/.test(block.textContent ?? "")) return;
    const videos = this.videosBefore(id);
    if (!videos.length) return;
    const names = videos.map(({ file }) => file.name);
    let before = videos.length > 1 ? textBefore(block) : "";
    for (const node of textsOf(block)) {
      const text = node.data;
      const times = node.parentElement?.closest(NO_TIMES) ? [] : findTimes(text);
      // From the end: what is before stays where it is.
      for (const { start, stop, from_s, to_s } of times.reverse()) {
        const video = videos[meantAt(before + text, before.length + start, names)];
        const duration_s = video.file.duration_s ?? 0;
        if (from_s >= duration_s || (to_s ?? from_s) > duration_s + ROUNDED_S) continue;
        const words = node.splitText(start);
        words.splitText(stop - start);
        const moment = this.moment(video, from_s, to_s);
        words.replaceWith(moment);
        moment.append(words);
      }
      before = (before + text).slice(-CONTEXT_CHARS);
    }
  }

  /** A text that can be copied with the rest, so no button. */
  moment(/** @type {Sent} */ video, /** @type {number} */ from_s, /** @type {number | null} */ to_s) {
    const play = () => this.play(video, from_s, to_s);
    const [from, to] = [timeOf(from_s), timeOf(to_s ?? 0)];
    const title = to_s === null ? t("Play from {time}", { time: from }) : t("Play {from} to {to}", { from, to });
    const onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      play();
    };
    return h("span.moment", { role: "button", tabindex: "0", title, onclick: play, onkeydown });
  }

  /**
   * A closer look at the times that an answer names: its question once more, about those parts alone. Null where the
   * answer names none, or the model saw enough frames around them.
   */
  closer(/** @type {Pick<Answer, "id" | "text">} */ { id, text }) {
    const videos = this.videosBefore(id);
    const names = videos.map(({ file }) => file.name);
    /** @type {{ file: Attachment, start_s: number, end_s: number }[]} */
    const parts = [];
    for (const { start, from_s, to_s } of videos.length ? findTimes(text) : []) {
      const file = videos[meantAt(text, start, names)]?.file;
      const [least, most] = [file?.clip?.start_s ?? 0, file?.clip?.end_s ?? file?.duration_s ?? 0];
      const step_s = (most - least) / (file?.num_frames || 1);
      if (step_s < COARSE_S || from_s > most) continue;
      const start_s = Math.max(Math.floor(from_s - step_s), least);
      const end_s = Math.min(Math.ceil((to_s ?? from_s) + step_s), most);
      const part = parts.find((each) => each.file === file && each.start_s <= end_s && start_s <= each.end_s);
      if (part) Object.assign(part, { start_s: Math.min(part.start_s, start_s), end_s: Math.max(part.end_s, end_s) });
      else if (parts.length < MAX_PARTS) parts.push({ file, start_s, end_s });
    }
    if (!parts.length) return null;
    const times = parts.map(({ start_s, end_s }) => rangeOf(start_s, end_s)).join(", ");
    const files = parts.map(({ file, start_s, end_s }) => {
      // Together they cost what the whole video did.
      const num_frames = parts.length > 1 ? Math.ceil((file.num_frames ?? 1) / parts.length) : null;
      return { ...file, clip: { start_s, end_s, num_frames, drop_similar: false } };
    });
    const look = `\n\n${t("Look closer")}: `;
    const question = this.questionsBefore(id)[0].text;
    return { times, files, text: `${question.split(look)[0]}${look}${times}`.trim() };
  }

  /** The nearest one first. */
  questionsBefore(/** @type {string} */ id) {
    const messages = this.desk.messages();
    const at = messages.findIndex((message) => message.id === id);
    const before = messages.slice(0, at < 0 ? undefined : at).reverse();
    return before.filter((message) => message.role === "user");
  }

  /** The videos of the nearest message with any before this one. @returns {Sent[]} */
  videosBefore(/** @type {string} */ id) {
    for (const { id: node, attachments } of this.questionsBefore(id)) {
      const videos = attachments.map((file, at) => ({ node, at, file })).filter(({ file }) => file.duration_s);
      if (videos.length) return videos;
    }
    return [];
  }

  /** Plays a video from a time on, to the end of a range where there is one. The answer stays where it is. */
  play(/** @type {Sent} */ sent, /** @type {number} */ from_s, /** @type {number | null} */ to_s = null) {
    // Over a dialog there is no player.
    const video = document.querySelector("dialog[open]") ? null : (this.inSight(sent) ?? this.above(sent));
    if (!video) return this.look(sent, from_s);
    this.#range.abort();
    const range = new AbortController();
    this.#range = range;
    const { signal } = range;
    const begin = () => {
      video.currentTime = from_s;
      video.play().catch(() => {});
      if (to_s === null) return;
      // Seeking or pausing leaves the range.
      video.addEventListener(
        "seeked",
        () => {
          for (const left of ["seeking", "pause"])
            video.addEventListener(left, () => range.abort(), { once: true, signal });
          this.#stopAt(video, to_s, signal);
        },
        { once: true, signal },
      );
    };
    video.addEventListener("error", () => this.unplayable(sent, from_s), { once: true, signal });
    if (video.error) return this.unplayable(sent, from_s);
    if (video.readyState >= HTMLMediaElement.HAVE_METADATA) return begin();
    video.addEventListener("loadedmetadata", begin, { once: true, signal });
    video.preload = "auto";
    video.load();
  }

  /** A page that draws rarely, on a busy machine or out of sight, notices late, and goes back to where it ends. */
  #stopAt(/** @type {HTMLVideoElement} */ video, /** @type {number} */ to_s, /** @type {AbortSignal} */ signal) {
    const check = () => {
      if (signal.aborted) return;
      if (video.currentTime < to_s && !video.ended) return requestAnimationFrame(check);
      video.pause();
      video.currentTime = Math.min(video.currentTime, to_s);
    };
    check();
  }

  /** The video's own player, where a person sees it. */
  inSight(/** @type {Sent} */ { node, at }) {
    const { place } = this;
    /** @type {HTMLVideoElement | null} */
    const video = place.querySelector(`.message[data-id="${node}"] .video[data-at="${at}"] video`);
    if (!video) return null;
    const [mine, seen] = [video.getBoundingClientRect(), place.getBoundingClientRect()];
    const height = Math.min(mine.bottom, seen.bottom) - Math.max(mine.top, seen.top);
    if (height < IN_SIGHT * mine.height) return null;
    this.close();
    return video;
  }

  /** A player above the page; null for an animated picture, which no player plays. */
  above(/** @type {Sent} */ { file: { digest, name } }) {
    if (ANIMATED.test(name)) return null;
    const src = mediaUrl(digest);
    let video = this.screen.querySelector("video");
    if (video?.src !== src) {
      video = h("video", { src, poster: thumbnailUrl(digest), controls: true, muted: true, "aria-label": name });
      this.screen.replaceChildren(video);
      this.title.textContent = name;
    }
    this.element.hidden = false;
    return video;
  }

  unplayable(/** @type {Sent} */ sent, /** @type {number} */ from_s) {
    this.close();
    this.look(sent, from_s);
  }

  /** The frame at a time, where a browser can't play the video. */
  look(/** @type {Sent} */ { file: { digest, name } }, /** @type {number} */ time_s) {
    new Viewer(this.desk, [pictureOf({ digest, name, time_s, size: null })], 0).open();
  }

  close() {
    const hadFocus = this.element.contains(document.activeElement);
    this.#range.abort();
    this.screen.replaceChildren();
    this.element.hidden = true;
    if (hadFocus) this.place.focus({ preventScroll: true });
  }
}

function textsOf(/** @type {Element} */ block) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  /** @type {Text[]} */
  const texts = [];
  while (walker.nextNode()) texts.push(/** @type {Text} */ (walker.currentNode));
  return texts;
}

/** The end of what stands before a block in its text. */
function textBefore(/** @type {Element} */ block) {
  let text = "";
  for (let each = block.previousElementSibling; each && text.length < CONTEXT_CHARS; each = each.previousElementSibling)
    text = `${each.textContent}\n${text}`;
  return text.slice(-CONTEXT_CHARS);
}

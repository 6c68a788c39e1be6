// What can be looked at on the whole screen.

/** @import { Attachment, Grounding, Kind, Unit } from "../common/types.d.ts" */

import { frameUrl, mediaUrl, pictureUrl, thumbnailUrl } from "../common/api.js";
import { timeOf } from "./times.js";

/**
 * @typedef {object} Item
 * @property {string} src
 * @property {Kind} kind a frame of a video is an image
 * @property {string} label
 * @property {string} [digest] the file that it is, or is a frame of
 * @property {string} [name] of that file; where it isn't given, nothing can be asked about a part of it
 * @property {number | null} [time_s] of a frame, in its video
 * @property {[number, number] | null} [size] height and width, where they are known
 * @property {string | null} [poster] a small picture of it, which is there sooner
 * @property {string} [href] where it can be saved from
 * @property {boolean} [isAnimated]
 * @property {{ grounding: Grounding, unit: Unit, lit: number | null }} [marked] what an answer points at there
 */

/** Animated pictures: videos for the model, and pictures for a browser. */
export const ANIMATED = /\.(gif|webp|a?png|avifs?)$/i;

/** A file. @returns {Item} */
export function itemOf(
  /** @type {Pick<Attachment, "digest" | "kind" | "name" | "size">} */ { digest, kind, name, size },
) {
  const isAnimated = kind === "video" && ANIMATED.test(name);
  const src = kind === "image" ? pictureUrl(digest) : mediaUrl(digest);
  const about = { digest, name, label: name, size, poster: thumbnailUrl(digest), href: mediaUrl(digest) };
  return { ...about, src, isAnimated, kind: isAnimated ? "image" : kind };
}

/** What a picture, or a frame of a video, is called. */
export const titleOf = (/** @type {string} */ name, /** @type {number | null} */ time_s) =>
  time_s === null ? name : `${name}, ${timeOf(time_s)}`;

/**
 * A picture, or a frame of a video.
 * @param {Pick<Grounding, "digest" | "name" | "time_s" | "size">} picture
 * @returns {Item}
 */
export function pictureOf({ digest, name, time_s, size }) {
  const about = { kind: /** @type {const} */ ("image"), label: titleOf(name, time_s), digest, name, time_s, size };
  if (time_s === null) return { ...about, src: pictureUrl(digest), poster: thumbnailUrl(digest) };
  return { ...about, src: frameUrl(digest, time_s) };
}

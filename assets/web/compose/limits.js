// What media may cost, and the positions of sliders for it.

/** The settings that limit a kind of media. @type {Record<string, string[]>} */
export const LIMITS_OF = { video: ["max_frames", "max_video_tokens"], image: ["max_image_tokens"] };

// A slider's positions are logarithmic, so that 16 and 16,000 are both within reach.
export const NUM_POSITIONS = 100;

/** @typedef {{ low: number, high: number }} Range */

/** The amount that a slider's position stands for. */
export const amountAt = (/** @type {number} */ position, /** @type {Range} */ { low, high }) =>
  Math.round(low * (high / low) ** (position / NUM_POSITIONS));

export function positionOf(/** @type {number} */ amount, /** @type {Range} */ { low, high }) {
  const position = Math.round((NUM_POSITIONS * Math.log(Math.max(amount, low) / low)) / Math.log(high / low));
  return Math.min(position, NUM_POSITIONS);
}

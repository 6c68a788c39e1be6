// Settings as values.

/** @import { Settings } from "./types.d.ts" */

/**
 * Settings with one of them changed: a default isn't kept, and neither is nothing.
 * @param {Settings} values
 * @param {Settings} defaults
 * @param {string} name
 * @param {number | string | boolean | null} value
 * @returns {Settings}
 */
export function withSetting(values, defaults, name, value) {
  const { [name]: _, ...others } = values;
  return value === null || value === "" || value === defaults[name] ? others : { ...others, [name]: value };
}

/** Whether two say the same. */
export const isSame = (/** @type {Settings} */ one, /** @type {Settings} */ other) =>
  Object.keys(one).length === Object.keys(other).length &&
  Object.entries(one).every(([name, value]) => other[name] === value);

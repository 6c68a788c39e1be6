// The page's words in the person's language; English is the text itself.

/** @import { Said } from "./types.d.ts" */

/** @type {Record<string, string>} */
let table = {};
let language = "en";

/** @type {Record<string, string>} */
export const LANGUAGES = { en: "English", de: "Deutsch", fr: "Français", es: "Español", zh: "中文" };

/**
 * Loads a language, by default the browser's; an unknown one, or one that can't be loaded, is English.
 * @param {string | undefined} chosen
 * @returns {Promise<string>} the language that is used
 */
export async function useLanguage(chosen) {
  const code = chosen && chosen in LANGUAGES ? chosen : navigator.language?.slice(0, 2);
  [language, table] = ["en", {}];
  if (code in LANGUAGES && code !== "en")
    try {
      table = await (await fetch(new URL(`languages/${code}.json`, import.meta.url))).json();
      language = code;
    } catch {
      // English, then.
    }
  return language;
}

const written = (/** @type {number} */ value, /** @type {Intl.NumberFormatOptions} */ how) =>
  value.toLocaleString(language, how);

/**
 * A number as the language writes it.
 * @param {number} value
 * @param {number} [digits] after the point; as many as it has
 */
export const number = (value, digits) =>
  written(value, { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** A date's month and year as the language writes them. */
export const month = (/** @type {Date} */ date) =>
  date.toLocaleDateString(language, { month: "long", year: "numeric" });

const fill = (/** @type {string} */ text, /** @type {(name: string) => string | number | undefined} */ value) =>
  (table[text] ?? text).replace(/\{(\w+)\}/g, (_, name) => String(value(name) ?? ""));

/**
 * A text in the language, with `{name}` replaced.
 * @param {string} text written out in the call, where the tests find it
 * @param {Record<string, string | number>} values
 */
export function t(text, values = {}) {
  return fill(text, (name) => values[name]);
}

/**
 * What the program says, in the language: see qwen35mm/chat/say.py. A string, such as an error, stays as it is.
 * @param {Said} words
 * @returns {string}
 */
export function said(words) {
  if (typeof words === "string") return words;
  if (typeof words === "number") return number(words);
  if ("text" in words) return fill(words.text, (name) => said(words.values[name]));
  if ("number" in words) return number(words.number, words.digits);
  return "share" in words ? written(words.share, { style: "percent" }) : size(words.bytes);
}

function size(/** @type {number} */ numBytes) {
  if (numBytes < 1024) return written(numBytes, { style: "unit", unit: "byte", unitDisplay: "long" });
  let [amount, unit] = [numBytes / 1024, "KiB"];
  for (const larger of ["MiB", "GiB"]) if (amount >= 1024) [amount, unit] = [amount / 1024, larger];
  return `${number(amount, amount < 10 ? 1 : 0)} ${unit}`;
}

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
  if (code === language) return language;
  [language, table] = ["en", {}];
  if (code in LANGUAGES && code !== "en")
    try {
      table = await (await fetch(new URL(`../languages/${code}.json`, import.meta.url))).json();
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

/** The plural categories of a language, in the order of a text's forms. */
export const categoriesOf = (/** @type {string} */ code) => {
  const { pluralCategories } = new Intl.PluralRules(code).resolvedOptions();
  return ["zero", "one", "two", "few", "many", "other"].filter((each) => pluralCategories.some((one) => one === each));
};

/** `{name}` is a value, `{n|token|tokens}` what its language takes with so many: see preprocess/.../say.py. */
const PLACE = /\{(\w+)(?:\|([^{}]*))?\}/g;

function fill(/** @type {string} */ text, /** @type {(name: string) => string | number | undefined} */ value) {
  const code = text in table ? language : "en";
  return (table[text] ?? text).replace(PLACE, (_, name, forms) => {
    const found = value(name) ?? "";
    if (forms === undefined) return typeof found === "number" ? number(found) : found;
    const category = new Intl.PluralRules(code).select(Number(found));
    return forms.split("|")[categoriesOf(code).indexOf(category)] ?? "";
  });
}

/**
 * A text in the language, with `{name}` replaced.
 * @param {string} text written out in the call, where the tests find it; see say.py
 * @param {Record<string, string | number>} values
 */
export function t(text, values = {}) {
  return fill(text, (name) => values[name]);
}

/**
 * What the program says, in the language: see preprocess/qwen35mm_preprocess/say.py. A string stays as it is.
 * @param {Said} words
 * @returns {string}
 */
export function said(words) {
  if (typeof words === "string") return words;
  if (typeof words === "number") return number(words);
  if ("text" in words)
    return fill(words.text, (name) => {
      const value = words.values[name];
      return typeof value === "number" ? value : said(value);
    });
  if ("number" in words) return number(words.number, words.digits ?? undefined);
  return "share" in words ? written(words.share, { style: "percent" }) : size(words.bytes);
}

function size(/** @type {number} */ numBytes) {
  if (numBytes < 1024) return written(numBytes, { style: "unit", unit: "byte", unitDisplay: "long" });
  let [amount, unit] = [numBytes / 1024, "KiB"];
  for (const larger of ["MiB", "GiB"]) if (amount >= 1024) [amount, unit] = [amount / 1024, larger];
  return `${number(amount, amount < 10 ? 1 : 0)} ${unit}`;
}

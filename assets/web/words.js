// The page's words in the person's language; English is the text itself.

let table = {};

export const LANGUAGES = { en: "English", de: "Deutsch", fr: "Français", es: "Español", zh: "中文" };

/** Loads a language; an unknown one, or one that can't be loaded, is English. */
export async function useLanguage(chosen) {
  const code = chosen && chosen in LANGUAGES ? chosen : navigator.language?.slice(0, 2);
  table = {};
  document.documentElement.lang = code in LANGUAGES ? code : "en";
  if (!(code in LANGUAGES) || code === "en") return;
  try {
    table = await (await fetch(new URL(`languages/${code}.json`, import.meta.url))).json();
  } catch {
    document.documentElement.lang = "en";
  }
}

const written = (value, how) => value.toLocaleString(document.documentElement.lang, how);

/** A number as the language writes it; `digits` after the point, or as many as it has. */
export const number = (value, digits) =>
  written(value, { minimumFractionDigits: digits, maximumFractionDigits: digits });

const fill = (text, value) => (table[text] ?? text).replace(/\{(\w+)\}/g, (_, name) => value(name) ?? "");

/** A text in the language, with `{name}` replaced. */
export function t(text, values = {}) {
  return fill(text, (name) => values[name]);
}

/** What the program says, in the language: see qwen35mm/chat/say.py. A string, such as an error, stays as it is. */
export function said(words) {
  if (typeof words === "string") return words;
  if (typeof words === "number") return number(words);
  if ("text" in words) return fill(words.text, (name) => said(words.values[name]));
  if ("number" in words) return number(words.number, words.digits);
  return "share" in words ? written(words.share, { style: "percent" }) : size(words.bytes);
}

function size(numBytes) {
  if (numBytes < 1024) return written(numBytes, { style: "unit", unit: "byte", unitDisplay: "long" });
  let [amount, unit] = [numBytes / 1024, "KiB"];
  for (const larger of ["MiB", "GiB"]) if (amount >= 1024) [amount, unit] = [amount / 1024, larger];
  return `${number(amount, amount < 10 ? 1 : 0)} ${unit}`;
}

// The page's words in the person's language; English is the text itself.

let words = {};

export const LANGUAGES = { en: "English", de: "Deutsch", fr: "Français", es: "Español", zh: "中文" };

/** Loads a language; an unknown one, or one that can't be loaded, is English. */
export async function useLanguage(chosen) {
  const code = chosen && chosen in LANGUAGES ? chosen : navigator.language?.slice(0, 2);
  words = {};
  document.documentElement.lang = code in LANGUAGES ? code : "en";
  if (!(code in LANGUAGES) || code === "en") return;
  try {
    words = await (await fetch(new URL(`languages/${code}.json`, import.meta.url))).json();
  } catch {
    document.documentElement.lang = "en";
  }
}

/** A number as the language writes it. */
export const number = (value) => value.toLocaleString(document.documentElement.lang);

/** A text in the language, with `{name}` replaced. */
export function t(text, values = {}) {
  return (words[text] ?? text).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

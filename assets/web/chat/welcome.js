// What an empty conversation shows.

/** @import { Example } from "../common/types.d.ts" */

import { h } from "../common/dom.js";
import { t } from "../common/words.js";

export const temporaryWords = () =>
  t("This chat isn't saved. It ends when you close or reload the page, or start or open another chat.");

/**
 * @param {boolean | undefined} isTemporary
 * @param {Example[]} examples
 * @param {(number: number) => unknown} onExample
 */
export function welcome(isTemporary, examples, onExample) {
  const drawn = examples.map((example, number) =>
    h(
      "button.example.card",
      { type: "button", onclick: () => onExample(number) },
      h("span.shot", shot(example)),
      h("span.words", { lang: "en" }, example.text),
    ),
  );
  return h(
    "div.welcome",
    isTemporary
      ? [h("h2", t("Temporary chat")), h("p.quiet", temporaryWords())]
      : [h("h2", t("Ask about pictures and videos")), h("p.quiet", t("Add one below, or try an example."))],
    h("div.examples", drawn),
  );
}

function shot(/** @type {Example} */ { kind, url, poster }) {
  const src = new URL(url, document.baseURI).href;
  if (kind !== "video") return h("img", { src, alt: "" });
  const autoplay = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  const looks = {
    poster: new URL(poster, document.baseURI).href,
    muted: true,
    autoplay,
    // One that stands still is its poster.
    preload: autoplay ? "auto" : "none",
    loop: true,
    playsInline: true,
  };
  return [h("video", { src, ...looks }), h("span.badge", t("clip"))];
}

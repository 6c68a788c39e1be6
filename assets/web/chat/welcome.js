// What an empty conversation shows.

/** @import { App, Child, Example, Kind } from "../common/types.d.ts" */
/** @import { Drawing } from "../common/dom.js" */

import { h, icon } from "../common/dom.js";
import { t } from "../common/words.js";
import { PROMPTS, THINGS } from "../media/find.js";

/**
 * A question for the box, and the files that it is about.
 * @typedef {object} Idea
 * @property {Drawing} sign
 * @property {string} title
 * @property {string} text
 * @property {Kind} kind
 * @property {number} [n] of these files, by default one
 * @property {string} [blank] of the text, which the person replaces
 */

export const temporaryWords = () =>
  t("This chat isn't saved. It ends when you close or reload the page, or start or open another chat.");

/**
 * For the practice model a card with examples that it can answer, else what a model is good at.
 * @param {boolean | undefined} isTemporary
 * @param {App} app
 * @param {object} desk
 * @param {() => Child} desk.offer a real model
 * @param {(number: number) => unknown} desk.sendExample
 * @param {(idea: Idea) => unknown} desk.suggest
 */
export function welcome(isTemporary, { is_demo, models, server, examples }, { offer, sendExample, suggest }) {
  const isBlind = server?.images === false;
  const title = isBlind ? t("Ask about texts and PDFs") : t("Ask about your pictures and videos");
  const isHere = models && !server;
  const fitting = suggestions().filter(({ kind }) => kind === "text" || !isBlind);
  return h(
    "div.welcome",
    { class: is_demo && "card" },
    h("h2", isTemporary ? t("Temporary chat") : title),
    (isTemporary || isHere) && h("p.quiet", isTemporary ? temporaryWords() : t("Everything stays on this machine.")),
    is_demo && [
      h("p", t("A practice model of 12 MiB is loaded. It only knows drawn shapes.")),
      h("div.offer", offer()),
      h("h3.quiet", t("Try it on these")),
    ],
    h(
      "div.examples",
      is_demo
        ? examples.map((each, at) => choice(() => sendExample(at), h("span.shot", shot(each)), each.text, "en"))
        : fitting.map((each) => choice(() => suggest(each), icon(each.sign), each.title)),
    ),
  );
}

const choice = (
  /** @type {() => unknown} */ onclick,
  /** @type {Child} */ drawing,
  /** @type {string} */ text,
  /** @type {string} */ lang = "",
) => h("button.example.card", { type: "button", onclick }, drawing, h("span.words", { lang: lang || null }, text));

/** @type {() => Idea[]} */
const suggestions = () => [
  { sign: "eye", title: t("Describe a picture"), text: t("Describe this picture in detail."), kind: "image" },
  { sign: "search", title: t("Read text in a picture"), text: t("Write out all text you see."), kind: "image" },
  { sign: "find", title: t("Find things in a picture"), text: PROMPTS.boxes(THINGS()), kind: "image", blank: THINGS() },
  { sign: "columns", title: t("Compare two pictures"), text: t("How do these differ?"), kind: "image", n: 2 },
  { sign: "play", title: t("Summarise a clip"), text: t("What happens in this clip, and when?"), kind: "video" },
  { sign: "file", title: t("Summarise a text"), text: t("Summarise this text."), kind: "text" },
];

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

// Asks the model to point at things in a picture, as Qwen's own examples ask it.

/** @import { Item } from "./items.js" */
/** @import { MediaDesk } from "./viewer.js" */

import { ask, h } from "../common/dom.js";
import { t } from "../common/words.js";
import { cutOut } from "./closer.js";

/** Qwen's own prompts, in the language that it was trained on. @type {Record<string, (what: string) => string>} */
export const PROMPTS = {
  boxes: (what) => `${locate(what)} Report bbox coordinates in JSON format.`,
  points: (what) =>
    `${locate(what)} Report point coordinates in JSON format like this: {"point_2d": [x, y], "label": "category"}`,
};
const locate = (/** @type {string} */ what) =>
  `Locate every instance that belongs to the following categories: "${what}".`;
/** An example of what to find. */
export const THINGS = () => t("cat, red car");
const WHOLE = { left: 0, top: 0, right: 1, bottom: 1 };

/** Asks for what to find, and sends the question; whether it was sent. */
export async function askToFind(/** @type {MediaDesk} */ desk, /** @type {Item} */ item) {
  const what = h("input", { required: true, placeholder: THINGS(), "aria-label": t("What to find") });
  const shape = h(
    "select",
    { "aria-label": t("Show as") },
    h("option", { value: "boxes" }, t("Boxes")),
    h("option", { value: "points" }, t("Points")),
  );
  const words = h("p.quiet", t("The model is asked where each one is. Its answer is drawn on the picture."));
  const text = await ask(
    t("Find in this picture"),
    [words, h("div.find.row.wrap", what, shape)],
    [
      { label: t("Cancel"), value: () => null },
      {
        label: t("Find"),
        kind: "strong",
        value: () => {
          const named = what.value.replaceAll('"', "'").trim();
          return named && PROMPTS[shape.value](named);
        },
      },
    ],
  );
  if (!text) return false;
  const files = await filesFor(desk, item);
  if (!files) return false;
  desk.send(text, files);
  return true;
}

/** The files to send: none if the model was shown this picture last; a video's frame is sent as a picture. */
async function filesFor(/** @type {MediaDesk} */ desk, /** @type {Item} */ item) {
  const { digest = "", name = item.label, time_s = null } = item;
  if (time_s !== null) {
    const frame = await cutOut(desk, item, WHOLE, time_s);
    return frame && [frame];
  }
  const shown = desk.messages().flatMap((each) => ("attachments" in each && each.kept ? each.attachments : []));
  const last = shown.findLast(({ kind }) => kind !== "text");
  return last?.digest === digest ? [] : [{ digest, name, kind: /** @type {const} */ ("image") }];
}

// The tools of a picture or a video in a message, and where it was cut out.

/** @import { Attachment, Crop, Grounding } from "../common/types.d.ts" */
/** @import { MediaDesk } from "./viewer.js" */

import { h, iconButton } from "../common/dom.js";
import { t } from "../common/words.js";
import { canCut } from "./closer.js";
import { askToFind } from "./find.js";
import { itemOf, pictureOf } from "./items.js";
import { insetOf, shares } from "./shapes.js";
import { lookAt, sentFiles, Viewer } from "./viewer.js";

/**
 * A picture or a video with its tools, and with its place in another one.
 * @param {MediaDesk} desk
 * @param {HTMLElement} shown
 * @param {Attachment} file
 */
export function withTools(desk, shown, file) {
  const item = itemOf(file);
  if (!canCut(item)) return shown;
  const closer = () => {
    const video = shown instanceof HTMLVideoElement ? shown : null;
    video?.pause();
    lookAt(desk, sentFiles(desk), file.digest, { closer: true, time_s: video?.currentTime });
  };
  const tools = h("div.medium-tools.row", [
    iconButton("crop", t("Look closer"), closer),
    item.kind === "image" && iconButton("find", t("Find something in this picture"), () => askToFind(desk, item)),
  ]);
  return h("div.medium", shown, tools, file.crop_of && placeOf(desk, file.crop_of, file.name));
}

/** The source of a part, small, with the part's place in it; gone where the source is. */
function placeOf(/** @type {MediaDesk} */ desk, /** @type {Crop} */ crop, /** @type {string} */ label) {
  const { digest, name, box, size, time_s } = crop;
  /** @type {Grounding} */
  const grounding = {
    ...{ digest, name, time_s, size, shown_size: null, kind: "image", unit: "pixel" },
    marks: [{ label, box, point: null, details: [] }],
  };
  const source = pictureOf(grounding);
  const marked = { grounding, unit: grounding.unit, lit: 0 };
  const look = () => new Viewer(desk, [{ ...source, marked }], 0).open();
  const [height, width] = size;
  const [left, top, right, bottom] = shares(box, grounding.unit, grounding);
  const spot = h("span.cut", { style: `inset: ${insetOf({ left, top, right, bottom })}` });
  const image = h("img", { src: source.poster ?? source.src, alt: "", loading: "lazy" });
  image.style.aspectRatio = `${width} / ${height}`;
  const words = t("Show where this is in {name}", { name: source.label });
  const button = h("button.place", { type: "button", title: words, "aria-label": words, onclick: look }, image, spot);
  image.addEventListener("error", () => button.remove());
  return button;
}

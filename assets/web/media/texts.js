// Text files: their encodings, and what they begin with.

/** @import { Attachment } from "../common/types.d.ts" */
/** @import { DraftFile } from "../compose/draft.js" */
/** @import { Requests } from "../common/api.js" */

import { mediaUrl } from "../common/api.js";
import { button, h, icon, redraw, select } from "../common/dom.js";
import { popover } from "../common/popover.js";
import { t } from "../common/words.js";

/**
 * What is shown with an attached text: its encoding, which can be changed, and a preview.
 * @param {Requests} requests
 * @param {DraftFile} file
 * @param {string[]} encodings that can be chosen
 * @param {(raw: string, encoding: string) => Promise<unknown>} recode reads the text in another encoding
 */
export function textTools(requests, file, encodings, recode) {
  const preview = button("link", t("Preview"), () => {});
  const label = t("Preview of {name}", { name: file.name });
  return [
    encoding(file, encodings, recode, preview),
    file.form && [preview, popover(preview, label, (content) => drawPreview(requests, content, file))],
  ];
}

/**
 * @param {DraftFile} file
 * @param {string[]} encodings
 * @param {(raw: string, encoding: string) => Promise<unknown>} recode
 * @param {HTMLButtonElement} preview
 */
function encoding(file, encodings, recode, preview) {
  const { raw } = file;
  if (!raw) return file.encoding && file.encoding !== "UTF-8" && h("span.quiet", file.encoding);
  const labels = { class: "encoding", "aria-label": t("Encoding of {name}", { name: file.name }) };
  const choose = async (/** @type {string} */ name) => {
    // Another card comes, with what it is then: what was open at this one would vanish.
    preview.disabled = true;
    await recode(raw, name);
    preview.disabled = false;
    // As before, where it isn't that.
    box.value = file.encoding ?? "";
  };
  const box = select(
    { ...labels, title: t("Encoding") },
    choose,
    encodings.map((name) => h("option", { value: name, selected: name === file.encoding }, name)),
  );
  return box;
}

/** Runs once an element is in sight: a long conversation has many. */
function whenSeen(/** @type {Element} */ element, /** @type {() => void} */ run) {
  const observer = new IntersectionObserver(([{ isIntersecting }]) => {
    if (!isIntersecting) return;
    observer.disconnect();
    run();
  });
  observer.observe(element);
}

/** A text in a message: what it begins with, where that says more than its name. */
export function textCard(/** @type {Requests} */ requests, /** @type {Attachment} */ file) {
  const { digest, name, form } = file;
  const link = h(
    "a.document.row.card",
    { href: mediaUrl(digest), target: "_blank", rel: "noopener" },
    icon("file"),
    name,
  );
  if (!form) return link;
  // As high before it is there as after it.
  const content = h("div.beginning", {
    tabindex: "0",
    role: "region",
    "aria-label": t("Preview of {name}", { name }),
  });
  whenSeen(content, () => drawPreview(requests, content, file));
  return h("div.text-file.card", link, content);
}

async function drawPreview(
  /** @type {Requests} */ requests,
  /** @type {HTMLElement} */ content,
  /** @type {{ digest: string | null, name: string }} */ { digest, name },
) {
  const found = await requests.ask("preview", { digest: digest ?? "", name });
  if (!found) return;
  const { rows, html, more } = found;
  const code = h("div.prose");
  // The program made it safe.
  if (html) code.innerHTML = html;
  redraw(content, rows ? table(rows) : code, more && h("p.quiet", t("The file continues")));
}

function table(/** @type {string[][]} */ [head, ...rows]) {
  const line = (/** @type {"th" | "td"} */ tag, /** @type {string[]} */ row) =>
    h(
      "tr",
      row.map((cell) => h(tag, cell)),
    );
  const body = rows.map((row) => line("td", row));
  return h("table", h("thead", line("th", head)), h("tbody", body));
}

// The page of `qwen35mm caption --preview`: a row for each picture or clip, a column for each prompt, and what a whole
// run with it would take.

/** @import { Lengths, PreviewAnswer, PreviewCell, PreviewColumn, PreviewCost, PreviewRow } from "./review.d.ts" */

import { ask, button, copyText, h, icon, redraw, setText } from "../common/dom.js";
import { number, said, t } from "../common/words.js";
import { call, fileUrl } from "./calls.js";

const LOOK_AGAIN_MS = 700;
const MINUTE_S = 60;
const HOUR_S = 3600;
/** Times are in minutes from the first on, in hours from the second on. */
const IN_MINUTES_S = 90;
const IN_HOURS_S = 5400;

export class Preview {
  /** @type {Map<number, HTMLElement>} */
  #rows = new Map();

  constructor(/** @type {PreviewAnswer} */ answer) {
    this.version = answer.version;
    this.clock = 0;
    this.progress = h("p.quiet", { role: "status" });
    this.media = h("p.quiet");
    this.notes = h("ul.notes.quiet");
    this.unreadable = h("details", { hidden: true });
    this.together = h("div.row.wrap.together");
    this.columns = answer.columns.map((column) => this.#makeColumn(column));
    this.body = h("tbody");
    const heads = this.columns.map(({ head }) => head);
    const table = h("table", { style: `--columns: ${heads.length}` }, h("thead", h("tr", h("td"), heads)), this.body);
    this.element = h(
      "div.app.previewed",
      h("header.top.row.wrap", h("h1", answer.title), this.progress, this.media),
      h("main.compared", { tabindex: "0", "aria-label": t("Captions side by side") }, table),
      h("footer", this.together, this.notes, this.unreadable),
    );
    this.draw(answer);
  }

  /** Shows what comes, until nothing more comes. */
  async watch() {
    for (let state = "loading"; state !== "done" && state !== "stopped"; ) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_AGAIN_MS));
      try {
        /** @type {{ preview: PreviewAnswer }} */
        const { preview } = await call("look", { since: this.clock });
        this.draw(preview);
        state = preview.state;
      } catch (error) {
        setText(this.progress, String(/** @type {Error} */ (error).message));
        return;
      }
    }
  }

  draw(/** @type {PreviewAnswer} */ answer) {
    this.clock = answer.clock;
    setText(this.progress, stateOf(answer));
    const all = media(answer.num, (ends) => range(ends, 0));
    const tried = media(answer.tried, (num) => number(num));
    const estimated = tried && t("A run of {all}, estimated from {tried}", { all, tried });
    setText(this.media, estimated || t("A run of {all}", { all }));
    answer.columns.forEach((column, at) => {
      const { facts } = this.columns[at];
      redraw(
        facts,
        drawnCost(column.cost),
        lengthsOf(column, answer.most_tokens).map((words) => h("span.quiet", words)),
      );
    });
    const { together } = answer;
    if (together)
      redraw(
        this.together,
        h("strong", t("All prompts in one pass")),
        drawnCost(together.cost),
        button("plain", t("Use all prompts"), () => showCommand(t("Use this prompt"), together.command)),
      );
    redraw(
      this.notes,
      notesOf(answer).map((words) => h("li", words)),
    );
    this.unreadable.hidden = !answer.unreadable;
    const names = answer.named.map(([name, why]) => h("li", `${name}: ${said(why)}`));
    if (!this.unreadable.firstChild)
      redraw(
        this.unreadable,
        h("summary", t("{n} {n|file|files} can't be read", { n: answer.unreadable })),
        h("ul", names),
      );
    for (const row of answer.rows) this.#drawRow(row, answer.most_tokens);
  }

  #makeColumn(/** @type {PreviewColumn} */ column) {
    const facts = h("div.facts");
    const use = button("plain", t("Use this prompt"), () => showCommand(t("Use this prompt"), column.command));
    return {
      facts,
      head: h("th", { scope: "col", title: column.prompt }, h("strong.prompt", column.title), facts, use),
    };
  }

  #drawRow(/** @type {PreviewRow} */ row, /** @type {number | null} */ most) {
    let element = this.#rows.get(row.number);
    if (!element) {
      element = h("tr", h("th", { scope: "row" }, this.#medium(row), h("span.name", row.name)));
      this.#rows.set(row.number, element);
      this.body.append(element);
    }
    const cells = row.failed
      ? [h("td.failed", { colSpan: row.cells.length }, said(row.failed))]
      : row.cells.map((cell) => drawnCell(cell, most));
    element.replaceChildren(/** @type {Element} */ (element.firstChild), ...cells);
  }

  #medium(/** @type {PreviewRow} */ { number, name, kind, part }) {
    const item = { number, version: this.version };
    const src = fileUrl("media", item);
    const href = part ? `${src}#t=${part.join(",")}` : src;
    const title = kind === "video" ? t("Play") : t("Open in actual size");
    const small = picture(fileUrl("small", item), name);
    return h("a.shot", { href, target: "_blank", title }, small, kind === "video" && icon("play"));
  }
}

/** A picture, or nothing where it can't be shown: its row says why. */
function picture(/** @type {string} */ src, /** @type {string} */ alt) {
  const element = h("img", { src, alt, loading: "lazy" });
  element.addEventListener("error", () => element.remove());
  return element;
}

/** How far it is. */
function stateOf(/** @type {PreviewAnswer} */ { state, over, asked }) {
  if (state === "looking") return t("Looking for pictures and clips");
  if (state === "loading") return t("Loading the model");
  const done = t("{n} of {m}", { n: over, m: asked });
  return state === "stopped" ? `${done}, ${t("Stopped")}` : done;
}

function notesOf(/** @type {PreviewAnswer} */ { state, failed, num, tried, not_counted }) {
  const notes = not_counted.map((option) => t("{option} isn't counted in the time.", { option }));
  if (state === "done" && num.image && !tried.image)
    notes.push(t("The time of images isn't known: none was captioned."));
  if (state === "done" && num.video && !tried.video)
    notes.push(t("The time of videos isn't known: none was captioned."));
  if (failed) notes.push(t("{n} {n|medium|media} failed", { n: failed }));
  return notes;
}

/**
 * Images and videos with their numbers.
 * @template T
 * @param {{ image?: T, video?: T }} of
 * @param {(each: T) => string} words
 */
function media({ image, video }, words) {
  const parts = [
    image !== undefined && t("{n} {n|image|images}", { n: words(image) }),
    video !== undefined && t("{n} {n|video|videos}", { n: words(video) }),
  ];
  return parts.filter(Boolean).join(", ");
}

/** A whole run's time, and that of each kind where there are two. */
function drawnCost(/** @type {PreviewCost} */ { image, video }) {
  if (!image || !video) return h("span.time", t("Whole run: {time}", { time: time(image ?? video) }));
  const both = time([image[0] + video[0], image[1] + video[1]]);
  const apart = t("{images} for images, {videos} for videos", { images: time(image), videos: time(video) });
  return [h("span.time", t("Whole run: {time}", { time: both })), h("span.quiet", apart)];
}

/** Seconds, at least and at most, in a fitting unit. */
export function time(/** @type {[number, number] | undefined} */ ends) {
  if (!ends) return "…";
  const [low, high] = ends;
  if (high < IN_MINUTES_S) return t("{s} s", { s: range([low, high]) });
  if (high < IN_HOURS_S) return t("{n} min", { n: range([low / MINUTE_S, high / MINUTE_S]) });
  return t("{n} h", { n: range([low / HOUR_S, high / HOUR_S]) });
}

/** Two numbers with a dash, or one where they look alike. */
function range(/** @type {[number, number]} */ ends, /** @type {number | undefined} */ digits = undefined) {
  const [low, high] = ends.map((each) => number(each, digits ?? (each < 10 ? 1 : 0)));
  return low === high ? low : `${low}–${high}`;
}

/** The lengths of a prompt's captions, and what failed. */
function lengthsOf(/** @type {PreviewColumn} */ column, /** @type {number | null} */ most) {
  const { words, tokens, shortened, failed } = column;
  const spread = (/** @type {Lengths} */ [low, , high]) => range([low, high], 0);
  const varies = words && words[0] < words[2];
  return [
    varies && t("{range} words, median {m}", { range: spread(words), m: words[1] }),
    words && !varies && t("{n} {n|word|words}", { n: words[0] }),
    tokens && most && t("{range} tokens of {m}", { range: spread(tokens), m: most }),
    shortened && t("{n} too long", { n: shortened }),
    failed && t("{n} failed", { n: failed }),
  ].flatMap((each) => each || []);
}

function drawnCell(/** @type {PreviewCell | null} */ cell, /** @type {number | null} */ most) {
  if (!cell) return h("td.quiet", "…");
  if (cell.failed) return h("td.failed", said(cell.failed));
  const { text, flags, seconds, words, tokens } = cell;
  const facts = [
    t("{s} s", { s: number(seconds, 1) }),
    t("{n} {n|word|words}", { n: words }),
    most && t("{n} {n|token|tokens}", { n: tokens ?? 0 }),
  ];
  const drawn = flags.map((flag) => h("span.flag", flag));
  return h("td", h("p.caption", { dir: "auto" }, text), h("p.quiet", facts.filter(Boolean).join(", ")), drawn);
}

/** Shows a command, to copy. */
function showCommand(/** @type {string} */ title, /** @type {string} */ command) {
  const body = [h("p", t("Run this in a terminal:")), h("pre.command", { tabindex: "0" }, h("code", command))];
  return ask(title, body, [
    { label: t("Close"), value: () => null },
    { label: t("Copy"), kind: "strong", value: () => void copyText(command) },
  ]);
}

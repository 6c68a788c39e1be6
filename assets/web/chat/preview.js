// HTML, SVG and Mermaid of an answer, drawn in a frame without an origin, which reaches neither page nor network.

/** @import { Requests } from "../common/api.js" */

import { Problem, previewUrl } from "../common/api.js";
import { h, iconButton, redraw } from "../common/dom.js";
import { t } from "../common/words.js";

const [MIN_PX, MAX_PX] = [60, 560];

/** @typedef {{ html: string } | { text: string, script: string, isDark: boolean }} Drawn */

/** How code is drawn; undefined where it isn't. @returns {"html" | "svg" | "mermaid" | undefined} */
export function previewKind(/** @type {string} */ language, /** @type {string} */ code) {
  const known = language.toLowerCase();
  if (known === "mermaid" || known === "svg") return known;
  if (known === "xml" && /^\s*(?:<\?xml[^>]*>\s*)?<svg[\s>]/i.test(code)) return "svg";
  return known === "html" ? "html" : undefined;
}

export class Preview {
  /** Mermaid itself, once one is drawn. @type {Promise<{ script: string }> | null} */
  static #mermaid = null;

  /**
   * @param {Requests} requests
   * @param {NonNullable<ReturnType<typeof previewKind>>} kind
   * @param {string} code
   */
  constructor(requests, kind, code) {
    this.requests = requests;
    this.kind = kind;
    this.code = code;
    this.frame = h("iframe", { title: t("Preview"), sandbox: "allow-scripts", src: previewUrl(), class: kind });
    const larger = iconButton("larger", t("Full screen"), () => this.enlarge(true), { class: "larger" });
    const smaller = iconButton("smaller", t("Exit full screen"), () => this.enlarge(false), {
      class: "smaller",
    });
    this.element = h("div.preview", this.frame, h("div.preview-tools.row", larger, smaller));
    // Escape, too, leaves it; the frame goes on as it is.
    this.element.addEventListener("toggle", ({ newState }) => {
      if (newState !== "closed") return;
      this.element.removeAttribute("popover");
      if (this.element.contains(document.activeElement)) larger.focus();
    });
    this.hear = this.hear.bind(this);
    window.addEventListener("message", this.hear);
  }

  /** Takes it away. */
  close() {
    window.removeEventListener("message", this.hear);
    this.element.remove();
  }

  /** Shows it over the whole page, or in its place again. */
  enlarge(/** @type {boolean} */ isLarge) {
    if (isLarge) this.element.setAttribute("popover", "auto");
    this.element.togglePopover(isLarge);
  }

  /** Messages of the frame; its content can send the same ones. */
  async hear(/** @type {MessageEvent} */ { source, data }) {
    if (source !== this.frame.contentWindow || !this.frame.isConnected) return;
    if (data?.ready) this.draw();
    else if (Number.isFinite(data?.height))
      this.frame.style.height = `${Math.min(Math.max(data.height, MIN_PX), MAX_PX)}px`;
    else if (typeof data?.error === "string") this.fail(data.error);
  }

  async draw() {
    try {
      // It has no origin that could be named.
      this.frame.contentWindow?.postMessage(await this.drawn(), "*");
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.fail(problem.message);
    }
  }

  /** @returns {Promise<Drawn>} */
  async drawn() {
    if (this.kind === "html") return { html: withDoctype(this.code) };
    if (this.kind === "svg") {
      const style = "<style>body{margin:0}svg{display:block;max-width:100%;margin:auto}</style>";
      return { html: withDoctype(`${style}${this.code.replace(/^\s*<\?xml[^>]*>/, "")}`) };
    }
    Preview.#mermaid ??= this.requests.call("mermaid", {});
    try {
      return { text: this.code, isDark: isDark(), ...(await Preview.#mermaid) };
    } catch (problem) {
      Preview.#mermaid = null;
      throw problem;
    }
  }

  fail(/** @type {string} */ why) {
    redraw(this.element, h("p.problem", t("This can't be shown: {why}", { why: why.slice(0, 500) })));
  }
}

/** Without one, a page is as high as its frame. */
const withDoctype = (/** @type {string} */ html) => (/^\s*<!doctype/i.test(html) ? html : `<!doctype html>${html}`);

function isDark() {
  const { colorScheme } = getComputedStyle(document.documentElement);
  return colorScheme === "dark" || (colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

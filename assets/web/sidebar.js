// The conversations: found, renamed, deleted, taken out and in.

/** @import { ChatLine, Listing } from "./types.d.ts" */
/** @import { Drawing } from "./dom.js" */
/** @import { Page } from "./main.js" */

import { debounce, exportUrl, takeIn } from "./api.js";
import { askToDelete, h, icon, iconButton, isComposing, redraw } from "./dom.js";
import { t } from "./words.js";

const SEARCH_AFTER_MS = 180;

export class Sidebar {
  /** The conversation that is shown. @type {string | null} */
  #current = null;

  constructor(/** @type {Page} */ page) {
    this.page = page;
    this.requests = page.requests;
    const search = { type: "search", placeholder: t("Search"), "aria-label": t("Search the conversations") };
    this.search = h("input", { ...search, oninput: debounce(SEARCH_AFTER_MS, () => this.load()) });
    this.list = h("ul.chats", { role: "list", "aria-label": t("Conversations") });
    this.picker = h("input", { type: "file", accept: ".zip", hidden: true, onchange: () => this.import() });
    const controls = { "aria-controls": "qwen35mm-settings", "aria-expanded": "false" };
    this.settingsButton = h(
      "button.plain",
      { type: "button", onclick: () => page.toggleSettings(true), ...controls },
      icon("settings"),
      t("Settings"),
    );
    this.newButton = h(
      "button.new-chat.row.card",
      { type: "button", onclick: () => page.newChat() },
      icon("plus"),
      t("New chat"),
    );
    this.element = h(
      "aside.sidebar",
      { id: "qwen35mm-conversations", "aria-label": t("Conversations") },
      h("div.brand.row", h("img", { src: "pwa_icon", alt: "" }), h("span", "qwen35mm")),
      this.newButton,
      h("div.search", icon("search"), this.search),
      this.list,
      h(
        "div.side-foot.row",
        iconButton("upload", t("Take in an archive"), () => this.picker.click()),
        iconButton("download", t("Save all conversations"), () => download("zip", [])),
        this.settingsButton,
      ),
      this.picker,
    );
  }

  async load() {
    const found = await this.requests.ask("list", { query: this.search.value }, "list");
    if (found) this.show(found);
  }

  show(/** @type {Listing} */ { conversations, more }) {
    const none = this.search.value ? t("Nothing found") : t("Your conversations will be here.");
    redraw(
      this.list,
      conversations.map((each) => this.line(each)),
      more && h("li.hint.quiet", t("There are more: search for them.")),
      !conversations.length && h("li.hint.quiet", none),
    );
    this.mark(this.#current);
  }

  mark(/** @type {string | null} */ id) {
    this.#current = id;
    for (const link of this.list.querySelectorAll("a")) {
      const isCurrent = link.hash === `#${id}`;
      link.parentElement?.classList.toggle("current", isCurrent);
      link.setAttribute("aria-current", isCurrent ? "page" : "false");
    }
  }

  line(/** @type {ChatLine} */ chat) {
    const { id, title, node, snippet } = chat;
    const open = (/** @type {MouseEvent} */ event) => {
      event.preventDefault();
      this.page.open(id, node);
    };
    const hits = (snippet ?? []).map(([text, isHit]) => (isHit ? h("mark", text) : h("span", text)));
    const words = [h("span.name", title || t("Untitled")), hits.length > 0 && h("span.snippet.quiet", hits)];
    const line = h("li.chat.row", h("a", { href: `#${id}`, title, onclick: open }, words));
    line.append(
      menu(t("More about {title}", { title }), [
        ["edit", t("Rename"), () => this.rename(chat, line)],
        ["download", t("Save as Markdown"), () => download("md", [id])],
        ["download", t("Save with its files"), () => download("zip", [id])],
        ["trash", t("Delete"), () => this.remove(chat)],
      ]),
    );
    return line;
  }

  rename(/** @type {ChatLine} */ chat, /** @type {HTMLElement} */ line) {
    const input = h("input.rename", { "aria-label": t("Title") });
    let isDone = false;
    const finish = async (/** @type {boolean} */ keep) => {
      if (isDone) return;
      isDone = true;
      const title = input.value.trim();
      if (keep && title && title !== chat.title)
        if (await this.requests.ask("rename", { conversation: chat.id, title })) {
          chat.title = title;
          if (chat.id === this.page.state.chat.id) this.page.drawTitle(title);
        }
      const hadFocus = line.contains(document.activeElement);
      const fresh = this.line(chat);
      line.replaceWith(fresh);
      if (hadFocus) fresh.querySelector("a")?.focus();
      this.mark(this.#current);
    };
    input.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter") finish(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      finish(false);
    });
    input.addEventListener("blur", () => finish(true));
    redraw(line, input);
    input.value = chat.title;
    input.select();
  }

  async remove(/** @type {ChatLine} */ { id, title }) {
    const words = t("“{title}” and its files will be gone.", { title });
    if (!(await askToDelete(t("Delete this conversation?"), words))) return;
    if (!(await this.requests.ask("delete", { conversation: id }))) return;
    this.page.composer.draft.drafts.forget(id);
    if (id === this.page.state.chat.id) this.page.newChat();
    await this.load();
  }

  async import() {
    const [file] = this.picker.files ?? [];
    this.picker.value = "";
    const taken = file && (await this.requests.told(takeIn(file)));
    if (!taken) return;
    this.page.say(t("{n} conversations were taken in.", { n: taken.conversations.length }), "good");
    this.search.value = "";
    await this.load();
  }
}

/**
 * A menu behind three dots; of those that have one, only one is open.
 * @param {string} label
 * @param {[Drawing, string, () => unknown][]} entries
 */
function menu(label, entries) {
  const summary = h("summary.icon-button", { "aria-label": label }, icon("more"));
  const close = () => {
    details.open = false;
    // Where a dialog returns the focus to.
    summary.focus();
  };
  const rows = entries.map(([drawing, words, run]) => {
    const choose = () => {
      close();
      run();
    };
    return h("button.row", { type: "button", onclick: choose }, icon(drawing), words);
  });
  const list = h("div.menu-list.card", rows);
  // Details of one name close each other.
  const details = h("details.menu", { name: "conversation" }, summary, list);
  details.addEventListener("toggle", () => {
    if (details.open) list.scrollIntoView({ block: "nearest" });
  });
  details.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget instanceof Node && !details.contains(relatedTarget)) details.open = false;
  });
  details.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !details.open) return;
    event.stopPropagation();
    close();
  });
  return details;
}

function download(/** @type {"md" | "zip"} */ form, /** @type {string[]} */ ids) {
  h("a", { href: exportUrl(form, ids), download: "" }).click();
}

// The chats: search, rename, delete, export and import.

/** @import { Drafts } from "../compose/drafts.js" */
/** @import { Toasts } from "../common/toasts.js" */
/** @import { Account, ChatLine, Listing } from "../common/types.d.ts" */
/** @import { Requests } from "../common/api.js" */

import { debounce, exportUrl, takeIn } from "../common/api.js";
import { arrange, button, h, icon, isComposing, redraw } from "../common/dom.js";
import { month, t } from "../common/words.js";
import { accountButton } from "./account.js";
import { menu } from "./menu.js";

const SEARCH_AFTER_MS = 180;
// Lines of one request; the next ones are requested when the end is this near.
const LISTED = 100;
const NEARLY_AT_END = "600px";
// The model writes titles when it has nothing else to do: they are looked for less and less often.
const TITLE_AFTER_MS = 1500;
const LOOK_AGAIN = 1.5;
const MAX_PATIENCE_MS = 60000;

/**
 * What the sidebar has the page do.
 * @typedef {object} SidebarDesk
 * @property {(id: string, node?: string | null) => Promise<void>} open a chat, at a message if one is named
 * @property {(temporary?: boolean) => void} newChat
 * @property {(open: boolean) => void} toggleSettings
 * @property {(title: string) => void} retitled the chat that is shown has this title
 * @property {(id: string | null) => void} changed tells other tabs
 */

export class Sidebar {
  /** The conversation that is shown. @type {string | null} */
  #current = null;
  /** What is known of the list, from its beginning on. @type {ChatLine[]} */
  #lines = [];
  /** What it was searched for. */
  #query = "";
  /** What is drawn of it, by the conversations' ids. @type {Map<string, { drawn: string, element: HTMLElement }>} */
  #rows = new Map();
  /** By their words. @type {Map<string, HTMLElement>} */
  #headings = new Map();
  #nearEnd;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #later;
  #patienceMs = TITLE_AFTER_MS;

  /**
   * @param {SidebarDesk} desk
   * @param {Requests} requests
   * @param {Toasts} toasts
   * @param {() => Drafts} drafts which are deleted with their chats
   * @param {Account | null} account
   */
  constructor(desk, requests, toasts, drafts, account) {
    this.desk = desk;
    this.requests = requests;
    this.toasts = toasts;
    this.drafts = drafts;
    const search = { type: "search", dir: "auto", placeholder: t("Search"), "aria-label": t("Search chats") };
    this.search = h("input", { ...search, oninput: debounce(SEARCH_AFTER_MS, () => this.load()) });
    this.list = h("ul.chats", { role: "list", "aria-label": t("Chats") });
    this.list.addEventListener("keydown", (event) => this.#walk(event));
    this.list.addEventListener("focusin", ({ target }) => this.#makeStop(rowAround(target)?.querySelector("a")));
    const more = button("plain", t("Show more"), () => this.loadMore());
    this.end = h("li.hint", { hidden: true }, more);
    const isNear = (/** @type {IntersectionObserverEntry[]} */ [entry]) => entry.isIntersecting && this.loadMore();
    this.#nearEnd = new IntersectionObserver(isNear, { root: this.list, rootMargin: NEARLY_AT_END });
    const picker = h("input", {
      type: "file",
      accept: ".zip",
      hidden: true,
      onchange: ({ currentTarget }) => this.import(currentTarget),
    });
    /** What the settings offer for all chats. */
    this.archives = h(
      "div.row",
      button("plain", [icon("upload"), t("Import")], () => picker.click()),
      button("plain", [icon("download"), t("Export")], () => download(this.requests, "zip", [])),
      picker,
    );
    const controls = { "aria-controls": "qwen35mm-settings", "aria-expanded": "false" };
    this.settingsButton = h(
      "button.row",
      { type: "button", onclick: () => desk.toggleSettings(true), ...controls },
      icon("settings"),
      t("Settings"),
    );
    this.newButton = button("row", [icon("plus"), t("New chat")], () => desk.newChat());
    this.element = h(
      "aside.sidebar",
      { id: "qwen35mm-conversations", "aria-label": t("Chats") },
      h("div.brand.row", h("img", { src: "icon.svg", alt: "" }), h("span", "qwen35mm")),
      h(
        "div.begin",
        this.newButton,
        button("row", [icon("hourglass"), t("Temporary chat")], () => desk.newChat(true)),
      ),
      h("div.search", icon("search"), this.search),
      this.list,
      h("div.side-foot.row", this.settingsButton, account && accountButton(account)),
    );
  }

  /** Loads the list again, as far as it is drawn; a new search begins at its top. */
  async load() {
    const query = this.search.value;
    const isSame = query === this.#query;
    const limit = isSame ? Math.max(this.#lines.length, LISTED) : LISTED;
    const found = await this.requests.ask("list", { query, limit }, "list");
    if (!found) return;
    this.#query = query;
    this.show(found);
    if (!isSame) this.list.scrollTop = 0;
  }

  /** Goes on with the list. */
  async loadMore() {
    const last = this.#lines.at(-1);
    if (!last || this.end.hidden) return;
    const { id, pinned, updated_s } = last;
    const args = { query: this.#query, after: { id, pinned, updated_s }, limit: LISTED };
    const found = await this.requests.ask("list", args, "list");
    if (!found) return;
    const known = new Set(this.#lines.map((line) => line.id));
    const fresh = found.conversations.filter((line) => !known.has(line.id));
    const hadFocus = this.end.contains(document.activeElement);
    this.show({ conversations: [...this.#lines, ...fresh], more: found.more, titling: found.titling });
    if (hadFocus && fresh[0]) this.#rows.get(fresh[0].id)?.element.querySelector("a")?.focus();
  }

  show(/** @type {Listing} */ { conversations, more, titling }) {
    clearTimeout(this.#later);
    this.#patienceMs = titling ? Math.min(LOOK_AGAIN * this.#patienceMs, MAX_PATIENCE_MS) : TITLE_AFTER_MS;
    if (titling) this.#later = setTimeout(() => this.load(), this.#patienceMs);
    this.#lines = conversations;
    this.end.hidden = !more;
    const shown = conversations.find((line) => line.id === this.#current);
    if (shown) this.desk.retitled(shown.title);
    this.draw();
    // It reports again if there is still room.
    this.#nearEnd.unobserve(this.end);
    this.#nearEnd.observe(this.end);
  }

  /** Draws the lines under their headings; a line that hasn't changed stays as it is. */
  draw(now = new Date()) {
    const rows = new Map();
    const elements = [];
    let above = "";
    for (const chat of this.#lines) {
      const group = groupOf(chat, now);
      if (group !== above) elements.push(this.#heading(group));
      above = group;
      const row = this.#rowOf(chat);
      rows.set(chat.id, row);
      elements.push(row.element);
    }
    this.#rows = rows;
    const none = this.search.value ? t("Nothing found") : t("Your chats will appear here.");
    if (!this.#lines.length) elements.push(h("li.hint.quiet", none));
    arrange(this.list, [...elements, this.end]);
    this.mark(this.#current);
  }

  #heading(/** @type {string} */ words) {
    const element = this.#headings.get(words) ?? h("li.group.quiet", h("h2", words));
    this.#headings.set(words, element);
    return element;
  }

  #rowOf(/** @type {ChatLine} */ chat) {
    const drawn = JSON.stringify(chat);
    const known = this.#rows.get(chat.id);
    const isRenamed = known?.element.querySelector(".rename");
    return known && (isRenamed || known.drawn === drawn) ? known : { drawn, element: this.line(chat) };
  }

  /** Marks the conversation that is shown; its answers are seen by that. */
  mark(/** @type {string | null} */ id) {
    this.#current = id;
    const shown = this.#lines.find((line) => line.id === id);
    if (shown?.unseen) {
      shown.unseen = false;
      // Other tabs need not say so either.
      this.desk.changed(id);
    }
    for (const link of this.list.querySelectorAll("a")) {
      const isCurrent = link.hash === `#${id}`;
      link.parentElement?.classList.toggle("current", isCurrent);
      link.setAttribute("aria-current", isCurrent ? "page" : "false");
      if (isCurrent) link.querySelector(".unseen-answer")?.remove();
    }
    const row = this.list.querySelector(".chat:focus-within") ?? this.list.querySelector(".current");
    this.#makeStop((row ?? this.list).querySelector("a"));
  }

  /** Makes a chat's link the list's only stop of Tab: arrows lead on from there. */
  #makeStop(/** @type {HTMLElement | null | undefined} */ stop) {
    if (!stop) return;
    for (const each of this.list.querySelectorAll("a, .chat > button"))
      each.setAttribute("tabindex", each === stop ? "0" : "-1");
  }

  /** Up and down lead through the chats and through an open menu, right and left to a chat's menu and back. */
  #walk(/** @type {KeyboardEvent} */ event) {
    const row = rowAround(event.target);
    const [link, more] = /** @type {NodeListOf<HTMLElement>} */ (row?.querySelectorAll("a, .chat > button") ?? []);
    if (!row || !link) return;
    const isOpen = more.ariaExpanded === "true";
    /** @type {NodeListOf<HTMLElement>} */
    const found = isOpen ? row.querySelectorAll(".popover button") : this.list.querySelectorAll("a");
    const stops = [...found];
    const at = stops.indexOf(isOpen && event.target instanceof HTMLElement ? event.target : link);
    /** @type {Record<string, HTMLElement | undefined>} */
    const ways = { ArrowUp: stops[at - 1], ArrowDown: stops[at + 1], Home: stops[0], End: stops.at(-1) };
    const to = { ...ways, ArrowRight: more, ArrowLeft: link }[event.key];
    if (!to) return;
    event.preventDefault();
    to.focus();
  }

  line(/** @type {ChatLine} */ chat) {
    const { id, title, node, snippet, pinned, running, unseen } = chat;
    const open = (/** @type {MouseEvent} */ event) => {
      event.preventDefault();
      this.desk.open(id, node);
    };
    const hits = (snippet ?? []).map(([text, isHit]) => (isHit ? h("mark", text) : h("span", text)));
    const name = h("span.name", { dir: "auto" }, title || t("Untitled"));
    const mark = running
      ? h("span.mark.breathing", { role: "img", "aria-label": t("Answering") })
      : unseen && h("span.mark.unseen-answer", { role: "img", "aria-label": t("New answer") });
    const words = [h("span.line.row", name, mark), hits.length > 0 && h("span.snippet.quiet", { dir: "auto" }, hits)];
    const line = h("li.chat.row", h("a", { href: `#${id}`, title, onclick: open }, words));
    line.append(
      ...menu(t("Options for {title}", { title }), [
        ["pin", pinned ? t("Unpin") : t("Pin"), () => this.pin(chat)],
        ["edit", t("Rename"), () => this.rename(chat, line)],
        ["download", t("Export as Markdown"), () => download(this.requests, "md", [id])],
        ["download", t("Export with files"), () => download(this.requests, "zip", [id])],
        ["trash", t("Delete"), () => this.remove(chat)],
      ]),
    );
    return line;
  }

  rename(/** @type {ChatLine} */ chat, /** @type {HTMLElement} */ line) {
    const input = h("input.rename", { dir: "auto", "aria-label": t("Title") });
    let isDone = false;
    const finish = async (/** @type {boolean} */ keep) => {
      if (isDone) return;
      isDone = true;
      const title = input.value.trim();
      if (keep && title && title !== chat.title)
        if (await this.requests.ask("rename", { conversation: chat.id, title })) {
          for (const line of this.#lines) if (line.id === chat.id) line.title = title;
          if (chat.id === this.#current) this.desk.retitled(title);
        }
      const hadFocus = line.contains(document.activeElement);
      input.remove();
      this.#rows.delete(chat.id);
      this.draw();
      if (hadFocus) this.#rows.get(chat.id)?.element.querySelector("a")?.focus();
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
    input.focus();
    input.select();
  }

  async pin(/** @type {ChatLine} */ { id, pinned }) {
    if (!(await this.requests.ask("pin", { conversation: id, pinned: !pinned }))) return;
    await this.load();
    this.#rows.get(id)?.element.querySelector("a")?.focus();
  }

  /** Deletes a conversation with what is written for it; for some seconds both can be restored. */
  async remove(/** @type {ChatLine} */ { id, title }) {
    const at = this.#lines.findIndex((line) => line.id === id);
    if (!(await this.requests.ask("delete", { conversation: id }))) return;
    const drafts = this.drafts();
    const sheet = drafts.of(id);
    drafts.forget(id);
    const wasShown = id === this.#current;
    if (wasShown) this.desk.newChat();
    await this.load();
    const next = this.#lines[Math.min(at, this.#lines.length - 1)];
    (this.#rows.get(next?.id)?.element.querySelector("a") ?? this.newButton).focus();
    this.desk.changed(id);
    const run = async () => {
      if (!(await this.requests.ask("restore", { conversation: id }))) return;
      drafts.putBack(id, sheet);
      await this.load();
      this.desk.changed(id);
      if (wasShown && !this.#current) await this.desk.open(id);
    };
    const words = t("“{title}” was deleted.", { title: title || t("Untitled") });
    this.toasts.say(words, "note", { label: t("Undo"), run });
  }

  async import(/** @type {HTMLInputElement} */ picker) {
    const [file] = picker.files ?? [];
    picker.value = "";
    const taken = file && (await this.requests.told(takeIn(file)));
    if (!taken) return;
    const { conversations, num_extended: more, num_known: n } = taken;
    const words = [
      conversations.length > 0 && t("{n} {n|chat|chats} imported.", { n: conversations.length }),
      more > 0 && t("{n} {n|chat has|chats have} new messages.", { n: more }),
      n > 0 && t("{n} {n|chat was|chats were} already here.", { n }),
    ];
    this.toasts.say(words.filter(Boolean).join(" "), "good");
    this.search.value = "";
    await this.load();
  }
}

const rowAround = (/** @type {EventTarget | null} */ target) =>
  target instanceof Element ? target.closest(".chat") : null;

async function download(
  /** @type {Requests} */ requests,
  /** @type {"md" | "zip"} */ form,
  /** @type {string[]} */ ids,
) {
  const opened = await requests.ask("download", {});
  if (opened) h("a", { href: exportUrl(form, ids, opened.code), download: "" }).click();
}

/** How many midnights lie between two moments. */
function daysBetween(/** @type {Date} */ from, /** @type {Date} */ to) {
  // In UTC every day has 24 hours.
  const [start, end] = [from, to].map((date) => Date.UTC(date.getFullYear(), date.getMonth(), date.getDate()));
  return Math.round((end - start) / 86400000);
}

/** The heading above a conversation, by the person's own calendar. */
export function groupOf(/** @type {Pick<ChatLine, "pinned" | "updated_s">} */ chat, now = new Date()) {
  if (chat.pinned) return t("Pinned");
  const date = new Date(1000 * chat.updated_s);
  const days = daysBetween(date, now);
  // Another machine's clock may be ahead.
  if (days <= 0) return t("Today");
  if (days === 1) return t("Yesterday");
  if (days <= 7) return t("Last 7 days");
  return days <= 30 ? t("Last 30 days") : month(date);
}

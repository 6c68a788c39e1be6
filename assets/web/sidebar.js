// The conversations: found, renamed, deleted, taken out and in.

import { call, exportUrl, takeIn } from "./api.js";
import { ask, clear, debounce, h, icon, iconButton } from "./dom.js";
import { t } from "./words.js";

export class Sidebar {
  /** `page`: `open(id)`, `begin()`, `gone(id)`, `renamed(id, title)`, `showSettings()`, `say(words)`. */
  constructor(page) {
    this.page = page;
    this.current = null;
    this.search = h("input", {
      type: "search",
      placeholder: t("Search"),
      "aria-label": t("Search the conversations"),
      oninput: debounce(180, () => this.load()),
    });
    this.list = h("ul.chats", { role: "list", "aria-label": t("Conversations") });
    this.picker = h("input", { type: "file", accept: ".zip", hidden: true, onchange: () => this.import() });
    this.settingsButton = h(
      "button.plain",
      {
        type: "button",
        onclick: () => this.page.showSettings(),
        "aria-controls": "qwen35mm-settings",
        "aria-expanded": "false",
      },
      icon("settings"),
      t("Settings"),
    );
    this.element = h(
      "aside.sidebar",
      { id: "qwen35mm-conversations", "aria-label": t("Conversations") },
      h("div.brand", {}, h("img", { src: "pwa_icon", alt: "" }), h("span", {}, "qwen35mm")),
      h("button.new-chat", { type: "button", onclick: () => this.page.begin() }, icon("plus"), t("New chat")),
      h("div.search", {}, icon("search"), this.search),
      this.list,
      h(
        "div.side-foot",
        {},
        iconButton("upload", t("Take in an archive"), () => this.picker.click()),
        iconButton("download", t("Save all conversations"), () => this.download("zip", [])),
        this.settingsButton,
      ),
      this.picker,
    );
  }

  async load() {
    try {
      this.show(await call("list", { query: this.search.value }));
    } catch (problem) {
      this.page.say(problem.message);
    }
  }

  show({ conversations, more }) {
    this.conversations = conversations;
    clear(
      this.list,
      conversations.map((each) => this.line(each)),
      more ? h("li.hint", {}, t("There are more: search for them.")) : null,
      conversations.length
        ? null
        : h("li.hint", {}, this.search.value ? t("Nothing found") : t("Your conversations will be here.")),
    );
    this.mark(this.current);
  }

  mark(id) {
    this.current = id;
    for (const line of this.list.children) {
      const isCurrent = line.dataset.id === id;
      line.classList.toggle("current", isCurrent);
      line.querySelector("a")?.setAttribute("aria-current", isCurrent ? "page" : "false");
    }
  }

  line(chat) {
    const link = h(
      "a",
      {
        href: `#${chat.id}`,
        title: chat.title,
        onclick: (event) => {
          event.preventDefault();
          this.page.open(chat.id);
        },
      },
      chat.title || t("Untitled"),
    );
    const menu = h(
      "details.menu",
      {
        ontoggle: () => {
          if (menu.open) {
            this.closeOthers(menu);
            menu.lastChild.scrollIntoView({ block: "nearest" });
          }
        },
        onfocusout: (event) => {
          if (event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
        },
        onkeydown: (event) => {
          if (event.key !== "Escape" || !menu.open) return;
          event.stopPropagation();
          menu.open = false;
          menu.firstChild.focus();
        },
      },
      h("summary", { "aria-label": t("More about {title}", { title: chat.title }) }, icon("more")),
      h(
        "div.menu-list",
        {},
        this.entry("edit", t("Rename"), () => this.rename(chat, menu)),
        this.entry("download", t("Save as Markdown"), () => this.download("md", [chat.id])),
        this.entry("download", t("Save with its files"), () => this.download("zip", [chat.id])),
        this.entry("trash", t("Delete"), () => this.remove(chat)),
      ),
    );
    return h("li.chat", { "data-id": chat.id }, link, menu);
  }

  entry(drawing, label, run) {
    return h(
      "button",
      { type: "button", onclick: (event) => this.choose(event.currentTarget.closest("details"), run) },
      icon(drawing),
      label,
    );
  }

  /** The focus goes back to what opened the menu, where a dialog returns it to. */
  choose(menu, run) {
    menu.open = false;
    menu.firstChild.focus();
    run();
  }

  closeOthers(open) {
    for (const menu of this.list.querySelectorAll("details[open]")) if (menu !== open) menu.open = false;
  }

  rename(chat) {
    const line = this.list.querySelector(`[data-id="${chat.id}"]`);
    const input = h("input.rename", { "aria-label": t("Title"), value: chat.title });
    let done = false;
    const finish = async (keep) => {
      if (done) return;
      done = true;
      const title = input.value.trim();
      if (keep && title && title !== chat.title) {
        try {
          await call("rename", { conversation: chat.id, title });
          chat.title = title;
          this.page.renamed(chat.id, title);
        } catch (problem) {
          this.page.say(problem.message);
        }
      }
      const hadFocus = line.contains(document.activeElement);
      const fresh = this.line(chat);
      line.replaceWith(fresh);
      if (hadFocus) fresh.querySelector("a").focus();
      this.mark(this.current);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    });
    input.addEventListener("blur", () => finish(true));
    clear(line, input);
    input.value = chat.title;
    input.select();
  }

  async remove(chat) {
    const sure = await ask(
      t("Delete this conversation?"),
      h("p", {}, t("“{title}” and its files will be gone.", { title: chat.title })),
      [
        { label: t("Cancel"), value: null },
        { label: t("Delete"), value: true, kind: "danger" },
      ],
    );
    if (!sure) return;
    try {
      await call("delete", { conversation: chat.id });
    } catch (problem) {
      return this.page.say(problem.message);
    }
    this.page.gone(chat.id);
    await this.load();
  }

  download(form, ids) {
    h("a", { href: exportUrl(form, ids), download: "" }).click();
  }

  async import() {
    const [file] = this.picker.files;
    this.picker.value = "";
    if (!file) return;
    try {
      const { conversations } = await takeIn(file);
      this.page.say(t("{n} conversations were taken in.", { n: conversations.length }), "good");
      this.search.value = "";
      await this.load();
    } catch (problem) {
      this.page.say(problem.message);
    }
  }
}

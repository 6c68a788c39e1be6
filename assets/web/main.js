// The page: one conversation with what belongs to it, kept true to what the program says.

import { call, mediaUrl } from "./api.js";
import { Composer } from "./composer.js";
import { ask, clear, debounce, h, icon, iconButton } from "./dom.js";
import { showLogin } from "./login.js";
import { Models } from "./models.js";
import { SettingsPanel } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { follow } from "./stream.js";
import { Toasts } from "./toasts.js";
import { Transcript } from "./transcript.js";
import { number, said, t, useLanguage } from "./words.js";

// An answer that says nothing for this long has lost its connection: it is asked for again.
const SILENCE_MS = 8000;
const NOTHING = { id: null, title: "", settings: {}, messages: [], running: [], context: null };

class Page {
  constructor(element) {
    this.root = element;
    this.chat = NOTHING;
    this.live = new Map();
    this.heard = 0;
  }

  async begin() {
    const start = await call("start");
    Object.assign(this, { app: start.app, preferences: start.preferences });
    await useLanguage(this.preferences.language);
    this.useColours();
    this.build(start);
    this.sidebar.show(start);
    window.addEventListener("hashchange", () => this.openFromAddress());
    await this.openFromAddress();
    if (start.running.length) this.follow(start.running);
    setInterval(() => this.checkSilence(), 2000);
    // Also tells the program that the page is still open.
    setInterval(() => this.drawGauge(), 60000);
    this.composer.text.focus();
  }

  build({ presets }) {
    this.transcript = new Transcript({
      edit: (message) => this.composer.edit(message),
      again: (message) => this.act("again", { node: message.parent, settings: this.settings }),
      goOn: (message) => this.act("continue", { node: message.id, settings: this.settings }),
      branch: (node) => this.act("branch", { node }),
      remove: (message) => this.removeMessage(message),
      enlarge: (digest, name) => this.enlarge(digest, name),
      tooLong: (words) => this.offer(words, []),
    });
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      begin: () => this.newChat(),
      gone: (id) => id === this.chat.id && this.newChat(),
      renamed: (id, title) => {
        if (id === this.chat.id) this.title.textContent = title;
      },
      showSettings: () => this.toggleSettings(true),
      say: (words, kind) => this.say(words, kind),
    });
    this.composer = new Composer({
      context: () => ({
        conversation: this.chat.id,
        parent: this.chat.messages.at(-1)?.id ?? null,
        settings: this.settings,
      }),
      send: (message) => this.send(message),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
      say: (words, kind) => this.say(words, kind),
      changeSettings: (values) => this.changeSettings({ ...this.settings, ...values }),
      takeOffer: (offer) => this.takeOffer(offer),
      mediaLimit: (name) => this.mediaLimit(name),
    });
    this.panel = new SettingsPanel(
      {
        changed: (values) => {
          this.changeSettings(values);
          this.composer.redrawLimits();
        },
        changePreferences: (values) => this.changePreferences(values),
        say: (words) => this.say(words),
        close: () => this.toggleSettings(false),
      },
      this.app.settings,
      presets,
      this.preferences,
    );
    this.models = new Models({ say: (words, kind) => this.say(words, kind), changed: () => location.reload() });
    this.panel.models = this.app.models ? this.models : null;
    this.title = h("h1.title");
    this.gauge = h("div.gauge", { role: "img" });
    this.toasts = new Toasts();
    this.spoken = h("div.unseen", { role: "status" });
    this.menuButton = iconButton("menu", t("Conversations"), () => this.toggleSidebar(true), {
      class: "icon-button menu-button",
      "aria-controls": this.sidebar.element.id,
      "aria-expanded": "false",
    });
    this.settingsButton = iconButton("settings", t("Settings"), () => this.toggleSettings(this.panel.element.hidden), {
      class: "icon-button",
      "aria-controls": this.panel.element.id,
      "aria-expanded": "false",
    });
    const main = h(
      "div.main",
      {},
      h(
        "header.top",
        {},
        this.menuButton,
        this.title,
        h("span.model", { title: t("The model that answers") }, this.app.model),
        this.gauge,
        this.settingsButton,
      ),
      this.app.is_demo ? this.demoBanner() : null,
      this.transcript.element,
      this.composer.element,
    );
    this.frame = h(
      "div.app",
      {},
      this.sidebar.element,
      h("div.shade", { onclick: () => this.toggleSidebar(false) }),
      main,
      this.panel.element,
      this.toasts.element,
      this.spoken,
      h("div.drop-here", { "aria-hidden": "true" }, t("Drop pictures, videos, texts or PDFs here")),
    );
    clear(this.root, this.frame);
    this.takeDrops();
    document.addEventListener("keydown", (event) => this.key(event));
    this.composer.restore();
  }

  demoBanner() {
    return h(
      "details.banner",
      {},
      h(
        "summary",
        {},
        h("b", {}, t("Demo model.")),
        " ",
        t("It knows coloured shapes in drawn pictures and short clips, and nothing else."),
      ),
      h(
        "p",
        {},
        t(
          "The model bundled with qwen35mm is small and trained from scratch on scenes that a program drew, so that " +
            "everything can be tried without a download. It names shapes, their colours, places and number, and says " +
            "how a shape moves or changes its colour. It doesn't know photographs, people, writing, or the world.",
        ),
      ),
      h(
        "p",
        {},
        t("For a real one, end this with Ctrl-C and start:"),
        " ",
        h("code", {}, "make chat MODEL=Qwen/Qwen3.5-2B"),
      ),
    );
  }

  welcome() {
    return h(
      "div.welcome",
      {},
      h("h2", {}, t("Ask about pictures and videos")),
      h("p", {}, t("Add one below, or try an example.")),
      h(
        "div.examples",
        {},
        this.app.examples.map((example, number) =>
          h(
            "button.example",
            { type: "button", onclick: () => this.sendExample(number, example) },
            h(
              "span.shot",
              {},
              example.kind === "video"
                ? h("video", {
                    src: new URL(example.url, document.baseURI).href,
                    poster: new URL(example.poster, document.baseURI).href,
                    muted: true,
                    autoplay: !matchMedia("(prefers-reduced-motion: reduce)").matches,
                    loop: true,
                    playsInline: true,
                  })
                : h("img", { src: new URL(example.url, document.baseURI).href, alt: "" }),
              example.kind === "video" ? h("span.badge", {}, t("clip")) : null,
            ),
            h("span.words", {}, example.text),
          ),
        ),
      ),
    );
  }

  // Which conversation is shown

  openFromAddress() {
    const id = location.hash.slice(1);
    if (/^[0-9a-f]{32}$/.test(id)) return id === this.chat.id ? null : this.open(id);
    return this.newChat();
  }

  async open(id) {
    try {
      this.show(await call("open", { conversation: id }));
      this.transcript.toEnd();
      this.showSidebar(false);
    } catch (problem) {
      this.say(problem.message);
      if (problem.kind === "not found") this.newChat();
    }
  }

  newChat() {
    this.composer.stopEditing();
    this.show(NOTHING);
    this.showSidebar(false);
    this.composer.text.focus();
  }

  show(chat) {
    const isOther = chat.id !== this.chat.id;
    if (isOther) this.composer.stopEditing();
    this.chat = chat;
    history.replaceState(null, "", chat.id ? `#${chat.id}` : location.pathname + location.search);
    document.title = chat.title ? `${chat.title} · qwen35mm` : "qwen35mm";
    this.title.textContent = chat.title;
    this.settings = { ...(chat.id ? chat.settings : (this.preferences.settings ?? {})) };
    if (isOther || !this.panelShown) this.panel.show(this.settings);
    this.panelShown = true;
    this.transcript.show(chat, () => this.welcome());
    // Of some there is no news yet.
    for (const id of chat.running) if (this.live.get(id)) this.transcript.update(this.live.get(id));
    if (chat.running.length) this.follow(chat.running);
    this.composer.setRunning(chat.running.length > 0);
    this.sidebar.mark(chat.id);
    this.drawGauge();
    if (isOther) this.composer.measure();
  }

  // Sending, and answers in progress

  async send(message) {
    try {
      const { chat, reply } = await call("send", message);
      this.show(chat);
      this.transcript.toEnd();
      this.follow([reply]);
      this.sidebar.load();
      return true;
    } catch (problem) {
      if (problem.kind === "too long") this.offer(problem.message, problem.offers);
      else this.say(problem.message);
      return false;
    }
  }

  async sendExample(number, { text }) {
    let attachment;
    try {
      ({ attachment } = await call("example", { number }));
    } catch (problem) {
      return this.say(problem.message);
    }
    if (await this.send({ conversation: null, parent: null, settings: this.settings, text, attachments: [attachment] }))
      this.composer.text.focus();
  }

  async act(method, args) {
    try {
      const { chat, reply } = await call(method, { conversation: this.chat.id, ...args });
      this.show(chat);
      if (reply) {
        this.transcript.toEnd();
        this.follow([reply]);
      }
    } catch (problem) {
      if (problem.kind === "too long") this.offer(problem.message, problem.offers);
      else this.say(problem.message);
    }
  }

  follow(ids) {
    this.spoken.textContent = "";
    const fresh = ids.filter((id) => !this.live.has(id));
    for (const id of fresh) this.live.set(id, null);
    this.heard = Date.now();
    if (fresh.length) follow([...this.live.keys()], (replies) => this.news(replies));
  }

  /** What the program sends of answers in progress. */
  news(replies) {
    this.heard = Date.now();
    for (const [id, view] of Object.entries(replies)) {
      if (!this.live.has(id)) continue;
      this.live.set(id, view);
      if (view.conversation === this.chat.id) this.transcript.update(view);
      if (view.status !== "running") this.finished(id, view);
    }
  }

  async finished(id, view) {
    this.live.delete(id);
    this.spoken.textContent = view.error ?? t("The answer is complete.");
    if (view.conversation !== this.chat.id) return;
    try {
      const chat = await call("open", { conversation: view.conversation });
      if (chat.id === this.chat.id) this.show(chat);
    } catch (problem) {
      this.say(problem.message);
    }
  }

  checkSilence() {
    if (!this.live.size || Date.now() - this.heard < SILENCE_MS) return;
    const ids = [...this.live.keys()];
    this.live.clear();
    this.follow(ids);
    if (this.chat.id)
      call("open", { conversation: this.chat.id }).then(
        (chat) => chat.id === this.chat.id && this.show(chat),
        () => {},
      );
  }

  async stop() {
    for (const id of this.chat.running) {
      try {
        await call("stop", { node: id });
      } catch (problem) {
        this.say(problem.message);
      }
    }
  }

  editLast() {
    const last = this.chat.messages.filter((message) => message.role === "user").at(-1);
    if (last) this.composer.edit(last);
  }

  async removeMessage(message) {
    const sure = await ask(t("Delete this message?"), h("p", {}, t("What follows it on this branch goes with it.")), [
      { label: t("Cancel"), value: null },
      { label: t("Delete"), value: true, kind: "danger" },
    ]);
    if (sure) this.act("delete_message", { node: message.id });
  }

  // What doesn't fit

  async offer(words, offers) {
    const choice = await ask(
      t("This doesn't fit"),
      [h("p", {}, words)],
      [
        ...offers.map((offer) => ({ label: said(offer.label), value: offer })),
        { label: t("Change the message"), value: null },
      ],
    );
    if (choice) this.takeOffer(choice);
  }

  async takeOffer(offer) {
    if (offer.kind === "media") {
      this.changeSettings({ ...this.settings, ...offer.settings });
      this.composer.redrawLimits();
    } else if (offer.kind === "shorten") {
      await this.act("shorten", { first: offer.first });
      this.composer.measure();
    } else if (offer.kind === "context") {
      await this.models.change({ context_length: offer.context_length });
    } else if (offer.kind === "summary") {
      await this.act("summarise", {});
      this.sidebar.load();
    }
  }

  // Settings

  mediaLimit(name) {
    const { label } = this.app.settings.fields[name];
    const shown = this.settings[name] ?? this.app.settings.defaults[name] ?? this.app.context_length;
    return { label, shown, top: name === "max_frames" ? 768 : this.app.context_length };
  }

  changeSettings(values) {
    this.settings = values;
    this.panel.values = { ...values };
    this.saveSettings();
    this.composer.measure();
  }

  saveSettings = debounce(300, async () => {
    try {
      if (this.chat.id) await call("settings", { conversation: this.chat.id, settings: this.settings });
      await this.changePreferences({ settings: this.settings }, false);
    } catch (problem) {
      this.say(problem.message);
    }
  });

  async changePreferences(values, redraw = true) {
    Object.assign(this.preferences, values);
    try {
      await call("preferences", { preferences: this.preferences });
    } catch (problem) {
      return this.say(problem.message);
    }
    this.useColours();
    if (redraw && "language" in values) location.reload();
  }

  useColours() {
    const dark = this.preferences.colours
      ? this.preferences.colours === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.body.classList.toggle("dark", dark);
  }

  /** Shows the conversations over a narrow page, or the page again. */
  toggleSidebar(open) {
    this.showSidebar(open);
    (open ? this.sidebar.element.querySelector(".new-chat") : this.menuButton).focus();
  }

  showSidebar(open) {
    this.frame.classList.toggle("with-sidebar", open);
    this.menuButton.setAttribute("aria-expanded", String(open));
  }

  toggleSettings(open) {
    if (open && this.panel.element.hidden) this.opener = document.activeElement;
    this.panel.element.hidden = !open;
    for (const button of [this.settingsButton, this.sidebar.settingsButton])
      button.setAttribute("aria-expanded", String(open));
    this.showSidebar(false);
    if (open) {
      this.panel.show(this.settings);
      this.panel.element.querySelector("button").focus();
    } else (this.opener?.checkVisibility() ? this.opener : this.composer.text).focus();
  }

  // The rest

  key(event) {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (this.frame.classList.contains("with-sidebar")) this.toggleSidebar(false);
    else if (this.chat.running.length) this.stop();
    else if (!this.panel.element.hidden) this.toggleSettings(false);
  }

  takeDrops() {
    const has = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    let depth = 0;
    const mark = (change) => {
      depth = Math.max(depth + change, 0);
      this.frame.classList.toggle("dropping", depth > 0);
    };
    this.frame.addEventListener("dragenter", (event) => has(event) && mark(1));
    this.frame.addEventListener("dragleave", (event) => has(event) && mark(-1));
    this.frame.addEventListener("dragover", (event) => has(event) && event.preventDefault());
    this.frame.addEventListener("drop", (event) => {
      if (!has(event)) return;
      event.preventDefault();
      mark(-depth);
      this.composer.attach([...event.dataTransfer.files]);
    });
  }

  enlarge(digest, name) {
    ask(
      name,
      h("img.large", {
        src: mediaUrl(digest),
        alt: name,
        onerror: (event) => event.target.replaceWith(t("Browsers don't show this format.")),
      }),
      [{ label: t("Close"), value: null }],
    );
  }

  async drawGauge() {
    const context = this.chat.context;
    const length = this.app.context_length;
    const used = context?.used ?? 0;
    let memory = null;
    try {
      memory = await call("memory");
    } catch {
      /* said elsewhere */
    }
    const share = used / length;
    const held = memory && said(memory.words);
    const words = [
      t("{u} of {l} tokens of context", { u: number(used), l: number(length) }),
      ...(held ? [held] : []),
    ].join("\n");
    this.gauge.title = words;
    this.gauge.setAttribute("aria-label", words);
    const meter = (part, label, kind) =>
      h(
        "span.meter",
        { title: label },
        h(`span.fill.${kind}`, { style: `width:${Math.min(100 * part, 100).toFixed(1)}%` }),
      );
    clear(
      this.gauge,
      meter(share, words, share > 0.85 ? "full" : "context"),
      memory ? meter(memory.share, held, "memory") : null,
    );
  }

  say(words, kind) {
    this.toasts.say(words, kind);
  }
}

const element = document.getElementById("qwen35mm");
new Page(element).begin().catch((problem) => {
  if (problem.kind === "login") return showLogin(element);
  clear(element, h("p.lost", { role: "alert" }, icon("close"), problem.message || String(problem)));
});

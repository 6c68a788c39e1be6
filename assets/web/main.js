// The page: its parts, and what passes between them.

/** @import { Answer, Chat, Message, ModelChange, News, Offer } from "./common/types.d.ts" */
/** @import { Preferences, Settings, Start, Tone } from "./common/types.d.ts" */
/** @import { MessageDesk } from "./chat/message.js" */
/** @import { View } from "./chat/state.js" */
/** @import { MediaDesk } from "./media/viewer.js" */

import { keepFor } from "./chat/account.js";
import { Comparison } from "./chat/compare.js";
import { isAway } from "./chat/connection.js";
import { ContextGauge } from "./chat/context.js";
import { Link, waitingWords } from "./chat/link.js";
import { showLogin } from "./chat/login.js";
import { AnswerRow, QuestionRow, ResultRow } from "./chat/message.js";
import { Presets } from "./chat/presets.js";
import { SettingsPanel } from "./chat/settings.js";
import { shortcutOf, showShortcuts } from "./chat/shortcuts.js";
import { Sidebar } from "./chat/sidebar.js";
import { PageState } from "./chat/state.js";
import { ToolPanel } from "./chat/tools.js";
import { Transcript } from "./chat/transcript.js";
import { temporaryWords, welcome } from "./chat/welcome.js";
import { Problem, post, Requests, SESSION_ADDRESS, tellAtEnd, uploadFor } from "./common/api.js";
import { ask, askToDelete, button, h, icon, iconButton, isComposing, redraw, useColours } from "./common/dom.js";
import { beginSession } from "./common/session.js";
import { Toasts } from "./common/toasts.js";
import { said, t, useLanguage } from "./common/words.js";
import { Composer, takeDrops } from "./compose/composer.js";
import { TEMPORARY } from "./compose/drafts.js";
import { holdingAfter } from "./compose/once.js";
import { Player } from "./media/player.js";
import { AdapterMenu } from "./model/adapters.js";
import { Models } from "./model/models.js";
import { Switcher } from "./model/switcher.js";

const LOOK_AFTER_MEMORY_MS = 60000;
// The answers that are asked a second time, for a page that is loaded again.
const LOOK_CLOSER = "qwen35mm.closer";
// From when on the person is told why there is no page yet.
const SILENT_MS = 4000;

/** The page: makes its parts, and tells each of them what happens to the others. @implements {View} */
class Page {
  /** The conversation that the address stands for. @type {string | null} */
  #address = null;
  /** What had the focus before the settings were opened. @type {Element | null} */
  #opener = null;
  /** Answers whose times are looked at more closely when they are there, also after a reload. @type {Set<string>} */
  #toLookAt = new Set(JSON.parse(sessionStorage.getItem(LOOK_CLOSER) ?? "[]"));
  /** By what is pressed with Ctrl. @type {Record<string, (() => unknown) | undefined>} */
  #shortcuts = {
    k: () => this.search(),
    "shift o": () => this.newChat(),
    "shift e": () => this.composer.editLast(),
    "/": showShortcuts,
  };

  constructor(/** @type {Start} */ start) {
    const { app } = start;
    this.app = app;
    const toComposer = () => this.composer.text.focus();
    const offer = () => this.models.offer();
    this.link = new Link({
      throughGradio: () => app.through_gradio,
      isSilent: () => this.state.isSilent,
      changed: () => {
        this.transcript.connectionChanged();
        this.composer.draw();
      },
      reached: (now) => this.reached(now),
      news: (answers, asked) => this.state.news(answers, asked),
      say: (words) => this.say(words),
      toComposer,
    });
    const requests = new Requests((problem) => this.tell(problem), this.link.connection.send);
    const state = new PageState(this, requests, (ids) => this.link.stream.watch(ids), start);
    this.state = state;
    // Of the same browser.
    this.tabs = new BroadcastChannel("qwen35mm");
    this.tabs.addEventListener("message", ({ data: id }) => {
      state.changedElsewhere(id);
      this.sidebar.load();
    });
    this.toasts = new Toasts();
    const say = this.toasts.say.bind(this.toasts);
    this.sidebar = new Sidebar(this, requests, this.toasts, () => this.composer.draft.drafts, start.account);
    /** @type {MediaDesk} */
    const media = {
      notices: this.toasts.element,
      say,
      messages: () => state.chat.messages,
      crop: async (part) => {
        const { id, temporary } = state.chat;
        const found = await requests.ask("crop", { ...part, temporary }, "crop");
        // In another chat by now, it is no part of that one.
        return (id === state.chat.id && found?.attachment) || null;
      },
      send: (text, files) => this.composer.draft.queue({ text, files, editing: null, taken: [] }),
      attach: (files, text = "") => {
        const { draft } = this.composer;
        for (const file of files) draft.add(file);
        draft.text ||= text;
        this.composer.drawText();
        toComposer();
      },
    };
    this.transcript = new Transcript(
      (message) => {
        if (message.role === "user") return new QuestionRow(message, messageDesk);
        return message.role === "tool" ? new ResultRow(message, messageDesk) : new AnswerRow(message, messageDesk);
      },
      (chat) =>
        welcome(chat.temporary, app, {
          offer,
          sendExample: (number) => this.sendExample(number),
          suggest: (idea) => this.composer.suggest(idea),
        }),
    );
    this.player = new Player(media, this.transcript.element);
    /** @type {MessageDesk} */
    const messageDesk = {
      ...{ app, state, requests, media, player: this.player, toComposer, offer },
      remove: (message) => this.remove(message),
      edit: (question) => this.composer.edit(question),
      compare: (answer) => this.comparison.open(answer),
      isLost: () => this.link.isLost,
      speak: (words) => this.speak(words),
    };
    const presets = new Presets(requests, start.presets, () => {
      this.drawChoices();
      this.panel.drawPresets();
    });
    this.context = new ContextGauge(app, requests);
    this.composer = new Composer({
      ...{ app, state, requests, link: this.link, media, presets, say },
      change: (values) => {
        this.changeSettings(values);
        if (this.areSettingsOpen) this.panel.show(values);
      },
      lookCloser: (reply) => {
        this.#toLookAt.add(reply);
        this.#keepToLookAt();
      },
      onCost: (cost) => this.context.drawCost(cost),
    });
    this.models = new Models(app, requests, say, state);
    this.adapters = new AdapterMenu(app, state, (values) => this.changeSettings(values));
    this.comparison = new Comparison(messageDesk, this.models, presets);
    const tools = new ToolPanel(requests, state, () => this.drawChoices());
    this.panel = new SettingsPanel({
      ...{ tools, app, preferences: state.preferences, models: this.models, presets, archives: this.sidebar.archives },
      change: (values) => this.changeSettings(values),
      prefer: (values) => this.changePreferences(values),
      close: () => this.toggleSettings(false),
    });
    this.title = h("h1.title", { dir: "auto" });
    this.spoken = h("div.unseen", { role: "log" });
    this.menuButton = iconButton("menu", t("Chats"), () => this.toggleSidebar(true), {
      class: "menu-button",
      "aria-controls": this.sidebar.element.id,
      "aria-expanded": "false",
    });
    this.settingsButton = iconButton("settings", t("Settings"), () => this.toggleSettings(!this.areSettingsOpen), {
      "aria-controls": this.panel.element.id,
      "aria-expanded": "false",
    });
    this.element = h(
      "div.app",
      button("strong skip", t("Skip to message"), toComposer),
      this.sidebar.element,
      h("div.shade", { onclick: () => this.toggleSidebar(false) }),
      h(
        "main.main",
        h(
          "header.top.row",
          this.menuButton,
          this.title,
          h("span.temporary-mark.row.quiet", { title: temporaryWords() }, icon("hourglass"), t("Temporary")),
          new Switcher(app, requests, this.models).element,
          this.adapters.element,
          this.context.element,
          this.settingsButton,
        ),
        this.link.element,
        this.transcript.element,
        this.transcript.endButton,
        this.composer.element,
        this.player.element,
      ),
      this.panel.element,
      this.toasts.element,
      this.spoken,
      h("div.drop-here", { "aria-hidden": "true" }, t("Drop pictures, videos, text files or PDFs here")),
    );
    this.sidebar.show(start);
    takeDrops(this.element, (files) => this.composer.attach(files));
  }

  /** Begins, once it stands in the document. */
  async begin(/** @type {string[]} */ running) {
    this.composer.draw();
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("paste", (event) => this.composer.paste(event));
    window.addEventListener("hashchange", () => this.openFromAddress());
    window.addEventListener("pagehide", () => {
      const { id, temporary } = this.state.chat;
      if (temporary) tellAtEnd("end_temporary", { conversation: id });
    });
    // A page that comes back has ended it.
    window.addEventListener("pageshow", ({ persisted }) => persisted && this.state.chat.temporary && this.newChat());
    await this.openFromAddress();
    this.comparison.resume();
    if (this.app.change?.busy) this.models.follow(this.app.change, null);
    if (running.length) this.state.follow(running);
    this.link.keep();
    // Also tells the program that the page is still open.
    setInterval(() => this.context.look(), LOOK_AFTER_MEMORY_MS);
    // Today becomes yesterday.
    setInterval(() => this.sidebar.draw(), LOOK_AFTER_MEMORY_MS);
    this.composer.text.focus();
  }

  // What the state has drawn: see its View

  moved(/** @type {string | null} */ from, /** @type {string | null} */ to) {
    // A new conversation that has begun stays where it is for Back and Forward.
    const { temporary } = this.state.chat;
    if (from === null && !temporary) this.drawAddress(to, false);
    this.composer.draft.move(from === null && temporary ? TEMPORARY : from, to);
  }

  showChat(/** @type {Chat} */ chat, /** @type {boolean} */ isOther) {
    if (isOther) {
      this.composer.draft.open(chat.temporary && !chat.id ? TEMPORARY : chat.id);
      uploadFor(Boolean(chat.temporary));
      this.element.classList.toggle("temporary", Boolean(chat.temporary));
      this.player.close();
      this.models.followChat(chat);
    }
    this.drawAddress(chat.temporary ? null : chat.id, isOther);
    this.drawTitle(chat.title);
    if (isOther && this.areSettingsOpen) this.panel.show(this.state.settings);
    this.transcript.show(chat);
    this.composer.setRunning(chat.running.length > 0);
    // Other messages may stand before it now.
    this.composer.draft.taken = holdingAfter(this.composer.draft.taken, chat.messages);
    this.composer.draft.measureSoon();
    this.sidebar.mark(chat.id);
    this.drawChoices();
    this.context.drawChat(chat);
    this.context.look();
    for (const message of chat.messages) if (message.role === "assistant") this.lookCloser(message);
  }

  /** Asks the second time, where a question is asked twice. */
  lookCloser(/** @type {Answer} */ answer) {
    if (answer.status === "running" || !this.#toLookAt.delete(answer.id)) return;
    this.#keepToLookAt();
    const look = answer.status === "finished" ? this.player.closer(answer) : null;
    if (look) this.composer.draft.queue({ text: look.text, files: look.files, editing: null, taken: [] });
  }

  #keepToLookAt() {
    if (this.#toLookAt.size) sessionStorage.setItem(LOOK_CLOSER, JSON.stringify([...this.#toLookAt]));
    else sessionStorage.removeItem(LOOK_CLOSER);
  }

  showAnswer(/** @type {News} */ answer) {
    this.transcript.update(answer);
    this.comparison.update(answer);
  }

  toEnd() {
    this.transcript.toEnd();
  }

  toMessage(/** @type {string} */ id) {
    this.transcript.toMessage(id);
  }

  whenThere() {
    return this.link.connection.whenThere();
  }

  speak(/** @type {string} */ words) {
    if (words) this.spoken.append(h("p", words));
    else this.spoken.replaceChildren();
  }

  changed(/** @type {string | null} */ id) {
    this.tabs.postMessage(id);
  }

  listChanged() {
    this.sidebar.load();
  }

  changeModel(/** @type {ModelChange} */ change) {
    return this.models.propose(change);
  }

  settingsChanged() {
    this.panel.values = this.state.settings;
    this.drawChoices();
    this.composer.draft.measureSoon();
  }

  /** The program answers, again perhaps, and has told how things are now. */
  reached(/** @type {Start} */ now) {
    this.state.resume(now.running);
    this.sidebar.load();
    this.context.look();
    this.composer.draft.measureSoon();
    // These depend on the moment.
    const lasting = (/** @type {Start["app"]} */ app) =>
      JSON.stringify({ ...app, suggestion: null, change: null, taken: null });
    if (lasting(now.app) === lasting(this.app)) return;
    const { model: name } = now.app;
    const words =
      name === this.app.model
        ? t("The program was restarted with other settings. Reload the page to see them.")
        : t("Another model answers now: {name}. Reload the page to use it.", { name });
    Object.assign(this.app, now.app);
    this.say(words, "note");
  }

  /** Says that something doesn't fit, and takes what is chosen of what would. */
  async offer(/** @type {string} */ words, /** @type {Offer[]} */ offers) {
    const buttons = offers.map((offer) => ({ label: said(offer.label), value: () => offer }));
    const leave = { label: t("Edit message"), value: () => null };
    const choice = await ask(t("This doesn't fit"), h("p", words), [...buttons, leave]);
    if (choice) this.composer.take(choice);
  }

  tell(/** @type {Problem} */ problem) {
    const { kind, message, offers } = problem;
    if (isAway(problem)) this.link.insist();
    else if (kind === "too long") this.offer(message, offers);
    else this.say(message);
  }

  say(/** @type {string} */ words, /** @type {Tone} */ tone = "bad") {
    this.toasts.say(words, tone);
  }

  // Which conversation is shown

  openFromAddress() {
    const id = this.addressed;
    return id ? this.open(id) : this.newChat();
  }

  /** The conversation that the address names. */
  get addressed() {
    const id = location.hash.slice(1);
    return /^[0-9a-f]{32}$/.test(id) ? id : null;
  }

  /** Has the address name a conversation; another one than before is one step for Back and Forward. */
  drawAddress(/** @type {string | null} */ id, /** @type {boolean} */ isOther) {
    const address = id ? `#${id}` : location.pathname + location.search;
    // Where Back or Forward have come to what is gone, its place is taken.
    const isStep = isOther && this.addressed === this.#address && id !== this.#address;
    history[isStep ? "pushState" : "replaceState"](null, "", address);
    this.#address = id;
  }

  /** Opens a conversation, at a message if one is named. */
  async open(/** @type {string} */ id, /** @type {string | null} */ node = null) {
    await this.state.open(id, node);
    this.showSidebar(false);
  }

  newChat(temporary = false) {
    if (temporary) this.composer.draft.drafts.forget(TEMPORARY);
    this.composer.draft.open(temporary ? TEMPORARY : null);
    this.state.newChat(temporary);
    this.showSidebar(false);
    this.composer.text.focus();
  }

  // What is done with it

  async sendExample(/** @type {number} */ number) {
    if (await this.state.sendExample(number)) this.composer.text.focus();
  }

  async remove(/** @type {Message} */ message) {
    const words = t("The messages after it on this branch are deleted too.");
    if (await askToDelete(t("Delete this message?"), words)) this.state.deleteMessage(message);
  }

  /** What is chosen beside the settings. */
  drawChoices() {
    this.composer.quick.draw();
    this.adapters.draw();
  }

  changeSettings(/** @type {Settings} */ values) {
    this.state.changeSettings(values);
    this.composer.sliders.redraw();
  }

  async changePreferences(/** @type {Preferences} */ values) {
    if (!(await this.state.changePreferences(values))) return;
    useColours(this.state.preferences.colours);
    this.composer.drawLinks();
    if ("language" in values) location.reload();
  }

  // What is drawn here

  /** The conversation that is shown has another title. */
  retitled(/** @type {string} */ title) {
    if (title === this.state.chat.title) return;
    this.state.chat.title = title;
    this.drawTitle(title);
  }

  drawTitle(/** @type {string} */ title) {
    document.title = title ? `${title} · qwen35mm` : "qwen35mm";
    this.title.textContent = title;
  }

  /** Shows the conversations over a narrow page, or the page again. */
  toggleSidebar(/** @type {boolean} */ open) {
    this.showSidebar(open);
    (open ? this.sidebar.newButton : this.menuButton).focus();
  }

  showSidebar(/** @type {boolean} */ open) {
    this.element.classList.toggle("with-sidebar", open);
    this.menuButton.setAttribute("aria-expanded", String(open));
  }

  search() {
    // In a narrow window the sidebar is a layer.
    if (this.menuButton.checkVisibility()) this.showSidebar(true);
    this.sidebar.search.focus();
    this.sidebar.search.select();
  }

  get areSettingsOpen() {
    return !this.panel.element.hidden;
  }

  toggleSettings(/** @type {boolean} */ open) {
    const { element } = this.panel;
    if (open && !this.areSettingsOpen) this.#opener = document.activeElement;
    element.hidden = !open;
    // By a class: with `:has()` each change of an answer has the styles of all messages looked at.
    this.element.classList.toggle("with-settings", open);
    for (const each of [this.settingsButton, this.sidebar.settingsButton])
      each.setAttribute("aria-expanded", String(open));
    this.showSidebar(false);
    if (open) {
      this.panel.show(this.state.settings);
      element.querySelector("button")?.focus();
    } else {
      const opener = this.#opener;
      (opener instanceof HTMLElement && opener.checkVisibility() ? opener : this.composer.text).focus();
    }
  }

  key(/** @type {KeyboardEvent} */ event) {
    if (event.defaultPrevented || isComposing(event)) return;
    if (document.querySelector("dialog[open], :popover-open")) return;
    const run = this.#shortcuts[shortcutOf(event)];
    if (run) event.preventDefault();
    run?.();
    if (event.key !== "Escape" || hasSearch(event.target)) return;
    if (this.element.classList.contains("with-sidebar")) this.toggleSidebar(false);
    else if (this.state.chat.running.length) this.state.stop();
    else if (!this.player.element.hidden) this.player.close();
    else if (this.areSettingsOpen) this.toggleSettings(false);
  }
}

/** Whether it is a search field with a text, which Escape empties. */
const hasSearch = (/** @type {EventTarget | null} */ target) =>
  target instanceof HTMLInputElement && target.type === "search" && target.value !== "";

/** Builds the page in an element; the login, where the program asks for one. */
async function start(/** @type {HTMLElement} */ root) {
  // It comes with the answers below, and is most often the one that the person has chosen.
  const browsers = useLanguage(undefined);
  const waiting = setTimeout(() => {
    const say = () => {
      const status = root.querySelector(".skeleton [role=status]");
      if (status) status.textContent = waitingWords();
    };
    say();
    browsers.then(say);
  }, SILENT_MS);
  try {
    await beginSession(SESSION_ADDRESS);
    const begun = await post("start", {});
    keepFor(begun.account);
    await browsers;
    document.documentElement.lang = await useLanguage(begun.preferences.language);
    useColours(begun.preferences.colours);
    const page = new Page(begun);
    redraw(root, page.element);
    await page.begin(begun.running);
  } catch (problem) {
    if (problem instanceof Problem && problem.kind === "login") return showLogin(root);
    const reload = button("plain", t("Reload page"), () => location.reload());
    const words = h("p", { role: "alert" }, problem instanceof Error ? problem.message : "");
    redraw(root, h("div.app.alone.lost", words, reload));
  } finally {
    clearTimeout(waiting);
  }
}

const root = document.getElementById("qwen35mm");
if (root) start(root);

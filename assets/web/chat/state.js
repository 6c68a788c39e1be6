// What the page knows and does: the conversation that is shown, its settings, the answers in progress. Draws nothing.

/** @import { Arguments, CallAnswer, Change, Chat, News, Offer } from "../common/types.d.ts" */
/** @import { Preferences, Settings, Start } from "../common/types.d.ts" */
/** @import { Message, ModelChange, Outgoing } from "../common/types.d.ts" */
/** @import { Requests } from "../common/api.js" */

import { debounce, newId, Problem } from "../common/api.js";
import { said, t } from "../common/words.js";
import { isAway } from "./connection.js";
import { forAnyChat } from "./presets.js";

// An answer that says nothing for this long has lost its connection: it is asked for again.
const SILENCE_MS = 8000;
const SAVE_AFTER_MS = 300;
// A message is sent again after this while the answer before it is being prepared.
const BUSY_MS = 500;
// One topic for all that a person does to what is shown: what was done last is what stays.
const SHOWN = "what is shown";

/** @type {Chat} */
export const NO_CHAT = { id: null, title: "", settings: {}, messages: [], running: [], context: null };

/**
 * What draws the state, and asks the person.
 * @typedef {object} View
 * @property {(from: string | null, to: string | null) => void} moved the draft for a chat goes to another
 * @property {(chat: Chat, isOther: boolean) => void} showChat draws a chat; `isOther` than the one before
 * @property {(answer: News) => void} showAnswer draws what is new of an answer in the chat
 * @property {() => void} toEnd goes to the end of the chat
 * @property {(id: string) => void} toMessage goes to a message of it
 * @property {(words: string) => void} speak tells a screen reader
 * @property {(words: string, offers: Offer[]) => void} offer says that something doesn't fit, and what would
 * @property {(id: string | null) => void} changed the person has changed a chat here: other tabs look at it
 * @property {() => void} listChanged there is another chat, or another order of them
 * @property {() => void} settingsChanged
 * @property {(change: ModelChange) => Promise<unknown>} changeModel
 * @property {() => Promise<void>} whenThere until the program can be reached
 */

export class PageState {
  /** @type {Chat} */
  chat = NO_CHAT;
  /**
   * Answers in progress in all conversations, and those still to be stored, with the last that is known of them.
   * @type {Map<string, News | null>}
   */
  live = new Map();
  #heardMs = 0;
  /** Answers that have ended, and whose calls may still run. @type {Set<string>} */
  #calling = new Set();
  /** Who waits until answers have ended. @type {{ ids: string[], go: (isEnd: boolean) => void }[]} */
  #waiting = [];
  /** For the conversation that they were changed in, whichever is shown when they are saved. */
  #saveSoon = debounce(SAVE_AFTER_MS, async (/** @type {Chat} */ { id, temporary }) => {
    const { settings } = this;
    const isKept = !id || (await this.requests.inOrder("settings", { conversation: id, settings }));
    // What is set in a temporary conversation, such as its system prompt, is for it alone.
    if (isKept && !temporary) await this.changePreferences({ settings: forAnyChat(settings) });
  });

  /**
   * @param {View} view
   * @param {Requests} requests
   * @param {(ids: string[]) => void} watch has the program send what is new of these answers and no others, which comes
   *   to `news`
   * @param {Pick<Start, "app" | "preferences" | "tools">} start
   * @param {() => number} nowMs
   */
  constructor(view, requests, watch, { app, preferences, tools }, nowMs = Date.now) {
    this.view = view;
    this.requests = requests;
    this.watch = watch;
    this.app = app;
    this.examples = app.examples;
    this.preferences = preferences;
    /** The tool servers that a chat may use. */
    this.tools = tools;
    /** Those of the conversation that differ from the defaults. @type {Settings} */
    this.settings = { ...preferences.settings };
    this.nowMs = nowMs;
  }

  // Which conversation is shown

  /** Opens a conversation at its end, or at a message, on whichever branch that is. */
  async open(/** @type {string} */ id, /** @type {string | null} */ node = null) {
    try {
      const args = { conversation: id, ...(node ? { node } : {}) };
      this.#showLast(await this.requests.call("open", args, SHOWN));
      if (node) this.view.toMessage(node);
      else this.view.toEnd();
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.requests.onProblem(problem);
      if (problem.kind === "not found") this.newChat();
    }
  }

  newChat(temporary = false) {
    this.#showLast(temporary ? { ...NO_CHAT, temporary } : NO_CHAT);
  }

  /** Shows what the person asked for last; what was read before and comes after it is late. */
  #showLast(/** @type {Chat} */ chat) {
    this.requests.begin(SHOWN);
    this.#show(chat);
  }

  #show(/** @type {Chat} */ chat) {
    const before = this.chat;
    const isOther = chat.id !== before.id || Boolean(chat.temporary) !== Boolean(before.temporary);
    this.chat = chat;
    const goesOn = chat.temporary && (before.id === null || before.id === chat.id);
    if (before.temporary && !goesOn) this.requests.ask("end_temporary", { conversation: before.id });
    if (isOther) {
      // With the settings as they were there.
      this.#saveSoon.flush();
      this.settings = { ...(chat.id ? chat.settings : this.preferences.settings) };
    }
    this.view.showChat(chat, isOther);
    for (const id of chat.running) {
      const news = this.live.get(id);
      if (news) this.view.showAnswer(news);
    }
    const unsaved = chat.messages.filter((message) => "unsaved" in message && message.unsaved);
    this.follow([...chat.running, ...unsaved.map(({ id }) => id)]);
  }

  // What is done to it

  /** Runs an answer's calls, and goes on with what they give. */
  runCalls(/** @type {string} */ node, /** @type {Record<string, CallAnswer>} */ answers) {
    return this.#change("run_calls", { conversation: this.chat.id, node, answers });
  }

  /** Runs the calls of an answer that has just ended, if they may run without asking. */
  async #runAllowed(/** @type {News} */ { id: node, conversation }) {
    this.#calling.add(node);
    const changed = await this.requests.ask("run_calls", { conversation, node, answers: {} });
    this.#calling.delete(node);
    // Another tab may have run them.
    const next = changed?.reply ? [changed.reply] : (changed?.chat.running ?? []);
    for (const each of this.#waiting.filter(({ ids }) => ids.includes(node)))
      if (next.length) each.ids = [...each.ids.filter((id) => id !== node), ...next];
      else each.go(false);
    this.follow(next);
    this.#letGo();
    if (conversation === this.chat.id) this.requests.told(this.#refresh());
  }

  /** Where a message that is sent now goes. */
  get place() {
    const { id, messages, temporary } = this.chat;
    const place = { conversation: id, parent: messages.at(-1)?.id ?? null, settings: this.settings };
    return temporary ? { ...place, temporary } : place;
  }

  /** The person sends a message now: where it goes, though it may be on its way only later; see Begun in draft.js. */
  begin() {
    return { place: this.place, answers: [...this.chat.running], isLate: this.requests.begin(SHOWN) };
  }

  /**
   * Sends a message; null where that wasn't possible, and `answers` where others, of other tabs, have to end first.
   * @param {Outgoing} message
   * @param {() => boolean} isLate whether the person has gone on to something else since: it is not shown then
   */
  async send(message, isLate) {
    const isShown = message.conversation ? message.conversation === this.chat.id : !isLate();
    // Settings that changed since are stored with the chat.
    const settings = isShown ? this.settings : message.conversation ? null : message.settings;
    const sending = this.#sendOnce({ ...message, settings, id: newId() }).catch((problem) => {
      // What would fit is of no use to the message that is shown now.
      if (isLate() && problem instanceof Problem) problem.offers = [];
      throw problem;
    });
    const sent = await this.requests.told(sending);
    if (!sent || "answers" in sent) return sent;
    const { chat, reply } = sent;
    if (!isLate()) {
      if (!message.conversation && chat.id) this.view.moved(null, chat.id);
      this.#showLast(chat);
      this.view.toEnd();
    } else if (chat.id === this.chat.id) this.requests.told(this.#refresh());
    else if (chat.temporary) this.requests.ask("end_temporary", { conversation: chat.id });
    if (reply) this.follow([reply]);
    this.view.changed(chat.id);
    this.view.listChanged();
    return sent;
  }

  /** Sends a message until it is known to have come. */
  async #sendOnce(/** @type {Outgoing} */ message) {
    for (;;)
      try {
        return await this.requests.call("send", { ...message, model: this.app.model });
      } catch (problem) {
        if (problem instanceof Problem && problem.kind === "busy") {
          const { answers } = problem;
          if (!answers.length) await new Promise((go) => setTimeout(go, BUSY_MS));
          this.follow(answers);
          return { answers };
        }
        if (!isAway(problem)) throw problem;
        await this.view.whenThere();
      }
  }

  async sendExample(/** @type {number} */ number) {
    const isLate = this.requests.begin(SHOWN);
    const found = await this.requests.ask("example", { number, temporary: this.chat.temporary });
    if (!found) return null;
    const { text } = this.examples[number];
    const place = { ...this.place, conversation: null, parent: null };
    return this.send({ ...place, text, attachments: [found.attachment] }, isLate);
  }

  /**
   * Answers a question, beside the answers that it may have.
   * @param {string | null} node
   * @param {Settings} [own] settings of this answer alone
   */
  answer(node, own) {
    const asked = { conversation: this.chat.id, node, model: this.app.model };
    return this.#change("again", own ? { ...asked, own } : { ...asked, settings: this.settings });
  }

  goOn(/** @type {Message} */ { id }) {
    const { settings, app } = this;
    return this.#change("continue", { conversation: this.chat.id, node: id, settings, model: app.model });
  }

  showBranch(/** @type {string} */ node) {
    return this.#change("branch", { conversation: this.chat.id, node });
  }

  /** Puts a person's own words beside an answer; whether that was possible. */
  editAnswer(/** @type {string} */ node, /** @type {string} */ text) {
    return this.#change("edit_answer", { conversation: this.chat.id, node, text });
  }

  deleteMessage(/** @type {Message} */ { id }) {
    return this.#change("delete_message", { conversation: this.chat.id, node: id });
  }

  /** Does what makes this message and later ones fit; whether it was possible. */
  async take(/** @type {Offer} */ offer) {
    const conversation = this.chat.id;
    if (offer.kind === "shorten") return this.#change("shorten", { conversation, first: offer.first });
    if (offer.kind === "summary") {
      const title = t("After: {title}", { title: this.chat.title });
      const isBegun = await this.#change("summarise", { conversation, title });
      this.view.listChanged();
      return isBegun;
    }
    if (offer.kind === "media") this.changeSettings({ ...this.settings, ...offer.settings });
    else await this.view.changeModel({ context_length: offer.context_length });
    return true;
  }

  /**
   * Has the program change a conversation, and shows it if the person hasn't moved on; whether it was possible.
   * @template {Change} C
   * @param {C} name
   * @param {Arguments<C>} args
   */
  async #change(name, args) {
    const isLate = this.requests.begin(SHOWN);
    const changed = await this.requests.ask(name, args);
    if (!changed) return false;
    const { chat, reply } = changed;
    if (!isLate()) {
      if (name === "summarise" && chat.id) this.view.moved(args.conversation, chat.id);
      this.#showLast(chat);
      if (reply) this.view.toEnd();
    }
    // The program begins with an answer when it is watched.
    if (reply) {
      this.follow([reply]);
      this.view.listChanged();
    }
    this.view.changed(chat.id);
    return true;
  }

  /** Reloads the chat, unless the person has asked for something newer. */
  async #refresh() {
    const isLate = this.requests.newest(SHOWN);
    const chat = await this.requests.call("open", { conversation: this.chat.id }, "refresh");
    if (!isLate()) this.#show(chat);
  }

  /** A conversation was changed in another tab: where it is shown, it grows here, too. */
  changedElsewhere(/** @type {string} */ id) {
    if (id === this.chat.id) this.requests.told(this.#refresh());
  }

  // Answers in progress

  /**
   * Until none of these answers is in progress, nor what follows its calls.
   * @returns {Promise<boolean>} false where the person is asked about a call first
   */
  answered(/** @type {string[]} */ ids) {
    return new Promise((go) => {
      this.#waiting.push({ ids, go });
      this.#letGo();
    });
  }

  #letGo() {
    const ready = this.#waiting.filter(({ ids }) => !ids.some((id) => this.live.has(id) || this.#calling.has(id)));
    this.#waiting = this.#waiting.filter((each) => !ready.includes(each));
    for (const { go } of ready) go(true);
  }

  follow(/** @type {string[]} */ ids) {
    const fresh = ids.filter((id) => !this.live.has(id));
    if (!fresh.length) return;
    this.view.speak("");
    for (const id of fresh) this.live.set(id, null);
    this.#heardMs = this.nowMs();
    this.watch([...this.live.keys()]);
  }

  /**
   * What the program sends of answers in progress, by their ids.
   * @param {Record<string, News>} answers
   * @param {string[]} asked those that it was to send: it knows nothing of the others any more
   */
  news(answers, asked = []) {
    this.#heardMs = this.nowMs();
    for (const [id, answer] of Object.entries(answers)) {
      const before = this.live.get(id);
      if (before === undefined) continue;
      this.live.set(id, answer);
      const isShown = answer.conversation === this.chat.id;
      if (isShown) this.view.showAnswer(answer);
      if (answer.status === "running") {
        // Results of calls are messages of their own.
        if (isShown && answer.num_results > (before?.num_results ?? 0)) this.requests.told(this.#refresh());
        continue;
      }
      // One that can't be stored is watched until it is.
      if (!answer.unsaved) this.live.delete(id);
      if (answer.status !== before?.status) this.#end(answer);
      else if (!answer.unsaved && isShown) this.requests.told(this.#refresh());
    }
    const gone = asked.filter((id) => !(id in answers) && this.live.delete(id));
    if (gone.some((id) => this.chat.running.includes(id))) this.requests.told(this.#refresh());
    this.#letGo();
  }

  #end(/** @type {News} */ answer) {
    this.view.listChanged();
    const done = answer.calls.length ? t("The model calls a tool.") : t("The answer is complete.");
    this.view.speak(said(answer.error ?? answer.unsaved ?? done));
    if (answer.calls.length) {
      this.#runAllowed(answer);
      return;
    }
    if (answer.conversation !== this.chat.id) return;
    this.requests.told(this.#refresh());
    if (answer.too_long) this.view.offer(said(answer.error ?? ""), []);
  }

  /** Whether there are answers that say nothing any more. */
  get isSilent() {
    return this.live.size > 0 && this.nowMs() - this.#heardMs >= SILENCE_MS;
  }

  /** The program is there, again perhaps: goes on with the answers in progress, and shows how things are now. */
  async resume(/** @type {string[]} */ running) {
    const ids = [...new Set([...this.live.keys(), ...running])];
    this.live.clear();
    this.follow(ids);
    const { id } = this.chat;
    if (!id) return;
    try {
      await this.#refresh();
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.requests.onProblem(problem);
      if (problem.kind !== "not found" || id !== this.chat.id) return;
      this.view.moved(id, null);
      this.newChat();
    }
  }

  async stop() {
    for (const node of this.chat.running) await this.requests.ask("stop", { node });
  }

  // Settings

  changeSettings(/** @type {Settings} */ values) {
    this.settings = values;
    this.view.settingsChanged();
    this.#saveSoon(this.chat);
  }

  /** Stores preferences, and only those that were changed here. Resolves to whether that was possible. */
  async changePreferences(/** @type {Preferences} */ values) {
    Object.assign(this.preferences, values);
    return Boolean(await this.requests.inOrder("preferences", { preferences: values }));
  }
}

// The page of `qwen35mm review`: pictures and clips with their captions, one after the other, by keys.

/** @import { BulkEdit, Changed, Counts, Found, Item, Looked, ManyChanged } from "./review.d.ts" */
/** @import { Planned, PreviewAnswer, Proposal, Search } from "./review.d.ts" */

import { button, h, icon, isComposing, redraw, select } from "../common/dom.js";
import { beginSession } from "../common/session.js";
import { Toasts } from "../common/toasts.js";
import { number, said, t, useLanguage } from "../common/words.js";
import { Bulk } from "./bulk.js";
import { call, fileUrl, Refused } from "./calls.js";
import { Captioned, key } from "./captioned.js";
import { askForm, searchForm, showReviewKeys } from "./forms.js";
import { Gallery } from "./gallery.js";
import { Preview } from "./preview.js";
import { showStatistics } from "./statistics.js";
import { TrainingDialog } from "./training.js";

const SEARCH_AFTER_MS = 250;
const COMPARE_AGAIN_MS = 1500;
const MAX_ASKED = 100;

const named = (/** @type {string} */ label) => ({ "aria-label": label, title: label });

class Review {
  /** @type {number[]} */
  numbers = [];
  at = 0;
  /** @type {Map<number, Item>} */
  items = new Map();
  /** @type {Set<number>} */
  wanted = new Set();
  /** @type {Map<number, Proposal | AbortController>} */
  proposals = new Map();
  /** The numbers of the selected items, all of them in the list. @type {Set<number>} */
  selected = new Set();
  /** Where a selection with Shift begins. */
  anchor = 0;
  /** @type {Search} */
  search = { words: "", show: "all", flag: "", min_chars: null, max_chars: null };
  num_searches = 0;
  accepted = 0;
  later = 0;

  constructor(/** @type {Looked} */ looked) {
    this.toasts = new Toasts();
    this.kept = `review-search ${looked.title}`;
    Object.assign(this.search, JSON.parse(sessionStorage.getItem(this.kept) ?? "{}"));
    this.said = h("div.unseen", { role: "status" });
    this.count = h("p.quiet.count");
    this.place = h("p.quiet.place");
    this.flags = select({ "aria-label": t("Flag") }, (flag) => this.filter({ flag }), []);
    this.gallery = new Gallery(
      (each) => this.items.get(each),
      (from, to) => this.fetchItems(this.numbers.slice(from, to)),
      (at) => this.choose(at),
      (each) => this.selected.has(each),
      (at, withShift) => this.select(at, withShift),
    );
    this.bulk = new Bulk({
      accept: () => this.acceptSelected(),
      all: () => this.selectAll(),
      clear: () => this.clearSelection(),
      plan: (edit) => this.plan(edit),
      carryOut: (planned) => this.carryOut(planned),
    });
    this.pane = new Captioned({
      save: (item, text, editing) => this.save(item, text, editing),
      takeBack: (editing) => this.undo(editing),
      accept: () => this.accept(),
      take: (item, proposal) => this.take(item, proposal),
      leave: (item) => this.forget(item.number),
      stop: (item) => this.forget(item.number),
      unsaved: (item) => {
        if (!this.pane.isEditing) this.goToItem(item.number);
        else this.toasts.say(t("{name} isn't saved.", { name: item.name }), "bad", this.offered(item));
      },
    });
    this.acceptButton = button("strong", "", () => this.accept());
    this.withdrawButton = button("plain", [t("Mark as not accepted"), key("A")], () => this.withdraw());
    this.undoButton = button("plain", [t("Undo"), key("u")], () => this.undo());
    this.asking = askForm(
      looked.presets,
      (how) => this.again(how),
      () => this.closeAsking(),
    );
    this.buttons = h(
      "div.buttons.row.wrap",
      button("plain", [icon("left"), key("k")], () => this.step(-1), named(t("Previous"))),
      button("plain", [icon("right"), key("j")], () => this.step(1), named(t("Next"))),
      this.acceptButton,
      this.withdrawButton,
      button("plain", [t("Edit"), key("e")], () => this.pane.edit()),
      button("plain", [t("Ask again"), key("r")], () => this.openAsking()),
      this.undoButton,
    );
    this.pane.words.prepend(this.bulk.element);
    this.pane.words.append(this.asking, this.buttons);
    this.training = new TrainingDialog(
      (request) => this.tried(request),
      (words) => this.toasts.say(words, "note", { label: t("Show"), run: () => this.training.show(this.accepted) }),
    );
    this.nothing = h("p.nothing", { hidden: true }, t("Nothing found"));
    this.searching = searchForm(
      this.flags,
      (change) => this.filter(change),
      this.search,
      () => this.showStatistics(),
      () => this.training.show(this.accepted),
    );
    this.element = h(
      "div.app.review",
      h("header.top.row.wrap", h("h1", looked.title), this.count, this.place, this.searching),
      this.gallery.element,
      h("main.pane", this.nothing, this.pane.figure, this.pane.words),
      this.said,
      this.toasts.element,
    );
    document.addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("focus", () => this.refresh());
    this.draw(looked.counts);
  }

  /** @returns {Item | undefined} */
  get item() {
    return this.items.get(this.numbers[this.at]);
  }

  /** Shows what was found; the item that is looked at stays, if it is among it. */
  show(/** @type {number[]} */ numbers) {
    const current = this.numbers[this.at];
    this.numbers = numbers;
    this.at = Math.max(0, numbers.indexOf(current));
    this.anchor = this.at;
    const listed = new Set(numbers);
    this.selected = new Set([...this.selected].filter((each) => listed.has(each)));
    this.gallery.show(numbers, this.at);
    this.nothing.hidden = numbers.length > 0;
    this.drawSelection();
    this.draw();
    this.refresh();
  }

  /** Changes the search. */
  filter(/** @type {Partial<Search>} */ change) {
    this.search = { ...this.search, ...change };
    sessionStorage.setItem(this.kept, JSON.stringify(this.search));
    clearTimeout(this.later);
    this.later = window.setTimeout(() => this.find(), "show" in change || "flag" in change ? 0 : SEARCH_AFTER_MS);
  }

  isFiltered() {
    const { words, show, flag, min_chars, max_chars } = this.search;
    return Boolean(words || flag || show !== "all" || min_chars !== null || max_chars !== null);
  }

  async find() {
    const mine = ++this.num_searches;
    /** @type {Found | null} */
    const found = await this.tried(call("find", this.search));
    if (!found || mine !== this.num_searches) return;
    this.offer(found);
    this.show(found.numbers);
    const left = found.unread ? t("{n} still to compare", { n: found.unread }) : "";
    this.say([t("{n} found", { n: found.numbers.length }), left].filter(Boolean).join(", "));
    this.place.textContent += left && `, ${left}`;
    if (found.unread) this.later = window.setTimeout(() => this.find(), COMPARE_AGAIN_MS);
  }

  /** Offers the flags that there are. */
  offer(/** @type {Found} */ { flags, counts }) {
    const names = Object.keys(flags).sort();
    if (this.search.flag && !names.includes(this.search.flag)) names.push(this.search.flag);
    const options = names.map((flag) => {
      const words = flag === "edited" ? t("edited") : flag;
      return h("option", { value: flag }, `${words} (${number(flags[flag] ?? 0)})`);
    });
    redraw(this.flags, h("option", { value: "" }, t("Any flag")), options);
    this.flags.value = this.search.flag;
    this.flags.hidden = !names.length;
    this.draw(counts);
  }

  /** Fetches items that aren't here; `again` fetches all of them. */
  async fetchItems(/** @type {number[]} */ numbers, again = false) {
    const missing = numbers.filter((each) => again || !(this.items.has(each) || this.wanted.has(each)));
    if (!missing.length) return;
    for (const each of missing) this.wanted.add(each);
    for (let from = 0; from < missing.length; from += MAX_ASKED) {
      const part = missing.slice(from, from + MAX_ASKED);
      /** @type {{ items: Item[] } | null} */
      const reply = await this.tried(call("items", { numbers: part }));
      for (const each of part) this.wanted.delete(each);
      this.put(reply?.items ?? []);
    }
  }

  /** Notes how items are now. */
  put(/** @type {Item[]} */ items) {
    for (const item of items) this.items.set(item.number, item);
    if (items.length) this.gallery.draw();
    // What is being written isn't drawn over: when it is saved, the program tells whether it was changed meanwhile.
    if (items.some(({ number }) => number === this.numbers[this.at]) && !this.pane.isEditing) this.draw();
  }

  /** The item that is looked at as it is on the disk, and those that come next. */
  async refresh() {
    const { numbers, at } = this;
    if (!numbers.length) return;
    await Promise.all([
      this.fetchItems([numbers[at]], true),
      this.fetchItems(numbers.slice(Math.max(0, at - 2), at + 6)),
    ]);
    const next = this.items.get(numbers[at + 1]);
    if (next?.kind === "image") new Image().src = fileUrl("media", next);
  }

  goTo(/** @type {number} */ at) {
    if (at < 0 || at >= this.numbers.length) {
      this.say(at < 0 ? t("This is the first item.") : t("This is the last item."));
      return;
    }
    this.pane.finish();
    this.at = at;
    this.closeAsking();
    this.gallery.goTo(at);
    this.draw();
    const { item } = this;
    const place = t("{n} of {m}", { n: at + 1, m: this.numbers.length });
    if (item) this.say([item.name, place, item.accepted ? t("Accepted") : "", item.text].filter(Boolean).join(". "));
    this.refresh();
  }

  step(/** @type {number} */ by) {
    this.goTo(this.at + by);
  }

  /** Shows the item of a row; a selection with Shift begins there. */
  choose(/** @type {number} */ at) {
    this.anchor = at;
    this.goTo(at);
  }

  /** Selects an item or no longer selects it; with Shift, selects all from where the last selection began. */
  select(/** @type {number} */ at, /** @type {boolean} */ withShift) {
    const each = this.numbers[at];
    if (withShift) {
      const [from, to] = [Math.min(this.anchor, at), Math.max(this.anchor, at)];
      for (const between of this.numbers.slice(from, to + 1)) this.selected.add(between);
    } else {
      this.anchor = at;
      if (!this.selected.delete(each)) this.selected.add(each);
    }
    this.drawSelection();
  }

  /** Selects the item that is shown and the one that it goes on to. */
  selectStep(/** @type {number} */ by) {
    this.selected.add(this.numbers[this.at]);
    const at = this.at + by;
    if (at >= 0 && at < this.numbers.length) this.selected.add(this.numbers[at]);
    this.step(by);
    this.drawSelection();
  }

  selectAll() {
    this.selected = new Set(this.numbers);
    this.drawSelection();
  }

  clearSelection() {
    this.selected.clear();
    this.drawSelection();
  }

  drawSelection() {
    const { size } = this.selected;
    this.bulk.show(size, true);
    this.gallery.draw();
    if (size) this.say(t("{n} selected", { n: size }));
  }

  showStatistics() {
    const { numbers } = this;
    return showStatistics(
      (trainer) => this.tried(call("statistics", { numbers, trainer })),
      (words) => {
        const field = this.searching.querySelector("input");
        if (field) field.value = words;
        this.filter({ words });
      },
    );
  }

  async acceptSelected() {
    const changed = await this.manyChanged("accept_many", { numbers: [...this.selected], accepted: true });
    if (changed?.num) this.offerUndo(t("{n} {n|caption|captions} accepted", { n: changed.num }), changed.name);
  }

  /** @returns {Promise<Planned | null>} */
  async plan(/** @type {BulkEdit} */ edit) {
    if (!(await this.pane.finish())) return null;
    return this.tried(call("plan", { numbers: [...this.selected], ...edit }));
  }

  async carryOut(/** @type {Planned} */ { plan }) {
    const changed = await this.manyChanged("carry_out", { plan });
    if (changed?.num) this.offerUndo(t("{n} {n|caption|captions} changed", { n: changed.num }), changed.name);
  }

  /** Changes many captions, and searches again: the filters stay. Null where nothing was changed. */
  async manyChanged(/** @type {string} */ name, /** @type {object} */ args) {
    if (!(await this.pane.finish())) return null;
    /** @type {ManyChanged | null} */
    const reply = await this.tried(call(name, args));
    if (!reply) return null;
    const [first] = reply.refused;
    if (first) {
      const [n, name, why] = [reply.refused.length, first[0], said(first[1])];
      this.toasts.say(t("{n} {n|caption|captions} not changed, such as {name}: {why}", { n, name, why }));
    }
    await this.searchAgain();
    return reply;
  }

  offerUndo(/** @type {string} */ words, /** @type {string} */ change) {
    this.say(words);
    this.toasts.withdraw();
    this.toasts.say(words, "good", { label: t("Undo"), run: () => this.undo(change) });
  }

  /** After changes of many items. */
  async searchAgain() {
    this.items.clear();
    await this.find();
  }

  /** @returns {Promise<Item | null>} */
  async save(/** @type {Item} */ item, /** @type {string} */ text, /** @type {string} */ editing) {
    try {
      const body = { number: item.number, digest: item.digest, text, editing };
      return this.changed(await call("save", body));
    } catch (error) {
      if (error instanceof Refused && error.item) this.pane.conflict(error.item, text);
      else this.toasts.say(String(/** @type {Error} */ (error).message));
      return null;
    }
  }

  /** Accepts and goes on; an accepted caption stays accepted. */
  accept() {
    const { item } = this;
    if (!item) return;
    const saved = this.pane.finish();
    if (!item.digest && !this.pane.isSaving(item)) return this.toasts.say(t("There is no caption to accept."), "note");
    this.acceptOnce(saved, item.number);
    if (this.at + 1 < this.numbers.length) this.step(1);
    else this.say(t("This is the last item."));
  }

  /** Accepts a caption once it is saved. */
  async acceptOnce(/** @type {Promise<boolean>} */ saved, /** @type {number} */ number) {
    const item = (await saved) && this.items.get(number);
    if (!item || item.accepted) return;
    // Shown at once; the program says so if it can't be.
    this.put([{ ...item, accepted: true }]);
    const reply = await this.tried(call("accept", { number, digest: item.digest, accepted: true }), item);
    if (reply) this.changed(reply);
  }

  async withdraw() {
    if (!(await this.pane.finish())) return;
    const { item } = this;
    if (!item) return;
    const body = { number: item.number, digest: item.digest, accepted: false };
    const reply = await this.tried(call("accept", body), item);
    if (reply) this.changed(reply);
  }

  /** @returns {Item} */
  changed(/** @type {Changed} */ { item, counts }) {
    this.put([item]);
    this.draw(counts);
    return item;
  }

  /** Undoes the last change, or the one with this name: another tab's may be the last. */
  async undo(name = "") {
    if (!(await this.pane.finish())) return;
    /** @type {{ items: Item[], numbers: number[], kept: number[], many: boolean, counts: Counts } | null} */
    const reply = await this.tried(call("undo", { name }));
    if (!reply) return;
    this.toasts.withdraw();
    if (reply.many) {
      const { length } = reply.kept;
      if (length)
        this.toasts.say(t("{n} {n|caption was|captions were} changed since and {n|stays|stay}", { n: length }));
      await this.searchAgain();
      this.toasts.say(t("{n} {n|caption is|captions are} as before", { n: reply.numbers.length }), "good");
      return;
    }
    this.put(reply.items);
    this.draw(reply.counts);
    const [item] = reply.items;
    if (!item) return this.toasts.say(t("There is nothing to undo."), "note");
    const at = this.numbers.indexOf(item.number);
    if (at >= 0 && at !== this.at) this.goTo(at);
    this.say(t("The last change to {name} was undone.", { name: item.name }));
  }

  async openAsking() {
    if (!this.item || !(await this.pane.finish())) return;
    this.asking.hidden = false;
    /** @type {HTMLElement | null} */ (this.asking.querySelector(":is(textarea, select):not([hidden])"))?.focus();
    const prompt = this.asking.querySelector("textarea");
    if (prompt && !prompt.hidden) prompt.focus();
  }

  closeAsking() {
    if (this.asking.contains(document.activeElement)) /** @type {HTMLElement} */ (document.activeElement).blur();
    this.asking.hidden = true;
  }

  /** Asks the model for another caption; it is shown beside the one that is there. */
  async again(/** @type {{ prompt?: string, preset?: string }} */ how) {
    const { item } = this;
    if (!item) return;
    this.closeAsking();
    this.forget(item.number);
    const stop = new AbortController();
    this.proposals.set(item.number, stop);
    this.draw();
    /** @type {Proposal | null} */
    const proposal = await this.tried(call("ask", { number: item.number, ...how }, stop.signal));
    if (this.proposals.get(item.number) !== stop) return;
    if (proposal) this.proposals.set(item.number, proposal);
    else this.proposals.delete(item.number);
    this.draw();
    if (!proposal) return;
    const words = t("The model's caption of {name} is ready.", { name: item.name });
    if (this.item?.number === item.number) this.say(`${words} ${proposal.text}`);
    else this.toasts.say(words, "good", this.offered(item));
  }

  async take(/** @type {Item} */ { number }, /** @type {Proposal} */ { text }) {
    if (!(await this.pane.finish())) return;
    const item = this.items.get(number);
    if (item && (await this.save(item, text, ""))) this.forget(number);
  }

  forget(/** @type {number} */ number) {
    const proposal = this.proposals.get(number);
    this.proposals.delete(number);
    if (proposal instanceof AbortController) proposal.abort();
    this.draw();
  }

  goToItem(/** @type {number} */ number) {
    const at = this.numbers.indexOf(number);
    if (at >= 0) return this.goTo(at);
    this.toasts.say(t("It isn't in the current list."), "note");
  }

  draw(/** @type {Counts | null} */ counts = null) {
    const item = this.item ?? null;
    this.pane.show(item);
    const proposal = item && this.proposals.get(item.number);
    this.pane.propose(proposal instanceof AbortController ? "asking" : (proposal ?? null));
    const { length } = this.numbers;
    this.place.textContent = length ? t("{n} of {m}", { n: this.at + 1, m: length }) : "";
    redraw(this.acceptButton, item?.accepted ? t("Accepted, next") : t("Accept"), key("a"));
    this.withdrawButton.hidden = !item?.accepted;
    this.buttons.hidden = !item;
    if (!counts) return;
    this.accepted = counts.accepted;
    this.count.textContent = t("{n} of {m} accepted", { n: counts.accepted, m: counts.all });
    this.undoButton.disabled = !counts.changes;
  }

  /** A button that shows an item, for a toast. */
  offered(/** @type {Item} */ { number }) {
    return { label: t("Show"), run: () => this.goToItem(number) };
  }

  /** For a screen reader; the same words twice are said twice. */
  say(/** @type {string} */ words) {
    redraw(this.said, h("span", words));
  }

  /**
   * What a request gives; null where it was refused, which is said.
   * @param {Promise<any>} request
   * @param {Item | null} item that it was about, which may no longer be shown
   */
  async tried(request, item = null) {
    try {
      return await request;
    } catch (error) {
      if (!(error instanceof Refused)) return null;
      if (item) this.put([error.item ?? item]);
      this.toasts.say(error.message, "bad", item && this.offered(item));
      return null;
    }
  }

  onKey(/** @type {KeyboardEvent} */ event) {
    const { target, key } = event;
    if (event.altKey || isComposing(event)) return;
    if (!(target instanceof HTMLElement) || document.querySelector("dialog[open]")) return;
    const isAll = (event.ctrlKey || event.metaKey) && !event.shiftKey && key === "a";
    if ((event.ctrlKey || event.metaKey) && !isAll) return;
    if (target.matches("input:not(.select), textarea, select")) {
      if (key === "Escape") target.blur();
      return;
    }
    if (isAll) {
      event.preventDefault();
      return this.selectAll();
    }
    // Space belongs to a row's own box.
    if (target.matches("input") && key === " ") return;
    if (localStorage.getItem("review-keys") === "off" && key.length === 1) return;
    if (key === "Enter" && target.matches("button, a, summary, video")) return;
    if (key.startsWith("Arrow") && target.matches("video")) return;
    const run = this.keys(event.shiftKey)[key];
    if (!run) return;
    event.preventDefault();
    run();
  }

  /** @returns {Record<string, () => unknown>} */
  keys(withShift = false) {
    const move = (/** @type {number} */ by) => (withShift ? this.selectStep(by) : this.step(by));
    const next = () => move(1);
    const before = () => move(-1);
    const accept = () => this.accept();
    const proposal = this.item && this.proposals.get(this.item.number);
    return {
      ...{ j: next, ArrowDown: next, ArrowRight: next, k: before, ArrowUp: before, ArrowLeft: before },
      ...{ a: accept, Enter: accept, A: () => this.withdraw(), e: () => this.pane.edit() },
      ...{
        r: () => this.openAsking(),
        u: () => this.undo(),
        x: () => this.select(this.at, false),
        Escape: () => this.clearSelection(),
        "/": () => this.searching.querySelector("input")?.focus(),
      },
      ...{ Home: () => this.goTo(0), End: () => this.goTo(this.numbers.length - 1), "?": () => showReviewKeys() },
      t: () => this.item && proposal && "text" in proposal && this.take(this.item, proposal),
    };
  }
}

async function begin(/** @type {Looked} */ looked) {
  const review = new Review(looked);
  root?.replaceChildren(review.element);
  document.title = `${looked.title} · qwen35mm`;
  // The captions are read meanwhile: their flags are known then.
  if (review.isFiltered()) await review.find();
  else {
    review.show(looked.numbers);
    call("find", review.search).then((found) => review.offer(found));
  }
}

document.documentElement.lang = await useLanguage(undefined);
const root = document.querySelector("#qwen35mm");
try {
  await beginSession(new URL("session", document.baseURI));
  /** @type {Looked | { preview: PreviewAnswer }} */
  const looked = await call("look");
  if ("preview" in looked) {
    const preview = new Preview(looked.preview);
    root?.replaceChildren(preview.element);
    document.title = `${looked.preview.title} · qwen35mm`;
    await preview.watch();
  } else await begin(looked);
} catch (error) {
  root?.replaceChildren(h("p.nothing", String(/** @type {Error} */ (error).message)));
}

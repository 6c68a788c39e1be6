// The conversation: messages, their branches and what can be done with them.

import { mediaUrl, thumbnailUrl } from "./api.js";
import { copyText, h, icon, iconButton } from "./dom.js";
import { number, said, t } from "./words.js";

// Nearer to the end than this, the view goes along with what is written.
const FOLLOW_PX = 90;

export class Transcript {
  /** `actions`: edit, again, goOn, remove, branch, enlarge, answerWords — what the buttons do. */
  constructor(actions) {
    this.actions = actions;
    this.rows = new Map();
    this.list = h("div.messages", { role: "log", "aria-live": "off", "aria-label": t("Conversation") });
    this.leftOut = h("p.left-out-above", {}, t("Messages above are left out of the prompt"));
    this.element = h("div.transcript", { tabindex: "0", role: "region", "aria-label": t("Conversation") }, this.list);
    this.following = true;
    this.top = 0;
    this.element.addEventListener(
      "scroll",
      () => {
        const { scrollHeight, scrollTop, clientHeight } = this.element;
        this.following = scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
      },
      { passive: true },
    );
    this.list.addEventListener("click", (event) => {
      const button = event.target.closest("[data-copy]");
      if (button) copied(button, button.closest(".code").querySelector("code").innerText);
    });
    new ResizeObserver(() => this.follow()).observe(this.list);
  }

  /** Draws a conversation: only messages that changed are touched. */
  show(chat, welcome) {
    const held = heldFocus(this.list);
    const shown = new Set(chat.messages.map((message) => message.id));
    for (const [id, row] of this.rows)
      if (!shown.has(id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    this.list.classList.toggle("empty", !chat.messages.length);
    this.list.querySelector(".welcome")?.remove();
    if (!chat.messages.length) this.list.append(welcome());
    this.leftOut.remove();
    let before = null;
    for (const message of chat.messages) {
      let row = this.rows.get(message.id);
      if (!row) {
        row = message.role === "user" ? new Question(message.id, this.actions) : new Answer(message.id, this.actions);
        this.rows.set(message.id, row);
      }
      const place = before ? before.nextSibling : this.list.firstChild;
      if (place !== row.element) this.list.insertBefore(row.element, place);
      row.show(message);
      before = row.element;
    }
    const first = chat.messages.findIndex((message) => message.kept);
    if (first > 0) this.rows.get(chat.messages[first].id).element.before(this.leftOut);
    held(this.element);
    this.follow();
  }

  /** Draws what is new of an answer in progress. */
  update(view) {
    this.rows.get(view.id)?.update?.(view);
    this.follow();
  }

  /** Goes to the end, and stays there. */
  toEnd() {
    this.following = true;
    this.top = 0;
    this.follow();
  }

  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    const end = scrollHeight - clientHeight;
    // Somebody has scrolled up, and the event that says so is still to come.
    if (this.following && scrollTop < Math.min(this.top, end) - 2) this.following = false;
    if (this.following && this.rows.size) this.element.scrollTop = end;
    this.top = this.element.scrollTop;
  }
}

class Row {
  constructor(id, role, actions) {
    this.id = id;
    this.actions = actions;
    this.drawn = "";
    this.body = h("div.body");
    this.tools = h("div.tools");
    this.element = h(
      `article.message.${role}`,
      { "data-id": id, "aria-label": role === "user" ? t("You") : t("Answer") },
      this.body,
      this.tools,
    );
  }

  show(message) {
    this.element.classList.toggle("left-out", !message.kept);
    const drawn = JSON.stringify(message);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.message = message;
    this.draw(message);
  }

  branches({ branch }) {
    if (branch.of < 2) return null;
    return h(
      "span.branches",
      { role: "group", "aria-label": t("Branches") },
      iconButton("left", t("The branch before"), () => this.actions.branch(branch.previous), {
        disabled: !branch.previous,
      }),
      h("span.count", {}, `${branch.at}/${branch.of}`),
      iconButton("right", t("The next branch"), () => this.actions.branch(branch.next), { disabled: !branch.next }),
    );
  }

  copyButton(text) {
    return iconButton("copy", t("Copy"), (event) => copied(event.currentTarget, text));
  }
}

class Question extends Row {
  constructor(id, actions) {
    super(id, "user", actions);
  }

  draw(message) {
    const files = message.attachments.map((each) => this.file(each));
    this.body.replaceChildren(
      ...[
        files.length ? h("div.files", {}, files) : null,
        message.text ? h("div.bubble", {}, message.text) : null,
      ].filter(Boolean),
    );
    this.tools.replaceChildren(
      ...[
        this.branches(message),
        this.copyButton(message.text),
        iconButton("edit", t("Edit"), () => this.actions.edit(message)),
        iconButton("trash", t("Delete"), () => this.actions.remove(message)),
      ].filter(Boolean),
    );
  }

  file({ digest, kind, name, size }) {
    // A GIF is a video for the model, and a picture for a browser.
    const moves = kind === "video" && /\.gif$/i.test(name);
    if (kind === "video" && !moves)
      return h("video", {
        src: mediaUrl(digest),
        poster: thumbnailUrl(digest),
        controls: true,
        muted: true,
        preload: "none",
        title: name,
        "aria-label": name,
      });
    if (kind === "text")
      return h("a.document", { href: mediaUrl(digest), target: "_blank", rel: "noopener" }, icon("file"), name);
    const image = h("img", { src: moves ? mediaUrl(digest) : thumbnailUrl(digest), alt: name, loading: "lazy" });
    // Known before it is loaded, so that nothing jumps.
    if (size) image.style.aspectRatio = `${size[1]} / ${size[0]}`;
    return h(
      "button.picture",
      { type: "button", title: name, "aria-label": name, onclick: () => this.actions.enlarge(digest, name) },
      image,
    );
  }
}

class Answer extends Row {
  constructor(id, actions) {
    super(id, "assistant", actions);
    this.notes = h("details.fold.notes", { hidden: true });
    this.thoughtTitle = h("span");
    this.thoughtText = h("div.prose");
    this.thought = h("details.fold.thinking", { hidden: true }, h("summary", {}, this.thoughtTitle), this.thoughtText);
    this.thought.addEventListener("toggle", () => {
      if (!this.settingOpen) this.opened = true;
      this.settingOpen = false;
    });
    this.answer = h("div.prose.answer");
    this.problem = h("div.problem", { hidden: true });
    this.work = h("div.work", { hidden: true });
    this.body.append(this.notes, this.thought, this.answer, this.problem, this.work);
  }

  draw(message) {
    this.update(message, true);
    const unfinished = ["stopped", "length", "interrupted", "failed"].includes(message.status);
    const running = message.status === "running";
    this.tools.replaceChildren(
      ...(running
        ? []
        : [
            this.branches(message),
            this.copyButton(message.text),
            iconButton("again", t("Answer again"), () => this.actions.again(message)),
            unfinished && (message.text || message.reasoning.length)
              ? iconButton("goOn", t("Continue"), () => this.actions.goOn(message), { class: "icon-button strong" })
              : null,
            iconButton("trash", t("Delete"), () => this.actions.remove(message)),
            this.cost(message),
          ].filter(Boolean)),
    );
  }

  update(view, settled = false) {
    const running = view.status === "running";
    this.element.classList.toggle("running", running);
    drawBlocks(this.answer, view.blocks);
    this.drawThinking(view, running);
    this.drawNotes(view.notes);
    this.drawWork(running ? (view.work ?? { label: t("Getting ready"), share: null }) : null);
    this.drawEnd(view, running, settled);
  }

  drawThinking({ reasoning, thinking_s: seconds, blocks }, running) {
    this.thought.hidden = !reasoning.length;
    if (!reasoning.length) return;
    drawBlocks(this.thoughtText, reasoning);
    const live = running && !blocks.length;
    this.thoughtTitle.textContent = live
      ? t("Thinking")
      : seconds === null
        ? t("Thought")
        : t("Thought for {s} s", { s: number(seconds, 1) });
    this.thought.classList.toggle("live", live);
    // Open while it is written, then folded, unless the person decided otherwise.
    if (!this.opened && this.thought.open !== live) {
      this.settingOpen = true;
      this.thought.open = live;
    }
  }

  drawNotes(notes) {
    this.notes.hidden = !notes.length;
    const drawn = notes.join("\n");
    if (drawn === this.notesDrawn) return;
    this.notesDrawn = drawn;
    this.notes.replaceChildren(
      h("summary", {}, t("What the model was shown")),
      h(
        "ul",
        {},
        notes.map((note) => h("li", {}, note)),
      ),
    );
  }

  drawWork(work) {
    this.work.hidden = !work;
    if (!work) return;
    if (!this.bar) {
      this.bar = h("progress", { "aria-hidden": "true" });
      this.label = h("span");
      this.work.append(this.bar, this.label);
    }
    if (work.share === null) this.bar.removeAttribute("value");
    else this.bar.value = work.share;
    const label = said(work.label);
    if (this.label.textContent !== label) this.label.textContent = label;
  }

  drawEnd({ status, error, blocks, unsaved, too_long: tooLong }, running, settled) {
    const words = unsaved
      ? t("This answer isn't stored: {why}", { why: unsaved })
      : error
        ? error
        : running
          ? ""
          : status === "length"
            ? t("The answer ended at its limit. It can be continued.")
            : status === "interrupted"
              ? t("The program ended in the middle of this answer.")
              : status === "stopped"
                ? blocks.length
                  ? ""
                  : t("Stopped before the answer. The model won't see this question again.")
                : status === "finished" && !blocks.length
                  ? t("The model answered nothing.")
                  : "";
    this.problem.hidden = !words;
    this.problem.classList.toggle("mild", !error && !unsaved);
    if (this.problem.firstChild?.textContent !== words) this.problem.replaceChildren(words);
    if (tooLong && !settled) this.actions.tooLong(error);
  }

  cost({ stats, model }) {
    if (!stats) return null;
    const rows = [...stats.rows, ...(model ? [[t("Model"), model]] : [])];
    return h(
      "details.cost",
      {},
      h("summary", { title: t("What this answer cost") }, stats.line.map(said).join(" · ")),
      h(
        "dl",
        {},
        rows.flatMap(([name, value]) => [h("dt", {}, said(name)), h("dd", {}, said(value))]),
      ),
    );
  }
}

/** Puts rendered blocks into place; the program made them safe. Those that are the same stay untouched. */
function drawBlocks(element, blocks) {
  const drawn = element.drawnBlocks ?? [];
  blocks.forEach((html, at) => {
    if (drawn[at] === html) return;
    const block = element.children[at] ?? element.appendChild(h("div.block"));
    block.innerHTML = html;
    for (const button of block.querySelectorAll("[data-copy]")) button.textContent = t("Copy");
  });
  while (element.children.length > blocks.length) element.lastChild.remove();
  element.drawnBlocks = blocks;
}

/** What gives the focus back after a redrawing: to the button of the same name in the same place, or to `otherwise`. */
function heldFocus(list) {
  const button = document.activeElement;
  if (!list.contains(button)) return () => {};
  const label = button.getAttribute("aria-label");
  const rows = [...list.querySelectorAll(".message")];
  const at = rows.indexOf(button.closest(".message"));
  return (otherwise) => {
    if (button.isConnected) return;
    const same = [...(list.querySelectorAll(".message")[at]?.querySelectorAll("button:not(:disabled)") ?? [])].filter(
      (each) => each.getAttribute("aria-label") === label || (each.closest(".branches") && button.closest(".branches")),
    );
    (same[0] ?? otherwise).focus({ preventScroll: true });
  };
}

async function copied(button, text) {
  await copyText(text);
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  button.classList.add("done");
  setTimeout(() => {
    button.replaceChildren(...before);
    button.classList.remove("done");
  }, 1200);
}

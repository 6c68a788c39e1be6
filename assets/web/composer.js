// The message that is being written: its text, its files, and what it will cost.

import { call, pdfPages, thumbnailUrl, upload } from "./api.js";
import { takePicture } from "./camera.js";
import { clear, debounce, h, icon, iconButton } from "./dom.js";
import { number, said, t } from "./words.js";

const MEASURE_AFTER_MS = 150;

export class Composer {
  /**
   * `page`: `context()` gives {conversation, parent, settings}; `send(message)`, `stop()`, `editLast()`,
   * `changeSettings(values)`, `takeOffer(offer)`, `say(words, kind)` do what they say.
   */
  constructor(page) {
    this.page = page;
    this.files = [];
    this.editing = null;
    this.running = false;
    this.measure = debounce(MEASURE_AFTER_MS, () => this.measureNow());
    this.build();
  }

  build() {
    this.text = h("textarea", {
      rows: 1,
      placeholder: t("Ask about a picture or a video"),
      "aria-label": t("Message"),
      autofocus: true,
      spellcheck: true,
      "aria-describedby": "qwen35mm-room",
      oninput: () => {
        this.grow();
        this.measure();
        this.remember();
      },
      onkeydown: (event) => this.key(event),
      onpaste: (event) => this.paste(event),
    });
    this.picker = h("input", {
      type: "file",
      multiple: true,
      hidden: true,
      accept: "image/*,video/*,.mkv,.ts,.avif,.pdf,text/*,.md,.csv,.json,.log,.py,.js,.html,.xml,.yaml,.toml",
      onchange: () => {
        this.attach(this.picker.files);
        this.picker.value = "";
      },
    });
    this.strip = h("div.strip", { role: "group", "aria-label": t("Attached files") });
    this.limits = h("div.limits", { hidden: true });
    this.banner = h(
      "div.editing",
      { hidden: true },
      h("span", {}, t("You are changing an earlier message: a new branch begins there.")),
      iconButton("close", t("Leave it as it was"), () => this.stopEditing()),
    );
    this.trouble = h("div.trouble", { hidden: true, role: "alert" });
    this.room = h("span.room", { id: "qwen35mm-room" });
    this.sendButton = iconButton("send", t("Send"), () => this.submit(), { class: "icon-button round send" });
    this.stopButton = iconButton("stop", t("Stop"), () => this.page.stop(), {
      class: "icon-button round stop",
      hidden: true,
    });
    this.element = h(
      "form.composer",
      { onsubmit: (event) => event.preventDefault(), "aria-label": t("Message") },
      this.banner,
      this.trouble,
      this.strip,
      this.limits,
      this.text,
      h(
        "div.bar",
        {},
        iconButton("clip", t("Add pictures, videos, texts or PDFs"), () => this.picker.click(), {
          class: "icon-button attach",
        }),
        iconButton("camera", t("Take a picture or a clip"), () => this.camera(), { class: "icon-button shoot" }),
        this.room,
        this.sendButton,
        this.stopButton,
      ),
      this.picker,
    );
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.text.value && !this.files.length && !this.editing) {
      event.preventDefault();
      this.page.editLast();
    } else if (event.key === "Escape" && this.editing) {
      event.stopPropagation();
      this.stopEditing();
    }
  }

  paste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.attach(files);
  }

  async camera() {
    const file = await takePicture();
    if (file) this.attach([file]);
  }

  /** Uploads files, each with its own progress; one that can't be read says why and keeps nobody waiting. */
  attach(files) {
    for (const file of files) {
      const entry = { name: file.name || t("pasted"), share: 0, kind: null, digest: null };
      this.files.push(entry);
      const sending = upload(file, (share) => {
        entry.share = share;
        this.drawStrip();
      });
      entry.cancel = sending.cancel;
      entry.ready = sending.promise.then(
        (found) => this.replace(entry, found),
        (problem) => {
          this.files = this.files.filter((each) => each !== entry);
          if (problem.kind !== "cancelled") this.page.say(`${entry.name}: ${problem.message}`);
          this.drawStrip();
          return problem.kind === "cancelled";
        },
      );
    }
    this.drawStrip();
    this.text.focus();
  }

  replace(entry, { attachments, note }) {
    const at = this.files.indexOf(entry);
    if (at < 0) return;
    this.files.splice(at, 1, ...attachments);
    if (note) this.page.say(said(note));
    this.drawStrip();
    this.measure();
  }

  async asPictures(entry) {
    try {
      this.replace(entry, await pdfPages(entry.pdf, entry.name));
    } catch (problem) {
      this.page.say(problem.message);
    }
  }

  drawStrip() {
    this.strip.classList.toggle("filled", this.files.length > 0);
    clear(
      this.strip,
      this.files.map((file) => this.thumbnail(file)),
    );
    this.drawLimits();
    this.updateButtons();
  }

  thumbnail(file) {
    const loaded = file.digest !== null;
    const picture =
      !loaded || file.kind === "text" ? icon("file") : h("img", { src: thumbnailUrl(file.digest), alt: "" });
    const cost = file.label ? said(file.label) : "";
    const label = file.error ?? (loaded ? cost : t("Uploading, {p}%", { p: Math.round(100 * (file.share ?? 0)) }));
    return h(
      `div.thumbnail${file.error ? ".bad" : ""}`,
      { title: [file.name, label, ...(file.notes ?? [])].join("\n") },
      h("div.shot", {}, picture, file.kind === "video" ? h("span.badge", {}, t("clip")) : null),
      h(
        "div.about",
        {},
        h("span.name", {}, file.name),
        h("span.label", {}, label),
        file.pdf
          ? h("button.link", { type: "button", onclick: () => this.asPictures(file) }, t("Use its pages as pictures"))
          : null,
      ),
      iconButton("close", t("Remove {name}", { name: file.name }), () => this.drop(file)),
    );
  }

  drop(file) {
    file.cancel?.();
    this.files = this.files.filter((each) => each !== file);
    this.drawStrip();
    this.measure();
    this.text.focus();
  }

  /** Sliders for what media may cost; moving one counts again at once. */
  drawLimits() {
    const kinds = new Set(this.files.map((file) => file.kind));
    const names = [
      ...(kinds.has("video") ? ["max_frames", "max_video_tokens"] : []),
      ...(kinds.has("image") ? ["max_image_tokens"] : []),
    ];
    this.limits.hidden = !names.length;
    if (this.limits.dataset.names === names.join()) return;
    this.limits.dataset.names = names.join();
    clear(
      this.limits,
      names.map((name) => this.slider(name)),
    );
  }

  slider(name) {
    const { label, shown, top } = this.page.mediaLimit(name);
    const value = h("output", { "aria-hidden": "true" });
    // By powers: 16 and 16,000 are both within reach.
    const steps = 100;
    const low = name === "max_frames" ? 2 : 64;
    const toValue = (position) => Math.round(low * (top / low) ** (position / steps));
    const position = Math.round((steps * Math.log(Math.max(shown, low) / low)) / Math.log(top / low));
    const input = h("input", {
      type: "range",
      min: "0",
      max: String(steps),
      "aria-label": said(label),
      oninput: () => {
        tell(toValue(Number(input.value)));
        this.page.changeSettings({ [name]: toValue(Number(input.value)) });
        this.measure();
      },
    });
    input.value = String(Math.min(position, steps));
    // The slider's own value is a position.
    const tell = (amount) => {
      value.textContent = number(amount);
      input.setAttribute("aria-valuetext", number(amount));
    };
    tell(shown);
    return h("label", {}, h("span", {}, said(label)), input, value);
  }

  /** Sliders that were moved elsewhere show it. */
  redrawLimits() {
    delete this.limits.dataset.names;
    this.drawLimits();
    this.measure();
  }

  async measureNow() {
    const counted = Symbol("measure");
    this.counting = counted;
    if (!this.text.value && !this.files.length) return this.drawRoom(null);
    try {
      const cost = await call("measure", this.message());
      if (counted !== this.counting) return;
      for (const media of cost.media)
        Object.assign(this.files.find((file) => file.digest === media.digest) ?? {}, media);
      this.drawStrip();
      this.drawRoom(cost);
    } catch (problem) {
      if (counted === this.counting) this.showTrouble(problem.message, []);
    }
  }

  drawRoom(cost) {
    if (!cost) {
      this.room.textContent = "";
      return this.showTrouble(null);
    }
    const { all, history, room, context } = cost.tokens;
    this.room.textContent = t("{n} tokens, room for {r}", { n: number(all - history), r: number(room) });
    this.room.title = t("The prompt will have {a} of the context's {c} tokens", { a: number(all), c: number(context) });
    if (cost.fits) this.showTrouble(null);
    else
      this.showTrouble(
        t("This won't fit: it takes {a} tokens, and the context holds {c} with the answer.", {
          a: number(all),
          c: number(context),
        }),
        cost.offers,
      );
  }

  showTrouble(words, offers = []) {
    this.trouble.hidden = !words;
    // An alert that is drawn anew is read out anew.
    const drawn = JSON.stringify([words, offers]);
    if (drawn === this.troubleDrawn) return;
    this.troubleDrawn = drawn;
    if (!words) return this.trouble.replaceChildren();
    clear(
      this.trouble,
      h("span", {}, words),
      offers.map((offer) =>
        h("button.plain", { type: "button", onclick: () => this.page.takeOffer(offer) }, said(offer.label)),
      ),
    );
  }

  message() {
    const attachments = this.files
      .filter((file) => file.digest)
      .map(({ digest, kind, name, num_bytes }) => ({ digest, kind, name, num_bytes }));
    const context = this.page.context();
    return { ...context, ...(this.editing ? { parent: this.editing.parent } : {}), text: this.text.value, attachments };
  }

  async submit() {
    if (this.running || this.sending) return;
    if (!this.text.value.trim() && !this.files.length)
      return this.page.say(t("Type a question, or add a picture or a video."), "note");
    if (document.activeElement === this.sendButton) this.text.focus();
    this.sending = true;
    this.updateButtons();
    try {
      const ready = await Promise.all(this.files.map((file) => file.ready));
      // A message never goes without a file that its author saw in it.
      if (ready.includes(false)) return;
      if (await this.page.send(this.message())) this.empty();
    } finally {
      this.sending = false;
      this.updateButtons();
    }
  }

  empty() {
    this.text.value = "";
    this.files = [];
    this.editing = null;
    this.banner.hidden = true;
    this.drawStrip();
    this.drawRoom(null);
    this.grow();
    this.remember();
  }

  /** Puts an earlier message into the box, with its files; sending it begins a branch. */
  edit(message) {
    this.editing = message;
    this.banner.hidden = false;
    this.text.value = message.text;
    this.files = message.attachments.map((each) => ({ ...each }));
    this.drawStrip();
    this.grow();
    this.measure();
    this.text.focus();
    this.text.setSelectionRange(this.text.value.length, this.text.value.length);
  }

  stopEditing() {
    if (this.editing) this.empty();
  }

  setRunning(running) {
    this.running = running;
    this.updateButtons();
  }

  updateButtons() {
    const [shown, hidden] = this.running ? [this.stopButton, this.sendButton] : [this.sendButton, this.stopButton];
    const hadFocus = document.activeElement === hidden;
    hidden.hidden = true;
    shown.hidden = false;
    this.sendButton.disabled = this.sending || (!this.text.value.trim() && !this.files.length);
    if (hadFocus) (shown.disabled ? this.text : shown).focus();
  }

  grow() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, window.innerHeight * 0.35)}px`;
    this.updateButtons();
  }

  /** What was typed and not sent is there after a reload. */
  remember() {
    try {
      sessionStorage.setItem("qwen35mm-draft", this.editing ? "" : this.text.value);
    } catch {
      /* full, or not allowed: it is a convenience */
    }
  }

  restore() {
    try {
      this.text.value = sessionStorage.getItem("qwen35mm-draft") ?? "";
    } catch {
      /* not allowed */
    }
    this.grow();
  }
}

// Trains on the captions of the page: the command to copy, or a training that the program runs, and how far it is.

/** @import { TrainingAnswer } from "./review.d.ts" */

import { ask, button, cancel, copyText, h, redraw, setProgress, setText, showDialog } from "../common/dom.js";
import { number, t } from "../common/words.js";
import { call } from "./calls.js";
import { time } from "./preview.js";

const LOOK_AGAIN_MS = 1000;

export class TrainingDialog {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #next = undefined;
  /** @type {TrainingAnswer["state"]} */
  #state = "none";

  /**
   * @param {(request: Promise<TrainingAnswer>) => Promise<TrainingAnswer | null>} tried says why a request was refused
   * @param {(words: string) => unknown} tell that a training ended while this wasn't shown
   */
  constructor(tried, tell) {
    this.tried = tried;
    this.tell = tell;
    this.words = "";
    this.about = h("p.quiet");
    this.command = h("pre.command", { tabindex: "0" });
    this.accepted = h("input", { type: "checkbox", onchange: () => this.#showCommand() });
    this.choice = h("label.row", this.accepted, t("Only accepted captions"));
    this.status = h("p", { role: "status" });
    this.bar = h("progress");
    this.losses = h("ul.losses.quiet");
    this.answers = h("table.answers");
    this.said = h("pre.command", { tabindex: "0", "aria-label": t("What the program says") });
    this.foot = h("div.dialog-buttons.row.wrap.end");
    const title = t("Train on these captions");
    const parts = [
      this.about,
      this.command,
      this.choice,
      this.status,
      this.bar,
      this.losses,
      this.answers,
      this.said,
      this.foot,
    ];
    this.element = h("dialog.dialog.card.training", { "aria-label": title }, h("h2", title), parts);
  }

  /** @param {number} accepted how many captions are accepted */
  async show(accepted) {
    const answer = await this.tried(call("training"));
    if (!answer) return;
    this.accepted.checked = answer.state === "none" ? answer.chooses && accepted > 0 : answer.accepted;
    showDialog(this.element);
    this.#draw(answer);
  }

  /** Does something with the training and shows what comes of it. */
  async #do(/** @type {string} */ name, args = {}) {
    const answer = await this.tried(call(name, args));
    if (answer) this.#draw(answer);
  }

  async #anew() {
    const words = t("This replaces the adapter, and what was learned since.");
    const buttons = [cancel(), { label: t("Train anew"), kind: "danger", value: () => true }];
    if (await ask(t("Train anew"), h("p", words), buttons))
      await this.#do("train", { restart: true, accepted: this.accepted.checked });
  }

  #draw(/** @type {TrainingAnswer} */ answer) {
    const { state } = answer;
    const runs = isRunning(state);
    if (!runs && this.#state !== state && this.#state !== "none" && !this.element.open) this.tell(statusOf(answer));
    this.#state = state;
    setText(this.about, t("The program learns from these captions and makes an adapter (LoRA). In a terminal:"));
    this.about.hidden = this.command.hidden = state !== "none";
    this.choice.hidden = !answer.chooses || runs;
    this.words = answer.command;
    this.#showCommand();
    setText(this.status, statusOf(answer));
    this.status.hidden = state === "none";
    this.bar.hidden = !runs;
    setProgress(this.bar, answer.steps ? (answer.step ?? 0) / answer.steps : null);
    redraw(this.losses, answer.losses.map(drawnLoss));
    const [first] = answer.answers;
    const heads = [t("Before"), t("Now"), t("Wanted")].map((words) => h("th", { scope: "col" }, words));
    redraw(this.answers, first && [h("thead", h("tr", h("td"), heads)), h("tbody", answer.answers.map(drawnAnswer))]);
    setText(this.said, answer.said.join("\n"));
    this.said.hidden = !answer.said.length || (state !== "failed" && state !== "loading");
    redraw(this.foot, this.#buttons(answer));
    clearTimeout(this.#next);
    if (runs) this.#next = setTimeout(() => this.#do("training"), LOOK_AGAIN_MS);
  }

  #showCommand() {
    setText(this.command, this.accepted.checked ? `${this.words} --accepted` : this.words);
  }

  #buttons(/** @type {TrainingAnswer} */ { state, accepted }) {
    const runs = isRunning(state);
    const start = (/** @type {string} */ label, only = () => this.accepted.checked) =>
      button("strong", label, () => this.#do("train", { accepted: only() }));
    return [
      button("plain", t("Close"), () => this.element.close()),
      state === "none" && button("plain", t("Copy"), () => copyText(this.command.textContent)),
      state === "none" && start(t("Start training")),
      runs && button("strong", t("Stop"), () => this.#do("stop_training")),
      !runs && state !== "none" && button("plain", t("Train anew"), () => this.#anew()),
      // With the captions that it began with.
      state === "stopped" && start(t("Resume"), () => accepted),
      state === "failed" && start(t("Try again")),
    ];
  }
}

const isRunning = (/** @type {TrainingAnswer["state"]} */ state) => state === "loading" || state === "training";

function statusOf(/** @type {TrainingAnswer} */ { state, step, steps, seconds_left, before, after, adapter }) {
  if (state === "loading") return t("Loading the model and measuring how long it takes");
  if (state === "stopped") return t("Stopped. Resume continues at the last saved step.");
  if (state === "failed") return t("The training failed.");
  if (state === "done") {
    const better = (after ?? 0) < (before ?? 0);
    return better
      ? t("The adapter is in {folder}. Use it with --lora.", { folder: adapter })
      : t("The adapter is no better than the model alone. It needs more captions.");
  }
  // Of seconds no parts.
  const seconds = Math.round(seconds_left ?? 0);
  const rest = seconds < 10 ? t("{s} s", { s: number(seconds) }) : time([seconds, seconds]);
  const left = t("{time} left", { time: rest });
  return [t("Step {n} of {m}", { n: step ?? 0, m: steps ?? 0 }), left].join(", ");
}

function drawnLoss(/** @type {TrainingAnswer["losses"][0]} */ { step, loss, is_best }) {
  const words = t("Step {n}: held-out loss {loss}", { n: step, loss: loss === null ? "–" : number(loss, 3) });
  return h("li", words, is_best && h("span.flag.good", t("Best")));
}

function drawnAnswer(/** @type {TrainingAnswer["answers"][0]} */ { name, before, answer, wanted }) {
  return h(
    "tr",
    h("th", { scope: "row" }, name),
    [before, answer, wanted].map((words) => h("td", words)),
  );
}

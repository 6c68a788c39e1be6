// Stand-ins for the program and for what draws.

import { PageState } from "../../../assets/web/chat/state.js";
import { Problem, Requests } from "../../../assets/web/common/api.js";
import { Draft } from "../../../assets/web/compose/draft.js";

/** @import { Attachment, Chat, Message } from "../../../assets/web/common/types.d.ts" */
/** @import { Desk } from "../../../assets/web/compose/draft.js" */
/** @import { View } from "../../../assets/web/chat/state.js" */

/**
 * A request that a test answers.
 * @typedef {object} Asked
 * @property {string} name
 * @property {any} args
 * @property {(answer: any) => Promise<unknown>} answer
 * @property {(problem: object) => Promise<unknown>} fail
 */

/** What a program refuses with, unless it is said to be lost. */
const refusal = (/** @type {any} */ problem) => new Problem({ kind: "refused", ...problem });

/** A program that answers when a test says so, in whichever order. */
export class FakeProgram {
  /** Requests without an answer, the oldest first. @type {Asked[]} */
  asked = [];
  /** What the person was told of problems. @type {string[]} */
  told = [];
  /** What was offered with them. @type {unknown[]} */
  offered = [];
  /** Until it can be reached. */
  whenThere = Promise.resolve();
  requests = new Requests(
    (problem) => {
      if (problem.message) this.told.push(problem.message);
      this.offered.push(...problem.offers);
    },
    (name, args) =>
      new Promise((resolve, reject) => {
        const settled = (/** @type {() => void} */ settle) => {
          this.asked = this.asked.filter((each) => each !== request);
          settle();
          return idle();
        };
        /** @type {Asked} */
        const request = {
          name,
          args: structuredClone(args),
          answer: (answer) => settled(() => resolve(answer)),
          fail: (problem) => settled(() => reject(refusal(problem))),
        };
        this.asked.push(request);
      }),
  );

  get names() {
    return this.asked.map(({ name }) => name);
  }

  /** The oldest request of a name that has no answer yet. */
  find(/** @type {string} */ name) {
    const found = this.asked.find((each) => each.name === name);
    if (!found) throw new Error(`expected a request ${name}, there are [${this.names}]`);
    return found;
  }
}

/** Until everything that waited for an answer has gone on. */
export const idle = () => new Promise((resolve) => setImmediate(resolve));

/** @returns {Chat} */
export function makeChat(/** @type {string} */ id, /** @type {Partial<Chat>} */ rest = {}) {
  return { id, title: `About ${id}`, settings: {}, messages: [], running: [], context: null, ...rest };
}

/** @returns {any} */
export function makeMessage(/** @type {Partial<Message>} */ rest = {}) {
  const branch = { at: 1, of: 1, previous: null, next: null };
  const question = { role: "user", parent: null, text: "", status: "finished", kept: true, branch, attachments: [] };
  return { id: "node", ...question, ...rest };
}

/** @returns {any} */
export function makeNews(/** @type {object} */ rest = {}) {
  const empty = {
    blocks: [],
    reasoning: [],
    thinking_s: null,
    error: null,
    notes: [],
    groundings: [],
    stats: null,
    calls: [],
  };
  return { id: "reply", conversation: "one", status: "running", too_long: false, num_results: 0, ...empty, ...rest };
}

/** @type {Attachment} */
export const picture = { digest: "aa", kind: "image", name: "a.png", num_bytes: 3 };

/** A draft, with what draws and sends it, in the conversation "one". */
export class DraftBench {
  program = new FakeProgram();
  /** What was said, and which costs and troubles were drawn. @type {unknown[]} */
  said = [];
  /** What could be done about what was said. @type {{ run: () => unknown }[]} */
  offers = [];
  /** @type {any[]} */
  sent = [];
  /** Whether the program takes a message. @type {boolean | Promise<boolean>} */
  isAccepted = true;
  /** The conversation shown, and its answer in progress. @type {{ id: string | null, answer: string | null }} */
  shown = { id: "one", answer: null };
  /** Until the program can be reached. */
  whenThere = Promise.resolve();
  /** The answers of another tab that a message has to wait for. @type {string[]} */
  ahead = [];
  /** Answers whose times are to be looked at. @type {string[]} */
  lookedAt = [];
  /** Ends the answer that a message waits for. @type {(isEnd?: boolean) => void} */
  endAnswer = () => {};
  /** Files on their way, whose fate a test decides. @type {any[]} */
  uploads = [];
  /** What the browser keeps, from one page to the next. @type {Map<string, string>} */
  kept = new Map();
  /** @type {Desk} */
  desk = {
    place: () => {
      const { id, answer } = this.shown;
      return { conversation: id, parent: id && (answer ?? "last"), settings: {} };
    },
    begin: () => {
      const { answer } = this.shown;
      return { place: this.desk.place(), answers: answer ? [answer] : [], isLate: () => false };
    },
    answered: (ids) =>
      new Promise((go) => {
        this.endAnswer = (isEnd = true) => go(isEnd);
        if (!ids.some((id) => id === this.shown.answer || id.includes("another tab"))) go(true);
      }),
    whenThere: () => this.whenThere,
    send: async (message) => {
      const number = this.sent.push(message);
      if (!(await this.isAccepted)) return null;
      const answers = this.ahead.splice(0);
      if (answers.length) return { answers };
      return { chat: makeChat(message.conversation ?? "begun"), reply: `answer ${number}` };
    },
    lookCloser: (reply) => this.lookedAt.push(reply),
    say: (words, _, offer) => {
      this.said.push(words);
      if (offer) this.offers.push(offer);
    },
    draw: () => {},
    drawCost: (cost) => this.said.push(cost),
    drawTrouble: (words) => this.said.push(`trouble: ${words}`),
  };
  draft = this.load();

  /** The draft of a page that is loaded (again). */
  load() {
    const storage = {
      getItem: (/** @type {string} */ key) => this.kept.get(key) ?? null,
      setItem: (/** @type {string} */ key, /** @type {string} */ value) => void this.kept.set(key, value),
      removeItem: (/** @type {string} */ key) => void this.kept.delete(key),
    };
    const draft = new Draft(this.desk, this.program.requests, () => this.#upload(), storage);
    draft.open(this.shown.id);
    return draft;
  }

  #upload() {
    /** @type {any} */
    let resolve;
    /** @type {any} */
    let reject;
    const promise = new Promise((...settle) => {
      [resolve, reject] = settle;
    });
    const upload = {
      arrive: (/** @type {object} */ attachment, /** @type {string | undefined} */ note) => {
        resolve({ attachments: [attachment].flat(), note });
        return idle();
      },
      fail: (/** @type {any} */ problem) => {
        reject(refusal(problem));
        return idle();
      },
      isCancelled: false,
    };
    this.uploads.push(upload);
    const cancel = () => {
      upload.isCancelled = true;
      upload.fail({ message: "", kind: "cancelled" });
    };
    return { promise, cancel };
  }

  names() {
    return this.draft.files.map(({ name }) => name);
  }

  attach(/** @type {string[]} */ ...files) {
    this.draft.attach(files.map((name) => new File(["abc"], name)));
  }

  /** Sends a text; the program takes it, or doesn't, when the test says so. */
  async submit(/** @type {string} */ text, willTake = true) {
    let decide = () => {};
    this.isAccepted = new Promise((resolve) => {
      decide = () => resolve(willTake);
    });
    this.draft.text = text;
    const done = this.draft.submit();
    await idle();
    return { done, decide: () => decide() };
  }
}

/**
 * A page's state; `drawn` gets what the view is told, as names with what matters, `watched` the answers asked for.
 * @param {FakeProgram} program
 * @param {unknown[][]} drawn
 * @param {string[][]} watched
 * @param {() => number} nowMs
 */
export function makeState(program, drawn = [], watched = [], nowMs = () => 0) {
  /** @type {View} */
  const view = {
    moved: (from, to) => drawn.push(["moved", from, to]),
    showChat: ({ id }, isOther) => drawn.push(["chat", id, isOther]),
    showAnswer: ({ blocks }) => drawn.push(["answer", ...blocks]),
    toEnd: () => drawn.push(["end"]),
    toMessage: (id) => drawn.push(["message", id]),
    speak: (words) => words && drawn.push(["speak", words]),
    offer: (words, offers) => drawn.push(["offer", words, ...offers]),
    changed: () => {},
    listChanged: () => drawn.push(["list"]),
    settingsChanged: () => drawn.push(["settings"]),
    changeModel: async (change) => drawn.push(["model", change]),
    whenThere: () => program.whenThere,
  };
  const examples = [{ text: "Which shape?", kind: /** @type {const} */ ("image"), url: "", poster: "" }];
  const start = {
    app: /** @type {any} */ ({ examples, model: "demo" }),
    preferences: { settings: { top_k: 5 } },
    tools: [],
  };
  return new PageState(view, program.requests, (ids) => watched.push(ids), start, nowMs);
}

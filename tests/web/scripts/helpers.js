// Stand-ins for the program and for what draws.

import { Problem, Requests } from "../../../assets/web/api.js";

/** @import { Chat, Message } from "../../../assets/web/types.d.ts" */

/**
 * A request that a test answers.
 * @typedef {object} Asked
 * @property {string} name
 * @property {any} args
 * @property {(answer: any) => Promise<unknown>} answer
 * @property {(problem: object) => Promise<unknown>} fail
 */

/** A program that answers when a test says so, in whichever order. */
export class FakeProgram {
  /** Requests without an answer, the oldest first. @type {Asked[]} */
  asked = [];
  /** What the person was told of problems. @type {string[]} */
  told = [];
  requests = new Requests(
    (problem) => problem.message && this.told.push(problem.message),
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
          fail: (problem) => settled(() => reject(new Problem(/** @type {any} */ (problem)))),
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
  const empty = { blocks: [], reasoning: [], thinking_s: null, error: null, notes: [], stats: null };
  return { id: "reply", conversation: "one", status: "running", too_long: false, ...empty, ...rest };
}

import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { debounce, inTurn, Problem } from "../../../assets/web/common/api.js";
import { FakeProgram, idle } from "./helpers.js";

test("an answer is dropped once something newer was asked for on its topic", async () => {
  const program = new FakeProgram();
  const first = program.requests.ask("list", { query: "a" }, "list");
  const second = program.requests.ask("list", { query: "ab" }, "list");
  const [older, newer] = program.asked;
  await newer.answer({ conversations: ["newer"] });
  await older.answer({ conversations: ["older"] });
  assert.deepEqual(await second, { conversations: ["newer"] });
  assert.equal(await first, null);
});

test("an answer is dropped even where it comes before the newer one", async () => {
  const program = new FakeProgram();
  const first = program.requests.ask("list", { query: "a" }, "list");
  program.requests.ask("list", { query: "ab" }, "list");
  await program.asked[0].answer({ conversations: ["older"] });
  assert.equal(await first, null);
});

test("nothing is said of a request that failed too late", async () => {
  const program = new FakeProgram();
  const first = program.requests.ask("list", { query: "a" }, "list");
  program.requests.ask("list", { query: "ab" }, "list");
  await program.asked[0].fail({ message: "The program can't be reached." });
  assert.equal(await first, null);
  assert.deepEqual(program.told, []);
});

test("topics don't disturb each other, and requests without one are never late", async () => {
  const program = new FakeProgram();
  const answers = [
    program.requests.ask("list", { query: "" }, "list"),
    program.requests.ask("models", {}, "models"),
    program.requests.ask("stop", { node: "a" }),
    program.requests.ask("stop", { node: "b" }),
  ];
  for (const [at, request] of [...program.asked].entries()) await request.answer({ at });
  assert.deepEqual(await Promise.all(answers), [{ at: 0 }, { at: 1 }, { at: 2 }, { at: 3 }]);
});

test("a token is late from the next one on, and the newest one overtakes nothing", () => {
  const { requests } = new FakeProgram();
  const first = requests.begin("chat");
  const same = requests.newest("chat");
  assert.deepEqual([first(), same()], [false, false]);
  const second = requests.begin("chat");
  assert.deepEqual([first(), same(), second()], [true, true, false]);
});

test("a problem is told once, and gives null", async () => {
  const program = new FakeProgram();
  const answer = program.requests.ask("list", { query: "" });
  await program.asked[0].fail({ message: "No such thing.", kind: "not found" });
  assert.equal(await answer, null);
  assert.deepEqual(program.told, ["No such thing."]);
});

test("a bug isn't taken for a problem", async () => {
  const { requests } = new FakeProgram();
  await assert.rejects(requests.told(Promise.reject(new TypeError("a bug"))), TypeError);
});

test("a problem that the program gives no kind is a lost connection", () => {
  const { kind, offers, message } = new Problem({ message: "Where is it?" });
  assert.deepEqual([kind, offers, message], ["lost", [], "Where is it?"]);
});

test("a debounced call runs once the calls have paused, with the last arguments", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  /** @type {number[]} */
  const runs = [];
  const later = debounce(100, (/** @type {number} */ value) => runs.push(value));
  later(1);
  mock.timers.tick(99);
  later(2);
  mock.timers.tick(99);
  assert.deepEqual(runs, []);
  mock.timers.tick(1);
  assert.deepEqual(runs, [2]);
  mock.timers.reset();
  await idle();
});

test("flushing runs what waits, once", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  /** @type {number[]} */
  const runs = [];
  const later = debounce(100, (/** @type {number} */ value) => runs.push(value));
  later.flush();
  later(1);
  later.flush();
  mock.timers.tick(1000);
  assert.deepEqual(runs, [1]);
  mock.timers.reset();
});

test("calls in turn wait for each other, and of those that wait the last is run", async () => {
  /** @type {string[]} */
  const began = [];
  /** @type {(() => void)[]} */
  const end = [];
  const run = inTurn((/** @type {string} */ name) => {
    began.push(name);
    return new Promise((resolve) => end.push(() => resolve(null)));
  });
  for (const name of ["one", "two", "three"]) run(name);
  assert.deepEqual(began, ["one"]);
  end[0]();
  await idle();
  assert.deepEqual(began, ["one", "three"]);
  end[1]();
  await idle();
  run("four");
  assert.deepEqual(began, ["one", "three", "four"]);
});

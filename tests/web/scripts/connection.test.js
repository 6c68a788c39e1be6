import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, suite, test } from "node:test";
import { Connection, PAUSES_MS } from "../../../assets/web/chat/connection.js";
import { Problem } from "../../../assets/web/common/api.js";
import { idle } from "./helpers.js";

const lost = new Problem({ message: "gone", kind: "lost" });
/** What the program answers, or a problem. @type {any} */
let answer;
/** @type {string[]} */
let asked;
/** @type {unknown[]} */
let told;
/** @type {Connection} */
let connection;

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout", "Date"] });
  [answer, asked, told] = [{}, [], []];
  const on = {
    changed: () => told.push(connection.problem?.kind ?? "there"),
    slow: (/** @type {boolean} */ isSlow) => told.push(isSlow ? "slow" : "answered"),
    reached: (/** @type {any} */ begun) => told.push(begun),
  };
  const post = async (/** @type {string} */ name) => {
    asked.push(name);
    if (answer instanceof Error) throw answer;
    return answer;
  };
  connection = new Connection(on, /** @type {any} */ (post));
});

afterEach(() => mock.timers.reset());

/** Lets time pass, and what it brings. */
async function pass(/** @type {number} */ ms) {
  mock.timers.tick(ms);
  await idle();
}

/** Fails a request. */
async function lose(problem = lost) {
  answer = problem;
  await assert.rejects(connection.send("memory", {}), problem);
}

suite("the connection", () => {
  test("a lost one is tried again with growing pauses, and begins with short ones the next time", async () => {
    await lose();
    assert.deepEqual(told, ["lost"]);
    for (const pauseMs of [...PAUSES_MS, PAUSES_MS.at(-1) ?? 0]) {
      const before = asked.length;
      assert.equal(connection.nextMs, Date.now() + pauseMs);
      await pass(pauseMs - 1);
      assert.equal(asked.length, before);
      await pass(1);
      assert.deepEqual(asked.slice(before), ["start"]);
    }
    answer = { running: ["a"] };
    await connection.check();
    assert.deepEqual(told.slice(-2), ["there", { running: ["a"] }]);
    await lose();
    assert.equal(connection.nextMs, Date.now() + PAUSES_MS[0]);
  });

  test("what else fails meanwhile, or is refused, changes nothing of that", async () => {
    await lose();
    await pass(PAUSES_MS[0]);
    const { nextMs } = connection;
    await lose();
    assert.equal(connection.nextMs, nextMs);
    answer = new Problem({ message: "too long", kind: "too long" });
    await assert.rejects(connection.send("memory", {}), answer);
    assert.equal(connection.problem?.kind, "lost");
  });

  test("a refusal says that the program is there", async () => {
    await lose();
    answer = new Problem({ message: "a bug", kind: "bug" });
    await connection.check();
    assert.equal(connection.problem, null);
  });

  test("a request that comes through has it ask how things are now", async () => {
    await lose();
    answer = { running: [] };
    await connection.send("memory", {});
    await idle();
    assert.deepEqual(asked, ["memory", "memory", "start"]);
    assert.deepEqual(told.slice(-2), ["there", { running: [] }]);
  });

  test("whoever waits for it goes on when it is there", async () => {
    await connection.whenThere();
    await lose();
    let isThere = false;
    connection.whenThere().then(() => {
      isThere = true;
    });
    await idle();
    assert.equal(isThere, false);
    answer = {};
    await connection.check();
    assert.equal(isThere, true);
  });

  test("it is asked once at a time", async () => {
    await Promise.all([connection.check(), connection.check()]);
    assert.deepEqual(asked, ["start"]);
  });

  for (const kind of ["token", "login", "unknown person"])
    test(`one that doesn't let the page in is asked again, too: ${kind}`, async () => {
      await lose();
      answer = new Problem({ message: "", kind });
      await pass(PAUSES_MS[0]);
      assert.deepEqual([connection.problem?.kind, connection.nextMs], [kind, Date.now() + PAUSES_MS[1]]);
    });

  test("what the person waits for is told once it takes long, until the last of it has come", async () => {
    /** @type {((value: unknown) => void)[]} */
    const come = [];
    /** @type {Promise<unknown>[]} */
    const sent = [];
    for (const name of /** @type {const} */ (["open", "again", "memory"])) {
      answer = new Promise((resolve) => come.push(resolve));
      sent.push(connection.send(name, /** @type {any} */ ({})));
    }
    await pass(2000);
    assert.deepEqual(told, []);
    await pass(1000);
    assert.deepEqual(told, ["slow", "slow"]);
    for (const each of come) each({});
    await Promise.all(sent);
    assert.deepEqual(told, ["slow", "slow", "slow", "answered"]);
  });
});

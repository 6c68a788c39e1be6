import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, suite, test } from "node:test";

import { DraftBench, makeMessage, picture } from "./helpers.js";

/** @import { Draft } from "../../../assets/web/compose/draft.js" */

/** @type {DraftBench} */
let bench;
/** @type {Draft} */
let draft;

afterEach(() => mock.timers.reset());

beforeEach(() => {
  // Nothing is measured unless a test asks for it.
  mock.timers.enable({ apis: ["setTimeout"] });
  bench = new DraftBench();
  ({ draft } = bench);
});

suite("changing an earlier message", () => {
  const earlier = makeMessage({ parent: "before", text: "Which?", attachments: [picture] });

  test("begins a branch with its files, and the new message is there again after it", async () => {
    draft.text = "New";
    draft.edit(earlier);
    assert.deepEqual([draft.text, draft.message.parent, bench.names()], ["Which?", "before", ["a.png"]]);
    await draft.submit();
    assert.deepEqual(
      [bench.sent[0].parent, bench.sent[0].text, draft.text, draft.editing],
      ["before", "Which?", "New", null],
    );
  });

  test("can be left, and the new message is there again", () => {
    bench.attach("b.png");
    draft.text = "New";
    draft.edit(earlier);
    draft.stopEditing();
    assert.deepEqual([draft.text, bench.names(), draft.message.parent], ["New", ["b.png"], "last"]);
  });

  test("what was changed of it can be had back after leaving it", () => {
    draft.text = "New";
    draft.edit(earlier);
    draft.stopEditing();
    assert.deepEqual(bench.said, [null]);
    draft.edit(earlier);
    draft.text = "Which of them?";
    draft.edit(earlier);
    assert.equal(draft.text, "Which of them?");
    draft.edit(makeMessage({ id: "other", text: "Another" }));
    assert.deepEqual([draft.text, bench.said.at(-2)], ["Another", "Your change of the message isn't sent."]);
    bench.offers[0].run();
    assert.deepEqual([draft.text, draft.editing?.id], ["Which of them?", "node"]);
    draft.stopEditing();
    assert.equal(draft.text, "New");
  });

  test("leaving it takes nothing else away", () => {
    draft.text = "New";
    draft.stopEditing();
    assert.equal(draft.text, "New");
  });

  test("one that is refused is changed again, and the new message still waits", async () => {
    draft.text = "New";
    draft.edit(earlier);
    bench.isAccepted = false;
    await draft.submit();
    assert.deepEqual([draft.text, draft.editing?.id], ["Which?", "node"]);
    draft.stopEditing();
    assert.equal(draft.text, "New");
  });
});

suite("what is written and not sent", () => {
  test("belongs to its conversation", async () => {
    draft.text = "One";
    bench.attach("a.png");
    draft.open("two");
    await bench.uploads[0].arrive(picture);
    assert.ok(draft.isEmpty);
    draft.open("one");
    assert.deepEqual([draft.text, draft.files.map(({ digest }) => digest)], ["One", ["aa"]]);
  });

  test("is there after a reload, with its files and what is changed, whatever was to be sent", async () => {
    bench.attach("a.png");
    await bench.uploads[0].arrive({ ...picture, label: "9 tokens" });
    draft.text = "New";
    draft.edit(makeMessage({ id: "old", parent: "before", text: "Old" }));
    draft.open("two");
    bench.shown = { id: "two", answer: "first" };
    draft.text = "Queued";
    draft.submit();
    draft.text = "Typed";
    draft = bench.load();
    draft.open("two");
    assert.equal(draft.text, "Queued\n\nTyped");
    draft.open("one");
    assert.deepEqual([draft.text, draft.message.parent], ["Old", "before"]);
    draft.stopEditing();
    assert.deepEqual([draft.text, draft.message.attachments], ["New", [picture]]);
  });

  test("is kept no longer than it is needed", async () => {
    draft.text = "Which?";
    await draft.submit();
    draft.open("two");
    draft.text = "Which?";
    draft.drafts.forget("two");
    assert.deepEqual([...bench.kept], []);
  });

  test("goes along to the conversation that its beginning has begun", async () => {
    bench.shown.id = null;
    draft.open(null);
    const { done, decide } = await bench.submit("Which?");
    draft.text = "And?";
    draft.submit();
    draft.text = "What else?";
    decide();
    await done;
    assert.deepEqual(
      bench.sent.map(({ conversation, parent }) => [conversation, parent]),
      [
        [null, null],
        ["begun", "answer 1"],
      ],
    );
    draft.open(null);
    assert.ok(draft.isEmpty);
    draft.open("begun");
    assert.equal(draft.text, "What else?");
  });

  test("of two new conversations at one time each is its own", async () => {
    bench.shown.id = null;
    draft.open(null);
    const { done, decide } = await bench.submit("One");
    draft.text = "more of it";
    draft.open("two");
    draft.open(null);
    assert.ok(draft.isEmpty);
    draft.text = "Another";
    const other = draft.submit();
    decide();
    await Promise.all([done, other]);
    assert.deepEqual(
      bench.sent.map(({ conversation, text }) => [conversation, text]),
      [
        [null, "One"],
        [null, "Another"],
      ],
    );
    draft.open("begun");
    assert.equal(draft.text, "more of it");
  });

  test("lasts as long as the page where the browser keeps nothing", () => {
    const refuse = () => {
      throw new DOMException("full", "QuotaExceededError");
    };
    draft.drafts.storage = { getItem: refuse, setItem: refuse, removeItem: refuse };
    draft.open("three");
    draft.text = "Three";
    draft.open("one");
    draft.open("three");
    assert.equal(draft.text, "Three");
  });
});

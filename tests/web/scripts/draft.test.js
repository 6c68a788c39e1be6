import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, suite, test } from "node:test";

import { Problem } from "../../../assets/web/api.js";
import { amountAt, Draft, positionOf } from "../../../assets/web/draft.js";
import { FakeProgram, idle, makeMessage } from "./helpers.js";

/** @import { Attachment } from "../../../assets/web/types.d.ts" */
/** @import { Desk } from "../../../assets/web/draft.js" */

/** @type {FakeProgram} */
let program;
/** @type {Draft} */
let draft;
/** What was said, and which costs and troubles were drawn. @type {unknown[]} */
let said;
/** @type {any[]} */
let sent;
/** Files on their way, whose fate a test decides. @type {any[]} */
let uploads;
/** @type {boolean | Promise<boolean>} */
let isAccepted = true;

afterEach(() => mock.timers.reset());

beforeEach(() => {
  // Nothing is measured unless a test asks for it.
  mock.timers.enable({ apis: ["setTimeout"] });
  program = new FakeProgram();
  [said, sent, uploads, isAccepted] = [[], [], [], true];
  /** @type {Desk} */
  const desk = {
    place: () => ({ conversation: "one", parent: "last", settings: {} }),
    send: async (message) => {
      sent.push(message);
      return isAccepted;
    },
    say: (words) => said.push(words),
    draw: () => {},
    drawCost: (cost) => said.push(cost),
    drawTrouble: (words) => said.push(`trouble: ${words}`),
  };
  draft = new Draft(desk, program.requests, () => {
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
        reject(new Problem(problem));
        return idle();
      },
      isCancelled: false,
    };
    uploads.push(upload);
    const cancel = () => {
      upload.isCancelled = true;
      upload.fail({ message: "", kind: "cancelled" });
    };
    return { promise, cancel };
  });
});

/** @type {Attachment} */
const picture = { digest: "aa", kind: "image", name: "a.png", num_bytes: 3 };
const names = () => draft.files.map(({ name }) => name);
const attach = (/** @type {string[]} */ ...files) => draft.attach(files.map((name) => new File(["abc"], name)));
/** Sends a text; the program takes it when the test says so. */
async function submit(/** @type {string} */ text) {
  let accept = () => {};
  isAccepted = new Promise((resolve) => {
    accept = () => resolve(true);
  });
  draft.text = text;
  const done = draft.submit();
  await idle();
  return { done, accept: () => accept() };
}

suite("files", () => {
  test("stay in their order, whichever comes first", async () => {
    attach("a.png", "b.png");
    await uploads[1].arrive({ ...picture, digest: "bb", name: "b.png" });
    await uploads[0].arrive(picture);
    assert.deepEqual(names(), ["a.png", "b.png"]);
    assert.deepEqual(
      draft.message.attachments.map(({ digest }) => digest),
      ["aa", "bb"],
    );
  });

  test("one can become several, with a note", async () => {
    attach("scan.pdf");
    await uploads[0].arrive(
      [1, 2].map((page) => ({ ...picture, name: `page ${page}` })),
      "The first 2 pages.",
    );
    assert.deepEqual(names(), ["page 1", "page 2"]);
    assert.deepEqual(said, ["The first 2 pages."]);
  });

  test("one that can't be read is said by its name, and gone", async () => {
    attach("a.png", "b.png");
    await uploads[0].fail({ message: "It is damaged." });
    assert.deepEqual([said, names()], [["a.png: It is damaged."], ["b.png"]]);
  });

  test("one that is taken out is not sent to its end", async () => {
    attach("a.png");
    draft.remove(draft.files[0]);
    await idle();
    assert.ok(uploads[0].isCancelled);
    assert.deepEqual([said, names()], [[], []]);
  });

  test("one that arrives after it was taken out stays away", async () => {
    attach("a.png");
    const [file] = draft.files;
    file.cancel = () => {};
    draft.remove(file);
    await uploads[0].arrive(picture);
    assert.deepEqual(names(), []);
  });

  test("the kinds say what can be limited", async () => {
    attach("a.mp4", "a.png");
    assert.deepEqual(draft.limits, []);
    await uploads[0].arrive({ ...picture, kind: "video" });
    assert.deepEqual(draft.limits, ["max_frames", "max_video_tokens"]);
    await uploads[1].arrive(picture);
    assert.deepEqual(draft.limits, ["max_frames", "max_video_tokens", "max_image_tokens"]);
  });
});

suite("sending", () => {
  test("waits for files that are on their way", async () => {
    attach("a.png");
    const done = draft.submit();
    await idle();
    assert.deepEqual([sent, draft.isSending], [[], true]);
    await uploads[0].arrive(picture);
    await done;
    assert.deepEqual([sent.length, draft.isSending], [1, false]);
  });

  test("never goes without a file that its author saw in it", async () => {
    draft.text = "Which?";
    attach("a.png");
    const done = draft.submit();
    await uploads[0].fail({ message: "It is damaged." });
    await done;
    assert.deepEqual([sent, draft.text], [[], "Which?"]);
  });

  test("goes without a file that its author took out", async () => {
    draft.text = "Which?";
    attach("a.png");
    const done = draft.submit();
    draft.remove(draft.files[0]);
    await done;
    assert.equal(sent.length, 1);
  });

  test("keeps everything where it is refused", async () => {
    draft.text = "Which?";
    isAccepted = false;
    await draft.submit();
    assert.equal(draft.text, "Which?");
  });

  test("needs something to send", async () => {
    draft.text = "  ";
    await draft.submit();
    assert.deepEqual([sent, said], [[], ["Type a question, or add a picture or a video."]]);
  });

  test("waits for the answer in progress, and for itself", async () => {
    draft.text = "Which?";
    draft.isRunning = true;
    await draft.submit();
    draft.isRunning = false;
    await Promise.all([draft.submit(), draft.submit()]);
    assert.equal(sent.length, 1);
  });

  test("what is typed and attached while it is sent stays", async () => {
    attach("a.png");
    await uploads[0].arrive(picture);
    const { done, accept } = await submit("Which?");
    draft.text = "Which? And";
    attach("b.png");
    accept();
    await done;
    assert.deepEqual([sent[0].text, sent[0].attachments.length], ["Which?", 1]);
    assert.deepEqual([draft.text, names()], ["And", ["b.png"]]);
  });

  test("an earlier message that is taken up while it is sent stays", async () => {
    const { done, accept } = await submit("Which?");
    draft.edit(makeMessage({ text: "Where?" }));
    accept();
    await done;
    assert.deepEqual([draft.text, draft.editing?.text], ["Where?", "Where?"]);
  });
});

suite("changing an earlier message", () => {
  const earlier = makeMessage({ parent: "before", text: "Which?", attachments: [picture] });

  test("can be left", () => {
    draft.edit(earlier);
    draft.stopEditing();
    assert.ok(draft.isEmpty);
    assert.equal(draft.message.parent, "last");
  });

  test("leaving it takes nothing else away", () => {
    draft.text = "New";
    draft.stopEditing();
    assert.equal(draft.text, "New");
  });
});

suite("what it costs", () => {
  const cost = { media: [{ digest: "aa", label: "9 tokens", notes: [], error: null }], fits: true };

  test("is the cost of what stands there now", async () => {
    draft.text = "One";
    draft.measure();
    draft.text = "One and two";
    draft.measure();
    const [first, second] = program.asked;
    await second.answer({ ...cost, fits: false });
    await first.answer(cost);
    assert.deepEqual(said, [{ ...cost, fits: false }]);
  });

  test("is nothing once it is sent, though an estimate was to come", async () => {
    draft.text = "One";
    draft.measure();
    await draft.submit();
    await program.find("measure").answer(cost);
    assert.deepEqual(said, [null]);
  });

  test("that it can't be known is said", async () => {
    draft.text = "One";
    draft.measure();
    await program.find("measure").fail({ message: "No such file." });
    assert.deepEqual(said, ["trouble: No such file."]);
  });
});

test("a slider reaches small and large amounts, and finds its way back", () => {
  const range = { low: 64, high: 32768 };
  assert.deepEqual([amountAt(0, range), amountAt(100, range)], [64, 32768]);
  for (const position of [0, 1, 37, 99, 100]) assert.equal(positionOf(amountAt(position, range), range), position);
  assert.deepEqual([positionOf(1, range), positionOf(1e6, range)], [0, 100]);
});

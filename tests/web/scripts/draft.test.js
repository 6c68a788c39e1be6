import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, suite, test } from "node:test";

import { amountAt, positionOf } from "../../../assets/web/compose/limits.js";
import { holdingAfter, onceOf, withOffer, withoutLimit } from "../../../assets/web/compose/once.js";
import { DraftBench, idle, makeMessage, picture } from "./helpers.js";

/** @import { Draft } from "../../../assets/web/compose/draft.js" */
/** @import { Offer } from "../../../assets/web/common/types.d.ts" */

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

suite("files", () => {
  test("stay in their order, whichever comes first", async () => {
    bench.attach("a.png", "b.png");
    await bench.uploads[1].arrive({ ...picture, digest: "bb", name: "b.png" });
    await bench.uploads[0].arrive(picture);
    assert.deepEqual(bench.names(), ["a.png", "b.png"]);
    assert.deepEqual(
      draft.message.attachments.map(({ digest }) => digest),
      ["aa", "bb"],
    );
  });

  test("one can become several, with a note", async () => {
    bench.attach("scan.pdf");
    await bench.uploads[0].arrive(
      [1, 2].map((page) => ({ ...picture, name: `page ${page}` })),
      "The first 2 pages.",
    );
    assert.deepEqual(bench.names(), ["page 1", "page 2"]);
    assert.deepEqual(bench.said, ["The first 2 pages."]);
  });

  test("one that can't be read is said by its name, and gone", async () => {
    bench.attach("a.png", "b.png");
    await bench.uploads[0].fail({ message: "It is damaged." });
    assert.deepEqual([bench.said, bench.names()], [["a.png: It is damaged."], ["b.png"]]);
  });

  test("one that is taken out is not sent to its end", async () => {
    bench.attach("a.png");
    draft.remove(draft.files[0]);
    await idle();
    assert.ok(bench.uploads[0].isCancelled);
    assert.deepEqual([bench.said, bench.names()], [[], []]);
  });

  test("one whose connection is lost is uploaded again when it is back, unless it was taken out", async () => {
    let reach = () => {};
    bench.whenThere = new Promise((resolve) => {
      reach = resolve;
    });
    bench.attach("a.png", "b.png");
    for (const upload of bench.uploads) await upload.fail({ message: "gone", kind: "lost" });
    bench.draft.remove(bench.draft.files[1]);
    reach();
    await idle();
    await idle();
    assert.equal(bench.uploads.length, 3);
    await bench.uploads[2].arrive(picture);
    assert.deepEqual([bench.names(), bench.said.filter((each) => each)], [["a.png"], []]);
  });

  test("one that arrives after it was taken out stays away", async () => {
    bench.attach("a.png");
    const [file] = draft.files;
    file.cancel = () => {};
    draft.remove(file);
    await bench.uploads[0].arrive(picture);
    assert.deepEqual(bench.names(), []);
  });

  test("the kinds say what can be limited", async () => {
    bench.attach("a.mp4", "a.png");
    assert.deepEqual(draft.limits, []);
    await bench.uploads[0].arrive({ ...picture, kind: "video" });
    assert.deepEqual(draft.limits, ["max_frames", "max_video_tokens"]);
    await bench.uploads[1].arrive(picture);
    assert.deepEqual(draft.limits, ["max_frames", "max_video_tokens", "max_image_tokens"]);
  });
});

suite("sending", () => {
  test("waits for files that are on their way", async () => {
    bench.attach("a.png");
    const done = draft.submit();
    await idle();
    assert.deepEqual([bench.sent.length, draft.waiting.length], [0, 1]);
    await bench.uploads[0].arrive(picture);
    await done;
    assert.deepEqual([bench.sent.length, draft.waiting.length], [1, 0]);
  });

  test("goes to where it was sent, as it was, whatever is shown and typed until its files are there", async () => {
    draft.text = "Which?";
    bench.attach("a.png");
    const done = draft.submit();
    draft.text = "the next one";
    bench.shown.id = "two";
    draft.open("two");
    draft.text = "elsewhere";
    await bench.uploads[0].arrive(picture);
    await done;
    const [{ conversation, text, attachments }] = bench.sent;
    assert.deepEqual([bench.sent.length, conversation, text, attachments.length], [1, "one", "Which?", 1]);
    assert.equal(draft.text, "elsewhere");
    draft.open("one");
    assert.equal(draft.text, "the next one");
  });

  test("never goes without a file that its author saw in it", async () => {
    draft.text = "Which?";
    bench.attach("a.png");
    const done = draft.submit();
    await bench.uploads[0].fail({ message: "It is damaged." });
    await done;
    assert.deepEqual([bench.sent, draft.text], [[], "Which?"]);
  });

  test("can be taken back while it waits, and goes without a file that its author took out", async () => {
    draft.text = "Which?";
    bench.attach("a.png");
    const done = draft.submit();
    draft.text = "And?";
    draft.takeBack(draft.waiting[0]);
    assert.deepEqual([draft.text, bench.names()], ["Which?\n\nAnd?", ["a.png"]]);
    draft.remove(draft.files[0]);
    draft.submit();
    await done;
    assert.deepEqual([bench.sent.length, bench.sent[0].text], [1, "Which?\n\nAnd?"]);
  });

  test("keeps everything where it is refused, before what came since", async () => {
    const { done, decide } = await bench.submit("Which?", false);
    draft.text = "And?";
    decide();
    await done;
    assert.deepEqual([draft.text, draft.waiting], ["Which?\n\nAnd?", []]);
  });

  test("needs something to send", async () => {
    draft.text = "  ";
    await draft.submit();
    assert.deepEqual([bench.sent, bench.said], [[], ["Type a question, or add a picture or a video."]]);
  });

  test("during an answer it waits where it is seen, and a second one for the first one's answer", async () => {
    bench.shown.answer = "first";
    draft.text = "Which?";
    const done = draft.submit();
    draft.text = "And?";
    draft.submit();
    await idle();
    assert.deepEqual([bench.sent, draft.text], [[], ""]);
    assert.deepEqual(
      draft.waiting.map(({ text }) => text),
      ["Which?", "And?"],
    );
    bench.shown.answer = "answer 1";
    bench.endAnswer();
    await idle();
    assert.deepEqual([bench.sent.length, bench.sent[0].parent, draft.waiting.length], [1, "first", 1]);
    bench.endAnswer();
    await done;
    assert.deepEqual([bench.sent.length, bench.sent[1].parent], [2, "answer 1"]);
  });

  test("one that follows a refused one is not sent without it", async () => {
    const { done, decide } = await bench.submit("Which?", false);
    draft.text = "And?";
    draft.submit();
    decide();
    await done;
    assert.deepEqual([bench.sent.length, draft.text, draft.waiting], [1, "Which?\n\nAnd?", []]);
  });

  test("waits on, and can be taken back, where another tab's answer has come first", async () => {
    const { done, decide } = await bench.submit("Which?");
    bench.ahead = ["answer of another tab"];
    decide();
    await idle();
    bench.isAccepted = true;
    assert.deepEqual([draft.text, draft.waiting.map(({ isOnItsWay }) => isOnItsWay)], ["", [false]]);
    bench.endAnswer();
    await done;
    assert.deepEqual([bench.sent.length, draft.waiting, draft.text], [2, [], ""]);
  });

  test("one that waits for an answer comes back to the box where a person is asked about its call", async () => {
    bench.shown.answer = "reply";
    const { done } = await bench.submit("And this?");
    bench.endAnswer(false);
    await done;
    assert.deepEqual([bench.sent, draft.waiting, draft.text], [[], [], "And this?"]);
    assert.ok(bench.said.includes("The model asks for something first. Your message waits."));
  });

  test("what is typed and attached while it is sent stays", async () => {
    bench.attach("a.png");
    await bench.uploads[0].arrive(picture);
    const { done, decide } = await bench.submit("Which?");
    draft.text = "And";
    bench.attach("b.png");
    decide();
    await done;
    assert.deepEqual([bench.sent[0].text, bench.sent[0].attachments.length], ["Which?", 1]);
    assert.deepEqual([draft.text, bench.names()], ["And", ["b.png"]]);
  });

  test("another one leaves what is written where it is, and its picture keeps its place in its source", async () => {
    draft.text = "typed";
    const crop_of = { digest: "bb", name: "b.png", box: [0, 1, 2, 3], size: [4, 5], time_s: null };
    const part = { ...picture, crop_of: /** @type {any} */ (crop_of) };
    const sending = draft.queue({ text: "a part", files: [part], editing: null, taken: [] });
    assert.equal(draft.text, "typed");
    await sending;
    assert.deepEqual([bench.sent[0].text, bench.sent[0].attachments], ["a part", [part]]);
    draft.add(part);
    const { text, files } = bench.load();
    assert.deepEqual([text, files.map((file) => file.crop_of)], ["typed", [crop_of]]);
    // Added once more, it is drawn and taken out apart.
    draft.add(part);
    assert.notEqual(draft.files[0], draft.files[1]);
  });

  test("an earlier message that is taken up while it is sent stays", async () => {
    const { done, decide } = await bench.submit("Which?");
    draft.edit(makeMessage({ text: "Where?" }));
    decide();
    await done;
    assert.deepEqual([draft.text, draft.editing?.id], ["Where?", "node"]);
  });
});

suite("what it costs", () => {
  const cost = { media: [{ digest: "aa", label: "9 tokens", notes: [], error: null }], fits: true };

  test("is the cost of what stands there now", async () => {
    draft.text = "One";
    draft.measure();
    draft.text = "One and two";
    draft.measure();
    const [first, second] = bench.program.asked;
    await second.answer({ ...cost, fits: false });
    await first.answer(cost);
    assert.deepEqual(bench.said, [{ ...cost, fits: false }]);
  });

  test("is counted again for the same file again", async () => {
    bench.attach("a.png", "a.png");
    for (const each of bench.uploads) await each.arrive({ ...picture });
    draft.measure();
    const [media] = cost.media;
    await bench.program.find("measure").answer({ ...cost, media: [media, { ...media, label: "9 tokens more" }] });
    assert.deepEqual(
      draft.files.map(({ label }) => label),
      ["9 tokens", "9 tokens more"],
    );
  });

  test("is nothing once it is sent, though an estimate was to come", async () => {
    draft.text = "One";
    draft.measure();
    await draft.submit();
    await bench.program.find("measure").answer(cost);
    assert.deepEqual(bench.said, [null]);
  });

  test("that it can't be known is said", async () => {
    draft.text = "One";
    draft.measure();
    await bench.program.find("measure").fail({ message: "No such file." });
    assert.deepEqual(bench.said, ["trouble: No such file."]);
  });
});

suite("what was taken for one message", () => {
  /** @type {Offer} */
  const smaller = { kind: "media", label: "Less", settings: { max_image_tokens: 70 } };
  /** @type {Offer} */
  const shorter = { kind: "shorten", label: "Fewer", first: "node" };

  test("goes with it, and not with the next one", async () => {
    draft.text = "Which?";
    draft.taken = withOffer(withOffer(draft.taken, smaller), shorter);
    assert.deepEqual(draft.message.once, { limits: { max_image_tokens: 70 }, first: "node" });
    await draft.submit();
    assert.deepEqual(bench.sent[0].once, { limits: { max_image_tokens: 70 }, first: "node" });
    assert.deepEqual([draft.taken, draft.message.once], [[], { limits: {}, first: null }]);
  });

  test("comes back with it, is there after a reload, and waits aside", async () => {
    const { done, decide } = await bench.submit("Which?", false);
    decide();
    await done;
    draft.taken = withOffer(draft.taken, shorter);
    assert.deepEqual(bench.load().taken, [shorter]);
    draft.edit(makeMessage({ text: "Where?" }));
    assert.deepEqual(draft.taken, []);
    draft.stopEditing();
    assert.deepEqual(draft.taken, [shorter]);
  });

  test("is one of a kind; a limit that is set otherwise, or a message that is gone, ends it", () => {
    const both = withOffer([smaller], { ...smaller, label: "Least", settings: { max_video_tokens: 64 } });
    assert.deepEqual(onceOf(both).limits, { max_image_tokens: 70, max_video_tokens: 64 });
    assert.equal(both.length, 1);
    assert.deepEqual(withoutLimit([...both, shorter], "max_video_tokens"), [shorter]);
    assert.deepEqual(holdingAfter([...both, shorter], [{ id: "other" }]), both);
    assert.deepEqual(holdingAfter([shorter], [{ id: "node" }]), [shorter]);
  });
});

test("what is chosen of a video goes with it, alone too, and is there after a reload", async () => {
  const clip = { start_s: 1, end_s: 2.5, num_frames: 8, drop_similar: true };
  const video = { digest: "bb", kind: /** @type {const} */ ("video"), name: "b.mp4", num_bytes: 4 };
  bench.attach("a.png", "b.mp4");
  await bench.uploads[0].arrive(picture);
  await bench.uploads[1].arrive({ ...video });
  draft.choose(draft.files[1], clip);
  const chosen = { ...video, clip };
  assert.deepEqual(draft.message.attachments, [picture, chosen]);
  assert.deepEqual(draft.alone(draft.files[1]).attachments, [chosen]);
  draft.files[1].twice = false;
  draft.text = "When?";
  const { message, files } = bench.load();
  assert.deepEqual([message.attachments, files[1].twice], [[picture, chosen], false]);
  draft.choose(draft.files[1], null);
  assert.deepEqual(draft.message.attachments, [picture, video]);
  // A message that is changed brings its own.
  draft.edit(makeMessage({ text: "Where?", attachments: [chosen] }));
  assert.deepEqual(draft.message.attachments, [chosen]);
});

test("a slider reaches small and large amounts, and finds its way back", () => {
  const range = { low: 64, high: 32768 };
  assert.deepEqual([amountAt(0, range), amountAt(100, range)], [64, 32768]);
  for (const position of [0, 1, 37, 99, 100]) assert.equal(positionOf(amountAt(position, range), range), position);
  assert.deepEqual([positionOf(1, range), positionOf(1e6, range)], [0, 100]);
});

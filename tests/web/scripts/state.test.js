import assert from "node:assert/strict";
import { beforeEach, suite, test } from "node:test";

import { NO_CHAT } from "../../../assets/web/chat/state.js";
import { FakeProgram, idle, makeChat, makeMessage, makeNews, makeState } from "./helpers.js";

/** @import { PageState } from "../../../assets/web/chat/state.js" */

/** @type {FakeProgram} */
let program;
/** @type {PageState} */
let state;
/** What the view was told, as names with what matters. @type {unknown[][]} */
let drawn;
/** @type {string[][]} */
let watched;
let nowMs = 0;

beforeEach(() => {
  program = new FakeProgram();
  drawn = [];
  watched = [];
  nowMs = 0;
  state = makeState(program, drawn, watched, () => nowMs);
});

/** Sends a message as it would be sent now. */
function send(text = "Hello") {
  const { place, isLate } = state.begin();
  return state.send({ ...place, text, attachments: [] }, isLate);
}

/** Opens a conversation, and forgets that it was drawn. */
async function show(/** @type {string} */ id, /** @type {object} */ rest = {}) {
  state.open(id);
  await program.find("open").answer(makeChat(id, rest));
  drawn.length = 0;
}

suite("which conversation is shown", () => {
  test("one that is opened, at its end", async () => {
    state.open("one");
    await program.find("open").answer(makeChat("one", { settings: { seed: 3 } }));
    assert.deepEqual(drawn, [["chat", "one", true], ["end"]]);
    assert.deepEqual(state.settings, { seed: 3 });
  });

  test("one that is opened at a message", async () => {
    state.open("one", "node");
    assert.deepEqual(program.find("open").args, { conversation: "one", node: "node" });
    await program.find("open").answer(makeChat("one"));
    assert.deepEqual(drawn, [
      ["chat", "one", true],
      ["message", "node"],
    ]);
  });

  test("the one that was opened last, in whichever order they come", async () => {
    state.open("slow");
    state.open("quick");
    const [slow, quick] = program.asked;
    await quick.answer(makeChat("quick"));
    await slow.answer(makeChat("slow"));
    assert.equal(state.chat.id, "quick");
  });

  test("a new one, though another was still to come", async () => {
    state.open("slow");
    state.newChat();
    await program.find("open").answer(makeChat("slow"));
    assert.equal(state.chat, NO_CHAT);
  });

  test("a new one where it isn't there any more", async () => {
    await show("one");
    state.open("gone");
    await program.find("open").fail({ message: "There is no such conversation.", kind: "not found" });
    assert.deepEqual(program.told, ["There is no such conversation."]);
    assert.equal(state.chat, NO_CHAT);
  });

  test("the same where another can't be reached", async () => {
    await show("one");
    state.open("two");
    await program.find("open").fail({ message: "The program can't be reached." });
    assert.equal(state.chat.id, "one");
  });

  test("a new one has the settings of new ones", async () => {
    await show("one", { settings: { seed: 3 } });
    state.newChat();
    assert.deepEqual(state.settings, { top_k: 5 });
  });
});

suite("changing a conversation", () => {
  test("a message is sent, shown and its answer watched", async () => {
    const sent = send();
    const { id: _, ...message } = program.find("send").args;
    assert.deepEqual(message, {
      conversation: null,
      parent: null,
      settings: { top_k: 5 },
      text: "Hello",
      attachments: [],
      model: "demo",
    });
    await program.find("send").answer({ chat: makeChat("one", { running: ["reply"] }), reply: "reply" });
    assert.equal(/** @type {any} */ (await sent).reply, "reply");
    assert.deepEqual(drawn, [["moved", null, "one"], ["chat", "one", true], ["end"], ["list"]]);
    assert.deepEqual(watched, [["reply"]]);
  });

  test("a message that is refused is not sent", async () => {
    const sent = send();
    await program.find("send").fail({ message: "Too much." });
    assert.equal(await sent, null);
    assert.deepEqual([drawn, program.told], [[], ["Too much."]]);
  });

  test("a message that another tab's answer is in the way of waits for it, and nobody is told", async () => {
    const sent = send();
    await program.find("send").fail({ message: "One at a time.", kind: "busy", answers: ["other"] });
    assert.deepEqual(await sent, { answers: ["other"] });
    assert.deepEqual([drawn, program.told, watched], [[], [], [["other"]]]);
  });

  test("what would make one fit is not offered to who has gone on to another conversation", async () => {
    await show("one");
    const offers = [{ kind: "summary", label: "Sum up" }];
    send();
    await program.find("send").fail({ message: "Too long.", kind: "too long", offers });
    assert.equal(program.offered.length, 1);
    send();
    state.open("two");
    await program.find("open").answer(makeChat("two"));
    await program.find("send").fail({ message: "Too long.", kind: "too long", offers });
    assert.deepEqual([program.offered.length, program.told.length], [1, 2]);
  });

  test("who has gone on to another conversation isn't taken back, and the answer is watched all the same", async () => {
    await show("one");
    send();
    state.open("two");
    await program.find("open").answer(makeChat("two"));
    await program.find("send").answer({ chat: makeChat("one", { running: ["reply"] }), reply: "reply" });
    assert.equal(state.chat.id, "two");
    assert.deepEqual(watched, [["reply"]]);
  });

  test("one that is sent late overtakes nothing that the person has asked for since", async () => {
    await show("one", { settings: { seed: 3 } });
    const { place, isLate } = state.begin();
    state.open("two");
    await program.find("open").answer(makeChat("two"));
    state.open("three");
    state.send({ ...place, text: "Hello", attachments: [] }, isLate);
    assert.equal(program.find("send").args.settings, null);
    await program.find("send").answer({ chat: makeChat("one", { running: ["reply"] }), reply: "reply" });
    await program.find("open").answer(makeChat("three"));
    assert.equal(state.chat.id, "three");
  });

  test("one that is sent late is seen by who has come back", async () => {
    await show("one");
    const { place, isLate } = state.begin();
    await show("two");
    await show("one");
    state.changeSettings({ seed: 4 });
    state.send({ ...place, text: "Hello", attachments: [] }, isLate);
    assert.deepEqual(program.find("send").args.settings, { seed: 4 });
    await program.find("send").answer({ chat: makeChat("one"), reply: "reply" });
    await program.find("open").answer(makeChat("one", { title: "with it" }));
    assert.equal(state.chat.title, "with it");
  });

  test("that a change failed is said though the person has gone on", async () => {
    await show("one");
    state.deleteMessage(makeMessage());
    state.newChat();
    await program.find("delete_message").fail({ message: "It can't be deleted now." });
    assert.deepEqual(program.told, ["It can't be deleted now."]);
  });

  test("of two branches the one chosen last is shown", async () => {
    await show("one");
    state.showBranch("a");
    state.showBranch("b");
    const [first, second] = program.asked;
    await second.answer({ chat: makeChat("one", { title: "b" }), reply: null });
    await first.answer({ chat: makeChat("one", { title: "a" }), reply: null });
    assert.equal(state.chat.title, "b");
  });

  test("another answer and the rest of one come with the settings as they are", async () => {
    await show("one", { settings: { seed: 3 } });
    const message = makeMessage({ id: "answer", parent: "question" });
    state.answer(message.parent);
    state.goOn(message);
    const rest = { settings: { seed: 3 }, model: "demo" };
    assert.deepEqual(program.find("again").args, { conversation: "one", node: "question", ...rest });
    assert.deepEqual(program.find("continue").args, { conversation: "one", node: "answer", ...rest });
  });

  test("an example that is gone is not sent", async () => {
    const sent = state.sendExample(0);
    await program.find("example").fail({ message: "There is no such example." });
    assert.deepEqual([await sent, program.names], [null, []]);
  });
});

suite("answers in progress", () => {
  test("what is new is drawn where the conversation is shown", async () => {
    await show("one", { running: ["reply"] });
    state.news({ reply: makeNews({ blocks: ["<p>a</p>"] }) });
    assert.deepEqual(drawn, [["answer", "<p>a</p>"]]);
  });

  test("what is new elsewhere is drawn when the person comes there", async () => {
    await show("one", { running: ["reply"] });
    await show("two");
    state.news({ reply: makeNews({ blocks: ["<p>a</p>"] }) });
    assert.deepEqual(drawn, []);
    state.open("one");
    await program.find("open").answer(makeChat("one", { running: ["reply"] }));
    assert.deepEqual(drawn, [["chat", "one", true], ["answer", "<p>a</p>"], ["end"]]);
  });

  test("answers are watched together, and begun once", () => {
    state.follow(["reply"]);
    state.follow(["reply", "other"]);
    state.follow(["other"]);
    assert.deepEqual(watched, [["reply"], ["reply", "other"]]);
  });

  test("news of an answer that isn't watched any more are dropped", async () => {
    await show("one");
    state.news({ reply: makeNews() });
    assert.deepEqual(drawn, []);
  });

  test("at its end it is told, and the conversation looked at again", async () => {
    await show("one", { running: ["reply"] });
    state.news({ reply: makeNews({ status: "finished" }) });
    await program.find("open").answer(makeChat("one", { title: "Named" }));
    assert.deepEqual(drawn, [["answer"], ["list"], ["speak", "The answer is complete."], ["chat", "one", false]]);
    assert.equal(state.live.size, 0);
  });

  test("one that calls tools asks whether they may run, and goes on", async () => {
    await show("one", { running: ["reply"] });
    const calls = [{ id: "c", name: "files__read", arguments: "{}" }];
    state.news({ reply: makeNews({ status: "finished", calls }) });
    const asked = program.find("run_calls");
    assert.deepEqual(asked.args, { conversation: "one", node: "reply", answers: {} });
    await asked.answer({ chat: makeChat("one"), reply: "next" });
    await program.find("open").answer(makeChat("one", { running: ["next"] }));
    assert.deepEqual(watched.at(-1), ["next"]);
    // A result is a message of its own.
    state.news({ next: makeNews({ id: "next", num_results: 1 }) });
    state.news({ next: makeNews({ id: "next", num_results: 1 }) });
    assert.deepEqual(program.names, ["open"]);
  });

  test("a message waits for what follows its calls, and for none that a person is asked about", async () => {
    await show("one", { running: ["reply"] });
    const calls = [{ id: "c", name: "files__read", arguments: "{}" }];
    /** @type {unknown[]} */
    const ends = [];
    state.answered(["reply"]).then((isEnd) => ends.push(isEnd));
    state.news({ reply: makeNews({ status: "finished", calls }) });
    await idle();
    await program.find("run_calls").answer({ chat: makeChat("one"), reply: "next" });
    await program.find("open").answer(makeChat("one", { running: ["next"] }));
    assert.deepEqual(ends, []);
    state.news({ next: makeNews({ id: "next", status: "finished", calls }) });
    await program.find("run_calls").answer({ chat: makeChat("one"), reply: null });
    assert.deepEqual(ends, [false]);
  });

  test("one whose calls can't run now shows why, and how things are", async () => {
    await show("one", { running: ["reply"] });
    const calls = [{ id: "c", name: "files__read", arguments: "{}" }];
    state.news({ reply: makeNews({ status: "finished", calls }) });
    await program.find("run_calls").fail({ message: "You already have 4 answers in progress.", kind: "busy" });
    assert.deepEqual([program.told, program.names], [["You already have 4 answers in progress."], ["open"]]);
  });

  test("one of another chat goes on with its calls there", async () => {
    await show("one", { running: ["reply"] });
    await show("two");
    const calls = [{ id: "c", name: "files__read", arguments: "{}" }];
    state.news({ reply: makeNews({ status: "finished", calls }) });
    await program.find("run_calls").answer({ chat: makeChat("one"), reply: "next" });
    assert.deepEqual([watched.at(-1), state.chat.id], [["next"], "two"]);
  });

  test("one that can't be stored is watched until it is", async () => {
    await show("one", { running: ["reply"] });
    const full = { status: /** @type {const} */ ("finished"), unsaved: "The disk is full." };
    state.news({ reply: makeNews(full) });
    const unsaved = { id: "reply", role: /** @type {const} */ ("assistant"), ...full };
    await program.find("open").answer(makeChat("one", { messages: [makeMessage(unsaved)] }));
    state.news({ reply: makeNews(full) });
    assert.deepEqual(drawn.slice(1), [["list"], ["speak", "The disk is full."], ["chat", "one", false], ["answer"]]);
    assert.deepEqual([program.names, watched], [[], [["reply"]]]);
    state.news({ reply: makeNews({ status: "finished", unsaved: null }) });
    assert.equal(state.live.size, 0);
    await program.find("open").answer(makeChat("one", { title: "Stored" }));
    assert.equal(state.chat.title, "Stored");
    await show("two", { messages: [makeMessage(unsaved)] });
    assert.deepEqual(watched, [["reply"], ["reply"]], "also after a reload");
  });

  test("one that doesn't fit says so", async () => {
    await show("one", { running: ["reply"] });
    state.news({ reply: makeNews({ status: "failed", error: "5,000 tokens", too_long: true }) });
    assert.deepEqual(drawn.slice(1), [["list"], ["speak", "5,000 tokens"], ["offer", "5,000 tokens"]]);
  });

  test("looking again doesn't take back what the person did meanwhile", async () => {
    await show("one", { running: ["reply"] });
    state.news({ reply: makeNews({ status: "finished" }) });
    const look = program.find("open");
    state.showBranch("b");
    await program.find("branch").answer({ chat: makeChat("one", { title: "b" }), reply: null });
    await look.answer(makeChat("one", { title: "a" }));
    assert.equal(state.chat.title, "b");
  });

  test("looking again doesn't overtake what the person is doing", async () => {
    await show("one", { running: ["reply"] });
    state.showBranch("b");
    state.news({ reply: makeNews({ status: "finished" }) });
    await program.find("open").answer(makeChat("one", { title: "a" }));
    await program.find("branch").answer({ chat: makeChat("one", { title: "b" }), reply: null });
    assert.equal(state.chat.title, "b");
  });

  test("of two looks the later one counts", async () => {
    await show("one", { running: ["a", "b"] });
    state.news({ a: makeNews({ id: "a", status: "finished" }), b: makeNews({ id: "b", status: "finished" }) });
    const [first, second] = program.asked;
    await second.answer(makeChat("one", { title: "both" }));
    await first.answer(makeChat("one", { title: "a alone" }));
    assert.equal(state.chat.title, "both");
  });

  test("looking again doesn't lead back into a conversation that was left", async () => {
    await show("one", { running: ["reply"] });
    state.news({ reply: makeNews({ status: "finished" }) });
    state.newChat();
    await program.find("open").answer(makeChat("one"));
    assert.equal(state.chat, NO_CHAT);
  });

  test("what waits for answers goes on when all have ended, however", async () => {
    state.follow(["a", "b"]);
    const gone = [""];
    state.answered([]).then(() => gone.push("at once"));
    state.answered(["a"]).then(() => gone.push("a"));
    state.answered(["a", "b"]).then(() => gone.push("both"));
    await idle();
    assert.deepEqual(gone, ["", "at once"]);
    state.news({ a: makeNews({ id: "a", status: "stopped" }) });
    await idle();
    assert.deepEqual(gone, ["", "at once", "a"]);
    state.news({}, ["b"]);
    await idle();
    assert.deepEqual(gone, ["", "at once", "a", "both"]);
  });

  test("one that says nothing for long is silent, and asked for again with what else is in progress", async () => {
    await show("one", { running: ["reply"] });
    nowMs = 7999;
    assert.equal(state.isSilent, false);
    nowMs = 8000;
    assert.equal(state.isSilent, true);
    state.resume(["reply", "other"]);
    assert.deepEqual(watched, [["reply"], ["reply", "other"]]);
    assert.equal(state.isSilent, false);
    await program.find("open").answer(makeChat("one", { title: "As it is now" }));
    assert.deepEqual(drawn, [["chat", "one", false]]);
  });

  test("what is written for a conversation that is gone goes along to a new one", async () => {
    await show("one");
    state.resume([]);
    await program.find("open").fail({ message: "It isn't there any more.", kind: "not found" });
    assert.deepEqual(drawn, [
      ["moved", "one", null],
      ["chat", null, true],
    ]);
    assert.deepEqual(program.told, ["It isn't there any more."]);
  });

  test("a message is sent again, as the same one, until it is known to have come", async () => {
    await show("one");
    let reach = () => {};
    program.whenThere = new Promise((resolve) => {
      reach = resolve;
    });
    const sent = send();
    const { id } = program.find("send").args;
    assert.match(id, /^[0-9a-f]{32}$/);
    await program.find("send").fail({ message: "gone", kind: "lost" });
    assert.deepEqual([program.names, program.told], [[], []]);
    reach();
    await idle();
    assert.equal(program.find("send").args.id, id);
    await program.find("send").answer({ chat: makeChat("one"), reply: null });
    assert.ok(await sent);
  });

  test("one that the program knows nothing of any more is not asked for for ever", async () => {
    await show("one", { running: ["reply"] });
    state.news({}, ["reply"]);
    assert.equal(state.live.size, 0);
    await program.find("open").answer(makeChat("one", { title: "Interrupted" }));
    assert.deepEqual(drawn, [["chat", "one", false]]);
    nowMs = 8000;
    assert.equal(state.isSilent, false);
  });

  test("what an earlier stream doesn't send says nothing of an answer that came later", async () => {
    await show("one", { running: ["reply", "other"] });
    state.news({ reply: makeNews() }, ["reply"]);
    assert.equal(state.live.size, 2);
  });
});

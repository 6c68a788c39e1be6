import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, suite, test } from "node:test";

import { Presets, withPreset, withSetting } from "../../../assets/web/chat/presets.js";
import { FakeProgram, idle, makeChat, makeNews, makeState } from "./helpers.js";

/** @import { PageState } from "../../../assets/web/chat/state.js" */

/** @type {FakeProgram} */
let program;
/** @type {PageState} */
let state;

afterEach(() => mock.timers.reset());

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout"] });
  program = new FakeProgram();
  state = makeState(program);
});

async function show(/** @type {string} */ id, /** @type {object} */ rest = {}) {
  state.open(id);
  await program.find("open").answer(makeChat(id, rest));
}

suite("settings", () => {
  test("are kept with the conversation, and for new ones", async () => {
    await show("one");
    state.changeSettings({ seed: 1 });
    state.changeSettings({ seed: 2 });
    mock.timers.tick(300);
    await idle();
    assert.deepEqual(program.find("settings").args, { conversation: "one", settings: { seed: 2 } });
    await program.find("settings").answer({});
    assert.deepEqual(program.find("preferences").args, { preferences: { settings: { seed: 2 } } });
    state.changePreferences({ colours: "dark" });
    await program.find("preferences").answer({});
    assert.deepEqual(program.find("preferences").args, { preferences: { colours: "dark" } });
  });

  test("of tools are one chat's own", async () => {
    await show("one");
    state.changeSettings({ seed: 1, tools: "files", max_calls: 3 });
    mock.timers.tick(300);
    await idle();
    assert.deepEqual(program.find("settings").args.settings, { seed: 1, tools: "files", max_calls: 3 });
    await program.find("settings").answer({});
    assert.deepEqual(program.find("preferences").args, { preferences: { settings: { seed: 1 } } });
    state.newChat();
    assert.deepEqual(state.settings, { seed: 1 });
    // A preset neither switches them on nor off.
    assert.deepEqual(withPreset({ seed: 1, tools: "files" }, { top_k: 3, tools: "web" }), { top_k: 3, tools: "files" });
    assert.deepEqual(withPreset({ seed: 1, tools: "files", max_calls: 3 }, {}), { tools: "files", max_calls: 3 });
    const presets = new Presets(program.requests, { mine: { top_k: 3 } }, () => {});
    assert.equal(presets.nameOf({ top_k: 3, tools: "files" }), "mine");
  });

  test("that are refused are not kept for new ones", async () => {
    await show("one");
    state.changeSettings({ seed: -1 });
    mock.timers.tick(300);
    await idle();
    await program.find("settings").fail({ message: "“Seed” must be a whole number." });
    assert.deepEqual([program.names, program.told], [[], ["“Seed” must be a whole number."]]);
  });

  test("are saved one after the other", async () => {
    await show("one");
    for (const seed of [1, 2]) {
      state.changeSettings({ seed });
      mock.timers.tick(300);
      await idle();
    }
    assert.deepEqual(program.names, ["settings"]);
    await program.find("settings").answer({});
    assert.deepEqual(program.find("settings").args.settings, { seed: 2 });
  });

  test("are kept with the conversation that they were changed in", async () => {
    await show("one");
    state.changeSettings({ seed: 1 });
    state.newChat();
    await idle();
    assert.deepEqual(program.find("settings").args, { conversation: "one", settings: { seed: 1 } });
    assert.deepEqual(state.settings, { top_k: 5 });
  });

  test("that are not saved yet stay when the conversation is looked at again", async () => {
    await show("one", { running: ["reply"] });
    state.changeSettings({ seed: 1 });
    state.news({ reply: makeNews({ status: "finished" }) });
    await program.find("open").answer(makeChat("one"));
    assert.deepEqual(state.settings, { seed: 1 });
  });
});

suite("what is taken where something doesn't fit", () => {
  const label = "Take it";

  test("smaller media", async () => {
    await state.take({ kind: "media", label, settings: { max_frames: 4 } });
    assert.deepEqual(state.settings, { top_k: 5, max_frames: 4 });
  });
});

test("of settings only what differs from the defaults is kept", () => {
  const defaults = { top_k: 20, thinking: false };
  assert.deepEqual(withSetting({}, defaults, "top_k", 5), { top_k: 5 });
  for (const nothing of [20, null, ""])
    assert.deepEqual(withSetting({ top_k: 5, seed: 1 }, defaults, "top_k", nothing), { seed: 1 });
  assert.deepEqual(withSetting({}, defaults, "thinking", true), { thinking: true });
});

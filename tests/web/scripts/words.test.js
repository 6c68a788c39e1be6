import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { afterEach, mock, suite, test } from "node:test";

import { endingOf } from "../../../assets/web/chat/message.js";
import { isWithin } from "../../../assets/web/chat/settings.js";
import { categoriesOf, LANGUAGES, said, t, useLanguage } from "../../../assets/web/common/words.js";
import { makeNews } from "./helpers.js";

/** @import { Field, Said } from "../../../assets/web/common/types.d.ts" */

afterEach(() => {
  mock.restoreAll();
  return useLanguage("en");
});

/** Has a language's table come from here. */
function serve(/** @type {object} */ table) {
  mock.method(globalThis, "fetch", async () => ({ json: async () => table }));
}

const tableOf = (/** @type {string} */ language) =>
  JSON.parse(readFileSync(new URL(`../../../assets/web/languages/${language}.json`, import.meta.url), "utf-8"));

suite("languages", () => {
  test("a text is what its language has for it, with its values", async () => {
    serve({ "{n} tokens": "{n} Token" });
    assert.equal(await useLanguage("de"), "de");
    assert.equal(t("{n} tokens", { n: 3 }), "3 Token");
    assert.equal(t("Close"), "Close");
  });

  // {n} tokens in each number's form; fr has one of its own for millions.
  const many = { text: "{n} {n|token|tokens}", values: {} };
  for (const [language, numbers, forms] of /** @type {[string, number[], string[]][]} */ ([
    ["en", [0, 1, 2], ["tokens", "token", "tokens"]],
    ["de", [0, 1, 2], ["Tokens", "Token", "Tokens"]],
    ["fr", [0, 1, 2, 1e6], ["token", "token", "tokens", "tokens"]],
    ["zh", [0, 1, 2], ["token", "token", "token"]],
  ]))
    test(`words go by their number as in ${language}`, async () => {
      if (language !== "en") serve(tableOf(language));
      await useLanguage(language);
      const written = numbers.map((n) => said({ ...many, values: { n } }));
      assert.deepEqual(
        written.map((words) => words.replace(/^.*\s/, "")),
        forms,
      );
    });

  test("every language has as many forms as the tables are checked for", () => {
    const numCategories = Object.keys(LANGUAGES).map((code) => [code, categoriesOf(code).length]);
    assert.deepEqual(Object.fromEntries(numCategories), { en: 2, de: 2, es: 3, fr: 3, zh: 1 });
  });

  test("a text that its language lacks takes the forms of English", async () => {
    serve({});
    await useLanguage("zh");
    assert.equal(said({ text: "{n} {n|word|words}", values: { n: 1 } }), "1 word");
  });

  test("one that there isn't is English, and so is one that can't be loaded", async () => {
    mock.method(navigator, "language", () => "nl-NL", { getter: true });
    assert.equal(await useLanguage("tlh"), "en");
    mock.method(globalThis, "fetch", () => Promise.reject(new TypeError("no network")));
    assert.equal(await useLanguage("de"), "en");
  });

  test("none chosen is the browser's", async () => {
    mock.method(navigator, "language", () => "fr-CA", { getter: true });
    serve({});
    assert.equal(await useLanguage(undefined), "fr");
  });

  const cost = {
    text: "{first}, {rest}",
    values: { first: { text: "{n} {n|token|tokens}", values: { n: 1 } }, rest: { bytes: 1.5 * 2 ** 30 } },
  };
  const speed = { text: "{n} tokens/s", values: { n: { number: 1234.56, digits: 1 } } };
  for (const [language, ...written] of [
    ["de", "1.234,6 Tokens/s", "50 %", "1.023 Byte", "1 Token, 1,5 GiB"],
    ["fr", "1 234,6 tokens/s", "50 %", "1 023 octets", "1 token, 1,5 GiB"],
    ["es", "1234,6 tokens/s", "50 %", "1023 bytes", "1 token, 1,5 GiB"],
    ["zh", "每秒 1,234.6 个 token", "50%", "1,023字节", "1 个 token，1.5 GiB"],
  ])
    test(`numbers are written as ${language} does`, async () => {
      serve(tableOf(language));
      await useLanguage(language);
      // Which of its spaces a language takes is its own to know.
      const found = [speed, { share: 0.5 }, { bytes: 1023 }, cost].map((words) => said(words).replace(/\s/g, " "));
      assert.deepEqual(found, written);
    });
});

suite("what the program says", () => {
  /** @type {[Said, string][]} */
  const cases = [
    ["It is damaged: {n}", "It is damaged: {n}"],
    [1536, "1,536"],
    [{ number: 2, digits: 2 }, "2.00"],
    [{ share: 0.25 }, "25%"],
    [{ bytes: 1 }, "1 byte"],
    [{ bytes: 1023 }, "1,023 bytes"],
    [{ bytes: 1536 }, "1.5 KiB"],
    [{ bytes: 18 * 2 ** 20 }, "18 MiB"],
    [{ bytes: 3000 * 2 ** 30 }, "3,000 GiB"],
    [{ text: "{a} of {b}", values: { a: 1000, b: { text: "{n} more", values: { n: "x" } } } }, "1,000 of x more"],
  ];
  for (const [words, written] of cases) test(written, () => assert.equal(said(words), written));
});

suite("what is said of an answer's end", () => {
  /** @type {[object, RegExp][]} */
  const cases = [
    [{ status: "running" }, /^$/],
    [{ status: "finished", blocks: ["<p>a</p>"] }, /^$/],
    [{ status: "finished" }, /gave no answer/],
    [{ status: "stopped", blocks: ["<p>a</p>"] }, /^Stopped$/],
    [{ status: "stopped" }, /^Stopped before the answer/],
    [{ status: "length", blocks: ["<p>a</p>"] }, /reached its limit\.$/],
    [{ status: "interrupted", blocks: ["<p>a</p>"] }, /stopped during/],
    [{ status: "failed", error: "It is damaged." }, /^It is damaged\.$/],
    [{ status: "failed", error: "It is damaged.", unsaved: "the disk is full" }, /isn't saved: the disk is full/],
  ];
  for (const [view, words] of cases) test(JSON.stringify(view), () => assert.match(endingOf(makeNews(view)), words));
});

test("a number is within its field's range, and whole where that is asked", () => {
  /** @type {Field} */
  const field = { group: "sampling", low: 0, high: 2, step: 0.1, label: "", hint: null };
  assert.deepEqual(
    [-0.1, 0, 0.55, 2, 2.1, Number.NaN].map((value) => isWithin(value, field)),
    [false, true, true, true, false, false],
  );
  assert.deepEqual(
    [1, 1.5].map((value) => isWithin(value, { ...field, step: 1 })),
    [true, false],
  );
});

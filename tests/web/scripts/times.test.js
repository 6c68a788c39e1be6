import assert from "node:assert/strict";
import { suite, test } from "node:test";

import { asksTwice, findTimes, meantAt, secondsOf, timeOf } from "../../../assets/web/media/times.js";

suite("a time is written", () => {
  test("as a clock shows it", () => {
    const written = [0, 3.44, 59.96, 83.5, 3723.4].map((seconds) => timeOf(seconds));
    assert.deepEqual(written, ["0:00.0", "0:03.4", "1:00.0", "1:23.5", "1:02:03.4"]);
    assert.deepEqual(
      [0, 59.6, 3723].map((seconds) => timeOf(seconds, 0)),
      ["0:00", "1:00", "1:02:03"],
    );
  });

  test("and read back as a person may write it", () => {
    const read = ["0:03.4", "3,4", " 12 s", "1:23", "1:02:03.5", "", "x", "1:2:3:4", "-3", "1e3"].map(secondsOf);
    assert.deepEqual(read, [3.4, 3.4, 12, 83, 3723.5, null, null, null, null, null]);
  });
});

test("a question for a time in a coarse video is asked twice, unless the person said otherwise", () => {
  const asked = ["When is it?", "Wann?", "à quel moment", "¿Cuándo?", "什么时候", "whenever", "Who?"].map((text) =>
    asksTwice({ step_s: 30 }, text),
  );
  assert.deepEqual(asked, [true, true, true, true, true, false, false]);
  assert.ok(!asksTwice({ step_s: 0.5, twice: true }, "When?"));
  assert.ok(!asksTwice({ step_s: 30, twice: false }, "When?"));
  assert.ok(asksTwice({ step_s: 30, twice: true }, "Who?"));
});

/** What is found, as `text = from` or `text = from..to`. */
const found = (/** @type {string} */ text) =>
  findTimes(text).map(({ start, stop, from_s, to_s }) => {
    return `${text.slice(start, stop)} = ${from_s}${to_s === null ? "" : `..${to_s}`}`;
  });

suite("times in a text", () => {
  for (const [text, ...wanted] of [
    ["At 12.5 s it falls.", "12.5 s = 12.5"],
    ["See 01:23, then 1:02:03.", "01:23 = 83", "1:02:03 = 3723"],
    [
      "<12.5 seconds> a ball; <3.0 seconds> to <7.0 seconds>",
      "<12.5 seconds> = 12.5",
      "<3.0 seconds> to <7.0 seconds> = 3..7",
    ],
    ["between 3–7 s and after", "3–7 s = 3..7"],
    ["from 01:10 to 01:20", "01:10 to 01:20 = 70..80"],
    ["[00:05 - 00:09] it turns", "00:05 - 00:09 = 5..9"],
    ["between 3 and 7 seconds, 2 s and 4 s", "3 and 7 seconds = 3..7", "2 s = 2", "4 s = 4"],
    ["1 min 20 s, 2m05s and 1 minute and 5 seconds", "1 min 20 s = 80", "2m05s = 125", "1 minute and 5 seconds = 65"],
    [
      "Bei 12,5 s, nach 3 Sekunden, von 1:10 bis 1:20, zwischen 3 und 7 Sekunden",
      "12,5 s = 12.5",
      "3 Sekunden = 3",
      "1:10 bis 1:20 = 70..80",
      "3 und 7 Sekunden = 3..7",
    ],
    [
      "À 12,5 secondes, de 3 à 7 s, entre 1:10 et 1:20",
      "12,5 secondes = 12.5",
      "3 à 7 s = 3..7",
      "1:10 et 1:20 = 70..80",
    ],
    [
      "A los 12,5 segundos, de 3 a 7 s, entre 3 y 7 segundos, 1:10 hasta 1:20",
      "12,5 segundos = 12.5",
      "3 a 7 s = 3..7",
      "3 y 7 segundos = 3..7",
      "1:10 hasta 1:20 = 70..80",
    ],
    [
      "在第12.5秒，从3秒到7秒，3至7秒，在3秒和7秒之间，1分20秒",
      "12.5秒 = 12.5",
      "3秒到7秒 = 3..7",
      "3至7秒 = 3..7",
      "3秒和7秒 = 3..7",
      "1分20秒 = 80",
    ],
    [
      "(0:03), 0:05.5: 12.5s-14s, [00:12-00:18]",
      "0:03 = 3",
      "0:05.5 = 5.5",
      "12.5s-14s = 12.5..14",
      "00:12-00:18 = 12..18",
    ],
    ["at the 5-second mark, at second 7, the second 3 shots", "5-second = 5", "second 7 = 7"],
    [
      "bei Sekunde 12, à la seconde 12, en el segundo 12, 1'20\" et 1′05″",
      "Sekunde 12 = 12",
      "seconde 12 = 12",
      "segundo 12 = 12",
      "1'20\" = 80",
      "1′05″ = 65",
    ],
    ["from 0:00 to 0:03.0", "0:00 to 0:03.0 = 0..3"],
    ["for 1,200 s, at 1,200 s and 1,5 s", "1,200 s = 1200", "1,5 s = 1.5"],
    // What is none.
    ["It lasts 3 seconds, dauert etwa 3 s, pendant 3 s, durante 3 s, 持续3秒, 3 s long"],
    ["at 10:30 pm, 14:00 Uhr, 16:9, 1:75, 99:99:99, 192.168.1.1:8080"],
    ["40 tokens/s, 3 s/frame, 5 strips, v1.2 s3, 3-second, x12 s"],
    ["from 7 to 3 s, 5 s a 3 s", "3 s = 3", "5 s = 5", "3 s = 3"],
    ["3 to 01:10", "01:10 = 70"],
  ])
    test(text, () => assert.deepEqual(found(text), wanted));

  // With the square of its length it would take hours.
  test("are found in a text of any length", { timeout: 60_000 }, () => {
    for (const piece of ["1:", "1 ", "1:11 - ", "<1", "between 1 ", "9", "1 min ", "1\t\t\t"])
      assert.deepEqual(findTimes(piece.repeat(20_000)).slice(1, 1), []);
    assert.equal(findTimes(". 1 s ".repeat(20_000)).length, 20_000);
  });
});

suite("of several videos", () => {
  const names = ["park.mp4", "beach.mov"];
  const at = (/** @type {string} */ text) => meantAt(text, text.indexOf("3 s"), names);

  test("the one is meant that its sentence names", () => {
    assert.equal(at("In park.mp4 a dog runs at 3 s."), 0);
    assert.equal(at("At 3 s in the first video a dog runs. The second clip is empty."), 0);
    assert.equal(at("Video 1 is dark. In video 2 a dog runs at 3 s."), 1);
    assert.equal(at("Im zweiten Clip bei 3 s, im ersten nie."), 1);
    assert.equal(at("第一个视频里有一只狗，3 s"), 0);
  });

  test("else the one that was named last, else the last one", () => {
    assert.equal(at("In the first clip:\n- at 3 s a dog"), 0);
    assert.equal(at("At 3 s a dog runs."), 1);
    assert.equal(meantAt("at 3 s", 3, ["park.mp4"]), 0);
  });
});

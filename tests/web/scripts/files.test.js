import assert from "node:assert/strict";
import { test } from "node:test";
import { previewKind } from "../../../assets/web/chat/preview.js";
import { codeFileName, csvOf, tableFileName } from "../../../assets/web/common/files.js";

test("code is called as its first comment says, else by its first words", () => {
  /** @type {[string, string, string][]} */
  const cases = [
    ["py", "# src/shapes/count.py\nprint(1)", "count.py"],
    ["ts", "// File: app.module.ts\nexport {}", "app.module.ts"],
    ["html", "<!-- index.html -->\n<p>", "index.html"],
    ["py", "# Counts the red shapes of a picture, fast\n", "counts-the-red-shapes-of.py"],
    ["py", "import numpy as np\n", "import-numpy-as-np.py"],
    ["js", "#!/usr/bin/env node\n/* Größe messen */", "größe-messen.js"],
    ["html", "<!DOCTYPE html>\n<title>Red dots</title>", "title-red-dots-title.html"],
    ["cpp", "\n\nint main() {}", "int-main.cpp"],
    // A name that isn't in a comment is a word of the code.
    ["sh", "notes.txt\n", "notes-txt.sh"],
    ["dockerfile", "FROM python", "Dockerfile"],
    ["txt", "", "code.txt"],
    ["rs", "// ../../../etc/passwd.rs", "passwd.rs"],
    ["sql", "-- con", "code.sql"],
    ["txt", "日本語 の コード", "日本語-の-コード.txt"],
  ];
  for (const [language, code, name] of cases) assert.equal(codeFileName(language, code), name);
});

test("a table is CSV by RFC 4180", () => {
  const rows = [
    ["shape", "how, many"],
    ['the "red" one', "two\nlines"],
  ];
  assert.equal(csvOf(rows), 'shape,"how, many"\r\n"the ""red"" one","two\nlines"\r\n');
  assert.equal(tableFileName(rows), "shape-how-many.csv");
  assert.equal(tableFileName([]), "table.csv");
});

test("no cell is run by a spreadsheet, and numbers stay numbers", () => {
  const formulas = ["=1+1", "+A1", "-cmd()", "@SUM(A1)", "=HYPERLINK(1)", "\t=1", "--1", "-5+A1", "+"];
  for (const cell of formulas)
    assert.ok(
      csvOf([[cell]])
        .replace('"', "")
        .startsWith(`'${cell[0]}`),
      cell,
    );
  const numbers = ["-5", "+3.2e8", "-1,234.5 %", "- 7", "-.5", "a=b", ""];
  for (const cell of numbers) assert.ok(!csvOf([[cell]]).includes("'"), cell);
});

test("what can be drawn has a preview", () => {
  assert.equal(previewKind("HTML", "<p>"), "html");
  assert.equal(previewKind("mermaid", "graph TD"), "mermaid");
  assert.equal(previewKind("xml", '<?xml version="1.0"?>\n<svg width="1"/>'), "svg");
  assert.equal(previewKind("xml", "<feed/>"), undefined);
  assert.equal(previewKind("python", "<svg>"), undefined);
});

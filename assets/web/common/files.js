// Parts of an answer as files: what code and tables are called, and a table as CSV.

import { h } from "./dom.js";

// Files of a fixed name.
const NAMED = new Map([
  ["dockerfile", "Dockerfile"],
  ["makefile", "Makefile"],
]);
const NUM_WORDS = 5;
const MAX_NAME = 40;
// What a comment begins or ends with, and what stands before everything else in some files.
const MARKS =
  /^\s*(?:#!.*|<!--|<\?(?:php|xml.*\?>)?|<!doctype html>|\/\*+|\/\/+|[#%;*]+|--+|"""|''')|(?:-->|\*\/)\s*$/giu;
// Names that Windows keeps for itself.
const TAKEN = /^(?:con|prn|aux|nul|com\d|lpt\d)$/i;

/** The words of a text as the name of a file, or `otherwise` where there are none. */
function nameOf(/** @type {string} */ text, /** @type {string} */ otherwise) {
  const words = text.match(/[\p{L}\p{N}]+/gu) ?? [];
  const name = [...words.slice(0, NUM_WORDS).join("-").toLowerCase()].slice(0, MAX_NAME).join("").replace(/-$/, "");
  return name && !TAKEN.test(name) ? name : otherwise;
}

/**
 * What a block of code is called: as its first comment says where that names a file, else by its first words.
 * @param {string} end how files of its language end
 * @param {string} code
 */
export function codeFileName(end, code) {
  const first = code.split("\n").map((line) => line.replace(MARKS, "").trim());
  const line = first.find((each) => /[\p{L}\p{N}]/u.test(each)) ?? "";
  const given = line.match(/^(?:file(?:name)?:\s*)?(?:[\w.-]+\/)*(\w[\w.-]{0,60}\.[a-z]\w{0,9})$/i)?.[1];
  const isComment = given && !code.trimStart().startsWith(line);
  return isComment ? given : (NAMED.get(end) ?? `${nameOf(line, "code")}.${end}`);
}

/** What a table is called, by the words of its head. */
export const tableFileName = (/** @type {string[][]} */ rows) => `${nameOf(rows[0]?.join(" ") ?? "", "table")}.csv`;

/** What a table says, row by row. @returns {string[][]} */
export const cellsOf = (/** @type {HTMLTableElement} */ table) =>
  [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent?.trim() ?? ""));

/** Rows as CSV by RFC 4180, with no cell that a spreadsheet would run. */
export const csvOf = (/** @type {string[][]} */ rows) =>
  rows.map((row) => `${row.map((cell) => quoted(harmless(cell))).join(",")}\r\n`).join("");

const quoted = (/** @type {string} */ cell) => (/[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);

/** A formula becomes a text; "-5", "+3.2e8" and "-1,234.5 %" are numbers and stay. */
const harmless = (/** @type {string} */ cell) =>
  /^[=+\-@\t\r]/.test(cell) && !/^[+-]?[\d., {2}]*\d(?:e[+-]?\d+)?\s*%?$/i.test(cell) ? `'${cell}` : cell;

/** Has the browser save a text, or what has a type already. */
export function save(/** @type {string} */ name, /** @type {string | Blob} */ content, type = "text/plain") {
  const blob = content instanceof Blob ? content : new Blob([content], { type: `${type};charset=utf-8` });
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name }).click();
  // Some browsers read it only later.
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

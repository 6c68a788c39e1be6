// What the page of `qwen35mm review` and the program tell each other: see qwen35mm/review/app.py.

import type { Said } from "../common/types.d.ts";

/** A picture or a clip with its caption. */
export interface Item {
  number: number;
  name: string;
  kind: "image" | "video";
  /** Of the file; empty where it is gone. */
  version: string;
  /** The name of the caption's file. */
  file: string;
  text: string;
  /** Of the caption; empty where there is none. */
  digest: string;
  problem: Said | null;
  accepted: boolean;
  flags: string[];
  prompt: string | null;
  model: string | null;
}

export interface Counts {
  all: number;
  accepted: number;
  changes: number;
}

export interface Search {
  words: string;
  show: "all" | "open" | "accepted" | "empty" | "similar";
  flag: string;
  min_chars: number | null;
  max_chars: number | null;
}

export interface Found {
  numbers: number[];
  flags: Record<string, number>;
  unread: number;
  counts: Counts;
}

export interface Looked {
  /** What a person calls what is gone through. */
  title: string;
  numbers: number[];
  counts: Counts;
  presets: string[];
}

export interface Changed {
  item: Item;
  counts: Counts;
}

/** An edit of all selected captions. */
export interface BulkEdit {
  action: "replace" | "add" | "remove" | "sort" | "deduplicate";
  find: string;
  by: string;
  tags: string;
  regex: boolean;
  ignore_case: boolean;
  words: boolean;
  last: boolean;
}

export interface Planned {
  plan: number;
  /** How many captions change. */
  num: number;
  /** Sentences, where the edit is for tags. */
  others: number;
  /** The first ones; each part is what both texts have, what only the old one has, and what only the new one has. */
  shown: { name: string; parts: [string, string, string][] }[];
}

export interface ManyChanged {
  num: number;
  /** Names, and why they couldn't be changed. */
  refused: [string, Said][];
  counts: Counts;
}

/** Of the captions in the list. */
export interface Statistics {
  captions: number;
  median: number;
  /** Lengths; `over` is more than the trainer reads. */
  bars: { low: number; high: number; num: number; over: boolean }[];
  /** Whether tags are counted, not words. */
  tags: boolean;
  /** In how many captions they are counted. */
  counted: number;
  /** The most frequent ones, and in how many captions each is. */
  counts: [string, number][];
  trainers: string[];
}

/** The model's other caption; `error` in place of one. */
export interface Proposal {
  text: string;
  flags: string[];
}

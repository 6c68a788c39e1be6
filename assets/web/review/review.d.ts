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

/** A training: see qwen35mm/review/training.py. */
export interface TrainingAnswer {
  state: "none" | "loading" | "training" | "done" | "stopped" | "failed";
  command: string;
  /** The folder that it makes. */
  adapter: string;
  /** Whether it can learn from accepted captions alone. */
  chooses: boolean;
  /** Whether it does, or did. */
  accepted: boolean;
  step?: number;
  steps?: number;
  seconds_left?: number;
  /** Held-out losses of a training that ended. */
  before?: number;
  after?: number;
  losses: { step: number; loss: number | null; is_best: boolean }[];
  /** To held-out captions, by the model alone and now. */
  answers: { name: string; before: string; answer: string; wanted: string }[];
  /** The last lines. */
  said: string[];
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
  /** Of the change, to undo it; empty where nothing was to be changed. */
  name: string;
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

/** The least, the median and the largest. */
export type Lengths = [number, number, number];

/** Seconds of a whole run, at least and at most. */
export interface PreviewCost {
  image?: [number, number];
  video?: [number, number];
}

/** A prompt of a preview. */
export interface PreviewColumn {
  title: string;
  prompt: string;
  command: string;
  cost: PreviewCost;
  words: Lengths | null;
  tokens: Lengths | null;
  failed: number;
  /** Captions that the trainer wouldn't take whole. */
  shortened: number;
}

/** A caption, or why there is none. */
export interface PreviewCell {
  failed?: Said;
  text: string;
  flags: string[];
  seconds: number;
  words: number;
  tokens: number | null;
}

export interface PreviewRow {
  number: number;
  name: string;
  kind: "image" | "video";
  /** Of a video's part, its start and its end in seconds. */
  part: [number, number] | null;
  failed: Said | null;
  /** null where it is still to come. */
  cells: (PreviewCell | null)[];
}

/** A preview of a run: see qwen35mm/review/preview.py. */
export interface PreviewAnswer {
  title: string;
  state: "looking" | "loading" | "asking" | "done" | "stopped";
  /** Counts changes of the rows. */
  clock: number;
  version: string;
  /** How many media there will be, and how many are over. */
  asked: number;
  over: number;
  /** How many media the run has, at least and at most. */
  num: { image?: [number, number]; video?: [number, number] };
  tried: { image?: number; video?: number };
  /** How many entries of the sources can't be read, and the first of them. */
  unreadable: number;
  named: [string, Said][];
  failed: number;
  /** Options that change the time in a way that isn't known. */
  not_counted: string[];
  most_tokens: number | null;
  columns: PreviewColumn[];
  together: { command: string; cost: PreviewCost } | null;
  /** Those that changed. */
  rows: PreviewRow[];
}

// What is told of models. Only for tsc.

import type { Said, Work } from "../common/said.d.ts";

export interface Model {
  name: string;
  source: string;
  size: Said;
  /** Why it can't be used, or not with the settings that there are. */
  reason: Said | null;
  /** Whether its files are such that it can be. */
  usable: boolean;
  current: boolean;
  is_demo: boolean;
  /** Whether it answers at once. */
  is_loaded: boolean;
  /** Whether the program has it in hand: it needs no plan, and stops no answers. */
  is_offered: boolean;
  /** Whether it has to be loaded, and others have to leave for it. */
  displaces: boolean;
}

/** A model that can be downloaded. */
export interface Download {
  source: string;
  size: Said;
  fit: Said;
}

/** The real model to offer beside the practice model. */
export interface Suggestion extends Download {
  name: string;
  /** Whether it is downloaded first. */
  is_new: boolean;
}

/** A model behind a server. */
export interface Server {
  id: string;
  name: string;
  host: string;
  has_key: boolean;
  current: boolean;
  /** Not the one that the program was started with. */
  kept: boolean;
}

/** Where a server's model runs, and what it can't do; null is what isn't known before it is tried. */
export interface ServerInfo {
  host: string;
  notes: Said[];
  continues: boolean | null;
  images: boolean | null;
}

export interface ModelsFound {
  models: Model[];
  servers: Server[];
  /** Why their file can't be read. */
  servers_problem: Said | null;
  downloads: Download[];
}

/** A value of a setting. */
export interface Choice {
  value: string;
  label: Said;
  chosen: boolean;
}

/** What a change would take, in bytes and tokens. */
export interface PlanFound {
  /** How much of it is still to download; null where it is on this machine. */
  download: Said | null;
  parts: Record<"weights" | "kv" | "states" | "work" | "program" | "kept", number>;
  /** What there is. */
  memory: number;
  fits: boolean;
  /** The models that are unloaded for it. */
  leaving: Pick<Model, "name" | "is_demo">[];
  slots: number;
  context_length: number;
  /** Of what fits; null where nothing does. */
  largest_context: number | null;
  /** The most tokens of a context, whatever the memory. */
  num_positions: number;
  /** None of a setting that can't be chosen. */
  weights: Choice[];
  kv_types: Choice[];
  kv_keeps: Choice[];
  /** What would fit. */
  suggestion: { label: Said; context_length: number; weights: string; kv_dtype: string } | null;
}

export interface ModelChange {
  source?: string;
  context_length?: number;
  weights?: string;
  kv_dtype?: string;
  kv_keep?: string;
  is_new?: boolean;
  server?: string;
}

export interface ChangeState extends Work {
  busy: boolean;
  is_download: boolean;
  /** For answers of the models that have to leave. */
  is_waiting: boolean;
  /** Whether the person left that wait: nothing changed. */
  is_cancelled: boolean;
  /** How much of a download is here, its speed, and the time left. */
  detail: Said;
  error: Said | null;
}

// What is told of models. Only for tsc.

import type { Said, Work } from "./types.d.ts";

export interface Model {
  name: string;
  source: string;
  size: Said;
  /** Why it can't be used. */
  reason: Said | null;
  current: boolean;
  is_demo: boolean;
}

/** A model that can be downloaded. */
export interface Download {
  source: string;
  size: Said;
  fit: Said;
  /** Whether the machine's memory holds it. */
  fits: boolean;
  /** The one that is worth it here. */
  suggested: boolean;
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

/** Where a server's model answers, and what it can't do; null is what nobody knows before it was tried. */
export interface ServerInfo {
  host: string;
  notes: Said[];
  thinking: boolean | null;
  continues: boolean | null;
}

export interface ModelsFound {
  models: Model[];
  servers: Server[];
  /** Why their file can't be read. */
  servers_problem: Said | null;
  downloads: Download[];
  formats: Format[];
}

/** A format that the current model's weights can be taken in. */
export interface Format {
  weights: string;
  label: Said;
  chosen: boolean;
}

export interface ModelChange {
  source?: string;
  context_length?: number;
  weights?: string;
  is_new?: boolean;
  server?: string;
}

export interface ChangeState extends Work {
  busy: boolean;
  error: Said | null;
}

// What the program and the page tell each other (qwen35mm/web says it in Python). Only for tsc.

import type { ChangeState, ModelChange, ModelsFound, PlanFound, ServerInfo, Suggestion } from "../model/library.d.ts";
import type { Said, Work } from "./said.d.ts";

export type Kind = "image" | "video" | "text";

export interface Attachment {
  digest: string;
  kind: Kind;
  name: string;
  num_bytes: number;
  /** Of a text, what it begins with can be shown as. */
  form?: "table" | "code" | null;
  /** Height and width of a picture. */
  size?: [number, number] | null;
  /** Of a video. */
  duration_s?: number | null;
  num_frames?: number | null;
  clip?: Clip | null;
  crop_of?: Crop | null;
}

/** What is taken of a video; null is its end, and as many frames as the settings say. */
export interface Clip {
  start_s: number;
  end_s: number | null;
  num_frames: number | null;
  drop_similar: boolean;
}

/** Where a picture was cut out: see qwen35mm/chat/store/store/records.py. */
export interface Crop {
  digest: string;
  name: string;
  box: [number, number, number, number];
  size: [number, number];
  time_s: number | null;
}

/** The frames of a video that the model is shown, and those that are left out since they show the same. */
export interface Strip {
  frames: { time_s: number; is_same: boolean; is_kept: boolean; picture: string }[];
  duration_s: number;
  size: [number, number];
  /** The most that can be chosen. */
  most: number;
}

/** A range of a long video; `picture` is a data: URI. */
export interface Chapter {
  start_s: number;
  end_s: number;
  picture: string;
}

/** A file that was taken in; of a PDF as text, `pdf` is the file itself, of a drawing as a picture `svg`. */
export interface Taken extends Attachment {
  pdf?: string;
  svg?: string;
  /** Of a text; `raw` is the file itself, which may be in another one. */
  encoding?: string;
  raw?: string | null;
}

export type Status = "running" | "finished" | "length" | "stopped" | "interrupted" | "failed";

/** Numbers as the answer has them; see qwen35mm/chat/media/grounding.py. */
export interface Mark {
  label: string;
  /** Left, top, right and bottom. */
  box: [number, number, number, number] | null;
  /** x and y. */
  point: [number, number] | null;
  details: [string, string][];
}

export type Unit = "thousandth" | "whole" | "shown pixel" | "pixel";

/** What an answer points at on one picture, or one frame of a video. */
export interface Grounding {
  digest: string;
  kind: Kind;
  name: string;
  time_s: number | null;
  /** Height and width of the file, and as the model was shown it. */
  size: [number, number] | null;
  shown_size: [number, number] | null;
  /** What one of the numbers most likely is. */
  unit: Unit;
  marks: Mark[];
}

/** What there is to see of an answer, in progress or not; `blocks` and `reasoning` are safe HTML. */
export interface AnswerView {
  id: string;
  status: Status;
  blocks: string[];
  reasoning: string[];
  thinking_s: number | null;
  error: Said | null;
  notes: Said[];
  groundings: Grounding[];
  stats: [Said, Said][] | null;
  calls: ToolCall[];
  /** Why the person is asked, by the calls that they are asked for. */
  asks?: Record<string, string>;
  work?: Work | null;
  unsaved?: Said | null;
}

/** A call of a tool; `arguments` are all of them, as JSON. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export type CallAnswer = "once" | "always" | "no";

/** What is new of an answer in progress, or of one that just ended. */
export interface News extends AnswerView {
  conversation: string;
  too_long: boolean;
  /** Of the calls before it. */
  num_results: number;
}

interface Node {
  id: string;
  parent: string | null;
  text: string;
  /** Whether the prompt holds it. */
  kept: boolean;
  branch: { at: number; of: number; previous: string | null; next: string | null };
}

export interface Question extends Node {
  role: "user";
  status: Status;
  /** Whether nothing follows it on this branch: its answer was deleted. */
  unanswered: boolean;
  /** The oldest messages that its own prompt didn't hold. */
  left_out: number;
  attachments: Attachment[];
}

export interface Answer extends Node, AnswerView {
  role: "assistant";
  model: string | null;
  /** Whether a person has changed its words. */
  edited: boolean;
  /** All settings that it was made with; null where they aren't known. */
  settings: Settings | null;
}

/** What a call gave; `name` is the tool's. */
export interface ToolResult extends Node {
  role: "tool";
  status: Status;
  /** Whether nothing follows it on this branch: the answer to it was deleted. */
  unanswered: boolean;
  attachments: Attachment[];
  name: string;
}

export type Message = Question | Answer | ToolResult;

/** `runs` is a command or an address, `text` the person's own servers; null where they can name none. */
export interface ToolServers {
  servers: { name: string; runs: string }[];
  /** The tools that run without asking. */
  allowed: string[];
  text: string | null;
}

/** The values that differ from the defaults. */
export type Settings = Record<string, number | string | boolean | null>;

export interface Chat {
  /** None before the first message is sent. */
  id: string | null;
  title: string;
  settings: Settings;
  messages: Message[];
  /** The answers that are in progress. */
  running: string[];
  context: { used: number; length: number } | null;
  temporary?: boolean;
}

export interface ChatLine {
  id: string;
  title: string;
  /** When a message was last added, changed or deleted, since the epoch. */
  updated_s: number;
  pinned: boolean;
  /** Whether an answer is in progress. */
  running: boolean;
  /** Whether an answer has ended since it was last looked at. */
  unseen: boolean;
  /** Of one that was searched for: the message with the hit. */
  node?: string | null;
  /** That message's text around the hit, in pieces, each with whether it is one. */
  snippet?: [string, boolean][];
}

export interface Listing {
  conversations: ChatLine[];
  more: boolean;
  /** Whether the model may soon have another title for one. */
  titling?: boolean;
}

export type Offer = { label: Said } & (
  | { kind: "media"; settings: Settings }
  | { kind: "shorten"; first: string | null }
  | { kind: "context"; context_length: number }
  | { kind: "summary" }
);

export interface MediumCost {
  digest: string;
  label: Said;
  notes: Said[];
  error: Said | null;
  num_tokens?: number;
  /** Between two frames that the model sees of a video. */
  step_s?: number | null;
}

export interface Cost {
  media: MediumCost[];
  /** `reserve` are kept for an answer; where they aren't `exact`, they are estimates. */
  tokens: { history: number; all: number; context: number; reserve: number; exact: boolean };
  fits: boolean;
  offers: Offer[];
}

/** A message to be sent, or to be measured. */
export interface Outgoing {
  /** Sent again with the same id, it is there once. */
  id?: string;
  conversation: string | null;
  parent: string | null;
  /** Whether it goes to the end of the branch that has grown below its parent. */
  at_end?: boolean;
  /** Null are the conversation's. */
  settings: Settings | null;
  text: string;
  attachments: Attachment[];
  once?: Once;
  temporary?: boolean;
  /** That the page shows. */
  model?: string;
}

/** What holds for one message alone: limits of its media, and the oldest message that its prompt holds. */
export interface Once {
  limits: Settings;
  first: string | null;
}

export interface Field {
  group: string;
  low: number;
  high: number;
  step: number;
  label: Said;
  hint: Said | null;
}

export interface Switch {
  label: Said;
  hint: Said;
  values: { value: boolean | string; label: Said }[];
}

export interface Fields {
  fields: Record<string, Field>;
  /** Of the model's chat template. */
  switches: Record<string, Switch>;
  /** Whether thinking can be turned on and off. */
  thinking: boolean;
  /** Names of those that a chat may choose. */
  adapters: string[];
  defaults: Settings;
}

export interface Example {
  text: string;
  kind: Kind;
  url: string;
  poster: string;
}

export interface App {
  model: string;
  is_demo: boolean;
  context_length: number;
  /** Tokens of it that are kept for an answer. */
  answer_reserve: number;
  /** Names of those that a text can be read in. */
  encodings: string[];
  settings: Fields;
  /** Whether the model can write titles. */
  titles: boolean;
  /** Whether web addresses are read where a person doesn't say; null where they never are. */
  web: boolean | null;
  /** Whether another model can be chosen. */
  models: boolean;
  /** Whether the program was started with several: then a chat goes on with its own. */
  has_several: boolean;
  /** The real model to offer beside the practice model; null where there is none to offer. */
  suggestion: Suggestion | null;
  /** What is being loaded or downloaded; null where no other model can be chosen. */
  change: ChangeState | null;
  /** What the model in the program runs with. */
  taken: Said | null;
  /** Null where the model is in the program itself. */
  server: ServerInfo | null;
  examples: Example[];
  /** The address for Gradio's clients, from the page's own; null where none are answered. */
  client: string | null;
  /** Whether the stream of answers goes through Gradio's queue. */
  through_gradio: boolean;
  /** What other devices reach the page by, and its QR code's address; null where they can't. */
  network: { url: string; qr: string } | null;
}

export interface Preferences {
  language?: string;
  colours?: string;
  /** Whether the model writes titles; it does unless this is false. */
  titles?: boolean;
  /** Whether a link in a message can be read. */
  read_web?: boolean;
  settings?: Settings;
}

export type Presets = Record<string, Settings>;

/** Who is logged in; a guest has no name. */
export interface Account {
  name: string | null;
  can_change: boolean;
}

export interface Start extends Listing {
  app: App;
  /** Null where there is no login. */
  account: Account | null;
  preferences: Preferences;
  presets: Presets;
  running: string[];
  /** The tool servers that a chat may use. */
  tools: string[];
}

/** A conversation after a change, and the answer that began with it. */
export interface Changed {
  chat: Chat;
  reply: string | null;
}

type OfChat = { conversation: string | null };
type OfNode = OfChat & { node: string };

/** `box` are shares of the upright source's sides: left, top, right, bottom. */
export interface CropArguments {
  digest: string;
  source: string;
  name: string;
  box: number[];
  time_s?: number | null;
  temporary?: boolean;
}

/** What the page can ask for: qwen35mm/web/serving/api.py. */
export interface Methods {
  start(args: object): Start;
  /** What opens an archive once. */
  download(args: object): { code: string };
  list(args: { query: string; limit?: number; after?: Pick<ChatLine, "id" | "pinned" | "updated_s"> }): Listing;
  open(args: OfChat & { node?: string }): Chat;
  send(args: Outgoing): Changed;
  /** `own` are of this answer alone. */
  again(args: OfChat & { node: string | null; settings?: Settings; own?: Settings; model: string }): Changed;
  answers(args: OfNode): { answers: Answer[] };
  continue(args: OfNode & { settings: Settings; model: string }): Changed;
  branch(args: OfNode): Changed;
  delete_message(args: OfNode): Changed;
  edit_answer(args: OfNode & { text: string }): Changed;
  shorten(args: OfChat & { first: string | null }): Changed;
  run_calls(args: OfNode & { answers: Record<string, CallAnswer> }): Changed;
  tool_servers(args: object): ToolServers;
  save_tool_servers(args: { text: string }): ToolServers;
  forget_tool(args: { tool: string }): object;
  summarise(args: OfChat & { title: string }): Changed;
  measure(args: Outgoing): Cost;
  strip(args: Outgoing): Strip;
  chapters(args: Outgoing): { chapters: Chapter[] };
  shown_strip(args: OfNode & { at: number }): Strip;
  example(args: { number: number; temporary?: boolean }): { attachment: Attachment };
  crop(args: CropArguments): { attachment: Attachment };
  stop(args: { node: string }): object;
  rename(args: OfChat & { title: string }): object;
  pin(args: OfChat & { pinned: boolean }): object;
  delete(args: OfChat): object;
  restore(args: OfChat): object;
  end_temporary(args: OfChat): object;
  settings(args: OfChat & { settings: Settings }): object;
  preferences(args: { preferences: Preferences }): object;
  save_preset(args: { name: string; settings: Settings }): { presets: Presets };
  delete_preset(args: { name: string }): { presets: Presets };
  models(args: object): ModelsFound;
  plan(args: ModelChange): PlanFound;
  change_model(args: ModelChange): ChangeState;
  change_state(args: object): ChangeState;
  cancel_change(args: object): object;
  add_server(args: { address: string; key: string | null; model: string | null }): {
    names: string[];
    server: string | null;
  };
  remove_server(args: { server: string }): object;
  mermaid(args: object): { script: string };
  preview(args: { digest: string; name: string }): { rows: string[][] | null; html: string | null; more: boolean };
  memory(args: Partial<OfChat>): { words: Said; share: number };
}

export type Name = keyof Methods;
export type Arguments<N extends Name> = Parameters<Methods[N]>[0];
export type Reply<N extends Name> = ReturnType<Methods[N]>;
/** Rejected with a Problem, also where the signal ends it. */
export type Post = <N extends Name>(name: N, args: Arguments<N>, signal?: AbortSignal) => Promise<Reply<N>>;

/** Methods that change the conversation that is shown. */
export type Change =
  | "again"
  | "continue"
  | "branch"
  | "delete_message"
  | "shorten"
  | "summarise"
  | "edit_answer"
  | "run_calls";

export interface Upload {
  promise: Promise<{ attachments: Taken[]; note?: Said | null }>;
  cancel(): void;
}

/** "bad" is an error. */
export type Tone = "bad" | "note" | "good";

export type {
  ChangeState,
  Choice,
  Download,
  Model,
  ModelChange,
  ModelsFound,
  PlanFound,
  Suggestion,
} from "../model/library.d.ts";
export type { Attributes, Child, ElementOf } from "./elements.d.ts";
export type { Said, Work } from "./said.d.ts";
